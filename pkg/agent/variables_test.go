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
