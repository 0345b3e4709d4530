package e2e_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// counting counts in memory and in a file, in lockstep, and says when they come apart. It
// answers over HTTP on port 8000 what it has counted. It holds a file that it has removed.
const counting = `
import http.server, json, os, threading, time
lock, n, wrong = threading.Lock(), 0, ''
fill = os.urandom(16 << 20)
gone = open('/srv/gone', 'w+'); gone.write('still here'); gone.flush(); os.remove('/srv/gone')
def put():
    with open('/srv/n', 'r+') as f: f.write('%12d' % n)
open('/srv/n', 'w').close(); put()
def count():
    global n, wrong
    while not wrong:
        with lock, open('/srv/n') as f:
            on_disk = int(f.read())
            if on_disk != n: wrong = 'memory has %d, and the disk %d' % (n, on_disk)
            n += 1; put()
        time.sleep(0.002)
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def do_GET(self):
        gone.seek(0)
        with lock: text = json.dumps({'n': n, 'wrong': wrong, 'sum': hash(fill), 'env': os.environ.get('WHO'), 'gone': gone.read()})
        self.send_response(200); self.end_headers(); self.wfile.write(text.encode())
threading.Thread(target=count, daemon=True).start()
http.server.ThreadingHTTPServer(('', 8000), Handler).serve_forever()
`

// counted is what counting answers.
type counted struct {
	N     int    `json:"n"`
	Wrong string `json:"wrong"`
	Sum   int64  `json:"sum"`
	Env   string `json:"env"`
	Gone  string `json:"gone"`
}

func (h host) counted(id string) (c counted, err error) {
	resp, err := http.Get("http://" + h.TCP + "/v1/sandboxes/" + id + "/proxy/8000/")
	if err != nil {
		return c, err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&c); err != nil {
		return c, fmt.Errorf("%s: %w", resp.Status, err)
	}
	if c.Wrong != "" {
		err = fmt.Errorf("sandbox %s: %s", id, c.Wrong)
	}
	return c, err
}

// countsOn waits until a sandbox has counted on from what was counted before.
func (h host) countsOn(t *testing.T, id string, from counted) (now counted) {
	t.Helper()
	eventually(t, patience, func() (err error) {
		now, err = h.counted(id)
		if err == nil && now.N <= from.N {
			err = fmt.Errorf("sandbox %s has counted to %d, and before to %d", id, now.N, from.N)
		}
		return err
	})
	if from.Sum != 0 && (now.Sum != from.Sum || now.Gone != "still here") {
		t.Errorf("sandbox %s has other memory than before: %+v and %+v", id, now, from)
	}
	return now
}

// identity is what differs between copies.
func (h host) identity(t *testing.T, id string) map[string]string {
	t.Helper()
	out, err := h.exec(t.Context(), id, "python3", "-c", `
import json, os, socket, uuid
read = lambda p: open(p).read().strip() if os.path.exists(p) else ''
print(json.dumps({
  'hostname': socket.gethostname(), 'env': os.environ.get('WHO', ''), 'machine': read('/etc/machine-id'),
  'generation': read('/run/sandboxd/generation'), 'urandom': os.urandom(16).hex(), 'uuid': str(uuid.uuid4()),
}))`)
	if err != nil {
		t.Fatal(err)
	}
	var found map[string]string
	if err := json.Unmarshal([]byte(out), &found); err != nil {
		t.Fatalf("%v: %q", err, out)
	}
	return found
}

// TestMemorySnapshot: programs go on in sandboxes that begin with a memory snapshot, with a disk
// of the same instant, and each sandbox is one of its own.
func TestMemorySnapshot(t *testing.T) {
	h := newHost(t, daemontest.Options{Pool: pool.BtrfsLoop})
	daemontest.Image(t, h.Daemon, "python")
	ctx, began := t.Context(), time.Now()
	r := spec("runsc", "python3", "-c", counting)
	r.Image.URI, r.Extensions[wire.ExtName], r.Env = "python", "origin", map[string]*string{"WHO": new("origin")}
	origin := h.create(t, r)
	before := h.countsOn(t, origin.ID, counted{})
	snap, err := h.api.Snapshots().CreateWithMemory(ctx, "origin", "warm", true)
	if err != nil || snap.Status.State != wire.SnapshotReady {
		t.Fatalf("%+v, %v", snap, err)
	}
	if line := h.logged(t, began, "snapshot="+snap.ID); !strings.Contains(fmt.Sprint(line), "stood=") {
		t.Error(line)
	}
	h.countsOn(t, origin.ID, before)
	is, err := h.api.Snapshots().Inspect(ctx, "warm")
	if err != nil || is.Memory == nil || is.Memory.Bytes < 16<<20 || len(is.Memory.Build) != 64 {
		t.Errorf("%+v, %v", is.Memory, err)
	}

	// Two at once, with names of their own, after the daemon was killed.
	h.Kill()
	h.Start()
	copies := make([]wire.Sandbox, 2)
	var wg sync.WaitGroup
	for i := range copies {
		wg.Go(func() { copies[i] = h.create(t, recalled(snap.ID, fmt.Sprint("copy", i))) })
	}
	wg.Wait()
	first := h.identity(t, origin.ID)
	seen := map[string]bool{first["urandom"]: true, first["uuid"]: true, first["machine"]: true}
	for i, c := range copies {
		if now := h.countsOn(t, c.ID, before); now.Env != "origin" {
			t.Errorf("the environment of what runs became %q", now.Env)
		}
		got := h.identity(t, c.ID)
		if name := fmt.Sprint("copy", i); got["hostname"] != name || got["env"] != name {
			t.Errorf("%s is %v", name, got)
		}
		for _, k := range []string{"machine", "generation", "urandom", "uuid"} {
			if v := got[k]; v != "" && seen[v] || v == "" && k != "machine" {
				t.Errorf("copy %d has the %s of another: %q", i, k, v)
			}
			seen[got[k]] = true
		}
	}
	h.countsOn(t, origin.ID, before)

	// A copy of a copy, when all others are gone.
	again, err := h.api.Snapshots().CreateWithMemory(ctx, copies[0].ID, "", true)
	if err != nil || again.Status.State != wire.SnapshotReady {
		t.Fatalf("%+v, %v", again, err)
	}
	for _, id := range []string{origin.ID, copies[0].ID, copies[1].ID} {
		h.deletes(t, id)
	}
	third := h.create(t, recalled(again.ID, "third"))
	h.countsOn(t, third.ID, before)

	// It starts as any other when it has ended: its entrypoint begins anew, on its own disk.
	if err := h.api.Stop(ctx, third.ID, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := h.api.Restart(ctx, third.ID, true); err != nil {
		t.Fatal(err)
	}
	if now := h.countsOn(t, third.ID, counted{}); now.Sum == before.Sum || now.Env != "third" {
		t.Errorf("started anew it has %+v", now)
	}

	// The files alone, on the other runtime.
	cold := recalled(again.ID, "cold")
	delete(cold.Extensions, wire.ExtMemory)
	cold.Extensions[wire.ExtRuntime], cold.Extensions[wire.ExtIdle] = "runc", "true"
	h.answers(t, h.create(t, cold).ID)

	h.damaged(t, again.ID)
	h.refusesMemory(t, again.ID)
}

// recalled is a sandbox that begins with the memory of a snapshot.
func recalled(snap, name string) wire.CreateRequest {
	return wire.CreateRequest{
		SnapshotID: snap, Extensions: map[string]string{wire.ExtMemory: "true", wire.ExtName: name}, Env: map[string]*string{"WHO": &name},
	}
}

// damaged: an image with one other byte starts nothing.
func (h host) damaged(t *testing.T, snap string) {
	t.Helper()
	path := filepath.Join(h.StateDir, "pool", pool.MemoryDir, snap, "pages.img")
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	flip := func() {
		if _, err := f.ReadAt(b[:], 5<<20); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 1
		if _, err := f.WriteAt(b[:], 5<<20); err != nil {
			t.Fatal(err)
		}
	}
	flip()
	defer flip()
	sb, err := h.api.Create(t.Context(), recalled(snap, "damaged"), true)
	if err != nil || sb.Status.State != wire.Failed || !strings.Contains(sb.Status.Message, "memory image of snapshot "+snap+" is "+
		"damaged") {
		t.Errorf("%+v, %v", sb.Status, err)
	}
	h.deletes(t, sb.ID)
}

// refusesMemory: what cannot be restored is refused at once.
func (h host) refusesMemory(t *testing.T, snap string) {
	t.Helper()
	ctx := t.Context()
	for words, change := range map[string]func(*wire.CreateRequest){
		"need runtime runsc":         func(r *wire.CreateRequest) { r.Extensions[wire.ExtRuntime] = "runc" },
		"differ: entrypoint":         func(r *wire.CreateRequest) { r.Entrypoint = []string{"sleep", "1"} },
		"differ: limit of processes": func(r *wire.CreateRequest) { r.ResourceLimits = map[string]string{"pids": "77"} },
		"exclude each other":         func(r *wire.CreateRequest) { r.Extensions[wire.ExtImageCommand] = "true" },
		"needs a snapshot with memory": func(r *wire.CreateRequest) {
			r.SnapshotID, r.Image, r.Entrypoint = "", &wire.Image{URI: "base"}, []string{"true"}
		},
	} {
		r := recalled(snap, "refused")
		change(&r)
		if sb, err := h.api.Create(ctx, r, true); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("want %q: %+v, %v", words, sb, err)
		}
	}
	runc := h.create(t, spec("runc"))
	if _, err := h.api.Snapshots().CreateWithMemory(ctx, runc.ID, "", true); !errs.Is(err, errs.Unsupported) {
		t.Errorf("the memory of runc: %v", err)
	}
	gvisor := h.create(t, spec("runsc"))
	if err := h.api.Pause(ctx, gvisor.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := h.api.Snapshots().CreateWithMemory(ctx, gvisor.ID, "", true); !errs.Is(err, errs.WrongState) {
		t.Errorf("the memory of a paused sandbox: %v", err)
	}
}

// filling keeps 100 MiB that do not compress, answers over HTTP, and has no file of it.
const filling = `
import http.server, os
fill = os.urandom(100 << 20)
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b'%d' % len(fill))
http.server.ThreadingHTTPServer(('', 8000), Handler).serve_forever()
`

// TestMemoryAtLimit: a sandbox that uses most of its memory lives on after a snapshot of it. While
// the image is written, in the kernel's cache, its limit is higher by at least the image; afterwards
// it is the old one.
func TestMemoryAtLimit(t *testing.T) {
	h := newHost(t, daemontest.Options{Pool: pool.BtrfsLoop})
	daemontest.Image(t, h.Daemon, "python")
	r := spec("runsc", "python3", "-c", filling)
	r.Image.URI, r.ResourceLimits["memory"] = "python", "128Mi"
	sb := h.create(t, r)
	full := func() {
		t.Helper()
		eventually(t, patience, func() error {
			resp, err := http.Get("http://" + h.TCP + "/v1/sandboxes/" + sb.ID + "/proxy/8000/")
			if err == nil {
				resp.Body.Close()
				if resp.StatusCode != http.StatusOK {
					err = errors.New(resp.Status)
				}
			}
			return err
		})
	}
	full()
	i, err := h.api.Inspect(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	limit := memoryLimit(t, i.Host["cgroup"])
	for range 2 {
		var snap wire.Snapshot
		taken, widest := make(chan struct{}), limit
		go func() {
			defer close(taken)
			snap, err = h.api.Snapshots().CreateWithMemory(t.Context(), sb.ID, "", true)
		}()
		for wait := true; wait; {
			select {
			case <-taken:
				wait = false
			default:
				widest = max(widest, memoryLimit(t, i.Host["cgroup"]))
			}
		}
		if err != nil || snap.Status.State != wire.SnapshotReady {
			t.Fatalf("%+v, %v", snap, err)
		}
		if is, err := h.api.Snapshots().Inspect(t.Context(), snap.ID); err != nil || is.Memory.Bytes < 100<<20 {
			t.Errorf("%+v, %v", is.Memory, err)
		}
		if widest < limit+(100<<20) {
			t.Errorf("while the image was written its limit was %d, and before %d", widest, limit)
		}
		if now := memoryLimit(t, i.Host["cgroup"]); now != limit {
			t.Errorf("its limit is %d, and was %d", now, limit)
		}
		full()
	}
}

// TestMemoryFileGone: if a file of a volume that a program has open was removed after the snapshot,
// the restore fails and names it. When it is there again, the restore succeeds.
func TestMemoryFileGone(t *testing.T) {
	h := newHost(t, daemontest.Options{Pool: pool.BtrfsLoop})
	ctx := t.Context()
	r := spec("runsc", "sh", "-c", "echo one >/data/held; exec 3</data/held; echo open >/srv/state; exec sleep 1000")
	r.Volumes = []wire.VolumeMount{{Name: "v", MountPath: "/data", PVC: &wire.PVC{ClaimName: "shared"}}}
	origin := h.create(t, r)
	eventually(t, patience, func() error {
		_, err := h.exec(ctx, origin.ID, "grep", "open", "/srv/state")
		return err
	})
	snap, err := h.api.Snapshots().CreateWithMemory(ctx, origin.ID, "", true)
	if err != nil || snap.Status.State != wire.SnapshotReady {
		t.Fatalf("%+v, %v", snap, err)
	}
	if _, err := h.exec(ctx, origin.ID, "rm", "/data/held"); err != nil {
		t.Fatal(err)
	}
	sb, err := h.api.Create(ctx, recalled(snap.ID, "lacking"), true)
	if err != nil || sb.Status.State != wire.Failed || !strings.Contains(sb.Status.Message, `has "/data/held" open, and that file is gone`) {
		t.Errorf("%+v, %v", sb.Status, err)
	}
	if _, err := h.exec(ctx, origin.ID, "sh", "-c", "echo two >/data/held"); err != nil {
		t.Fatal(err)
	}
	h.answers(t, h.create(t, recalled(snap.ID, "whole")).ID)
}
