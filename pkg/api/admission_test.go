package api

import (
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestWaitLimit answers who waits behind a long queue before they give up, and
// their client goes on asking.
func TestWaitLimit(t *testing.T) {
	w := newWorld(t)
	w.s.sandboxes.waitLimit = 20 * time.Millisecond
	w.hold = make(chan struct{})
	a := w.do("POST", "/v1/sandboxes?wait=true", createBody)
	if sb := a.sandbox(t); a.StatusCode != http.StatusAccepted || sb.Status.State != wire.Pending ||
		a.Header.Get("Preference-Applied") != "" {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
}

// TestDrainRoute is for who runs the host, and not for who has but a key.
func TestDrainRoute(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.System = fakeSystem{} })
	socket := filepath.Join(t.TempDir(), "s")
	w.serve("unix", socket, auth.Listener{})
	c := overUnix(t, socket)
	for _, method := range []string{http.MethodPut, http.MethodDelete} {
		if a := w.do(method, "/v1/system/drain", ""); a.StatusCode != http.StatusForbidden {
			t.Errorf("%s by TCP, with a key: %d %s", method, a.StatusCode, a.body)
		}
		req, err := http.NewRequestWithContext(t.Context(), method, "http://sandboxd/v1/system/drain", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		validate(t, req, "", resp, nil)
		if resp.StatusCode != http.StatusNoContent {
			t.Errorf("%s: %d", method, resp.StatusCode)
		}
	}
}
