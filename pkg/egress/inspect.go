package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	childjudge "github.com/sandboxd/sandboxd/pkg/egress/judge"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A sandbox whose hosts may be decrypted has a child terminate of its own, which gets all its
// flows by name:
//
//	first flow ──▶ Start ──▶ Config: roots, rules, vault ──▶ flows
//	   Open: a name ──▶ marked? Inspect : a socket, as heads gets one
//	   Leaf: a name ──▶ marked? a certificate of the sandbox's authority
//	   Dial: a name ──▶ decided again, verified, a socket
//	Register ──▶ the new Config is taken ──▶ flows that it may deny are cut
//
// Child and flows end with the sandbox, or with the daemon.

// An Inspection says which hosts of a sandbox are decrypted beside those that its rules about
// requests mark, and gives its child what it needs.
type Inspection struct {
	// Vault is for judge.Config: the credentials and bindings, by vault.Encode; nil: none.
	Vault []byte
	// Marks reports whether a binding is for the host, a name in normal form, of the scheme
	// "https" or "http". It is called for each new connection and may not wait. Nil: there is no
	// binding. If it is not nil, each connection to port 80 or 443 passes the proxy.
	Marks func(scheme, host string) bool
	// Leaf makes a certificate for a name: a chain of one certificate and its key, in DER and
	// PKCS #8, as authority.Leaf does.
	Leaf func(name string) (cert, key []byte, err error)
	// Value reads a credential whose source is a file or a command. Its errors are for the log,
	// and never have the value in them. Nil: no credential has a source.
	Value func(ctx context.Context, credential string) ([]byte, error)
	// Mask: see inject.Options.
	Mask bool
}

// A plan is what the child of a sandbox works by, beside the compiled policy.
type plan struct {
	*Inspection
	network record.Network
}

const (
	// mostInspecting is how many children there may be by default: see terminate.Memory. An idle
	// one holds about 7 MiB.
	mostInspecting = 128
	// mostDecrypted is of how many marked names of a connection the daemon knows that they were
	// asked for. One with more is cut by each policy that may deny something.
	mostDecrypted = 64

	// ownStart is how long a connection waits for the child of its sandbox, which it may be the
	// first to need: a start takes some tens of milliseconds on a host that is not busy.
	ownStart    = 30 * time.Second
	configLimit = 10 * time.Second // for a child to take a Config
	valueLimit  = 15 * time.Second // for a value: the child waits for ten
	retryChild  = time.Second      // after a start that failed

	// What a child may ask for: some at a time, some more that wait for their turn, and of
	// leafs so many in a second. A leaf takes 0.1 ms; a value may take a command.
	leafsPerSecond       = 100
	valuesAtATime        = 4
	mostAsked      int32 = 160
)

// binds reports whether there are bindings.
func (s *sandbox) binds() bool {
	p := s.plan.Load()
	return p != nil && p.Marks != nil
}

// marks reports whether what the client of f says to the server name is decrypted. k is how it
// began.
func (s *sandbox) marks(f policy.Flow, k heads.Kind, name string) bool {
	judged, bound := s.marksBy(f, k, name)
	return judged || bound
}

// marksBy says what marks it: rules about requests decide on each, or a credential is bound to it.
func (s *sandbox) marksBy(f policy.Flow, k heads.Kind, name string) (judged, bound bool) {
	p := s.plan.Load()
	if p == nil || name == "" {
		return false, false
	}
	scheme := ""
	switch k {
	case heads.TLS, heads.Check:
		scheme = "https"
	case heads.HTTP:
		scheme = "http"
	default:
		return false, false
	}
	return s.policy.Load().Inspects(f, name), p.Marks != nil && f.Port == portOf[scheme] && p.Marks(scheme, name)
}

// inspects is marks for whatever the client of f speaks.
func (s *sandbox) inspects(f policy.Flow, name string) bool {
	return s.marks(f, heads.TLS, name) || s.marks(f, heads.HTTP, name)
}

var portOf = map[string]uint16{"https": 443, "http": 80}

// hiddenFromBindings is why a flow is denied whose protocol hides the name.
const hiddenFromBindings = "nobody can see the server's name on this port, and credentials are bound to names"

// withBindings is what becomes of a first packet that the policy allows, in a sandbox with
// bindings. What may be a request to a bound host passes the proxy. QUIC, which hides the name, is
// refused where only the mode allows it, as if a rule that denies a name stood behind the others:
// clients then fall back to TCP.
func (s *sandbox) withBindings(f policy.Flow, a policy.Action, why policy.Reason) (policy.Action, policy.Reason) {
	switch {
	case a != policy.Allow || !s.binds():
	case f.Proto == unix.IPPROTO_TCP && (f.Port == 80 || f.Port == 443):
		return policy.Proxy, why
	case f.Proto == unix.IPPROTO_UDP && f.Port == 443 && why.Cause == policy.ByMode:
		return policy.Deny, policy.Reason{Cause: policy.ByName, Text: hiddenFromBindings}
	}
	return a, why
}

// An ownChild is the child terminate of one sandbox.
type ownChild struct {
	p    *proxy
	s    *sandbox
	ctx  context.Context // ends with it
	stop context.CancelFunc
	// Of its life, however often the child starts: secrets for events about those, lefts for GuestLeft.
	notes, lefts, secrets terminate.Notes

	leafs  turns
	values turns

	configuring sync.Mutex // one Config is sent at a time

	mu      sync.Mutex
	started chan struct{}     // closed when sup or fault is there; nil: to be started
	sup     *child.Supervisor // nil: it does not run
	fault   error             // why not
	line    *child.Conn       // to the child that runs, or nil
	ready   chan struct{}     // closed when that one has its Config
	refused error             // why the last one did not take its Config
	ended   bool
	signed  rate // leafs
}

func newOwnChild(p *proxy, s *sandbox) *ownChild {
	k := &ownChild{p: p, s: s, leafs: newTurns(1), values: newTurns(valuesAtATime)}
	k.ctx, k.stop = context.WithCancel(context.Background())
	return k
}

// conn is the line to the child, when that has its Config. It starts the first one.
func (k *ownChild) conn(ctx context.Context) (*child.Conn, error) {
	k.mu.Lock()
	if k.started == nil && !k.ended {
		k.started = make(chan struct{})
		k.p.done.Go(k.start)
	}
	started := k.started
	k.mu.Unlock()
	if started == nil {
		return nil, errGone
	}
	select {
	case <-started:
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the start of the sandbox's child %s: %w", terminate.Verb, ctx.Err())
	}
	k.mu.Lock()
	sup, fault := k.sup, k.fault
	k.mu.Unlock()
	if sup == nil {
		return nil, cmp.Or(fault, errGone)
	}
	for {
		line, err := sup.Conn(ctx)
		if err != nil {
			return nil, err
		}
		k.mu.Lock()
		ready, current := k.ready, k.line == line
		k.mu.Unlock()
		if !current { // it has died
			continue
		}
		select {
		case <-ready:
			return line, nil
		case <-line.Done():
			k.mu.Lock()
			refused := k.refused
			k.mu.Unlock()
			if refused != nil {
				return nil, refused
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("wait until the sandbox's child %s has its configuration: %w", terminate.Verb, ctx.Err())
		}
	}
}

// start starts the first child.
func (k *ownChild) start() {
	idle, err := k.p.own.enter(k, func(other *ownChild) bool {
		k.p.mu.Lock()
		defer k.p.mu.Unlock()
		return k.p.of[other.s] == 0
	})
	var sup *child.Supervisor
	if idle != nil {
		idle.rest()
	}
	if err == nil {
		sup, err = child.Start(k.ctx, child.Config{
			Verb: terminate.Verb, Memory: terminate.Memory, Max: terminate.MaxBody, Logger: k.p.log.With("sandbox", k.s.id),
			Place: k.place, Handle: k.handle, Begin: k.begin,
			End: func(line *child.Conn) {
				k.p.drop(line)
				k.mu.Lock()
				defer k.mu.Unlock()
				if k.line == line {
					k.line = nil
				}
			},
		})
	}
	k.mu.Lock()
	if err == nil && (k.ended || !k.p.own.has(k)) {
		err = errGone
	}
	if k.fault = err; err == nil {
		k.sup, sup = sup, nil
	}
	close(k.started)
	k.mu.Unlock()
	if sup != nil { // nobody wants it any more
		sup.Close() //nolint:errcheck // it has none
	}
	if err != nil {
		k.p.own.leave(k)
		time.AfterFunc(retryChild, k.again) // by the next flow then
	}
}

// again lets the next flow start the child, if it does not run.
func (k *ownChild) again() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.sup == nil && k.started != nil {
		select {
		case <-k.started:
			k.started = nil
		default: // it starts
		}
	}
}

func (k *ownChild) place(pid int) error {
	if k.p.e.cfg.Inspecting == nil {
		return nil
	}
	return k.p.e.cfg.Inspecting(k.s.id, pid)
}

// close ends the child, and waits for its end; one that is starting ends when it has started.
func (k *ownChild) close() {
	k.mu.Lock()
	sup := k.sup
	k.sup, k.ended = nil, true
	k.mu.Unlock()
	k.stop()
	if sup != nil {
		sup.Close() //nolint:errcheck // it has none
		k.p.own.leave(k)
	}
}

// rest ends a child that has no flow. The next flow starts another one. A flow that comes at this
// moment is reset.
func (k *ownChild) rest() {
	k.mu.Lock()
	sup := k.sup
	if sup != nil {
		k.sup, k.started = nil, nil
	}
	k.mu.Unlock()
	if sup != nil {
		sup.Close() //nolint:errcheck // it has none
	}
}

// begin configures a child that has begun. Flows wait for that.
func (k *ownChild) begin(line *child.Conn) {
	ready := make(chan struct{})
	k.mu.Lock()
	k.line, k.ready, k.refused = line, ready, nil
	k.mu.Unlock()
	k.p.done.Go(func() {
		if k.configure(k.ctx, line) {
			close(ready)
		}
	})
}

// refresh gives the child, if one runs, the plan of the moment. One that does not take it has no
// flow any more when refresh returns. Nor has the child that all share: it got those of the
// sandbox when no host was to be decrypted.
func (k *ownChild) refresh(ctx context.Context) {
	k.mu.Lock()
	line := k.line
	k.mu.Unlock()
	k.p.closeIf(k.s, func(x *proxied) bool { return x.line != nil && x.line != line })
	if line != nil && !k.configure(ctx, line) {
		k.p.drop(line)
	}
}

// configure sends the Config of the moment. A child that does not take it is ended, and the next
// one begins with it: none goes on by older rules.
func (k *ownChild) configure(ctx context.Context, line *child.Conn) bool {
	k.configuring.Lock()
	defer k.configuring.Unlock()
	ctx, cancel := context.WithTimeout(ctx, configLimit)
	defer cancel()
	defer context.AfterFunc(ctx, func() { line.Close() })() // which ends a write for which the child does not read
	c, err := k.config()
	if err == nil {
		err = c.Send(ctx, line)
	}
	if err == nil {
		return true
	}
	if !errors.Is(err, child.ErrGone) && k.ctx.Err() == nil {
		k.mu.Lock()
		k.refused = err
		k.mu.Unlock()
		k.p.log.Error("the child that decrypts for a sandbox does not get its rules; sandboxd ends it and its connections, and starts "+
			"another", "sandbox", k.s.id, "err", err)
	}
	line.Close()
	return false
}

func (k *ownChild) config() (c terminate.Config, err error) {
	p := k.s.plan.Load()
	if p == nil {
		return c, errGone
	}
	if c.Roots, err = k.p.e.cfg.Roots(); err != nil {
		return c, err
	}
	c.Judge = childjudge.Config{
		Source: k.s.addr, Host: k.p.e.cfg.Host, Network: p.network, Vault: p.Vault, Mask: p.Mask,
	}.Encode()
	return c, nil
}

// handle takes what the child says. One that says what it must not is ended.
func (k *ownChild) handle(line *child.Conn, m child.Message) {
	var err error
	switch m.Kind {
	case heads.KindOpen, heads.KindDial, heads.KindClosed:
		if k.p.said(line, m) {
			return
		}
		err = errors.New("a message of a wrong form, or about what it may not ask for")
	case terminate.KindLeaf:
		var name string
		if name, err = terminate.ParseLeafRequest(m.Body); err == nil {
			k.leaf(line, m, name)
		}
	case terminate.KindValue:
		var name string
		if name, err = terminate.ParseValueRequest(m.Body); err == nil {
			k.value(line, m, name)
		}
	case terminate.KindNote:
		var n terminate.Note
		if n, err = terminate.ParseNote(m.Body); err == nil {
			notes := &k.notes
			if n.Kind == terminate.GuestLeft {
				notes = &k.lefts
			}
			k.tell(notes, InspectEvent{Kind: kindsOfNotes[n.Kind], Host: n.Name, Text: n.Text})
		}
	case terminate.KindEvent:
		var e terminate.Event
		if e, err = terminate.ParseEvent(m.Body); err == nil {
			notes := &k.notes
			if e.Kind.OfSecret() {
				notes = &k.secrets
			}
			k.tell(notes, InspectEvent{
				Kind: kindsOfEvents[e.Kind], Host: e.Host, Method: e.Method, Binding: e.Binding, Credential: e.Credential,
				Place: e.Place, Text: e.Text,
			})
		}
	default:
		err = errors.New("a message of an unknown kind")
	}
	if err != nil {
		k.p.log.Error("the child that decrypts for a sandbox sent what it must not; sandboxd ends it", "sandbox", k.s.id,
			"kind", m.Kind, "err", err)
		line.Close()
	}
}

// leaf answers with a certificate for a marked name.
func (k *ownChild) leaf(line *child.Conn, m child.Message, name string) {
	refuse := func(text string) { line.Answer(m, terminate.Leaf{Text: text}.Append(nil), nil) } //nolint:errcheck // nobody waits for it
	k.mu.Lock()
	soon := k.signed.allow(time.Now(), leafsPerSecond)
	k.mu.Unlock()
	if !soon {
		refuse(fmt.Sprintf("a sandbox gets %d certificates in a second", leafsPerSecond))
		return
	}
	ok := k.leafs.take(k, func() {
		p := k.s.plan.Load()
		switch {
		case p == nil, p.Leaf == nil:
			refuse("this sandbox has no authority")
		case !k.decrypts(line, name):
			k.warn("the child that decrypts for a sandbox asked for a certificate that it may not have", "name", name)
			refuse("no rule about requests and no binding is about " + name)
		default:
			cert, key, err := p.Leaf(name)
			if err != nil {
				k.warn("cannot make a certificate for a sandbox, so connections to the host fail", "name", name, "err", err)
				refuse("sandboxd cannot make a certificate for " + name + "; its log says why")
				return
			}
			line.Answer(m, terminate.Leaf{Chain: [][]byte{cert}, Key: key}.Append(nil), nil) //nolint:errcheck // likewise
		}
	})
	if !ok {
		refuse("too many certificates are asked for at once")
	}
}

// decrypts reports whether the child of that line has a flow of TLS to a marked name.
func (k *ownChild) decrypts(line *child.Conn, name string) bool {
	k.p.mu.Lock()
	defer k.p.mu.Unlock()
	for _, x := range k.p.flows {
		if x.s == k.s && x.line == line && x.marked[name] && k.s.marks(x.flow, heads.TLS, name) {
			return true
		}
	}
	return false
}

// value answers with the value of a credential whose source is a file or a command.
func (k *ownChild) value(line *child.Conn, m child.Message, name string) {
	answer := func(v terminate.Value) { line.Answer(m, v.Append(nil), nil) } //nolint:errcheck // nobody waits for it
	ok := k.values.take(k, func() {
		p := k.s.plan.Load()
		if p == nil || p.Value == nil {
			answer(terminate.Value{Text: "no credential of this sandbox is read from a file or a command"})
			return
		}
		ctx, cancel := context.WithTimeout(k.ctx, valueLimit)
		defer cancel()
		b, err := p.Value(ctx, name)
		if err == nil && (len(b) == 0 || len(b) > terminate.MaxValue) {
			err = fmt.Errorf("its source gives %d bytes: want 1 to %d", len(b), terminate.MaxValue)
		}
		if err != nil {
			k.warn("cannot read the value of a credential: requests that need it are refused", "credential", name, "err", err)
			answer(terminate.Value{Text: "sandboxd cannot read the value of this credential; its log says why"})
			return
		}
		answer(terminate.Value{Bytes: b})
	})
	if !ok {
		answer(terminate.Value{Text: "too many values are asked for at once"})
	}
}
