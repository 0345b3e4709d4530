package hosttest

import (
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// An Outside is a piece of Internet: a network namespace with a link to the host.
type Outside struct {
	Name, Link string         // of the namespace, and of the host's end of the link
	Host       []netip.Prefix // addresses of the host's end; the first is the gateway
	Addresses  []netip.Prefix // those of the namespace
}

// Start makes it until t ends. serve is called in the namespace, and returns what is to be closed.
func (o Outside) Start(t testing.TB, serve func() ([]io.Closer, error)) {
	t.Helper()
	Root(t)
	drop := func() {
		_ = exec.Command("ip", "link", "del", o.Link).Run()
		_ = exec.Command("ip", "netns", "del", o.Name).Run()
	}
	drop() // what a killed run left
	t.Cleanup(drop)
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	ip("netns", "add", o.Name)
	ip("link", "add", o.Link, "type", "veth", "peer", "name", "out", "netns", o.Name)
	for _, a := range o.Host {
		ip("addr", "add", a.String(), "dev", o.Link)
	}
	ip("link", "set", o.Link, "up")
	for _, a := range o.Addresses {
		ip("-n", o.Name, "addr", "add", a.String(), "dev", "out")
	}
	ip("-n", o.Name, "link", "set", "lo", "up")
	ip("-n", o.Name, "link", "set", "out", "up")
	ip("-n", o.Name, "route", "add", "default", "via", o.Host[0].Addr().String())

	ns, err := os.Open("/run/netns/" + o.Name)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	var all []io.Closer
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends in its namespace
		err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			all, err = serve()
		}
		made <- err
	}()
	if err := <-made; err != nil {
		t.Fatalf("serve in %s: %v", o.Name, err)
	}
	t.Cleanup(func() {
		for _, c := range all {
			c.Close()
		}
	})
}

// Echo listens on a TCP port of all IPv4 addresses, and sends back what it gets.
func Echo(port string) (net.Listener, error) {
	l, err := net.Listen("tcp4", "0.0.0.0:"+port)
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { io.Copy(c, c); c.Close() }() //nolint:errcheck // the guest sees what is missing
		}
	}()
	return l, nil
}
