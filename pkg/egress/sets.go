package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/dump"
	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

const linkPrefix = "sb-"

// source is an entry of the set of sources.
type source struct {
	id   string
	addr netip.Addr
}

func (e *Engine) src() string { return e.cfg.Instance.Set("src") }

// createSets makes the set. An existing set keeps its entries.
func (e *Engine) createSets() error {
	err := e.sets.IpsetCreate(e.src(), "hash:net,iface", netlink.IpsetCreateOptions{Replace: true})
	if err != nil {
		return fmt.Errorf("create ipset %s: %w: the kernel needs the modules ip_set and ip_set_hash_netiface (modprobe "+
			"ip_set_hash_netiface; Debian has them in linux-image-amd64, but not in its minimal kernel builds)", e.src(), err)
	}
	return nil
}

// oldUplinks is the set in which older versions kept the uplinks, which are now in the
// lock. It takes at most 64 links, and `ipset destroy` removes it.
const oldUplinks = "uplink"

func entry(id string, a netip.Addr) *netlink.IPSetEntry {
	return &netlink.IPSetEntry{IP: a.AsSlice(), CIDR: 32, IFace: linkPrefix + id, Replace: true}
}

func (e *Engine) addSource(id string, a netip.Addr) error {
	return e.sets.IpsetAdd(e.src(), entry(id, a))
}

func (e *Engine) delSource(id string, a netip.Addr) error {
	return absent(e.sets.IpsetDel(e.src(), entry(id, a)))
}

// absent is err, or nil if err says that the entry was not there.
func absent(err error) error {
	if errors.Is(err, nl.IPSetError(nl.IPSET_ERR_EXIST)) {
		return nil // how the library says that an entry was not there
	}
	return err
}

func (e *Engine) sources() ([]source, error) {
	set, err := netlink.IpsetList(e.src()) // on a socket of its own: addSource must not wait for it
	if err != nil {
		return nil, fmt.Errorf("list ipset %s: %w", e.src(), err)
	}
	var out []source
	for _, entry := range set.Entries {
		id, ok := strings.CutPrefix(entry.IFace, linkPrefix)
		addr, isAddr := netip.AddrFromSlice(entry.IP.To4())
		if ok && isAddr {
			out = append(out, source{id, addr})
		}
	}
	return out, nil
}

// ListRegistered lists the IDs of sandboxes that may send.
func (e *Engine) ListRegistered(context.Context) ([]string, error) {
	sources, err := e.sources()
	if err != nil {
		return nil, fmt.Errorf("list registered sandboxes: %w", err)
	}
	ids := make([]string, 0, len(sources))
	for _, s := range sources {
		ids = append(ids, s.id)
	}
	return ids, nil
}

// mendSources puts back the entries of registered sandboxes that somebody took out of
// the set. The kernel sends no event for changes of sets. A sandbox whose entry is
// missing is cut off, not open.
func (e *Engine) mendSources() error {
	e.mu.RLock()
	before := map[*sandbox]bool{} // a sandbox registered while the set is read is not missing
	for _, s := range e.byID {
		before[s] = s.entered
	}
	e.mu.RUnlock()
	sources, err := e.sources()
	if errors.Is(err, unix.ENOENT) {
		e.log.Warn("another program destroyed the ipset of sandboxd; it is being created again")
		err = e.createSets()
	}
	if err != nil {
		return err
	}
	have := map[source]bool{}
	for _, s := range sources {
		have[s] = true
	}
	e.mu.RLock()
	defer e.mu.RUnlock()
	var mended []string
	for _, s := range e.byID {
		if !before[s] || s.leaving || have[source{s.id, s.addr}] {
			continue
		}
		if err := e.addSource(s.id, s.addr); err != nil {
			return fmt.Errorf("add %s to ipset %s again: %w", s.addr, e.src(), err)
		}
		mended = append(mended, s.id)
	}
	if len(mended) > 0 {
		e.log.Warn("sandboxes had no network: another program removed them from an ipset; they were added again", "set", e.src(),
			"sandboxes", mended)
	}
	return nil
}

// The flusher deletes the conntrack entries of sandboxes that are gone. It does that in
// the background and once for all who wait, because it may have to list the whole table,
// which takes some 6 ms.
type flusher struct {
	log     *slog.Logger
	handle  *netlink.Handle
	table   *conntrack.Table
	lists   bool // this kernel compares no addresses; only flush uses it
	wake    chan struct{}
	mu      sync.Mutex
	pending map[string]*leaving // by sandbox id
}

type leaving struct {
	addrs []netip.Addr
	taken bool // a flush is under way, with the current addrs only
	done  chan struct{}
}

func newFlusher(log *slog.Logger, table *conntrack.Table) (*flusher, error) {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	return &flusher{log: log, handle: h, table: table, wake: make(chan struct{}, 1), pending: map[string]*leaving{}}, nil
}

func (f *flusher) forget(id string, addrs []netip.Addr) {
	if len(addrs) == 0 {
		return
	}
	f.mu.Lock()
	if l := f.pending[id]; l != nil && !l.taken {
		l.addrs = append(l.addrs, addrs...)
	} else {
		f.pending[id] = &leaving{addrs: addrs, done: make(chan struct{})}
	}
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// Gone waits until all conntrack entries of id are deleted, or ctx ends. Until then its
// address must not be reused: the next owner would get the replies.
func (e *Engine) Gone(ctx context.Context, id string) error {
	select {
	case <-e.flows.gone(id):
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait until the flows of %s are closed: %w", id, ctx.Err())
	}
}

// gone returns a channel that is closed when nothing of id is pending.
func (f *flusher) gone(id string) <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if l := f.pending[id]; l != nil {
		return l.done
	}
	done := make(chan struct{})
	close(done)
	return done
}

func (f *flusher) run(ctx context.Context) {
	for {
		select {
		case <-f.wake:
			f.flush()
		case <-ctx.Done():
			f.flush() // pending ones must still be flushed
			return
		}
	}
}

// from matches flows that one of the addresses opened, or that were opened to one.
type from map[netip.Addr]bool

func (m from) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	src, _ := netip.AddrFromSlice(flow.Forward.SrcIP.To4())
	dst, _ := netip.AddrFromSlice(flow.Forward.DstIP.To4())
	return m[src] || m[dst]
}

func (f *flusher) flush() {
	f.mu.Lock()
	batch := maps.Clone(f.pending)
	addrs := from{}
	for _, l := range batch {
		l.taken = true
		for _, a := range l.addrs {
			addrs[a] = true
		}
	}
	f.mu.Unlock()
	if len(batch) == 0 {
		return
	}
	start := time.Now()
	if err := f.deleteOf(addrs); err != nil {
		f.log.Warn("cannot delete conntrack entries of ended sandboxes: they stay until they time out", "addresses", len(addrs), "err", err)
	}
	f.log.Debug("conntrack flushed", "addresses", len(addrs), "dur", time.Since(start))
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, l := range batch {
		close(l.done)
		if f.pending[id] == l {
			delete(f.pending, id)
		}
	}
}

// fewAddrs is up to how many addresses are deleted one by one: more take as long as a
// listing of the table.
const fewAddrs = 8

// deleteOf deletes the entries of addrs.
func (f *flusher) deleteOf(addrs from) error {
	if len(addrs) <= fewAddrs && !f.lists {
		var requests []byte
		for a := range addrs {
			requests = conntrack.AppendForgetAll(requests, a)
		}
		err := f.table.Send(requests)
		if !errors.Is(err, unix.EINVAL) {
			return err
		}
		f.lists = true // Linux before 6.11
	}
	_, err := f.delete(addrs)
	return err
}

// delete deletes the entries that match. An entry that it missed because the table kept
// changing ends by its own timeout.
func (f *flusher) delete(match netlink.CustomConntrackFilter) (n uint, err error) {
	return dump.Again(func() (uint, error) {
		more, err := f.handle.ConntrackDeleteFilters(netlink.ConntrackTable, netlink.InetFamily(unix.AF_INET), match)
		n += more
		return n, err
	})
}

// matching matches the flows for which it returns true. The answers to f come from replier and
// go to receiver.
type matching func(f policy.Flow, replier, receiver netip.Addr) bool

// MatchConntrackFlow serves netlink.CustomConntrackFilter.
func (m matching) MatchConntrackFlow(c *netlink.ConntrackFlow) bool {
	src, _ := netip.AddrFromSlice(c.Forward.SrcIP.To4())
	dst, _ := netip.AddrFromSlice(c.Forward.DstIP.To4())
	replier, _ := netip.AddrFromSlice(c.Reverse.SrcIP.To4())
	receiver, _ := netip.AddrFromSlice(c.Reverse.DstIP.To4())
	return m(policy.Flow{Src: src, Dst: dst, Proto: c.Forward.Protocol, Port: c.Forward.DstPort}, replier, receiver)
}

// closeSuspects closes the flows that could not exist had the chains stood all the
// time: flows that are not allowed now, flows that left without masquerading, and flows
// from outside into a sandbox. Allowed flows go on: without its entry a packet of the server
// would be the host's own, which resets the connection. Flows of sandboxes that are not
// registered go on if known is false: Register judges them, or Recovered. If locked, the lock
// stood all the time. Then a flow that is allowed but for a lease that has ended, or is lost,
// opened by that lease, and goes on.
func (e *Engine) closeSuspects(known, locked bool) {
	hosts, now := *e.hosts.Load(), time.Now()
	n, err := e.flows.delete(matching(func(f policy.Flow, replier, receiver netip.Addr) bool {
		if !e.cfg.Pool.Contains(f.Src) {
			return e.cfg.Pool.Contains(f.Dst) && !hosts[f.Src]
		}
		asSent := receiver == f.Src && replier == f.Dst // neither masqueraded nor redirected
		if asSent || f.Port == 53 && policy.HasPorts(f.Proto) {
			return true
		}
		s := e.lookup(f.Src)
		if s == nil {
			return known
		}
		action, why := e.decideBy(s, f, func(a netip.Addr) []string { return s.leases.Of(a, now, locked) })
		if locked && action == policy.Deny && why.Cause != policy.ByBlock && !s.leases.Whole() && s.policy.Load().SomeName(f) {
			return false
		}
		return action == policy.Deny || action == policy.Proxy && replier == f.Dst // as in closeForbidden
	}))
	if err != nil {
		e.log.Error("cannot close all flows that opened while the chains were missing: some may continue", "err", err)
	}
	e.log.Info("flows that no policy allows were closed", "flows", n)
}

// Recovered says that every sandbox that lives is registered: what is left of flows from the
// time of an earlier daemon is nobody's, and ends. It is called before an address gets a new
// owner, and again after an error: until then flows of ended sandboxes may be left.
func Recovered(e *Engine) error {
	e.recovered.Store(true)
	e.proxy.closeUnclaimed()
	return e.closeLeftovers()
}

// closeLeftovers closes the flows of addresses that have no owner. The daemon may have
// died after it unregistered a sandbox and before it closed its flows; the next owner
// of the address would get the replies. The set alone does not tell who owns an address:
// somebody may have destroyed it.
func (e *Engine) closeLeftovers() error {
	sources, err := e.sources()
	if err != nil {
		return fmt.Errorf("tell which flows are of ended sandboxes: %w", err)
	}
	held := map[netip.Addr]bool{}
	for _, s := range sources {
		held[s.addr] = true
	}
	nobodys := func(a netip.Addr) bool { return e.cfg.Pool.Contains(a) && !held[a] && e.lookup(a) == nil }
	n, err := e.flows.delete(matching(func(f policy.Flow, _, _ netip.Addr) bool { return nobodys(f.Src) || nobodys(f.Dst) }))
	if n > 0 {
		e.log.Info("flows of ended sandboxes were closed", "flows", n)
	}
	if err != nil {
		return fmt.Errorf("close the flows of ended sandboxes: %w", err)
	}
	return nil
}

// leaves refuses an address that the host would not send out by a link of its own: one that
// is local, or behind the link of a sandbox, of whatever instance. fd is any socket. What
// the daemon dials passes none of the chains, so it asks the kernel itself.
func leaves(fd int, to netip.Addr) error {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil {
		return fmt.Errorf("find the route to %s: %w", to, err)
	}
	for _, r := range routes {
		if r.Type != unix.RTN_UNICAST {
			return errors.New("an address of this host")
		}
		req, err := unix.NewIfreq("")
		if err != nil {
			return err
		}
		req.SetUint32(uint32(r.LinkIndex))
		if err := unix.IoctlIfreq(fd, unix.SIOCGIFNAME, req); err != nil {
			return fmt.Errorf("name the link to %s: %w", to, err)
		}
		if strings.HasPrefix(req.Name(), linkPrefix) {
			return errors.New("another sandbox")
		}
	}
	return nil
}
