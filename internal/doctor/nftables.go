package doctor

import (
	"context"
	"fmt"
	"strings"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/egress"
)

// plainNftables is the check "nftables". It finds firewalls that are written for nft(8)
// alone: iptables does not show them, and a packet must pass them, too.
var plainNftables = check{
	name: "nftables", protects: "what sandboxes are allowed to reach, and their DNS", root: true,
	run: func(_ context.Context, h *host) Finding {
		all, err := egress.Barriers(h.cfg.Instance, h.cfg.Network.Pool)
		if err != nil {
			return skipped("%v", err)
		}
		return barred(all, h.cfg.Instance, h.runs("firewalld"))
	},
}

// barred reports the barriers. It leaves those of a running firewalld to the check
// firewalld.
func barred(all []egress.Barrier, i instance.Instance, firewalld bool) Finding {
	var details, mend []string
	for _, b := range all {
		if firewalld && b.Table == "firewalld" {
			continue
		}
		what := "what sandboxes are allowed to reach"
		if b.Hook == "input" {
			what = "the queries of sandboxes to the resolver, so they resolve no names"
		}
		details = append(details, fmt.Sprintf("%s, by %s, drops %s", b.Name(), b.By, what))
		mend = append(mend, admit(b, i)...)
	}
	if mend == nil {
		return ok("no nf_tables firewall drops what sandboxes are allowed to send")
	}
	return warn(strings.Join(mend, " && ")+" # and change the file that these rules come from, such as /etc/nftables.conf",
		"%s", strings.Join(details, "; "))
}

// admit returns the commands that open a barrier for sandboxes: packets to elsewhere
// pass, and sandboxd's own chains decide about them; queries to the resolver and
// replies pass. The barrier still discards everything else that sandboxes send to this
// host.
func admit(b egress.Barrier, i instance.Instance) (commands []string) {
	link := "'" + i.LinkPrefix() + "*'"
	rules := []string{"iifname " + link + " accept", "oifname " + link + " ct state established,related accept"}
	if b.Hook == "input" {
		port := fmt.Sprint(egress.ResolverPort)
		rules = []string{
			"iifname " + link + " udp dport " + port + " accept", "iifname " + link + " tcp dport " + port + " accept",
			"iifname " + link + " ct state established,related accept",
		}
	}
	for _, r := range rules {
		commands = append(commands, "nft insert rule "+b.Name()+" "+r)
	}
	return commands
}
