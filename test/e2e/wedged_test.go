package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// pids lists the processes of the host that are in the cgroup of a sandbox.
func (h host) pids(id string) (all []string) {
	for _, pattern := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		files, _ := filepath.Glob(pattern + h.Instance.CgroupRoot() + "/" + id + "/run/cgroup.procs")
		for _, f := range files {
			b, _ := os.ReadFile(f)
			all = append(all, strings.Fields(string(b))...)
		}
	}
	return all
}

// lifeless is nil if a sandbox has no processes.
func (h host) lifeless(id string) error {
	if pids := h.pids(id); len(pids) > 0 {
		return fmt.Errorf("sandbox %s has the processes %v", id, pids)
	}
	return nil
}

// processOf finds the host process of a sandbox whose arguments have a word.
func (h host) processOf(t *testing.T, id, word string) int {
	t.Helper()
	for _, pid := range h.pids(id) {
		args, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		if bytes.Contains(args, []byte(word)) {
			n, _ := strconv.Atoi(pid)
			return n
		}
	}
	t.Fatalf("sandbox %s has no process %s", id, word)
	return 0
}

// parts are the host processes whose death or stop is a bad day, by runtime.
var parts = map[string][]string{
	"runc":  {"sandbox-agent"},
	"runsc": {"runsc-sandbox", "runsc-gofer"},
}

// noticed is how soon a death is.
const noticed = 2 * time.Second

// killed kills a process that a sandbox cannot live without, and returns the
// sandbox when it has failed, and how soon after the kill that was, by the daemon's
// own account. What the daemon is not told of the sweep sees, up to a minute later.
func (h host) killed(t *testing.T, id string, pid int) (wire.Sandbox, time.Duration) {
	t.Helper()
	start := time.Now()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	sb := h.awaitState(t, id, wire.Failed, 2*time.Minute)
	// It has failed when all was taken down, which waits for the disk; the log tells
	// when its death was noticed.
	return sb, h.logged(t, start, `the runtime of a sandbox died" sandbox=`+id+" ").at.Sub(start)
}

// deletes deletes a sandbox and returns how long that took.
func (h host) deletes(t *testing.T, id string) time.Duration {
	t.Helper()
	return took(func() {
		if err := h.api.Delete(t.Context(), id); err != nil {
			t.Errorf("delete: %v", err)
		}
	})
}

// TestKilledParts: the death of an agent or a runtime is noticed within two seconds.
func TestKilledParts(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for runtime, words := range parts {
		for _, word := range words {
			t.Run(runtime+" "+word, func(t *testing.T) {
				other := h.create(t, spec(runtime))
				soon(t, noticed, "notice", func() time.Duration {
					sb := h.create(t, spec(runtime))
					ended, after := h.killed(t, sb.ID, h.processOf(t, sb.ID, word))
					if ended.Status.Reason != "runtime_crash" {
						t.Errorf("it ended as %+v", ended.Status)
					}
					return after
				})
				h.answers(t, other.ID)
				h.deleteAll(t)
			})
		}
	}
}

// stop stops a process and returns when all its threads have: one that is about
// to answer may still do so after the signal is sent.
func stop(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Second, func() error {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		for _, task := range tasks {
			if b, err := os.ReadFile(task); err == nil && !bytes.Contains(b, []byte("\nState:\tT")) {
				return fmt.Errorf("%s goes on after SIGSTOP:\n%s", task, b)
			}
		}
		return nil
	})
}

// TestStoppedParts: a sandbox whose processes are stopped from outside wedges
// nobody else. What is asked of it ends with the reason, and it can be deleted.
func TestStoppedParts(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	before := h.empty(t)
	for runtime, words := range parts {
		for _, word := range words {
			t.Run(runtime+" "+word, func(t *testing.T) {
				sb, other := h.create(t, spec(runtime)), h.create(t, spec(runtime))
				stop(t, h.processOf(t, sb.ID, word))
				asked := make(chan error, 3)
				start := time.Now()
				ask := func(name string, f func(ctx context.Context) error) {
					go func() {
						ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
						defer cancel()
						err := f(ctx)
						t.Logf("%s ended after %v: %v", name, time.Since(start).Round(time.Millisecond), err)
						if word == "runsc-gofer" && err == nil {
							asked <- nil // the sentry goes on: it holds the files itself (directfs)
							return
						}
						if !errs.Is(err, errs.Unavailable) || !strings.Contains(err.Error(), "sandboxctl rm") ||
							time.Since(start) > 25*time.Second {
							err = fmt.Errorf("%s after %v: %w", name, time.Since(start), err)
						} else {
							err = nil
						}
						asked <- err
					}()
				}
				ask("exec", func(ctx context.Context) error {
					_, err := h.exec(ctx, sb.ID, "cat", "/etc/debian_version")
					return err
				})
				ask("stat", func(ctx context.Context) error { _, err := h.api.Files(sb.ID).Stat(ctx, "/etc"); return err })
				ask("upload", func(ctx context.Context) error {
					big := make([]byte, 16<<20) // more than any buffer between here and there
					return h.api.Files(sb.ID).Put(ctx,
						[]client.Upload{{Path: "/root/big", Mode: 644, Size: int64(len(big)), Open: func() (io.ReadCloser, error) {
							return io.NopCloser(bytes.NewReader(big)), nil
						}}})
				})
				h.unharmed(t, sb.ID, other.ID)
				for range cap(asked) {
					if err := <-asked; err != nil {
						t.Error(err)
					}
				}
				soon(t, 2*time.Second, "delete", func() time.Duration {
					if sb.ID == "" {
						sb = h.create(t, spec(runtime))
						stop(t, h.processOf(t, sb.ID, word))
					}
					lasted := h.deletes(t, sb.ID)
					sb.ID = "" // once more, one anew
					return lasted
				})
				h.deleteAll(t)
			})
		}
	}
	h.holdsOnly(t, before)
}

// unharmed: all that is not asked of the wedged sandbox itself is quick.
func (h host) unharmed(t *testing.T, wedged, other string) {
	t.Helper()
	for name, f := range map[string]func(ctx context.Context) error{
		"list":    func(ctx context.Context) error { _, err := h.api.List(ctx, client.Filter{}); return err },
		"get":     func(ctx context.Context) error { _, err := h.api.Get(ctx, wedged); return err },
		"inspect": func(ctx context.Context) error { _, err := h.api.Inspect(ctx, wedged); return err },
		"stats":   func(ctx context.Context) error { _, err := h.api.AllStats(ctx); return err },
		"exec in another": func(ctx context.Context) error {
			_, err := h.exec(ctx, other, "true")
			return err
		},
		"create and delete": func(ctx context.Context) error {
			sb, err := h.api.Create(ctx, spec("runc"), true)
			if err == nil {
				err = h.api.Delete(ctx, sb.ID)
			}
			return err
		},
	} {
		soon(t, 3*time.Second, name+" beside a wedged sandbox", func() time.Duration {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			return took(func() {
				if err := f(ctx); err != nil {
					t.Errorf("beside a wedged sandbox: %s: %v", name, err)
				}
			})
		})
	}
}

// TestSlowToEnd deletes a sandbox that the kernel does not end. The deletion does not wait
// for that, no client sees the sandbox any more, and nothing of it is left when the kernel
// is done, although the daemon dies meanwhile.
func TestSlowToEnd(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	ctx := t.Context()
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			sb := h.create(t, spec(runtime))
			release := hosttest.HoldExit(t, h.processOf(t, sb.ID, parts[runtime][0]))
			if err := h.api.Delete(ctx, sb.ID); err != nil {
				t.Fatal(err)
			}
			lingers := func() {
				t.Helper()
				if h.lifeless(sb.ID) == nil {
					t.Error("it has ended: this proves nothing")
				}
				if _, err := h.api.Get(ctx, sb.ID); !errs.Is(err, errs.NotFound) {
					t.Errorf("get: %v", err)
				}
				if err := h.api.Delete(ctx, sb.ID); !errs.Is(err, errs.NotFound) {
					t.Errorf("delete again: %v", err)
				}
				df, err := h.api.System().DiskUsage(ctx)
				if err != nil || df.Deleting == nil || df.Deleting.Sandboxes != 1 || len(df.Sandboxes) != 0 {
					t.Errorf("df says %+v, %+v, %v", df.Deleting, df.Sandboxes, err)
				}
				if text := scrape(t, h.Daemon); !strings.Contains(text, "\nsandboxd_deleting_sandboxes 1\n") {
					t.Error("the metric does not count it")
				}
			}
			lingers()
			h.Kill()
			if err := h.TryStart(); err != nil {
				t.Fatal(err)
			}
			lingers()
			other := h.create(t, spec(runtime)) // it has another slot
			h.answers(t, other.ID)
			h.deletes(t, other.ID)
			release()
			if line := operation(t, h, "recover_erase", sb.ID); !strings.Contains(line, "outcome=ok") {
				t.Error(line)
			}
			settles(t, func() error {
				if text := scrape(t, h.Daemon); !strings.Contains(text, "\nsandboxd_deleting_sandboxes 0\n") {
					return errors.New("the metric still counts a deleted sandbox")
				}
				return h.lifeless(sb.ID)
			})
		})
	}
	for line := range strings.Lines(h.Log()) {
		if strings.Contains(line, "level=ERROR") && (strings.Contains(line, " op=") || strings.Contains(line, "sweep")) {
			t.Error(line)
		}
	}
}
