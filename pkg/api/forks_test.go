package api

import (
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// origin is a sandbox that a test copies.
func (w *world) origin() string {
	w.t.Helper()
	id := w.create().ID
	w.set(id, func(r *record.Record) { r.Spec.Runtime, r.Spec.Name = "runsc", "origin" })
	return id
}

// copies are the records of the copies of a fork, in order.
func (w *world) copies(f wire.Fork) (all []record.Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range f.Sandboxes {
		all = append(all, w.recs[c.ID])
	}
	return all
}

// TestFork: the answer comes at once or when the copies are there, and says of each what it is.
func TestFork(t *testing.T) {
	w := newWorld(t)
	id := w.origin()
	const body = `{"count":2,"mode":"memory","timeout":600,"overrides":{"env":{"A":"1"},"metadata":{"team":"b"},` +
		`"resourceLimits":{"memory":"128Mi"},"extensions":{"sandboxd.name":"try","other":"x"}}}`
	a := w.do("POST", "/v1/sandboxes/origin/fork?wait=true", body)
	f := a.fork(t, 202)
	if f.Status.State != wire.ForkReady || f.SandboxID != id || f.Mode != wire.ForkMemory || f.Count != 2 || len(f.Sandboxes) != 2 ||
		f.CreatedAt.IsZero() || a.Header.Get("Location") != "/v1/forks/"+f.ID || a.Header.Get("Preference-Applied") != "wait" ||
		a.Header.Get(wire.HeaderReplayed) != "" {
		t.Errorf("%v %s", a.Header, a.body)
	}
	for i, r := range w.copies(f) {
		name := fmt.Sprint("try-", i+1)
		if c := f.Sandboxes[i]; c.Name != name || c.State != wire.Running {
			t.Errorf("copy %d is %+v", i+1, c)
		}
		if r.Spec.Name != name || !r.Spec.Memory || r.Spec.Timeout != 10*time.Minute || r.Spec.Env["A"] != "1" ||
			r.Spec.MemoryBytes != 128<<20 {
			t.Errorf("copy %d has %+v", i+1, r.Spec)
		}
		sb := w.do("GET", "/v1/sandboxes/"+r.ID, "").sandbox(t)
		if of := sb.Sandboxd.Fork; of == nil || *of != (wire.ForkOf{ID: f.ID, Source: id, Mode: wire.ForkMemory, Index: i + 1}) {
			t.Errorf("copy %d is shown as of %+v", i+1, of)
		}
		if len(sb.Extensions) != 2 || sb.Extensions["other"] != "x" {
			t.Errorf("copy %d is shown with extensions that were not sent: %v", i+1, sb.Extensions)
		}
	}
	if sb := w.do("GET", "/v1/sandboxes/"+id, "").sandbox(t); sb.Sandboxd.Fork != nil {
		t.Errorf("the origin is a copy of %+v", sb.Sandboxd.Fork)
	}
	if a := w.do("GET", "/v1/forks/"+f.ID, ""); a.fork(t, 200).Status.State != wire.ForkReady {
		t.Errorf("%s", a.body)
	}
	w.do("DELETE", "/v1/sandboxes/"+f.Sandboxes[0].ID, "")
	if now := w.do("GET", "/v1/forks/"+f.ID, "").fork(t, 200); now.Sandboxes[0].State != "Deleted" ||
		now.Sandboxes[1].State != wire.Running {
		t.Errorf("%+v", now)
	}
	w.do("GET", "/v1/forks/fork-none", "").wants(t, 404, "FORK::NOT_FOUND")

	// At once, with files; the sandboxes come later.
	w.mu.Lock()
	w.hold = make(chan struct{})
	hold := w.hold
	w.mu.Unlock()
	f = w.do("POST", "/sandboxes/"+id+"/fork", `{"count":1,"timeout":60}`).fork(t, 202)
	if f.Status.State != wire.ForkCreating || f.Mode != wire.ForkFiles {
		t.Errorf("%+v", f)
	}
	close(hold)
	if _, err := w.s.forks.forks.Await(t.Context(), f.ID); err != nil {
		t.Fatal(err)
	}
	later := w.do("GET", "/v1/forks/"+f.ID, "").fork(t, 200)
	if later.Status.State != wire.ForkReady || len(later.Sandboxes) != 1 || later.Sandboxes[0].Name != "" {
		t.Errorf("%+v", later)
	}
	if r := w.copies(later)[0]; r.Spec.Memory || len(r.Spec.Entrypoint) == 0 || len(r.Spec.Extensions) > 0 {
		t.Errorf("%+v", r.Spec)
	}
}

// TestForkFailed: copies that do not come up are no error of the request; the fork says why.
func TestForkFailed(t *testing.T) {
	w := newWorld(t)
	id := w.origin()
	w.failed = true
	f := w.do("POST", "/v1/sandboxes/"+id+"/fork", `{"count":2,"timeout":60}`, "Prefer", "wait").fork(t, 202)
	if f.Status.State != wire.ForkFailed || len(f.Sandboxes) != 2 || f.Sandboxes[0].State != wire.Failed ||
		f.Status.Message != "2 of 2 copies could not be made; copy 1: entrypoint /nope: no such file or directory" {
		t.Errorf("%+v", f)
	}
}

// TestForkRefused: what cannot be is refused before anything is made.
func TestForkRefused(t *testing.T) {
	w := newWorld(t)
	id := w.origin()
	long := strings.Repeat("x", 62)
	for _, c := range []struct {
		body, says string
		status     int
		code       string
	}{
		{`{"timeout":60}`, "count 0: want 1 to 256", 400, ""},
		{`{"count":-1,"timeout":60}`, "count -1: want 1 to 256", 400, ""},
		{`{"count":257,"timeout":60}`, "count 257: want 1 to 256", 400, ""},
		{`{"count":1000000,"timeout":60}`, "count 1000000: want 1 to 256", 400, ""},
		{`{"count":1e99,"timeout":60}`, "count", 400, ""},
		{`{"count":"1","timeout":60}`, "count", 400, ""},
		{`{"count":1}`, "timeout is missing", 400, ""},
		{`{"count":1,"timeout":0}`, "timeout", 400, ""},
		{`{"count":1,"timeout":60,"overrides":{"extensions":{"sandboxd.timeout":"1m"}}}`, "timeout", 400, ""},
		{`{"count":1,"timeout":60,"mode":"both"}`, "want memory or files", 400, ""},
		{`{"count":1,"timeuot":60}`, "did you mean timeout?", 400, ""},
		{`{"count":1,"timeout":60,"overrides":{"resourceLimits":{"memory":"much"}}}`, "memory", 400, ""},
		{`{"count":1,"timeout":60,"overrides":{"networkPolicy":{"defaultAction":"perhaps"}}}`, "", 400, ""},
		{`{"count":2,"timeout":60,"overrides":{"extensions":{"sandboxd.name":"` + long + `"}}}`, "name", 400, ""},
		{`{"count":2,"timeout":60,"overrides":{"extensions":{"sandboxd.publish":"8080:80"}}}`, "sandboxd.publish is for one copy", 400, ""},
		{`{"count":1,"timeout":60,"overrides":{"extensions":{"sandboxd.what":"x"}}}`, "is unknown", 400, ""},
		{`[]`, "", 400, ""},
		{``, "", 400, ""},
		{`{"count":201,"timeout":60}`, "200 would fit", 503, "SANDBOX::CAPACITY_EXCEEDED"},
	} {
		a := w.do("POST", "/v1/sandboxes/"+id+"/fork", c.body, "X-Lenient", "1")
		if a.StatusCode != c.status || !strings.Contains(string(a.body), c.says) || c.code != "" && a.error(t).Code != c.code {
			t.Errorf("%s: %d %s", c.body, a.StatusCode, a.body)
		}
	}
	for _, key := range []string{"runtime", "security", "prestart", "idle", "memory", "image-command", "literal"} {
		body := fmt.Sprintf(`{"count":1,"timeout":60,"overrides":{"extensions":{"sandboxd.%s":"true"}}}`, key)
		if a := w.do("POST", "/v1/sandboxes/"+id+"/fork", body); a.StatusCode != 400 ||
			!strings.Contains(string(a.body), "sandboxd."+key+" cannot be changed for copies") {
			t.Errorf("%s: %d %s", key, a.StatusCode, a.body)
		}
	}
	w.do("POST", "/v1/sandboxes/"+id+"/fork?wait=perhaps", `{"count":1,"timeout":60}`, "X-Lenient", "1").wants(t, 400,
		"SANDBOX::INVALID_PARAMETER")
	w.do("POST", "/v1/sandboxes/taaaaaaaaaaa/fork", `{"count":1,"timeout":60}`).wants(t, 404, "DOCKER::SANDBOX_NOT_FOUND")
	w.do("GET", "/v1/sandboxes/"+id+"/fork", "").wants(t, 405, "GENERAL::METHOD_NOT_ALLOWED")
	w.set(id, func(r *record.Record) { r.State = record.Paused })
	w.do("POST", "/v1/sandboxes/"+id+"/fork", `{"count":1,"timeout":60,"mode":"memory"}`).wants(t, 409, "SNAPSHOT::INVALID_SOURCE_STATE")
	w.set(id, func(r *record.Record) { r.State, r.Spec.Runtime = record.Running, "runc" })
	a := w.do("POST", "/v1/sandboxes/"+id+"/fork", `{"count":1,"timeout":60,"mode":"memory"}`)
	if a.StatusCode != 400 || a.error(t).Code != "SANDBOX::API_NOT_SUPPORTED" || !strings.Contains(string(a.body), "need runtime runsc") {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if len(w.recs) != 1 || len(w.snaps) != 0 {
		t.Errorf("%d sandboxes and %d snapshots are there", len(w.recs), len(w.snaps))
	}
	none := newWorld(t, func(c *Config) { c.Forks = nil })
	id = none.create().ID
	for _, r := range [][2]string{{"POST", "/v1/sandboxes/" + id + "/fork"}, {"GET", "/v1/forks/fork-x"}} {
		if a := none.do(r[0], r[1], ""); a.StatusCode != 404 {
			t.Errorf("a daemon without forks: %s: %d %s", r, a.StatusCode, a.body)
		}
	}
}

// TestForkIdempotency: the same key gives the same fork, and nothing else.
func TestForkIdempotency(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.APIKeys = append(c.APIKeys, "another") })
	id := w.origin()
	path := "/v1/sandboxes/" + id + "/fork?wait=true"
	const body = `{"count":2,"timeout":60}`
	fork := func(body, key string, more ...string) answer {
		return w.do("POST", path, body, append([]string{wire.HeaderIdempotency, key}, more...)...)
	}
	reused := func(what string, a answer) {
		t.Helper()
		if a.StatusCode != 409 || a.error(t).Code != "SANDBOX::IDEMPOTENCY_KEY_REUSED" {
			t.Errorf("%s: %d %s", what, a.StatusCode, a.body)
		}
	}
	first := fork(body, "a")
	f := first.fork(t, 202)
	if first.Header.Get(wire.HeaderReplayed) != "" {
		t.Errorf("%v", first.Header)
	}
	same := func(what string) {
		t.Helper()
		a := fork(body, "a")
		now := a.fork(t, 202)
		now.CreatedAt = f.CreatedAt // after a restart it is that of the first copy
		if a.Header.Get(wire.HeaderReplayed) != "true" || !reflect.DeepEqual(now, f) ||
			a.Header.Get("Location") != first.Header.Get("Location") {
			t.Errorf("%s: %d %v %s", what, a.StatusCode, a.Header, a.body)
		}
	}
	same("again")
	w.fail = errs.New(errs.Exhausted, "full")
	same("on a full host")
	w.fail = nil
	if n := len(w.recs); n != 3 {
		t.Errorf("%d sandboxes", n)
	}
	reused("another body", fork(`{"count":3,"timeout":60}`, "a"))
	reused("a creation", w.do("POST", "/v1/sandboxes", createBody, wire.HeaderIdempotency, "a"))
	other := w.create().ID
	reused("another sandbox", w.do("POST", "/v1/sandboxes/"+other+"/fork", body, wire.HeaderIdempotency, "a"))
	w.do("POST", "/v1/sandboxes", createBody, wire.HeaderIdempotency, "of a creation")
	reused("the key of a creation", fork(body, "of a creation"))
	for what, a := range map[string]answer{
		"another key": fork(body, "b"), "another client": fork(body, "a", wire.HeaderAPIKey, "another"), "no key": w.do("POST", path, body),
	} {
		if a.fork(t, 202).ID == f.ID || a.Header.Get(wire.HeaderReplayed) != "" {
			t.Errorf("%s: %s", what, a.body)
		}
	}
	fork(body, strings.Repeat("x", 256), "X-Lenient", "1").wants(t, 400, "SANDBOX::INVALID_IDEMPOTENCY_KEY")
	// What was refused has used no key.
	if a := fork(`{"count":0,"timeout":60}`, "c", "X-Lenient", "1"); a.StatusCode != 400 {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if a := fork(body, "c"); a.StatusCode != 202 || a.Header.Get(wire.HeaderReplayed) != "" {
		t.Errorf("after that: %d %s", a.StatusCode, a.body)
	}

	// After a restart it is found by its first copy, as long as that is there.
	w.s.forks.forks = w.fake.forks(t, w.log)
	same("after a restart")
	reused("another body after a restart", fork(`{"count":3,"timeout":60}`, "a"))
	reused("another sandbox after a restart", w.do("POST", "/v1/sandboxes/"+other+"/fork", body, wire.HeaderIdempotency, "a"))
	w.set(f.Sandboxes[0].ID, func(r *record.Record) { r.State = record.Deleting })
	if a := fork(body, "a"); a.StatusCode != 409 || a.error(t).Code != "SANDBOX::IDEMPOTENCY_KEY_SPENT" {
		t.Errorf("while the first copy is deleted: %d %s", a.StatusCode, a.body)
	}
	w.do("DELETE", "/v1/sandboxes/"+f.Sandboxes[0].ID, "")
	if a := fork(body, "a"); a.StatusCode != 409 || a.error(t).Code != "SANDBOX::IDEMPOTENCY_KEY_SPENT" ||
		!strings.Contains(a.error(t).Message, f.Sandboxes[0].ID) {
		t.Errorf("without the first copy: %d %s", a.StatusCode, a.body)
	}
	reused("another body without the first copy", fork(`{"count":3,"timeout":60}`, "a"))
}

// TestForkOfKeyWhoseCopyIsGone: the daemon that made a fork remembers it, also without its copies.
func TestForkOfKeyWhoseCopyIsGone(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sandboxes/" + w.origin() + "/fork?wait=true"
	f := w.do("POST", path, `{"count":2,"timeout":60}`, wire.HeaderIdempotency, "a").fork(t, 202)
	for _, c := range f.Sandboxes {
		w.do("DELETE", "/v1/sandboxes/"+c.ID, "")
	}
	a := w.do("POST", path, `{"count":2,"timeout":60}`, wire.HeaderIdempotency, "a")
	if now := a.fork(t, 202); now.ID != f.ID || a.Header.Get(wire.HeaderReplayed) != "true" || now.Sandboxes[0].State != "Deleted" {
		t.Errorf("%v %s", a.Header, a.body)
	}
	// Before the first copy is there, a body is compared, too.
	w.mu.Lock()
	w.fail = errs.New(errs.Exhausted, "full")
	w.mu.Unlock()
	if f := w.do("POST", path, `{"count":1,"timeout":60}`, wire.HeaderIdempotency, "b").fork(t, 202); f.Status.State != wire.ForkFailed {
		t.Errorf("%+v", f)
	}
	w.do("POST", path, `{"count":2,"timeout":60}`, wire.HeaderIdempotency, "b").wants(t, 409, "SANDBOX::IDEMPOTENCY_KEY_REUSED")
}

// TestForkRace: of requests at once one makes the fork, and all get it.
func TestForkRace(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sandboxes/" + w.origin() + "/fork?wait=true"
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids := map[string]int{}
	for range 16 {
		wg.Go(func() {
			a := w.do("POST", path, `{"count":2,"timeout":60}`, wire.HeaderIdempotency, "race")
			mu.Lock()
			defer mu.Unlock()
			ids[a.fork(t, 202).ID]++
		})
	}
	wg.Wait()
	if len(ids) != 1 || len(w.recs) != 3 {
		t.Errorf("%d forks, %d sandboxes: %v", len(ids), len(w.recs), ids)
	}
}

// TestMemorySnapshots: a snapshot has the memory if that is asked for, and says so; a sandbox
// begins with it if that is asked for.
func TestMemorySnapshots(t *testing.T) {
	w := newWorld(t)
	id := w.origin()
	path := "/v1/sandboxes/" + id + "/snapshots"
	memory := w.do("POST", path+"?memory=true&wait=true", "").snapshot(t, 202).ID
	files := w.do("POST", path+"?memory=false&wait=true", "").snapshot(t, 202).ID
	if a := w.do("GET", "/v1/snapshots/"+memory+"/inspect", ""); !strings.Contains(string(a.body),
		`"memory":{"bytes":4194304,"build":"abc","cpu":"fast"}`) {
		t.Errorf("%s", a.body)
	}
	if a := w.do("GET", "/v1/snapshots/"+files+"/inspect", ""); strings.Contains(string(a.body), "memory") {
		t.Errorf("%s", a.body)
	}
	w.do("POST", path+"?memory=perhaps", "", "X-Lenient", "1").wants(t, 400, "SANDBOX::INVALID_PARAMETER")
	w.set(id, func(r *record.Record) { r.State = record.Paused })
	w.do("POST", path+"?memory=true", "").wants(t, 409, "SNAPSHOT::INVALID_SOURCE_STATE")

	create := func(snap, more string) answer {
		return w.do("POST", "/v1/sandboxes?wait=true", `{"snapshotId":"`+snap+`","resourceLimits":{},`+more+`}`, "X-Lenient", "1")
	}
	sb := create(memory, `"extensions":{"sandboxd.memory":"true"}`)
	if sb.StatusCode != 202 {
		t.Fatalf("%d %s", sb.StatusCode, sb.body)
	}
	if r := w.recs[sb.sandbox(t).ID]; !r.Spec.Memory || r.Spec.Snapshot != memory || r.Spec.Runtime != "runsc" ||
		fmt.Sprint(r.Spec.Entrypoint) != fmt.Sprint(w.recs[id].Spec.Entrypoint) {
		t.Errorf("%+v", r.Spec)
	}
	if a := create(memory, `"entrypoint":["x"]`); a.StatusCode != 202 || w.recs[a.sandbox(t).ID].Spec.Memory {
		t.Errorf("the files alone: %d %s", a.StatusCode, a.body)
	}
	for more, says := range map[string]string{
		`"extensions":{"sandboxd.memory":"perhaps"}`:                              "want true or false",
		`"extensions":{"sandboxd.memory":"true","sandboxd.image-command":"true"}`: "exclude each other",
	} {
		if a := create(memory, more); a.StatusCode != 400 || !strings.Contains(string(a.body), says) {
			t.Errorf("%s: %d %s", more, a.StatusCode, a.body)
		}
	}
	a := w.do("POST", "/v1/sandboxes", strings.Replace(createBody, "{", `{"extensions":{"sandboxd.memory":"true"},`, 1), "X-Lenient", "1")
	if a.StatusCode != 400 || !strings.Contains(string(a.body), "needs a snapshot with memory") {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
}
