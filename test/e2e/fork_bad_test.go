package e2e_test

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// forkModes are what is copied on each runtime in these tests.
var forkModes = map[string]string{"runc": wire.ForkFiles, "runsc": wire.ForkMemory}

// forkPoints are the steps of a fork at which these tests kill the daemon.
func forkPoints(runtime string) []string {
	switch {
	case everything && runtime == "runc":
		return []string{"snapshot:take", "after:store:insert", "after:store:insert:2", "store:snapshot:deleting"}
	case everything:
		return []string{"snapshot:checkpoint", "snapshot:memory", "after:store:insert", "up:memory", "store:snapshot:deleting"}
	case runtime == "runc":
		return []string{"after:store:insert:2"}
	}
	return []string{"snapshot:checkpoint", "after:store:insert"}
}

// noSnapshots waits until the host has no snapshot, whatever its state.
func (h host) noSnapshots(t *testing.T, but ...string) {
	t.Helper()
	eventually(t, patience, func() error {
		all, err := h.api.Snapshots().List(t.Context(), "")
		all = slices.DeleteFunc(all, func(s wire.Snapshot) bool { return slices.Contains(but, s.ID) })
		if err == nil && len(all) > 0 {
			err = fmt.Errorf("%d snapshots are left; the first is %+v", len(all), all[0].Status)
		}
		return err
	})
}

// TestForkKilled: a daemon that dies in the middle of a fork leaves no snapshot and no half copies:
// each copy runs, or says that it failed and holds nothing.
func TestForkKilled(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		origin := h.create(t, spec(runtime))
		before := h.holds()
		for _, point := range forkPoints(runtime) {
			t.Run(runtime+"/"+point, func(t *testing.T) {
				h.Stop()
				if err := h.StartArmed(point + "=kill"); err != nil {
					t.Fatal(err)
				}
				r := wire.ForkRequest{Count: 2, Mode: forkModes[runtime], Timeout: new(int64(600))}
				if f, err := h.api.Snapshots().Fork(t.Context(), origin.ID, r, true); err == nil {
					t.Fatalf("a daemon that died answered %+v", f)
				}
				<-h.Ended()
				if err := h.TryStart(); err != nil {
					t.Fatal(err)
				}
				h.noSnapshots(t)
				h.answers(t, origin.ID)
				all, err := h.api.List(t.Context(), client.Filter{})
				if err != nil {
					t.Fatal(err)
				}
				nothing := func(id string) error {
					for _, line := range h.holds() {
						if strings.Contains(line, id) && !strings.Contains(line, "/pool/") { // what failed keeps its disk
							return fmt.Errorf("copy %s, which failed, holds %s", id, line)
						}
					}
					return nil
				}
				for _, sb := range all {
					switch {
					case sb.ID == origin.ID:
					case sb.Status.State == wire.Running:
						h.answers(t, sb.ID)
					case sb.Status.State != wire.Failed:
						t.Errorf("copy %s is %+v", sb.ID, sb.Status)
					default:
						settles(t, func() error { return nothing(sb.ID) }) // the kernel removes links late
						f, err := h.api.Snapshots().GetFork(t.Context(), sb.Sandboxd.Fork.ID)
						if err != nil || f.Status.State != wire.ForkFailed || f.Status.Message == "" || f.SandboxID != origin.ID {
							t.Errorf("the fork of copy %s is %+v, %v", sb.ID, f, err)
						}
					}
				}
				if point == "store:snapshot:deleting" && len(all) != 3 {
					t.Errorf("%d sandboxes are left of a fork that was made", len(all)-1)
				}
				f := h.fork(t, origin.ID, 1, forkModes[runtime]) // the origin can be copied again
				h.answers(t, f.Sandboxes[0].ID)
				h.deleteAll(t, origin.ID)
				h.holdsOnly(t, before)
			})
		}
		h.deletes(t, origin.ID)
		h.holdsNothingOf(t, origin.ID)
	}
}

// TestForkIdempotency asks for one fork many times: of one daemon, of one that died before it
// answered, of the next one, and when the first copy is gone.
func TestForkIdempotency(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: runtime}
			origin := h.create(t, spec(runtime)).ID
			body := fmt.Sprintf(`{"count":2,"mode":%q,"timeout":600}`, forkModes[runtime])
			ask := func(key, body string) (answer, wire.Fork) {
				t.Helper()
				a := l.request("POST", "/v1/sandboxes/"+origin+"/fork?wait=true", strings.NewReader(body), "Idempotency-Key", key)
				var f wire.Fork
				if err := json.Unmarshal([]byte(a.body), &f); err != nil {
					t.Fatal(err)
				}
				return a, f
			}
			replayed := func(what, key string, want wire.Fork) {
				t.Helper()
				a, f := ask(key, body)
				if a.status != 202 || a.header.Get("Idempotency-Replayed") != "true" || f.ID != want.ID ||
					!slices.Equal(f.Sandboxes, want.Sandboxes) {
					t.Errorf("%s: %d %s, want %+v", what, a.status, a.body, want)
				}
			}
			refused := func(what, key, body, code string) {
				t.Helper()
				if a, _ := ask(key, body); a.status != 409 || !strings.Contains(a.body, code) {
					t.Errorf("%s: %d %s", what, a.status, a.body)
				}
			}
			first, lost := rand.Text(), rand.Text() // notes outlive a run of this test
			a, made := ask(first, body)
			if a.status != 202 || a.header.Get("Idempotency-Replayed") != "" || made.Status.State != wire.ForkReady ||
				len(made.Sandboxes) != 2 {
				t.Fatalf("%d %s", a.status, a.body)
			}
			replayed("again", first, made)

			h.Stop()
			if err := h.StartArmed("after:store:insert=kill"); err != nil {
				t.Fatal(err)
			}
			replayed("after a restart", first, made)
			path := "/v1/sandboxes/" + origin + "/fork?wait=true"
			if a, err := l.try("POST", path, strings.NewReader(body), "Idempotency-Key", lost); err == nil {
				t.Fatalf("a daemon that died answered %d %s", a.status, a.body)
			}
			<-h.Ended()
			if err := h.TryStart(); err != nil {
				t.Fatal(err)
			}
			replayed("after a death", first, made)
			a, half := ask(lost, body)
			if a.status != 202 || a.header.Get("Idempotency-Replayed") != "true" || half.Status.State != wire.ForkFailed ||
				len(half.Sandboxes) != 1 {
				t.Errorf("whose answer was lost: %d %s", a.status, a.body)
			}
			if all := strings.Fields(l.ok("ps", "-a", "-q")); len(all) != 4 {
				t.Errorf("there are %q", all)
			}
			refused("another body", first, strings.Replace(body, `"count":2`, `"count":3`, 1), "IDEMPOTENCY_KEY_REUSED")
			l.ok("rm", "-f", made.Sandboxes[0].ID)
			refused("without the first copy", first, body, "IDEMPOTENCY_KEY_SPENT")
			h.deleteAll(t)
		})
	}
}

// TestForkOfFork: a copy of a copy of a copy goes on with the memory of the first one, on a disk of
// the same instant, and all of them can be deleted in any order.
func TestForkOfFork(t *testing.T) {
	h := newHost(t, daemontest.Options{Pool: pool.BtrfsLoop})
	daemontest.Image(t, h.Daemon, "python")
	depth := 5
	if everything {
		depth = 50
	}
	r := spec("runsc", "python3", "-c", counting)
	r.Image.URI = "python"
	r.Env = map[string]*string{"WHO": new("origin")}
	origin := h.create(t, r)
	before := h.holds()
	last, counted := origin.ID, h.countsOn(t, origin.ID, counted{})
	var alive []string
	for i := range depth {
		f := h.fork(t, last, 1, wire.ForkMemory)
		last = f.Sandboxes[0].ID
		counted = h.countsOn(t, last, counted)
		alive = append(alive, last)
		if len(alive) > 5 { // one in the middle goes, with copies of it on both sides
			gone := i % 4
			h.deletes(t, alive[gone])
			alive = slices.Delete(alive, gone, gone+1)
		}
	}
	h.noSnapshots(t)
	for _, at := range []int{2, 0, 2, 1, 0} { // the newest last but one
		h.deletes(t, alive[at])
		alive = slices.Delete(alive, at, at+1)
		for _, id := range alive {
			h.countsOn(t, id, counted)
		}
		h.countsOn(t, origin.ID, counted)
	}
	h.holdsOnly(t, before)
	h.deletes(t, origin.ID)
	h.holdsNothingOf(t, origin.ID)
	h.memoryInUse(t)
}

// memoryInUse: a memory snapshot that is being taken, or that a sandbox is being created from,
// cannot be deleted; afterwards it can, once.
func (h host) memoryInUse(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	r := spec("runsc")
	r.Extensions[wire.ExtName] = "source"
	source := h.create(t, r)
	sentry := h.processOf(t, source.ID, "runsc-sandbox")
	refused := func(id, words string) {
		t.Helper()
		for range 2 {
			if err := h.api.Snapshots().Remove(ctx, id); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), words) {
				t.Errorf("delete a snapshot that is in use: %v, want %q", err, words)
			}
		}
	}
	if err := syscall.Kill(sentry, syscall.SIGSTOP); err != nil { // the checkpoint waits for it
		t.Fatal(err)
	}
	snap, err := h.api.Snapshots().CreateWithMemory(ctx, source.ID, "", false)
	if err == nil {
		refused(snap.ID, "is still being taken")
	}
	if kerr := syscall.Kill(sentry, syscall.SIGCONT); err != nil || kerr != nil {
		t.Fatal(err, kerr)
	}
	eventually(t, patience, func() error {
		now, err := h.api.Snapshots().Inspect(ctx, snap.ID)
		if err == nil && now.Status.State != wire.SnapshotReady {
			err = fmt.Errorf("the snapshot is %+v", now.Status)
		}
		return err
	})
	h.answers(t, source.ID)

	// The image is checked before anything is started; here that waits for a file.
	path := filepath.Join(h.StateDir, "pool", pool.MemoryDir, snap.ID, "pages.img")
	if err := os.Rename(path, path+".whole"); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	sb, err := h.api.Create(ctx, recalled(snap.ID, "copy"), false)
	if err != nil || sb.Status.State != wire.Pending {
		t.Fatalf("%+v, %v", sb.Status, err)
	}
	refused(snap.ID, "is in use")
	var w *os.File
	eventually(t, patience, func() (err error) { // there is a reader
		w, err = os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
		return err
	})
	refused(snap.ID, "is in use")
	w.Close()
	h.awaitState(t, sb.ID, wire.Failed, patience)
	if err := os.Rename(path+".whole", path); err != nil {
		t.Fatal(err)
	}
	h.deletes(t, sb.ID)
	h.answers(t, h.create(t, recalled(snap.ID, "copy")).ID)
	if err := h.api.Snapshots().Remove(ctx, snap.ID); err != nil {
		t.Error(err)
	}
	if err := h.api.Snapshots().Remove(ctx, snap.ID); !errs.Is(err, errs.NotFound) {
		t.Errorf("deleted twice: %v", err)
	}
	if _, err := h.api.Create(ctx, recalled(snap.ID, "late"), true); !errs.Is(err, errs.NotFound) {
		t.Errorf("created from a snapshot that is gone: %v", err)
	}
	if left, err := os.ReadDir(filepath.Join(h.StateDir, "pool", pool.MemoryDir)); err != nil || len(left) > 0 {
		t.Errorf("memory images %v are left, %v", left, err)
	}
}

// TestForkRace: a command runs in all copies at once; with --until-success one copy is left, also
// while the others still run.
func TestForkRace(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			l := &lab{host: h, T: t, runtime: runtime}
			l.make("--name", "lab", "base")
			args := []string{"fork", "lab", "-n", "3", "--name", "try"}
			if runtime == "runsc" {
				args = append(args, "--memory")
			}
			r := l.ctl(append(args, "--until-success", "--", "sh", "-c", `echo here; [ $(hostname) = try-2 ] || exec sleep 1000`)...)
			if r.code != 0 || !strings.Contains(r.errout, "first in try-2") {
				t.Fatalf("%d, %q, %q", r.code, r.out, r.errout)
			}
			lines := strings.Split(strings.TrimSuffix(r.out, "\n"), "\n")
			id := lines[len(lines)-1]
			if sb, err := h.api.Get(t.Context(), "try-2"); err != nil || sb.ID != id || !slices.Contains(lines, "try-2 | here") {
				t.Errorf("%q; try-2 is %s, %v", r.out, sb.ID, err)
			}
			source, err := h.api.Get(t.Context(), "lab")
			if err != nil {
				t.Fatal(err)
			}
			want := fmt.Sprintf("%s lab Running\n└─ %s try-2 Running (%s)\n", source.ID, id, forkModes[runtime])
			if tree := l.ok("tree"); tree != want {
				t.Errorf("%s\nwant\n%s", tree, want)
			}
			l.ok("rm", "-f", "try-2")

			// The exit status is that of the command that fails; all copies stay.
			r = l.ctl(append(args, "--", "sh", "-c", `echo $(hostname); [ $(hostname) != try-3 ] || exit 7`)...)
			lines = strings.Split(r.out, "\n")
			slices.Sort(lines)
			if r.code != 7 || !strings.Contains(r.errout, "exited with 7 in try-3") ||
				strings.Join(lines, ",") != ",try-1 | try-1,try-2 | try-2,try-3 | try-3" {
				t.Errorf("%d, %q, %q", r.code, r.out, r.errout)
			}
			if tree := l.ok("tree"); strings.Count(tree, "\n") != 4 {
				t.Errorf("%s", tree)
			}
			h.deleteAll(t)
			h.noSnapshots(t)
		})
	}
}
