package child

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/confine"
)

func TestMain(m *testing.M) {
	confine.Main(map[string]confine.Verb{"odd": odd, "stays": stays})
	os.Exit(m.Run())
}

// needsRoot is hosttest.Root, whose package links net and with it libc: a child of this
// binary has the filter only if this is a static one.
func needsRoot(t *testing.T) {
	t.Helper()
	if os.Getenv("SANDBOXD_TEST") != "root" {
		t.Skip("needs root and SANDBOXD_TEST=root")
	}
	if os.Geteuid() != 0 {
		t.Fatal("SANDBOXD_TEST=root is set, but this is not root")
	}
}

const (
	tellMe = iota + 1 // answers with the body, and what its file holds
	askMe             // calls back, and answers with the answer
	die
	tooLong
	aFile
	short
)

// odd is a child that does what it is told, also what it must not.
func odd([]string) error {
	return Serve(1<<10, func(c *Conn, files []*os.File) (func(Message), error) {
		if len(files) != 1 {
			return nil, fmt.Errorf("%d files", len(files))
		}
		return func(m Message) {
			switch m.Kind {
			case tellMe:
				said := m.Body
				if m.File != nil {
					b, err := io.ReadAll(m.File)
					said = fmt.Appendf(said, " and %s %v", b, err)
					m.File.Close()
				}
				c.Answer(m, said, nil) //nolint:errcheck // the daemon waits for it
			case askMe:
				go func() {
					a, err := c.Call(context.Background(), tellMe, m.Body, nil)
					c.Answer(m, fmt.Appendf(nil, "%s %v", a.Body, err), nil) //nolint:errcheck // likewise
				}()
			case die:
				panic("a bug")
			case tooLong:
				c.Tell(tellMe, make([]byte, 257), nil) //nolint:errcheck // likewise
			case aFile:
				c.Answer(m, fmt.Append(nil, c.Tell(tellMe, nil, files[0])), nil) //nolint:errcheck // likewise
			case short:
				c.sendmsg([]byte{1, 2}, nil) //nolint:errcheck // likewise
			}
		}, nil
	})
}

// calls calls without a limit of its own.
func call(t *testing.T, c *Conn, kind uint8, body string, f *os.File) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	m, err := c.Call(ctx, kind, []byte(body), f)
	if err != nil {
		t.Fatal(err)
	}
	return string(m.Body)
}

// TestSupervisor: a child answers and asks. One that dies, or sends what it must not, is
// replaced, and calls under way end.
func TestSupervisor(t *testing.T) {
	needsRoot(t)
	given, err := os.Open("/etc/hostname")
	if err != nil {
		t.Fatal(err)
	}
	defer given.Close()
	begun, ended := make(chan *Conn, 16), make(chan *Conn, 16)
	s, err := Start(t.Context(), Config{
		Verb: "odd", Files: []*os.File{given}, Memory: 256 << 20, Max: 256,
		Handle: func(c *Conn, m Message) { c.Answer(m, append([]byte("heard "), m.Body...), nil) }, //nolint:errcheck // the child says
		Begin:  func(c *Conn) { begun <- c },
		End:    func(c *Conn) { ended <- c },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, kind := range []uint8{die, tooLong, short, die} {
		c, err := s.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if b := <-begun; b != c {
			t.Fatal("another child has begun")
		}
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(w, "this")
		w.Close()
		if got := call(t, c, tellMe, "that", r); got != "that and this <nil>" {
			t.Errorf("told: %s", got)
		}
		r.Close()
		if got := call(t, c, askMe, "word", nil); got != "heard word <nil>" {
			t.Errorf("asked: %s", got)
		}
		if got := call(t, c, aFile, "", nil); got != "sendmsg: function not implemented" { // it has no call for that
			t.Errorf("it sends a descriptor: %s", got)
		}
		if _, err := c.Call(t.Context(), kind, nil, nil); !errors.Is(err, ErrGone) {
			t.Errorf("kind %d: %v", kind, err)
		}
		if e := <-ended; e != c {
			t.Error("another child has ended")
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if c, err := s.Conn(t.Context()); !errors.Is(err, ErrGone) {
		t.Errorf("after Close: %v, %v", c, err)
	}
}

// TestStartFails: the error of a start says what the child said.
func TestStartFails(t *testing.T) {
	needsRoot(t)
	_, err := Start(t.Context(), Config{Verb: "odd", Memory: 256 << 20, Max: 16})
	if err == nil || !bytes.Contains([]byte(err.Error()), []byte("0 files")) {
		t.Error(err)
	}
}

// lineOf makes both ends of a line in this process.
func lineOf(t *testing.T, max int, take bool) (c *Conn, peer *os.File) {
	t.Helper()
	a, b, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	c, err = NewConn(a, max, take)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); b.Close() })
	return c, b
}

// TestManyCalls: answers come in any order, from both sides at once.
func TestManyCalls(t *testing.T) {
	a, f := lineOf(t, 64, false)
	b, err := NewConn(f, 64, true)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*Conn{a, b} {
		go c.Run(func(m Message) { //nolint:errcheck // the calls say
			go c.Answer(m, m.Body, nil) //nolint:errcheck // likewise
		})
	}
	errs := make(chan error, 2000)
	for i := range 2000 {
		go func() {
			body := fmt.Appendf(nil, "%d", i)
			m, err := []*Conn{a, b}[i%2].Call(t.Context(), 1, body, nil)
			if err == nil && !bytes.Equal(m.Body, body) {
				err = fmt.Errorf("%d: %s", i, m.Body)
			}
			errs <- err
		}()
	}
	for range 2000 {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := a.Call(ctx, 1, nil, nil); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	b.Close()
	<-a.Done()
	if _, err := a.Call(t.Context(), 1, nil, nil); !errors.Is(err, ErrGone) {
		t.Error(err)
	}
}

// TestUnread: a line whose other side does not read is closed after a while, for all that write
// there. One whose other side reads late goes on.
func TestUnread(t *testing.T) {
	fill := func(c *Conn) error {
		raw, err := c.f.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var werr error
		for raw.Control(func(fd uintptr) { _, werr = unix.Write(int(fd), make([]byte, header+64)) }) == nil && werr == nil {
		}
		return werr
	}
	c, _ := lineOf(t, 64, false)
	c.patience = 20 * time.Millisecond
	errs := make(chan error, 10)
	if err := fill(c); err != unix.EAGAIN {
		t.Fatal(err)
	}
	for i := range cap(errs) {
		go func() {
			if i%2 == 0 {
				errs <- c.Tell(1, nil, os.Stdin)
				return
			}
			_, err := c.Call(t.Context(), 1, nil, nil)
			errs <- err
		}()
	}
	for range cap(errs) {
		if <-errs == nil {
			t.Error("a message was written to a full line")
		}
	}
	<-c.Done()
	late, peer := lineOf(t, 64, false)
	late.patience = time.Hour
	if err := fill(late); err != unix.EAGAIN {
		t.Fatal(err)
	}
	go func() { errs <- late.Tell(1, nil, nil) }()
	go io.Copy(io.Discard, peer) //nolint:errcheck // ends with the line
	if err := <-errs; err != nil {
		t.Error("the other side read late:", err)
	}
	if err := late.Tell(1, nil, nil); err != nil {
		t.Error(err)
	}
}

// TestPeerDiesUnread: what the other side has sent arrives, although that ended with messages
// unread.
func TestPeerDiesUnread(t *testing.T) {
	c, f := lineOf(t, 64, true)
	peer, err := NewConn(f, 64, true)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := errors.Join(peer.Tell(1, nil, os.Stdin), c.Tell(1, nil, nil)); err != nil {
			t.Fatal(err)
		}
	}
	peer.Close()
	got := 0
	if err := c.Run(func(m Message) { got++; m.File.Close() }); err != nil || got != 3 {
		t.Errorf("%d messages, %v", got, err)
	}
}

// TestNoDescriptorsLeak: those that come where none may are closed, and end the line.
func TestNoDescriptorsLeak(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for _, take := range []bool{false, true} {
		c, peer := lineOf(t, 64, take)
		raw, err := peer.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		fds := []int{int(w.Fd()), int(w.Fd())}
		raw.Control(func(fd uintptr) { //nolint:errcheck // the line says
			err = unix.Sendmsg(int(fd), make([]byte, header), unix.UnixRights(fds...), nil, 0)
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Run(func(Message) { t.Error("it was handled") }); !errors.Is(err, errForm) {
			t.Error(err)
		}
	}
	w.Close()
	if b, err := io.ReadAll(r); err != nil || len(b) > 0 { // ends when no copy of w is left
		t.Error(b, err)
	}
}

// FuzzConn: whatever a child sends, the line hands on messages of the right form or ends.
func FuzzConn(f *testing.F) {
	f.Add([]byte("\x01\x01\x00\x00\x00name"), []byte("\x81\x01\x00\x00\x00"))
	f.Add([]byte("\x01"), []byte("\x01\x00\x00\x00\x00too long for this"))
	f.Fuzz(func(t *testing.T, first, second []byte) {
		c, peer := lineOf(t, 8, false)
		for _, b := range [][]byte{first, second} {
			if len(b) > 64<<10 {
				return
			}
			if _, err := peer.Write(b); err != nil {
				t.Fatal(err)
			}
		}
		peer.Close()
		var want []Message
		wrong, ended := false, false // an empty message ends a line
		for _, b := range [][]byte{first, second} {
			switch {
			case wrong || ended:
			case len(b) == 0:
				ended = true
			case len(b) < 5 || len(b) > 13:
				wrong = true
			case b[0] < 128:
				want = append(want, Message{Kind: b[0], Body: b[5:]})
			}
		}
		var got []Message
		err := c.Run(func(m Message) { got = append(got, m) })
		if wrong != errors.Is(err, errForm) || len(got) != len(want) {
			t.Fatalf("%v, %d messages; want %v, %d", err, len(got), wrong, len(want))
		}
		for i, m := range got {
			if m.Kind != want[i].Kind || !bytes.Equal(m.Body, want[i].Body) {
				t.Fatalf("%v, want %v", m, want[i])
			}
		}
	})
}
