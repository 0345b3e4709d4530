package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/egress"
)

// firewalld is the check of that name. A packet that iptables accepts must still pass
// firewalld's own tables (docs.fedoraproject.org, f32 release notes, "Security"). So
// firewalld needs a zone whose members may reach the resolver and nothing else of this
// host, and a policy that lets that zone out. sandboxd's own chains then decide what
// sandboxes may reach. A zone like "trusted" would also work, but it would open every
// port of this host to all senders with an address of the pool.
var firewalld = check{
	name: "firewalld", protects: "what sandboxes are allowed to reach", root: true,
	run: func(ctx context.Context, h *host) Finding {
		if !h.runs("firewalld") {
			return ok("firewalld does not run")
		}
		pool := h.cfg.Network.Pool.String()
		// A policy must not have the name of a zone, and neither name may be longer than
		// 17 characters (firewalld.zone(5), firewalld.policy(5)).
		zone := "sandboxd-" + h.cfg.Instance.String()
		policy := zone + "-out"
		ports := []string{fmt.Sprintf("%d/tcp", egress.ResolverPort), fmt.Sprintf("%d/udp", egress.ResolverPort)}
		z, p := h.firewalldInfo(ctx, "zone", zone), h.firewalldInfo(ctx, "policy", policy)
		if slices.Contains(z["sources"], pool) && slices.Contains(z["ports"], ports[0]) && slices.Contains(z["ports"], ports[1]) &&
			slices.Contains(p["ingress-zones"], zone) && slices.Contains(p["egress-zones"], "ANY") &&
			slices.Contains(p["target"], "ACCEPT") {
			return ok("firewalld accepts what sandboxd allows (zone %s, policy %s)", zone, policy)
		}
		mend := h.firewalldMend(ctx, zone, policy, pool, ports)
		if h.command(ctx, "firewall-cmd", "--zone=trusted", "--query-source="+pool) == nil {
			return warn(mend, "firewalld trusts %s: packets from these addresses reach every listening port of this host", pool)
		}
		return warn(mend, "firewalld rejects what sandboxes are allowed to send: it has no zone for %s", pool)
	},
}

// firewalldMend is one line of commands, because firewall-cmd 1.3 takes one kind of
// option at a time. Adding what already exists is no error, except for a zone and a
// policy. change-source also removes the pool from another zone.
func (h *host) firewalldMend(ctx context.Context, zone, policy, pool string, ports []string) string {
	var lines []string
	add := func(args string) { lines = append(lines, "firewall-cmd "+args) }
	if !h.firewalldHas(ctx, "zone", zone) {
		add("--permanent --new-zone=" + zone)
	}
	add("--permanent --zone=" + zone + " --change-source=" + pool)
	add("--permanent --zone=" + zone + " --add-port=" + strings.Join(ports, " --add-port="))
	if !h.firewalldHas(ctx, "policy", policy) {
		add("--permanent --new-policy=" + policy)
	}
	add("--permanent --policy=" + policy + " --add-ingress-zone=" + zone)
	add("--permanent --policy=" + policy + " --add-egress-zone=ANY")
	add("--permanent --policy=" + policy + " --set-target=ACCEPT")
	add("--reload")
	return strings.Join(lines, " && ")
}

func (h *host) firewalldHas(ctx context.Context, kind, name string) bool {
	return h.command(ctx, "firewall-cmd", "--permanent", "--info-"+kind+"="+name) == nil
}

// firewalldInfo reads the "name: words" lines of a zone or policy in force; nil if there
// is none.
func (h *host) firewalldInfo(ctx context.Context, kind, name string) map[string][]string {
	out, err := h.output(ctx, "firewall-cmd", "--info-"+kind+"="+name)
	if err != nil {
		return nil
	}
	info := map[string][]string{}
	for line := range strings.Lines(out) {
		if key, words, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			info[key] = strings.Fields(words)
		}
	}
	return info
}
