package heads

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
)

// An Inspector gets the flows, and the requests, to names that the daemon marks: it answered
// an Open with Inspect. Its methods are called concurrently, other than Message.
type Inspector interface {
	// Begin takes the line to a daemon, or to the next one, before any message of it.
	Begin(line *child.Conn)
	// Message takes a message that heads does not know, with its file, in the order in which
	// the daemon sent it and KindServe. What takes time there holds up the line.
	Message(line *child.Conn, m child.Message)
	// TLS serves a flow that begins with a ClientHello for g.Name, of which nothing has been
	// answered. It may return before the flow ends, which it closes.
	TLS(g *Guest)
	// RoundTrip sends a request of HTTP without TLS on by send. The host of its URL is the
	// name that was marked, in normal form. An error may be a Teller.
	RoundTrip(g *Guest, r *http.Request, send http.RoundTripper) (*http.Response, error)
}

// A Teller is an error that says what the guest is told.
type Teller interface {
	error
	Tell() (status int, code, text string)
}

// ServeWith is Serve for the child of one sandbox: that of a verb which is not Verb, whose
// line takes messages of at most longest bytes.
func ServeWith(i Inspector, longest int) error { return serveAs(newServer(i), longest) }

// ServeLine is ServeWith on a line that is given, with which it ends.
func ServeLine(i Inspector, line *child.Conn) error { return line.Run(newServer(i).begin(line)) }

// inspect gives a flow that has begun with b to the Inspector.
func (f *flow) inspect(b []byte, up *upstream, name string) {
	if up != nil {
		up.Close() // it was opened before the guest said a name
	}
	f.guest.SetDeadline(time.Time{}) //nolint:errcheck // shows in the next read
	f.s.inspector.TLS(&Guest{Conn: f.guest, Name: name, f: f, b: b})
}

// Port is where the guest's connection was to go.
func (c *Guest) Port() uint16 { return c.f.Dst.Port() }

// Addr is the address to which the guest's connection was to go.
func (c *Guest) Addr() netip.Addr { return c.f.Dst.Addr() }

// Line is the line to the daemon, or to the last one.
func (c *Guest) Line() *child.Conn { return c.f.s.c.Load() }

// Dial opens a socket to the destination of a flow of TLS, by KindDial.
func (c *Guest) Dial(ctx context.Context) (net.Conn, error) {
	up, err := c.f.ask(ctx, KindDial, TLS, c.Name)
	if err != nil {
		return nil, err
	}
	return up, nil
}

// Farewell closes the flow when the guest has had time to read the last words.
func (c *Guest) Farewell() { c.once.Do(func() { c.f.farewell(nil) }) }

// Abort closes the flow with a reset: the guest must not take it for an orderly end.
func (c *Guest) Abort() {
	linger(c.Conn)
	c.Close()
}

// errChanged: a name was marked while a connection for it was opened.
var errChanged = &refusal{Result: Failed, Text: "The rules for this name have just changed: send the request again."}

// inspected sends a request on, by the Inspector if the daemon has marked its name.
func (c *Guest) inspected(r *http.Request) (*http.Response, error) {
	name := r.URL.Host
	if name == nameless || name == hostless {
		return c.transport.RoundTrip(r)
	}
	marked, err := c.isMarked(r.Context(), name)
	switch {
	case err != nil:
		return nil, err
	case marked:
		return c.f.s.inspector.RoundTrip(c, r, c.transport)
	}
	return c.transport.RoundTrip(r)
}

// maxNames is how many names of a flow are remembered.
const maxNames = 64

// isMarked asks the daemon about a name, once: it cuts the flow when it thinks otherwise. If
// the name is not marked, the socket that comes along is kept for dialMarked.
func (c *Guest) isMarked(ctx context.Context, name string) (bool, error) {
	c.mu.Lock()
	marked, known := c.marked[name]
	c.mu.Unlock()
	if known {
		return marked, nil
	}
	up, err := c.f.open(ctx, HTTP, name)
	if r, ok := errors.AsType[*refusal](err); ok && r.Result == Inspect {
		marked, err = true, nil
	}
	if err != nil {
		return false, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.marked) >= maxNames || c.marked == nil {
		c.marked = map[string]bool{}
	}
	c.marked[name] = marked
	if up != nil {
		old := c.ready[name]
		if c.ready == nil {
			c.ready = map[string]*upstream{}
		}
		c.ready[name] = up
		if old != nil {
			old.Close()
		}
	}
	return marked, nil
}

// dialMarked opens a socket for a name of which the daemon has said whether it is marked.
func (c *Guest) dialMarked(ctx context.Context, name string) (net.Conn, error) {
	c.mu.Lock()
	up, marked := c.ready[name], c.marked[name]
	delete(c.ready, name)
	c.mu.Unlock()
	if up != nil {
		return up, nil
	}
	message := uint8(KindOpen)
	if marked {
		message = KindDial
	}
	up, err := c.f.ask(ctx, message, HTTP, name)
	if r, ok := errors.AsType[*refusal](err); ok && r.Result == Inspect {
		c.mu.Lock()
		delete(c.marked, name)
		c.mu.Unlock()
		err = errChanged
	}
	if err != nil {
		return nil, err
	}
	return up, nil
}

// unready closes the sockets that nobody has dialed.
func (c *Guest) unready() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, up := range c.ready {
		up.Close()
	}
	c.ready = nil
}
