package api

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// fakeSnapshots is the snapshots of fake. They are ready when they are awaited.
type fakeSnapshots struct{ *fake }

func (f fakeSnapshots) Create(_ context.Context, sandbox string, q record.SnapshotRequest) (record.Snapshot, error) {
	name, unique := q.Name, q.Unique
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.snaps {
		if unique && s.Name == name {
			return s, errs.Wire(errs.New(errs.Exists, "snapshot %s has the name %q", s.ID, name), "SNAPSHOT::ALREADY_EXISTS")
		}
	}
	r := f.recs[sandbox]
	if r.State != record.Running {
		return record.Snapshot{}, errs.New(errs.WrongState, "sandbox %s is %s", sandbox, r.State)
	}
	t := time.Now()
	s := record.Snapshot{
		ID: record.NewSnapshotID('t'), Name: name, Source: sandbox, State: record.SnapshotCreating, Image: r.Spec.Image,
		Created: t, Changed: t, Bytes: 7,
	}
	if q.Memory {
		s.Memory = &record.Memory{
			MemoryImage: record.MemoryImage{Files: []record.MemoryFile{{Name: "pages.img", Bytes: 4 << 20}}}, Spec: r.Spec, Token: r.Token,
		}
		s.Memory.Needs = record.MemoryNeeds{Build: "abc", CPU: "fast"}
	}
	f.snaps[s.ID] = s
	return s, nil
}

func (f fakeSnapshots) Await(ctx context.Context, id string) (record.Snapshot, error) {
	if ctx.Err() != nil { // it is still being taken
		return record.Snapshot{}, ctx.Err()
	}
	f.mu.Lock()
	s := f.snaps[id]
	s.State, s.Changed = record.SnapshotReady, time.Now()
	f.snaps[id] = s
	f.mu.Unlock()
	return f.Get(ctx, id)
}

func (f fakeSnapshots) Get(_ context.Context, id string) (record.Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s, ok := f.snaps[id]; ok {
		return s, nil
	}
	return record.Snapshot{}, errs.Wire(errs.New(errs.NotFound, "no snapshot %q", id), "SNAPSHOT::NOT_FOUND")
}

func (f fakeSnapshots) List(context.Context) (all []record.Snapshot, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.snaps {
		all = append(all, s)
	}
	return all, nil
}

func (f fakeSnapshots) Use(ctx context.Context, id, why string) (record.Snapshot, func(), error) {
	s, err := f.Get(ctx, id)
	if err == nil && s.State != record.SnapshotReady {
		err = errs.Wire(errs.New(errs.WrongState, "snapshot %s is %s; %s", s.ID, s.State, why), "SNAPSHOT::NOT_READY")
	}
	if err != nil {
		return s, nil, err
	}
	f.used[id]++
	return s, func() { f.used[id]-- }, nil
}

func (f fakeSnapshots) Delete(ctx context.Context, id string) error {
	s, err := f.Get(ctx, id)
	if err == nil && f.used[id] > 0 {
		err = errs.New(errs.WrongState, "snapshot %s is in use", id)
	}
	if err == nil && s.State == record.SnapshotCreating {
		err = errs.New(errs.WrongState, "snapshot %s is still being taken", id)
	}
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.snaps, id)
	return nil
}

func (a answer) snapshot(t testing.TB, status int) (s wire.Snapshot) {
	t.Helper()
	if a.StatusCode != status {
		t.Fatalf("status %d, want %d: %s", a.StatusCode, status, a.body)
	}
	if err := json.Unmarshal(a.body, &s); err != nil {
		t.Fatalf("%v in %s", err, a.body)
	}
	return s
}

func (a answer) fork(t testing.TB, status int) (f wire.Fork) {
	t.Helper()
	if a.StatusCode != status {
		t.Fatalf("status %d, want %d: %s", a.StatusCode, status, a.body)
	}
	if err := json.Unmarshal(a.body, &f); err != nil {
		t.Fatalf("%v in %s", err, a.body)
	}
	return f
}

func (a answer) wants(t testing.TB, status int, code string) {
	t.Helper()
	if e := a.error(t); a.StatusCode != status || e.Code != code {
		t.Errorf("got %d %s (%s), want %d %s", a.StatusCode, e.Code, e.Message, status, code)
	}
}

// TestSnapshots walks the life of a snapshot as OpenSandbox's SDKs do.
func TestSnapshots(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	path := "/v1/sandboxes/" + sb.ID + "/snapshots"
	for _, body := range []string{"", "{}", `{"name":"before import"}`} {
		a := w.do("POST", path, body)
		s := a.snapshot(t, http.StatusAccepted)
		if st := s.Status; st.State != "Creating" || st.Reason != "snapshot_accepted" || st.Message != "Snapshot creation accepted." ||
			st.LastTransitionAt.Before(s.CreatedAt) {
			t.Errorf("accepted as %+v", st)
		}
		if s.SandboxID != sb.ID || strings.Contains(body, "name") != (s.Name == "before import") ||
			a.Header.Get("Location") != "/v1/snapshots/"+s.ID {
			t.Errorf("%+v at %s", s, a.Header.Get("Location"))
		}
	}
	s := w.do("POST", path+"?wait=true", "{}").snapshot(t, http.StatusAccepted)
	if st := s.Status; st.State != "Ready" || st.Reason != "snapshot_runtime_ready" {
		t.Errorf("ready as %+v", st)
	}
	if got := w.do("GET", "/v1/snapshots/"+s.ID, "").snapshot(t, http.StatusOK); got.ID != s.ID || got.Status.State != "Ready" {
		t.Errorf("got %+v", got)
	}
	var in wire.SnapshotInspection
	if a := w.do("GET", "/v1/snapshots/"+s.ID+"/inspect", ""); json.Unmarshal(a.body, &in) != nil || in.Image != "python:latest" ||
		in.Bytes != 7 || in.ID != s.ID {
		t.Errorf("inspect: %s", a.body)
	}
	for query, want := range map[string]int{
		"": 4, "?state=Ready": 1, "?state=creating": 3, "?sandboxId=" + sb.ID: 4, "?sandboxId=no": 0, "?name=before%20import": 1,
		"?pageSize=3&page=2": 1, "?page=9": 0,
	} {
		var l wire.SnapshotList
		a := w.do("GET", "/v1/snapshots"+query, "", "X-Lenient", "1")
		if err := json.Unmarshal(a.body, &l); err != nil || len(l.Items) != want || l.Items == nil {
			t.Errorf("list %s: %d items, want %d: %s", query, len(l.Items), want, a.body)
		}
	}
	// Restored: the entrypoint may be left out, the image is not named again.
	a := w.do("POST", "/v1/sandboxes", `{"snapshotId":"`+s.ID+`","resourceLimits":{"cpu":"1","memory":"512Mi"}}`)
	if a.StatusCode != http.StatusAccepted {
		t.Fatalf("restore: %d %s", a.StatusCode, a.body)
	}
	got := w.do("GET", "/v1/sandboxes/"+a.sandbox(t).ID, "").sandbox(t)
	if got.Image != nil || got.SnapshotID != s.ID || got.Sandboxd.ImageName != "python:latest" ||
		strings.Join(got.Entrypoint, " ") != "tail -f /dev/null" {
		t.Errorf("restored as %+v", got)
	}
	if a := w.do("DELETE", "/v1/snapshots/"+s.ID, ""); a.StatusCode != http.StatusNoContent || len(a.body) > 0 {
		t.Errorf("delete: %d %s", a.StatusCode, a.body)
	}
	w.do("GET", "/v1/snapshots/"+s.ID, "").wants(t, 404, "SNAPSHOT::NOT_FOUND")
	w.do("DELETE", "/v1/snapshots/"+s.ID, "").wants(t, 404, "SNAPSHOT::NOT_FOUND")
	w.do("POST", "/v1/sandboxes", `{"snapshotId":"`+s.ID+`"}`).wants(t, 404, "SNAPSHOT::NOT_FOUND")
}

// TestSnapshotsRefused: what is wrong with a request is said with the codes of
// OpenSandbox.
func TestSnapshotsRefused(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	path := "/v1/sandboxes/" + sb.ID + "/snapshots"
	for _, body := range []string{
		`{"name":""}`, `{"name":"a\u001bb"}`, `{"name":"` + strings.Repeat("x", 257) + `"}`, `{"name":7}`, `[`,
		`{"name":"snap-taaaaaaaaaaa"}`,
	} {
		w.do("POST", path, body, "X-Lenient", "1").wants(t, 400, "SANDBOX::INVALID_PARAMETER")
	}
	w.do("POST", "/v1/sandboxes/taaaaaaaaaaa/snapshots", "{}").wants(t, 404, "DOCKER::SANDBOX_NOT_FOUND")
	for _, state := range []record.State{record.Creating, record.Stopping} {
		w.set(sb.ID, func(r *record.Record) { r.State = state })
		w.do("POST", path, "{}").wants(t, 409, "SNAPSHOT::INVALID_SOURCE_STATE")
	}
	w.set(sb.ID, func(r *record.Record) { r.State = record.Deleting })
	w.do("POST", path, "{}").wants(t, 404, "DOCKER::SANDBOX_NOT_FOUND")
	for _, id := range []string{"x", "..%2f..", "%00"} {
		w.do("GET", "/v1/snapshots/"+id, "").wants(t, 404, "SNAPSHOT::NOT_FOUND")
	}
	w.do("POST", "/v1/sandboxes", `{"snapshotId":"a","image":{"uri":"python"}}`, "X-Lenient", "1").wants(t, 400,
		"SANDBOX::INVALID_PARAMETER")
	w.do("PUT", "/v1/snapshots", "{}").wants(t, 405, "GENERAL::METHOD_NOT_ALLOWED")
}

// TestSnapshotNames: names are for people, and no paths or options to anybody.
func TestSnapshotNames(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sandboxes/" + w.create().ID + "/snapshots"
	for _, bad := range []string{
		"../x", "..", ".", "a/b", "/", `a\\b`, "-rf", " x", "x ", "a..b", "\u0000", "a\nb", "snap-taaaaaaaaaaa",
		strings.Repeat("x", 257),
	} {
		w.do("POST", path, `{"name":"`+bad+`"}`, "X-Lenient", "1").wants(t, 400, "SANDBOX::INVALID_PARAMETER")
	}
	for _, good := range []string{"before import", "v1.2_rc-3 (all)", "vor dem Übergang", "2026-11-22"} {
		if s := w.do("POST", path, `{"name":"`+good+`"}`).snapshot(t, 202); s.Name != good {
			t.Errorf("%q became %q", good, s.Name)
		}
	}
}

// fakeDiffs finds three changes; against itself none, against a sandbox an error.
type fakeDiffs struct{}

func (fakeDiffs) Pack(_ context.Context, snapshot string, w io.Writer) error {
	_, err := io.WriteString(w, "files of "+snapshot)
	return err
}

func (fakeDiffs) Diff(_ context.Context, of, base string, layers []string, emit func(kind, path string) error) error {
	if len(layers) != 1 {
		return errs.New(errs.Internal, "layers %v", layers)
	}
	if of == base {
		return nil
	}
	for _, c := range [][2]string{{"C", "/etc"}, {"A", "/etc/a\xffb"}, {"D", "/x<y"}} {
		if err := emit(c[0], c[1]); err != nil {
			return err
		}
	}
	if record.IsID(base) {
		return errs.New(errs.Exhausted, "that is where this ends")
	}
	return nil
}

func TestDiff(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	s := w.do("POST", "/v1/sandboxes/"+sb.ID+"/snapshots?wait=true", `{"name":"one"}`).snapshot(t, 202)
	const changes = `{"kind":"C","path":"/etc"}` + "\n" + `{"kind":"A","path":"/etc/a\ufffdb"}` + "\n" + `{"kind":"D","path":"/x<y"}` + "\n"
	want := strings.ReplaceAll(changes, `\ufffd`, "\uFFFD")
	for _, q := range []string{"of=" + sb.ID, "of=" + s.ID, "of=" + sb.ID + "&base=" + s.ID} {
		if a := w.do("GET", "/v1/diff?"+q, ""); a.StatusCode != 200 || string(a.body) != want {
			t.Errorf("%s: %d %s", q, a.StatusCode, a.body)
		}
	}
	if a := w.do("GET", "/v1/diff?of="+s.ID+"&base="+s.ID, ""); a.StatusCode != 200 || len(a.body) > 0 {
		t.Errorf("no difference: %d %q", a.StatusCode, a.body)
	}
	if a := w.do("GET", "/v1/diff?of="+s.ID+"&base="+sb.ID, ""); a.StatusCode != 200 ||
		!strings.HasSuffix(string(a.body), `{"error":{"code":"SANDBOX::CAPACITY_EXCEEDED","message":"that is where this ends"}}`+"\n") {
		t.Errorf("a late error: %d %q", a.StatusCode, a.body)
	}
	other := w.create()
	w.set(other.ID, func(r *record.Record) { r.Spec.Image.Layers = []string{"sha256:other"} })
	w.do("GET", "/v1/diff?of="+sb.ID+"&base="+other.ID, "").wants(t, 400, "SANDBOX::INVALID_PARAMETER")
	w.do("GET", "/v1/diff", "", "X-Lenient", "1").wants(t, 400, "SANDBOX::INVALID_PARAMETER")
	w.do("GET", "/v1/diff?of=nobody", "").wants(t, 404, "DOCKER::SANDBOX_NOT_FOUND")
	w.do("GET", "/v1/diff?of="+sb.ID+"&base=snap-taaaaaaaaaaa", "").wants(t, 404, "SNAPSHOT::NOT_FOUND")
	w.set(other.ID, func(r *record.Record) { r.State = record.Creating })
	w.do("GET", "/v1/diff?of="+other.ID, "").wants(t, 409, "SANDBOX::INVALID_STATE")
	fresh := w.do("POST", "/v1/sandboxes/"+w.create().ID+"/snapshots", "").snapshot(t, 202)
	w.do("GET", "/v1/diff?of="+fresh.ID, "").wants(t, 409, "SNAPSHOT::NOT_READY")
}

func TestStartAndStop(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sandboxes/" + w.create().ID
	w.do("POST", path+"/start", "").wants(t, 409, "SANDBOX::INVALID_STATE")
	for _, bad := range []string{"-1", "61", "x"} {
		w.do("POST", path+"/stop?grace="+bad, "", "X-Lenient", "1").wants(t, 400, "SANDBOX::INVALID_PARAMETER")
	}
	if a := w.do("POST", path+"/stop", ""); a.StatusCode != 202 || len(a.body) > 0 {
		t.Errorf("stop: %d %s", a.StatusCode, a.body)
	}
	if sb := w.do("GET", path, "").sandbox(t); sb.Status.State != wire.Terminated || sb.Status.Reason != "stopped" {
		t.Errorf("stopped: %+v", sb.Status)
	}
	w.do("POST", path+"/stop", "").wants(t, 409, "SANDBOX::INVALID_STATE")
	if a := w.do("POST", path+"/start", ""); a.StatusCode != 202 || a.sandbox(t).Status.State != wire.Pending {
		t.Errorf("start: %d %s", a.StatusCode, a.body)
	}
	w.set(strings.TrimPrefix(path, "/v1/sandboxes/"), func(r *record.Record) { r.State = record.Ended })
	if a := w.do("POST", path+"/start?wait=true", ""); a.StatusCode != 202 || a.sandbox(t).Status.State != wire.Running ||
		a.Header.Get("Server-Timing") == "" {
		t.Errorf("start and wait: %d %s", a.StatusCode, a.body)
	}
}

// TestUniqueSnapshotNames: OpenSandbox's clients give a name as often as they like. Who asks
// for a unique one, as sandboxctl does, gets it once.
func TestUniqueSnapshotNames(t *testing.T) {
	w := newWorld(t)
	path := "/v1/sandboxes/" + w.create().ID + "/snapshots"
	for _, c := range []struct {
		query, body string
		want        int
		code        string
	}{
		{"", `{"name":"a"}`, 202, ""},
		{"", `{"name":"a"}`, 202, ""},
		{"?unique=false", `{"name":"a"}`, 202, ""},
		{"?unique=true", `{"name":"a"}`, 409, "SNAPSHOT::ALREADY_EXISTS"},
		{"?unique=true", `{"name":"b"}`, 202, ""},
		{"?unique=true&wait=true", `{"name":"b"}`, 409, "SNAPSHOT::ALREADY_EXISTS"},
		{"?unique=true", "", 202, ""},
		{"?unique=true", "{}", 202, ""}, // no name is no name
		{"?unique=maybe", `{"name":"c"}`, 400, "SANDBOX::INVALID_PARAMETER"},
	} {
		a := w.do("POST", path+c.query, c.body)
		if a.StatusCode != c.want || c.code != "" && a.error(t).Code != c.code {
			t.Errorf("%s %s: %s %s, want %d", c.query, c.body, a.Status, a.body, c.want)
		}
	}
}

// TestCommit: the files of a sandbox become an image, and nothing else is left of it.
func TestCommit(t *testing.T) {
	w := newWorld(t)
	at := "/v1/sandboxes/" + w.create().ID + "/commit"
	for _, c := range []struct {
		body   string
		status int
		says   string
	}{
		{`{"name":"mine:1"}`, 200, `{"name":"mine","tag":"1"`},
		{`{"name":"refused"}`, 503, "refused with files of snap-"},
		{`{"name":"Bad"}`, 400, "Bad"},
		{`{}`, 400, "name"},
	} {
		if a := w.do("POST", at, c.body); a.StatusCode != c.status || !strings.Contains(string(a.body), c.says) {
			t.Errorf("%s: %d %s", c.body, a.StatusCode, a.body)
		}
		if len(w.snaps) > 0 {
			t.Errorf("%s leaves %d snapshots", c.body, len(w.snaps))
		}
	}
	// Of a snapshot, which stays and is in use meanwhile.
	snap := w.do("POST", strings.TrimSuffix(at, "commit")+"snapshots?wait=true", `{"name":"before"}`).snapshot(t, 202).ID
	of := "/v1/snapshots/" + snap + "/commit"
	if a := w.do("POST", of, `{"name":"mine:2"}`); a.StatusCode != 200 || !strings.Contains(string(a.body), `{"name":"mine","tag":"2"`) {
		t.Errorf("of a snapshot: %d %s", a.StatusCode, a.body)
	}
	if a := w.do("POST", of, `{"name":"refused"}`); a.StatusCode != 503 || !strings.Contains(string(a.body), "files of "+snap) {
		t.Errorf("of a snapshot: %d %s", a.StatusCode, a.body)
	}
	if len(w.snaps) != 1 || w.used[snap] != 0 {
		t.Errorf("%d snapshots are left, %d use it", len(w.snaps), w.used[snap])
	}
	w.do("POST", of, `{"name":"Bad"}`).wants(t, 400, "SANDBOX::INVALID_PARAMETER")
	w.do("POST", "/v1/snapshots/nobody/commit", `{"name":"mine"}`).wants(t, 404, "SNAPSHOT::NOT_FOUND")
	w.snaps["half"] = record.Snapshot{ID: "half", State: record.SnapshotCreating}
	w.do("POST", "/v1/snapshots/half/commit", `{"name":"mine"}`).wants(t, 409, "SNAPSHOT::NOT_READY")
	clear(w.snaps)

	left, leave := context.WithCancel(t.Context())
	leave() // the client
	req := httptest.NewRequestWithContext(left, "POST", at, strings.NewReader(`{"name":"mine:1"}`))
	req.Header.Set(wire.HeaderAPIKey, testKey)
	w.s.ServeHTTP(httptest.NewRecorder(), req)
	if len(w.snaps) > 0 {
		t.Errorf("a client that leaves while the snapshot is taken leaves %d snapshots", len(w.snaps))
	}
	paused := w.create().ID
	w.set(paused, func(r *record.Record) { r.State = record.Stopping })
	if a := w.do("POST", "/v1/sandboxes/"+paused+"/commit", `{"name":"mine:1"}`); a.StatusCode != 409 {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
}
