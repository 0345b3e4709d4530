package heads

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/sandboxd/sandboxd/internal/relay"
)

// A webServer reads requests of HTTP/1 and sends them on, written anew.
//
// A transport belongs to one flow, and has a socket for each name: a request never goes
// where the daemon has let another name go.
type webServer struct {
	conns chan net.Conn
	proxy *httputil.ReverseProxy
}

// reserve is what net/http adds to MaxHeaderBytes (net/http, Server.initialReadLimitSize).
const reserve = 4096

// MaxHeaderBytes is what an http.Server gets, so that its heads are as long as they may be.
const MaxHeaderBytes = MaxHead - reserve

func newWebServer(s *server) *webServer {
	w := &webServer{conns: make(chan net.Conn)}
	w.proxy = &httputil.ReverseProxy{
		Rewrite: rewrite, ModifyResponse: FewLines, Transport: perFlow{}, FlushInterval: -1, BufferPool: relay.Buffers{},
		ErrorHandler: TellFailed, ErrorLog: log.New(io.Discard, "", 0),
	}
	h := &http.Server{
		Handler: w, ReadHeaderTimeout: HeadLimit, IdleTimeout: IdleLimit, MaxHeaderBytes: MaxHeaderBytes,
		DisableGeneralOptionsHandler: true,                       // OPTIONS * is for the server, if a rule allows it
		ErrorLog:                     log.New(io.Discard, "", 0), // guests would fill the log
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, flowKey{}, c.(*Guest))
		},
	}
	go h.Serve(w) //nolint:errcheck // it ends with the process
	return w
}

type flowKey struct{}

func flowOf(ctx context.Context) *Guest { return ctx.Value(flowKey{}).(*Guest) }

// take serves a flow of which b has come.
func (w *webServer) take(f *flow, b []byte) {
	c := &Guest{Conn: f.guest, f: f, b: b}
	c.transport = &http.Transport{
		DialContext: c.dial, DisableCompression: true, MaxIdleConns: 2, MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute,
		ExpectContinueTimeout: time.Second, MaxResponseHeaderBytes: MaxHead,
	}
	w.conns <- c
}

// Accept returns the next flow of HTTP: a webServer is the listener of its http.Server.
func (w *webServer) Accept() (net.Conn, error) { return <-w.conns, nil }

// Close is never called.
func (w *webServer) Close() error { return nil }

// Addr says nothing.
func (w *webServer) Addr() net.Addr { return &net.TCPAddr{} }

// A Guest is the guest's side of a flow. It begins with what heads has read of it. To close
// it ends the flow.
type Guest struct {
	*relay.Conn
	// Name is the one that the daemon has marked, in normal form; "" in a flow of HTTP, where
	// each request has its own.
	Name string

	f         *flow
	b         []byte          // was read before
	transport *http.Transport // of HTTP, or nil
	once      sync.Once

	mu     sync.Mutex
	marked map[string]bool      // what the daemon said of a name; nil without an Inspector
	ready  map[string]*upstream // opened, before they are dialed
}

// Read reads first what was read before.
func (c *Guest) Read(p []byte) (int, error) {
	c.f.active()
	if len(c.b) > 0 {
		n := copy(p, c.b)
		c.b = c.b[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// Write writes to the guest.
func (c *Guest) Write(p []byte) (int, error) {
	c.f.active()
	return c.Conn.Write(p)
}

// Close ends the flow.
func (c *Guest) Close() error {
	c.once.Do(func() {
		if c.transport != nil {
			c.transport.CloseIdleConnections()
			c.unready()
		}
		c.f.end()
	})
	return nil
}

// dial opens a socket for the name that is the host of address.
func (c *Guest) dial(ctx context.Context, _, address string) (net.Conn, error) {
	name, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if name == hostless {
		up, err := c.f.open(ctx, HTTP, "")
		if err != nil {
			return nil, err
		}
		return &hostlessConn{Conn: up}, nil
	}
	if name == nameless {
		name = ""
	}
	if c.f.s.inspector != nil {
		return c.dialMarked(ctx, name)
	}
	return c.f.open(ctx, HTTP, name)
}

// nameless stands in a URL for no name, hostless for that of a request without a Host, which
// has a connection for itself. No name is written so. noHost is a Host for which net/http
// writes an empty one, because it is not valid.
const (
	nameless = "-."
	hostless = "-.."
	noHost   = "/"
)

// A hostlessConn takes the Host out of its one request: net/http always writes one. What
// the server gets is HTTP/1.0, which alone may have none (RFC 9112, section 3.2).
type hostlessConn struct {
	net.Conn
	head []byte // was written before the end of the Host
	done bool
}

const (
	withHost    = " HTTP/1.1\r\nHost: " + hostless + "\r\n"
	withoutHost = " HTTP/1.0\r\n"
)

// Write writes to the server.
func (c *hostlessConn) Write(p []byte) (int, error) {
	if c.done {
		return c.Conn.Write(p)
	}
	c.head = append(c.head, p...)
	line, rest, ok := bytes.Cut(c.head, []byte(withHost))
	if !ok {
		return len(p), nil
	}
	_, err := c.Conn.Write(slices.Concat(line, []byte(withoutHost), rest))
	c.done, c.head = true, nil
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// perFlow sends each request by the transport of its flow.
type perFlow struct{}

// RoundTrip sends a request.
func (perFlow) RoundTrip(r *http.Request) (*http.Response, error) {
	c := flowOf(r.Context())
	if c.f.s.inspector != nil {
		return c.inspected(r)
	}
	return c.transport.RoundTrip(r)
}

// ServeHTTP serves one request of a guest.
func (w *webServer) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodConnect {
		say(rw, http.StatusMethodNotAllowed, "SANDBOX::METHOD_NOT_ALLOWED",
			"sandboxd refuses CONNECT: there is no proxy here. Connect to the host itself.")
		return
	}
	if !PlainTarget(r, "http") {
		say(rw, http.StatusBadRequest, "SANDBOX::INVALID_PARAMETER",
			"sandboxd does not send on this target of a request: write a path, or http:// with the host in ASCII.")
		return
	}
	if Lines(r.Header) > MaxLines {
		say(rw, http.StatusRequestHeaderFieldsTooLarge, "SANDBOX::HEADERS_TOO_LARGE",
			fmt.Sprintf("sandboxd passes on a request with %d headers at most.", MaxLines))
		return
	}
	w.proxy.ServeHTTP(rw, r)
}

// PlainTarget reports whether the target of a request is a path, a URL of scheme with a host,
// or the * of OPTIONS (RFC 9112, section 3.2). A URL without // would be sent on as it is, with
// another host in it, and a Host that is not ASCII as another name (net/http writes it by
// IDNA).
func PlainTarget(r *http.Request, scheme string) bool {
	if strings.ContainsFunc(r.Host, func(c rune) bool { return c > unicode.MaxASCII }) {
		return false
	}
	switch u := r.URL; {
	case u.Opaque != "" || u.User != nil:
		return false
	case u.Scheme != "":
		return u.Scheme == scheme && u.Host != ""
	default:
		return strings.HasPrefix(r.RequestURI, "/") || r.RequestURI == "*" && r.Method == http.MethodOptions
	}
}

// FewLines refuses a response with more than MaxLines headers.
func FewLines(r *http.Response) error {
	if Lines(r.Header) > MaxLines {
		return &refusal{Result: Failed, Text: fmt.Sprintf("The server sent more than %d headers.", MaxLines)}
	}
	return nil
}

// Lines is how many lines a header has: a key has one for each value.
func Lines(h http.Header) (n int) {
	for _, values := range h {
		n += len(values)
	}
	return n
}

// rewrite makes the request that is sent on. It says what the guest has said, but for what
// belongs to one connection, and for protocols that it would change to: behind those no
// Host is seen. A WebSocket has only one.
func rewrite(p *httputil.ProxyRequest) {
	name := HostName(p.In.Host)
	if name == "" {
		name = nameless
	}
	p.Out.Host = p.In.Host
	switch {
	case p.In.Host != "":
	case p.In.ProtoAtLeast(1, 1):
		p.Out.Host = noHost
	default:
		name, p.Out.Close = hostless, true
	}
	p.Out.URL.Scheme, p.Out.URL.Host, p.Out.URL.Opaque = "http", name, ""
	KeepSaid(p)
}

// KeepSaid makes the outgoing request say what the guest has said where ReverseProxy would
// not, but for protocols that it would change to, other than a WebSocket.
func KeepSaid(p *httputil.ProxyRequest) {
	keepTrailers(p)
	p.Out.URL.RawQuery = p.In.URL.RawQuery
	for _, h := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v, ok := p.In.Header[h]; ok {
			p.Out.Header[h] = v
		}
	}
	if up := p.Out.Header.Get("Upgrade"); up != "" && !strings.EqualFold(up, "websocket") {
		p.Out.Header.Del("Upgrade")
		p.Out.Header.Del("Connection")
		p.Out.Header.Del("Http2-Settings")
	}
}

// TellFailed answers a request that was not sent on, or has no answer: with what a Teller
// says, or in general words.
func TellFailed(rw http.ResponseWriter, r *http.Request, err error) {
	if t, ok := errors.AsType[Teller](err); ok {
		status, code, text := t.Tell()
		say(rw, status, code, text)
		return
	}
	if r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // the guest has gone
	}
	say(rw, http.StatusBadGateway, "SANDBOX::UNREACHABLE", "The server closed the connection, or did not answer as HTTP"+why(err))
}

// why is what of an error has no bytes of the server: texts of net/http quote what it sent, in
// which credentials may come back that no Inspector has masked.
func why(err error) string {
	if op, ok := errors.AsType[*net.OpError](err); ok { // of the kernel, or an alert of TLS
		return fmt.Sprintf(": %s: %v.", op.Op, op.Err)
	}
	if t, ok := errors.AsType[net.Error](err); ok && t.Timeout() {
		return ": it took too long."
	}
	return "."
}

// say writes an answer of sandboxd's own.
func say(rw http.ResponseWriter, status int, code, message string) {
	rw.Header().Set("Content-Type", "application/json")
	rw.WriteHeader(status)
	json.NewEncoder(rw).Encode(struct { //nolint:errcheck // the guest has gone
		Code    string `json:"code"`
		Message string `json:"message"`
	}{code, message})
}

// goAway is the answer to HTTP/2: a frame SETTINGS, and GOAWAY with the reason
// HTTP_1_1_REQUIRED and a text (RFC 9113, sections 6.5, 6.8 and 7).
func goAway(text string) []byte {
	b := []byte{0, 0, 0, 4, 0, 0, 0, 0, 0}
	n := 8 + len(text)
	b = append(b, byte(n>>16), byte(n>>8), byte(n), 7, 0, 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint32(b, 0)
	b = binary.BigEndian.AppendUint32(b, 0xd)
	return append(b, text...)
}
