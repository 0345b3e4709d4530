package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// TestDeletesAtOnce deletes one sandbox several times at once: each answer is
// "done" or "there is none".
func TestDeletesAtOnce(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	before := h.empty(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			sb := h.create(t, spec(runtime))
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					if err := h.api.Delete(t.Context(), sb.ID); err != nil && !errs.Is(err, errs.NotFound) {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			h.gone(t, sb.ID)
			h.holdsOnly(t, before)
		})
	}
}

// TestDeleteDuringCreate deletes sandboxes that are being made, at ever later
// moments of their making.
func TestDeleteDuringCreate(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	before := h.empty(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			for delay := time.Duration(0); delay < 120*time.Millisecond; delay += 6 * time.Millisecond {
				soon(t, 2*time.Second, fmt.Sprintf("delete after %v", delay), func() time.Duration {
					sb, err := h.api.Create(t.Context(), spec(runtime), false)
					if err != nil {
						t.Fatal(err)
					}
					time.Sleep(delay)
					lasted := took(func() { err = h.api.Delete(t.Context(), sb.ID) })
					if err != nil {
						t.Errorf("after %v: %v", delay, err)
					}
					h.gone(t, sb.ID)
					return lasted
				})
			}
			h.holdsOnly(t, before)
		})
	}
}

// TestClientHangsUp gives up waiting for creates: what was begun is finished.
func TestClientHangsUp(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	before := h.empty(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			for _, patience := range []time.Duration{0, 1, 3, 10, 30} {
				r := spec(runtime)
				r.Metadata = map[string]string{"patience": fmt.Sprint(int(patience))}
				ctx, cancel := context.WithTimeout(t.Context(), patience*time.Millisecond)
				_, err := h.api.Create(ctx, r, true)
				cancel()
				if err != nil && !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("after %d ms: %v", patience, err)
				}
				all, err := h.api.List(t.Context(), client.Filter{Metadata: r.Metadata})
				if err != nil {
					t.Fatal(err)
				}
				for _, sb := range all {
					h.awaitState(t, sb.ID, wire.Running, 10*time.Second)
					h.answers(t, sb.ID)
				}
			}
			// One that was given up may still be on its way to the store: a daemon that
			// stops waits for it.
			h.Stop()
			h.Start()
			h.deleteAll(t)
			h.holdsOnly(t, before)
		})
	}
}

// TestCrowd makes and deletes 20 sandboxes at once, of both runtimes.
func TestCrowd(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	before := h.empty(t)
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			sb, err := h.api.Create(t.Context(), spec(runtimes[i%2]), true)
			if err != nil || sb.Status.State != wire.Running {
				t.Errorf("%+v, %v", sb.Status, err)
				return
			}
			h.answers(t, sb.ID)
			if err := h.api.Delete(t.Context(), sb.ID); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	h.holdsOnly(t, before)
}

// TestOutOfFiles runs a daemon that may open few files: creates beyond that
// fail in words, the daemon lives, and nothing is left of them.
func TestOutOfFiles(t *testing.T) {
	h := newHost(t, daemontest.Options{Wrap: []string{"sh", "-c", `exec ${FILES:+prlimit --nofile=$FILES} "$@"`, "sh"}})
	h.Stop() // it has the image
	h.Start("FILES=80:80")
	var (
		mu     sync.Mutex
		wg     sync.WaitGroup
		failed int
		said   []string
	)
	for i := range 40 {
		wg.Go(func() {
			sb, err := h.api.Create(t.Context(), spec(runtimes[i%2]), true)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				failed++
				said = append(said, err.Error())
				if errs.Is(err, errs.Internal) && !strings.Contains(err.Error(), "request") {
					t.Errorf("create: %v", err)
				}
			case sb.Status.State == wire.Failed:
				failed++
				said = append(said, sb.Status.Message)
				if !strings.Contains(sb.Status.Message, ": step ") {
					t.Errorf("%+v", sb.Status)
				}
			}
		})
	}
	wg.Wait()
	// A program that a step starts inherits the limit and has its own words.
	if failed == 0 || !strings.Contains(strings.Join(said, "\n"), "has reached its limit of open files") {
		t.Errorf("%d of 40 creates failed, saying %q", failed, said)
	}
	select {
	case <-h.Ended():
		t.Fatal("the daemon died")
	default:
	}
	h.deleteAll(t)
	settles(t, func() error {
		for _, line := range h.holds() {
			if sandboxes.MatchString(line) {
				return fmt.Errorf("the host holds %s", line)
			}
		}
		return nil
	})
	h.answers(t, h.create(t, spec("runc")).ID)
}

// TestLauncherStaysOutside: no thread of the process that starts runc sandboxes
// stays in a mount namespace of one; it would hold a disk that was deleted.
func TestLauncherStaysOutside(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 6 {
				if err := h.api.Delete(t.Context(), h.create(t, spec("runc")).ID); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	outside, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	launchers := 0
	processes, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range processes {
		args, _ := os.ReadFile(p)
		if !strings.HasSuffix(string(args), fmt.Sprintf("\x00launch\x00/run/sandboxd-%s/runc\x00", h.Instance)) {
			continue
		}
		launchers++
		settles(t, func() error {
			threads, _ := filepath.Glob(filepath.Dir(p) + "/task/*/ns/mnt")
			for _, th := range threads {
				if ns, err := os.Readlink(th); err == nil && ns != outside {
					return fmt.Errorf("%s is in %s, not in %s", th, ns, outside)
				}
			}
			return nil
		})
	}
	if launchers == 0 {
		t.Error("no launcher was found")
	}
}
