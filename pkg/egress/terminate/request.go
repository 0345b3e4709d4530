package terminate

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/textproto"
	"slices"
	"strconv"
	"time"

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
	if i.busy.Add(1) > maxRequests {
		i.busy.Add(-1)
		rw.Header().Set("Retry-After", "1")
		heads.TellFailed(rw, r, &Refusal{http.StatusServiceUnavailable, "SANDBOX::UNAVAILABLE", fmt.Sprintf(
			"sandboxd sends on %d requests of a sandbox to inspected hosts at the same time.", maxRequests)})
		return
	}
	defer i.busy.Add(-1)
	if refused := refuse(r, Destination{"https", s.Name, s.Port()}); refused != nil {
		heads.TellFailed(rw, r, refused)
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
	h := rw.Header() // net/http would add them where the server has none
	h["Date"], h["Content-Type"] = nil, nil
	i.proxy.ServeHTTP(rw, r)
}

// refuse checks what net/http leaves to its callers. Of a request with both Content-Length and
// Transfer-Encoding it has taken the first away (RFC 9112, section 6.3), of a folded line it
// has made one; of HTTP/2 it has refused fields of one connection, and values with line ends.
func refuse(r *http.Request, to Destination) *Refusal {
	bad := func(text string) *Refusal { return &Refusal{http.StatusBadRequest, "SANDBOX::INVALID_PARAMETER", text} }
	switch {
	case r.Method == http.MethodConnect, r.Method == http.MethodTrace:
		return &Refusal{http.StatusMethodNotAllowed, "SANDBOX::METHOD_NOT_ALLOWED", "sandboxd refuses " + r.Method +
			" to an inspected host: the one asks for a proxy, and the other for the headers that the server got."}
	case !heads.PlainTarget(r, to.Scheme), r.ProtoMajor > 1 && r.URL.Host != "":
		return bad("sandboxd does not send on this target of a request: write a path, or " + to.Scheme + ":// with the host in ASCII.")
	case heads.Lines(r.Header) > heads.MaxLines:
		return &Refusal{
			http.StatusRequestHeaderFieldsTooLarge, "SANDBOX::HEADERS_TOO_LARGE",
			fmt.Sprintf("sandboxd passes on a request with %d headers at most.", heads.MaxLines),
		}
	case slices.ContainsFunc(r.Header["Host"], func(h string) bool { return h != r.Host }): // only HTTP/2 leaves it there
		return bad("The request has an :authority and another Host: send one of them.")
	case len(r.Header["Content-Length"]) > 1:
		return bad("The request has more than one Content-Length.")
	case !at(r.Host, to):
		return &Refusal{http.StatusMisdirectedRequest, "SANDBOX::MISDIRECTED", fmt.Sprintf(
			"This connection is for %s, port %d, and the request is for another host: send it on its own connection.", to.Name, to.Port)}
	}
	return nil
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
	p.Out.Host, p.Out.URL.Opaque = p.In.Host, ""
	p.Out.Header.Del("Host")
	p.Out.Trailer = p.In.Trailer // it is filled at the end of the body
	heads.KeepSaid(p)
}

// bySession sends each request by the transport of its flow.
type bySession struct{ i *inspector }

// RoundTrip sends a request.
func (b bySession) RoundTrip(r *http.Request) (resp *http.Response, err error) {
	s := sessionOf(r.Context())
	if r.ProtoMajor == 1 && r.Body != nil && long(r.ContentLength) {
		body := newAhead(r.Body)
		r.Body = body
		defer func() {
			if err != nil {
				body.Close() // a Judge may have read of it, and refused
			}
		}()
	}
	resp, err = b.i.judged(r, Destination{"https", s.Name, s.Port()}, toServer{b.i, s})
	if err != nil {
		return nil, err
	}
	if resp.ProtoMajor == 1 && resp.StatusCode != http.StatusSwitchingProtocols && long(resp.ContentLength) {
		resp.Body = newAhead(resp.Body)
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
	to := Destination{"http", r.URL.Host, g.Port()}
	switch {
	case i.conf.Load() == nil:
		return nil, errNoJudge
	case r.Method == http.MethodTrace, !at(r.Host, to):
		return nil, refuse(r, to)
	}
	return i.judged(r, to, send)
}

// What a guest is told of errors of the Judge: their texts may have values of credentials.
var (
	errNoJudge = &Refusal{http.StatusBadGateway, "SANDBOX::UNAVAILABLE", "sandboxd could not decide on this request, and has not sent it."}
	errNoLook  = &Refusal{
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
	host := r.Host
	pin(r, host, to)
	a, err := i.conf.Load().judge.Request(r, to)
	if err != nil {
		return nil, toTell(err, errNoJudge)
	}
	pin(r, host, to)
	if a != nil {
		r = r.WithContext(early(r, a))
	}
	resp, err := send.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if err = heads.FewLines(resp); err == nil && resp.StatusCode == http.StatusSwitchingProtocols && r.Header.Get("Upgrade") == "" {
		err = errors.New("it switched protocols without being asked")
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

// pin makes a request one to a Destination. In a URL of http stands a name only: heads looks
// for it there.
func pin(r *http.Request, host string, to Destination) {
	r.Host, r.URL.Scheme, r.URL.User, r.URL.Opaque, r.URL.Host = host, to.Scheme, nil, "", to.Name
	if to.Scheme == "https" && to.Port != 443 {
		r.URL.Host = net.JoinHostPort(to.Name, strconv.Itoa(int(to.Port)))
	}
}

// early shows answers 1xx to an Answerer. ReverseProxy has a hook for them in the context,
// which is called after this one, with the same header.
func early(r *http.Request, a Answerer) context.Context {
	return httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			if a.Response(&http.Response{StatusCode: code, Header: http.Header(header), Body: http.NoBody, Request: r}) != nil {
				clear(header)
			}
			return nil
		},
	})
}

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
		text := fmt.Sprintf("%s asked for a certificate of its client, and then ended the connection (%v). sandboxd has none: "+
			"such a host cannot be inspected", s.Name, err)
		i.notes.tell(s.Line(), Note{ServerWants, s.Name, text})
		return &Refusal{http.StatusBadGateway, "SANDBOX::CLIENT_CERTIFICATE", text}
	}
	return err
}
