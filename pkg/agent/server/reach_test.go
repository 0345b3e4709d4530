package server

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/agent"
)

// TestReachSteps: what counts as reached on ports where the client speaks first, and on
// others.
func TestReachSteps(t *testing.T) {
	listen := func(serve func(net.Conn)) net.Conn {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			c, err := l.Accept()
			if err == nil {
				serve(c)
				c.Close()
			}
		}()
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(reachStep)) //nolint:errcheck // a test
		return c
	}
	quiet := make(chan struct{})
	t.Cleanup(func() { close(quiet) })
	secure, plain := httptest.NewTLSServer(http.NotFoundHandler()), httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(secure.Close)
	t.Cleanup(plain.Close)
	dial := func(s *httptest.Server) net.Conn {
		c, err := net.Dial("tcp", s.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	alert := func(code byte) func(net.Conn) {
		return func(c net.Conn) {
			c.Read(make([]byte, 4096))               //nolint:errcheck // the ClientHello
			c.Write([]byte{21, 3, 3, 0, 2, 2, code}) //nolint:errcheck // a fatal alert
		}
	}
	reads := func(c net.Conn) { c.Read(make([]byte, 14)) }  //nolint:errcheck // the test sees it
	ends := func(c net.Conn) { c.Read(make([]byte, 4096)) } //nolint:errcheck // what is unread makes the end a reset
	ctx, asked := t.Context(), make(chan []byte, 1)
	for name, c := range map[string]struct {
		err  error
		says string // "": reached
	}{
		"TLS":                   {shake(ctx, dial(secure), "pypi.org"), ""},
		"TLS without a name":    {shake(ctx, dial(secure), ""), ""},
		"TLS, access denied":    {shake(ctx, listen(alert(49)), "pypi.org"), "access denied"},
		"TLS, the server's own": {shake(ctx, listen(alert(40)), "pypi.org"), ""},
		"TLS, closed":           {shake(ctx, listen(ends), "pypi.org"), "E"},
		"HTTP":                  {ask(dial(plain), "pypi.org"), ""},
		"HTTP, closed":          {ask(listen(ends), "pypi.org"), "E"},
		"DNS": {asksNothing(listen(func(c net.Conn) {
			q := make([]byte, 14)
			io.ReadFull(c, q)  //nolint:errcheck // shows in what was asked
			c.Write([]byte{0}) //nolint:errcheck // a test
			asked <- q
		}), time.Minute), ""},
		"DNS, closed":    {asksNothing(listen(reads), time.Minute), "closed at once"},
		"others, silent": {staysOpen(listen(func(net.Conn) { <-quiet }), reachRest), ""},
		"others, speaks first": {staysOpen(listen(func(c net.Conn) {
			c.Write([]byte("220 hi\n")) //nolint:errcheck // a test
		}), time.Minute), ""},
		"others, closed at once": {staysOpen(listen(func(net.Conn) {}), time.Minute), "closed at once"},
	} {
		if (c.err == nil) != (c.says == "") || c.err != nil && !strings.Contains(c.err.Error(), c.says) {
			t.Errorf("%s: %v", name, c.err)
		}
	}
	select {
	case q := <-asked:
		if h := q[2:]; q[1] != 12 || h[2]&0x80 != 0 || h[5] != 0 { // a query, without a question
			t.Errorf("a server of DNS is asked % x", q)
		}
	case <-time.After(time.Minute):
		t.Error("a server of DNS is asked nothing")
	}
}

// TestReach is the route, by the client of the daemon.
func TestReach(t *testing.T) {
	mux := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := reach(w, r); err != nil {
			w.WriteHeader(http.StatusBadRequest)
		}
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	to := roundTripper(func(r *http.Request) (*http.Response, error) {
		r = r.Clone(r.Context())
		r.URL.Host = s.Listener.Addr().String()
		return http.DefaultTransport.RoundTrip(r)
	})
	port := uint16(s.Listener.Addr().(*net.TCPAddr).Port)
	try := func(host string, port uint16) agent.Reached {
		t.Helper()
		got, ok, err := agent.Reach(t.Context(), to, host, port)
		if err != nil || !ok {
			t.Fatalf("%s: %v %v", host, ok, err)
		}
		return got
	}
	if got := try("127.0.0.1", port); !got.OK || got.Step != agent.StepConnect || got.Address != "127.0.0.1" || got.Error != "" {
		t.Errorf("%+v", got)
	}
	closed := hosttest.FreePort(t).Port()
	if got := try("127.0.0.1", closed); got.OK || got.Step != agent.StepConnect || !strings.Contains(got.Error, "refused") {
		t.Errorf("%+v", got)
	}
	if got := try("no such name.invalid", 443); got.OK || got.Step != agent.StepResolve || got.Error == "" {
		t.Errorf("%+v", got)
	}
	if _, _, err := agent.Reach(context.Background(), to, "", 0); err == nil {
		t.Error("no target")
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
