package api

import (
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

type fakeSystem struct{ full bool }

func (fakeSystem) Info(context.Context) (wire.SystemInfo, error) {
	return wire.SystemInfo{
		Started: time.Now(), Kernel: "6.18", Pool: "btrfs-loop", Cgroups: "unified", Sandboxes: map[string]int{wire.Running: 2},
		NoSweep: "restored", Strays: []string{"tabcdefghijk"},
	}, nil
}

func (fakeSystem) DiskUsage(context.Context) (wire.DiskUsage, error) {
	return wire.DiskUsage{Images: []wire.ImageDisk{{Name: "base", Tag: "latest", Bytes: 1}}, Sandboxes: []wire.Disk{{
		ID:    "tabcdefghijk",
		State: wire.Running,
	}}, Snapshots: []wire.Disk{{ID: "snap-tabcdefghijk", State: wire.SnapshotReady}}, Volumes: []wire.VolumeDisk{{Name: "data"}}}, nil
}

func (fakeSystem) Drain(context.Context, bool) error { return nil }

func (f fakeSystem) Backup(context.Context) (io.ReadCloser, error) {
	if f.full {
		return nil, errs.New(errs.Unavailable, "no space is left")
	}
	return io.NopCloser(strings.NewReader("the state")), nil
}

func TestSystem(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.System = fakeSystem{} })
	for _, path := range []string{"/system/info", "/v1/system/df"} {
		if a := w.do("GET", path, ""); a.StatusCode != http.StatusOK {
			t.Errorf("%s: %d %s", path, a.StatusCode, a.body)
		}
	}
	if a := w.do("GET", "/system/info", ""); !strings.Contains(string(a.body), `"go":"go1.26"`) ||
		!strings.Contains(string(a.body), `"Running":2`) {
		t.Errorf("%s", a.body)
	}
	for path, status := range map[string]int{"/system": 404, "/system/": 404, "/system/other": 404, "/system/info/more": 404} {
		if a := w.do("GET", path, ""); a.StatusCode != status {
			t.Errorf("%s: %d", path, a.StatusCode)
		}
	}
	if a := w.do("POST", "/system/info", ""); a.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", a.StatusCode)
	}
}

// TestPrune removes what has ended, failed or is not used, and nothing else.
func TestPrune(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.System = fakeSystem{} })
	running, old, ended := w.create().ID, w.create().ID, w.create().ID
	hour := time.Now().Add(-time.Hour)
	for id, at := range map[string]time.Time{old: hour, ended: time.Now()} {
		w.set(id, func(r *record.Record) { r.State, r.Created = record.Ended, at })
	}
	w.snaps["ready"] = record.Snapshot{ID: "ready", State: record.SnapshotReady, Created: hour}
	w.snaps["new"] = record.Snapshot{ID: "new", State: record.SnapshotFailed, Created: time.Now()}
	w.snaps["bad"] = record.Snapshot{ID: "bad", State: record.SnapshotFailed, Created: hour}
	const layers = `"layers":["sha256:1"]`
	for _, c := range []struct {
		query  string
		status int
		says   string
	}{
		{"?all=maybe", 400, "true or false"},
		{"?volumes=x", 400, "true or false"},
		{"?until=yesterday", 400, "want a time"},
		{"?until=2026-01-02T03:04:05Z", 200, `{"sandboxes":[],"snapshots":[],"images":[],` + layers + `,"volumes":[],"bytesReclaimed":7}`},
		{
			"?until=" + time.Now().Add(-time.Minute).UTC().Format(time.RFC3339), 200,
			`{"sandboxes":["` + old + `"],"snapshots":["bad"],"images":[],` + layers + `,"volumes":[],"bytesReclaimed":7}`,
		},
		{
			"?all=true", 200,
			`{"sandboxes":["` + ended + `"],"snapshots":["new"],"images":["python:latest"],` + layers + `,"volumes":[],"bytesReclaimed":7}`,
		},
		{"", 200, `{"sandboxes":[],"snapshots":[],"images":[],` + layers + `,"volumes":[],"bytesReclaimed":7}`},
	} {
		if a := w.do("POST", "/v1/system/prune"+c.query, ""); a.StatusCode != c.status || !strings.Contains(string(a.body), c.says) {
			t.Errorf("%s: %d %s", c.query, a.StatusCode, a.body)
		}
	}
	if _, ok := w.recs[running]; !ok || len(w.recs) != 1 || len(w.snaps) != 1 {
		t.Errorf("%d sandboxes and %d snapshots are left", len(w.recs), len(w.snaps))
	}
	if _, err := w.volumes.Create(t.Context(), "spare", 0); err != nil {
		t.Fatal(err)
	}
	w.do("POST", "/v1/volumes/prune?all=x", "").wants(t, 400, "SANDBOX::INVALID_PARAMETER")
	for _, path := range []string{"/v1/system/prune?all=true&volumes=true", "/v1/volumes/prune", "/v1/volumes/prune?all=false"} {
		if a := w.do("POST", path, ""); a.StatusCode != 200 || !strings.Contains(string(a.body), `"volumes":[]`) {
			t.Errorf("%s removes a volume that has a name: %d %s", path, a.StatusCode, a.body)
		}
	}
	if a := w.do("POST", "/v1/volumes/prune?all=true", ""); !strings.Contains(string(a.body), `"volumes":["spare"]`) {
		t.Errorf("with all: %s", a.body)
	}
	// After an error the rest goes all the same.
	w.snaps["bad"] = record.Snapshot{ID: "bad", State: record.SnapshotFailed, Created: hour}
	last := w.create().ID
	w.set(last, func(r *record.Record) { r.State = record.Ended })
	w.snaps["used"] = record.Snapshot{ID: "used", State: record.SnapshotFailed, Created: hour}
	w.used["used"] = 1
	w.do("POST", "/v1/system/prune", "").wants(t, 409, "SANDBOX::INVALID_STATE")
	if _, ok := w.snaps["used"]; !ok || len(w.snaps) != 2 || len(w.recs) != 1 {
		t.Errorf("%d sandboxes and %d snapshots are left", len(w.recs), len(w.snaps))
	}
}

// fakeBackups has one backup, and fails if it is full.
type fakeBackups struct{ full bool }

func (fakeBackups) one() wire.Backup {
	return wire.Backup{
		Name: "sandboxd-t-h-000001-20261127T120000Z.tar.gz", Owner: "t-h", TakenAt: time.Unix(0, 0).UTC(), Verified: true, Whose: "own",
	}
}

func (f fakeBackups) List(context.Context) ([]wire.Backup, error) { return []wire.Backup{f.one()}, nil }

func (fakeBackups) Status() (wire.BackupStatus, error) {
	return wire.BackupStatus{Target: "/srv", Backup: wire.BackupRun{Error: "it was full"}}, nil
}

func (f fakeBackups) Now(ctx context.Context) (wire.Backup, error) {
	if f.full {
		return wire.Backup{}, errs.New(errs.Unavailable, "/srv is full")
	}
	return f.one(), ctx.Err()
}

func (f fakeBackups) Adopt(_ context.Context, names []string) ([]wire.Backup, error) {
	if f.full || len(names) > 1 {
		return nil, errs.New(errs.NotFound, "there is none")
	}
	return []wire.Backup{f.one()}, nil
}

func (f fakeBackups) Remove(_ context.Context, names []string) (wire.RemovedBackups, error) {
	if f.full {
		return wire.RemovedBackups{}, errs.New(errs.WrongState, "%s is of another host", names[0])
	}
	return wire.RemovedBackups{Items: []wire.Backup{f.one()}, Packs: 2}, nil
}

func (f fakeBackups) Check(_ context.Context, names []string, line func(wire.BackupCheckLine)) (wire.BackupCheck, error) {
	if len(names) > 1 {
		return wire.BackupCheck{}, errs.New(errs.NotFound, "there is none")
	}
	for range 1000 { // a few times a second is enough
		line(wire.BackupCheckLine{Progress: &wire.BackupCheck{Of: 2}})
	}
	line(wire.BackupCheckLine{Damage: &wire.BackupDamage{Backup: "b", Tree: "volume v", File: "f", Problem: "bad"}})
	if f.full {
		return wire.BackupCheck{}, errs.New(errs.Unavailable, "/srv is gone")
	}
	return wire.BackupCheck{Damaged: 1}, nil
}

func (f fakeBackups) Drill(ctx context.Context) (wire.BackupDrill, error) {
	if f.full {
		return wire.BackupDrill{}, errs.New(errs.Unavailable, "it is damaged")
	}
	return wire.BackupDrill{Backup: f.one(), Sandboxes: 3}, ctx.Err()
}

// TestBackups serves what the keeper of backups says.
func TestBackups(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Backups = fakeBackups{} })
	for _, c := range []struct {
		method, path string
		status       int
		says         string
	}{
		{"GET", "/system/backups", 200, `"items":[{"name":"sandboxd-t-h-000001-`},
		{"POST", "/system/backups", 201, `"verified":true`},
		{"GET", "/system/backups/status", 200, `"error":"it was full"`},
		{"POST", "/system/backups/status", 405, ""},
		{"POST", "/system/backups/drill", 200, `"sandboxes":3`},
	} {
		if a := w.do(c.method, "/v1"+c.path, ""); a.StatusCode != c.status || !strings.Contains(string(a.body), c.says) {
			t.Errorf("%s %s: %d %s", c.method, c.path, a.StatusCode, a.body)
		}
	}
	for body, status := range map[string]int{
		`{"all":true}`: 200, `{"names":["a"]}`: 200, `{"names":["a","b"]}`: 404, `{}`: 400, `{"names":["a"],"all":true}`: 400,
	} {
		if a := w.do("POST", "/v1/system/backups/adopt", body); a.StatusCode != status {
			t.Errorf("adopt %s: %d %s", body, a.StatusCode, a.body)
		}
	}
	for body, want := range map[string]string{
		`{"names":["a"]}`: `"packs":2`, `{"names":[]}`: "want the names", `{}`: "want the names", `{"names":"a"}`: "names",
	} {
		if a := w.do("POST", "/v1/system/backups/remove", body); !strings.Contains(string(a.body), want) || a.StatusCode/100 == 5 {
			t.Errorf("remove %s: %d %s", body, a.StatusCode, a.body)
		}
	}
	for body, status := range map[string]int{`{"names":["a","b"]}`: 404, `{}`: 400, `{"names":["a"],"all":true}`: 400} {
		if a := w.do("POST", "/v1/system/backups/check", body); a.StatusCode != status {
			t.Errorf("check %s: %d %s", body, a.StatusCode, a.body)
		}
	}
	checks := func(last string) {
		t.Helper()
		a := w.do("POST", "/v1/system/backups/check", `{"all":true}`)
		lines := strings.Split(strings.TrimSpace(string(a.body)), "\n")
		if a.StatusCode != 200 || len(lines) < 3 || len(lines) > 100 || !strings.Contains(string(a.body), `"file":"f"`) ||
			!strings.Contains(lines[len(lines)-1], last) {
			t.Errorf("check: %d, %d lines, %.500s", a.StatusCode, len(lines), a.body)
		}
	}
	checks(`{"report":{"backups":0,`)
	w = newWorld(t, func(c *Config) { c.Backups = fakeBackups{true} })
	checks(`/srv is gone`)
	if a := w.do("POST", "/v1/system/backups/remove", `{"names":["a"]}`); a.StatusCode != 409 || !strings.Contains(string(a.body), "of another host") {
		t.Errorf("a foreign one: %d %s", a.StatusCode, a.body)
	}
	if a := w.do("POST", "/v1/system/backups", ""); a.StatusCode != 503 || !strings.Contains(string(a.body), "/srv is full") {
		t.Errorf("a full target: %d %s", a.StatusCode, a.body)
	}
	if a := w.do("POST", "/v1/system/backups/drill", ""); a.StatusCode != 503 || !strings.Contains(string(a.body), "it is damaged") {
		t.Errorf("a drill that failed: %d %s", a.StatusCode, a.body)
	}
	w = newWorld(t)
	if a := w.do("GET", "/v1/system/backups", ""); a.StatusCode != 400 {
		t.Errorf("a daemon without them: %d %s", a.StatusCode, a.body)
	}
}

// overUnix returns a client of the server at socket.
func overUnix(t *testing.T, socket string) *http.Client {
	c := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// TestBackup is given over the Unix socket, and not to who has but a key.
func TestBackup(t *testing.T) {
	for _, full := range []bool{false, true} {
		w := newWorld(t, func(c *Config) { c.System = fakeSystem{full} })
		if a := w.do("GET", "/system/backup", ""); a.StatusCode != http.StatusForbidden || strings.Contains(string(a.body), `the state"`) {
			t.Errorf("by TCP, with a key: %d %s", a.StatusCode, a.body)
		}
		socket := filepath.Join(t.TempDir(), "s")
		w.serve("unix", socket, auth.Listener{})
		resp, err := overUnix(t, socket).Get("http://sandboxd/v1/system/backup")
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		validate(t, resp.Request, "", resp, body)
		if !full && (resp.StatusCode != http.StatusOK || string(body) != "the state") ||
			full && resp.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("full %v: %d %s", full, resp.StatusCode, body)
		}
	}
}

func TestNoSystem(t *testing.T) {
	w := newWorld(t)
	for _, path := range []string{"/system/info", "/system/df"} {
		if a := w.do("GET", path, ""); a.StatusCode != http.StatusNotImplemented {
			t.Errorf("%s: %d", path, a.StatusCode)
		}
	}
}
