package egress

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// A Barrier is a base chain of nf_tables, of somebody else, that discards what
// it does not accept by name, and accepts nothing of sandboxes. A packet must
// pass every base chain of its hook, so what the chains here accept it discards
// all the same.
type Barrier struct {
	Family string // "inet" or "ip", as nft(8) writes it
	Table  string
	Chain  string
	Hook   string // "forward": what sandboxes may reach; "input": the resolver
	By     string // what discards: "its policy", or "a rule of CHAIN"
}

// Name is the chain as nft(8) takes it.
func (b Barrier) Name() string { return b.Family + " " + b.Table + " " + b.Chain }

// Barriers lists those for the sandboxes of an instance, whose addresses are of
// pool. It reads rules, and not all that they can say: a condition counts as met
// by sandboxes if it is on their links' name or on all of their addresses, and a
// chain that lets any of what these send pass lets it pass on purpose.
func Barriers(i instance.Instance, pool netip.Prefix) ([]Barrier, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("talk to nf_tables: %w", err)
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil, fmt.Errorf("list the chains of nf_tables: %w", err)
	}
	var all []Barrier
	for _, chain := range chains {
		family, hook := families[chain.Table.Family], hookOf(chain)
		if family == "" || hook == "" || isIptables(chain) {
			continue
		}
		r := reader{conn: c, table: chain.Table, link: i.LinkPrefix(), pool: pool.Masked()}
		fate, by, err := r.walk(chain.Name, false, 0)
		if err != nil {
			return nil, fmt.Errorf("read nf_tables' chain %s %s %s: %w", family, chain.Table.Name, chain.Name, err)
		}
		if fate == falls && chain.Policy != nil && *chain.Policy == nftables.ChainPolicyDrop {
			fate, by = drops, "its policy"
		}
		if fate == drops {
			all = append(all, Barrier{family, chain.Table.Name, chain.Name, hook, by})
		}
	}
	slices.SortFunc(all, func(a, b Barrier) int { return strings.Compare(a.Name(), b.Name()) })
	return all, nil
}

// families are those that meet IPv4.
var families = map[nftables.TableFamily]string{nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip"}

// hookOf is the hook of a base chain that packets of sandboxes meet, or empty.
func hookOf(c *nftables.Chain) string {
	switch {
	case c.Hooknum == nil || c.Type != nftables.ChainTypeFilter:
	case *c.Hooknum == *nftables.ChainHookForward:
		return "forward"
	case *c.Hooknum == *nftables.ChainHookInput:
		return "input"
	}
	return ""
}

// isIptables reports whether c is a chain of iptables-nft, in which sandboxd has
// its own rules, and those in front; or, beside iptables-legacy, the doctor's
// iptables-family looks at it.
func isIptables(c *nftables.Chain) bool {
	return c.Table.Family == nftables.TableFamilyIPv4 && c.Table.Name == "filter" && (c.Name == "INPUT" || c.Name == "FORWARD")
}

// What becomes in a chain of the first packet of a flow from a sandbox, which meets
// no condition but those on its link and address.
type fate int

const (
	falls  fate = iota // through, to the next rule of the caller, or to the policy
	passes             // is accepted
	drops
)

// A reader reads the rules of one table.
type reader struct {
	conn  *nftables.Conn
	table *nftables.Table
	link  string // prefix of the links of sandboxes
	pool  netip.Prefix
}

// deepest is how far jumps are followed: the kernel's NFT_JUMP_STACK_SIZE.
const deepest = 16

// walk says what becomes of a packet in a chain, and what dropped it. Only packets
// of sandboxes come to a chain that is theirs.
func (r *reader) walk(chain string, theirs bool, depth int) (fate, string, error) {
	if depth == deepest {
		return falls, "", nil
	}
	rules, err := r.conn.GetRules(r.table, &nftables.Chain{Name: chain, Table: r.table})
	if err != nil {
		return falls, "", err
	}
	for _, rule := range rules {
		if forKnown(rule.Exprs) {
			continue
		}
		met, named, err := r.meets(rule.Exprs)
		if err != nil {
			return falls, "", err
		}
		named = named || theirs
		v := verdictOf(rule.Exprs)
		// A condition that is not looked into may be met, or not: what it accepts of
		// sandboxes by name is let pass, all else is left to the rules behind.
		if !met && !(named && v.Kind != expr.VerdictDrop) {
			continue
		}
		switch v.Kind {
		case expr.VerdictAccept, expr.VerdictQueue: // whoever reads the queue decides
			return passes, "", nil
		case expr.VerdictDrop:
			return drops, "a rule of " + chain, nil
		case expr.VerdictReturn:
			if met {
				return falls, "", nil
			}
		case expr.VerdictJump, expr.VerdictGoto:
			f, by, err := r.walk(v.Chain, named, depth+1)
			if err != nil || f == passes || f == drops && met || v.Kind == expr.VerdictGoto && met {
				return f, by, err
			}
		}
	}
	return falls, "", nil
}

// verdictOf is what a rule does with a packet that meets it; Continue, if nothing.
func verdictOf(rule []expr.Any) expr.Verdict {
	for _, e := range rule {
		switch e := e.(type) {
		case *expr.Verdict:
			return *e
		case *expr.Reject:
			return expr.Verdict{Kind: expr.VerdictDrop}
		case *expr.Queue:
			return expr.Verdict{Kind: expr.VerdictQueue}
		}
	}
	return expr.Verdict{Kind: expr.VerdictContinue}
}

// meets reports whether every packet of a sandbox meets all conditions of a rule,
// and whether one of them names sandboxes: what they send, that is.
func (r *reader) meets(rule []expr.Any) (met, named bool, err error) {
	met = true
	var loaded expr.Any // into the register that is compared next
	var mask []byte
	for _, e := range rule {
		switch e := e.(type) {
		case *expr.Verdict, *expr.Reject, *expr.Queue, *expr.Counter, *expr.Log, *expr.Objref, *expr.Immediate:
		case *expr.Meta, *expr.Payload, *expr.Ct: // loads, or sets a mark
			loaded, mask = e, nil
		case *expr.Bitwise:
			mask = e.Mask
		case *expr.Cmp:
			us := e.Op == expr.CmpOpEq && r.isUs(loaded, mask, e.Data)
			met, named = met && (us || isIPv4(loaded, e)), named || us
		case *expr.Lookup:
			us, err := r.inSet(loaded, mask, e)
			if err != nil {
				return false, false, err
			}
			met, named = met && us, named || us
		default:
			met = false
		}
	}
	return met, named, nil
}

// forKnown reports whether a rule is for flows that are open, by their state.
func forKnown(rule []expr.Any) bool {
	i := slices.IndexFunc(rule, func(e expr.Any) bool {
		ct, ok := e.(*expr.Ct)
		return ok && ct.Key == expr.CtKeySTATE
	})
	if i < 0 || i+2 >= len(rule) {
		return false
	}
	mask, ok := rule[i+1].(*expr.Bitwise)
	if !ok || len(mask.Mask) != 4 {
		return false
	}
	cmp, ok := rule[i+2].(*expr.Cmp)
	return ok && cmp.Op == expr.CmpOpNeq && binaryutil.NativeEndian.Uint32(mask.Mask)&expr.CtStateBitNEW == 0
}

// isUs reports whether what was loaded equals want, under mask, for every packet
// of a sandbox, and for few others.
func (r *reader) isUs(loaded expr.Any, mask, want []byte) bool {
	switch l := loaded.(type) {
	case *expr.Meta:
		// A name that ends in * is compared as far as that, others to their end.
		return l.Key == expr.MetaKeyIIFNAME && len(want) > 0 && len(want) < unix.IFNAMSIZ && strings.HasPrefix(r.link, string(want))
	case *expr.Payload:
		const ipSource = 12 // offset in the header
		if l.Base != expr.PayloadBaseNetworkHeader || l.Offset != ipSource || int(l.Len) > 4 || len(want) != int(l.Len) {
			return false
		}
		addr, ones := r.pool.Addr().As4(), net32(r.pool.Bits())
		for i := range want {
			m := byte(0xff)
			if i < len(mask) {
				m = mask[i]
			}
			if addr[i]&m != want[i] || m&^ones[i] != 0 {
				return false
			}
		}
		return true
	}
	return false
}

// net32 is the mask of a prefix that long.
func net32(bits int) (m [4]byte) {
	for i := range bits {
		m[i/8] |= 0x80 >> (i % 8)
	}
	return m
}

// isIPv4 reports whether a comparison holds for every IPv4 packet: nft(8) puts it
// before those of addresses in tables of the family inet.
func isIPv4(loaded expr.Any, e *expr.Cmp) bool {
	m, ok := loaded.(*expr.Meta)
	return ok && m.Key == expr.MetaKeyNFPROTO && e.Op == expr.CmpOpEq && bytes.Equal(e.Data, []byte{unix.NFPROTO_IPV4})
}

// inSet reports whether a set of links' names has those of sandboxes. Maps of
// verdicts, and what is to be in none, are not looked into.
func (r *reader) inSet(loaded expr.Any, mask []byte, e *expr.Lookup) (bool, error) {
	m, ok := loaded.(*expr.Meta)
	if !ok || m.Key != expr.MetaKeyIIFNAME || mask != nil || e.Invert || e.IsDestRegSet {
		return false, nil
	}
	elements, err := r.conn.GetSetElements(&nftables.Set{Table: r.table, Name: e.SetName, ID: e.SetID})
	if err != nil {
		return false, fmt.Errorf("set %s: %w", e.SetName, err)
	}
	for _, el := range elements {
		// A name with * is the begin of an interval: itself and zeros.
		if name := bytes.TrimRight(el.Key, "\x00"); !el.IntervalEnd && len(name) > 0 && strings.HasPrefix(r.link, string(name)) {
			return true, nil
		}
	}
	return false, nil
}
