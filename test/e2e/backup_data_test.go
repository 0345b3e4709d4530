package e2e_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"filippo.io/age"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestBackupData: a host loses its disk. A bare one gets images, a snapshot and a volume back from
// encrypted backups, after a pack that is missing is there again.
func TestBackupData(t *testing.T) {
	dir := t.TempDir()
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	to, key, state := filepath.Join(dir, "backups"), filepath.Join(dir, "key"), filepath.Join(dir, "state")
	if err := errors.Join(os.Mkdir(to, 0o700), os.Mkdir(state, 0o700), os.WriteFile(key, []byte(id.String()), 0o600)); err != nil {
		t.Fatal(err)
	}
	h := newHost(t, daemontest.Options{Instance: daemontest.Other, StateDir: state, PoolSize: "1Gi", Config: []string{
		"[backup]", fmt.Sprintf("target = %q", to), "data = true", fmt.Sprintf("encrypt = [%q]", id.Recipient()),
		fmt.Sprintf("identity = %q", key),
	}})
	unmount := func() {
		h.Stop()
		if err := unix.Unmount(filepath.Join(state, "pool"), 0); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(unmount)
	api := h.api.System()
	if _, err := h.api.Volumes().Create(t.Context(), "kept", "64Mi"); err != nil {
		t.Fatal(err)
	}
	mounting := func() wire.CreateRequest {
		r := spec("runc")
		r.Volumes = []wire.VolumeMount{{Name: "v", PVC: &wire.PVC{ClaimName: "kept"}, MountPath: "/srv"}}
		return r
	}
	sb := h.create(t, mounting())
	const fill = "head -c 3000000 /dev/urandom >/srv/data; ln /srv/data /srv/hard; chown 33:33 /srv/data; echo rooted >/root/file; " +
		"rm /etc/debian_version; sync; cat /srv/data /root/file | sha256sum"
	before, err := h.exec(t.Context(), sb.ID, "sh", "-c", fill)
	if err != nil {
		t.Fatal(err)
	}
	snap, err := h.api.Snapshots().Create(t.Context(), sb.ID, "", true)
	if err != nil || snap.Status.State != wire.SnapshotReady {
		t.Fatalf("%+v, %v", snap, err)
	}
	var sent [2]int64
	var newest string
	for i := range sent {
		b, err := api.BackupNow(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		newest = b.Name
		s, err := api.BackupStatus(t.Context())
		if err != nil || s.Data == nil || s.Data.LeftOut > 0 || s.Data.Bytes < 3_000_000 {
			t.Fatalf("%+v, %v", s, err)
		}
		sent[i] = s.Data.SentBytes
		if _, err := h.exec(t.Context(), sb.ID, "sh", "-c", "echo more >>/srv/more; sync"); err != nil {
			t.Fatal(err)
		}
	}
	if sent[0] < 3_000_000 || sent[1] > sent[0]/50 {
		t.Errorf("%d bytes are sent, and then %d", sent[0], sent[1])
	}
	if _, err := api.BackupDrill(t.Context()); err != nil {
		t.Error(err)
	}

	h.checksBackups(t, to)

	if said, err := h.restore(t, "--check", "--from", "latest"); err != nil || !strings.Contains(said, "ok: its data") {
		t.Errorf("%v\n%s", err, said)
	}

	unmount()
	if err := errors.Join(os.RemoveAll(state), os.Mkdir(state, 0o700)); err != nil {
		t.Fatal(err)
	}
	packs, err := filepath.Glob(filepath.Join(to, "*-pack-*"))
	if err != nil || len(packs) == 0 {
		t.Fatal(packs, err)
	}
	for _, p := range packs {
		if err := os.Rename(p, p+".away"); err != nil {
			t.Fatal(err)
		}
	}
	said, err := h.restore(t, "--from", "latest")
	if err == nil || !strings.Contains(said, "the present state is unchanged") || !strings.Contains(said, "-pack-") {
		t.Errorf("a restore without packs: %v\n%s", err, said)
	}
	for _, p := range packs {
		if err := os.Rename(p+".away", p); err != nil {
			t.Fatal(err)
		}
	}
	// The host was installed again, and has stored an empty backup before anybody restores.
	h.Start()
	empty, err := api.BackupNow(t.Context())
	if err != nil || !strings.Contains(empty.Name, "-000003-") {
		t.Fatalf("%+v, %v", empty, err)
	}
	if s, err := api.BackupStatus(t.Context()); err != nil || s.Unknown != 2 || s.Owner != empty.Owner {
		t.Errorf("%+v, %v", s, err)
	}
	unmount()
	said, err = h.restore(t, "--from", "latest")
	if err == nil || !strings.Contains(said, "several states") || !strings.Contains(said, newest) || !strings.Contains(said, empty.Name) {
		t.Errorf("a restore of the latest of two states: %v\n%s", err, said)
	}
	if err := errors.Join(os.RemoveAll(state), os.Mkdir(state, 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"restored ", "stays as it is"} { // also a second time
		if said, err := h.restore(t, "--from", newest); err != nil || !strings.Contains(said, want) {
			t.Fatalf("%v\n%s", err, said)
		}
	}
	if said, err := h.restore(t, "--accept"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	h.Start()
	if adopted, err := api.AdoptBackups(t.Context(), nil); err != nil || len(adopted) != 1 || adopted[0].Whose != "adopted" {
		t.Errorf("the empty one is adopted: %+v, %v", adopted, err)
	}
	r := mounting()
	r.Image, r.SnapshotID = nil, snap.ID
	again := h.create(t, r)
	const look = "cat /srv/data /root/file | sha256sum; stat -c %u:%g:%h /srv/hard; ls /etc/debian_version /srv/more 2>&1; true"
	after, err := h.exec(t.Context(), again.ID, "sh", "-c", look)
	if err != nil || !strings.HasPrefix(after, before) {
		t.Errorf("%v\n%s, want first\n%s", err, after, before)
	}
	for _, want := range []string{"\n33:33:2\n", "No such file", "\n/srv/more"} {
		if !strings.Contains(after, want) {
			t.Errorf("%q is not in\n%s", want, after)
		}
	}
	h.answers(t, h.create(t, spec("runc")).ID) // of the image
}

// checksBackups damages a file of the newest backup, and lets the command find it.
func (h host) checksBackups(t *testing.T, to string) {
	t.Helper()
	ctl := func(args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), daemontest.Bin("sandboxctl"), append([]string{"system", "backups"}, args...)...)
		cmd.Env = append(os.Environ(), "SANDBOXD_HOST=unix://"+h.Socket)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	check := func() (string, error) { return ctl("check", "--all") }
	if said, err := check(); err != nil || !strings.Contains(said, "2 backups of 2 and ") || !strings.Contains(said, ": 0 damaged") {
		t.Errorf("%v\n%s", err, said)
	}
	packs, err := filepath.Glob(filepath.Join(to, "*-pack-*"))
	if err != nil || len(packs) == 0 {
		t.Fatal(packs, err)
	}
	for _, p := range packs {
		if err := os.Rename(p, p+".away"); err != nil {
			t.Fatal(err)
		}
	}
	said, err := check()
	if err == nil || !strings.Contains(said, "2 backups are damaged") || !strings.Contains(said, filepath.Base(packs[0])+" is not on "+to) {
		t.Errorf("without packs: %v\n%s", err, said)
	}
	for _, p := range packs {
		if err := os.Rename(p+".away", p); err != nil {
			t.Fatal(err)
		}
	}
	all, err := h.api.System().Backups(t.Context())
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	if said, err := ctl("rm", "-f", all[0].Name, all[1].Name); err == nil || !strings.Contains(said, "backups now") {
		t.Errorf("all are removed: %v\n%s", err, said)
	}
}
