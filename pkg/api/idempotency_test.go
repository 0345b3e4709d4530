package api

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Made is what the store of the daemon does.
func (f *fake) Made(_ context.Context, key string) (record.Made, bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, ok := f.made[key]
	return m, ok, nil
}

// TestIdempotencyKey: the same key gives the same sandbox, and nothing else.
func TestIdempotencyKey(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.APIKeys = append(c.APIKeys, "another") })
	key := func(k string, more ...string) []string { return append([]string{wire.HeaderIdempotency, k}, more...) }
	first := w.do("POST", "/v1/sandboxes", createBody, key("a")...)
	if first.StatusCode != 202 || first.Header.Get(wire.HeaderReplayed) != "" {
		t.Fatalf("%d %s", first.StatusCode, first.body)
	}
	id := first.sandbox(t).ID
	for _, path := range []string{"/v1/sandboxes", "/sandboxes?wait=true"} {
		a := w.do("POST", path, createBody, key("a")...)
		if a.StatusCode != 202 || a.sandbox(t).ID != id || a.Header.Get(wire.HeaderReplayed) != "true" || a.sandbox(t).Image != nil {
			t.Errorf("%s: %d %v %s", path, a.StatusCode, a.Header, a.body)
		}
	}
	other := strings.Replace(createBody, "600", "601", 1)
	if a := w.do("POST", "/v1/sandboxes", other, key("a")...); a.StatusCode != 409 ||
		a.error(t).Code != "SANDBOX::IDEMPOTENCY_KEY_REUSED" || !strings.Contains(a.error(t).Message, id) {
		t.Errorf("another body: %d %s", a.StatusCode, a.body)
	}
	for name, h := range map[string][]string{
		"another key": key("b"), "another client": key("a", wire.HeaderAPIKey, "another"),
		"no key": nil,
	} {
		if a := w.do("POST", "/v1/sandboxes", createBody, h...); a.StatusCode != 202 || a.sandbox(t).ID == id ||
			a.Header.Get(wire.HeaderReplayed) != "" {
			t.Errorf("%s: %d %s", name, a.StatusCode, a.body)
		}
	}
	// What was refused has used no key.
	if a := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"nope"},"entrypoint":["x"],"resourceLimits":{}}`,
		key("c")...); a.StatusCode != 404 {
		t.Errorf("%d", a.StatusCode)
	}
	if a := w.do("POST", "/v1/sandboxes", createBody, key("c")...); a.StatusCode != 202 {
		t.Errorf("after that: %d %s", a.StatusCode, a.body)
	}
	// A host that takes no more says of what it has taken what it said.
	w.fail = errs.New(errs.Exhausted, "full")
	if a := w.do("POST", "/v1/sandboxes", createBody, key("a")...); a.StatusCode != 202 || a.sandbox(t).ID != id {
		t.Errorf("on a full host: %d %s", a.StatusCode, a.body)
	}
	w.fail = nil
	w.do("DELETE", "/v1/sandboxes/"+id, "")
	if a := w.do("POST", "/v1/sandboxes", createBody, key("a")...); a.StatusCode != 409 ||
		a.error(t).Code != "SANDBOX::IDEMPOTENCY_KEY_SPENT" {
		t.Errorf("of one that is gone: %d %s", a.StatusCode, a.body)
	}
}

// TestIdempotencyOfKeyMadeAnew: a key that is made anew under the name of an old one
// inherits nothing of it.
func TestIdempotencyOfKeyMadeAnew(t *testing.T) {
	w := newWorld(t)
	create := func(secret string) answer {
		return w.do("POST", "/v1/sandboxes", createBody, wire.HeaderIdempotency, "a", wire.HeaderAPIKey, secret)
	}
	old := w.key(t, "ci", "operator")
	first := create(old).sandbox(t).ID
	if a := create(old); a.sandbox(t).ID != first {
		t.Errorf("the same key: %s %s", a.Status, a.body)
	}
	w.do("DELETE", "/v1/keys/ci", "")
	if a := create(w.key(t, "ci", "operator")); a.StatusCode != 202 || a.sandbox(t).ID == first || a.Header.Get(wire.HeaderReplayed) != "" {
		t.Errorf("a key made anew: %s %s", a.Status, a.body)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.recs {
		if r.Spec.Request.Holder == "" || strings.Contains(old, r.Spec.Request.Holder) {
			t.Errorf("the request of %s is known to be of %q", r.ID, r.Spec.Request.Holder)
		}
	}
}

func TestBadIdempotencyKey(t *testing.T) {
	w := newWorld(t)
	for _, k := range []string{"", strings.Repeat("x", 256), "a\tb", "\u00e9"} {
		req, err := http.NewRequest("POST", w.url+"/v1/sandboxes", strings.NewReader(createBody))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set(wire.HeaderAPIKey, testKey)
		req.Header[wire.HeaderIdempotency] = []string{k}
		resp, err := noRedirect.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 400 {
			t.Errorf("%.20q: %s", k, resp.Status)
		}
	}
	if len(w.recs) != 0 {
		t.Errorf("%d sandboxes were made", len(w.recs))
	}
}

// TestIdempotencyKeysDiffer: a key of one client is not that of another whose parts join to
// the same text.
func TestIdempotencyKeysDiffer(t *testing.T) {
	seen := map[string][2]string{}
	for _, of := range [][2]string{{"1", "1"}, {"11", ""}, {"1", "1\n"}, {"1", "\n1"}, {"1", "1\n1"}, {"11", "1"}, {"1", "11"}} {
		r, err := spec.Request([]string{of[0]}, of[1], nil)
		if other, ok := seen[r.Key]; ok || err != nil {
			t.Errorf("%q is %q, %v", of, other, err)
		}
		seen[r.Key] = of
	}
}

// TestIdempotencyRace: of requests at once one makes the sandbox, and all get it.
func TestIdempotencyRace(t *testing.T) {
	w := newWorld(t)
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids := map[string]int{}
	for range 16 {
		wg.Go(func() {
			a := w.do("POST", "/v1/sandboxes", createBody, wire.HeaderIdempotency, "race")
			mu.Lock()
			defer mu.Unlock()
			ids[a.sandbox(t).ID]++
		})
	}
	wg.Wait()
	if len(ids) != 1 || len(w.recs) != 1 {
		t.Errorf("%d ids, %d sandboxes: %v", len(ids), len(w.recs), ids)
	}
}
