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

// A Barrier is a base chain of nf_tables that another program made. It drops whatever
// it does not accept by name, and it has no rule that accepts packets of sandboxes. A
// packet must pass every base chain of its hook, so a barrier drops packets that
// sandboxd's own chains accept.
type Barrier struct {
	Family string // "inet" or "ip", as nft(8) writes it
	Table  string
	Chain  string
	Hook   string // "forward": what sandboxes may reach; "input": the resolver
	By     string // what drops the packet: "its policy", or "a rule of CHAIN"
}

// Name is the chain as nft(8) writes it.
func (b Barrier) Name() string { return b.Family + " " + b.Table + " " + b.Chain }

// Barriers lists the barriers that drop packets of the sandboxes of an instance. The
// sandboxes' addresses lie in pool. It understands only some conditions of rules: a
// condition counts as met by sandboxes if it matches their links' name or all of their
// addresses. A chain that accepts any packets of sandboxes counts as accepting them on
// purpose.
func Barriers(i instance.Instance, pool netip.Prefix) ([]Barrier, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("connect to nf_tables: %w", err)
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil, fmt.Errorf("list the nf_tables chains: %w", err)
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
			return nil, fmt.Errorf("read the nf_tables chain %s %s %s: %w", family, chain.Table.Name, chain.Name, err)
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

// families are the table families that see IPv4 packets.
var families = map[nftables.TableFamily]string{nftables.TableFamilyINet: "inet", nftables.TableFamilyIPv4: "ip"}

// hookOf is the hook of a base chain that packets of sandboxes pass. It is empty for
// other chains.
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

// isIptables reports whether c is a chain of iptables-nft. With iptables-nft sandboxd
// puts its own rules into these chains, in front of the others. With iptables-legacy
// the doctor's check iptables-family covers them.
func isIptables(c *nftables.Chain) bool {
	return c.Table.Family == nftables.TableFamilyIPv4 && c.Table.Name == "filter" && (c.Name == "INPUT" || c.Name == "FORWARD")
}

// A fate is what a chain does with the first packet of a flow from a sandbox. The
// packet meets no conditions but those on its link and address.
type fate int

const (
	falls  fate = iota // goes on to the next rule of the caller, or to the policy
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

// deepest is how many jumps are followed: the kernel's NFT_JUMP_STACK_SIZE.
const deepest = 16

// walk returns the fate of a packet in a chain, and what dropped it. If theirs is set,
// only packets of sandboxes reach the chain.
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
		// A condition that is not understood may or may not be met. If the rule names
		// sandboxes and accepts, it counts as met; otherwise the next rules decide.
		if !met && !(named && v.Kind != expr.VerdictDrop) {
			continue
		}
		switch v.Kind {
		case expr.VerdictAccept, expr.VerdictQueue: // the program that reads the queue decides
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

// verdictOf is what a rule does with a packet that meets it; Continue if it does
// nothing.
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

// meets reports whether every packet of a sandbox meets all conditions of a rule, and
// whether one of the conditions names sandboxes as the source.
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

// forKnown reports whether a rule matches established flows only, by their state.
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

// isUs reports whether the loaded value equals want, under mask, for every packet of a
// sandbox and for few other packets.
func (r *reader) isUs(loaded expr.Any, mask, want []byte) bool {
	switch l := loaded.(type) {
	case *expr.Meta:
		// A name that ends in * is compared up to the *, any other name to its end.
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

// net32 is the mask of a prefix of that length.
func net32(bits int) (m [4]byte) {
	for i := range bits {
		m[i/8] |= 0x80 >> (i % 8)
	}
	return m
}

// isIPv4 reports whether a comparison holds for every IPv4 packet. In tables of the
// family inet, nft(8) puts such a comparison before comparisons of addresses.
func isIPv4(loaded expr.Any, e *expr.Cmp) bool {
	m, ok := loaded.(*expr.Meta)
	return ok && m.Key == expr.MetaKeyNFPROTO && e.Op == expr.CmpOpEq && bytes.Equal(e.Data, []byte{unix.NFPROTO_IPV4})
}

// inSet reports whether a set of link names contains those of sandboxes. Verdict maps
// and negated lookups are not examined.
func (r *reader) inSet(loaded expr.Any, mask []byte, e *expr.Lookup) (bool, error) {
	m, ok := loaded.(*expr.Meta)
	if !ok || m.Key != expr.MetaKeyIIFNAME || mask != nil || e.Invert || e.IsDestRegSet {
		return false, nil
	}
	elements, err := r.conn.GetSetElements(&nftables.Set{Table: r.table, Name: e.SetName, ID: e.SetID})
	if err != nil {
		return false, fmt.Errorf("read the nf_tables set %s: %w", e.SetName, err)
	}
	for _, el := range elements {
		// A name with * is the start of an interval: the name, then zeros.
		if name := bytes.TrimRight(el.Key, "\x00"); !el.IntervalEnd && len(name) > 0 && strings.HasPrefix(r.link, string(name)) {
			return true, nil
		}
	}
	return false, nil
}
