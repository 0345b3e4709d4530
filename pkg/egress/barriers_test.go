package egress

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// A foreign is a firewall beside sandboxd's: a table of nf_tables.
type foreign struct {
	t     *testing.T
	c     *nftables.Conn
	table *nftables.Table
}

func newForeign(t *testing.T, family nftables.TableFamily, name string) *foreign {
	t.Helper()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	f := &foreign{t, c, &nftables.Table{Family: family, Name: name}}
	c.AddTable(f.table)
	t.Cleanup(func() {
		c.DelTable(f.table)
		f.flush()
	})
	return f
}

func (f *foreign) flush() {
	f.t.Helper()
	if err := f.c.Flush(); err != nil {
		f.t.Fatal(err)
	}
}

// base adds a base chain with its rules.
func (f *foreign) base(name string, hook *nftables.ChainHook, policy nftables.ChainPolicy, rules ...[]expr.Any) {
	f.t.Helper()
	c := f.c.AddChain(&nftables.Chain{
		Name: name, Table: f.table, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityFilter, Policy: &policy,
	})
	f.add(c, rules)
}

// chain adds one that others jump to.
func (f *foreign) chain(name string, rules ...[]expr.Any) {
	f.t.Helper()
	f.add(f.c.AddChain(&nftables.Chain{Name: name, Table: f.table}), rules)
}

func (f *foreign) add(c *nftables.Chain, rules [][]expr.Any) {
	f.t.Helper()
	for _, r := range rules {
		f.c.AddRule(&nftables.Rule{Table: f.table, Chain: c, Exprs: r})
	}
	f.flush()
}

// then is a rule: the conditions, and a verdict.
func then(v expr.VerdictKind, conditions ...[]expr.Any) []expr.Any {
	return append(slices.Concat(conditions...), &expr.Verdict{Kind: v})
}

func jumpTo(chain string, conditions ...[]expr.Any) []expr.Any {
	return append(slices.Concat(conditions...), &expr.Verdict{Kind: expr.VerdictJump, Chain: chain})
}

// exactly matches a link by its whole name.
func exactly(key expr.MetaKey, link string) []expr.Any {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, link)
	return name(key, string(data))
}

// fromAddr matches what comes from addresses that begin like that.
func fromAddr(octets ...byte) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: uint32(len(octets))},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: octets},
	}
}

// TestBarriers reads rules of others from the kernel, as nft(8) makes them.
func TestBarriers(t *testing.T) {
	hosttest.Root(t)
	const (
		accept, drop = expr.VerdictAccept, expr.VerdictDrop
		open, closed = nftables.ChainPolicyAccept, nftables.ChainPolicyDrop
	)
	known := bits(&expr.Ct{Key: expr.CtKeySTATE, Register: 1}, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED)
	iif, oif := expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME
	ours, port := name(iif, inst.LinkPrefix()), toResolver
	pool := inst.Pool().Addr().As4()
	counted := []expr.Any{&expr.Counter{}, &expr.Log{
		Level: expr.LogLevelInfo, Flags: expr.LogFlagsNFLog,
		Key: 1<<unix.NFTA_LOG_PREFIX | 1<<unix.NFTA_LOG_LEVEL, Data: []byte("no"),
	}}
	reject := append(slices.Clone(counted), &expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED})
	for _, c := range []struct {
		what   string
		policy nftables.ChainPolicy
		rules  [][]expr.Any
		by     string // empty: no barrier
	}{
		{"no rules", open, nil, ""},
		{"policy", closed, nil, "its policy"},
		{"policy, behind what is not of sandboxes", closed, [][]expr.Any{
			then(accept, known), then(accept, exactly(iif, "lo")),
			then(accept, fromAddr(10, 0, 0, 7)),
		}, "its policy"},
		{"last rule", open, [][]expr.Any{then(accept, known), then(drop, counted)}, "a rule of chain"},
		{"last rule rejects", open, [][]expr.Any{then(accept, known), reject}, "a rule of chain"},
		{"some are dropped", open, [][]expr.Any{
			then(drop, port), then(drop, exactly(iif, "eth0")),
			then(drop, name(oif, inst.LinkPrefix()), port),
		}, ""},
		{"all are accepted first", closed, [][]expr.Any{then(accept, counted)}, ""},
		{"in a chain that all go to", open, [][]expr.Any{then(accept, known), jumpTo("rest")}, "a rule of rest"},
		{"in a chain that others go to", open, [][]expr.Any{jumpTo("rest", exactly(iif, "eth0"))}, ""},
		{"sandboxes go to it", open, [][]expr.Any{jumpTo("rest", ours)}, "a rule of rest"},
		{"sandboxes are dropped", open, [][]expr.Any{then(drop, ours)}, "a rule of chain"},
		{"by link", closed, [][]expr.Any{then(accept, known), then(accept, ours)}, ""},
		{"by link, all instances", closed, [][]expr.Any{then(accept, name(iif, "sb-"))}, ""},
		{"by link, some of it", closed, [][]expr.Any{then(accept, ours, port), then(drop, counted)}, ""},
		{"by link, what is open", closed, [][]expr.Any{then(accept, ours, known)}, "its policy"},
		{"by link, in a chain", closed, [][]expr.Any{jumpTo("some", ours)}, ""},
		{"by another's link", closed, [][]expr.Any{then(accept, name(iif, "sb-z"))}, "its policy"},
		{"by one link", closed, [][]expr.Any{then(accept, exactly(iif, "sb-"+id(0)))}, "its policy"},
		{"towards sandboxes only", closed, [][]expr.Any{then(accept, name(oif, inst.LinkPrefix()))}, "its policy"},
		{"what is not of sandboxes", closed, [][]expr.Any{then(accept, not(ours))}, "its policy"},
		{"by address", closed, [][]expr.Any{then(accept, family(unix.NFPROTO_IPV4), fromAddr(pool[0], pool[1]))}, ""},
		{"by a wider address", closed, [][]expr.Any{then(accept, fromAddr(pool[0]))}, ""},
		{"by a narrower address", closed, [][]expr.Any{then(accept, fromAddr(pool[0], pool[1], 7))}, "its policy"},
	} {
		for hook, at := range map[string]*nftables.ChainHook{"forward": nftables.ChainHookForward, "input": nftables.ChainHookInput} {
			t.Run(c.what+"/"+hook, func(t *testing.T) {
				f := newForeign(t, nftables.TableFamilyINet, "foreign")
				f.chain("rest", then(accept, known), then(drop))
				f.chain("some", then(accept, port))
				f.base("chain", at, c.policy, c.rules...)
				var want []Barrier
				if c.by != "" {
					want = []Barrier{{"inet", "foreign", "chain", hook, c.by}}
				}
				if got, err := Barriers(inst, inst.Pool()); err != nil || !slices.Equal(got, want) {
					t.Errorf("%+v, %v; want %+v", got, err, want)
				}
			})
		}
	}
}

// TestBarrierSets: names of links in a set.
func TestBarrierSets(t *testing.T) {
	hosttest.Root(t)
	for _, c := range []struct {
		first, last string
		want        int
	}{{"sb-", "sb.", 0}, {inst.LinkPrefix(), "sb-" + string(rune(inst+1)), 0}, {"eth", "eti", 1}} {
		t.Run(c.first, func(t *testing.T) {
			f := newForeign(t, nftables.TableFamilyINet, "foreign")
			key := func(name string) []byte { return []byte(name + strings.Repeat("\x00", unix.IFNAMSIZ-len(name))) }
			set := &nftables.Set{Table: f.table, Name: "links", KeyType: nftables.TypeIFName, Interval: true}
			if err := f.c.AddSet(set, []nftables.SetElement{{Key: key(c.first)}, {Key: key(c.last), IntervalEnd: true}}); err != nil {
				t.Fatal(err)
			}
			f.base("chain", nftables.ChainHookForward, nftables.ChainPolicyDrop, then(expr.VerdictAccept, []expr.Any{
				&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID},
			}))
			if got, err := Barriers(inst, inst.Pool()); err != nil || len(got) != c.want {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

// TestBarrierHolds: what Barriers names does discard what is allowed here, the
// chains of iptables and of this package it does not name, and with the rules
// that the doctor asks for both are as if nobody else was there.
func TestBarrierHolds(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	id := w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443"))
	w.run("iptables", "-P", "FORWARD", "DROP")
	t.Cleanup(func() { w.try("iptables", "-P", "FORWARD", "ACCEPT") })
	barriers := func(want ...string) {
		t.Helper()
		all, err := Barriers(inst, inst.Pool())
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, b := range all {
			got = append(got, b.Hook+" "+b.Name()+": "+b.By)
		}
		if !slices.Equal(got, want) {
			t.Errorf("barriers %q, want %q", got, want)
		}
	}
	reaches := func(out, names bool) {
		t.Helper()
		within := map[bool]time.Duration{true: patient, false: time.Second} // what is dropped takes all of it
		c, err := w.dial(id, "tcp", "203.0.113.1:443", within[out])
		if err == nil {
			c.Close()
		}
		if (err == nil) != out {
			t.Errorf("what is allowed: %v, want it to work: %v", err, out)
		}
		if _, err := w.ask(id, "tcp", "8.8.8.8:53", "one.test.", dns.TypeA, within[names]); (err == nil) != names {
			t.Errorf("the resolver: %v, want it to answer: %v", err, names)
		}
	}
	barriers()
	reaches(true, true)

	f := newForeign(t, nftables.TableFamilyIPv4, "site")
	known := bits(&expr.Ct{Key: expr.CtKeySTATE, Register: 1}, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED)
	ours := name(expr.MetaKeyIIFNAME, inst.LinkPrefix())
	insert := func(chain string, rule []expr.Any) {
		t.Helper()
		f.c.InsertRule(&nftables.Rule{Table: f.table, Chain: &nftables.Chain{Name: chain, Table: f.table}, Exprs: rule})
		f.flush()
	}
	f.base("forward", nftables.ChainHookForward, nftables.ChainPolicyDrop)
	f.base("in", nftables.ChainHookInput, nftables.ChainPolicyAccept, then(expr.VerdictDrop, exactly(expr.MetaKeyIIFNAME, "up0")),
		then(expr.VerdictDrop, ours))
	barriers("forward ip site forward: its policy", "input ip site in: a rule of in")
	reaches(false, false)

	// What the doctor asks for.
	insert("forward", then(expr.VerdictAccept, ours))
	insert("forward", then(expr.VerdictAccept, name(expr.MetaKeyOIFNAME, inst.LinkPrefix()), known))
	barriers("input ip site in: a rule of in")
	reaches(true, false)
	insert("in", then(expr.VerdictAccept, ours, toResolver))
	barriers()
	reaches(true, true)
}

// toResolver matches the resolver's port, UDP and TCP.
var toResolver = []expr.Any{
	&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
	&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{ResolverPort >> 8, ResolverPort & 0xff}},
}
