// Package internet is a piece of Internet for tests: a network namespace behind a link of
// the host, so whatever a sandbox sends there is forwarded and passes the whole firewall.
//
//	sandbox ── host ── veth ── namespace: DNS servers, web servers that share an address,
//	                           package repositories, a metadata service
//
// All of it is Go in the test's own process: only the sockets are in the namespace.
//
// The surprise: a route to the metadata service exists for the packets of one pool of
// sandboxes only, since the host that runs the tests may have a metadata service of its own.
package internet

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/test/internet/quic"
)

// Addresses. TEST-NET-3 counts as public, since it is in no private range; a /28 of it,
// because the mirrors of some hosts are in the rest.
var (
	DNS      = netip.MustParseAddr("203.0.113.241") // answers what the zone says
	Shared   = netip.MustParseAddr("203.0.113.242") // serves each name that an A record of the zone gives it
	Other    = netip.MustParseAddr("203.0.113.243") // serves every name as well
	Slow     = netip.MustParseAddr("203.0.113.244") // a DNS server that answers too late
	Dead     = netip.MustParseAddr("203.0.113.250") // nobody has it
	Private  = netip.MustParseAddr("192.168.213.1") // serves every name as well
	Metadata = netip.MustParseAddr("169.254.169.254")
	Uplink   = netip.MustParseAddr("203.0.113.254") // of the host
)

const (
	namespace = "sandboxd-internet"
	link      = "internet0"
	hostInner = "192.168.213.254"
	table     = "16254" // of the route to the metadata service
)

// An Internet is one that runs until the end of its test.
type Internet struct {
	CA []byte // the certificate that all its servers are trusted by, as PEM

	zone    zone
	web     web
	kept    keeper
	hostile hostile
	open    []io.Closer
}

// New makes an Internet for the sandboxes of a pool. It needs root.
func New(t testing.TB, pool netip.Prefix) *Internet {
	t.Helper()
	hosttest.Root(t)
	in := &Internet{}
	drop(pool) // what a killed run left
	t.Cleanup(func() { drop(pool) })
	for _, line := range []string{
		"netns add " + namespace,
		"link add " + link + " type veth peer name out netns " + namespace,
		"addr add " + Uplink.String() + "/28 dev " + link,
		"addr add " + hostInner + "/24 dev " + link,
		"link set " + link + " up",
		"-n " + namespace + " addr add " + DNS.String() + "/28 dev out",
		"-n " + namespace + " addr add " + Shared.String() + "/28 dev out",
		"-n " + namespace + " addr add " + Other.String() + "/28 dev out",
		"-n " + namespace + " addr add " + Slow.String() + "/28 dev out",
		"-n " + namespace + " addr add " + Thief.String() + "/28 dev out",
		"-n " + namespace + " addr add " + Private.String() + "/24 dev out",
		"-n " + namespace + " addr add " + Metadata.String() + "/32 dev out",
		"-n " + namespace + " link set lo up",
		"-n " + namespace + " link set out up",
		"-n " + namespace + " route add default via " + Uplink.String(),
		"route add " + Metadata.String() + "/32 via " + Other.String() + " dev " + link + " table " + table,
		"rule add from " + pool.String() + " to " + Metadata.String() + " lookup " + table,
	} {
		if out, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", line, err, out)
		}
	}
	if err := in.prepare(t.TempDir()); err != nil {
		t.Fatalf("prepare what the servers of the test serve: %v", err)
	}
	t.Cleanup(in.close)
	if err := inside(in.serve); err != nil {
		t.Fatalf("serve in the namespace %s: %v", namespace, err)
	}
	return in
}

func drop(pool netip.Prefix) {
	_ = exec.Command("ip", "rule", "del", "from", pool.String(), "to", Metadata.String(), "lookup", table).Run()
	_ = exec.Command("ip", "link", "del", link).Run() // and the route by it
	_ = exec.Command("ip", "netns", "del", namespace).Run()
}

// inside calls f on a thread in the namespace. Sockets that f makes stay there.
func inside(f func() error) error {
	ns, err := os.Open("/run/netns/" + namespace)
	if err != nil {
		return err
	}
	defer ns.Close()
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends in its namespace
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			made <- err
			return
		}
		made <- f()
	}()
	return <-made
}

// serve opens all sockets.
func (in *Internet) serve() error {
	for _, f := range []func() error{in.serveDNS, in.serveWeb, in.serveOthers} {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

func (in *Internet) close() {
	for _, c := range in.open {
		c.Close() //nolint:errcheck // the end of a test
	}
}

// Banner is what a server that speaks first says on port Speaks.
const (
	Banner = "ready\n"
	Speaks = 5432
)

// serveOthers serves what is neither DNS nor web: a server that speaks first, on every
// address; on UDP port 443 of Shared one that reads first packets of QUIC, and on that of
// Other one that returns each packet.
func (in *Internet) serveOthers() error {
	l, err := net.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", Speaks))
	if err != nil {
		return err
	}
	in.open = append(in.open, l)
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go func() {
				defer c.Close()
				io.WriteString(c, Banner) //nolint:errcheck // the client sees what is missing
				io.Copy(c, c)             //nolint:errcheck // the same
			}()
		}
	}()
	if err := in.packets(Other, 443, func(b []byte, reply func([]byte)) { reply(b) }); err != nil {
		return err
	}
	// As a server of QUIC does, it reads the name that the first packet asks for.
	return in.packets(Shared, 443, func(b []byte, reply func([]byte)) {
		name, err := quic.Name(b)
		if err != nil {
			reply([]byte(err.Error()))
			return
		}
		reply([]byte("this is " + name))
	})
}

// packets answers each packet to a UDP port.
func (in *Internet) packets(a netip.Addr, port uint16, answer func(b []byte, reply func([]byte))) error {
	c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, port)))
	if err != nil {
		return err
	}
	in.open = append(in.open, c)
	go func() {
		b := make([]byte, 64<<10)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			answer(b[:n], func(a []byte) { c.WriteToUDPAddrPort(a, from) }) //nolint:errcheck // the client sees what is missing
		}
	}()
	return nil
}
