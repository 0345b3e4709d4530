package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// fakeKeys is a store of keys.
type fakeKeys struct {
	mu   sync.Mutex
	all  []record.Key
	fail error
}

func (f *fakeKeys) Keys(context.Context) ([]record.Key, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.all), f.fail
}

func (f *fakeKeys) AddKey(_ context.Context, k record.Key) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if slices.ContainsFunc(f.all, func(o record.Key) bool { return o.Name == k.Name }) {
		return errs.New(errs.Exists, "there is one")
	}
	f.all = append(f.all, k)
	return nil
}

func (f *fakeKeys) RemoveKey(_ context.Context, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.all)
	f.all = slices.DeleteFunc(f.all, func(o record.Key) bool { return o.Name == name })
	if len(f.all) == n {
		return errs.New(errs.NotFound, "there is none")
	}
	return nil
}

// key makes an API key and returns it.
func (w *world) key(t testing.TB, name, role string) string {
	t.Helper()
	a := w.do("POST", "/v1/keys", fmt.Sprintf(`{"name":%q,"role":%q}`, name, role))
	var k wire.NewKey
	if a.StatusCode != 201 || json.Unmarshal(a.body, &k) != nil || len(k.Secret) < 50 || k.Role != role ||
		a.Header.Get("Cache-Control") != "no-store" {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	return k.Secret
}

// TestKeys: a key works from its answer on and until it is removed or expires,
// and is told once.
func TestKeys(t *testing.T) {
	w := newWorld(t)
	secret := w.key(t, "ci", "operator")
	as := func(key string) int { return w.do("GET", "/v1/sandboxes", "", wire.HeaderAPIKey, key).StatusCode }
	if as(secret) != 200 || as(secret[:len(secret)-1]) != 401 || as(secret+"x") != 401 {
		t.Error("the new key is not what opens")
	}
	if !strings.Contains(w.log.String(), `"actor":"key ci 127.0.0.1`) {
		t.Error("the log does not say whose key it was")
	}
	list := w.do("GET", "/v1/keys", "")
	for _, want := range []string{
		`"name":"configuration-1","role":"admin","source":"configuration"`,
		`"name":"ci","role":"operator","source":"store"`,
	} {
		if !strings.Contains(string(list.body), want) {
			t.Errorf("no %s in %s", want, list.body)
		}
	}
	if b, _ := json.Marshal(w.keys.all); strings.Contains(string(list.body), secret) || strings.Contains(string(b), secret) ||
		strings.Contains(w.log.String(), secret) {
		t.Error("the key stands somewhere")
	}
	if a := w.do("POST", "/v1/keys", `{"name":"ci"}`); a.StatusCode != 409 {
		t.Errorf("twice: %d %s", a.StatusCode, a.body)
	}
	if a := w.do("DELETE", "/v1/keys/ci", ""); a.StatusCode != 204 || as(secret) != 401 {
		t.Errorf("removed: %d, and then it opens with %d", a.StatusCode, as(secret))
	}
	for name, want := range map[string]int{"ci": 404, "..": 404, "configuration-1": 409} {
		if a := w.do("DELETE", "/v1/keys/"+name, "", "X-Lenient", "1"); a.StatusCode != want {
			t.Errorf("remove %s: %d %s", name, a.StatusCode, a.body)
		}
	}
	if as(testKey) != 200 {
		t.Error("the configuration's key is no admin's any more")
	}

	var k wire.NewKey
	for life := 300 * time.Millisecond; ; life *= 8 { // a busy host may take longer to make and to use it
		soon := time.Now().Add(life)
		a := w.do("POST", "/v1/keys", fmt.Sprintf(`{"name":"brief-%d","role":"viewer","expiresAt":%q}`, life,
			soon.UTC().Format(time.RFC3339Nano)))
		works := json.Unmarshal(a.body, &k) == nil && as(k.Secret) == 200
		if !works && (time.Now().Before(soon) || life > time.Minute) {
			t.Fatalf("%d %s", a.StatusCode, a.body)
		}
		if works {
			time.Sleep(time.Until(soon))
			break
		}
	}
	if a := w.do("GET", "/v1/sandboxes", "", wire.HeaderAPIKey, k.Secret); a.StatusCode != 401 || a.error(t).Code != "INVALID_API_KEY" ||
		!strings.Contains(a.error(t).Message, "expired") {
		t.Errorf("expired: %d %s", a.StatusCode, a.body)
	}
}

func TestBadKeys(t *testing.T) {
	w := newWorld(t)
	for _, body := range []string{
		``, `[]`, `{}`, `{"name":""}`, `{"name":"../x"}`, `{"name":"a b"}`, `{"name":"configuration-7"}`, `{"name":"` +
			strings.Repeat("n", 64) + `"}`,
		`{"name":"a","role":"root"}`, `{"name":"a","role":1}`, `{"name":"a","expiresAt":"tomorrow"}`,
		`{"name":"a","expiresAt":"2001-01-01T00:00:00Z"}`,
	} {
		if a := w.do("POST", "/v1/keys", body); a.StatusCode != 400 {
			t.Errorf("%s: %d %s", body, a.StatusCode, a.body)
		}
	}
	if len(w.keys.all) != 0 {
		t.Errorf("%+v were made", w.keys.all)
	}
	w.keys.fail = errs.New(errs.Internal, "broken")
	if _, err := New(Config{Keys: w.keys}, nil, nil, nil, nil, nil, nil); err == nil {
		t.Error("a server whose keys cannot be read serves")
	}
}

// TestFirstKeyCloses: a daemon that was open to everybody is not when somebody
// has made a key.
func TestFirstKeyCloses(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.APIKeys, c.Insecure = nil, true })
	if a := w.do("GET", "/v1/sandboxes", "", wire.HeaderAPIKey, ""); a.StatusCode != 200 {
		t.Fatalf("open: %d", a.StatusCode)
	}
	secret := w.key(t, "first", "admin")
	if a := w.do("GET", "/v1/sandboxes", "", wire.HeaderAPIKey, ""); a.StatusCode != 401 {
		t.Errorf("after the first key: %d", a.StatusCode)
	}
	if a := w.do("GET", "/v1/sandboxes", "", wire.HeaderAPIKey, secret); a.StatusCode != 200 {
		t.Errorf("with it: %d", a.StatusCode)
	}
}

// TestRateLimit: each client has so many requests, and hears when it has more.
func TestRateLimit(t *testing.T) {
	now := time.Now()
	w := newWorld(t, func(c *Config) { c.RequestsPerSecond, c.Now = 5, func() time.Time { return now } })
	sb := w.create()
	other := w.key(t, "other", "viewer")
	var refused answer
	for range 20 {
		if a := w.do("GET", "/v1/sandboxes", ""); a.StatusCode != 200 {
			refused = a
			break
		}
	}
	if refused.Response == nil || refused.StatusCode != http.StatusTooManyRequests || refused.error(t).Code != "SANDBOX::RATE_LIMITED" {
		t.Fatalf("20 requests at once: %+v", refused)
	}
	if n, err := strconv.Atoi(refused.Header.Get("Retry-After")); err != nil || n != 1 {
		t.Errorf("Retry-After %q", refused.Header.Get("Retry-After"))
	}
	if a := w.do("GET", "/v1/sandboxes", "", wire.HeaderAPIKey, other); a.StatusCode != 200 {
		t.Errorf("another key: %d", a.StatusCode)
	}
	if a := w.do("GET", "/v1/sandboxes/"+sb.ID+"/proxy/44772/ping", "", wire.HeaderAPIKey, "", wire.HeaderAgentToken,
		"agent-token"); a.StatusCode != 200 {
		t.Errorf("by the token: %d", a.StatusCode)
	}
	now = now.Add(time.Second)
	if a := w.do("GET", "/v1/sandboxes", ""); a.StatusCode != 200 {
		t.Errorf("a second later: %d", a.StatusCode)
	}
}
