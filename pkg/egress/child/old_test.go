package child

import (
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	keep     = iota + 20 // the file
	dropAll              // closes the files that it keeps, and leaves if it is alone
	hide                 // makes another descriptor of its line
	complain             // writes to standard error
)

// stays is a child that outlives the daemon as long as it keeps a file.
func stays([]string) error {
	var files []*os.File
	var gone func()
	return ServeOn(1<<10, func(c *Conn) func(Message) {
		gone = nil
		return func(m Message) {
			switch m.Kind {
			case keep:
				files = append(files, m.File)
			case dropAll:
				for _, f := range files {
					f.Close()
				}
				files = nil
			case hide:
				c.raw.Control(func(fd uintptr) { unix.FcntlInt(fd, unix.F_DUPFD, 0) }) //nolint:errcheck // the daemon looks
			case complain:
				os.Stderr.WriteString("to nobody\n")
			}
			c.Answer(m, []byte("done"), nil) //nolint:errcheck // the daemon waits for it
		}
	}, func(leave func()) {
		gone = leave
		os.Stderr.WriteString("alone\n") // nobody may read it
		if len(files) == 0 {
			gone()
		}
	})
}

// left starts a child that outlives its Supervisor, with a socket, and closes that. It returns
// where the child is, and the other end of its socket.
func left(t *testing.T, dir string, stays bool, do ...uint8) (Home, Socket, net.Conn) {
	t.Helper()
	var home Home
	s, err := Start(t.Context(), Config{Verb: "stays", Memory: 256 << 20, Max: 256, Outlive: &Outlive{
		Dir: dir, Begin: func(_ *Conn, h Home) error { home = h; return nil }, Leave: func(*Conn) bool { return stays },
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	peer, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close() })
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	ours, err := CopyOf(raw)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close() })
	line, err := s.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := line.Call(t.Context(), keep, nil, c.(*net.TCPConn)); err != nil {
		t.Fatal(err)
	}
	for _, kind := range do {
		if _, err := line.Call(t.Context(), kind, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	return home, ours, peer
}

// found finds a child that was left, and takes its line.
func found(t *testing.T, dir string, h Home) (*Old, *Conn) {
	t.Helper()
	o, err := Find(h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.Kill(); o.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c, err := o.Line(ctx, dir, h.Name, 256)
	if err != nil {
		t.Fatal(err)
	}
	go c.Run(func(Message) {}) //nolint:errcheck // the calls say
	return o, c
}

// ends waits for the end of a child.
func ends(t *testing.T, o *Old) {
	t.Helper()
	if !o.Ended(30 * time.Second) {
		t.Fatal("the child lives")
	}
}

// TestOutlives: a child lives on with what it was given, each later daemon takes its line and
// gets descriptors of its sockets, and it ends when it has nothing left.
func TestOutlives(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir() + "/" + strings.Repeat("x", 120) // longer than an address may be
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	h, ours, peer := left(t, dir, true)
	want, err := ours.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	ours.Close()
	var last *Conn
	var o *Old
	for range 2 {
		if last != nil {
			last.Close() // this daemon ends, too
		}
		o, last = found(t, dir, h)
		if _, err := last.Call(t.Context(), complain, nil, nil); err != nil { // nobody reads what it says there

			t.Fatal(err)
		}
		all, err := o.Sockets()
		if err != nil || len(all) != 1 || slices.Collect(maps.Keys(all))[0] != want {
			t.Fatalf("%v, %v: want the socket %d", all, err, want)
		}
		defer all[want].Close()
		ours = all[want]
	}
	peer.SetDeadline(time.Now().Add(30 * time.Second)) //nolint:errcheck // shows in the read
	ours.Reset()                                       // whatever the child does
	if _, err := peer.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
	if _, err := last.Call(t.Context(), dropAll, nil, nil); err != nil {
		t.Fatal(err)
	}
	last.Close()
	ends(t, o)
	if _, err := Find(h); !errors.Is(err, ErrGone) {
		t.Errorf("a child that has ended: %v", err)
	}
}

// TestNotLeft: a child that is not to be left ends with its Supervisor, and its socket goes.
func TestNotLeft(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir()
	h, ours, peer := left(t, dir, false)
	ours.Close()
	if _, err := Find(h); !errors.Is(err, ErrGone) {
		t.Errorf("it lives: %v", err)
	}
	peer.SetDeadline(time.Now().Add(30 * time.Second)) //nolint:errcheck // shows in the read
	if _, err := peer.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("its connection: %v", err)
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 0 {
		t.Errorf("it leaves %v, %v", names, err)
	}
}

// TestHides: a child that has kept the line of the last daemon, in which sockets may wait, is
// found out. So is another process that has its id.
func TestHides(t *testing.T) {
	needsRoot(t)
	dir := t.TempDir()
	h, _, _ := left(t, dir, true, hide)
	for _, other := range []Home{{Pid: h.Pid, Started: h.Started + 1}, {Pid: 1 << 22, Started: 1}} {
		if _, err := Find(other); !errors.Is(err, ErrGone) {
			t.Errorf("%v was found: %v", other, err)
		}
	}
	o, _ := found(t, dir, h)
	if all, err := o.Sockets(); !errors.Is(err, errHides) {
		t.Errorf("%v, %v", all, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := o.Line(ctx, dir, h.Name, 256); err == nil { // it has a line
		t.Error("a second line was taken")
	}
	o.Kill()
	ends(t, o)
}
