package terminate

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
)

const (
	serverIdle    = time.Minute      // a connection is kept for the next request
	continueLimit = time.Second      // for a server to answer Expect
	pingAfter     = 30 * time.Second // of silence, a server of HTTP/2 must answer a ping
)

// ServeHTTP serves one request of a guest.
func (i *inspector) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	s := sessionOf(r.Context())
	defer i.busy.Add(-1) // when its answer is written, which a guest of HTTP/2 may put off
	switch n := i.busy.Add(1); {
	case n > 2*maxRequests:
		panic(http.ErrAbortHandler)
	case n > maxRequests:
		rw.Header().Set("Retry-After", "1")
		tell(rw, r, &Refusal{http.StatusServiceUnavailable, "SANDBOX::UNAVAILABLE", fmt.Sprintf(
			"sandboxd sends on %d requests of a sandbox to inspected hosts at the same time.", maxRequests)})
		return
	}
	if refused := refuse(r, s.destination()); refused != nil {
		tell(rw, r, refused)
		return
	}
	if r.ProtoMajor == 1 {
		defer func() {
			if p := recover(); p != nil {
				s.Abort() // else the guest reads a good end of TLS, and perhaps of the answer
				panic(p)
			}
		}()
		// The server may answer before it has read the request, and go on reading.
		http.NewResponseController(rw).EnableFullDuplex() //nolint:errcheck // HTTP/1 has it
	}
	if r.ProtoMajor == 2 && r.ContentLength != 0 {
		r = r.WithContext(context.WithValue(r.Context(), bodyKey{}, io.Closer(r.Body)))
	}
	i.proxy.ServeHTTP(asServed{rw}, r)
}

// asServed answers without what net/http would add where the server has none. ReverseProxy
// empties the header after each answer 1xx, so it is looked at when the answer begins.
type asServed struct{ http.ResponseWriter }

// WriteHeader begins the answer.
func (a asServed) WriteHeader(status int) {
	for _, name := range []string{"Date", "Content-Type"} {
		if h := a.Header(); h[name] == nil {
			h[name] = nil
		}
	}
	a.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (a asServed) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// tell is heads.TellFailed. It returns when a guest of HTTP/2 has let the answer be written:
// net/http would do that after the handler, where nobody counts it.
func tell(rw http.ResponseWriter, r *http.Request, err error) {
	heads.TellFailed(rw, r, err)
	if r.ProtoMajor > 1 {
		http.NewResponseController(rw).Flush() //nolint:errcheck // the guest has gone
	}
}

// refuse checks what net/http leaves to its callers. Of a request with both Content-Length and
// Transfer-Encoding it has taken the first away (RFC 9112, section 6.3), of a folded line it
// has made one; of HTTP/2 it has refused fields of one connection, and values with line ends.
func refuse(r *http.Request, to Destination) *Refusal {
	if weak.Off(weak.Judge) {
		return nil
	}
	bad := func(text string) *Refusal { return &Refusal{http.StatusBadRequest, "SANDBOX::INVALID_PARAMETER", text} }
	switch {
	case r.Method == http.MethodConnect, r.Method == http.MethodTrace:
		return &Refusal{http.StatusMethodNotAllowed, "SANDBOX::METHOD_NOT_ALLOWED", "sandboxd refuses " + r.Method +
			" to an inspected host: the one asks for a proxy, and the other for the headers that the server got."}
	case !heads.PlainTarget(r, to.Scheme), r.ProtoMajor > 1 && r.URL.Host != "", strings.ContainsFunc(r.RequestURI, notOfTarget):
		return bad("sandboxd does not send on this target of a request: write a path, or " + to.Scheme + ":// with the host in ASCII.")
	case heads.Lines(r.Header) > heads.MaxLines:
		return &Refusal{
			http.StatusRequestHeaderFieldsTooLarge, "SANDBOX::HEADERS_TOO_LARGE",
			fmt.Sprintf("sandboxd passes on a request with %d headers at most.", heads.MaxLines),
		}
	case slices.ContainsFunc(r.Header["Host"], func(h string) bool { return h != r.Host }): // only HTTP/2 leaves it there
		return bad("The request has an :authority and another Host: send one of them.")
	case !oneLength(r):
		return bad("The request has a Content-Length that is no number, or more than one.")
	case !at(r.Host, to):
		return &Refusal{http.StatusMisdirectedRequest, "SANDBOX::MISDIRECTED", fmt.Sprintf(
			"This connection is for %s, port %d, and the request is for another host: send it on its own connection.", to.Name, to.Port)}
	}
	return nil
}

// notOfTarget: what a server of HTTP/1.1 may take for the end of a target (RFC 9112, section
// 3.2). HTTP/2 carries blanks, and net/http writes a query as it came.
func notOfTarget(c rune) bool { return c <= ' ' || c == 0x7f || c == '#' }

// oneLength: of HTTP/2, net/http takes a Content-Length that it cannot read for 0, and serves
// the request before it sees a body.
func oneLength(r *http.Request) bool {
	said := r.Header["Content-Length"]
	if len(said) == 0 {
		return true
	}
	n, err := strconv.ParseInt(said[0], 10, 64)
	return len(said) == 1 && err == nil && n == r.ContentLength
}

// at reports whether a Host is that of a Destination.
func at(host string, to Destination) bool {
	if heads.HostName(host) != to.Name {
		return false
	}
	_, port, err := net.SplitHostPort(host)
	return err != nil || port == "" || port == strconv.Itoa(int(to.Port))
}

// rewrite makes the request that is sent on: of the head, what does not belong to one
// connection.
func rewrite(p *httputil.ProxyRequest) {
	p.Out.Header.Del("Host")
	heads.KeepSaid(p)
}

// bySession sends each request by the transport of its flow.
type bySession struct{ i *inspector }

// An open body of HTTP/2 ends what waits in its Read when it is closed. The one that
// ReverseProxy gives does not: a server that answers before the guest has sent all would wait
// for the rest (http2transportResponseBody.Close in net/http), and the guest for the end of the
// answer.
type open struct {
	io.ReadCloser
	guest io.Closer // the body as the guest sends it
}

// Close ends the body.
func (o open) Close() error { return errors.Join(o.ReadCloser.Close(), o.guest.Close()) }

type bodyKey struct{}

// RoundTrip sends a request.
func (b bySession) RoundTrip(r *http.Request) (resp *http.Response, err error) {
	s := sessionOf(r.Context())
	if guest, ok := r.Context().Value(bodyKey{}).(io.Closer); ok && r.Body != nil {
		r.Body = open{r.Body, guest}
	}
	if r.ProtoMajor == 1 && r.Body != nil && long(r.ContentLength) {
		body := newAhead(r.Body, b.i.aheads)
		r.Body = body
		defer func() {
			if err != nil {
				body.Close() // a Judge may have read of it, and refused
			}
		}()
	}
	resp, err = b.i.judged(r, s.destination(), toServer{b.i, s})
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols && long(resp.ContentLength) {
		if resp.ProtoMajor == 1 {
			resp.Body = newAhead(resp.Body, b.i.aheads)
		}
		resp.ContentLength = -1 // so no part waits, for which ReverseProxy would start a timer: see flushAfter
	}
	return resp, nil
}

// toServer sends a request to the server of a session.
type toServer struct {
	i *inspector
	s *session
}

// RoundTrip sends a request, and explains why it could not be.
func (t toServer) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := t.s.server.RoundTrip(r)
	if err != nil {
		return nil, t.i.explain(t.s, r, err)
	}
	t.s.spoke.Store(true)
	return resp, nil
}

// long reports whether a body may be so long that it is worth an ahead.
func long(length int64) bool { return length < 0 || length > aheadFrom }

// RoundTrip sends a request of HTTP without TLS.
func (i *inspector) RoundTrip(g *heads.Guest, r *http.Request, send http.RoundTripper) (*http.Response, error) {
	to := Destination{"http", r.URL.Host, g.Port(), g.Addr()}
	if i.conf.Load() == nil {
		return nil, errNoJudge
	}
	if refused := refuse(r, to); refused != nil {
		return nil, refused
	}
	return i.judged(r, to, send)
}

// What a guest is told of errors of the Judge: their texts may have values of credentials.
var (
	errNoJudge = &Refusal{http.StatusBadGateway, "SANDBOX::UNAVAILABLE", "sandboxd could not decide on this request, and has not sent it."}
	errChanged = &Refusal{
		http.StatusServiceUnavailable, "SANDBOX::UNAVAILABLE", "The rules for this name have just changed: send the request again.",
	}
	errNoLook = &Refusal{
		http.StatusBadGateway, "SANDBOX::UNAVAILABLE", "sandboxd has sent this request, but could not look through the answer.",
	}
)

// toTell is err if the guest may be told it, or other.
func toTell(err error, other *Refusal) error {
	if refused, ok := errors.AsType[*Refusal](err); ok {
		return refused
	}
	return other
}

// judged sends a request on if the Judge lets it pass, and shows it what comes back.
func (i *inspector) judged(r *http.Request, to Destination, send http.RoundTripper) (*http.Response, error) {
	pin(r, to)
	conf := i.conf.Load()
	a, err := conf.judge.Request(r, to)
	if err != nil {
		return nil, toTell(err, errNoJudge)
	}
	if i.conf.Load() != conf { // it waited for a body, or a value: a credential may have been revoked
		return nil, errChanged
	}
	pin(r, to)
	r.GetBody = nil // a Judge may have set it, and Transport would send the body again
	s := &sending{r: r, a: a, conf: conf, left: 1}
	if slices.Contains(repeatable, r.Method) {
		s.left = maxSends
	}
	resp, err := send.RoundTrip(s.request())
	if refused := s.end(); err != nil && refused != nil {
		return nil, refused
	}
	if err != nil {
		return nil, err
	}
	if err = heads.FewLines(resp); err == nil && resp.StatusCode == http.StatusSwitchingProtocols && r.Header.Get("Upgrade") == "" {
		err = errSwitched
	}
	if err == nil && a != nil {
		if err = a.Response(resp); err != nil {
			err = toTell(err, errNoLook)
		}
	}
	if err != nil {
		resp.Body.Close()
		return nil, err
	}
	return resp, nil
}

// pin makes a request one to a Destination, however the guest wrote its Host: a server that
// compares it byte by byte would take another virtual host. In a URL of http stands a name
// only: heads looks for it there.
func pin(r *http.Request, to Destination) {
	if weak.Off(weak.Judge) {
		defer func(said string) { r.Host = said }(r.Host)
	}
	r.Host, r.URL.Scheme, r.URL.User, r.URL.Opaque = to.Name, to.Scheme, nil, ""
	if to.Port != map[string]uint16{"http": 80, "https": 443}[to.Scheme] {
		r.Host = net.JoinHostPort(to.Name, strconv.Itoa(int(to.Port)))
	}
	if r.URL.Host = r.Host; to.Scheme == "http" {
		r.URL.Host = to.Name
	}
}

// repeatable are the methods of requests that may be sent again (RFC 9110, section 9.2.2), over
// HTTP/2 maxSends times in all. Transport would send others again too, and without end: any that
// has no body, when the server resets its stream. Over HTTP/1.1 it does so only on connections
// that were idle, of which a flow has two, and with what a guest has given an Idempotency-Key.
var repeatable = []string{http.MethodGet, http.MethodHead, http.MethodOptions}

const maxSends = 3

var (
	errNotAgain = &Refusal{
		http.StatusBadGateway, "SANDBOX::UNREACHABLE",
		"The server ended the connection before it answered. sandboxd does not send the request again: it may have had an effect.",
	}
	errSwitched = &Refusal{http.StatusBadGateway, "SANDBOX::UNREACHABLE", "The server switched protocols without being asked."}
)

// explain says what a guest should know of TLS with the server, and tells the daemon.
func (i *inspector) explain(s *session, r *http.Request, err error) error {
	if _, ok := errors.AsType[heads.Teller](err); ok || r.Context().Err() != nil {
		return err
	}
	if bad, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		text := fmt.Sprintf("the certificate of %s does not verify: %v", s.Name, bad.Err)
		i.notes.tell(s.Line(), Note{ServerUnverified, s.Name, text})
		return &Refusal{http.StatusBadGateway, "SANDBOX::SERVER_CERTIFICATE", "sandboxd sent nothing: " + text}
	}
	if s.wanted.Load() && !s.spoke.Load() {
		text := s.Name + " asked for a certificate of its client, and then ended the connection. sandboxd has none: " +
			"such a host cannot be inspected"
		i.notes.tell(s.Line(), Note{ServerWants, s.Name, text})
		return &Refusal{http.StatusBadGateway, "SANDBOX::CLIENT_CERTIFICATE", text}
	}
	return err
}
