package agent

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// TestVariablesAreTold: an agent knows the variables before it gets a request that comes after they
// have changed; each change is told once, however many requests there are.
func TestVariablesAreTold(t *testing.T) {
	var (
		known atomic.Value // the body of the last PUT
		puts  atomic.Int32
		dials atomic.Int32
	)
	known.Store("")
	status := http.StatusOK
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body) //nolint:errcheck // shows in what is known
		if r.URL.Path == "/variables" && r.Method == http.MethodPut {
			puts.Add(1)
			known.Store(string(b))
			w.WriteHeader(status)
			return
		}
		io.WriteString(w, known.Load().(string)) //nolint:errcheck // the test sees what is missing
	}))
	defer srv.Close()
	c := New(dialer(srv.Listener.Addr().String(), &dials), "tok")
	defer c.Close()
	ask := func(ctx context.Context) (string, error) {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandbox/command", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.RoundTripper().RoundTrip(r)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return string(b), err
	}
	wants := func(want string, sent int32) {
		t.Helper()
		if got, err := ask(t.Context()); err != nil || got != want || puts.Load() != sent {
			t.Errorf("a command finds %q, %v, after %d messages; want %q after %d", got, err, puts.Load(), want, sent)
		}
	}
	wants("", 0) // of a sandbox that has none

	var value atomic.Value
	value.Store("one")
	var broken atomic.Bool
	c.GiveVariables(func(context.Context) (map[string]string, error) {
		switch s := value.Load().(string); {
		case broken.Load():
			return nil, errors.New("there is no key")
		case s == "":
			return nil, nil
		default:
			return map[string]string{"KEY": s}, nil
		}
	})
	wants(`{"KEY":"one"}`, 1)
	wants(`{"KEY":"one"}`, 1)
	value.Store("two")
	c.VariablesChanged()
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if got, err := ask(t.Context()); err != nil || got != `{"KEY":"two"}` {
				t.Errorf("one of many finds %q, %v", got, err)
			}
		})
	}
	all.Wait()
	wants(`{"KEY":"two"}`, 2)

	broken.Store(true) // what cannot be read keeps no command waiting, and is told later
	c.VariablesChanged()
	wants(`{"KEY":"two"}`, 2)
	broken.Store(false)
	value.Store("")
	status = http.StatusNotFound // an agent of an older release: not asked again
	wants("{}", 3)
	wants("{}", 3)

	c.VariablesChanged()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := ask(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a client that has gone gets %v", err)
	}
	wants("{}", 4)
}

// tellingTo is a client that has variables to tell an agent that answers pings. PUT /variables is put.
func tellingTo(t *testing.T, put, other http.HandlerFunc) *Client {
	agents := hosttest.NewPipes(0)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(ProtocolHeader, "1")
		switch r.URL.Path {
		case "/ping":
		case "/variables":
			io.Copy(io.Discard, r.Body) //nolint:errcheck // or the end of r would not be noticed
			put(w, r)
		default:
			other(w, r)
		}
	})}
	go srv.Serve(agents) //nolint:errcheck // ends with the test
	t.Cleanup(func() { srv.Close() })
	c := New(agents.Dial, "tok")
	t.Cleanup(c.Close)
	c.GiveVariables(func(context.Context) (map[string]string, error) { return map[string]string{"KEY": "one"}, nil })
	return c
}

// asks sends a request and returns how long its answer took.
func asks(t *testing.T, c *Client, method, path string) (time.Duration, error) {
	start := time.Now()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://sandbox"+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.RoundTripper().RoundTrip(r)
	if err == nil {
		resp.Body.Close()
	}
	return time.Since(start), err
}

func hangs(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

func answers(http.ResponseWriter, *http.Request) {}

// TestVariablesAreNotTold: an agent that does not learn the variables keeps requests that start a
// program waiting for a bounded time, however many they are, and no others.
func TestVariablesAreNotTold(t *testing.T) {
	t.Run("no answer", func(t *testing.T) { synctest.Test(t, noAnswer) })
	t.Run("silent", func(t *testing.T) { synctest.Test(t, silentToo) })
	t.Run("stuck", func(t *testing.T) { synctest.Test(t, stuckToo) })
	t.Run("fails", func(t *testing.T) { synctest.Test(t, putFails) })
}

func noAnswer(t *testing.T) {
	c := tellingTo(t, hangs, answers)
	for _, ask := range []struct {
		method, path string
		took         time.Duration
	}{
		{http.MethodPost, "/command", patience},
		{http.MethodPost, "/session", patience},
		{http.MethodPost, "/code", patience},
		{http.MethodPost, "/code/context", patience},
		{http.MethodPost, "/pty", patience},
		{http.MethodGet, "/pty/x/ws", patience},
		{http.MethodGet, "/command/x/logs", 0},
		{http.MethodPost, "/command/" + EntrypointID + "/signal", 0},
		{http.MethodPost, "/session/x/run", 0},
		{http.MethodGet, "/files/search", 0},
		{http.MethodPut, "/limits", 0},
		{http.MethodGet, "/listening/80", 0},
	} {
		if took, err := asks(t, c, ask.method, ask.path); err != nil || took != ask.took {
			t.Errorf("%s %s: %v after %v, want %v", ask.method, ask.path, err, took, ask.took)
		}
	}

	// Those that come meanwhile wait for the same message. One that comes after a change waits for
	// another one.
	var all sync.WaitGroup
	for n := range 6 {
		all.Go(func() {
			time.Sleep(time.Duration(n) * time.Second)
			if took, err := asks(t, c, http.MethodPost, "/command"); err != nil || took != patience-time.Duration(n)*time.Second {
				t.Errorf("number %d of many: %v after %v", n, err, took)
			}
		})
	}
	for n := 7; n < 9; n++ {
		all.Go(func() {
			time.Sleep(time.Duration(n) * time.Second)
			c.VariablesChanged()
			if took, err := asks(t, c, http.MethodPost, "/command"); err != nil || took != 2*patience-time.Duration(n)*time.Second {
				t.Errorf("number %d, after a change: %v after %v", n, err, took)
			}
		})
	}
	all.Wait()
}

func silentToo(t *testing.T) {
	c := New(hosttest.NewPipes(1000).Dial, "tok")
	defer c.Close()
	c.GiveVariables(func(context.Context) (map[string]string, error) { return nil, nil })
	var all sync.WaitGroup
	for n := range 6 {
		all.Go(func() {
			time.Sleep(time.Duration(n) * 4 * time.Second)
			if took, err := asks(t, c, http.MethodPost, "/command"); !errs.Is(err, errs.Unavailable) || took != doubtAfter+patience {
				t.Errorf("number %d of many: %v after %v", n, err, took)
			}
		})
	}
	all.Wait()
}

func stuckToo(t *testing.T) {
	c := tellingTo(t, hangs, hangs)
	if took, err := asks(t, c, http.MethodPost, "/command"); !errs.Is(err, errs.Unavailable) || took != beginLimit {
		t.Errorf("%v after %v", err, took)
	}
}

// putFails: only an agent that took the variables, or will never do so, knows them.
func putFails(t *testing.T) {
	var puts int
	var put http.HandlerFunc
	c := tellingTo(t, func(w http.ResponseWriter, r *http.Request) { puts++; put(w, r) }, answers)
	for n, step := range []struct {
		put  http.HandlerFunc
		puts int
	}{
		{func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }, 1},
		{func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 2}, // closes the connection
		{answers, 3},
		{answers, 3},
	} {
		put = step.put
		if took, err := asks(t, c, http.MethodPost, "/command"); err != nil || took != 0 || puts != step.puts {
			t.Errorf("request %d: %v after %v and %d messages, want %d", n, err, took, puts, step.puts)
		}
	}
}
