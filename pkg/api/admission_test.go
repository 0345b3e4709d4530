package api

import (
	"context"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestWaitLimit answers who waits behind a long queue before they give up, and
// their client goes on asking.
func TestWaitLimit(t *testing.T) {
	w := newWorld(t)
	w.s.waitLimit = 20 * time.Millisecond
	w.hold = make(chan struct{})
	a := w.do("POST", "/v1/sandboxes?wait=true", createBody)
	if sb := a.sandbox(t); a.StatusCode != http.StatusAccepted || sb.Status.State != wire.Pending || a.Header.Get("Preference-Applied") != "" {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
}

// TestDrainRoute is for who runs the host, and not for who has but a key.
func TestDrainRoute(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.System = fakeSystem{} })
	socket := filepath.Join(t.TempDir(), "s")
	w.serve("unix", socket, Listener{})
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

// TestClients holds who is one client where clients take turns.
func TestClients(t *testing.T) {
	s, err := New(Config{APIKeys: []string{"one", "two"}}, nil, nil, nil, nil, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		p    peer
		key  string
		want string
	}{
		"a user of the host":             {peer{unix: true, who: "uid=1000"}, "", "uid=1000"},
		"a user of the host, with a key": {peer{unix: true, who: "uid=1000"}, "two", "uid=1000"},
		"a key":                          {peer{who: "10.0.0.1"}, "two", "key configuration-2"},
		"the same from elsewhere":        {peer{who: "10.0.0.2"}, "two", "key configuration-2"},
		"another":                        {peer{who: "10.0.0.2"}, "one", "key configuration-1"},
		"no key":                         {peer{who: "10.0.0.2"}, "", "10.0.0.2"},
		"a wrong key":                    {peer{who: "10.0.0.2"}, "three", "10.0.0.2"},
	} {
		r := httptest.NewRequest(http.MethodPost, "/v1/sandboxes", nil)
		r = r.WithContext(context.WithValue(r.Context(), peerKey{}, &c.p))
		if c.key != "" {
			r.Header.Set(wire.HeaderAPIKey, c.key)
		}
		if got := s.client(r); got != c.want {
			t.Errorf("%s is %q, want %q", name, got, c.want)
		}
	}
}
