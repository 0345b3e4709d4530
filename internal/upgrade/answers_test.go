package upgrade

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/client"
)

// agents is a daemon with sandboxes that run, one of which answers as answer says, and is in the state that it returns;
// asked counts. The others answer at once.
func agents(t *testing.T, answer func(asked int64) (ok bool, status string)) (c *Change, asked *atomic.Int64, out *strings.Builder) {
	t.Helper()
	asked, out = &atomic.Int64{}, &strings.Builder{}
	c = &Change{Out: out}
	c.Client = serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/command") && strings.Contains(r.URL.Path, "/slow"):
			if ok, _ := answer(asked.Add(1)); !ok {
				w.WriteHeader(http.StatusBadGateway)
				fmt.Fprint(w, `{"code":"GENERAL::UNKNOWN_ERROR","message":"the agent took no connection for 5s"}`)
				return
			}
			fmt.Fprint(w, "[]")
		case strings.HasSuffix(r.URL.Path, "/command"):
			fmt.Fprint(w, "[]")
		default:
			if _, status := answer(asked.Load()); status != "" {
				fmt.Fprintf(w, `{"id":"slow","status":%s}`, status)
				return
			}
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"code":"SANDBOX::NOT_FOUND","message":"there is no such sandbox"}`)
		}
	})
	return c, asked, out
}

// serve returns a client of a daemon that answers so.
func serve(t *testing.T, answer http.HandlerFunc) *client.Client {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "daemon.sock"))
	if err != nil {
		t.Fatal(err)
	}
	daemon := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer(w, r)
	})}
	go daemon.Serve(l) //nolint:errcheck // it is closed
	t.Cleanup(func() { daemon.Close() })
	c, err := client.New("unix://"+l.Addr().String(), "")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

const runs = `{"state":"Running"}`

// TestAlive: a sandbox that is slow to answer is asked until it does, one that never answers until the time of the
// trial is over, and one that was lost fails at once. One that ended for a reason of its own, or was deleted, is no
// fault.
func TestAlive(t *testing.T) {
	silent := regexp.MustCompile(`^sandbox slow runs, and does not answer: it was asked ([0-9]+) times in [12](\.[0-9]+)?s, and ` +
		`the last answer was: .*the agent took no connection for 5s`)
	for name, c := range map[string]struct {
		answer func(asked int64) (bool, string)
		limit  time.Duration
		want   string // of the error
		asked  int64
	}{
		"at once":            {func(int64) (bool, string) { return true, runs }, time.Minute, "", 1},
		"slow":               {func(n int64) (bool, string) { return n >= 4, runs }, time.Minute, "", 4},
		"never":              {func(int64) (bool, string) { return false, runs }, time.Second, "silent", 3},
		"slow, then deleted": {func(n int64) (bool, string) { return false, map[bool]string{true: runs}[n < 3] }, time.Minute, "", 3},
		"ended by itself": {
			func(int64) (bool, string) { return false, `{"state":"Terminated","reason":"exited"}` }, time.Minute, "", 1,
		},
		"lost": {
			func(int64) (bool, string) { return false, `{"state":"Failed","reason":"runtime_crash"}` }, time.Minute,
			"sandbox slow has ended: runtime_crash", 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			change, asked, out := agents(t, c.answer)
			ctx, cancel := context.WithTimeout(t.Context(), c.limit)
			defer cancel()
			err := change.alive(ctx, []string{"quick", "slow", "other"})
			switch {
			case c.want == "silent":
				// Pauses of 200, 400 and 800 ms: three questions in a second, fewer on a busy host.
				if err == nil || !silent.MatchString(err.Error()) || asked.Load() < 2 {
					t.Errorf("%v; asked %d times", err, asked.Load())
				}
			case c.want != "" && (err == nil || err.Error() != c.want), c.want == "" && err != nil, asked.Load() != c.asked:
				t.Errorf("%v, want %q; asked %d times, want %d", err, c.want, asked.Load(), c.asked)
			}
			if again := c.asked > 1; strings.Contains(out.String(), "1 sandbox does not answer yet") != again {
				t.Errorf("it says %q", out)
			}
		})
	}
}

// TestAliveHangs: an agent that takes a question and answers nothing is in the error.
func TestAliveHangs(t *testing.T) {
	over := make(chan struct{})
	change, asked, _ := agents(t, func(n int64) (bool, string) {
		if n > 0 {
			<-over
		}
		return false, runs
	})
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := change.alive(ctx, []string{"slow", "quick"})
	close(over)
	if err == nil || !strings.Contains(err.Error(), "sandbox slow runs, and does not answer: it was asked 1 time in") ||
		!strings.Contains(err.Error(), context.DeadlineExceeded.Error()) || asked.Load() != 1 {
		t.Errorf("%v; asked %d times", err, asked.Load())
	}
}

// TestEndTooLate: on a busy host the request for the new end of a sandbox comes after that end. It is made again with a
// later one. Another refusal is a fault.
func TestEndTooLate(t *testing.T) {
	var renewed atomic.Int64
	refusal := "SANDBOX::INVALID_EXPIRATION"
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/renew-expiration") && (renewed.Add(1) < 3 || refusal == "OTHER"):
			w.WriteHeader(map[bool]int{true: http.StatusInternalServerError, false: http.StatusBadRequest}[refusal == "OTHER"])
			fmt.Fprintf(w, `{"code":%q,"message":"expiresAt is not in the future"}`, refusal)
		case r.Method == http.MethodDelete:
			w.WriteHeader(http.StatusNoContent)
		default:
			fmt.Fprint(w, `{"id":"probe","status":{"state":"Terminated"}}`)
		}
	})
	if err := probeEnd(t.Context(), prober{Client: c, expires: true}, "probe"); err != nil || renewed.Load() != 3 {
		t.Errorf("%v; asked %d times", err, renewed.Load())
	}
	refusal = "OTHER"
	if err := probeEnd(t.Context(), prober{Client: c, expires: true}, "probe"); err == nil || renewed.Load() != 4 {
		t.Errorf("another refusal: %v; asked %d times", err, renewed.Load())
	}
}
