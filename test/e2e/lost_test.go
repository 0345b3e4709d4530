package e2e_test

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// TestLostPool: somebody removes pool.img and keeps sandboxd.db. That is said wherever an operator looks,
// and the command that is said ends it: what is lost is named, can be removed, and nothing looks whole.
func TestLostPool(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	h := newHost(t, daemontest.Options{Instance: daemontest.Other, StateDir: state, PoolSize: "1Gi"})
	unmount := func() {
		h.Stop()
		if err := unix.Unmount(filepath.Join(state, "pool"), 0); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(unmount)
	mounting := func() wire.CreateRequest {
		r := spec("runc")
		r.Volumes = []wire.VolumeMount{{Name: "v", PVC: &wire.PVC{ClaimName: "kept"}, MountPath: "/srv"}}
		return r
	}
	stopped, asleep := h.create(t, mounting()), h.create(t, spec("runsc"))
	snap, err := h.api.Snapshots().Create(t.Context(), stopped.ID, "", true)
	if err != nil || snap.Status.State != wire.SnapshotReady {
		t.Fatalf("%+v, %v", snap, err)
	}
	if err := errors.Join(h.api.Stop(t.Context(), stopped.ID, 0), client.Hibernate(t.Context(), h.api, asleep.ID)); err != nil {
		t.Fatal(err)
	}
	unmount()
	if err := os.Remove(filepath.Join(state, "pool.img")); err != nil {
		t.Fatal(err)
	}

	const command = "sandboxd restore --accept-pool"
	began := time.Now()
	h.Start()
	h.logged(t, began, "state=lost_pool")
	h.lasts(t, "lost_pool", true)
	if info, err := h.api.System().Info(t.Context()); err != nil || !strings.Contains(info.NoSweep, command) {
		t.Errorf("info says %q, %v", info.NoSweep, err)
	}
	found, _ := doctor(t, h.Config) // it fails
	if i := slices.IndexFunc(found, func(f finding) bool { return f.Check == "lasting-states" }); i < 0 ||
		found[i].Status != "fail" || !strings.Contains(found[i].Detail, command) {
		t.Errorf("the doctor says %+v", found)
	}
	if said, err := h.restore(t, "--accept-pool"); err == nil || !strings.Contains(said, "stop it first") {
		t.Errorf("beside the daemon: %v\n%s", err, said)
	}
	h.Stop()
	said, err := h.restore(t, "--accept-pool")
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	for _, lost := range []string{"sandbox " + stopped.ID, "sandbox " + asleep.ID, "snapshot " + snap.ID, "volume kept"} {
		if !strings.Contains(said, lost) {
			t.Errorf("%s is not named as lost:\n%s", lost, said)
		}
	}
	if said, err := h.restore(t, "--accept-pool"); err != nil || !strings.Contains(said, "nothing to accept") {
		t.Errorf("again: %v\n%s", err, said)
	}

	h.Start()
	h.lasts(t, "lost_pool", false)
	for _, id := range []string{stopped.ID, asleep.ID} {
		if sb := h.awaitState(t, id, wire.Failed, patience); sb.Status.Reason != "disk_lost" {
			t.Errorf("%s is %+v", id, sb.Status)
		}
		if _, err := h.api.Restart(t.Context(), id, true); !errs.Is(err, errs.WrongState) || !strings.Contains(err.Error(), "lost") {
			t.Errorf("a start of %s: %v", id, err)
		}
		if _, err := h.api.Snapshots().Create(t.Context(), id, "", true); !errs.Is(err, errs.WrongState) {
			t.Errorf("a snapshot of %s: %v", id, err)
		}
	}
	if all, err := h.api.Snapshots().List(t.Context(), ""); err != nil || len(all) != 1 || all[0].Status.State != wire.SnapshotFailed {
		t.Errorf("%+v, %v", all, err)
	}
	if sb, err := h.api.Create(t.Context(), mounting(), true); err == nil && sb.Status.State == wire.Running {
		t.Error("a sandbox runs with an empty volume in place of one that is lost")
	}
	list, err := h.api.List(t.Context(), client.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range list {
		err = errors.Join(err, h.api.Delete(t.Context(), sb.ID))
	}
	if err := errors.Join(err, h.api.Snapshots().Remove(t.Context(), snap.ID), h.api.Volumes().Remove(t.Context(), "kept")); err != nil {
		t.Errorf("what is lost cannot be removed: %v", err)
	}
	fresh := h.create(t, mounting())
	h.answers(t, fresh.ID)
	if err := h.api.Stop(t.Context(), fresh.ID, 0); err != nil {
		t.Fatal(err)
	}

	// The other way round: the state is lost, and its pool is there.
	h.Stop()
	if err := os.Remove(filepath.Join(state, "sandboxd.db")); err != nil {
		t.Fatal(err)
	}
	h.Start()
	h.lasts(t, "lost_pool", true)
	h.Stop()
	if said, err := h.restore(t, "--accept-pool"); err != nil || !strings.Contains(said, "accepted: storage pool") {
		t.Fatalf("with a lost state: %v\n%s", err, said)
	}
	h.Start()
	h.lasts(t, "lost_pool", false)
}

// lasts says whether the metric has the host in a state that an operator has to end.
func (h host) lasts(t *testing.T, state string, want bool) {
	t.Helper()
	value := map[bool]string{false: "0", true: "1"}[want]
	if status, body := askBy(t, http.MethodGet, adminSocket(h.Daemon), "/metrics"); status != http.StatusOK ||
		!strings.Contains(body, `sandboxd_lasting_state{state="`+state+`"} `+value) {
		t.Errorf("the metrics do not have %s as %s: %d", state, value, status)
	}
}
