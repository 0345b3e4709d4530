package client

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// TestLongQueue: who wants to wait does so for longer than the daemon's answer.
func TestLongQueue(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		state := wire.Running
		if r.Method == http.MethodPost {
			state = wire.Pending
			if waits := r.URL.Query().Get("wait") == "true"; waits == (r.Header.Get("Prefer") == "respond-async") {
				t.Errorf("waits %t, Prefer %q: the daemon holds such an answer for a moment", waits, r.Header.Get("Prefer"))
			}
		}
		io.WriteString(w, `{"id":"tabcdefghijk","status":{"state":"`+state+`"}}`) //nolint:errcheck // read below
	})
	for wait, want := range map[bool]string{true: wire.Running, false: wire.Pending} {
		if sb, err := c.Create(t.Context(), wire.CreateRequest{}, wait); err != nil || sb.Status.State != want {
			t.Errorf("wait %v: %+v, %v", wait, sb, err)
		}
	}
}

// TestNoRoom: a full host is told from one that cannot just now, with the time
// to ask again.
func TestNoRoom(t *testing.T) {
	for code, want := range map[string]errs.Code{"SANDBOX::CAPACITY_EXCEEDED": errs.Exhausted, "SANDBOX::DRAINING": errs.Unavailable} {
		for after, retry := range map[string]time.Duration{"7": 7 * time.Second, "": 0, "soon": 0, "-3": 0} {
			c := serve(t, func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", after)
				w.WriteHeader(http.StatusServiceUnavailable)
				io.WriteString(w, `{"code":"`+code+`","message":"no room"}`) //nolint:errcheck // read below
			})
			_, err := c.Create(t.Context(), wire.CreateRequest{}, true)
			e, ok := err.(*errs.Error) //nolint:errorlint // what comes from the wire is not wrapped
			if !ok || e.Code != want || e.Retry != retry || !strings.Contains(e.Text, "no room") {
				t.Errorf("%s, %q: %+v", code, after, err)
			}
		}
	}
}
