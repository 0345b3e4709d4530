package e2e_test

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// draws prints random numbers of three kinds.
const draws = "import os, random, uuid; print(os.urandom(8).hex(), uuid.uuid4().hex, random.random())"

// cell runs code in the python context that a sandbox keeps, and returns what it prints.
func (h host) cell(t *testing.T, id, code string) string {
	t.Helper()
	e, err := h.api.Interpreters(id).Run(t.Context(), client.Code{Text: code, Language: "python"})
	var out bytes.Buffer
	if err == nil {
		err = e.Wait(&out, io.Discard, func(map[string]string) error { return nil })
	}
	if err != nil {
		t.Fatalf("sandbox %s: %v", id, err)
	}
	return out.String()
}

// fork makes a fork that must be whole.
func (h host) fork(t *testing.T, id string, count int, mode string, change ...func(*wire.ForkOverrides)) wire.Fork {
	t.Helper()
	over := &wire.ForkOverrides{}
	for _, c := range change {
		c(over)
	}
	r := wire.ForkRequest{Count: count, Mode: mode, Timeout: new(int64(600)), Overrides: over}
	f, err := h.api.Snapshots().Fork(t.Context(), id, r, true)
	if err != nil || f.Status.State != wire.ForkReady || len(f.Sandboxes) != count {
		t.Fatalf("%+v, %v", f, err)
	}
	return f
}

// named gives copies a name.
func named(name string) func(*wire.ForkOverrides) {
	return func(o *wire.ForkOverrides) { o.Extensions = map[string]string{wire.ExtName: name} }
}

// TestForks: copies of a sandbox that runs go on with its memory, each as a sandbox of its own,
// and no two draw the same random numbers.
func TestForks(t *testing.T) {
	h := newHost(t, daemontest.Options{Pool: pool.BtrfsLoop})
	daemontest.Image(t, h.Daemon, "python")
	ctx := t.Context()
	r := spec("runsc")
	r.Image.URI, r.Extensions[wire.ExtName], r.Metadata = "python", "origin", map[string]string{"team": "a"}
	r.Env = map[string]*string{"WHO": new("origin")}
	origin := h.create(t, r)
	if out := h.cell(t, origin.ID, "x = 41\n"+draws); out == "" {
		t.Fatal("the context prints nothing")
	}
	const count = 8
	f := h.fork(t, "origin", count, wire.ForkMemory, named("try"), func(o *wire.ForkOverrides) {
		o.Env, o.Metadata = map[string]*string{"WHO": new("copy")}, map[string]string{"copy": "yes"}
	})
	seen := map[string]string{}
	once := func(what, text string) {
		t.Helper()
		for word := range strings.FieldsSeq(text) {
			if other, ok := seen[word]; ok {
				t.Errorf("%s draws %s, as %s did", what, word, other)
			}
			seen[word] = what
		}
	}
	once("the origin", h.cell(t, origin.ID, draws))
	for i, c := range f.Sandboxes {
		name := fmt.Sprint("try-", i+1)
		sb, err := h.api.Get(ctx, c.ID)
		if err != nil || c.Name != name || sb.Sandboxd.Name != name || sb.Status.State != wire.Running ||
			!maps.Equal(sb.Metadata, map[string]string{"team": "a", "copy": "yes"}) || sb.ExpiresAt == nil {
			t.Errorf("copy %d is %+v, %v", i+1, sb, err)
		}
		if of := sb.Sandboxd.Fork; of == nil || of.ID != f.ID || of.Source != origin.ID || of.Mode != wire.ForkMemory || of.Index != i+1 {
			t.Errorf("copy %d is a copy of %+v", i+1, of)
		}
		if out := h.cell(t, c.ID, "print(x + 1)"); out != "42\n" {
			t.Errorf("the context of copy %d has forgotten: %q", i+1, out)
		}
		once(name+"'s context", h.cell(t, c.ID, draws))
		out, err := h.exec(ctx, c.ID, "python3", "-c", draws)
		if err != nil {
			t.Error(err)
		}
		once(name+"'s process", out)
		if out, err := h.exec(ctx, c.ID, "sh", "-c", "echo $WHO $(hostname)"); err != nil || out != "copy "+name+"\n" {
			t.Errorf("copy %d: %q, %v", i+1, out, err)
		}
	}
	if out, err := h.exec(ctx, origin.ID, "sh", "-c", "echo $WHO $(hostname)"); err != nil || out != "origin origin\n" {
		t.Errorf("the origin: %q, %v", out, err)
	}
	eventually(t, patience, func() error { // the temporary snapshot goes
		list, err := h.api.Snapshots().List(ctx, "")
		if err == nil && len(list) > 0 {
			err = fmt.Errorf("%d snapshots are left", len(list))
		}
		return err
	})
	h.forkRefused(t, origin.ID)
	h.Kill()
	h.Start()
	again, err := h.api.Snapshots().GetFork(ctx, f.ID)
	if err != nil || again.Status.State != wire.ForkReady || again.SandboxID != origin.ID || len(again.Sandboxes) != count ||
		again.Mode != wire.ForkMemory {
		t.Errorf("after a restart the fork is %+v, %v", again, err)
	}
}

// TestForkFiles: on both runtimes copies have the files, and their entrypoint starts.
func TestForkFiles(t *testing.T) {
	h := newHost(t, daemontest.Options{Pool: pool.BtrfsLoop})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			r := spec(runtime, "sh", "-c", "echo life >>/srv/lives; exec sleep 1000")
			r.NetworkPolicy = []byte(`{"defaultAction":"deny","egress":[{"action":"allow","target":"203.0.113.9"}]}`)
			origin := h.create(t, r)
			lives := func(id, want string) { // a create waits for the entrypoint for a moment only
				eventually(t, patience, func() error {
					out, err := h.exec(t.Context(), id, "cat", "/srv/lives")
					if err == nil && out != want {
						err = fmt.Errorf("sandbox %s has had the lives %q, want %q", id, out, want)
					}
					return err
				})
			}
			lives(origin.ID, "life\n")
			f := h.fork(t, origin.ID, 2, "", func(o *wire.ForkOverrides) { o.ResourceLimits = map[string]string{"memory": "128Mi"} })
			for _, c := range f.Sandboxes {
				lives(c.ID, "life\nlife\n")
				is, err := h.api.Inspect(t.Context(), c.ID)
				if err != nil || is.Sandboxd.MemoryBytes != 128<<20 || !slices.ContainsFunc(is.Rules, func(rule string) bool {
					return strings.Contains(rule, "203.0.113.9")
				}) || is.Sandboxd.Runtime != runtime {
					t.Errorf("copy %s is %+v, %v", c.ID, is, err)
				}
			}
			h.deleteAll(t)
		})
	}
	runc := h.create(t, spec("runc"))
	r := wire.ForkRequest{Count: 1, Mode: wire.ForkMemory, Timeout: new(int64(600))}
	_, err := h.api.Snapshots().Fork(t.Context(), runc.ID, r, true)
	if !errs.Is(err, errs.Unsupported) || !strings.Contains(err.Error(), "need runtime runsc") {
		t.Errorf("the memory of runc: %v", err)
	}
}

// forkRefused: what cannot be is refused before anything is made.
func (h host) forkRefused(t *testing.T, id string) {
	t.Helper()
	before := h.holds()
	minute := new(int64(60))
	for words, r := range map[string]wire.ForkRequest{
		"count 0: want 1 to 256":       {Timeout: minute},
		"count 1000000: want 1 to 256": {Count: 1_000_000, Timeout: minute},
		"timeout is missing":           {Count: 1},
		`mode "both": want`:            {Count: 1, Timeout: minute, Mode: "both"},
		"cannot be changed for copies": {Count: 1, Timeout: minute, Overrides: &wire.ForkOverrides{
			Extensions: map[string]string{wire.ExtRuntime: "runc"},
		}},
		"these differ: limit of processes": {Count: 1, Timeout: minute, Mode: wire.ForkMemory, Overrides: &wire.ForkOverrides{
			ResourceLimits: map[string]string{"pids": "77"},
		}},
	} {
		f, err := h.api.Snapshots().Fork(t.Context(), id, r, true)
		if err == nil {
			err = fmt.Errorf("%s: %s", f.Status.State, f.Status.Message)
		}
		if !strings.Contains(err.Error(), words) {
			t.Errorf("want %q: %v", words, err)
		}
	}
	if _, err := h.api.Snapshots().GetFork(t.Context(), "fork-none"); !errs.Is(err, errs.NotFound) {
		t.Errorf("a fork that is none: %v", err)
	}
	if err := h.api.Pause(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	_, err := h.api.Snapshots().Fork(t.Context(), id, wire.ForkRequest{Count: 1, Mode: wire.ForkMemory, Timeout: minute}, true)
	if !errs.Is(err, errs.WrongState) {
		t.Errorf("a live fork of a paused sandbox: %v", err)
	}
	if err := h.api.Resume(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	settles(t, func() error {
		if now := h.holds(); !slices.Equal(now, before) {
			return fmt.Errorf("the host holds %v, and before %v", now, before)
		}
		return nil
	})
}
