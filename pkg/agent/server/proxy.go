package server

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// portKey carries the port from serveProxy to the proxy's dial.
type portKey struct{}

// serveProxy is /proxy/{port}/…: HTTP and upgrades to a server on the sandbox's own
// loopback. The token is removed; the rest of the request is passed on unchanged.
func (s *Server) serveProxy(w http.ResponseWriter, r *http.Request) {
	s.proxyOnce.Do(func() { s.proxy = newProxy() })
	text, path, found := strings.Cut(strings.TrimPrefix(r.URL.EscapedPath(), "/proxy/"), "/")
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		reply.WriteError(w, reply.BadRequest("%.32q is not a port: the path is /proxy/{port}/…", text))
		return
	}
	if port == agent.Port {
		reply.WriteError(w, reply.BadRequest("port %d is the port of this agent: leave out /proxy/%d", port, port))
		return
	}
	if !found {
		path = ""
	}
	ctx := context.WithValue(r.Context(), portKey{}, strconv.FormatUint(port, 10))
	out := r.WithContext(ctx)
	u := *r.URL
	u.RawPath = "/" + path
	if u.Path, err = url.PathUnescape(u.RawPath); err != nil {
		reply.WriteError(w, reply.BadRequest("the path is malformed: %v", err))
		return
	}
	out.URL = &u
	s.proxy.ServeHTTP(w, out)
}

func newProxy() http.Handler {
	t := &http.Transport{
		DialContext:            dialLoopback,
		DisableCompression:     true,
		DisableKeepAlives:      true, // one pool for all ports would mix them: they share a host name
		MaxResponseHeaderBytes: 64 << 10,
		ExpectContinueTimeout:  time.Second,
	}
	return &httputil.ReverseProxy{
		Transport:     t,
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host = "http", "127.0.0.1"
			p.Out.Host = p.In.Host
			p.Out.Header.Del(agent.TokenHeader)
			for _, h := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
				if v := p.In.Header[h]; v != nil {
					p.Out.Header[h] = v // Rewrite drops them, but the daemon set them
				}
			}
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			port, _ := r.Context().Value(portKey{}).(string)
			reply.WriteError(w, reply.Fail(http.StatusBadGateway, reply.Failed, "nothing in the sandbox answers on port %s: %v", port, err))
		},
	}
}

// dialLoopback tries both loopback addresses: some servers take "localhost" as
// ::1 only.
func dialLoopback(ctx context.Context, _, _ string) (net.Conn, error) {
	port, _ := ctx.Value(portKey{}).(string)
	d := net.Dialer{Timeout: 5 * time.Second}
	conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", port))
	if err == nil {
		return conn, nil
	}
	if conn, err6 := d.DialContext(ctx, "tcp", net.JoinHostPort("::1", port)); err6 == nil {
		return conn, nil
	}
	return nil, err
}

func listeningRoutes(path string) reply.Methods {
	port, ok := strings.CutPrefix(path, "/listening/")
	if !ok {
		return nil
	}
	return reply.Methods{"GET": func(w http.ResponseWriter, r *http.Request) error { return listening(w, r, port) }}
}

// listening is GET /listening/{port}: 200 if a server on the sandbox's own
// loopback accepts a connection, whatever it speaks.
func listening(w http.ResponseWriter, r *http.Request, port string) error {
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return reply.BadRequest("%.32q is not a port: the path is /listening/{port}", port)
	}
	conn, err := dialLoopback(context.WithValue(r.Context(), portKey{}, port), "", "")
	if err != nil {
		return reply.Fail(http.StatusBadGateway, reply.Failed, "nothing in the sandbox listens on port %s: %v", port, err)
	}
	conn.Close()
	return reply.OK(w)
}
