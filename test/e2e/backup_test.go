package e2e_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// backup writes a backup of h and returns its path.
func (h host) backup(t *testing.T) string {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "backup.tar.gz"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(h.api.System().Backup(t.Context(), f), f.Close()); err != nil {
		t.Fatal(err)
	}
	return f.Name()
}

// restore runs sandboxd restore with the configuration of h.
func (h host) restore(t *testing.T, args ...string) (string, error) {
	t.Helper()
	out, err := exec.Command(daemontest.Bin("sandboxd"), append([]string{"restore", "--config", h.Config}, args...)...).CombinedOutput()
	return string(out), err
}

// TestRestore brings a backup back to a host that has gone on since: what the
// backup knows goes on, what it does not know is left alone to the last link,
// until somebody accepts.
func TestRestore(t *testing.T) {
	h := newHost(t, daemontest.Options{Config: []string{"[snapshots]", "max = 1"}})
	old, gone := h.create(t, spec("runc")), h.create(t, spec("runc"))
	again, booted := h.create(t, spec("runc")), h.create(t, spec("runsc"))
	if _, err := h.exec(t.Context(), old.ID, "sh", "-c", "echo kept >/root/file"); err != nil {
		t.Fatal(err)
	}
	if err := h.api.Stop(t.Context(), again.ID, 0); err != nil {
		t.Fatal(err)
	}
	file := h.backup(t)
	beforeReboot(t, file, booted.ID)
	if err := h.api.Delete(t.Context(), gone.ID); err != nil {
		t.Fatal(err)
	}
	h.holdsNothingOf(t, gone.ID)
	if _, err := h.api.Restart(t.Context(), again.ID, true); err != nil {
		t.Fatal(err)
	}
	var young []string
	for _, runtime := range runtimes {
		young = append(young, h.create(t, spec(runtime)).ID)
	}
	slices.Sort(young)
	before := h.holds()

	if said, err := h.restore(t, file); err == nil || !strings.Contains(said, "stop it") {
		t.Errorf("beside a daemon: %v\n%s", err, said)
	}
	h.Stop()
	t.Cleanup(func() { // the state directory is that of all tests
		h.Stop()
		if said, err := h.restore(t, "--accept"); err != nil {
			t.Errorf("%v: %s", err, said)
		}
		kept, _ := filepath.Glob(filepath.Join(h.StateDir, "sandboxd.db.before-restore-*"))
		if len(kept) != 1 {
			t.Errorf("kept %v", kept)
		}
		for _, path := range kept {
			os.Remove(path)
		}
	})
	if said, err := h.restore(t, file); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	for range 2 { // also after one more restart
		h.Start()
		for _, sb := range []wire.Sandbox{old, again, booted} {
			h.answers(t, sb.ID)
		}
		h.holdsOnly(t, before)
		info, err := h.api.System().Info(t.Context())
		if err != nil || !slices.Equal(info.Strays, young) || !strings.Contains(info.NoSweep, "restored") {
			t.Errorf("%+v, %v", info, err)
		}
		if _, err := h.api.Create(t.Context(), spec("runc"), true); !errs.Is(err, errs.Unavailable) {
			t.Errorf("beside unknown sandboxes: %v", err)
		}
		if _, err := h.api.Restart(t.Context(), gone.ID, true); !errs.Is(err, errs.Unavailable) {
			t.Errorf("started beside unknown sandboxes: %v", err)
		}
		h.Stop()
	}
	h.Start()
	// It was deleted since; the backup cannot know, and its end harms nobody.
	if sb, err := h.api.Get(t.Context(), gone.ID); err != nil || sb.Status.State != wire.Failed {
		t.Errorf("%+v, %v", sb, err)
	}
	if _, err := h.api.System().Prune(t.Context(), false, time.Time{}); !errs.Is(err, errs.WrongState) {
		t.Errorf("pruned beside unknown sandboxes: %v", err)
	}
	if err := h.api.Delete(t.Context(), gone.ID); err != nil {
		t.Error(err)
	}
	h.holdsOnly(t, before)
	newest := h.snapshotsOf(t, old.ID, 2)
	h.Stop()

	for _, want := range []string{"accepted", "nothing to accept"} {
		if said, err := h.restore(t, "--accept"); err != nil || !strings.Contains(said, want) {
			t.Errorf("%v: %s", err, said)
		}
	}
	h.Start()
	settles(t, func() error {
		for _, line := range h.holds() {
			if slices.ContainsFunc(young, func(id string) bool { return strings.Contains(line, id) }) {
				return fmt.Errorf("after it was accepted the host holds %s", line)
			}
		}
		return nil
	})
	if left := h.sweptSnapshots(t); !slices.Equal(left, []string{newest}) {
		t.Errorf("after it was accepted there are snapshots %q, want %q", left, newest)
	}
	h.deleteSnapshots(t)
	lost, err := os.ReadDir(filepath.Join(h.StateDir, "pool", "lost+found"))
	for _, id := range young {
		if !slices.ContainsFunc(lost, func(e os.DirEntry) bool { return strings.HasPrefix(e.Name(), id) }) {
			t.Errorf("the disk of %s is not in lost+found: %v, %v", id, lost, err)
		}
	}
	if out, err := h.exec(t.Context(), old.ID, "cat", "/root/file"); err != nil || out != "kept\n" {
		t.Errorf("%q, %v", out, err)
	}
	for _, id := range []string{again.ID, booted.ID, h.create(t, spec("runc")).ID} {
		h.answers(t, id)
	}
}

// snapshotsOf takes n snapshots, more than may be, on a host that sweeps nothing, and returns
// the last one. All are kept.
func (h host) snapshotsOf(t *testing.T, id string, n int) (last string) {
	t.Helper()
	for range n {
		s, err := h.api.Snapshots().Create(t.Context(), id, "", true)
		if err != nil || s.Status.State != wire.SnapshotReady {
			t.Fatalf("%+v, %v", s, err)
		}
		last = s.ID
	}
	if left := h.sweptSnapshots(t); len(left) != n {
		t.Errorf("of %d snapshots on a host that sweeps nothing %q are left", n, left)
	}
	return last
}

// sweptSnapshots are the snapshots after a sweep.
func (h host) sweptSnapshots(t *testing.T) (ids []string) {
	t.Helper()
	if status, body := askBy(t, http.MethodPost, adminSocket(h.Daemon), "/sweep"); status != http.StatusNoContent {
		t.Errorf("sweep: %d %.80s", status, body)
	}
	list, err := h.api.Snapshots().List(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		ids = append(ids, s.ID)
	}
	return ids
}

// beforeReboot has a backup say that a sandbox ran before the host last went up.
func beforeReboot(t *testing.T, file, id string) {
	t.Helper()
	state, err := os.Create(filepath.Join(t.TempDir(), "sandboxd.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	was, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	m, err := backup.Read(was, state)
	if err = errors.Join(err, was.Close()); err != nil {
		t.Fatal(err)
	}
	db, err := store.Open(state.Name(), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	r, ok, err := db.Get(t.Context(), id)
	if err != nil || !ok {
		t.Fatalf("%s is not in the backup: %v", id, err)
	}
	r.BootID = "another"
	if err := errors.Join(db.Put(t.Context(), r), db.Close()); err != nil {
		t.Fatal(err)
	}
	now, err := os.Create(file)
	if err == nil {
		_, err = state.Seek(0, io.SeekStart)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(backup.Write(now, m, state), now.Close()); err != nil {
		t.Fatal(err)
	}
}

// TestRestoreRefuses what is not whole or not of this daemon; the state stays
// as it was, to the byte.
func TestRestoreRefuses(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	sb := h.create(t, spec("runc"))
	file := h.backup(t)
	h.Stop()
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	beside := func() []string { // the copy that an upgrade keeps may be there
		all, err := filepath.Glob(filepath.Join(h.StateDir, "sandboxd.db.*"))
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	before := beside()
	state, err := os.ReadFile(filepath.Join(h.StateDir, "sandboxd.db"))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		file []byte
		args []string
		want string
	}{
		"empty":    {nil, nil, "not a backup of `sandboxctl system backup`"},
		"half":     {whole[:len(whole)/2], nil, "unexpected EOF"},
		"a store":  {state, nil, "not a backup of `sandboxctl system backup`"},
		"instance": {whole, []string{"--config", otherInstance(t, h)}, fmt.Sprintf("instance %q", h.Instance)},
	} {
		path := filepath.Join(t.TempDir(), "bad")
		if err := os.WriteFile(path, c.file, 0o600); err != nil {
			t.Fatal(err)
		}
		if said, err := h.restore(t, append(c.args, path)...); err == nil || !strings.Contains(said, c.want) ||
			!strings.Contains(said, "the present state is unchanged") {
			t.Errorf("%s: %v\n%s", name, err, said)
		}
	}
	if now, err := os.ReadFile(filepath.Join(h.StateDir, "sandboxd.db")); err != nil || !bytes.Equal(now, state) {
		t.Errorf("the state is not as it was (%v)", err)
	}
	if left := beside(); !slices.Equal(left, before) {
		t.Errorf("beside the state are %v, and were %v", left, before)
	}
	h.Start()
	h.answers(t, sb.ID)
}

// otherInstance is the configuration of h for instance u.
func otherInstance(t *testing.T, h host) string {
	t.Helper()
	text, err := os.ReadFile(h.Config)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	s := strings.Replace(string(text), fmt.Sprintf("instance = %q", daemontest.Instance), fmt.Sprintf("instance = %q", daemontest.Other), 1)
	s = strings.Replace(s, h.StateDir, filepath.Join(dir, "state"), 1)
	path := filepath.Join(dir, "u.toml")
	if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(daemontest.Other.RunDir()) })
	return path
}

// TestBackupOnFullDisk: there is no backup rather than half of one, and nothing
// stays behind; a restore leaves the state as it was.
func TestBackupOnFullDisk(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	state := smallDisk(t)
	seed(t, h, state)
	u := connect(t, daemontest.NewWith(t, daemontest.Options{Instance: daemontest.Other, StateDir: state, Pool: "plain"}))
	sb := u.create(t, spec("runc"))
	file := u.backup(t)
	fill(t, filepath.Join(state, "fill"))
	var b bytes.Buffer
	if err := u.api.System().Backup(t.Context(), &b); !errs.Is(err, errs.Unavailable) || b.Len() > 0 {
		t.Errorf("%d bytes, %v", b.Len(), err)
	}
	u.answers(t, sb.ID)
	u.Stop()
	if said, err := u.restore(t, file); err == nil || !strings.Contains(said, "no space") ||
		!strings.Contains(said, "the present state is unchanged") {
		t.Errorf("%v\n%s", err, said)
	}
	if left, _ := filepath.Glob(filepath.Join(state, "sandboxd.db.*")); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	if err := os.Remove(filepath.Join(state, "fill")); err != nil {
		t.Fatal(err)
	}
	u.Start()
	u.answers(t, sb.ID)
	u.backup(t)
	u.deleteAll(t)
}

// ofReleases is the instance whose sandboxes the states of releases are.
const ofReleases = instance.Instance('u')

// TestUpgrade starts the daemon on the state that each release left: it answers,
// with every sandbox there was, and ends what a reboot has ended.
func TestUpgrade(t *testing.T) {
	hosttest.Root(t)
	releases, err := filepath.Glob("../../pkg/store/testdata/release-*/sandboxd.db")
	if err != nil || len(releases) == 0 {
		t.Fatalf("no release: %v", err)
	}
	for _, file := range releases {
		t.Run(filepath.Base(filepath.Dir(file)), func(t *testing.T) {
			state := filepath.Join(t.TempDir(), "state")
			u := connect(t, daemontest.Prepare(t, daemontest.Options{Instance: ofReleases, StateDir: state, Pool: "plain"}))
			if err := os.MkdirAll(filepath.Join(state, "pool"), 0o700); err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for name, b := range map[string][]byte{"sandboxd.db": b, "pool/id": []byte("00112233445566778899aabbccddeeff\n")} {
				if err := os.WriteFile(filepath.Join(state, name), b, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			was, err := store.Records(filepath.Join(state, "sandboxd.db"))
			if err != nil || len(was) == 0 {
				t.Fatalf("%v, %v", was, err)
			}
			want := map[string]string{} // by what they were
			for _, r := range was {
				switch r.State {
				case record.Deleting: // and is
				case record.Creating:
					want[r.ID] = "Failed create_failed"
				case record.Starting:
					want[r.ID] = "Failed start_failed"
				case record.Ended:
					want[r.ID] = "Failed exited"
				default:
					want[r.ID] = "Failed host_reboot"
				}
			}
			u.Start()
			all, err := u.api.List(t.Context(), client.Filter{})
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]string{}
			for _, sb := range all {
				got[sb.ID] = sb.Status.State + " " + sb.Status.Reason
			}
			if !maps.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
			others := u.others(t)
			if name := filepath.Base(filepath.Dir(file)); !slices.Equal(others, releaseOthers[name]) {
				t.Errorf("beside sandboxes it has %q, want %q", others, releaseOthers[name])
			}
			if sb, err := u.api.Get(t.Context(), "lab"); err != nil || sb.Sandboxd == nil || sb.Sandboxd.Name != "lab" {
				t.Errorf("%+v, %v", sb, err)
			}
			if info, err := u.api.System().Info(t.Context()); err != nil || info.NoSweep != "" || len(info.Unreadable) > 0 {
				t.Errorf("%+v, %v", info, err)
			}
			u.deleteAll(t)
		})
	}
}

// releaseOthers is what a daemon shows of a release beside its sandboxes, where
// it has anything else.
var releaseOthers = map[string][]string{
	"release-2": {
		"key ci operator", "snapshot snap-uaaaaaaaaaaa Failed", "snapshot snap-ubbbbbbbbbbb Ready", "snapshot snap-uccccccccccc Failed",
		"volume owned", "volume owned-too", "volume volume-ready",
	},
}

// others are the keys, snapshots and volumes that the daemon shows.
func (h host) others(t *testing.T) (all []string) {
	t.Helper()
	keys, err := h.api.Keys().List(t.Context())
	for _, k := range keys {
		if k.Source == wire.KeyOfStore {
			all = append(all, "key "+k.Name+" "+k.Role)
		}
	}
	snapshots, serr := h.api.Snapshots().List(t.Context(), "")
	for _, s := range snapshots {
		all = append(all, "snapshot "+s.ID+" "+s.Status.State)
	}
	volumes, verr := h.api.Volumes().List(t.Context())
	for _, v := range volumes {
		all = append(all, "volume "+v.Name)
	}
	if err := errors.Join(err, serr, verr); err != nil {
		t.Fatal(err)
	}
	slices.Sort(all)
	return all
}
