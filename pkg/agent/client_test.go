package agent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func dialer(addr string, dials *atomic.Int32) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		dials.Add(1)
		return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	}
}

// pretend is an agent that answers each connection with reply.
func pretend(t *testing.T, reply string) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				http.ReadRequest(bufio.NewReader(c)) //nolint:errcheck // whatever it says
				io.WriteString(c, reply)             //nolint:errcheck // as above
			}()
		}
	}()
	return ln.Addr().String()
}

func TestReadyWaitsAndKeepsItsConnection(t *testing.T) {
	var up atomic.Bool
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(TokenHeader) != "tok" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if !up.Swap(true) {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		w.Header().Set(ProtocolHeader, "1")
	}))
	defer srv.Close()
	var dials, refused atomic.Int32
	real := dialer(srv.Listener.Addr().String(), &dials)
	c := New(func(ctx context.Context) (net.Conn, error) {
		if refused.Add(1) < 5 {
			return nil, fmt.Errorf("connection refused")
		}
		return real(ctx)
	}, "tok")
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := c.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	get := func() {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sandbox/ping", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.RoundTripper().RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body) //nolint:errcheck // it is empty
		resp.Body.Close()
	}
	n := dials.Load()
	get()
	if dials.Load() != n {
		t.Error("the connection that Ready made was not used")
	}
	// net/http drops a connection whose writer reports 50 ms late
	// (maxWriteWaitBeforeConnReuse), as on a busy host some do; one that is not kept
	// is a new one each time.
	for range 10 {
		if get(); dials.Load() == n {
			return
		}
		n = dials.Load()
	}
	t.Error("each of ten requests made a connection")
}

// TestSpareIsClosed: the connection that Ready made is not held for a sandbox that
// nobody talks to.
func TestSpareIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		closed := make(chan time.Time, 1)
		c := New(func(context.Context) (net.Conn, error) {
			ours, agents := net.Pipe()
			go func() {
				br := bufio.NewReader(agents)
				if _, err := http.ReadRequest(br); err == nil {
					io.WriteString(agents, "HTTP/1.1 200 OK\r\n"+ProtocolHeader+
						": 1\r\nContent-Length: 0\r\n\r\n") //nolint:errcheck // Ready fails then
				}
				br.ReadByte() //nolint:errcheck // until it is closed
				closed <- time.Now()
			}()
			return ours, nil
		}, "tok")
		defer c.Close()
		start := time.Now()
		if err := c.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		select {
		case at := <-closed:
			if at.Sub(start) != spareAge {
				t.Errorf("closed after %v", at.Sub(start))
			}
		default:
			t.Error("it is held for an hour")
		}
		if s := c.takeSpare(); s != nil {
			t.Error("a closed connection is kept")
		}
	})
}

func TestReadyRefusesAtOnce(t *testing.T) {
	for reply, code := range map[string]errs.Code{
		"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n":                                             errs.Denied,
		"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n":                                                       errs.Unsupported,
		"HTTP/1.1 200 OK\r\nX-Sandboxd-Agent-Protocol: 99\r\nContent-Length: 0\r\n\r\n":                      errs.Unsupported,
		"HTTP/1.1 200 OK\r\nX-Sandboxd-Agent-Protocol: " + strings.Repeat("9", 999) + "\r\n\r\n":             errs.Unsupported,
		"HTTP/1.1 401 x\r\nContent-Length: 99999999999\r\nX: y\r\n\r\n" + strings.Repeat("lies", 4<<10) + "": errs.Denied,
	} {
		var dials atomic.Int32
		err := New(dialer(pretend(t, reply), &dials), "t").Ready(t.Context())
		if errs.CodeOf(err) != code {
			t.Errorf("%.60q: %v", reply, err)
		}
	}
}

func TestReadyEndsWithItsContext(t *testing.T) {
	for _, reply := range []string{
		"", "garbage\r\n\r\n", "HTTP/1.1 503 no\r\n\r\n", "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("a", 1<<20),
		"HTTP/1.1 200 OK\r\nX-Sandboxd-Agent-Protocol: 1\r\nContent-Length: 5\r\n\r\nhello",
	} {
		var dials atomic.Int32
		addr := pretend(t, reply)
		took, err := hosttest.Soonest(time.Second, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 60*time.Millisecond)
			defer cancel()
			if err := New(dialer(addr, &dials), "t").Ready(ctx); err == nil {
				return errors.New("it is ready")
			}
			return nil
		})
		if err != nil || took > time.Second {
			t.Errorf("%.30q: %v after %v", reply, err, took)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Millisecond)
	defer cancel()
	hang := func(ctx context.Context) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() }
	if err := New(hang, "t").Ready(ctx); err == nil {
		t.Error("ready without an agent")
	}
}

func TestRoundTripperBoundsAndToken(t *testing.T) {
	addr := pretend(t, "HTTP/1.1 200 OK\r\nX: "+strings.Repeat("a", 1<<20)+"\r\n\r\n")
	var dials atomic.Int32
	r, _ := http.NewRequest(http.MethodGet, "http://169.254.169.254/files/info", nil)
	if _, err := New(dialer(addr, &dials), "t").RoundTripper().RoundTrip(r); err == nil {
		t.Error("a megabyte of header was taken")
	}
	var got string
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.Header.Get(TokenHeader) }))
	defer srv.Close()
	c := New(dialer(srv.Listener.Addr().String(), &dials), "mine")
	defer c.Close()
	r.Header.Set(TokenHeader, "forged")
	resp, err := c.RoundTripper().RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if got != "mine" || r.Header.Get(TokenHeader) != "forged" || r.URL.Host != "169.254.169.254" {
		t.Errorf("token %q; the request was changed: %v", got, r)
	}
}

// TestWedged has requests end whose agent accepts connections and says nothing,
// with and without a body that nobody reads; and lets one be slow whose agent
// answers pings.
func TestWedged(t *testing.T) {
	t.Run("silent", func(t *testing.T) { synctest.Test(t, wedged) })
	t.Run("slow", func(t *testing.T) { synctest.Test(t, slow) })
	t.Run("stuck", func(t *testing.T) { synctest.Test(t, stuck) })
}

// stuck: an agent that answers pings alone begins no command, and the request ends soon.
// One that begins it late, but in time, is waited for.
func stuck(t *testing.T) {
	agents := hosttest.NewPipes(0)
	begins := make(chan time.Duration, 1) // after how long the next command begins
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(ProtocolHeader, "1")
		if r.URL.Path == "/ping" {
			return
		}
		select {
		case <-time.After(<-begins):
		case <-r.Context().Done(): // as a command whose client left
		}
	})}
	go srv.Serve(agents) //nolint:errcheck // ends with the test
	defer srv.Close()
	c := New(agents.Dial, "tok")
	defer c.Close()
	for _, ask := range []struct {
		method, path string
		begins, took time.Duration
	}{
		{http.MethodPost, "/command", time.Hour, beginLimit},
		{http.MethodPost, "/session/x/run", time.Hour, beginLimit},
		{http.MethodPost, "/pty", time.Hour, beginLimit},
		{http.MethodGet, "/pty/x/ws", time.Hour, beginLimit},
		{http.MethodPost, "/command", beginLimit - time.Second, beginLimit - time.Second},
		{http.MethodPost, "/code", 3 * beginLimit, 3 * beginLimit},
		{http.MethodGet, "/files/search", 3 * beginLimit, 3 * beginLimit},
	} {
		begins <- ask.begins
		start := time.Now()
		r, err := http.NewRequest(ask.method, "http://sandbox"+ask.path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.RoundTripper().RoundTrip(r)
		if err == nil {
			resp.Body.Close()
		}
		if gaveUp := ask.begins == time.Hour; gaveUp != errs.Is(err, errs.Unavailable) ||
			gaveUp && !strings.Contains(err.Error(), "answers pings") || !gaveUp && err != nil {
			t.Errorf("%s %s: %v", ask.method, ask.path, err)
		}
		if took := time.Since(start); took != ask.took {
			t.Errorf("%s %s took %v, want %v", ask.method, ask.path, took, ask.took)
		}
	}
}

func wedged(t *testing.T) {
	agents := hosttest.NewPipes(1000)
	c := New(agents.Dial, "tok")
	defer c.Close()
	for _, body := range []io.Reader{nil, strings.NewReader(strings.Repeat("x", 64<<20))} {
		start := time.Now()
		r, err := http.NewRequest(http.MethodPost, "http://sandbox/command", body)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.RoundTripper().RoundTrip(r)
		if err == nil {
			resp.Body.Close()
		}
		if !errs.Is(err, errs.Unavailable) || !strings.Contains(err.Error(), "sandboxctl rm") {
			t.Errorf("%v", err)
		}
		if took := time.Since(start); took != doubtAfter+patience {
			t.Errorf("it took %v", took)
		}
	}
}

func slow(t *testing.T) {
	agents := hosttest.NewPipes(0)
	var pings atomic.Int32
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(ProtocolHeader, "1")
		if r.URL.Path != "/slow" {
			pings.Add(1)
			return
		}
		time.Sleep(time.Hour)
		io.WriteString(w, "done") //nolint:errcheck // the test sees what is missing
	})}
	go srv.Serve(agents) //nolint:errcheck // ends with the test
	defer srv.Close()
	c := New(agents.Dial, "tok")
	defer c.Close()
	r, err := http.NewRequest(http.MethodGet, "http://sandbox/slow", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.RoundTripper().RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "done" {
		t.Errorf("%q, %v", b, err)
	}
	if n, most := pings.Load(), int32(time.Hour/doubtAfter); n < most/2 || n > most {
		t.Errorf("asked %d times in an hour", n)
	}
}

// TestLongErrors: what an agent sends instead of an answer does not come back whole in an
// error, which the log and a sandbox's health show.
func TestLongErrors(t *testing.T) {
	var dials atomic.Int32
	c := New(dialer(pretend(t, "HTTP/1.1 "+strings.Repeat("\x1b[2J", 8<<10)+"\r\n\r\n"), &dials), "tok")
	defer c.Close()
	if err := c.Listening(t.Context(), 80); err == nil || len(err.Error()) > 2*maxError || strings.Contains(err.Error(), "\x1b") {
		t.Errorf("%.1000v", err)
	}
}
