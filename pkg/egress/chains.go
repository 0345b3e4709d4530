package egress

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-iptables/iptables"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/internal/weak"
)

// The marks of a verdict. sandboxd uses three bits; it leaves the rest of a packet's
// mark to other programs. No policy has allowed a flow to the resolver or the proxy, so
// their marks open nothing but these, also while another program has removed the rules that
// redirect it.
const (
	markAllow   = 0x1000000
	markDeny    = 0x2000000
	markResolve = 0x4000000
	markProxy   = 0x5000000
	markMask    = 0x7000000
)

// ResolverPort is where the resolver listens, on the gateway, for UDP and TCP.
const ResolverPort = 15353

// xtablesWait is how many seconds to wait for the lock of iptables.
const xtablesWait = 5

// rulesOf is a rule set as text: table, chain, rules as iptables -S prints
// them, without "-A CHAIN".
type rulesOf map[string]map[string][]string

// tables in the order in which a packet passes them. They are filled and hooked in this
// order, too: filter drops what has no mark yet.
var tables = []string{"raw", "mangle", "nat", "filter"}

// wanted returns the chains, and the jumps to them from the built-in chains.
//
// Chains exist in two generations. New chains are complete before they are hooked in,
// and the old ones are unhooked after that, because iptables cannot replace a chain at
// once. All text is in the normal form of iptables -S, so that it can be compared with
// the kernel's rules.
func wanted(i instance.Instance, pool netip.Prefix, gateway netip.Addr, generation int) (chains, hooks rulesOf) {
	suffix := ""
	if generation > 0 {
		suffix = "-B"
	}
	r := strings.NewReplacer(
		"LINKS", i.LinkMatch(), // this instance's
		"SRC", i.Set("src"),
		"NUMBER", fmt.Sprint(i.Queue()),
		"BUSY", fmt.Sprint(i.BusyQueue()),
		"GATEWAY", gateway.String(),
		"POOL", pool.Masked().String(),
		"TAG", tag(i),
		"ALLOW", fmt.Sprintf("0x%x/0x%x", markAllow, markMask),
		"DENIED", fmt.Sprintf("0x%x/0x%x", markDeny, markMask),
		"RESOLVE", fmt.Sprintf("0x%x/0x%x", markResolve, markMask),
		"PROXIED", fmt.Sprintf("0x%x/0x%x", markProxy, markMask),
		"UNMARKED", fmt.Sprintf("0x0/0x%x", markMask),
		"DNSPORT", fmt.Sprint(ResolverPort),
		"WEBPORT", fmt.Sprint(ProxyPort),
		"@", i.Chain(""), // @RAW is the chain RAW
		"$", suffix,
		"LIMIT", i.Set("limit")+strings.ToLower(suffix), // a hashlimit table: the first rule to name it gives it its limits
	)
	return expand(r, chainText), expand(r, hookText)
}

// tag marks our only rule that does not jump to one of our chains.
func tag(i instance.Instance) string { return i.Set("masquerade") }

func expand(r *strings.Replacer, text string) rulesOf {
	out := rulesOf{}
	table := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
			out[table] = map[string][]string{}
		case line != "":
			if weak.Off(weak.Chains) && table == "filter" {
				line = strings.Replace(line, "-j @DENY$", "-j ACCEPT", 1)
			}
			if weak.Off(weak.Raw) && strings.HasPrefix(line, "-A @RAW$ ") {
				line = strings.Replace(line, "-j DROP", "-j RETURN", 1)
			}
			f := strings.Fields(r.Replace(line)) // -A CHAIN rule
			out[table][f[1]] = append(out[table][f[1]], strings.Join(f[2:], " "))
		}
	}
	return out
}

// chainText holds, as rules, the picture in docs/design/network.md ("What path does a
// packet take?"). NFLOG is for debugging: tcpdump -i nflog:NUMBER. A sandbox that opens
// flows faster than most waits in a queue of its kind, so that others need not. Queries by UDP
// are limited before ESTABLISHED passes: a guest may send all of them by one socket.
const chainText = `
*raw
-A @RAW$ -m set ! --match-set SRC src,src -m limit --limit 10/sec --limit-burst 20 -j NFLOG --nflog-prefix spoof --nflog-group NUMBER
-A @RAW$ -m set ! --match-set SRC src,src -j DROP
-A @RAW$ -m addrtype --dst-type BROADCAST,MULTICAST -j DROP
*mangle
-A @PRE$ -j MARK --set-xmark UNMARKED
-A @PRE$ -p udp -m udp --dport 53 -m hashlimit --hashlimit-above 200/sec --hashlimit-burst 400 --hashlimit-mode srcip --hashlimit-name LIMIT-dns -j DROP
-A @PRE$ -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN
-A @PRE$ -m conntrack --ctstate INVALID -j DROP
-A @PRE$ -p udp -m udp --dport 53 -j @ASK$
-A @PRE$ -d GATEWAY/32 ! -p tcp -j RETURN
-A @PRE$ -d GATEWAY/32 -p tcp -m tcp ! --dport 53 -j RETURN
-A @PRE$ -m hashlimit --hashlimit-above 200/sec --hashlimit-burst 1000 --hashlimit-mode srcip --hashlimit-name LIMIT-new -j MARK --set-xmark DENIED
-A @PRE$ -m mark --mark DENIED -j RETURN
-A @PRE$ -j @ASK$
-A @ASK$ -m hashlimit --hashlimit-upto 100/sec --hashlimit-burst 64 --hashlimit-mode srcip --hashlimit-name LIMIT-few -j NFQUEUE --queue-num NUMBER --queue-bypass
-A @ASK$ -j NFQUEUE --queue-num BUSY --queue-bypass
*nat
-A @NAT$ -p udp -m udp --dport 53 -j DNAT --to-destination GATEWAY:DNSPORT
-A @NAT$ -p tcp -m tcp --dport 53 -j DNAT --to-destination GATEWAY:DNSPORT
-A @NAT$ -p tcp -m mark --mark PROXIED -j DNAT --to-destination GATEWAY:WEBPORT
*filter
-A @DENY$ -m hashlimit --hashlimit-upto 20/sec --hashlimit-burst 50 --hashlimit-mode srcip --hashlimit-name LIMIT-log -j NFLOG --nflog-prefix deny --nflog-group NUMBER
-A @DENY$ -p tcp -j REJECT --reject-with tcp-reset
-A @DENY$ -j REJECT --reject-with icmp-port-unreachable
-A @FORWARD$ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A @FORWARD$ -o sb-+ -j @DENY$
-A @FORWARD$ -d 169.254.0.0/16 -j @DENY$
-A @FORWARD$ -m mark --mark ALLOW -j ACCEPT
-A @FORWARD$ -m mark --mark UNMARKED -j DROP
-A @FORWARD$ -j @DENY$
-A @BACK$ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A @BACK$ -i sb-+ -j @DENY$
-A @BACK$ -j DROP
-A @INPUT$ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A @INPUT$ -d GATEWAY/32 -p udp -m udp --dport DNSPORT -m mark --mark RESOLVE -m conntrack --ctstate DNAT -j ACCEPT
-A @INPUT$ -d GATEWAY/32 -p tcp -m tcp --dport DNSPORT -m mark --mark RESOLVE -m conntrack --ctstate DNAT -j ACCEPT
-A @INPUT$ -d GATEWAY/32 -p tcp -m tcp --dport WEBPORT -m mark --mark PROXIED -m conntrack --ctstate DNAT -j ACCEPT
-A @INPUT$ -j @DENY$
`

// hookText holds the jumps to our chains. They are inserted at the top one by one, so
// the last line of a table ends up first in its chain.
const hookText = `
*raw
-A PREROUTING -i LINKS -j @RAW$
*mangle
-A PREROUTING -i LINKS -j @PRE$
*nat
-A PREROUTING -i LINKS -j @NAT$
-A POSTROUTING -s POOL ! -o sb-+ -m comment --comment TAG -j MASQUERADE
*filter
-A INPUT -i LINKS -j @INPUT$
-A FORWARD ! -i LINKS -o LINKS -j @BACK$
-A FORWARD -i LINKS -j @FORWARD$
`

// chains keeps the chains of an instance in the kernel.
type chains struct {
	inst    instance.Instance
	pool    netip.Prefix
	gateway netip.Addr
	log     *slog.Logger
	v4, v6  *iptables.IPTables // v6 is nil where the host has none
	// restorer is the program iptables-restore.
	restorer string

	foreign sync.Once // the warning about another family of tables

	// installed is what iptables printed right after an install: other versions may
	// print a rule in another form.
	installed rulesOf
	// moves counts how often the hooks were put in front again; moved is the last time.
	moves int
	moved time.Time
}

// maxMoves is the number of moves after which sandboxd stops putting the hooks in
// front, because another program does the same; movesPause is the pause before it
// starts again.
const (
	maxMoves   = 5
	movesPause = time.Hour
)

func newChains(i instance.Instance, pool netip.Prefix, gateway netip.Addr, log *slog.Logger) (*chains, error) {
	c := &chains{inst: i, pool: pool, gateway: gateway, log: log, restorer: "iptables-restore"}
	var err error
	if c.v4, err = iptables.New(iptables.IPFamily(iptables.ProtocolIPv4), iptables.Timeout(xtablesWait)); err != nil {
		return nil, fmt.Errorf("find iptables: %w: install the Debian package iptables", err)
	}
	c.v6, err = iptables.New(iptables.IPFamily(iptables.ProtocolIPv6), iptables.Timeout(xtablesWait))
	if err == nil {
		_, err = c.v6.ListChains("raw")
	}
	if err != nil {
		c.v6 = nil
		log.Warn("ip6tables does not work on this host: the IPv6 of sandboxes is blocked only by disable_ipv6 on their links", "err", err)
	}
	return c, nil
}

// saveLimit is how long iptables-save may take: it needs 3 ms, and some seconds
// on a host with 50,000 rules.
const saveLimit = 15 * time.Second

// save reads all rules at once.
func (c *chains) save(ctx context.Context) (rulesOf, error) {
	stdout, stderr, err := saved(ctx, "iptables-save")
	if err != nil {
		return nil, err
	}
	if strings.Contains(stdout+stderr, "tables present") {
		c.foreign.Do(func() {
			c.log.Info("this host has tables of both iptables-legacy and iptables-nft; `sandboxd doctor` reports whether the other " +
				"tables drop packets that sandboxd accepts")
		})
	}
	return parseSave(stdout), nil
}

// saved is what iptables-save or ip6tables-save prints.
func saved(ctx context.Context, program string) (stdout, stderr string, err error) {
	ctx, cancel := context.WithTimeout(ctx, saveLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program)
	cmd.WaitDelay = time.Second // a child of iptables-save may hold the pipe
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := cmd.Run(); err != nil {
		return "", "", fmt.Errorf("%s: %w: %s", program, cmp.Or(ctx.Err(), err), strings.TrimSpace(complaints.String()))
	}
	return out.String(), complaints.String(), nil
}

func parseSave(text string) rulesOf {
	out := rulesOf{}
	table := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
			out[table] = map[string][]string{}
		case strings.HasPrefix(line, ":"):
			name, _, _ := strings.Cut(line[1:], " ")
			out[table][name] = nil
		case strings.HasPrefix(line, "-A "):
			name, rule, _ := strings.Cut(line[3:], " ")
			out[table][name] = append(out[table][name], strings.Join(strings.Fields(rule), " "))
		}
	}
	return out
}

// ours picks the instance's rules and hooks out of all. A hook keeps its position among
// other programs' rules: behind is the number of rules not made by sandboxd that stand
// before the last hook of a chain.
func (c *chains) ours(all rulesOf) (mine rulesOf, behind int) {
	mine = rulesOf{}
	mark := c.inst.Chain("")
	tagged := "--comment " + tag(c.inst) + " "
	for table, chains := range all {
		mine[table] = map[string][]string{}
		for name, rules := range chains {
			if strings.HasPrefix(name, mark) {
				mine[table][name] = rules
				continue
			}
			foreign := 0
			for _, r := range rules {
				switch {
				case strings.Contains(r, "-j "+mark), strings.Contains(r, tagged):
					mine[table][name] = append(mine[table][name], r)
					behind += foreign
				case !strings.Contains(r, "-j SANDBOXD-") && name != "POSTROUTING":
					foreign++
				}
			}
		}
	}
	return mine, behind
}

// equal compares the instance's rules, including chains without rules.
func equal(a, b rulesOf) bool {
	for _, t := range tables {
		if len(a[t]) != len(b[t]) {
			return false
		}
		for name, rules := range a[t] {
			other, ok := b[t][name]
			if !ok || !slices.Equal(rules, other) {
				return false
			}
		}
	}
	return true
}

// alike compares how many rules each chain has, not their text.
func alike(a, b rulesOf) bool {
	for _, t := range tables {
		if len(a[t]) != len(b[t]) {
			return false
		}
		for name, rules := range a[t] {
			other, ok := b[t][name]
			if !ok || len(rules) != len(other) {
				return false
			}
		}
	}
	return true
}

// merged is all chains and hooks that an instance has of one generation.
func (c *chains) merged(generation int) rulesOf {
	chains, hooks := wanted(c.inst, c.pool, c.gateway, generation)
	for table, h := range hooks {
		for name, rules := range h {
			// Each is inserted at the top, so the last comes first.
			rules = slices.Clone(rules)
			slices.Reverse(rules)
			chains[table][name] = rules
		}
	}
	return chains
}

// standing reports whether the kernel has the rules that it should have.
func (c *chains) standing(ctx context.Context) (bool, error) {
	all, err := c.save(ctx)
	if err != nil {
		return false, err
	}
	mine, behind := c.ours(all)
	if behind > 0 {
		if time.Since(c.moved) > movesPause {
			c.moves = 0
		}
		if c.moves++; c.moves <= maxMoves {
			c.moved = time.Now()
			return false, nil
		}
		if c.moves == maxMoves+1 {
			c.log.Warn("another program keeps its iptables rules in front of sandboxd's: a packet of a sandbox that they accept is not "+
				"checked by sandboxd", "rules", behind)
		}
	}
	if c.installed != nil {
		return equal(mine, c.installed), nil
	}
	for g := range 2 {
		if equal(mine, c.merged(g)) {
			c.installed = mine
			return true, nil
		}
	}
	return false, nil
}

// hooked reports whether packets pass all chains of a generation.
func (c *chains) hooked(mine rulesOf, generation int) bool {
	chains, hooks := wanted(c.inst, c.pool, c.gateway, generation)
	for table, h := range hooks {
		for name, rules := range h {
			for _, r := range rules {
				if !slices.Contains(mine[table][name], r) {
					return false
				}
			}
		}
	}
	for table, cs := range chains {
		for name := range cs {
			if len(mine[table][name]) == 0 {
				return false
			}
		}
	}
	return true
}

// hooks counts the jumps to chains of a generation.
func (c *chains) hooks(mine rulesOf, generation int) (n int) {
	_, hooks := wanted(c.inst, c.pool, c.gateway, generation)
	for table, h := range hooks {
		for name, rules := range h {
			for _, r := range rules {
				if strings.Contains(r, "-j "+c.inst.Chain("")) && slices.Contains(mine[table][name], r) {
					n++
				}
			}
		}
	}
	return n
}

// install installs the chains. If a generation is hooked, even in part, install builds
// the other one, hooks it in front, and only then removes the old one.
func (c *chains) install(ctx context.Context) error {
	all, err := c.save(ctx)
	if err != nil {
		return err
	}
	mine, _ := c.ours(all)
	// Build the generation with fewer hooks in place: the other one protects until the
	// new hooks are in place, also if this fails half way.
	generation := 0
	if first := c.hooks(mine, 0); first > 0 && first >= c.hooks(mine, 1) {
		generation = 1
	}
	// Remainders of an interrupted install.
	if err := c.remove(mine, generation); err != nil {
		return err
	}
	chains, hooks := wanted(c.inst, c.pool, c.gateway, generation)
	if err := c.restore(ctx, c.script(chains, hooks, mine)); err != nil {
		return err
	}
	// Remove the other generation, and chains that only older versions had.
	err = c.removeChains(mine, func(table, name string) bool {
		_, wanted := chains[table][name]
		return strings.HasPrefix(name, c.inst.Chain("")) && !wanted
	})
	if err != nil {
		return err
	}
	if err := c.unmasquerade(mine, hooks["nat"]["POSTROUTING"]); err != nil {
		return err
	}
	if all, err = c.save(ctx); err != nil {
		return err
	}
	now, _ := c.ours(all)
	if !alike(now, c.merged(generation)) {
		c.installed = nil // otherwise the rules that are left would count as complete
		return errors.New("another program changed them during the installation")
	}
	c.installed = now
	if !equal(c.installed, c.merged(generation)) {
		c.log.Info("this iptables prints rules in a different form than sandboxd writes them; sandboxd installs them again at every start")
	}
	return nil
}
