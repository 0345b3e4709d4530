package runtimetest

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Memorizer is a Runtime that keeps the memory of sandboxes.
type Memorizer interface {
	Runtime
	Checkpoint(ctx context.Context, id, dir string, still func() error) error
	Restore(ctx context.Context, id, dir string, n record.MemoryNeeds, stdin *os.File) (ran bool, err error)
	Needs(id string) (record.MemoryNeeds, error)
	Meets(n record.MemoryNeeds) error
}

// counted is what the guest answers to "count".
type counted struct {
	N   int    `json:"n"`
	Sum string `json:"sum"`
	Err string `json:"err"`
}

func (b *Box) count(t testing.TB) counted {
	t.Helper()
	var c counted
	must(t, b.Ask("count", &c))
	if c.Err != "ok" {
		t.Fatalf("%s: %s", b.ID, c.Err)
	}
	return c
}

// countsOn fails unless the guest of b has counted from at, or a little further, and goes on.
func (b *Box) countsOn(t testing.TB, at counted) {
	t.Helper()
	first := b.count(t)
	if first.N < at.N || first.Sum != at.Sum {
		t.Errorf("%s goes on at %d, after %d", b.ID, first.N, at.N)
	}
	for deadline := time.Now().Add(10 * time.Second); b.count(t).N == first.N; {
		if time.Now().After(deadline) {
			t.Fatalf("%s does not count on from %d", b.ID, first.N)
		}
	}
}

// copies is how many copies LiveFork makes at once.
const copies = 3

// LiveFork copies a sandbox that runs, memory and files, while it goes on. Its guest counts in
// memory and in a file, and would say if the two came apart. It logs what each part took.
func LiveFork(t *testing.T, name string, open Open) {
	h := NewHost(t, name)
	rt := open(t, h).(Memorizer)
	t.Cleanup(func() { must(t, rt.Close()) })
	source, image := h.NewBox(t, rt), t.TempDir()
	must(t, source.Start(t.Context()))
	before := source.count(t)

	needs, err := rt.Needs(source.ID)
	must(t, err)
	must(t, rt.Meets(needs)) // the same runsc, on the same CPU

	part := func(name string, f func() error) {
		t.Helper()
		start := time.Now()
		must(t, f())
		t.Logf("%s: %v", name, time.Since(start).Round(100*time.Microsecond))
	}
	var boxes []*Box
	for range copies {
		boxes = append(boxes, h.NewBox(t, rt))
	}
	copyFiles := func() error {
		frozen := source.file(t)
		for _, b := range boxes {
			if err := exec.Command("cp", "-a", source.Config.RootFS+"/.", b.Config.RootFS).Run(); err != nil {
				return err
			}
		}
		if now := source.file(t); now != frozen {
			t.Errorf("it counted while it stood still, from %s to %s", frozen, now)
		}
		return nil
	}
	part("checkpoint and copies of the files", func() error {
		return rt.Checkpoint(t.Context(), source.ID, image, func() error {
			part("copies of the files", copyFiles)
			return nil
		})
	})
	source.countsOn(t, before)
	part("restore of three at once", func() error {
		var wg sync.WaitGroup
		errs := make([]error, len(boxes))
		for i, b := range boxes {
			wg.Go(func() { errs[i] = b.Restore(t.Context(), image, needs) })
		}
		wg.Wait()
		return errors.Join(errs...)
	})
	for _, b := range boxes {
		b.countsOn(t, before)
	}
	source.countsOn(t, before)
	testUnfinished(t, rt, source)
	testBadImages(t, h, rt, image, needs)
}

// testUnfinished: a checkpoint that fails, or whose client goes away, leaves the guest running.
func testUnfinished(t *testing.T, rt Memorizer, source *Box) {
	at := source.count(t)
	full := errors.New("the disk is full")
	if err := rt.Checkpoint(t.Context(), source.ID, t.TempDir(), func() error { return full }); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
	source.countsOn(t, at)
	ctx, cancel := context.WithCancel(t.Context())
	if err := rt.Checkpoint(ctx, source.ID, t.TempDir(), func() error { cancel(); return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	source.countsOn(t, at)
	used := t.TempDir()
	must(t, os.WriteFile(filepath.Join(used, "pages.img"), nil, 0o600))
	says(t, rt.Checkpoint(t.Context(), source.ID, used, nil), source.ID, "pages.img", "exists")
	source.countsOn(t, at)
}

// file is what the guest has counted in its file.
func (b *Box) file(t testing.TB) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(b.Config.RootFS, "count"))
	must(t, err)
	return strings.TrimSpace(strings.TrimRight(string(text), "."))
}

// Restore is Start from a memory image.
func (b *Box) Restore(ctx context.Context, image string, needs record.MemoryNeeds) error {
	if err := oci.Write(b.h.Bundle(b.ID), oci.NewSpec(b.h.runtime, b.Config)); err != nil {
		return err
	}
	_, err := b.rt.(Memorizer).Restore(ctx, b.ID, image, needs, b.stdin)
	return err
}

// testBadImages: an image that is not whole starts nothing that answers, and says why.
func testBadImages(t *testing.T, h *Host, rt Memorizer, image string, needs record.MemoryNeeds) {
	b := h.NewBox(t, rt)
	says(t, b.Restore(t.Context(), t.TempDir(), needs), "restore", b.ID, "not whole", "checkpoint.img")
	short := t.TempDir()
	must(t, os.CopyFS(short, os.DirFS(image)))
	must(t, os.Truncate(filepath.Join(short, "checkpoint.img"), 1000))
	says(t, b.Restore(t.Context(), short, needs), "restore", b.ID)
	says(t, rt.Checkpoint(t.Context(), b.ID, t.TempDir(), nil), "Checkpoint", b.ID, "no such file")
}

// OtherBuild keeps memory by one build of a runtime, and goes on with it under the driver of another
// one, as after an upgrade: on the build that kept it, whose sentry the driver calls.
func OtherBuild(t *testing.T, name string, open func(t testing.TB, h *Host, dir string, installed ...string) Runtime) {
	h := NewHost(t, name)
	newer := t.TempDir()
	must(t, os.CopyFS(filepath.Join(newer, "agent"), os.DirFS(h.agent)))
	for file, dir := range map[string]string{name: h.Bin, "agent/sandbox-agent": h.Libexec} { // bytes behind a program change nothing of it
		b, err := os.ReadFile(filepath.Join(dir, file))
		must(t, err)
		must(t, os.WriteFile(filepath.Join(newer, file), append(b, '\n'), 0o755))
	}
	before, after := open(t, h, h.Bin, h.Libexec).(Memorizer), open(t, h, newer, h.Bin, h.Libexec).(Memorizer)
	t.Cleanup(func() { must(t, after.Close()) })
	source := h.NewBox(t, before)
	must(t, source.Start(t.Context()))
	at := source.count(t)
	needs, err := before.Needs(source.ID)
	must(t, err)
	must(t, after.Meets(needs))
	fresh := h.NewBox(t, after)
	must(t, fresh.Start(t.Context()))
	is, err := after.Needs(fresh.ID)
	must(t, err)
	if is.Build == needs.Build || is.Agent != needs.Agent {
		t.Fatalf("the builds do not differ as they should: %+v, %+v", is, needs)
	}
	for _, kept := range []Memorizer{before, after} { // also an older sentry and a newer driver
		b, image := h.NewBox(t, after), t.TempDir()
		must(t, kept.Checkpoint(t.Context(), source.ID, image, func() error {
			return exec.Command("cp", "-a", source.Config.RootFS+"/.", b.Config.RootFS).Run()
		}))
		source.countsOn(t, at)
		must(t, b.Restore(t.Context(), image, needs))
		b.countsOn(t, at)
		is, err := after.Needs(b.ID)
		must(t, err)
		if is.Build != needs.Build || is.Agent != needs.Agent {
			t.Errorf("it goes on on %+v, and needs %+v", is, needs)
		}
	}
	must(t, before.Close())
	for part, dirs := range map[string][]string{"runsc": {h.Libexec}, "agent": {h.Bin}} {
		pruned := open(t, h, newer, dirs...).(Memorizer)
		says(t, pruned.Meets(needs), part, "another build", "files alone")
		must(t, pruned.Close())
	}
}
