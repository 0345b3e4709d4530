package egress

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/dump"
)

const (
	// guardEvery is how often the chains are compared with what they should be.
	// It costs two forks: iptables-save 1.4 ms, ip6tables-save 1.6, /bin/true 1.0.
	guardEvery = 10 * time.Second
	// After a change the guard waits guardSettle, and at least guardApart after its
	// last check: changes come in bursts.
	guardSettle = 10 * time.Millisecond
	guardApart  = 100 * time.Millisecond
	// retryFirst is the wait after an install that failed. It doubles with each
	// failure, up to guardEvery: an install that fails half way changes rules, and that
	// wakes the guard.
	retryFirst = 200 * time.Millisecond
)

// errLater says that an install failed a moment ago; its reason was logged then.
var errLater = errors.New("wait before the chains are installed again")

// guard checks what other programs may change: chains, addresses of the host,
// nameservers. With iptables-nft it notices a change of chains at once; changes made
// with iptables-legacy wait for the next tick.
func (e *Engine) guard(ctx context.Context) {
	tick := time.NewTicker(e.cfg.every)
	defer tick.Stop()
	settled := time.NewTimer(0)
	if !settled.Stop() {
		<-settled.C
	}
	defer settled.Stop()
	changed := e.changes
	var last time.Time
	for {
		select {
		case <-changed:
			changed = nil // one is enough
			settled.Reset(max(guardSettle, guardApart-time.Since(last)))
			continue
		case <-settled.C:
			changed = e.changes
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		e.check(ctx)
		last = time.Now()
		e.health.look(last)
		if wait := e.untilRetry(); wait > 0 {
			settled.Reset(wait)
		}
	}
}

func (e *Engine) check(ctx context.Context) {
	if err := e.mendSources(); err != nil {
		e.log.Error("cannot compare the ipset with the registered sandboxes: a sandbox that is missing from the set has no network; "+
			"the next check tries again", "err", err)
	}
	if err := e.refreshHosts(); err != nil {
		e.log.Warn("cannot read the addresses of this host; the previous ones stay in use", "err", err)
	}
	e.dns.refresh()
	if err := e.restore(ctx); err != nil && !errors.Is(err, errLater) && ctx.Err() == nil {
		e.log.Error("cannot verify or install the chains of sandboxd: links of sandboxes that were set down stay down; the next check "+
			"tries again", "err", err)
	}
	if err := e.restore6(ctx); err != nil && ctx.Err() == nil {
		e.log.Error("cannot verify or install the rules against IPv6: the IPv6 of sandboxes is blocked only by the lock and by "+
			"disable_ipv6 on their links; the next check tries again", "err", err)
	}
}

// restore installs lock and chains again if they are incomplete. If packets would pass
// without either, restore keeps the links of all sandboxes down until the chains are
// complete: nothing else here fails open. Then it closes the flows that opened
// meanwhile.
func (e *Engine) restore(ctx context.Context) error {
	e.guarding.Lock()
	defer e.guarding.Unlock()
	ok, err := e.chains.standing(ctx)
	// The lock comes second: if somebody removes both between the two looks, neither this
	// check nor the next installs chains while the lock is missing.
	locked := e.keepLock()
	if err != nil {
		return err
	}
	if ok {
		e.cut.Store(false)
		e.pause, e.retry = 0, time.Time{}
		return e.linksUp() // those that failed to come up the last time
	}
	all, err := e.chains.save(ctx)
	if err != nil {
		return err
	}
	mine, _ := e.chains.ours(all)
	unmet := !e.chains.hooked(mine, 0) && !e.chains.hooked(mine, 1)
	switch {
	case unmet && locked:
		e.log.Warn("the chains of sandboxd were removed: no new flow opens until they are restored")
	case unmet:
		e.cut.Store(true) // before linksDown: a caller that raises a link checks cut afterwards
		down, err := e.linksDown()
		e.held = append(e.held, down...)
		if err != nil {
			// The next step, installing the chains, is the better remedy.
			e.log.Error("the chains of sandboxd were removed, and not all links of its sandboxes could be set down: the others stay "+
				"up until the chains are restored", "err", err)
		}
		if len(down) > 0 {
			e.log.Warn("the chains of sandboxd were removed: its sandboxes have no network until the chains are restored",
				"links", len(down))
		}
	}
	start := time.Now()
	if start.Before(e.retry) {
		return errLater
	}
	err = e.createSets() // the chains name them
	if err == nil {
		err = e.chains.install(ctx)
	}
	if err != nil {
		e.pause = min(max(2*e.pause, retryFirst), guardEvery)
		e.retry = time.Now().Add(e.pause)
		return fmt.Errorf("install chains: %w", err)
	}
	e.pause = 0
	e.cut.Store(false)
	// Until Recovered not all policies are known, and a flow of a sandbox without one is a
	// suspect only where neither chains nor lock confined the sandboxes.
	if unmet || e.serves() {
		e.closeSuspects(e.recovered.Load() || !locked, locked)
	}
	if err := e.linksUp(); err != nil {
		return fmt.Errorf("set links up: %w", err)
	}
	e.log.Info("chains installed", "dur", time.Since(start))
	return nil
}

// untilRetry is how long to wait after a failed install; 0 if none failed.
func (e *Engine) untilRetry() time.Duration {
	e.guarding.Lock()
	defer e.guarding.Unlock()
	if e.pause == 0 {
		return 0
	}
	return max(time.Until(e.retry), time.Millisecond)
}

// Cut reports whether all links are down and must stay down, because neither chains nor
// lock confine the sandboxes behind them.
func (e *Engine) Cut() bool { return e.cut.Load() }

// letGo gives up the links that only this Engine knows to be down. Links that must stay
// down are raised by the sweep of the next daemon once its chains are complete.
func (e *Engine) letGo() {
	e.guarding.Lock()
	defer e.guarding.Unlock()
	if len(e.held) == 0 {
		return
	}
	if e.cut.Load() {
		e.log.Warn("links of sandboxes stay down, because the chains of sandboxd are missing; the next daemon that installs the chains "+
			"sets the links up", "links", len(e.held))
	} else if err := e.linksUp(); err != nil {
		e.log.Warn("cannot set links of sandboxes up: they stay down until the next daemon starts", "err", err)
	}
	e.held = nil
}

// serves reports whether any sandbox is registered.
func (e *Engine) serves() bool {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return len(e.byID) > 0
}

// heldLink is a link that is down, with the routes and neighbours that the kernel
// forgot when it went down.
type heldLink struct {
	link   netlink.Link
	routes []netlink.Route
	neighs []netlink.Neigh
}

func (e *Engine) linksDown() ([]*heldLink, error) {
	links, err := dump.Again(e.sets.LinkList)
	if err != nil {
		return nil, err
	}
	byIndex := map[int]*heldLink{}
	for _, l := range links {
		a := l.Attrs()
		if strings.HasPrefix(a.Name, e.cfg.Instance.LinkPrefix()) && a.RawFlags&unix.IFF_UP != 0 {
			byIndex[a.Index] = &heldLink{link: l}
		}
	}
	if len(byIndex) == 0 {
		return nil, nil
	}
	routes, err := dump.Again(func() ([]netlink.Route, error) { return e.sets.RouteList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return nil, err
	}
	for _, r := range routes {
		if h := byIndex[r.LinkIndex]; h != nil {
			h.routes = append(h.routes, r)
		}
	}
	neighs, err := dump.Again(func() ([]netlink.Neigh, error) { return e.sets.NeighList(0, netlink.FAMILY_V4) })
	if err != nil {
		return nil, err
	}
	for _, n := range neighs {
		if h := byIndex[n.LinkIndex]; h != nil && n.State == netlink.NUD_PERMANENT {
			h.neighs = append(h.neighs, n)
		}
	}
	var down []*heldLink
	var errs []error
	for _, h := range byIndex {
		err := e.sets.LinkSetDown(h.link)
		if errors.Is(err, unix.ENODEV) {
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", h.link.Attrs().Name, err))
			continue
		}
		down = append(down, h)
	}
	return down, errors.Join(errs...)
}

// linksUp undoes linksDown. A link that fails stays held and is tried again.
//
// While a link is down its sandbox has no route here, and a packet for it may leave by
// another link. The kernel tracks that as a flow to the sandbox, and the sandbox could
// answer it. Such flows can begin until the route is back, so linksUp closes them after
// that.
func (e *Engine) linksUp() error {
	if len(e.held) == 0 {
		return nil
	}
	defer e.closeSuspects(true, false)
	var errs []error
	var failed []*heldLink
	for _, h := range e.held {
		err := e.sets.LinkSetUp(h.link)
		for _, n := range h.neighs {
			if err == nil {
				err = e.sets.NeighSet(&n)
			}
		}
		for _, r := range h.routes {
			if err == nil {
				err = e.sets.RouteReplace(&r)
			}
		}
		if err != nil && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, fmt.Errorf("%s: %w", h.link.Attrs().Name, err))
			failed = append(failed, h)
		}
	}
	e.held = failed
	return errors.Join(errs...)
}

// refreshHosts reads the addresses of this host. The INPUT chain closes them to
// sandboxes in any case. Here they give a denial its reason, and the resolver removes
// them from answers.
func (e *Engine) refreshHosts() error {
	addrs, err := dump.Again(func() ([]netlink.Addr, error) { return e.sets.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return fmt.Errorf("list the addresses of this host: %w", err)
	}
	hosts := map[netip.Addr]bool{e.cfg.Gateway: true}
	for _, a := range addrs {
		if addr, ok := netip.AddrFromSlice(a.Broadcast); ok && !hosts[addr.Unmap()] {
			hosts[addr.Unmap()] = false
		}
		if addr, ok := netip.AddrFromSlice(a.IP); ok {
			hosts[addr.Unmap()] = true
		}
	}
	e.hosts.Store(&hosts)
	return nil
}

// A watch reports every change of nf_tables, ours included, but not what changed.
type watch struct {
	f   *os.File
	raw syscall.RawConn
}

func watchRules() (*watch, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("join the netlink group of nf_tables: %w", err)
	}
	w := &watch{f: os.NewFile(uintptr(fd), "nftables")}
	if w.raw, err = w.f.SyscallConn(); err != nil {
		return nil, errors.Join(err, w.f.Close())
	}
	return w, nil
}

// run sends to changes until close. If the kernel had no room for messages (ENOBUFS),
// that counts as a change, too.
func (w *watch) run(changes chan<- struct{}) {
	buf := make([]byte, 64<<10)
	for {
		err := w.raw.Read(func(fd uintptr) bool {
			_, _, err := unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
			return err != unix.EAGAIN
		})
		if err != nil {
			return // closed
		}
		select {
		case changes <- struct{}{}:
		default:
		}
	}
}

func (w *watch) close() error { return w.f.Close() }

// guardOverdue is when the guard counts as stuck: some six rounds late. The longest
// regular round is an install in which every iptables waits for another program's lock.
const guardOverdue = time.Minute

// health is the state of an Engine.
type health struct {
	mu     sync.Mutex
	fault  error     // what failed for good
	looked time.Time // when the guard last finished a round
}

func (h *health) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fault == nil {
		h.fault = err
	}
}

func (h *health) look(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.looked = now
}

// Err says why an open Engine has stopped working for good: only a new Engine helps.
// Nil means healthy.
func (e *Engine) Err() error {
	e.health.mu.Lock()
	defer e.health.mu.Unlock()
	if e.health.fault != nil {
		return e.health.fault
	}
	if late := time.Since(e.health.looked); late > guardOverdue {
		return fmt.Errorf("chains, sets and lock were not checked for %v: iptables or the kernel hangs (see `ps -ef | grep iptables`)",
			late.Round(time.Second))
	}
	return nil
}
