// Package egress decides what a sandbox may reach.
//
// The kernel asks the daemon once for each new flow, and applies the answer to the rest
// of the flow:
//
//	sb-<id> ─▶ raw       source address belongs to that link?   else drop
//	           mangle    first packet of a flow: NFQUEUE ──▶ Engine: hard blocks,
//	              │                                 ◀── mark    then rules, then mode, then limits
//	           nat       port 53, whatever the server ──▶ the resolver of the Engine
//	           filter    to the host: mark RESOLVE, and that resolver only, else refused
//	              │      elsewhere: mark ALLOW ─▶ out, masqueraded
//	              ▼                 mark DENIED ─▶ refused at once (RST, port unreachable)
//	                                no mark    ─▶ dropped
//
// The chains are static and match every link of the instance. A sandbox is one entry,
// address and link, in the set SRC. Without the entry nothing that a sandbox sends
// passes: Register opens its network, and Unregister is the kill switch.
//
// Each flow that is let in has an entry in the table of conntrack, which is the whole
// host's. A ledger bounds the entries of each sandbox (ledger.go).
//
// What surprises: all rules stay when the daemon is gone. The queue then has no reader
// and lets packets pass without a mark, conntrack lets established flows pass, and
// FORWARD drops a flow without a mark. So established flows go on and no new flow
// opens. Nothing is stored to change that: the guest sends a dropped SYN again, and it
// is answered after the restart.
//
// Refusals come at once, but the kernel sends one host six ICMP errors and then
// one a second (net.ipv4.icmp_ratelimit): a guest that is refused UDP flows
// faster than that sees some of them time out. TCP resets have no such limit.
//
// A lock confines sandboxes even if somebody flushes iptables: a table of nf_tables
// that iptables(8) does not see drops packets without the mark ALLOW (lock.go).
//
// IPv6 is dropped entirely: by two rules of ip6tables (ipv6.go), by the lock, and by
// disable_ipv6 on the links (pkg/netns).
//
// The kernel rules repeat the blocks that no policy may open (the host, other
// sandboxes, link-local), so that an error in Go cannot open them.
package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
	"github.com/sandboxd/sandboxd/pkg/egress/flowlog"
	"github.com/sandboxd/sandboxd/pkg/egress/leases"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Config describes the instance that an Engine serves. Only Instance is required.
type Config struct {
	Instance instance.Instance
	// Host are the rules that stand before those of each sandbox.
	Host policy.Host
	// Pool holds the addresses of all sandboxes. Gateway is the host's address towards
	// them, and the resolver's. Zero values are replaced by those of the instance.
	Pool    netip.Prefix
	Gateway netip.Addr
	// MaxOpenFlows is how many open flows a sandbox may have at a time, and MaxFlows how
	// many entries its flows may have in the table of conntrack, closed ones and those
	// that the resolver opens for it included. 0: 2048 and 4096.
	MaxOpenFlows, MaxFlows int
	// Upstreams are the DNS servers to ask, in this order. If empty, they are the
	// nameservers in /etc/resolv.conf, which is read again in every round of the guard.
	Upstreams []Upstream
	// Uplinks, if not nil, names the links that forward only because sandboxes need it.
	// The lock drops a forwarded packet that arrives by such a link and opens a flow.
	// Uplinks is called at the start, by CloseUplinks, every ten seconds, and when
	// somebody changes the rules of nf_tables.
	Uplinks func() ([]string, error)
	// FlowLogs is the directory of the flow logs of sandboxes; "": they are in memory
	// only.
	FlowLogs string
	// FlowDir is a directory on tmpfs that only root may enter, with what the next Engine needs
	// to take over the flows by name. If it is "", they end with this one.
	FlowDir string
	// Outliving, if not nil, is where processes are that outlive the daemon.
	Outliving Outliving
	// Leases is the directory where DNS leases outlive the daemon, but not the host: best
	// on a tmpfs, because each answer of DNS is written there. "": they are in memory only.
	Leases string
	Logger *slog.Logger // nil: discard
	// OnDeny, if not nil, is called with denied flows, one call at a time and outside
	// the packet path. A sandbox causes at most 100 calls a second; under load some may
	// be lost.
	OnDeny func(Denial)
	// OnInspect is like OnDeny, for what is noticed in decrypted connections: of a sandbox 16
	// calls at once, and then one a second.
	OnInspect func(InspectEvent)
	// Inspecting, if not nil, puts the child of a sandbox that decrypts for it where its memory
	// and processor time are bounded. After an error that child ends, and connections by name of
	// the sandbox are reset until another one starts.
	Inspecting func(id string, pid int) error
	// MaxInspecting is how many such children there may be, each of which may hold
	// terminate.Memory and use two processors. One without a connection ends for the next. If
	// none is without, the connections by name of the next sandbox are reset. 0: 128.
	MaxInspecting int

	// Roots are the certificates, in PEM, that servers of decrypted hosts are verified by; nil:
	// those of the host (terminate.HostRoots).
	Roots func() ([]byte, error)

	every time.Duration // how often the guard checks; 0: guardEvery
}

// Engine is the egress of one instance.
type Engine struct {
	// FlowLog knows what each sandbox sent, received and connected to.
	FlowLog *flowlog.Recorder
	// Leases knows which addresses DNS has answered to each sandbox.
	Leases *leases.Book

	judge
	cfg    Config
	log    *slog.Logger
	sets   *netlink.Handle
	chains *chains
	queue  *queue
	busy   *queue // of sandboxes that open many flows
	dns    *resolver
	proxy  *proxy
	flows  *flusher
	ledger *ledger
	table  *conntrack.Table
	stop   context.CancelFunc
	done   sync.WaitGroup

	changes <-chan struct{} // somebody changed rules of nf_tables
	watch   *watch
	denials

	flowCounts flowCounts
	health     health

	guarding  sync.Mutex    // guards chains, lock, and the fields below
	held      []*heldLink   // down until the chains are complete
	retry     time.Time     // when the chains may be tried again, if pause is not 0
	pause     time.Duration // the wait before that, since the last try failed
	cut       atomic.Bool   // nothing confines sandboxes: no link may be up
	lock      lock
	closed    []string // the uplinks that the lock contains
	lockFault string   // why the lock is incomplete, as last logged
	noNAT     bool     // this kernel makes no natChain

	recovered atomic.Bool // see Recovered

	mu     sync.RWMutex
	byID   map[string]*sandbox
	byAddr map[netip.Addr]*sandbox
}

// sandbox is one registered source.
type sandbox struct {
	id     string
	addr   netip.Addr
	policy atomic.Pointer[policy.Policy]
	plan   atomic.Pointer[plan]     // nil: no host is decrypted
	own    atomic.Pointer[ownChild] // nil: it has none, because no host is
	leases *leases.Table
	log    *flowlog.Log
	dns    dnsBudget
	deny   rate // guarded by ledger.mu
	// leaving is set, under Engine.mu, before the entry leaves the set of sources: then
	// the guard does not put the entry back.
	leaving bool
	entered bool // its entry was added to the set of sources
}

// Open installs the packet layer and starts to decide on flows. If the host lacks
// something, the error names the package or kernel module, and nothing is open then.
// Sandboxes registered with an earlier Engine stay in the kernel; they must be
// registered again before they can open new flows.
func Open(ctx context.Context, cfg Config) (*Engine, error) {
	if !cfg.Pool.IsValid() {
		cfg.Pool = cfg.Instance.Pool()
	}
	if !cfg.Gateway.IsValid() {
		cfg.Gateway = cfg.Instance.Gateway()
	}
	cfg.MaxOpenFlows = cmp.Or(cfg.MaxOpenFlows, 2048)
	cfg.MaxFlows = cmp.Or(cfg.MaxFlows, 4096)
	cfg.MaxInspecting = cmp.Or(cfg.MaxInspecting, mostInspecting)
	if cfg.Roots == nil {
		cfg.Roots = terminate.HostRoots
	}
	if cfg.every == 0 {
		cfg.every = guardEvery
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	e := &Engine{
		judge: judge{pool: cfg.Pool}, cfg: cfg, log: cfg.Logger,
		lock: lock{cfg.Instance, cfg.Gateway.As4()},
		byID: map[string]*sandbox{}, byAddr: map[netip.Addr]*sandbox{},
		denials: newDenials(cfg.OnDeny, cfg.OnInspect),
	}
	if err := e.open(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open egress of instance %s: %w", cfg.Instance, err), e.Close())
	}
	return e, nil
}

// open makes the parts that depend on one another, in order: sets, chains that refer to
// them, resolver, queue.
func (e *Engine) open(ctx context.Context) (err error) {
	if e.FlowLog, err = flowlog.NewRecorder(e.cfg.FlowLogs, linkPrefix, e.log); err != nil {
		return err
	}
	if e.Leases, err = leases.OpenBook(e.cfg.Leases, e.log); err != nil {
		return err
	}
	if e.sets, err = netlink.NewHandle(unix.NETLINK_NETFILTER, unix.NETLINK_ROUTE); err != nil {
		return err
	}
	if err := e.createSets(); err != nil {
		return err
	}
	if e.chains, err = newChains(e.cfg.Instance, e.cfg.Pool, e.cfg.Gateway, e.log); err != nil {
		return err
	}
	if err := e.refreshHosts(); err != nil {
		return err
	}
	if e.table, err = conntrack.Open(); err != nil {
		return err
	}
	if e.flows, err = newFlusher(e.log, e.table); err != nil {
		return err
	}
	if e.watch, err = watchRules(); err != nil {
		e.log.Warn("cannot watch the firewall: sandboxd notices its changes only every ten seconds", "err", err)
	}
	if err := e.restore(ctx); err != nil {
		return err
	}
	if err := e.restore6(ctx); err != nil {
		return err
	}
	// Older versions had this set; no chain refers to it any more.
	_ = e.sets.IpsetDestroy(e.cfg.Instance.Set(oldUplinks))
	e.ledger = newLedger(e.cfg, e.table)
	if err := e.ledger.count(); err != nil {
		return err
	}
	if e.dns, err = newResolver(ctx, e); err != nil {
		return err
	}
	if e.proxy, err = newProxy(ctx, e); err != nil {
		return err
	}
	if e.queue, err = openQueue(ctx, e.cfg.Instance.Queue()); err != nil {
		return err
	}
	if e.busy, err = openQueue(ctx, e.cfg.Instance.BusyQueue()); err != nil {
		return err
	}
	e.health.look(time.Now())
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	e.stop = stop
	e.done.Go(func() { e.serveQueue(run, e.queue) })
	e.done.Go(func() { e.serveQueue(run, e.busy) })
	e.done.Go(func() { e.tellDenials(run) })
	if e.watch != nil {
		changes := make(chan struct{}, 1)
		e.changes = changes
		e.done.Go(func() { e.watch.run(changes) })
	}
	e.done.Go(func() { e.guard(run) })
	e.done.Go(func() { e.flows.run(run) })
	e.done.Go(func() { e.ledger.countOn(run) })
	e.done.Go(func() { e.FlowLog.Keep(run) })
	e.dns.serve()
	e.proxy.serve(run)
	return nil
}

// Close stops deciding. Chains and sets stay: established flows go on and no new flow
// opens. Flows by name go on in the child that has them. It may be called twice.
func (e *Engine) Close() error {
	var errs []error
	if e.stop != nil {
		e.stop()
	}
	if e.queue != nil {
		errs = append(errs, e.queue.close())
	}
	if e.busy != nil {
		errs = append(errs, e.busy.close())
	}
	if e.dns != nil {
		errs = append(errs, e.dns.close())
	}
	if e.proxy != nil {
		errs = append(errs, e.proxy.close())
	}
	if e.watch != nil {
		errs = append(errs, e.watch.close())
	}
	e.done.Wait()
	e.letGo()
	if e.table != nil {
		errs = append(errs, e.table.Close())
	}
	if e.sets != nil {
		e.sets.Close()
	}
	if e.Leases != nil {
		e.Leases.Close()
	}
	if e.flows != nil {
		e.flows.handle.Close()
	}
	if e.stop != nil { // an Engine that did not open has counted nothing
		errs = append(errs, e.FlowLog.Leave())
	}
	e.stop, e.queue, e.busy, e.dns, e.proxy, e.watch = nil, nil, nil, nil, nil, nil
	return errors.Join(errs...)
}

// Register lets the sandbox id send from addr by its link, under the policy n. Calling
// it again replaces the policy at once, and closes the open flows that the new one denies
// before it returns.
//
// i says which hosts are decrypted; nil: none ever. It is replaced with the policy. When
// Register returns, the sandbox's child judges new requests by both; requests that it has
// passed on go on, unless the policy may deny requests to their host that the last one
// allowed: then their connections are reset. So are connections to a host that was not decrypted
// and is to be. One whose host is not to be decrypted any more goes on decrypted.
//
// The policy is in force before the first packet passes.
func (e *Engine) Register(ctx context.Context, id string, addr netip.Addr, n record.Network, i *Inspection) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("register %s: %w", id, err)
	}
	p, err := policy.Compile(e.cfg.Host, n)
	if err != nil {
		return err
	}
	if !addr.Is4() || !e.cfg.Pool.Contains(addr) {
		return fmt.Errorf("register %s: address %s is not in the pool %s", id, addr, e.cfg.Pool)
	}
	next := &sandbox{id: id, addr: addr, log: e.FlowLog.Open(id), leases: e.Leases.Open(id)}
	var with *plan
	if i != nil {
		with = &plan{Inspection: i, network: n}
	}
	was, err := e.publish(next, p, with)
	if err != nil {
		return err
	}
	s := e.lookup(addr)
	if s != nil && e.proxy.claim(s) {
		was.flows = true
	}
	if was.child != nil {
		was.child.close()
	}
	if s != nil && i != nil {
		s.own.Load().refresh(context.WithoutCancel(ctx))
	}
	switch lost := was.adopted && !next.leases.Whole(); {
	case s != nil && was.flows:
		if err := e.closeForbidden(s, was.policy, lost); err != nil {
			return fmt.Errorf("close the open flows of sandbox %s that its new policy denies: %w", id, err)
		}
	case was.adopted: // without a flow
		next.leases.Begin()
	}
	if err := e.addSource(id, addr); err != nil {
		return fmt.Errorf("register %s as %s: %w", id, addr, err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if s := e.byID[id]; s != nil && s.addr == addr {
		s.entered = true
	}
	return nil
}

// replaced is what a Register has replaced.
type replaced struct {
	policy *policy.Policy // nil: it was adopted
	// flows: there may be some that are open and denied now, or are to be decrypted.
	flows bool
	// adopted: the sandbox was not registered, and its flows are from the time of an earlier
	// daemon.
	adopted bool
	child   *ownChild // that has no sandbox any more, or nil
}

// publish puts p in force, for next or for the same sandbox if it is registered already, and with
// it what is decrypted. No verdict by the old policy is under way then.
func (e *Engine) publish(next *sandbox, p *policy.Policy, with *plan) (was replaced, err error) {
	e.ledger.mu.Lock() // a verdict is under way while it is held
	defer e.ledger.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if other := e.byAddr[next.addr]; other != nil && other.id != next.id {
		return was, fmt.Errorf("register %s: address %s belongs to %s", next.id, next.addr, other.id)
	}
	s := e.byID[next.id]
	if s == nil || s.addr != next.addr {
		if s != nil {
			delete(e.byAddr, s.addr)
			was.child = s.own.Swap(nil)
		}
		s, was.adopted = next, true
		e.byID[s.id], e.byAddr[s.addr] = s, s
	}
	was.policy = s.policy.Load()
	inspects := with != nil || s.plan.Load() != nil
	was.flows = e.ledger.has(s.addr) && (was.adopted || inspects || !p.Loosens(was.policy))
	s.policy.Store(p)
	s.plan.Store(with)
	switch own := s.own.Load(); {
	case with != nil && own == nil:
		s.own.Store(newOwnChild(e.proxy, s))
	case with == nil && own != nil:
		was.child = s.own.Swap(nil)
	}
	s.leaving = false
	return was, nil
}

// Unregister cuts id off, established flows included, and removes its policy and its
// leases. Its conntrack entries are deleted later; Gone waits for that. Absent is success.
// After an error the engine opens no flow of id, and Unregister may be tried again.
func (e *Engine) Unregister(ctx context.Context, id string) error {
	e.mu.Lock()
	s := e.byID[id]
	if s != nil {
		s.leaving = true
	}
	e.mu.Unlock()
	var addrs []netip.Addr
	if s != nil {
		addrs = append(addrs, s.addr)
	} else {
		// An earlier daemon registered it.
		sources, err := e.sources()
		if err != nil {
			return fmt.Errorf("unregister %s: %w", id, err)
		}
		for _, src := range sources {
			if src.id == id {
				addrs = append(addrs, src.addr)
			}
		}
	}
	var errs []error // none keeps Unregister from cutting what it can
	for _, a := range addrs {
		errs = append(errs, e.delSource(id, a))
	}
	e.mu.Lock()
	if s != nil && e.byID[id] == s {
		delete(e.byID, id)
		delete(e.byAddr, s.addr)
	}
	e.mu.Unlock()
	if s != nil {
		e.proxy.closeAll(s) // now that the proxy does not find it any more
		if own := s.own.Load(); own != nil {
			own.close()
		}
	}
	e.proxy.closeAside(id)
	if len(addrs) > 0 {
		e.FlowLog.End(id) // its link goes next, and its counters with it
	}
	e.flows.forget(id, addrs)
	// Last, as it may fail. If the daemon is killed before, the next one unregisters id again.
	if err := errors.Join(append(errs, e.Leases.Forget(id))...); err != nil {
		return fmt.Errorf("unregister %s: %w", id, err)
	}
	return nil
}

// lookup returns the sandbox that has addr, or nil.
func (e *Engine) lookup(addr netip.Addr) *sandbox {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.byAddr[addr]
}
