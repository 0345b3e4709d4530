package e2e_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"filippo.io/age"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// TestBackups: a daemon keeps encrypted backups on its target, tries the newest, and says why it
// cannot; the state comes back from there.
func TestBackups(t *testing.T) {
	dir := t.TempDir()
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	to, key := filepath.Join(dir, "backups"), filepath.Join(dir, "key")
	if err := os.Mkdir(to, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(key, []byte(id.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	h := newHost(t, daemontest.Options{Config: []string{
		"[backup]", fmt.Sprintf("target = %q", to), "keep = 2", fmt.Sprintf("encrypt = [%q]", id.Recipient()),
		fmt.Sprintf("identity = %q", key),
	}})
	t.Cleanup(func() { os.Remove(filepath.Join(h.StateDir, "backups.json")) }) // the directory is that of all tests
	api := h.api.System()
	if _, err := api.BackupDrill(t.Context()); !errs.Is(err, errs.NotFound) {
		t.Errorf("a drill without a backup: %v", err)
	}
	sb := h.create(t, spec("runc"))
	for range 3 {
		if _, err := api.BackupNow(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	all, err := api.Backups(t.Context())
	if err != nil || len(all) != 2 || !all[0].Verified || !all[1].Encrypted || !strings.Contains(all[1].Name, "-000003-") {
		t.Fatalf("%+v, %v", all, err)
	}
	if d, err := api.BackupDrill(t.Context()); err != nil || d.Backup != all[1] || d.Sandboxes != 1 {
		t.Errorf("%+v, %v", d, err)
	}

	if err := os.Rename(to, to+".away"); err != nil {
		t.Fatal(err)
	}
	for what, f := range map[string]func() error{
		"backup": func() error { _, err := api.BackupNow(t.Context()); return err },
		"drill":  func() error { _, err := api.BackupDrill(t.Context()); return err },
		"list":   func() error { _, err := api.Backups(t.Context()); return err },
	} {
		if err := f(); !errs.Is(err, errs.Unavailable) || !strings.Contains(err.Error(), "mount it") {
			t.Errorf("%s on a target that is gone: %v", what, err)
		}
	}
	s, err := api.BackupStatus(t.Context())
	if err != nil || s.Backup.FailingSince == nil || s.Drill.FailingSince == nil || s.Backup.Name != all[1].Name {
		t.Errorf("%+v, %v", s, err)
	}
	for _, line := range []string{"sandboxd_backup_failures_total 1\n", "sandboxd_backup_drill_failed 1\n"} {
		if text := scrape(t, h.Daemon); !strings.Contains(text, line) {
			t.Errorf("the metrics lack %s", line)
		}
	}
	if err := os.Rename(to+".away", to); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(daemontest.Bin("sandboxd"), "restore", "--config", h.Config, "--check", "--from", all[0].Name).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "ok: the backup that host") {
		t.Errorf("a check beside the daemon: %v\n%s", err, out)
	}

	h.Stop()
	t.Cleanup(func() {
		h.Stop()
		if said, err := h.restore(t, "--accept"); err != nil {
			t.Errorf("%v: %s", err, said)
		}
		kept, _ := filepath.Glob(filepath.Join(h.StateDir, "sandboxd.db.before-restore-*"))
		for _, path := range kept {
			os.Remove(path)
		}
	})
	if said, err := h.restore(t, "--from", "latest", "--identity", key); err != nil || !strings.Contains(said, all[1].Name) {
		t.Fatalf("%v\n%s", err, said)
	}
	h.Start()
	h.answers(t, sb.ID)
	if s, err := api.BackupStatus(t.Context()); err != nil || s.Backup.Name != all[1].Name {
		t.Errorf("the next daemon knows %+v, %v", s, err)
	}
}
