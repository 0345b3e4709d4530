package api

import (
	"fmt"
	"testing"
	"time"
)

// TestMaxTimeout: a creation gets no more, be it by silence or by its extension;
// a renewal does (OpenSandbox: "the creation-time limit does not apply").
func TestMaxTimeout(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxTimeout = 10 * time.Minute })
	const minimal = `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{}`
	sb := w.do("POST", "/v1/sandboxes", minimal+`}`).sandbox(t)
	if got := w.recs[sb.ID].Spec.Timeout; got != 10*time.Minute {
		t.Errorf("without a timeout: %v, want the maximum", got)
	}
	if a := w.do("POST", "/v1/sandboxes", minimal+`,"timeout":601}`); a.StatusCode != 400 {
		t.Errorf("more than the maximum: %s", a.Status)
	}
	at := "/v1/sandboxes/" + sb.ID + "/renew-expiration"
	for ahead, want := range map[time.Duration]int{9 * time.Minute: 200, 11 * time.Minute: 200} {
		a := w.do("POST", at, fmt.Sprintf(`{"expiresAt":%q}`, time.Now().Add(ahead).UTC().Format(time.RFC3339)))
		if a.StatusCode != want {
			t.Errorf("renew to %v ahead: %d %s", ahead, a.StatusCode, a.body)
		}
	}
	sb = w.do("POST", "/v1/sandboxes", minimal+`,"timeout":60,"extensions":{"access.renew.extend.seconds":"3600"}}`).sandbox(t)
	w.do("GET", "/v1/sandboxes/"+sb.ID+"/proxy/44772/ping", "")
	latest := time.Now().Add(10 * time.Minute)
	for range 2000 {
		got := w.do("GET", "/v1/sandboxes/"+sb.ID, "").sandbox(t).ExpiresAt
		if got.After(latest) {
			t.Fatalf("access renewed to %s, beyond the maximum %s", got, latest)
		}
		if got.After(*sb.ExpiresAt) {
			return
		}
		time.Sleep(time.Millisecond) // nothing tells of a renewal in the background
	}
	t.Error("access did not renew")
}

// TestMaxDisk: nobody is promised more than the pool has, not even by default.
func TestMaxDisk(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.DiskBytes, c.MaxDiskBytes = 10<<30, 1<<30 })
	sb := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{}}`).sandbox(t)
	if got := w.recs[sb.ID].Spec.DiskBytes; got != 1<<30 {
		t.Errorf("by default %d bytes, want the pool's", got)
	}
	if a := w.do("POST", "/v1/sandboxes",
		`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{"disk":"1025Mi"}}`); a.StatusCode != 400 {
		t.Errorf("more than the pool: %s", a.Status)
	}
}
