package daemon

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestSharedBundle: of the users of a host, only the mapped root of a sandbox reaches the
// files that its first process binds, and nobody the spec or the names of other bundles.
func TestSharedBundle(t *testing.T) {
	hosttest.Root(t)
	run := t.TempDir()
	if err := os.Chmod(filepath.Dir(run), 0o755); err != nil {
		t.Fatal(err)
	}
	b := &bundles{cfg: &config.Config{Instance: 'g', RunDir: run}}
	r := &record.Record{ID: "gabcdefghijk", Slot: 3}
	dir := b.dir(r.ID)
	for range 2 { // a start writes it again
		if err := b.makeDir(); err != nil {
			t.Fatal(err)
		}
		if err := oci.Write(dir, &specs.Spec{}); err != nil {
			t.Fatal(err)
		}
		if err := oci.WriteFile(dir, "hosts", []byte("127.0.0.1 localhost\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := b.share(dir, r); err != nil {
			t.Fatal(err)
		}
	}
	own := b.cfg.Instance.UIDBase(r.Slot)
	for _, tt := range []struct {
		id      uint32
		command string
		works   bool
	}{
		{own, "cat hosts", true},
		{own, "cat config.json", false},
		{own, "ls .", false},
		{own, "ls ..", false},
		{own, "touch x", false},
		{b.cfg.Instance.UIDBase(r.Slot + 1), "cat hosts", false},
		{65534, "cat hosts", false},
		{65534, "ls ..", false},
	} {
		cmd := exec.Command("/bin/sh", "-c", fmt.Sprintf("cd %s && %s", dir, tt.command))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: tt.id, Gid: tt.id}}
		if out, err := cmd.CombinedOutput(); (err == nil) != tt.works {
			t.Errorf("%s as %d: %v\n%s", tt.command, tt.id, err, out)
		}
	}
}
