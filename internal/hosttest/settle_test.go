package hosttest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// TestSettles: Settles waits for what the kernel frees late, and reports what stays soon
// after a reference is gone.
func TestSettles(t *testing.T) {
	Root(t)
	start := time.Now()
	if err := Settles(t, func() error {
		if time.Since(start) < time.Second {
			return errors.New("not yet")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	took, err := letGo(t)
	if err != nil || took == 0 {
		t.Fatalf("a reference: %v, %v", took, err)
	}
	t.Logf("a reference is gone after %v", took)
	start = time.Now()
	stays := errors.New("it stays")
	if err := Settles(t, func() error { return stays }); !errors.Is(err, stays) {
		t.Errorf("of what stays it says %v", err)
	}
	if waited := time.Since(start); waited < Patient(settles) {
		t.Errorf("it waited for %v only", waited)
	}
}

// TestOthers: a disk that is still mounted only in a stranger's namespace does not count
// as held; in the namespace of a process of the instance it does.
func TestOthers(t *testing.T) {
	Root(t)
	inst := instance.Instance('7')
	dir := inst.StateDir()
	if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)); err != nil { // a killed run leaves it
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	run := func(argv ...string) {
		t.Helper()
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", argv, err, out)
		}
	}
	disk, mnt := filepath.Join(dir, "disk"), filepath.Join(dir, "mnt")
	run("mkdir", mnt)
	run("truncate", "-s", "16M", disk)
	run("mkfs.ext4", "-q", disk)
	for arg, held := range map[string]bool{"somebody": false, disk: true} {
		run("mount", "-o", "loop", disk, mnt)
		if got := strings.Join(Held(inst), "\n"); !strings.Contains(got, "loop device over "+disk) {
			t.Errorf("while it is mounted the host holds %s", got)
		}
		cmd := exec.Command("unshare", "--mount", "sh", "-c", "echo made; read -r _", arg)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_, err = out.Read(make([]byte, 8))
		run("umount", mnt)
		if got := strings.Join(Held(inst), "\n"); err != nil || strings.Contains(got, "loop device over "+disk) != held {
			t.Errorf("in a namespace of %s: the host holds %q, %v", arg, got, err)
		}
		in.Close()
		_ = cmd.Wait() // the error is that of read, which finds no line
		if err := Settles(t, func() error {
			if got := Held(inst); len(got) > 0 {
				return fmt.Errorf("the host holds %v", got)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
}
