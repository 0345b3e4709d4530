package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/dump"
)

// Setup makes the host ready for links: the gateway address on lo, an unreachable route
// for the pool. It may run at any time; a second run changes nothing. It does not
// switch forwarding on: OpenUplinks does.
func (m *Manager) Setup(ctx context.Context) error {
	if err := m.setup(); err != nil {
		return fmt.Errorf("set up the host's network for instance %s: %w", m.inst, err)
	}
	return ctx.Err()
}

// OpenUplinks makes the host forward packets for sandboxes. It may run at any time; a
// second run changes nothing. The daemon calls it once the rules are in place that keep
// the packets of others from being forwarded, and with every sweep, so that it covers
// uplinks that appear later.
//
// Forwarding is switched on per link; the kernel checks the link by which a packet
// arrives. These are all sandbox links (Attach) and every link by which replies may
// arrive, that is, every link with routes. The global net.ipv4.ip_forward is not
// changed: it would make the host a router between all its networks, also for links to
// come. But a link that forwards does so to every other link. So SwitchedOn names the
// links that forward only for sandboxes, egress closes them to all but sandboxes, and
// BeforeForward lets it do so before a link is switched on.
func (m *Manager) OpenUplinks(ctx context.Context) error {
	h, err := m.host()
	if err == nil {
		err = m.openUplinks(h)
	}
	if err != nil {
		return fmt.Errorf("enable forwarding for sandboxes of instance %s: %w", m.inst, err)
	}
	return ctx.Err()
}

func (m *Manager) setup() error {
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return err
	}
	h, err := m.host()
	if err != nil {
		return err
	}
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	if err := h.AddrReplace(lo, &netlink.Addr{IPNet: single(m.Gateway)}); err != nil {
		return fmt.Errorf("add the gateway %s to lo: %w", m.Gateway, err)
	}
	// Without it, packets from the daemon to a sandbox that is not there, its token
	// included, would leave by the default route.
	if err := h.RouteReplace(m.poolRoute()); err != nil {
		return fmt.Errorf("add the unreachable route to %s: %w", m.Pool, err)
	}
	return nil
}

func (m *Manager) poolRoute() *netlink.Route {
	return &netlink.Route{Type: unix.RTN_UNREACHABLE, Dst: ipNet(m.Pool), Priority: 1 << 20}
}

// openUplinks switches forwarding on for links with routes, and stores their smallest
// MTU: a guest with a greater one would depend on path MTU discovery.
func (m *Manager) openUplinks(h *netlink.Handle) error {
	indexes, err := m.routedLinks()
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	mtu := 0
	var errs []error
	for index := range indexes {
		l, err := h.LinkByIndex(index)
		if isGone(err) {
			continue
		}
		if err != nil {
			return err
		}
		a := l.Attrs()
		if a.Flags&net.FlagLoopback != 0 || strings.HasPrefix(a.Name, Link("")) {
			continue
		}
		if mtu == 0 || a.MTU < mtu {
			mtu = a.MTU
		}
		if err := m.forward(a.Name); err != nil {
			errs = append(errs, err) // the other links are still switched on
		}
	}
	m.mtu.Store(int32(min(mtu, 1500)))
	return errors.Join(errs...)
}

func (m *Manager) forward(link string) error {
	name := forwarding(link)
	was, err := os.ReadFile(procSys + name)
	if errors.Is(err, os.ErrNotExist) {
		return nil // the link went away
	}
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(was)) == "1" {
		return nil
	}
	if err := m.note(link); err != nil { // first: a link that is not noted is never closed
		return err
	}
	if m.BeforeForward != nil {
		if err := m.BeforeForward(); err != nil {
			return fmt.Errorf("%s was not enabled, so no reply to a sandbox arrives by this link: %w", name, err)
		}
	}
	if err := writeSysctls(procSys, []sysctl{{name, "1", true}}, ""); err != nil {
		return err
	}
	if m.Log != nil {
		m.Log.Info("forwarding switched on", "link", link, "sysctl", name,
			"reason", "replies to sandboxes arrive by this link")
	}
	return nil
}

// routedLinks lists the indexes of the links that unicast IPv4 routes use, without the
// routes to single sandboxes. It reads on a socket of its own, for which no create waits.
func (m *Manager) routedLinks() (map[int]bool, error) {
	routes, err := dump.Again(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return nil, err
	}
	indexes := map[int]bool{}
	for _, r := range routes {
		if r.Type != unix.RTN_UNICAST || m.isSandbox(r.Dst) {
			continue
		}
		indexes[r.LinkIndex] = true
		for _, hop := range r.MultiPath {
			indexes[hop.LinkIndex] = true
		}
	}
	delete(indexes, 0)
	return indexes, nil
}

// isSandbox reports whether dst is one address of the pool.
func (m *Manager) isSandbox(dst *net.IPNet) bool {
	if dst == nil {
		return false
	}
	ones, bits := dst.Mask.Size()
	addr, ok := netip.AddrFromSlice(dst.IP)
	return ok && ones == bits && m.Pool.Contains(addr.Unmap())
}

// Purge undoes Setup and OpenUplinks. Forwarding goes off on links where only they
// switched it on, also if another instance needs it: that instance's next Setup
// switches it on again. Use it for uninstalling and in tests; links and namespaces must
// be gone before. Absent is success.
func (m *Manager) Purge(ctx context.Context) error {
	h, err := m.host()
	if err != nil {
		return err
	}
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	errs := []error{ctx.Err()}
	if err := h.AddrDel(lo, &netlink.Addr{IPNet: single(m.Gateway)}); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
		errs = append(errs, fmt.Errorf("remove the gateway: %w", err))
	}
	if err := h.RouteDel(m.poolRoute()); err != nil && !errors.Is(err, unix.ESRCH) {
		errs = append(errs, fmt.Errorf("remove the pool's route: %w", err))
	}
	if err := m.unforward(); err != nil {
		errs = append(errs, err)
	}
	if err := os.Remove(m.dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("purge the host's network of instance %s: %w", m.inst, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Masked().Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
