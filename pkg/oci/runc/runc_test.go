package runc_test

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/oci/runc"
	"github.com/sandboxd/sandboxd/pkg/oci/runtimetest"
)

func open(t testing.TB, h *runtimetest.Host) runtimetest.Runtime {
	t.Helper()
	d, err := runc.New(runc.Config{Binary: filepath.Join(h.Bin, "sandboxd-runc"), Root: h.Root, Bundle: h.Bundle})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestConformance(t *testing.T) { runtimetest.Run(t, oci.Runc, open) }

// CVE-2019-5736: a guest that reaches the launcher's program, by /proc/self/exe of a
// process on its way into the sandbox, reaches a copy that nobody can write to.
func TestLauncherIsSealed(t *testing.T) {
	h := runtimetest.NewHost(t, oci.Runc)
	d := open(t, h).(*runc.Driver)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := h.NewBox(t, d).Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	program, err := os.Open(fmt.Sprintf("/proc/%d/exe", d.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	const want = unix.F_SEAL_WRITE | unix.F_SEAL_GROW | unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL
	if seals, err := unix.FcntlInt(program.Fd(), unix.F_GET_SEALS, 0); err != nil || seals&want != want {
		t.Errorf("the launcher runs from %s with the seals %x (%v), want %x", program.Name(), seals, err, want)
	}
}

// Sandboxes outlive the launcher that started them, and the next start finds
// another one.
func TestLauncherDies(t *testing.T) {
	h := runtimetest.NewHost(t, oci.Runc)
	d := open(t, h).(*runc.Driver)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	first := h.NewBox(t, d)
	if err := first.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := d.Pid()
	if err := syscall.Kill(before, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	second := h.NewBox(t, d)
	// The kill may come while the first request is already in the dead one's hands.
	if err := second.Start(t.Context()); err != nil {
		t.Logf("start beside the kill: %v", err)
	} else if d.Pid() == before {
		t.Error("the launcher survived SIGKILL")
	}
	third := h.NewBox(t, d)
	if err := third.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, b := range []*runtimetest.Box{first, third} {
		var pong string
		if err := b.Ask("ping", &pong); err != nil || pong != "pong" {
			t.Errorf("%s says %q, %v", b.ID, pong, err)
		}
	}
}

func BenchmarkStart(b *testing.B) { runtimetest.Bench(b, oci.Runc, open) }
