package api

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/pools"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// shelf is a store of pools, and a stock without members.
type shelf struct {
	mu      sync.Mutex
	all     []record.Pool
	changed []string
}

func (s *shelf) put(p record.Pool, add bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := slices.IndexFunc(s.all, func(o record.Pool) bool { return o.Name == p.Name })
	switch {
	case at >= 0 && add:
		return errs.Wire(errs.New(errs.Exists, "there is one"), "POOL::EXISTS")
	case at >= 0:
		s.all[at] = p
	default:
		s.all = append(s.all, p)
	}
	return nil
}

func (s *shelf) AddPool(_ context.Context, p record.Pool) error { return s.put(p, true) }
func (s *shelf) PutPool(_ context.Context, p record.Pool) error { return s.put(p, false) }

func (s *shelf) DeletePool(_ context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = slices.DeleteFunc(s.all, func(p record.Pool) bool { return p.Name == name })
	return nil
}

func (s *shelf) Pools(context.Context) ([]record.Pool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all), nil
}

func (s *shelf) Changed(pool string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed = append(s.changed, pool)
}

// stock is a shelf as the Stock of a Keeper.
type stock struct{ *shelf }

func (s stock) Pools(ctx context.Context) (all []record.PoolInfo, err error) {
	list, err := s.shelf.Pools(ctx)
	for _, p := range list {
		all = append(all, record.PoolInfo{
			Pool: p, Available: 2, Allocated: 1, Revision: "012345", Trouble: "no image",
			Work: map[string]record.PoolWork{record.PoolHit: {N: 7}},
		})
	}
	return all, err
}

// withShelf has a server with pools, of which none can be of the image nowhere.
func withShelf(s *shelf) func(*Config) {
	return func(c *Config) {
		c.Pools = &pools.Keeper{Store: s, Stock: stock{s}, Check: func(_ context.Context, p record.Pool) error {
			if strings.Contains(string(p.Template), "nowhere") {
				return errs.Wire(errs.New(errs.NotFound, "no image nowhere"), "IMAGE::NOT_FOUND")
			}
			return nil
		}}
	}
}

// TestPools: pools are made, shown, changed and removed in OpenSandbox's form.
func TestPools(t *testing.T) {
	s := &shelf{}
	w := newWorld(t, withShelf(s))
	want := func(method, path, body string, status int, says ...string) {
		t.Helper()
		a := w.do(method, path, body)
		for _, text := range says {
			if !strings.Contains(string(a.body), text) {
				t.Errorf("%s %s %s: %s, want %q", method, path, body, a.body, text)
			}
		}
		if a.StatusCode != status {
			t.Errorf("%s %s %s: %d %s, want %d", method, path, body, a.StatusCode, a.body, status)
		}
	}
	const capacity = `"capacitySpec":{"bufferMax":2,"bufferMin":1,"poolMax":5,"poolMin":0}`
	pool := func(name, template string) string {
		return `{"name":"` + name + `","template":` + template + `,` + capacity + `}`
	}
	want("GET", "/v1/pools", "", 200, `{"items":[]}`)
	want("POST", "/v1/pools", pool("py", `{"image":{"uri":"python"},"extensions":{"sandboxd.runtime":"runc","sandboxd.pool.warm":"true",`+
		`"sandboxd.pool.ready":"test -e /srv/up"}}`), 201,
		`"name":"py"`, capacity, `"status":{"total":3,"allocated":1,"available":2,"revision":"012345","message":"no image","hits":7`,
		`"source":"store"`, `"createdAt"`)
	want("POST", "/v1/pools", pool("py", `{"image":{"uri":"python"}}`), 409, "POOL::EXISTS")
	want("GET", "/v1/pools/py", "", 200, `"image":{"uri":"python"}`)
	want("PUT", "/v1/pools/py", `{"capacitySpec":{"bufferMax":3,"bufferMin":3,"poolMax":5,"poolMin":0}}`, 200, `"bufferMin":3`,
		`"sandboxd.pool.warm":"true"`)
	if p := s.all[0]; p.Warm != "true" || p.Ready != "test -e /srv/up" || p.Capacity.BufferMin != 3 {
		t.Errorf("after a change of the capacity it is %+v", p)
	}
	for template, says := range map[string]string{
		`{}`: "template.image",
		`{"image":{"uri":"x"},"entrypoint":["sh"]}`:                                                          "entrypoint",
		`{"spec":{"containers":[]}}`:                                                                         "spec",
		`{"image":{"uri":"x"},"extensions":{"sandboxd.name":"a"}}`:                                           "bound when",
		`{"image":{"uri":"x"},"extensions":{"sandboxd.runtime":"lxc"}}`:                                      "lxc",
		`{"image":{"uri":"x"},"extensions":{"sandboxd.pool.max-age":"1s"}}`:                                  "at least 1m",
		`{"image":{"uri":"x"},"resourceLimits":{"memory":"1"}}`:                                              "memory",
		`{"image":{"uri":"x","auth":{"username":"a","password":"b"}}}`:                                       "without auth",
		`{"image":{"uri":"x"},"extensions":{"sandboxd.prestart":"cobol"}}`:                                   "cobol",
		`{"image":{"uri":"x"},"extensions":{"sandboxd.pool.warm":"` + "\\u0000" + `"}}`:                      "NUL",
		`{"image":{"uri":"x"},"extensions":{"sandboxd.pool.ready":" "}}`:                                     "sandboxd.pool.ready: want a line",
		`{"image":{"uri":"x"},"extensions":{"sandboxd.pool.ready":"` + strings.Repeat("x", 16<<10+1) + `"}}`: "16 KiB",
	} {
		want("POST", "/v1/pools", pool("other", template), 400, says)
	}
	want("POST", "/v1/pools", pool("other", `{"image":{"uri":"nowhere"}}`), 404, "IMAGE::NOT_FOUND")
	want("POST", "/v1/pools", pool("a.b", `{"image":{"uri":"x"}}`), 400, "POOL::INVALID")
	want("POST", "/v1/pools", `{"name":"other","template":{"image":{"uri":"x"}}}`, 400, "capacitySpec")
	want("PUT", "/v1/pools/py", `{"capacitySpec":{"bufferMax":3,"bufferMin":4,"poolMax":5,"poolMin":0}}`, 400, "bufferMin 4")
	want("PUT", "/v1/pools/none", `{`+capacity+`}`, 404, "POOL::NOT_FOUND")
	want("GET", "/v1/pools/none", "", 404, "POOL::NOT_FOUND")
	want("DELETE", "/v1/pools/none", "", 404, "POOL::NOT_FOUND")
	if len(s.all) != 1 {
		t.Errorf("after what was refused there are %+v", s.all)
	}
	want("DELETE", "/v1/pools/py", "", 204)
	if !slices.Equal(s.changed, []string{"py", "py", "py"}) {
		t.Errorf("the stock was told of %v", s.changed)
	}
}

// TestPoolsOfConfiguration: pools of the configuration are changed only there.
func TestPoolsOfConfiguration(t *testing.T) {
	s := &shelf{}
	w := newWorld(t, withShelf(s))
	k := &pools.Keeper{Store: s, Stock: stock{s}}
	one := record.Pool{Name: "py", Template: []byte(`{"image":{"uri":"python"}}`), Capacity: record.Capacity{BufferMax: 1, PoolMax: 1}}
	if err := k.Configure(t.Context(), []record.Pool{one}); err != nil {
		t.Fatal(err)
	}
	if err := s.AddPool(t.Context(), record.Pool{Name: "mine", Template: one.Template}); err != nil {
		t.Fatal(err)
	}
	const body = `{"capacitySpec":{"bufferMax":3,"bufferMin":1,"poolMax":5,"poolMin":0}}`
	for _, method := range []string{"PUT", "DELETE"} {
		if a := w.do(method, "/v1/pools/py", body); a.StatusCode != 409 || !strings.Contains(string(a.body), "POOL::FIXED") {
			t.Errorf("%s: %d %s", method, a.StatusCode, a.body)
		}
	}
	if a := w.do("GET", "/v1/pools/py", ""); !strings.Contains(string(a.body), `"source":"configuration"`) {
		t.Errorf("%s", a.body)
	}
	made := s.all[0].Created
	if err := k.Configure(t.Context(), []record.Pool{one}); err != nil || !s.all[0].Created.Equal(made) || made.IsZero() {
		t.Errorf("configured again it is %+v, %v", s.all[0], err)
	}
	if err := k.Configure(t.Context(), nil); err != nil || len(s.all) != 1 || s.all[0].Name != "mine" {
		t.Errorf("no longer configured: %+v, %v", s.all, err)
	}
}

// TestPoolRef: a creation that names a pool takes over what the template has, and says
// afterwards what became of it.
func TestPoolRef(t *testing.T) {
	s := &shelf{all: []record.Pool{{
		Name: "py", Template: []byte(`{"image":{"uri":"python"},"resourceLimits":{"memory":"128Mi"},"extensions":{"sandboxd.runtime":"runc",
			"sandboxd.prestart":"python","sandboxd.pool.warm":"true"}}`),
	}}}
	w := newWorld(t, withShelf(s))
	a := w.do("POST", "/v1/sandboxes?wait=true", `{"extensions":{"poolRef":"py"},"env":{"A":"1"}}`)
	if a.StatusCode != 202 {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	r := w.recs[a.sandbox(t).ID]
	if r.Spec.Pool != "py" || r.Spec.Runtime != "runc" || r.Spec.MemoryBytes != 128<<20 || len(r.Spec.Entrypoint) != 0 ||
		!slices.Equal(r.Spec.Prestart, []string{"python"}) || len(r.Spec.Extensions) != 1 || r.Spec.ImageURI != "python" {
		t.Errorf("it is %+v", r.Spec)
	}
	r.Pool = record.PoolUse{Name: "py", Miss: "another image"}
	w.recs[r.ID] = r
	if a := w.do("GET", "/v1/sandboxes/"+r.ID+"/inspect", ""); !strings.Contains(string(a.body),
		`"pool":{"name":"py","hit":false,"miss":"another image"}`) ||
		!strings.Contains(string(a.body), `"notes":["it took no member of pool py: another image"]`) {
		t.Errorf("%s", a.body)
	}
	if got, want := serverTiming(nil, r.Pool), `pool-miss;desc="another image"`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	own := `{"image":{"uri":"python"},"entrypoint":["sh"],"resourceLimits":{"memory":"256Mi"},"extensions":{"poolRef":"py","sandboxd.runtime":"runsc"}}`
	a = w.do("POST", "/v1/sandboxes?wait=true", own)
	if r := w.recs[a.sandbox(t).ID]; r.Spec.Runtime != "runsc" || r.Spec.MemoryBytes != 256<<20 || len(r.Spec.Entrypoint) != 1 {
		t.Errorf("what a creation says itself counts: %+v", r.Spec)
	}
	for body, status := range map[string]int{
		`{"extensions":{"poolRef":"none"}}`:                   404,
		`{"snapshotId":"snap","extensions":{"poolRef":"py"}}`: 400,
	} {
		if a := w.do("POST", "/v1/sandboxes", body); a.StatusCode != status {
			t.Errorf("%s: %d %s", body, a.StatusCode, a.body)
		}
	}
	w.fail = errs.Retry(errs.Wire(errs.New(errs.Exhausted, "full"), record.CodePoolFull), 3e9)
	if a := w.do("POST", "/v1/sandboxes", `{"extensions":{"poolRef":"py"}}`); a.StatusCode != 429 || a.Header.Get("Retry-After") != "3" {
		t.Errorf("a pool that is full: %d %s %s", a.StatusCode, a.Header.Get("Retry-After"), a.body)
	}
	if b := w.do("POST", "/v1/sandboxes", own).error(t); b.Code != record.CodePoolFull {
		t.Errorf("%+v", b)
	}
}
