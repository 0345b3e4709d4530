package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	vns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// guestLink is the name of a guest's one interface.
const guestLink = "eth0"

// The two ends of every link. No two links share a segment, so the addresses
// may be the same everywhere; a guest restored elsewhere finds its gateway.
var (
	hostMAC  = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	guestMAC = net.HardwareAddr{2, 0, 0, 0, 0, 2}
)

// carrierTimeout bounds the wait for the kernel's link watch: some 0.1 ms, or up to a
// second if host and guest give the two ends the same index.
const carrierTimeout = 3 * time.Second

// Attach links id to the host under addr and configures both ends.
//
// It may be called again, and must be after runsc ran in the namespace: runsc removes
// address and routes from it.
func (m *Manager) Attach(ctx context.Context, id string, addr netip.Addr) error {
	if err := m.check(id); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("attach %s: %w", Link(id), err)
	}
	if err := m.attach(id, addr); err != nil {
		return fmt.Errorf("attach %s to netns %s as %s: %w", Link(id), id, addr, err)
	}
	return nil
}

func (m *Manager) attach(id string, addr netip.Addr) error {
	if !addr.Is4() {
		return errors.New("not an IPv4 address")
	}
	host, err := m.host()
	if err != nil {
		return err
	}
	ns, err := vns.GetFromPath(m.NetPath(id))
	if err != nil {
		return err
	}
	defer ns.Close()
	guest, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open the network namespace: %w", err)
	}
	defer guest.Close()

	outer, inner, err := m.pair(host, guest, ns, Link(id))
	if err != nil {
		return err
	}
	// The end that is up first has no carrier, and has no queue until the kernel's link
	// watch checks it again. Packets sent before that are lost, and a lost SYN costs a
	// second. So both ends go up early, and the first end is checked last.
	if err := writeSysctls(procSys, hostLink, outer.Attrs().Name); err != nil {
		return err
	}
	if err := guest.LinkSetUp(inner); err != nil {
		return fmt.Errorf("set the guest's link up: %w", err)
	}
	if err := host.LinkSetUp(outer); err != nil {
		return fmt.Errorf("set the host's link up: %w", err)
	}
	if err := m.setUpHost(host, outer, addr); err != nil {
		return err
	}
	if err := m.setUpGuest(guest, inner, addr); err != nil {
		return err
	}
	return carries(guest, ns, inner.Attrs().Index)
}

// carries waits until the link with that index in ns can send.
func carries(h *netlink.Handle, ns vns.NsHandle, index int) error {
	running := func() (bool, error) {
		l, err := h.LinkByIndex(index)
		return err == nil && l.Attrs().RawFlags&unix.IFF_RUNNING != 0, err
	}
	if ok, err := running(); ok || err != nil {
		return err
	}
	updates, done := make(chan netlink.LinkUpdate, 16), make(chan struct{})
	err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
		Namespace: &ns, ErrorCallback: func(error) {},
	})
	if err != nil {
		return fmt.Errorf("watch the guest's link: %w", err)
	}
	defer unsubscribe(updates, done)
	timeout := time.NewTimer(carrierTimeout)
	defer timeout.Stop()
	for {
		// Check after the subscription and after every event: events say less than the
		// link.
		if ok, err := running(); ok || err != nil {
			return err
		}
		select {
		case _, ok := <-updates:
			if !ok {
				return errors.New("watch the guest's link: the kernel lost events")
			}
		case <-timeout.C:
			return fmt.Errorf("the guest's link has no carrier after %v", carrierTimeout)
		}
	}
}

// pair returns both ends of the link called name. It makes the link if there is none.
func (m *Manager) pair(host, guest *netlink.Handle, ns vns.NsHandle, name string) (outer, inner netlink.Link, err error) {
	if m.reap.cancel(name) {
		// Detach was called and has not finished: finish it first.
		if err := m.deleteLink(host, name); err != nil {
			return nil, nil, err
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = name, hostMAC, int(m.mtu.Load())
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerHardwareAddr, veth.PeerMTU = guestLink, guestMAC, uint32(attrs.MTU)
	veth.PeerNamespace = netlink.NsFd(ns)
	err = host.LinkAdd(veth)
	if errors.Is(err, unix.EEXIST) {
		if outer, inner, err = existing(host, guest, name); outer != nil || err != nil {
			return outer, inner, err
		}
		// A link of that name whose other end is elsewhere is a remainder.
		if err := m.deleteLink(host, name); err != nil {
			return nil, nil, err
		}
		err = host.LinkAdd(veth)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("make veth: %w", err)
	}
	if outer, err = host.LinkByName(name); err != nil {
		return nil, nil, err
	}
	if inner, err = guest.LinkByName(guestLink); err != nil {
		return nil, nil, fmt.Errorf("find the guest's link %s: %w", guestLink, err)
	}
	return outer, inner, nil
}

// existing returns the ends of the link called name if its other end is in guest, and
// nothing otherwise.
func existing(host, guest *netlink.Handle, name string) (outer, inner netlink.Link, err error) {
	outer, err = host.LinkByName(name)
	if isGone(err) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	inner, err = guest.LinkByName(guestLink)
	if isGone(err) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	// IFLA_LINK of either end is the index of the other.
	if inner.Attrs().ParentIndex != outer.Attrs().Index || outer.Attrs().ParentIndex != inner.Attrs().Index {
		return nil, nil, nil
	}
	return outer, inner, nil
}

func (m *Manager) setUpHost(h *netlink.Handle, l netlink.Link, addr netip.Addr) error {
	index := l.Attrs().Index
	// Nobody sends ARP requests, and nobody would answer.
	if err := h.NeighSet(neighbour(index, addr, guestMAC)); err != nil {
		return fmt.Errorf("add the host's neighbour entry: %w", err)
	}
	err := h.RouteReplace(&netlink.Route{
		LinkIndex: index, Scope: netlink.SCOPE_LINK, Dst: single(addr), Src: m.Gateway.AsSlice(),
	})
	if err != nil {
		return fmt.Errorf("add the host's route: %w (does lo have the address %s?)", err, m.Gateway)
	}
	return nil
}

// Joined reports whether the host reaches addr by the link of id. Somebody may have set
// the link down, which removes its routes, or deleted the route. Without a link it is
// false.
func (m *Manager) Joined(_ context.Context, id string, addr netip.Addr) (bool, error) {
	if err := m.check(id); err != nil {
		return false, err
	}
	h, err := m.host()
	if err != nil {
		return false, fmt.Errorf("inspect link %s: %w", Link(id), err)
	}
	by, err := routeTo(h, addr)
	if err != nil || by == 0 {
		return false, err
	}
	if m.wasListed(id, by) { // and is up, because the route is there
		return true, nil
	}
	l, err := h.LinkByName(Link(id))
	if isGone(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("inspect link %s: %w", Link(id), err)
	}
	return by == l.Attrs().Index, nil
}

// routeTo returns the index of the link by which the host reaches addr, or 0 if the
// host has no route to it.
func routeTo(h *netlink.Handle, addr netip.Addr) (int, error) {
	routes, err := h.RouteGetWithOptions(addr.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	if errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENETUNREACH) {
		return 0, nil // Setup's unreachable route, or no route
	}
	if err != nil {
		return 0, fmt.Errorf("find the route to %s: %w", addr, err)
	}
	if len(routes) == 0 {
		return 0, nil
	}
	return routes[0].LinkIndex, nil
}

// Rejoin makes the host's side of the link of id as Attach made it. It leaves the
// guest's side alone: under gVisor the sentry has address and routes. If eth0 got an
// address, the host's kernel would answer for it.
func (m *Manager) Rejoin(_ context.Context, id string, addr netip.Addr) error {
	if err := m.check(id); err != nil {
		return err
	}
	if err := m.rejoin(id, addr); err != nil {
		return fmt.Errorf("rejoin %s as %s: %w", Link(id), addr, err)
	}
	return nil
}

func (m *Manager) rejoin(id string, addr netip.Addr) error {
	h, err := m.host()
	if err != nil {
		return err
	}
	l, err := h.LinkByName(Link(id))
	if err != nil {
		return err
	}
	if err := writeSysctls(procSys, hostLink, Link(id)); err != nil {
		return err
	}
	if err := h.LinkSetUp(l); err != nil {
		return fmt.Errorf("set the host's link up: %w", err)
	}
	if err := m.setUpHost(h, l, addr); err != nil {
		return err
	}
	by, err := routeTo(h, addr)
	if err == nil && by != l.Attrs().Index {
		err = fmt.Errorf("another route or rule of this host applies to %s: see `ip route get %s`, `ip rule` and "+
			"`ip route show table all`", addr, addr)
	}
	return err
}

// LeaveDown sets the link of id down, and does nothing else. Absent is success.
func (m *Manager) LeaveDown(_ context.Context, id string) error {
	if err := m.check(id); err != nil {
		return err
	}
	h, err := m.host()
	if err != nil {
		return fmt.Errorf("set %s down: %w", Link(id), err)
	}
	l, err := h.LinkByName(Link(id))
	if err == nil {
		err = h.LinkSetDown(l)
	}
	if err != nil && !isGone(err) {
		return fmt.Errorf("set %s down: %w", Link(id), err)
	}
	return nil
}

func (m *Manager) setUpGuest(h *netlink.Handle, l netlink.Link, addr netip.Addr) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the guest's lo: %w", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set the guest's lo up: %w", err)
	}
	if err := h.AddrReplace(l, &netlink.Addr{IPNet: single(addr)}); err != nil {
		return fmt.Errorf("add the guest's address: %w", err)
	}
	index := l.Attrs().Index
	if err := h.NeighSet(neighbour(index, m.Gateway, hostMAC)); err != nil {
		return fmt.Errorf("add the guest's neighbour entry: %w", err)
	}
	for _, r := range []netlink.Route{
		{LinkIndex: index, Scope: netlink.SCOPE_LINK, Dst: single(m.Gateway)},
		{LinkIndex: index, Scope: netlink.SCOPE_UNIVERSE, Gw: m.Gateway.AsSlice()},
	} {
		if err := h.RouteReplace(&r); err != nil {
			return fmt.Errorf("add the guest's route: %w", err)
		}
	}
	return nil
}

func neighbour(index int, addr netip.Addr, mac net.HardwareAddr) *netlink.Neigh {
	return &netlink.Neigh{
		LinkIndex: index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT,
		IP: addr.AsSlice(), HardwareAddr: mac,
	}
}

func single(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(32, 32)}
}

func isGone(err error) bool {
	_, gone := errors.AsType[netlink.LinkNotFoundError](err)
	return gone || errors.Is(err, unix.ENODEV)
}
