package egress

import (
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

// closeForbidden closes the open flows of s that its policy does not allow any more, those
// through the proxy too, and those that are to be decrypted, and returns when they are gone.
// Flows go on that are still allowed, also by a name whose lease has ended since. If leases of an
// earlier daemon are lost, those of its flows go on that some name could have opened. old is the
// last policy, or nil.
//
// Preconditions: no verdict by an older policy is under way.
func (e *Engine) closeForbidden(s *sandbox, old *policy.Policy, lost bool) error {
	now := time.Now()
	leased := func(a netip.Addr) []string { return s.leases.Of(a, now, true) }
	var requests []byte
	ofProxy, spared := e.proxy.closeForbidden(s, old, lost), 0
	err := conntrack.EachOf(s.addr, func() { requests, spared = requests[:0], 0 }, func(t conntrack.Entry) {
		if t.Closed || t.IsDNS() {
			return
		}
		action, why := e.decideBy(s, t.Flow, leased)
		if lost && action == policy.Deny && why.Cause != policy.ByBlock && s.policy.Load().SomeName(t.Flow) {
			spared++
			return
		}
		direct := t.Replier == t.Dst // it passed without the proxy, and never said its name
		if bound, _ := s.withBindings(t.Flow, action, why); bound != action {
			// One to a host without bindings, or to none that DNS has named, loses nothing.
			marked := func(name string) bool { return s.inspects(t.Flow, name) }
			if bound == policy.Deny || slices.ContainsFunc(leased(t.Dst), marked) {
				action = bound
			}
		}
		if action == policy.Deny || action == policy.Proxy && direct {
			requests = conntrack.AppendForgetTuple(requests, t.Tuple)
		}
	})
	if err != nil {
		return err
	}
	if lost && ofProxy+spared == 0 {
		s.leases.Begin() // no flow needs a lost one
	}
	return e.table.Send(requests)
}

// cut resets a flow on both sides, and ends what it dials. The child sees the ends.
//
// Preconditions: p.mu is held.
func (p *proxy) cut(x *proxied) {
	x.cut = true
	x.stop()
	x.guest.Reset()
	for _, o := range x.to {
		o.Reset()
	}
}

// end closes the descriptors of a flow, with a reset if the child did not end it.
//
// Preconditions: p.mu is held.
func (p *proxy) end(x *proxied, cut bool) {
	p.fewer.Broadcast()
	delete(p.flows, x.number)
	if p.of[x.s]--; p.of[x.s] == 0 {
		delete(p.of, x.s)
	}
	if !x.own {
		p.heads--
	}
	x.stop()
	if cut {
		p.cut(x)
	}
	for number := range x.to {
		p.endOutward(x, number)
	}
	finish(x.guest)
	p.forgo(x)
}

// alive reports whether a flow goes on: it has not ended, nor is cut, and its sandbox is registered.
// Unregister calls closeAll when lookup does not find the sandbox any more, so a flow that
// is alive while p.mu is held is one that closeAll will see.
//
// Preconditions: p.mu is held.
func (p *proxy) alive(x *proxied) bool {
	return p.flows[x.number] == x && !x.cut && p.e.lookup(x.s.addr) == x.s
}

// finish ends a connection that the child says it has closed, whether it has or not, and
// closes the descriptor. What was written before still arrives.
func finish(c child.Socket) {
	if l, err := unix.GetsockoptLinger(int(c), unix.SOL_SOCKET, unix.SO_LINGER); err == nil && l.Onoff != 0 {
		c.Reset() // the child wants that: the other side must not take it for an orderly end
	} else {
		unix.Shutdown(int(c), unix.SHUT_RDWR) //nolint:errcheck // it has ended
	}
	c.Close() //nolint:errcheck // nothing is written
}

// drop resets all flows of a child that has died.
func (p *proxy) drop(line *child.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, x := range p.flows {
		if x.line == line {
			p.end(x, true)
		}
	}
	p.hands[line].end(p.e.cfg.FlowDir)
	delete(p.hands, line)
}

// closeAll ends all flows of a sandbox, and what they dial.
//
// Preconditions: lookup does not find s any more, so none is added.
func (p *proxy) closeAll(s *sandbox) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of[s] == 0 {
		return
	}
	for _, x := range p.flows {
		if x.s == s {
			p.end(x, true)
		}
	}
}

// closeForbidden resets the flows that the policy of s denies now, and those that are about
// to be opened are judged by it. For leases that are lost see that of Engine; spared are the
// sockets that go on for want of them. old is the last policy, or nil.
//
// The daemon has not seen the requests to a marked name. So those connections go on if the
// policy denies nothing there that the last one allowed.
func (p *proxy) closeForbidden(s *sandbox, old *policy.Policy, lost bool) (spared int) {
	now, pol := time.Now(), s.policy.Load()
	stays := func(f policy.Flow, name string) bool {
		allow, _ := pol.DecideSome(f, name)
		return allow && (old == nil || pol.LoosensFor(old, name))
	}
	p.closeIf(s, func(x *proxied) bool {
		if x.many && old != nil && !pol.Loosens(old) {
			return true
		}
		for name := range x.marked {
			if !stays(x.flow, name) {
				return true
			}
		}
		for _, o := range x.to {
			switch {
			case o.dial:
				if !stays(x.flow, o.name) {
					return true
				}
			case o.name == "" && says(x.flow, o.kind) && !p.e.allowsAny(s, x.flow):
				if allow, _ := pol.DecideName(x.flow, ""); !allow {
					return true
				}
			case o.name == "":
				allow, _ := pol.DecideLeased(x.flow, s.leases.Of(x.flow.Dst, now, true))
				if !allow && lost && pol.SomeName(x.flow) {
					spared++
				} else if !allow {
					return true
				}
			case p.e.doubts(s, x.flow, o.name, o.free):
				return true
			default:
				if allow, _ := pol.DecideName(x.flow, o.name); !allow || s.marks(x.flow, o.kind, o.name) {
					return true
				}
			}
		}
		return false
	})
	return spared
}

func (p *proxy) closeIf(s *sandbox, which func(*proxied) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of[s] == 0 {
		return
	}
	for _, x := range p.flows {
		if x.s == s && which(x) {
			p.cut(x)
		}
	}
}
