package egress

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// guardEvery is how often the chains are compared with what they should be.
	// It costs one fork, some 3 ms.
	guardEvery = 10 * time.Second
	// guardSettle is how long after a change, and guardApart how long after the
	// last time, at least: changes come in bursts.
	guardSettle = 10 * time.Millisecond
	guardApart  = 100 * time.Millisecond
)

// dumpTries is how often a listing that changed meanwhile is asked for again.
const dumpTries = 8

// guard watches over what others may change under us: chains, addresses of the
// host, nameservers. Changes of chains are heard of at once where iptables is
// that of nf_tables; those made with iptables-legacy wait for the next tick.
func (e *Engine) guard(ctx context.Context) {
	tick := time.NewTicker(guardEvery)
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
	}
}

func (e *Engine) check(ctx context.Context) {
	if err := e.refreshHosts(); err != nil {
		e.log.Warn("addresses of this host not read", "err", err)
	}
	if err := e.refreshUplinks(); err != nil {
		e.log.Warn("links that forward for sandboxes alone not read; those of before stay", "err", err)
	}
	e.dns.refresh()
	if err := e.restore(ctx); err != nil {
		e.log.Error("the chains of sandboxd could not be seen to stand; links of sandboxes that were taken down stay so, and this is tried again", "err", err)
	}
}

// restore makes the chains stand. Where packets would pass without meeting
// them, the links of all sandboxes are down until it has: a flushed chain is
// the one thing here that fails open. What opened meanwhile is closed again.
func (e *Engine) restore(context.Context) error {
	e.guarding.Lock()
	defer e.guarding.Unlock()
	ok, err := e.chains.standing()
	if err != nil {
		return err
	}
	if ok {
		return e.linksUp() // those that did not come up the last time
	}
	all, err := e.chains.save()
	if err != nil {
		return err
	}
	mine, _ := e.chains.ours(all)
	unmet := !e.chains.hooked(mine, 0) && !e.chains.hooked(mine, 1)
	if unmet {
		down, err := e.linksDown()
		e.held = append(e.held, down...)
		if err != nil {
			// The chains are the better remedy, and next.
			e.log.Error("the chains of sandboxd were removed, and links of its sandboxes stay up until they are back", "err", err)
		}
		if len(down) > 0 {
			e.log.Warn("the chains of sandboxd were removed: its sandboxes are cut off until they are back", "links", len(down))
		}
	}
	start := time.Now()
	if err := e.chains.install(); err != nil {
		return fmt.Errorf("install chains: %w", err)
	}
	// At the start no policy is known, and every flow would be closed: only if
	// there was nothing to hold them.
	if unmet || e.serves() {
		e.closeSuspects()
	}
	if err := e.linksUp(); err != nil {
		return fmt.Errorf("take links up: %w", err)
	}
	e.log.Info("chains installed", "dur", time.Since(start))
	return nil
}

// serves reports whether any sandbox is registered.
func (e *Engine) serves() bool {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return len(e.byID) > 0
}

// heldLink is a link that is down, with what the kernel forgot with that.
type heldLink struct {
	link   netlink.Link
	routes []netlink.Route
	neighs []netlink.Neigh
}

func (e *Engine) linksDown() ([]*heldLink, error) {
	links, err := dump(e.sets.LinkList)
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
	routes, err := dump(func() ([]netlink.Route, error) { return e.sets.RouteList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return nil, err
	}
	for _, r := range routes {
		if h := byIndex[r.LinkIndex]; h != nil {
			h.routes = append(h.routes, r)
		}
	}
	neighs, err := dump(func() ([]netlink.Neigh, error) { return e.sets.NeighList(0, netlink.FAMILY_V4) })
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

// linksUp undoes linksDown. What fails is held, to be tried again.
func (e *Engine) linksUp() error {
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

// dump asks again while the answer changes under the kernel's hands.
func dump[T any](list func() ([]T, error)) (all []T, err error) {
	for range dumpTries {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return all, err
}

// refreshHosts reads the addresses of this host. They are closed to sandboxes
// by the INPUT chain in any case; here they name the reason, and are taken out
// of answers of the resolver.
func (e *Engine) refreshHosts() error {
	addrs, err := dump(func() ([]netlink.Addr, error) { return e.sets.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return fmt.Errorf("addresses of this host: %w", err)
	}
	hosts := map[netip.Addr]bool{e.cfg.Gateway: true}
	for _, a := range addrs {
		for _, ip := range [][]byte{a.IP, a.Broadcast} {
			if addr, ok := netip.AddrFromSlice(ip); ok {
				hosts[addr.Unmap()] = true
			}
		}
	}
	e.hosts.Store(&hosts)
	return nil
}
