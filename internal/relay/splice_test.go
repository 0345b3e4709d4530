package relay

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"
)

// pair is a connection of two sockets of a kind.
func pair(t *testing.T, network string) (a, b net.Conn) {
	t.Helper()
	addr := "127.0.0.1:0"
	if network == "unix" {
		addr = filepath.Join(t.TempDir(), "s")
	}
	l, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.Dial(network, l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return New(a), New(b)
}

// noise is n bytes that no shift of them equals.
func noise(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{}).Read(b) //nolint:errcheck // never fails
	return b
}

// descriptors is how many this process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	runtime.GC()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// A meter counts what passes.
type meter struct {
	*Conn
	passed, widest int
}

func (m *meter) NetConn() net.Conn { return m.Conn }

func (m *meter) Passing(n int) { m.passed, m.widest = m.passed+n, max(m.widest, n) }

// What passes from socket to socket arrives whole and in order, much or little at a time.
// No pipe stays open.
func TestSpliced(t *testing.T) {
	want := noise(4 << 20)
	for _, kinds := range [][2]string{{"tcp", "tcp"}, {"unix", "tcp"}, {"tcp", "unix"}, {"unix", "unix"}} {
		before := descriptors(t)
		guest, from := pair(t, kinds[0])
		to, client := pair(t, kinds[1])
		m := &meter{Conn: from.(*Conn)}
		done := make(chan error, 1)
		go func() {
			_, err := Copy(to, m)
			done <- errors.Join(err, to.(*Conn).CloseWrite())
		}()
		sent := 0
		for _, size := range []int{1, Quiet, len(want), 10, large + 1, 2 * wide, 0, Quiet + 1, len(want)} {
			go guest.Write(want[:size]) //nolint:errcheck // then less arrives
			got := make([]byte, size)
			if n, err := io.ReadFull(client, got); err != nil || !bytes.Equal(got, want[:size]) {
				t.Fatalf("%v: %d of %d bytes arrive, %v", kinds, n, size, err)
			}
			sent += size
		}
		guest.(*Conn).CloseWrite() //nolint:errcheck // then the copy does not end
		if n, err := client.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("%v: after the end %d bytes, %v", kinds, n, err)
		}
		if err := <-done; err != nil || m.passed != sent || m.widest <= large {
			t.Errorf("%v: %v; %d of %d bytes are counted, %d at a time", kinds, err, m.passed, sent, m.widest)
		}
		for _, c := range []net.Conn{guest, from, to, client} {
			c.Close()
		}
		if after := descriptors(t); after != before || m.Conn.div.Load() != nil {
			t.Errorf("%v: %d descriptors, then %d", kinds, before, after)
		}
	}
}

// A body of net/http lies over a buffer that has some of it, and ends before the
// connection does: exactly the body is moved, and the rest is still there to be read.
func TestSplicedBody(t *testing.T) {
	guest, from := pair(t, "tcp")
	to, client := pair(t, "tcp")
	want := noise(3 << 20)
	const next = "the next answer"
	go func() {
		guest.Write(want)         //nolint:errcheck // then the copy is short
		guest.Write([]byte(next)) //nolint:errcheck // see above
	}()
	buffered := bufio.NewReader(from)
	if _, err := buffered.Peek(100); err != nil {
		t.Fatal(err)
	}
	body := &over{io.LimitReader(buffered, int64(len(want))), from}
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(to, body)
		done <- errors.Join(err, to.(*Conn).CloseWrite())
	}()
	got, err := io.ReadAll(client)
	if err := errors.Join(err, <-done); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%d bytes arrive, %v", len(got), err)
	}
	rest := make([]byte, len(next))
	if _, err := io.ReadFull(buffered, rest); err != nil || string(rest) != next {
		t.Errorf("then %q, %v", rest, err)
	}
}

type over struct {
	io.Reader
	conn net.Conn
}

func (o *over) NetConn() net.Conn { return o.conn }

// A reader in between that has a buffer of its own, or reads twice for one Read, is
// noticed: nobody gets bytes of a buffer that was not filled.
func TestNotSpliced(t *testing.T) {
	want := noise(2 << 20)
	t.Run("own buffer", func(t *testing.T) {
		got, err := through(t, want, func(c net.Conn) io.Reader { return &own{c, make([]byte, 100<<10)} })
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes arrive, %v", len(got), err)
		}
	})
	t.Run("two reads", func(t *testing.T) {
		got, err := through(t, want, func(c net.Conn) io.Reader { return twice{c} })
		if !errors.Is(err, errMixed) || !bytes.HasPrefix(want, got) {
			t.Errorf("%d bytes arrive, %v", len(got), err)
		}
	})
}

// through sends b through readers over a Conn, and returns what arrives.
func through(t *testing.T, b []byte, stack func(net.Conn) io.Reader) ([]byte, error) {
	guest, from := pair(t, "tcp")
	to, client := pair(t, "tcp")
	go func() {
		guest.Write(b)             //nolint:errcheck // then the copy is short
		guest.(*Conn).CloseWrite() //nolint:errcheck // see above
	}()
	done := make(chan error, 1)
	go func() {
		_, err := Copy(to, &over{stack(from), from})
		to.(*Conn).CloseWrite() //nolint:errcheck // see above
		done <- err
	}()
	got, err := io.ReadAll(client)
	return got, errors.Join(err, <-done)
}

type own struct {
	io.Reader
	b []byte
}

func (o *own) Read(p []byte) (int, error) {
	n, err := o.Reader.Read(o.b[:min(len(p), len(o.b))])
	copy(p, o.b[:n])
	return n, err
}

type twice struct{ io.Reader }

func (r twice) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p[:len(p)/2])
	if err != nil || n < 10 {
		return n, err
	}
	m, err := r.Reader.Read(p[n:])
	return n + m, err
}

// If the destination breaks, that is an error of Copy and none of the source: readers in
// between would take it for one of their connection.
func TestSplicedTo(t *testing.T) {
	guest, from := pair(t, "tcp")
	to, client := pair(t, "tcp")
	go func() {
		b := noise(1 << 20)
		for {
			if _, err := guest.Write(b); err != nil {
				return
			}
		}
	}()
	go func() {
		io.CopyN(io.Discard, client, 4<<20) //nolint:errcheck // then it breaks earlier
		client.Close()
	}()
	src := &noting{from.(*Conn), nil}
	if _, err := Copy(to, src); err == nil || src.err != nil {
		t.Errorf("Copy: %v; of the source: %v", err, src.err)
	}
}

// noting notes the error of a Conn.
type noting struct {
	*Conn
	err error
}

func (n *noting) NetConn() net.Conn { return n.Conn }

func (n *noting) Read(p []byte) (int, error) {
	m, err := n.Conn.Read(p)
	n.err = err
	return m, err
}

// A deadline of the source ends a wait for more.
func TestSplicedDeadline(t *testing.T) {
	guest, from := pair(t, "tcp")
	to, client := pair(t, "tcp")
	go io.Copy(io.Discard, client) //nolint:errcheck // until the end of the test
	m := &meter{Conn: from.(*Conn)}
	done := make(chan error, 1)
	go func() { _, err := Copy(to, m); done <- err }()
	if _, err := guest.Write(noise(4 << 20)); err != nil {
		t.Fatal(err)
	}
	if err := from.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
}

// Only what has a socket below, and the same bytes, is diverted.
func TestBelow(t *testing.T) {
	a, b := net.Pipe()
	if New(a) != a || Diverts(a, b) || below(io.LimitReader(a, 1)) != nil {
		t.Error("a pipe in memory counts as a socket")
	}
	c, d := pair(t, "tcp")
	if !Diverts(c, d) || Diverts(tls.Server(c, nil), d) || Diverts(c, tls.Client(d, nil)) || Diverts(nil, d) {
		t.Error("TLS counts as its socket, or a socket does not count")
	}
}
