package egress

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/internal/weak"
)

// lockPriority is behind the filter chains of iptables: what they refuse is refused at
// once, and what they accept must pass the lock, too.
const lockPriority = 10

// A lock confines sandboxes even if somebody flushes iptables. It is a table of
// nf_tables that iptables(8) does not see. It asks nothing and allows nothing by
// itself. It drops the first packet of every flow without the mark of an allowed flow;
// a flushed chain sets no mark.
//
//	forward   from a sandbox: established, or mark ALLOW     else drop
//	          to a sandbox:   established                    else drop
//	input     from a sandbox: established, resolver, proxy   else drop
//	          from an uplink, IPv4, to elsewhere: established else drop
//	output    IPv6 to a sandbox                              drop
//	nat       nothing: see natChain
//
// Uplinks are the links that forward only because sandboxes need it (Config.Uplinks).
// Without the rule for them the host would be a router between all its networks. They
// are a set of names in the table.
//
// So `iptables -F` opens nothing, also while no daemon runs. `nft flush ruleset`
// removes the lock too: the guard notices, and takes links down until both are back.
type lock struct {
	inst    instance.Instance
	gateway [4]byte
}

// table is the lock's table; it is replaced as a whole.
func (l lock) table() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: l.inst.Set("lock")}
}

// lockRule is one rule: its conditions, and its verdict.
type lockRule struct {
	match   []expr.Any
	verdict expr.VerdictKind
}

// rules are the lock's rules by chain.
func (l lock) rules() map[string][]lockRule {
	from, to := name(expr.MetaKeyIIFNAME, l.inst.LinkPrefix()), name(expr.MetaKeyOIFNAME, l.inst.LinkPrefix())
	between := name(expr.MetaKeyOIFNAME, linkPrefix)
	known := bits(&expr.Ct{Key: expr.CtKeySTATE, Register: 1}, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED)
	allowed := masked(&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, markMask, markAllow)
	unknown := masked(&expr.Ct{Key: expr.CtKeySTATE, Register: 1}, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED, 0)
	uplink := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Lookup{SourceRegister: 1, SetName: uplinkSet},
	}
	v4, v6 := family(unix.NFPROTO_IPV4), family(unix.NFPROTO_IPV6)
	rule := func(v expr.VerdictKind, parts ...[]expr.Any) lockRule { return lockRule{slices.Concat(parts...), v} }
	if weak.Off(weak.Chains) {
		return map[string][]lockRule{"forward": {}, "input": {}, "output": {}}
	}
	return map[string][]lockRule{
		"forward": {
			rule(expr.VerdictDrop, from, between),
			rule(expr.VerdictAccept, from, known),
			rule(expr.VerdictAccept, from, v4, allowed),
			rule(expr.VerdictDrop, from),
			rule(expr.VerdictAccept, to, known),
			rule(expr.VerdictDrop, to),
			rule(expr.VerdictDrop, uplink, v4, not(between), unknown),
		},
		"input": {
			rule(expr.VerdictAccept, from, known),
			rule(expr.VerdictAccept, from, v4, l.redirected(unix.IPPROTO_UDP, ResolverPort)),
			rule(expr.VerdictAccept, from, v4, l.redirected(unix.IPPROTO_TCP, ResolverPort)),
			rule(expr.VerdictAccept, from, v4, l.redirected(unix.IPPROTO_TCP, ProxyPort)),
			rule(expr.VerdictDrop, from),
		},
		"output": {rule(expr.VerdictDrop, to, v6)},
	}
}

// redirected matches packets that were redirected to a port of the gateway.
func (l lock) redirected(proto byte, port uint16) []expr.Any {
	const ipDst, portDst = 16, 2 // offsets in the headers
	const dnat = 1 << 5          // IPS_DST_NAT of nf_conntrack_common.h
	equal := func(offset, size uint32, base expr.PayloadBase, want []byte) []expr.Any {
		return []expr.Any{
			&expr.Payload{DestRegister: 1, Base: base, Offset: offset, Len: size},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: want},
		}
	}
	return slices.Concat(
		[]expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
		},
		equal(ipDst, 4, expr.PayloadBaseNetworkHeader, l.gateway[:]),
		equal(portDst, 2, expr.PayloadBaseTransportHeader, binary.BigEndian.AppendUint16(nil, port)),
		bits(&expr.Ct{Key: expr.CtKeySTATUS, Register: 1}, dnat),
	)
}

// name matches links whose name begins with prefix.
func name(key expr.MetaKey, prefix string) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte(prefix)},
	}
}

// not negates the comparison that m ends with.
func not(m []expr.Any) []expr.Any {
	last := *m[len(m)-1].(*expr.Cmp)
	last.Op = expr.CmpOpNeq
	return append(slices.Clone(m[:len(m)-1]), &last)
}

func family(nfproto byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{nfproto}},
	}
}

// masked matches if the value that load puts into register 1 is want under mask.
func masked(load expr.Any, mask, want uint32) []expr.Any {
	return []expr.Any{
		load,
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(mask), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(want)},
	}
}

// bits matches if any of the bits is set.
func bits(load expr.Any, any uint32) []expr.Any {
	return not(masked(load, any, 0))
}

// uplinkSet names the set of uplinks in the lock's table.
const uplinkSet = "uplinks"

// install replaces the lock, with these uplinks, in one transaction: the lock is
// complete at every moment. nat is false where the kernel knows no chain of natChain's type
// (nft_chain_nat, for inet since Linux 5.2): there the lock does without.
func (l lock) install(uplinks []string) (nat bool, err error) {
	err = l.replace(uplinks, true)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
		return false, l.replace(uplinks, false)
	}
	return true, err
}

func (l lock) replace(uplinks []string, nat bool) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("connect to nf_tables: %w", err)
	}
	t := c.AddTable(l.table()) // otherwise there would be nothing to delete
	c.DelTable(t)
	c.AddTable(t)
	elements := make([]nftables.SetElement, 0, len(uplinks))
	for _, link := range uplinks {
		key := make([]byte, unix.IFNAMSIZ)
		copy(key, link)
		elements = append(elements, nftables.SetElement{Key: key})
	}
	if err := c.AddSet(&nftables.Set{Table: t, Name: uplinkSet, KeyType: nftables.TypeIFName}, elements); err != nil {
		return fmt.Errorf("create the nf_tables set %s %s: %w", t.Name, uplinkSet, err)
	}
	hooks := map[string]*nftables.ChainHook{
		"forward": nftables.ChainHookForward, "input": nftables.ChainHookInput, "output": nftables.ChainHookOutput,
	}
	for name, rules := range l.rules() {
		chain := c.AddChain(&nftables.Chain{
			Name: name, Table: t, Type: nftables.ChainTypeFilter,
			Hooknum: hooks[name], Priority: nftables.ChainPriorityRef(lockPriority),
		})
		for _, r := range rules {
			c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: append(r.match, &expr.Verdict{Kind: r.verdict})})
		}
	}
	if nat {
		c.AddChain(&nftables.Chain{
			Name: natChain, Table: t, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
		})
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("create the nf_tables table %s: %w (the kernel needs the module nf_tables)", t.Name, err)
	}
	return nil
}

// natChain is empty. The kernel translates the packets of a flow as long as a network
// namespace has any NAT chain. If somebody deletes all chains of iptables and there is
// no other, masqueraded flows leave with the sandbox's own address and are reset.
const natChain = "nat"

// standing reports whether all rules of the lock are there, and the uplinks it
// contains. A rule that somebody rewrote by hand counts as there: that is no accident.
func (l lock) standing() (ok bool, uplinks []string, err error) {
	c, err := nftables.New()
	if err != nil {
		return false, nil, fmt.Errorf("connect to nf_tables: %w", err)
	}
	t := l.table()
	for name, rules := range l.rules() {
		// Without the table or the chain, the list is empty.
		have, err := c.GetRules(t, &nftables.Chain{Name: name, Table: t})
		if err != nil {
			return false, nil, fmt.Errorf("read the nf_tables table %s: %w", t.Name, err)
		}
		if len(have) != len(rules) {
			return false, nil, nil
		}
	}
	set, err := c.GetSetByName(t, uplinkSet)
	if errors.Is(err, unix.ENOENT) {
		return false, nil, nil
	}
	var elements []nftables.SetElement
	if err == nil {
		elements, err = c.GetSetElements(set)
	}
	if err != nil {
		return false, nil, fmt.Errorf("read the nf_tables set %s %s: %w", t.Name, uplinkSet, err)
	}
	for _, e := range elements {
		uplinks = append(uplinks, unix.ByteSliceToString(e.Key))
	}
	slices.Sort(uplinks)
	return true, uplinks, nil
}

// translates reports whether natChain is there. Sandboxes are confined without it.
func (l lock) translates() (bool, error) {
	c, err := nftables.New()
	if err != nil {
		return false, fmt.Errorf("connect to nf_tables: %w", err)
	}
	all, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return false, fmt.Errorf("list the chains of nf_tables: %w", err)
	}
	return slices.ContainsFunc(all, func(c *nftables.Chain) bool { return c.Table.Name == l.table().Name && c.Name == natChain }), nil
}

// remove removes the lock. Absent is success.
func (l lock) remove() error {
	c, err := nftables.New()
	if err != nil {
		return nil // no nf_tables, no lock
	}
	c.DelTable(l.table())
	if err := c.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete the nf_tables table %s: %w", l.table().Name, err)
	}
	return nil
}

// keepLock installs the lock again if it is incomplete or its uplinks changed, and
// reports whether its rules were complete before.
func (e *Engine) keepLock() (stood bool) {
	stood, err := e.raiseLock()
	switch {
	case err == nil:
		e.lockFault = ""
	case err.Error() != e.lockFault: // each new fault is logged once
		e.lockFault = err.Error()
		e.log.Error("cannot verify or install the lock behind the chains. Without it only iptables confines sandboxes: after "+
			"`iptables -F` they are open for about 50 ms, until sandboxd sets their links down, or for as long as sandboxd does not run. "+
			"Links that forward for sandboxes forward for all hosts. sandboxd tries again every ten seconds", "err", err)
	}
	return stood
}

// raiseLock does the work of keepLock. If the uplinks cannot be read, the previous ones
// stay.
func (e *Engine) raiseLock() (stood bool, err error) {
	want, unread := e.closed, error(nil)
	if e.cfg.Uplinks != nil {
		if want, unread = e.cfg.Uplinks(); unread != nil {
			want, unread = e.closed, fmt.Errorf("read which links forward for sandboxes alone: %w", unread)
		}
	}
	want = slices.Sorted(slices.Values(want))
	stood, have, err := e.lock.standing()
	whole := stood && slices.Equal(have, want)
	if err == nil && whole && !e.noNAT {
		whole, err = e.lock.translates()
	}
	if err == nil && !whole {
		err = makeLock(e, want)
	}
	if err == nil {
		e.closed = want
	}
	return stood, errors.Join(err, unread)
}

// makeLock installs the lock.
func makeLock(e *Engine, uplinks []string) error {
	nat, err := e.lock.install(uplinks)
	if err != nil {
		return err
	}
	if !nat && !e.noNAT {
		e.log.Warn("this kernel has no NAT in nf_tables (module nft_chain_nat), so the lock has no chain of it: if another program " +
			"deletes all NAT chains of iptables, open connections of sandboxes are reset")
	}
	e.noNAT = !nat
	e.log.Info("lock installed", "table", e.lock.table().Name, "uplinks", uplinks)
	return nil
}

// CloseUplinks closes the uplinks that Config.Uplinks names now to all but sandboxes.
// Call it before a link is made to forward.
func (e *Engine) CloseUplinks() error {
	e.guarding.Lock()
	defer e.guarding.Unlock()
	if _, err := e.raiseLock(); err != nil {
		return fmt.Errorf("block other traffic on the links that forward for sandboxes: %w", err)
	}
	return nil
}
