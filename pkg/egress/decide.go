package egress

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A judge decides on flows. It knows what no policy may open.
type judge struct {
	pool  netip.Prefix
	hosts atomic.Pointer[map[netip.Addr]bool] // addresses of this host: true; of broadcasts: false
}

// decide answers for the first packet of a flow.
func (j *judge) decide(s *sandbox, f policy.Flow) (policy.Action, policy.Reason) {
	return j.decideBy(s, f, s.leased)
}

// decideBy is decide with the names that leased returns for an address.
func (j *judge) decideBy(s *sandbox, f policy.Flow, leased func(netip.Addr) []string) (policy.Action, policy.Reason) {
	if weak.Off(weak.Policy) {
		return policy.Allow, policy.Reason{Cause: policy.ByMode, Text: "default"}
	}
	if name := j.blocks(f.Dst); name != "" {
		return policy.Deny, policy.Reason{Cause: policy.ByBlock, Text: name}
	}
	return s.policy.Load().Decide(f, leased(f.Dst))
}

// blocks says why dst is closed under every policy, or "".
func (j *judge) blocks(dst netip.Addr) string {
	if name := policy.Blocked(dst); name != "" {
		return name
	}
	if j.pool.Contains(dst) {
		return "another sandbox"
	}
	if _, closed := (*j.hosts.Load())[dst]; closed {
		return "host address"
	}
	return ""
}

// HostAddress reports whether a is an address of this host. Addresses that the host got
// in the last ten seconds may be missing.
func (j *judge) HostAddress(a netip.Addr) bool { return (*j.hosts.Load())[a] }

// Target is what somebody wants to reach: a name in normal form or an address, and a port.
type Target struct {
	Name  string
	Addr  netip.Addr
	Port  uint16
	Proto string // "tcp", "udp" or "icmp"; "": tcp
}

// Explanation says what the policy of a sandbox does with a Target.
type Explanation struct {
	Allowed bool
	Rule    string // that decides: a rule as written, "default", "host address", …
	// Resolves says whether DNS answers for a name, and by which rule.
	Resolves     bool
	ResolvesRule string
	// ByName says that Addr does not decide, but the name that the client sends. The rest
	// is what holds if it sends none.
	ByName bool
	// Leased are the names that DNS has answered with an address lately.
	Leased []string
	// Fixed says that no rule of the sandbox can change the answer.
	Fixed bool
}

// Explain says what the policy of the sandbox id does with t. errs.NotFound: the sandbox
// is not registered, because it does not run.
func (e *Engine) Explain(id string, t Target) (x Explanation, err error) {
	e.mu.RLock()
	s := e.byID[id]
	e.mu.RUnlock()
	if s == nil {
		return x, errs.New(errs.NotFound, "sandbox %s has no network now: it does not run", id)
	}
	p := s.policy.Load()
	f := policy.Flow{Dst: t.Addr, Proto: policy.Proto(cmp.Or(t.Proto, "tcp")), Port: t.Port}
	var why policy.Reason
	if t.Name != "" {
		x.Resolves, why = p.Resolves(t.Name)
		x.ResolvesRule = why.Text
		if x.Allowed, why = p.DecideName(f, t.Name); x.Allowed && !x.Resolves {
			x.Allowed, why.Text = false, x.ResolvesRule
		}
		x.Rule, x.Fixed = why.Text, !x.Allowed && p.Fixed(f, t.Name)
		return x, nil
	}
	x.Leased = s.leased(t.Addr)
	action, why := e.decide(s, f)
	x.Allowed = action == policy.Allow
	if action == policy.Proxy {
		x.ByName = true
		x.Allowed, why = p.DecideName(f, "")
	}
	x.Rule = why.Text
	x.Fixed = !x.Allowed && (why.Cause == policy.ByBlock || p.Fixed(f, ""))
	return x, nil
}

// closeForbidden closes the open flows of s that its policy does not allow any more, and
// returns when they are gone. Flows go on that are still allowed, also by a name whose
// lease has ended since. The leases of an adopted sandbox are lost: of its flows those end
// that no name could have opened.
//
// Preconditions: no verdict by an older policy is under way.
func (e *Engine) closeForbidden(s *sandbox, adopted bool) error {
	now := time.Now()
	leased := func(a netip.Addr) []string { return s.leases.of(a, now, true) }
	var requests []byte
	err := e.table.eachOf(s.addr, func() { requests = requests[:0] }, func(t tracked) {
		if t.closed || t.IsDNS() {
			return
		}
		action, why := e.decideBy(s, t.Flow, leased)
		if adopted && action == policy.Deny && why.Cause != policy.ByBlock && s.policy.Load().SomeName(t.Flow) {
			return
		}
		// A flow that passed without the proxy never said its name.
		if action == policy.Deny || action == policy.Proxy && t.replier == t.Dst {
			requests = appendForgetTuple(requests, t.tuple)
		}
	})
	if err != nil {
		return err
	}
	return e.table.send(requests)
}

// judge decides whether the child gets a socket.
func (p *proxy) judge(ctx context.Context, s *sandbox, f policy.Flow, o heads.Open) (bool, policy.Reason) {
	if weak.Off(weak.Proxy) {
		return true, policy.Reason{Cause: policy.ByMode, Text: "default"}
	}
	allow, why := p.decide(s, f, o)
	if !allow || o.Name == "" || slices.Contains(s.leased(f.Dst), o.Name) {
		return allow, why
	}
	// DNS has not answered the sandbox so: it may know the address from elsewhere, which is
	// no harm if it is one of the name.
	if addrs, err := p.e.Resolve(ctx, s, o.Name); err == nil && slices.Contains(addrs, f.Dst) {
		return true, why
	}
	return false, policy.Reason{Cause: policy.ByName, Text: fmt.Sprintf("%s is not an address of %s", f.Dst, o.Name)}
}

// decide is judge without the check that the name has the address.
func (p *proxy) decide(s *sandbox, f policy.Flow, o heads.Open) (bool, policy.Reason) {
	if name := p.e.blocks(f.Dst); name != "" {
		return false, policy.Reason{Cause: policy.ByBlock, Text: name}
	}
	pol, says := s.policy.Load(), f.Port == 80 || f.Port == 443
	switch {
	case o.Kind == heads.H2C:
		return false, policy.Reason{Cause: policy.ByName, Text: "HTTP/2 without TLS is not read; use HTTP/1.1, or TLS"}
	case o.Kind == heads.First, o.Kind == heads.Other && !says:
		return pol.DecideLeased(f, s.leased(f.Dst))
	}
	return pol.DecideName(f, o.Name)
}

// refusalOf is the sentence that a guest reads.
func refusalOf(s *sandbox, f policy.Flow, name string, why policy.Reason) string {
	target := fmt.Sprintf("%s:%d", cmp.Or(name, f.Dst.String()), f.Port)
	help := fmt.Sprintf("A rule that allows %s would open it.", target)
	switch {
	case why.Cause == policy.ByBlock, s.policy.Load().Fixed(f, name):
		help = "No rule of the sandbox can open it."
	case why.Cause == policy.ByName && name != "":
		help = "Ask DNS for the name, and connect to what it answers."
	}
	text := why.Text
	if why.Cause == policy.ByMode {
		text = "no rule allows it"
	}
	return fmt.Sprintf("sandboxd does not let this sandbox reach %s (%s). %s", target, text, help)
}

// tellName reports a denial of a flow whose name is known.
func (e *Engine) tellName(s *sandbox, f policy.Flow, name string, why policy.Reason) {
	e.ledger.mu.Lock()
	defer e.ledger.mu.Unlock()
	e.denials.tellAs(s, f, name, why, ByProxy)
}
