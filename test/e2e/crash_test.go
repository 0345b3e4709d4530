package e2e_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/btrfs"
)

// unreachable are the steps that no life and no recovery takes, and why.
var unreachable = map[string]string{
	"store:put:creating": "a record is inserted as Creating; it is put so only if its labels change while it waits for its turn, or " +
		"its image was pulled (TestPullKilled)",
	"store:snapshot:failed": "a step of recovery: TestKillInRecovery takes it",
	"snapshot:stray":        "a step of recovery from a lost store: TestSnapshotStrays takes it",
	"hibernate:resume":      "a step after an error: TestEveryFault takes it",
	"vault:drop":            "a step of recovery: TestKillInRecovery takes it",
}

// steps are all failpoints that can be passed without prepared slots and members of pools.
func steps() (names []string) {
	slots := append(ofSlots(), ofMembers()...)
	for _, name := range sandbox.FailpointNames() {
		if unreachable[strings.TrimPrefix(name, "after:")] == "" && !slices.Contains(slots, name) {
			names = append(names, name)
		}
	}
	return names
}

// ofMemory reports whether a step keeps or restores memory, which only gVisor can, or is one of
// what keepMemory does beside that.
func ofMemory(point string) bool {
	return !ofSleep(point) && slices.ContainsFunc([]string{"memory", "checkpoint", "snapshot:limit", "trade"}, func(word string) bool {
		return strings.Contains(point, word)
	})
}

// ofSleep reports whether only a sandbox that hibernates or wakes takes a step.
func ofSleep(point string) bool {
	return strings.Contains(point, "hibernat") || strings.HasSuffix(point, "waking") || strings.HasSuffix(point, "down:memory")
}

// ofVault reports whether only a copy of a sandbox with a credential vault takes a step.
func ofVault(point string) bool { return strings.Contains(point, "vault") }

// lifeWith is what passes a step.
func lifeWith(point string) func(context.Context, host, string) {
	switch {
	case ofSleep(point):
		return hibernateAndWake
	case ofMemory(point):
		return keepMemory
	case ofVault(point):
		return copyVault
	}
	return live
}

// TestKillAtEveryStep kills the daemon at each of its steps, and has the next
// one find a host that agrees with the store. A bystander lives through all of
// it. A push has each step on one runtime (chosen), test-all on both.
func TestKillAtEveryStep(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	defer h.deleteVolumes(t)
	defer h.deletePolicies(t)
	for _, runtime := range runtimes {
		b := h.create(t, spec(runtime)).ID // the bystander
		before := h.holds()
		for _, point := range steps() {
			gvisor := ofMemory(point) || ofSleep(point)
			if gvisor && runtime != "runsc" || !gvisor && !chosen(runtime, point) {
				continue
			}
			if ofSleep(point) && !everything && !strings.HasPrefix(point, "after:") {
				continue
			}
			t.Run(runtime+"/"+point, func(t *testing.T) {
				h.Stop()
				arm := point + "=kill"
				if strings.HasSuffix(point, "up:egress") || strings.HasSuffix(point, "limit") {
					arm = point + ":2=kill" // the first pass is the bystander's, in the recovery
				}
				if err := h.StartArmed(arm); err != nil {
					t.Fatalf("start: %v", err)
				}
				lifeWith(point)(t.Context(), h, runtime)
				select {
				case <-h.Ended():
				default:
					t.Fatalf("a whole life never passed %s", point)
				}
				if err := h.TryStart(); err != nil {
					t.Fatalf("start again: %v", err)
				}
				agree(t, h)
				h.vaultsAgree(t, ofVault(point))
				if boxes, err := h.api.List(t.Context(), client.Filter{}); gvisor {
					for _, sb := range boxes { // a guest that stood still for its image goes on
						if sb.Status.State == wire.Running || sb.Status.State == wire.Paused {
							h.awakes(t, sb)
						}
					}
					if err != nil || len(boxes) < 2 {
						t.Errorf("%d sandboxes are left, %v", len(boxes), err)
					}
				}
				h.deleteAll(t, b)
				h.deleteSnapshots(t)
				h.holdsOnly(t, before)
				h.answers(t, b)
			})
		}
		h.deleteAll(t)
		h.holdsNothingOf(t, b)
	}
}

// TestErrorAtEveryStep has each step of a creation fail, before and after it
// did its work: the create says so, the record too, and nothing is left.
func TestErrorAtEveryStep(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	defer h.deleteVolumes(t)
	defer h.deletePolicies(t)
	before := h.empty(t)
	for _, runtime := range runtimes {
		for _, point := range steps() {
			step, ok := strings.CutPrefix(strings.TrimPrefix(point, "after:"), "up:")
			if !ok || ofMemory(point) || ofVault(point) || !chosen(runtime, point) {
				continue
			}
			t.Run(runtime+"/"+point, func(t *testing.T) {
				h.Stop()
				if err := h.StartArmed(point + "=error"); err != nil {
					t.Fatalf("start: %v", err)
				}
				sb, err := h.api.Create(t.Context(), withVolumes(runtime), true)
				if err != nil {
					t.Fatalf("create: %v", err)
				}
				if s := sb.Status; s.State != wire.Failed || s.Reason != "create_failed" || !strings.Contains(s.Message, "step "+step) {
					t.Errorf("the sandbox is %+v", s)
				}
				agree(t, h)
				h.deleteAll(t)
				h.holdsOnly(t, before)
				h.answers(t, h.create(t, spec(runtime)).ID) // the point is passed: the next one lives
				h.deleteAll(t)
				h.holdsOnly(t, before)
			})
		}
	}
}

// TestKillInRecovery kills one daemon under a running, a paused and an ended
// sandbox, a second one in the middle of recovering from that, and has a third
// one finish.
func TestKillInRecovery(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	defer h.deleteVolumes(t)
	defer h.deletePolicies(t)
	before := h.empty(t)
	for _, runtime := range runtimes {
		for _, first := range []string{"up:agent", "after:kill", "freeze", "thaw", "snapshot:take", "after:up:vault"} {
			for _, second := range recoveryOf(first) {
				if !chosen(runtime, first+second) {
					continue
				}
				t.Run(runtime+"/"+first+"/"+second, func(t *testing.T) {
					h.Stop()
					if err := h.StartArmed(first + "=kill"); err != nil {
						t.Fatalf("start: %v", err)
					}
					lifeWith(first)(t.Context(), h, runtime)
					if err := h.StartArmed(second + "=kill"); err == nil {
						t.Errorf("recovery from a death at %s never passed %s", first, second)
						h.Kill()
					}
					if err := h.TryStart(); err != nil {
						t.Fatalf("start again: %v", err)
					}
					agree(t, h)
					h.vaultsAgree(t, ofVault(first))
					h.deleteAll(t)
					h.holdsOnly(t, before)
				})
			}
		}
	}
}

// recoveryOf is what a daemon does at its start after one that died at a point
// of live.
func recoveryOf(point string) []string {
	switch point {
	case "up:agent": // a sandbox without a client
		return []string{"kill", "after:down:runtime", "down:rootfs", "after:down:namespaces", "store:put:ended"}
	case "after:kill": // the first that is killed is B, which ended by itself
		return []string{"kill", "down:network", "after:store:put:ended"}
	case "freeze":
		return []string{"up:egress", "freeze", "store:put:paused"}
	case "after:up:vault": // a copy that is being created, and has its vault
		return []string{"vault:drop", "after:vault:drop"}
	case "snapshot:take": // the source is frozen and says it runs
		return []string{"snapshot:thaw", "after:snapshot:delete", "store:snapshot:failed", "after:store:snapshot:failed"}
	default: // thaw
		return []string{"after:up:egress", "thaw", "store:put:running"}
	}
}

// from is a sandbox of a snapshot that idles.
func from(runtime, snapshot string) wire.CreateRequest {
	r := spec(runtime)
	r.Image, r.SnapshotID = nil, snapshot
	return r
}

// lifeLimit is far above what a whole life takes: one that passes its step ends when the daemon is dead.
const lifeLimit = 2 * time.Minute

// live takes one sandbox through everything that can happen to one, a second
// one to an end of its own, and makes a third of a snapshot of the first. It
// goes on until the daemon is dead.
func live(ctx context.Context, h host, runtime string) {
	ctx, cancel := context.WithTimeout(ctx, hosttest.Patient(lifeLimit))
	defer cancel()
	var a, b, c wire.Sandbox
	var s wire.Snapshot
	for _, step := range []func() error{
		func() error { return unlessThere(h.api.Volumes().Create(ctx, "spare", "")) },
		func() error { return h.api.Volumes().Remove(ctx, "spare") },
		func() error { _, err := h.api.Policies().Put(ctx, "spare", []byte("{}")); return err },
		func() error { return h.api.Policies().Remove(ctx, "spare") },
		func() (err error) { a, err = h.api.Create(ctx, withVolumes(runtime), true); return err },
		func() error { _, err := h.exec(ctx, a.ID, "true"); return err },
		func() error { _, err := h.api.Update(ctx, a.ID, map[string]string{"cpu": "500m"}); return err },
		func() error { return h.api.Pause(ctx, a.ID) },
		func() error { return h.api.Resume(ctx, a.ID) },
		func() (err error) {
			b, err = h.api.Create(ctx, spec(runtime, "sh", "-c", "sleep 0.1; exit 3"), true)
			return err
		},
		func() error { return h.ended(ctx, b.ID) },
		func() (err error) { s, err = h.api.Snapshots().Create(ctx, a.ID, "", true); return err },
		func() (err error) { c, err = h.api.Create(ctx, from(runtime, s.ID), true); return err },
		func() error { return h.api.Snapshots().Remove(ctx, s.ID) },
		func() error { return h.api.Stop(ctx, a.ID, 0) },
		func() error { _, err := h.api.Restart(ctx, a.ID, true); return err },
		func() error { return h.api.Delete(ctx, a.ID) },
		func() error { return h.api.Delete(ctx, b.ID) },
		func() error { return h.api.Delete(ctx, c.ID) },
		// What follows the answer to a delete may be what kills.
		func() error { return h.erased(ctx, a.ID, b.ID, c.ID) },
	} {
		if err := step(); err != nil {
			break
		}
	}
	for { // it is dead, or answers
		select {
		case <-h.Ended():
			return
		case <-time.After(10 * time.Millisecond):
		}
		if _, err := h.api.Version(ctx); err == nil || ctx.Err() != nil {
			return
		}
	}
}

// keepMemory is live for the steps of a memory snapshot, of a sandbox that begins with it, and of
// a fork that is promoted.
func keepMemory(ctx context.Context, h host, runtime string) {
	ctx, cancel := context.WithTimeout(ctx, hosttest.Patient(lifeLimit))
	defer cancel()
	a, err := h.api.Create(ctx, withVolumes(runtime), true)
	var s wire.Snapshot
	if err == nil {
		s, err = h.api.Snapshots().CreateWithMemory(ctx, a.ID, "", true)
	}
	if err == nil {
		_, err = h.api.Create(ctx, wire.CreateRequest{SnapshotID: s.ID, Extensions: map[string]string{wire.ExtMemory: "true"}}, true)
	}
	var f wire.Fork
	if err == nil {
		f, err = h.api.Snapshots().Fork(ctx, a.ID, wire.ForkRequest{Count: 1, Timeout: new(int64(600))}, true)
	}
	if err == nil && len(f.Sandboxes) == 1 {
		_, err = h.api.Snapshots().Promote(ctx, f.Sandboxes[0].ID)
	}
	if err != nil { // the daemon dies, or has died
		select {
		case <-h.Ended():
		case <-ctx.Done():
		}
	}
}

// copyVault is live for the steps of a fork of a sandbox that has a credential vault.
func copyVault(ctx context.Context, h host, runtime string) {
	ctx, cancel := context.WithTimeout(ctx, hosttest.Patient(lifeLimit))
	defer cancel()
	a, err := h.api.Create(ctx, withVolumes(runtime), true)
	if err == nil {
		_, err = h.api.Vault(a.ID).Create(ctx, wire.CredentialVaultRequest{
			Credentials: []wire.NewCredential{{Name: "token", Source: wire.CredentialSource{Type: "inline", Value: "x"}}},
		})
	}
	if err == nil {
		_, err = h.api.Snapshots().Fork(ctx, a.ID, wire.ForkRequest{Count: 1, Timeout: new(int64(600))}, true)
	}
	if err != nil { // the daemon dies, or has died
		select {
		case <-h.Ended():
		case <-ctx.Done():
		}
	}
}

// vaultsAgree fails the test unless each copy of a sandbox with a vault (copyVault) has one, or failed
// and has none. made: there is one.
func (h host) vaultsAgree(t *testing.T, made bool) {
	t.Helper()
	all, err := h.api.List(t.Context(), client.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	given := map[string]bool{}
	for _, sb := range all {
		_, err := h.api.Vault(sb.ID).Get(t.Context())
		if given[sb.ID] = err == nil; err != nil && !client.NoVault(err) {
			t.Errorf("the vault of %s: %v", sb.ID, err)
		}
	}
	for _, sb := range all {
		of := sb.Sandboxd.Fork
		if of == nil || !given[of.Source] {
			continue
		}
		if made = false; given[sb.ID] != (sb.Status.State == wire.Running) {
			t.Errorf("copy %s is %+v; it has a vault: %v", sb.ID, sb.Status, given[sb.ID])
		}
	}
	if made {
		t.Error("no copy is left of a sandbox that has a vault")
	}
}

// withVolumes is a sandbox that has two volumes, of which one goes with it.
func withVolumes(runtime string) wire.CreateRequest {
	r := spec(runtime)
	r.CredentialProxy = &wire.CredentialProxy{Enabled: true} // it passes all steps
	r.Volumes = []wire.VolumeMount{
		{Name: "kept", MountPath: "/kept", PVC: &wire.PVC{ClaimName: "kept"}},
		{Name: "mine", MountPath: "/mine", PVC: &wire.PVC{ClaimName: "mine", DeleteOnSandboxTermination: true}},
	}
	return r
}

// unlessThere forgives that a volume is there: its maker died in between.
func unlessThere(_ wire.Volume, err error) error {
	if errs.Is(err, errs.Exists) {
		return nil
	}
	return err
}

// ended waits until a sandbox has ended.
func (h host) ended(ctx context.Context, id string) error {
	for {
		sb, err := h.api.Get(ctx, id)
		if err != nil || sb.Status.State == wire.Failed || sb.Status.State == wire.Terminated {
			return err
		}
		select {
		case <-h.Ended():
			return fmt.Errorf("the daemon died")
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// erased waits until the daemon is dead or says that it has finished its deletes.
func (h host) erased(ctx context.Context, ids ...string) error {
	for {
		log := h.Log()
		if !slices.ContainsFunc(ids, func(id string) bool { return !strings.Contains(log, "op=delete sandbox="+id+" ") }) {
			return nil
		}
		select {
		case <-h.Ended():
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// agree fails the test unless every record is in a state that lasts, and what
// is said to run does.
func agree(t *testing.T, h host) {
	t.Helper()
	all, err := h.api.List(t.Context(), client.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	snaps, err := h.api.Snapshots().List(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range snaps {
		if s.Status.State != wire.SnapshotReady && s.Status.State != wire.SnapshotFailed {
			t.Errorf("after the recovery snapshot %s is %+v", s.ID, s.Status)
		}
	}
	h.deleteSnapshots(t)
	for _, sb := range all {
		switch sb.Status.State {
		case wire.Running:
			h.answers(t, sb.ID)
		case wire.Paused, wire.Pausing: // a hibernation goes on in the background, and a resume waits for it
			if err := h.api.Resume(t.Context(), sb.ID); err != nil {
				t.Errorf("resume %s: %v", sb.ID, err)
			}
			h.answers(t, sb.ID)
		case wire.Terminated, wire.Failed:
		default:
			t.Errorf("after the recovery sandbox %s is %+v", sb.ID, sb.Status)
		}
	}
}

// TestKillInNewPool kills the first daemon of a host in each step of making the storage
// pool. The next one has a pool in which a sandbox lives.
func TestKillInNewPool(t *testing.T) {
	for _, point := range btrfs.FailpointNames() {
		t.Run(point, func(t *testing.T) {
			state := filepath.Join(t.TempDir(), "state")
			h := connect(t, daemontest.Prepare(t, daemontest.Options{StateDir: state, Pool: pool.BtrfsLoop, PoolSize: "1Gi"}))
			if err := h.StartArmed(point + "=kill"); err == nil || !strings.HasSuffix(err.Error(), "signal: killed") {
				t.Fatalf("the first start was not killed at %s: %v; it said:\n%s", point, err, h.Log())
			}
			h.Start()
			daemontest.Image(t, h.Daemon, "base")
			if left, _ := filepath.Glob(pool.Image(state) + "?*"); len(left) > 0 {
				t.Errorf("left %v", left)
			}
			h.answers(t, h.create(t, spec("runc")).ID)
			h.deleteAll(t)
		})
	}
}
