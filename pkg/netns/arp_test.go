package netns

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// liarMAC is an address that nobody has.
var liarMAC = net.HardwareAddr{2, 0, 0, 0, 0, 9}

// TestARP: the host answers no question of ARP, and believes no answer. Both would be
// otherwise without the setting that Attach makes for it.
func TestARP(t *testing.T) {
	m := newManager(t)
	id, link := id(1), Link(id(1))
	const elsewhere = "192.0.2.99"
	run(t, "ip", "addr", "add", elsewhere+"/32", "dev", "lo")
	t.Cleanup(func() { run(t, "ip", "addr", "del", elsewhere+"/32", "dev", "lo") })
	if err := m.CreateNamespaces(t.Context(), id, false, 0); err != nil {
		t.Fatal(err)
	}
	if err := m.Attach(t.Context(), id, addr(1)); err != nil {
		t.Fatal(err)
	}
	fd := packetSocket(t, m.NetPath(id))
	// The gateway, another address of the host, another sandbox.
	for _, who := range []netip.Addr{m.Gateway, netip.MustParseAddr(elsewhere), addr(2)} {
		if mac := whoHas(t, fd, who, 200*time.Millisecond); mac != nil {
			t.Errorf("ARP for %s is answered: %s", who, mac)
		}
	}
	entry := func() string { return fields(run(t, "ip", "neighbour", "show", "dev", link)) }
	before := entry()
	for _, who := range []netip.Addr{addr(1), addr(2), m.Gateway} {
		send(t, fd, arp(1, liarMAC, who, who))
		send(t, fd, arp(2, liarMAC, who, who))
	}
	// Frames of one link arrive in order: when the last has its answer, the others were read.
	for _, name := range []string{"all", link} {
		run(t, "sh", "-c", "echo 0 >/proc/sys/net/ipv4/conf/"+name+"/arp_ignore")
	}
	if mac := whoHas(t, fd, netip.MustParseAddr(elsewhere), 10*time.Second); !bytes.Equal(mac, hostMAC) {
		t.Errorf("without arp_ignore, ARP for %s is answered with %s; the silence above proves nothing", elsewhere, mac)
	}
	if now := entry(); now != before || !strings.Contains(now, guestMAC.String()) {
		t.Errorf("lies of ARP made of the neighbours\n%s\nthese:\n%s", before, now)
	}
	run(t, "ip", "neighbour", "replace", addr(1).String(), "lladdr", guestMAC.String(), "dev", link, "nud", "reachable")
	whoHas(t, fd, netip.MustParseAddr(elsewhere), 10*time.Second)
	if now := entry(); !strings.Contains(now, liarMAC.String()) {
		t.Errorf("a neighbour that is not permanent stays as it is: %s; that the other one did proves nothing", now)
	}
}

// packetSocket is a socket for frames of ARP in a namespace.
func packetSocket(t *testing.T, ns string) int {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	there, err := os.Open(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	of := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ARP)) // in network order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(of))
	eth0, missing := net.InterfaceByName("eth0")
	if back := unix.Setns(int(here.Fd()), unix.CLONE_NEWNET); back != nil {
		panic(back) // the thread would go on elsewhere
	}
	if err := errors.Join(err, missing); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: of, Ifindex: eth0.Index}); err != nil {
		t.Fatal(err)
	}
	return fd
}

// arp is a frame of ARP to all (RFC 826): a question (1) or an answer (2). If it is about the
// address from which it is, it tells everybody who has that.
func arp(op byte, mac net.HardwareAddr, from, about netip.Addr) []byte {
	all := bytes.Repeat([]byte{0xff}, 6)
	head := []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, op}
	return slices.Concat(all, mac, head, mac, from.AsSlice(), make([]byte, 6), about.AsSlice())
}

func send(t *testing.T, fd int, frame []byte) {
	t.Helper()
	if _, err := unix.Write(fd, frame); err != nil {
		t.Fatal(err)
	}
}

// whoHas asks for an address, with a lie about the guest's own, and returns the MAC address
// of whoever says it has it; nil: nobody does.
func whoHas(t *testing.T, fd int, who netip.Addr, wait time.Duration) net.HardwareAddr {
	t.Helper()
	send(t, fd, arp(1, liarMAC, addr(1), who))
	frame := make([]byte, 128)
	for until := time.Now().Add(wait); ; {
		left := unix.NsecToTimeval(int64(max(time.Until(until), time.Millisecond)))
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &left); err != nil {
			t.Fatal(err)
		}
		n, err := unix.Read(fd, frame)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil:
			t.Fatal(err)
		case n >= 42 && frame[21] == 2 && bytes.Equal(frame[28:32], who.AsSlice()):
			return slices.Clone(frame[22:28])
		}
	}
}
