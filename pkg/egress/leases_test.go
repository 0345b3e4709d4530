package egress

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/egress/leases"
)

// TestLeasesOutlive: after a restart a flow that a name opened goes on, the name opens new
// ones without another question, and a flow of a name that no rule allows any more ends.
// After the lease nothing new opens, and what is open goes on.
func TestLeasesOutlive(t *testing.T) {
	w := newWorld(t)
	asked := w.upstream()
	for _, a := range []string{"203.0.113.1", "203.0.113.2"} {
		w.serve(w.outside, a, 22)
	}
	dir := filepath.Join(t.TempDir(), "leases")
	open := func() *Engine { return w.openWith(func(c *Config) { c.Leases = dir }) }
	e := open()
	id := w.sandbox(e, 0, rules(t, "rules", "one.test", "two.test"))
	if a, err := w.ask(id, "udp", "203.0.113.53:53", "one.test.", dns.TypeA, patient); err != nil || len(a.Answer) != 1 {
		t.Fatalf("%v, %v", a, err)
	}
	e.lookup(addr(0)).leases.Add("two.test", []netip.Addr{netip.MustParseAddr("203.0.113.2")}, 0, time.Now())
	dial := func(to string) net.Conn {
		t.Helper()
		c, err := w.dial(id, "tcp", to, patient)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	stays, ends := dial("203.0.113.1:22"), dial("203.0.113.2:22")
	questions := len(asked())
	again := func() {
		t.Helper()
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		if err := echo(stays, patient); err != nil {
			t.Errorf("while no daemon runs: %v", err)
		}
		e = open()
		if err := e.Register(t.Context(), id, addr(0), rules(t, "rules", "one.test"), nil); err != nil {
			t.Fatal(err)
		}
		if err := echo(stays, patient); err != nil {
			t.Errorf("an allowed flow after a restart: %v", err)
		}
	}

	again()
	if err := echo(ends, patient); err == nil {
		t.Error("a flow goes on whose name no rule allows any more")
	} else if ne, ok := err.(net.Error); ok && ne.Timeout() {
		t.Errorf("it ends by a timeout; want an error at once")
	}
	dial("203.0.113.1:22").Close()
	if n := len(asked()); n != questions {
		t.Errorf("%d questions, and %d after the restart", questions, n)
	}
	w.refused(id, "tcp", "203.0.113.2:22")

	// The leases end.
	file := filepath.Join(dir, id)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	past := fmt.Sprint("\n", time.Now().Add(-time.Minute).Unix(), " ")
	text = regexp.MustCompile(`\n\d+ `).ReplaceAll(text, []byte(past))
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	again()
	w.refused(id, "tcp", "203.0.113.1:22")

	if err := e.Unregister(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if left, err := e.Leases.List(); err != nil || len(left) != 0 {
		t.Errorf("after Unregister there are the leases of %q, %v", left, err)
	}
	if err := echo(stays, time.Second); err == nil {
		t.Error("a flow goes on after Unregister")
	}
}

// TestLeasesOnAFullFileSystem: a lease that cannot be written holds all the same, the next
// daemon knows that it does not know all, and when there is room, everything is written.
func TestLeasesOnAFullFileSystem(t *testing.T) {
	hosttest.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	var logged bytes.Buffer
	open := func() *leases.Book {
		b, err := leases.OpenBook(filepath.Join(dir, "leases"), slog.New(slog.NewTextHandler(&logged, nil)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.Close)
		return b
	}
	b, now := open(), time.Now()
	l := b.Open("one")
	l.Begin()
	fill := filepath.Join(dir, "fill")
	if err := os.WriteFile(fill, make([]byte, 1<<20), 0o600); err == nil {
		t.Fatal("the file system has no limit")
	}
	const many = 200 // more than a page
	for i := range many {
		l.Add("host.test", []netip.Addr{netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})}, 0, now)
	}
	b.Open("two").Add("host.test", []netip.Addr{netip.MustParseAddr("203.0.113.1")}, 0, now)
	count := func(l *leases.Table) (n int) {
		for range l.All {
			n++
		}
		return n
	}
	if n := count(l); n != many {
		t.Errorf("%d leases, want %d", n, many)
	}
	if next := open().Open("one"); next.Whole() || count(next) == 0 || count(next) == many {
		t.Errorf("%d leases are kept, whole: %v", count(next), next.Whole())
	}
	if n := strings.Count(logged.String(), "\n"); n != 1 {
		t.Errorf("%d lines of the log, want one:\n%s", n, logged.String())
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	l.Add("late.test", []netip.Addr{netip.MustParseAddr("203.0.113.1")}, 0, now.Add(time.Minute))
	if next := open().Open("one"); !next.Whole() || count(next) != many+1 {
		t.Errorf("with room, %d leases are kept, want %d; whole: %v", count(next), many+1, next.Whole())
	}
}
