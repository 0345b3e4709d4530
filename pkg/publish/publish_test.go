package publish

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A field is published ports before a guest that a test plays.
type field struct {
	*testing.T
	ports *Ports
	guest *net.TCPListener
	host  netip.AddrPort // published
	log   bytes.Buffer
}

func newField(t *testing.T) *field {
	t.Helper()
	f := &field{T: t}
	f.ports = New(slog.New(slog.NewTextHandler(&f.log, nil)))
	t.Cleanup(f.ports.CloseAll)
	f.guest = listen(t, "127.0.0.1:0")
	for tries := 10; ; tries-- { // another program may have taken the port meanwhile
		f.host = hosttest.FreePort(t)
		err := f.ports.Open(t.Context(), "one", netip.MustParseAddr("127.0.0.1"), f.spec())
		if err == nil {
			return f
		}
		if tries == 0 || !errs.Is(err, errs.Exists) {
			t.Fatal(err)
		}
	}
}

func (f *field) spec() []record.Publish {
	return []record.Publish{{Host: f.host, Port: uint16(f.guest.Addr().(*net.TCPAddr).Port)}}
}

func listen(t *testing.T, at string) *net.TCPListener {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

func (f *field) connect() *net.TCPConn {
	f.Helper()
	c, err := net.Dial("tcp", f.host.String())
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second)) //nolint:errcheck // then it hangs
	return c.(*net.TCPConn)
}

// pair is a connection of a client and its other end in the guest.
func (f *field) pair() (client, guest *net.TCPConn) {
	f.Helper()
	client = f.connect()
	guest, err := f.guest.AcceptTCP()
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { guest.Close() })
	guest.SetDeadline(time.Now().Add(20 * time.Second)) //nolint:errcheck // then it hangs
	return client, guest
}

// TestHalfClose: either side may have said all while the other goes on.
func TestHalfClose(t *testing.T) {
	f := newField(t)
	client, guest := f.pair()
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<18) // 4 MiB: more than buffers hold
	go func() {
		client.Write(want)  //nolint:errcheck // the reader counts
		client.CloseWrite() //nolint:errcheck // the reader waits for it
	}()
	if got, err := io.ReadAll(guest); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%d bytes of %d, %v", len(got), len(want), err)
	}
	go func() {
		guest.Write(want) //nolint:errcheck // the reader counts
		guest.Close()
	}()
	if got, err := io.ReadAll(client); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("back: %d bytes of %d, %v", len(got), len(want), err)
	}

	client2, guest2 := f.pair() // and the other way round
	guest2.CloseWrite()         //nolint:errcheck // the reader waits for it
	if got, err := io.ReadAll(client2); err != nil || len(got) > 0 {
		t.Fatalf("%q, %v", got, err)
	}
	io.WriteString(client2, "late") //nolint:errcheck // read below
	client2.Close()
	if got, err := io.ReadAll(guest2); err != nil || string(got) != "late" {
		t.Errorf("%q, %v", got, err)
	}
}

// TestBreaks: what breaks on one side breaks on the other, and is not taken for
// an end, also where who writes to it hears first that it broke: hence the many.
func TestBreaks(t *testing.T) {
	f := newField(t)
	for i := range 200 {
		guestBreaks := i%2 == 0
		client, guest := f.pair()
		broken, whole := client, guest
		if guestBreaks {
			broken, whole = guest, client
		}
		io.WriteString(whole, "x") //nolint:errcheck // it is not about this
		reset(broken)
		if _, err := io.ReadAll(whole); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the guest breaks: %v; the other end: %v", guestBreaks, err)
		}
	}
	f.guest.Close()
	c, err := net.Dial("tcp", f.host.String())
	if err == nil { // else it was reset already
		_, err = io.ReadAll(c)
		c.Close()
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("nothing listens: %v", err)
	}
}

// TestSlow: who does not read holds up its own peer, and nobody else.
func TestSlow(t *testing.T) {
	f := newField(t)
	_, guest := f.pair() // its client never reads
	stuck := make(chan int64, 1)
	guest.SetDeadline(time.Now().Add(500 * time.Millisecond)) //nolint:errcheck // then it hangs
	go func() {
		n, _ := io.Copy(guest, zeros{})
		stuck <- n
	}()
	client, other := f.pair()
	go io.Copy(other, other) //nolint:errcheck // an echo
	io.WriteString(client, "hello")
	b := make([]byte, 5)
	if _, err := io.ReadFull(client, b); err != nil || string(b) != "hello" {
		t.Errorf("beside it: %q, %v", b, err)
	}
	if n := <-stuck; n > 64<<20 {
		t.Errorf("%d bytes went to who reads none", n)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// TestReserve: who comes before the sandbox runs waits, and what is taken is
// refused by name, whole.
func TestReserve(t *testing.T) {
	f := newField(t)
	ctx := t.Context()
	mine, foreign := hosttest.FreePort(t), listen(t, "127.0.0.1:0")
	two := []record.Publish{{Host: mine, Port: 80}, {Host: f.host, Port: 80}}
	err := f.ports.Reserve(ctx, "two", two)
	if !errs.Is(err, errs.Exists) || !strings.Contains(err.Error(), "sandbox one uses that port") ||
		!strings.Contains(err.Error(), f.host.String()) {
		t.Errorf("taken by a sandbox: %v", err)
	}
	taken := foreign.Addr().(*net.TCPAddr).AddrPort()
	err = f.ports.Reserve(ctx, "two", []record.Publish{two[0], {Host: taken, Port: 80}})
	if !errs.Is(err, errs.Exists) || !strings.Contains(err.Error(), "another program") {
		t.Errorf("taken by another: %v", err)
	}
	all := netip.AddrPortFrom(netip.IPv4Unspecified(), f.host.Port())
	if err := f.ports.Reserve(ctx, "two", []record.Publish{{Host: all, Port: 80}}); !errs.Is(err, errs.Exists) ||
		!strings.Contains(err.Error(), "sandbox one") {
		t.Errorf("taken on one of all addresses: %v", err)
	}
	nowhere := netip.MustParseAddrPort("192.0.2.1:80")
	if err := f.ports.Reserve(ctx, "two", []record.Publish{{Host: nowhere, Port: 80}}); !errs.Is(err, errs.Invalid) ||
		!strings.Contains(err.Error(), "does not have the address") {
		t.Errorf("not ours: %v", err)
	}
	if ids, _ := f.ports.List(ctx); !slices.Equal(ids, []string{"one"}) {
		t.Errorf("held: %v", ids)
	}
	if l, err := net.Listen("tcp", mine.String()); err != nil {
		t.Errorf("what was refused is held: %v", err)
	} else {
		l.Close()
	}

	f.host = mine
	if err := f.ports.Reserve(ctx, "two", f.spec()); err != nil {
		t.Fatal(err)
	}
	early := f.connect()
	for range 2 { // opening twice is opening once
		if err := f.ports.Open(ctx, "two", netip.MustParseAddr("127.0.0.1"), f.spec()); err != nil {
			t.Fatal(err)
		}
	}
	guest, err := f.guest.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close()
	io.WriteString(guest, "you waited") //nolint:errcheck // read below
	b := make([]byte, 10)
	if _, err := io.ReadFull(early, b); err != nil || string(b) != "you waited" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestClose: a port is free at once, and its connections are cut, also one of which
// the guest knows and the daemon does not yet: hence the many.
func TestClose(t *testing.T) {
	for range 300 {
		testClose(t)
	}
}

func testClose(t *testing.T) {
	f := newField(t)
	defer f.ports.CloseAll()
	client, guest := f.pair()
	for range 2 {
		if err := f.ports.Close(t.Context(), "one"); err != nil {
			t.Fatal(err)
		}
	}
	for what, c := range map[string]*net.TCPConn{"client": client, "guest": guest} {
		if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := net.Dial("tcp", f.host.String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("it is still open: %v", err)
	}
	if err := f.ports.Reserve(t.Context(), "two", f.spec()); err != nil {
		t.Errorf("it is not free: %v", err)
	}
}

// TestCut: the connections of a sandbox that hibernates break, also those that its guest has just
// accepted, and its ports stay open.
func TestCut(t *testing.T) {
	f := newField(t)
	defer f.ports.CloseAll()
	for range 200 {
		client, guest := f.pair()
		if err := errors.Join(f.ports.Cut(t.Context(), "one"), f.ports.Cut(t.Context(), "nobody")); err != nil {
			t.Fatal(err)
		}
		for what, c := range map[string]*net.TCPConn{"client": client, "guest": guest} {
			if _, err := io.ReadAll(c); !errors.Is(err, syscall.ECONNRESET) {
				t.Fatalf("%s: %v", what, err)
			}
		}
	}
	client, guest := f.pair()
	if _, err := io.WriteString(guest, "again"); err != nil {
		t.Error(err)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(client, b); err != nil || string(b) != "again" {
		t.Errorf("a connection after the cut: %q, %v", b, err)
	}
}

// TestTooMany: a flood takes what one sandbox may have, and no more.
func TestTooMany(t *testing.T) {
	f := newField(t)
	go func() {
		for {
			c, err := f.guest.AcceptTCP()
			if err != nil {
				return
			}
			go func() {
				io.Copy(c, c) //nolint:errcheck // an echo
				c.Close()
			}()
		}
	}()
	talk := func() (c net.Conn, ok bool) {
		c, err := net.Dial("tcp", f.host.String())
		if err != nil { // reset already
			return nil, false
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(20 * time.Second)) //nolint:errcheck // then it hangs
		io.WriteString(c, "x")                          //nolint:errcheck // the answer counts
		_, err = io.ReadFull(c, make([]byte, 1))
		return c, err == nil
	}
	var held []net.Conn
	for i := range maxConns {
		c, ok := talk()
		if !ok {
			t.Fatalf("connection %d is refused", i)
		}
		held = append(held, c)
	}
	for range 3 {
		if _, ok := talk(); ok {
			t.Error("one too many")
		}
	}
	held[0].Close()
	deadline := time.Now().Add(10 * time.Second)
	for _, ok := talk(); !ok; _, ok = talk() {
		if time.Now().After(deadline) {
			t.Fatal("a place that was left is not given again")
		}
	}
	if n := strings.Count(f.log.String(), "too many connections"); n != 1 {
		t.Errorf("it was told %d times", n)
	}
}

// A port is served by the family of addresses that was asked for, and no other: rules
// of a firewall for the one say nothing of the other.
func TestOneFamily(t *testing.T) {
	f := newField(t)
	port := hosttest.FreePort(t).Port()
	four, six := netip.AddrPortFrom(netip.IPv4Unspecified(), port), netip.AddrPortFrom(netip.IPv6Unspecified(), port)
	at := map[string]string{"127.0.0.1": "", "::1": ""}
	for a := range at {
		at[a] = netip.AddrPortFrom(netip.MustParseAddr(a), port).String()
	}
	reached := func(address string) bool {
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
		}
		return err == nil
	}
	for _, c := range []struct {
		host  []netip.AddrPort
		reach [2]bool // by IPv4, by IPv6
	}{
		{[]netip.AddrPort{four}, [2]bool{true, false}},
		{[]netip.AddrPort{six}, [2]bool{false, true}},
		{[]netip.AddrPort{four, six}, [2]bool{true, true}},
	} {
		var spec []record.Publish
		for _, h := range c.host {
			spec = append(spec, record.Publish{Host: h, Port: f.spec()[0].Port})
		}
		if err := f.ports.Reserve(t.Context(), "two", spec); err != nil {
			t.Fatal(err)
		}
		if got := [2]bool{reached(at["127.0.0.1"]), reached(at["::1"])}; got != c.reach {
			t.Errorf("published at %v, reached by IPv4 and IPv6: %v", c.host, got)
		}
		if err := f.ports.Close(t.Context(), "two"); err != nil {
			t.Fatal(err)
		}
	}
}

// TestUse: a connection uses its sandbox for as long as it is open, before the guest hears of it; one
// whose sandbox cannot be used breaks.
func TestUse(t *testing.T) {
	f := newField(t)
	f.ports.Close(t.Context(), "one") //nolint:errcheck // it never fails
	var open atomic.Int64
	used, left, fail := make(chan string, 1), make(chan struct{}), atomic.Bool{}
	f.ports.Use = func(_ context.Context, id string) (func(), error) {
		if fail.Load() {
			return nil, errors.New("it does not wake")
		}
		open.Add(1)
		used <- id
		return func() { open.Add(-1); close(left) }, nil
	}
	if err := f.ports.Open(t.Context(), "one", netip.MustParseAddr("127.0.0.1"), f.spec()); err != nil {
		t.Fatal(err)
	}
	client, guest := f.pair()
	if id := <-used; id != "one" || open.Load() != 1 {
		t.Errorf("used %s, %d open", id, open.Load())
	}
	client.Close()
	guest.Close()
	<-left
	if n := open.Load(); n != 0 {
		t.Errorf("%d uses go on", n)
	}
	fail.Store(true)
	c, err := net.Dial("tcp", f.host.String())
	if err == nil { // else it was reset already
		_, err = io.ReadAll(c)
		c.Close()
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a sandbox that does not wake: %v", err)
	}
}
