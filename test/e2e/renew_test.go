package e2e_test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

const extRenew = "access.renew.extend.seconds"

// TestRenewOnAccess: who reaches a port of a sandbox that was made so keeps it alive, by
// the proxy and by the gateway, and by nothing else. Access keeps it for max_timeout
// from then at most, and who asks for more than that gets it.
func TestRenewOnAccess(t *testing.T) {
	const most = 10 * time.Minute
	gateway := hosttest.FreePort(t).String()
	h := newHost(t, daemontest.Options{Config: []string{
		"[gateway]", fmt.Sprintf("listen = %q", gateway), `public = "no"`,
		"[limits]", fmt.Sprintf("max_timeout = %q", most),
	}})
	daemontest.Image(t, h.Daemon, "python")
	proxy := func(id string) string { return "http://" + h.TCP + "/v1/sandboxes/" + id + "/proxy/8000/x" }
	gate := func(id string) string { return "http://" + gateway + "/" + id + "/8000/x" }
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			defer h.deleteAll(t)
			ends := map[string]time.Time{} // by id
			for what, c := range map[string]struct {
				url    func(id string) string // of the port
				extend string                 // asked for at the creation
				gets   time.Duration
			}{
				"by the proxy":           {proxy, "300", 300 * time.Second},
				"by the gateway":         {gate, "300", 300 * time.Second},
				"more than max_timeout":  {proxy, "3600", most},
				"who did not ask for it": {gate, "", 0},
			} {
				id := h.serving(t, runtime, func(r *wire.CreateRequest) {
					timeout := int64(120)
					r.Timeout, r.SecureAccess = &timeout, true
					if c.extend != "" {
						r.Extensions[extRenew] = c.extend
					}
				}).ID
				first := h.expires(t, id)
				// Not these: who may not, and who says that it is no visit.
				visits(t, c.url(id), http.StatusUnauthorized)
				visits(t, c.url(id), http.StatusOK, "OPEN-SANDBOX-API-KEY", daemontest.Key, "OpenSandbox-Access-Renew", "skip")
				before := time.Now()
				if got := h.expires(t, id); !got.Equal(first) {
					t.Errorf("%s: a visit that does not count moved the end from %s to %s", what, first, got)
				}
				visits(t, c.url(id), http.StatusOK, "OPEN-SANDBOX-API-KEY", daemontest.Key)
				if c.gets > 0 {
					settles(t, func() error {
						if got := h.expires(t, id); !got.After(first) {
							return fmt.Errorf("%s: the sandbox expires at %s, as before", what, got)
						}
						return nil
					})
					after, end := time.Now(), h.expires(t, id)
					if end.Sub(before) < c.gets-time.Second || end.Sub(after) > c.gets+time.Second {
						t.Errorf("%s: the end is %v after the visit began and %v after it ended, want %v", what, end.Sub(before),
							end.Sub(after), c.gets)
					}
				}
				ends[id] = h.expires(t, id)
				if c.gets == most {
					ends[id] = time.Now().Add(2 * most).Truncate(time.Second)
					if _, err := h.api.Renew(t.Context(), id, ends[id]); err != nil {
						t.Errorf("who asks for more than max_timeout: %v", err)
					}
				} else if c.gets == 0 && !ends[id].Equal(first) {
					t.Errorf("%s: the end moved from %s to %s", what, first, ends[id])
				}
			}
			h.Kill() // what was renewed stays so
			h.Start()
			for id, want := range ends {
				if got := h.expires(t, id); !got.Equal(want) {
					t.Errorf("after a restart %s expires at %s, want %s", id, got, want)
				}
			}
		})
	}
}

// expires is when a sandbox that has a timeout ends.
func (h host) expires(t *testing.T, id string) time.Time {
	t.Helper()
	got, err := h.api.Get(t.Context(), id)
	if err != nil || got.ExpiresAt == nil {
		t.Fatalf("%s expires at %v, %v", id, got.ExpiresAt, err)
	}
	return *got.ExpiresAt
}

// visits asks for url, with headers in pairs, and wants a status.
func visits(t *testing.T, url string, status int, headers ...string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), "GET", url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != status {
		t.Errorf("GET %s: %s, want %d", url, resp.Status, status)
	}
}
