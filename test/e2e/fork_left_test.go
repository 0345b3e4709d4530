package e2e_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// TestForkLeft: when the client of a fork ends in the middle, however, no further copy is begun, and those that
// were begun come up. One that asked for no wait has its whole fork. More copies than fit are refused before the first.
func TestForkLeft(t *testing.T) {
	const count = 12
	h := newHost(t, daemontest.Options{Config: []string{"[limits]", "max_creating = 1", "max_sandboxes = 20"}})
	turn := h.newHeldTurn(t)
	for _, runtime := range runtimes {
		l := &lab{host: h, T: t, runtime: runtime}
		origin := h.create(t, spec(runtime)).ID
		before := h.holds()
		fork := []string{"fork", origin, "-n", fmt.Sprint(count)}
		if forkModes[runtime] == wire.ForkMemory {
			fork = append(fork, "--memory")
		}
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
			t.Run(runtime+"/"+sig.String(), func(t *testing.T) {
				release := turn.hold(t)
				var errout bytes.Buffer
				args := append([]string{"--host", "unix://" + h.Socket}, fork...)
				cmd := exec.CommandContext(t.Context(), daemontest.Bin("sandboxctl"), args...)
				cmd.Stderr = &errout
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				var of *wire.ForkOf
				eventually(t, patience, func() error { // until the first copy waits for the turn that is held
					for _, sb := range h.copies(t) {
						of = sb.Sandboxd.Fork
						return nil
					}
					return fmt.Errorf("no copy is begun: %s", &errout)
				})
				if f, err := h.api.Snapshots().GetFork(t.Context(), of.ID); err != nil || f.Status.State != wire.ForkCreating ||
					f.Status.Message != "0 of 12 copies are made, 1 under way" {
					t.Errorf("in the middle: %+v, %v", f.Status, err)
				}
				if err := cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
				if err := cmd.Wait(); err == nil {
					t.Error("an interrupted fork says that it is whole")
				}
				release()
				var f wire.Fork
				eventually(t, patience, func() (err error) {
					if f, err = h.api.Snapshots().GetFork(t.Context(), of.ID); err == nil && f.Status.State == wire.ForkCreating {
						err = fmt.Errorf("%+v", f.Status)
					}
					return err
				})
				all := h.copies(t)
				if f.Status.State != wire.ForkFailed || !strings.Contains(f.Status.Message, "the client that asked for it left") ||
					len(f.Sandboxes) != len(all) || len(all) == 0 || len(all) >= count {
					t.Errorf("%d copies, %+v", len(all), f)
				}
				for _, sb := range all {
					h.answers(t, sb.ID)
				}
				h.noSnapshots(t, turn.snap)
				h.deleteAll(t, origin)
				h.holdsOnly(t, before)
			})
		}
		r := wire.ForkRequest{Count: 3, Mode: forkModes[runtime], Timeout: new(int64(600))}
		f, err := h.api.Snapshots().Fork(t.Context(), origin, r, false)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, patience, func() (err error) {
			if f, err = h.api.Snapshots().GetFork(t.Context(), f.ID); err == nil &&
				(f.Status.State != wire.ForkReady || len(f.Sandboxes) != 3) {
				err = fmt.Errorf("without a client: %+v", f)
			}
			return err
		})
		l.wants(l.ctl("fork", origin, "-n", "200"), 125, "16 would fit")
		h.deleteAll(t)
	}
	turn.remove(t)
}

// heldTurn holds the only turn of a host that brings up one sandbox at a time (max_creating = 1).
type heldTurn struct {
	host
	snap  string
	pages string // a FIFO, in place of a file of the snapshot's memory
}

func (h host) newHeldTurn(t *testing.T) heldTurn {
	t.Helper()
	snap, err := h.api.Snapshots().CreateWithMemory(t.Context(), h.create(t, spec("runsc")).ID, "", true)
	if err != nil {
		t.Fatal(err)
	}
	h.deleteAll(t)
	turn := heldTurn{h, snap.ID, filepath.Join(h.StateDir, "pool", pool.MemoryDir, snap.ID, "pages.img")}
	if err := os.Rename(turn.pages, turn.pages+".whole"); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(turn.pages, 0o600); err != nil {
		t.Fatal(err)
	}
	return turn
}

// hold returns when a sandbox has the turn that comes up no further. It fails, and the turn is free, with release.
func (l heldTurn) hold(t *testing.T) (release func()) {
	t.Helper()
	sb, err := l.api.Create(t.Context(), recalled(l.snap, "turn"), false)
	if err != nil {
		t.Fatal(err)
	}
	var w *os.File
	eventually(t, patience, func() (err error) { // until it reads its memory
		w, err = os.OpenFile(l.pages, os.O_WRONLY|syscall.O_NONBLOCK, 0)
		return err
	})
	return func() {
		w.Close()
		l.awaitState(t, sb.ID, wire.Failed, patience)
		l.deletes(t, sb.ID)
	}
}

// remove removes the snapshot, whole.
func (l heldTurn) remove(t *testing.T) {
	t.Helper()
	if err := os.Rename(l.pages+".whole", l.pages); err != nil {
		t.Fatal(err)
	}
	if err := l.api.Snapshots().Remove(t.Context(), l.snap); err != nil {
		t.Error(err)
	}
}

// copies lists the sandboxes that are copies.
func (h host) copies(t *testing.T) (all []wire.Sandbox) {
	t.Helper()
	list, err := h.api.List(t.Context(), client.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range list {
		if sb.Sandboxd.Fork != nil {
			all = append(all, sb)
		}
	}
	return all
}
