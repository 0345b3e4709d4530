package heads

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/pkg/egress/child"
)

// How long a flow may be quiet: IdleLimit with both ways open, or one closed.
const (
	IdleLimit = time.Hour
	halfLimit = 2 * time.Minute
	lookEvery = 10 * time.Second
)

// Serve is the verb: it runs until no daemon has its line, and no flow is left.
func Serve([]string) error { return serveAs(newServer(nil), 4<<10) }

func serveAs(s *server, longest int) error {
	log.SetOutput(io.Discard) // net/http prints there what a server sent unasked
	go s.look()
	return child.ServeOn(longest, s.begin, s.alone)
}

// A server serves the flows of all sandboxes.
type server struct {
	c    atomic.Pointer[child.Conn] // to the daemon, or to the last one
	http *webServer
	// inspector is nil in the child that all sandboxes share.
	inspector Inspector

	mu    sync.Mutex
	flows map[*flow]bool
	leave func() // nil: a daemon has the line
}

func newServer(i Inspector) *server {
	s := &server{flows: map[*flow]bool{}, inspector: i}
	s.http = newWebServer(s)
	return s
}

// begin takes the line to a daemon.
func (s *server) begin(c *child.Conn) func(child.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leave = nil
	s.c.Store(c)
	if s.inspector != nil {
		s.inspector.Begin(c)
	}
	return s.handle
}

// alone is called when no daemon has the line: leave is to be called when no flow is left.
func (s *server) alone(leave func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leave = leave
	s.unused()
}

// unused ends a server that serves nobody.
//
// Preconditions: s.mu is held.
func (s *server) unused() {
	if s.leave != nil && len(s.flows) == 0 {
		s.leave()
	}
}

// handle takes a message of the daemon.
func (s *server) handle(m child.Message) {
	if m.Kind != KindServe || m.File == nil {
		if s.inspector != nil {
			s.inspector.Message(s.c.Load(), m)
			return
		}
		if m.File != nil {
			m.File.Close()
		}
		return
	}
	fl, err := ParseFlow(m.Body)
	guest, cerr := connOf(m.File)
	if err = errors.Join(err, cerr); err != nil {
		fmt.Fprintln(os.Stderr, "take a guest's connection:", err)
		s.closed(fl.Number, 0)
		return
	}
	f := &flow{Flow: fl, s: s, guest: guest}
	f.active()
	s.mu.Lock()
	s.flows[f] = true
	s.mu.Unlock()
	go f.run()
}

func (s *server) closed(number uint64, socket uint32) {
	s.c.Load().Tell(KindClosed, Closed{number, socket}.Append(nil), nil) //nolint:errcheck // fails if the daemon is gone
}

// look ends flows that have been quiet for too long.
func (s *server) look() {
	for now := range time.Tick(lookEvery) {
		s.mu.Lock()
		for f := range s.flows {
			if quiet := now.Sub(time.Unix(0, f.last.Load())); quiet > IdleLimit || f.half.Load() && quiet > halfLimit {
				f.stop()
			}
		}
		s.mu.Unlock()
	}
}

// connOf makes a connection of a descriptor, which it closes.
func connOf(f *os.File) (*relay.Conn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	r, ok := relay.New(c).(*relay.Conn)
	if !ok {
		return nil, errors.Join(errors.New("not a stream"), c.Close())
	}
	return r, nil
}

// A flow is one connection of a guest.
type flow struct {
	Flow
	s     *server
	guest *relay.Conn
	last  atomic.Int64 // when bytes passed
	half  atomic.Bool  // one direction has ended

	mu sync.Mutex
	up *upstream // that the bytes of guest are copied to
}

func (f *flow) active() { f.last.Store(time.Now().UnixNano()) }

// stop makes reads and writes of the flow return.
func (f *flow) stop() {
	f.guest.SetDeadline(time.Unix(1, 0)) //nolint:errcheck // it is closed then
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.up != nil {
		f.up.SetDeadline(time.Unix(1, 0)) //nolint:errcheck // likewise
	}
}

// end tells the daemon that the child has closed the flow.
func (f *flow) end() {
	f.guest.Close()
	f.s.closed(f.Number, 0)
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	delete(f.s.flows, f)
	f.s.unused()
}

// An upstream is a socket to the destination of a flow.
type upstream struct {
	*relay.Conn
	f      *flow
	number uint32
	once   sync.Once
}

// Close closes the socket, and tells the daemon, which has another descriptor of it.
func (u *upstream) Close() error {
	u.once.Do(func() {
		u.Conn.Close()
		u.f.s.closed(u.f.Number, u.number)
	})
	return nil
}

// noDaemon is what a guest reads when there is nobody to ask.
const noDaemon = "sandboxd does not run at the moment: open connections go on, and none opens until it runs again"

// A refusal is what the daemon said instead of opening.
type refusal Opened

func (r *refusal) Error() string { return r.Text }

// Tell makes a refusal a Teller.
func (r *refusal) Tell() (status int, code, text string) {
	if r.Result == Denied {
		return http.StatusForbidden, "SANDBOX::FORBIDDEN", r.Text
	}
	return http.StatusBadGateway, "SANDBOX::UNREACHABLE", r.Text
}

// open asks the daemon for a socket.
func (f *flow) open(ctx context.Context, kind Kind, name string) (*upstream, error) {
	return f.ask(ctx, KindOpen, kind, name)
}

// ask asks the daemon by a message of a kind.
func (f *flow) ask(ctx context.Context, message uint8, kind Kind, name string) (*upstream, error) {
	m, err := f.s.c.Load().Call(ctx, message, Open{f.Number, kind, name}.Append(nil), nil)
	if errors.Is(err, child.ErrGone) {
		return nil, &refusal{Result: Failed, Text: noDaemon}
	}
	if err != nil {
		return nil, err
	}
	o, err := ParseOpened(m.Body)
	switch {
	case err != nil:
	case o.Result != Granted:
		err = (*refusal)(&o)
	case kind == Check:
		return nil, nil
	case m.File == nil:
		err = errForm
	default:
		c, cerr := connOf(m.File)
		if cerr != nil {
			return nil, cerr
		}
		return &upstream{Conn: c, f: f, number: o.Socket}, nil
	}
	if m.File != nil {
		m.File.Close()
	}
	return nil, err
}

// run serves the flow to its end.
func (f *flow) run() {
	if f.First {
		f.runFirst()
		return
	}
	b, begins := f.head(nil, time.Now().Add(HeadLimit))
	f.begin(b, begins, nil)
}

// begin serves a flow that has begun with b. If up is not nil, it is open already.
func (f *flow) begin(b []byte, begins int, up *upstream) {
	switch begins {
	case isTLS:
		f.runTLS(b, up)
	case isHTTP:
		if up != nil {
			up.Close() // each name gets a socket of its own
		}
		f.guest.SetDeadline(time.Time{}) //nolint:errcheck // shows in the next read
		f.s.http.take(f, b)
	case isH2:
		f.nameless(b, up, H2C)
	case other:
		if up != nil {
			f.pass(b, up, nil, nil)
			return
		}
		f.nameless(b, nil, Other)
	default:
		if len(b) > 0 {
			f.nameless(b, up, Part)
			return
		}
		f.nameless(b, up, Silent)
	}
}

// head reads until it can say what the flow begins with. It returns more if the guest says
// too little.
func (f *flow) head(b []byte, until time.Time) ([]byte, int) {
	if len(b) == 0 {
		f.guest.SetReadDeadline(until) //nolint:errcheck // shows in the read
	}
	for {
		if begins := beginning(b); begins != more {
			return b, begins
		}
		if len(b) >= MaxHead {
			return b, isHTTP // a request line without end: net/http refuses it
		}
		var err error
		if b, err = f.read(b); err != nil {
			return b, more
		}
	}
}

// read reads more of the guest's first bytes.
func (f *flow) read(b []byte) ([]byte, error) {
	if cap(b)-len(b) < 512 {
		b = append(make([]byte, 0, max(2*cap(b), 2048)), b...)
	}
	n, err := f.guest.Read(b[len(b):cap(b)])
	f.active()
	if n > 0 {
		err = nil
	}
	return b[:len(b)+n], err
}

// nameless serves a flow that begins with b in a way that has no name. The daemon may still
// let it go on: it knows whether a rule speaks of it.
func (f *flow) nameless(b []byte, up *upstream, kind Kind) {
	if up != nil {
		up.Close()
	}
	up, err := f.open(context.Background(), kind, "")
	switch {
	case err == nil:
		f.pass(b, up, nil, nil)
	case kind == H2C:
		f.farewell(goAway(err.Error()))
	default:
		f.reset()
	}
}

// reset ends the flow without the goodbyes of TCP.
func (f *flow) reset() {
	linger(f.guest)
	f.end()
}

func linger(c *relay.Conn) {
	if t, ok := c.NetConn().(*net.TCPConn); ok {
		t.SetLinger(0) //nolint:errcheck // it ends slowly then
	}
}

// farewell sends last words and ends the flow. It reads what still comes for a moment: if
// a socket is closed with unread bytes, the kernel resets it, and the words are lost.
func (f *flow) farewell(words []byte) {
	defer f.end()
	f.guest.SetDeadline(time.Now().Add(time.Second)) //nolint:errcheck // shows in the write
	if _, err := f.guest.Write(words); err != nil {
		linger(f.guest)
		return
	}
	if f.guest.CloseWrite() == nil {
		io.CopyN(io.Discard, f.guest, 256<<10) //nolint:errcheck // only the wait counts
	}
}

// metered tells a flow of each piece that passes.
type metered struct {
	*relay.Conn
	f *flow
}

// Passing is called by relay.
func (m metered) Passing(int) { m.f.active() }

// NetConn is the connection below, for relay.
func (m metered) NetConn() net.Conn { return m.Conn }

// pass sends each side what the other has said by now, then copies both ways until both
// have ended, and ends the flow. w, if not nil, looks at what follows.
func (f *flow) pass(toServer []byte, up *upstream, toGuest []byte, w *watch) {
	defer f.end()
	defer up.Close()
	f.mu.Lock()
	f.up = up
	f.mu.Unlock()
	f.guest.SetDeadline(time.Time{}) //nolint:errcheck // shows in the next read
	up.SetDeadline(time.Time{})      //nolint:errcheck // likewise
	f.active()
	var down error
	done := make(chan struct{})
	go func() {
		defer close(done)
		var answer func() error
		if w != nil {
			answer = w.answer
		}
		down = f.copy(f.guest, up.Conn, toGuest, answer)
	}()
	var second func() error
	if w != nil {
		second = w.second
	}
	if f.copy(up.Conn, f.guest, toServer, second) != nil {
		linger(up.Conn)
	}
	<-done
	if down != nil {
		linger(f.guest)
	}
}

// grace is how long the other direction may go on after one has failed: what has arrived
// is still passed on.
const grace = time.Second

// copy copies one way to the end: what was said first, what special passes on, the rest. It
// ends the other way if it failed.
func (f *flow) copy(dst, src *relay.Conn, first []byte, special func() error) error {
	var err error
	if len(first) > 0 {
		_, err = dst.Write(first)
	}
	if err == nil && special != nil {
		err = special()
	}
	if err == nil {
		_, err = relay.Copy(dst, metered{src, f})
	}
	if err == nil || errors.Is(err, io.EOF) {
		f.half.Store(true)
		f.active()
		return dst.CloseWrite()
	}
	dst.SetReadDeadline(time.Now().Add(grace)) //nolint:errcheck // it is closed then
	return err
}

// runFirst serves a flow whose server may speak first: whoever does decides how it goes on.
func (f *flow) runFirst() {
	up, err := f.open(context.Background(), First, "")
	if err != nil {
		if r, ok := errors.AsType[*refusal](err); !ok || r.Result != Denied {
			f.reset()
			return
		}
		// No name of this address may be reached at this port, unless the guest says one.
		b, begins := f.head(nil, time.Now().Add(HeadLimit))
		f.begin(b, begins, nil)
		return
	}
	var spoke atomic.Bool
	said := make(chan []byte, 1)
	go func() {
		b := make([]byte, 4<<10)
		n, err := up.Read(b)
		if !errors.Is(err, os.ErrDeadlineExceeded) { // the end is a word too
			spoke.Store(true)
			f.guest.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // shows in the read
		}
		said <- b[:n]
	}()
	b, begins := f.read1(&spoke)
	up.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // shows in the read
	toGuest := <-said
	if spoke.Load() || len(b) == 0 {
		f.pass(b, up, toGuest, nil)
		return
	}
	f.begin(b, begins, up)
}

// read1 waits for the guest's first bytes as long as nobody speaks, and then for the rest of
// its head.
func (f *flow) read1(spoke *atomic.Bool) ([]byte, int) {
	b, err := f.read(nil)
	if err != nil {
		return b, more
	}
	if spoke.Load() {
		return b, more
	}
	begins := beginning(b)
	if begins != more {
		return b, begins
	}
	until := time.Now().Add(HeadLimit)
	f.guest.SetReadDeadline(until) //nolint:errcheck // shows in the read
	if spoke.Load() {              // its deadline was overwritten
		return b, more
	}
	return f.head(b, until)
}
