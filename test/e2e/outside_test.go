package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// A process of a sandbox, as the host sees it.
type process struct {
	pid   int
	argv0 string
	inner int // its pid in its own namespace
}

// processesOf lists the processes in the cgroup of a sandbox.
func processesOf(t *testing.T, id string) (list []process) {
	t.Helper()
	found, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range found {
		b, err := os.ReadFile(dir + "/cgroup")
		if err != nil || !bytes.Contains(b, []byte("/"+id)) {
			continue
		}
		var p process
		p.pid, _ = strconv.Atoi(filepath.Base(dir))
		b, _ = os.ReadFile(dir + "/cmdline")
		p.argv0, _, _ = strings.Cut(string(b), "\x00")
		b, _ = os.ReadFile(dir + "/status")
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 1 && f[0] == "NSpid:" {
				p.inner, _ = strconv.Atoi(f[len(f)-1])
			}
		}
		list = append(list, p)
	}
	return list
}

// mainProcess is the process that a sandbox cannot live without: PID 1 under runc,
// the sentry under runsc.
func mainProcess(t *testing.T, runtime, id string) int {
	t.Helper()
	all := processesOf(t, id)
	i := slices.IndexFunc(all, func(p process) bool {
		if runtime == "runsc" {
			return strings.Contains(p.argv0, "runsc-sandbox")
		}
		return p.inner == 1
	})
	if i < 0 {
		t.Fatalf("sandbox %s has no main process among %+v", id, all)
	}
	return all[i].pid
}

// TestKilledFromOutside has somebody on the host kill what a sandbox runs in.
func TestKilledFromOutside(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	before := h.empty(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			soon(t, noticed, "notice", func() time.Duration { return h.killedFromOutside(t, runtime, before) })
			h.holdsOnly(t, before)
		})
	}
}

// killedFromOutside kills the main process of a sandbox and returns how soon that was
// noticed.
func (h host) killedFromOutside(t *testing.T, runtime string, before []string) time.Duration {
	t.Helper()
	sb := h.create(t, spec(runtime, "sleep", "1000"))
	p, err := h.api.Start(t.Context(), sb.ID, client.Command{Argv: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	got, after := h.killed(t, sb.ID, mainProcess(t, runtime, sb.ID))
	killed := "see the daemon's log"
	if hosttest.Kernel(t, 6, 15) { // which tells others than its parent, too
		killed += " (killed by SIGKILL)"
	}
	if got.Status.Reason != "runtime_crash" || !strings.HasSuffix(got.Status.Message, killed) {
		t.Errorf("%+v, want a message that ends with %q", got.Status, killed)
	}
	exit := "unknown"
	if strings.Contains(killed, "SIGKILL") {
		exit = `"killed by SIGKILL"`
	}
	if log := h.Log(); !strings.Contains(log, "sandbox="+sb.ID+" runtime="+runtime+" exit="+exit) {
		t.Errorf("the log does not say how %s ended", sb.ID)
	}
	if _, err := p.Wait(new(bytes.Buffer), new(bytes.Buffer)); err == nil {
		t.Error("the command that ran in it is said to have ended well")
	}
	// Its disk is all that is left.
	h.holdsOnly(t, append(slices.Clone(before), "file "+filepath.Join(h.StateDir, "pool", sb.ID)))
	h.deleteAll(t)
	return after
}

// TestKilledFromInside: a guest kills its own PID 1. Linux ignores that, so its sandbox runs on runc; gVisor's
// kernel does not, and the record has the signal and the code, as that of a killed entrypoint.
func TestKilledFromInside(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			sb := h.create(t, spec(runtime, "sh", "-c", "echo $$ > /tmp/pid; exec sleep 1000"))
			says := "its PID 1 was killed by SIGKILL from inside the sandbox"
			eventually(t, patience, func() error { _, err := h.exec(t.Context(), sb.ID, "test", "-s", "/tmp/pid"); return err })
			out, err := h.exec(t.Context(), sb.ID, "sh", "-c", "kill -9 1; cat /tmp/pid")
			if runtime == "runc" {
				if err != nil || out == "" {
					t.Fatalf("%q, %v", out, err)
				}
				says = "its entrypoint was killed by SIGKILL"
				h.exec(t.Context(), sb.ID, "sh", "-c", "kill -9 $(cat /tmp/pid)") //nolint:errcheck // it may end with it
			}
			reason, code := "killed", 137
			if runtime == "runsc" && !hosttest.Kernel(t, 6, 15) { // which alone says how a process ended that it did not start
				reason, says, code = "runtime_crash", "or it was killed; see the daemon's log", 0
			}
			got := h.awaitState(t, sb.ID, wire.Failed, patience)
			if s := got.Status; s.Reason != reason || !strings.HasSuffix(s.Message, says) {
				t.Errorf("%+v, want %s: %s", s, reason, says)
			}
			if c := got.Sandboxd.ExitCode; (c == nil) != (code == 0) || c != nil && *c != code {
				t.Errorf("exit code %v, want %d", c, code)
			}
			h.deleteAll(t)
		})
	}
}

// TestAgentStopped has an agent that does not answer any more: nobody waits
// for it longer than they want to, and deleting does not need it.
func TestAgentStopped(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	before := h.empty(t)
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			other := h.create(t, spec(runtime))
			soon(t, 2*time.Second, "delete", func() time.Duration {
				sb := h.create(t, spec(runtime))
				stop(t, mainProcess(t, runtime, sb.ID))
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if out, err := h.exec(ctx, sb.ID, "true"); err == nil {
					t.Errorf("a stopped agent answered %q", out)
				}
				h.answers(t, other.ID)
				return h.deletes(t, sb.ID)
			})
			h.deleteAll(t)
			h.holdsOnly(t, before)
		})
	}
}

// TestRestartUnderStoppedAgent starts a daemon while an agent does not answer:
// the others are not held up, and it can be deleted.
func TestRestartUnderStoppedAgent(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			sb, other := h.create(t, spec(runtime)), h.create(t, spec(runtime))
			stop(t, mainProcess(t, runtime, sb.ID))
			soon(t, 2*time.Second, "start", func() time.Duration {
				h.Kill()
				lasted := took(func() { h.Start() })
				h.answers(t, other.ID)
				return lasted
			})
			h.deleteAll(t)
		})
	}
}

// TestHelpersKilled kills the processes that a daemon keeps for its runtimes:
// sandboxes live, and new ones can be made.
func TestHelpersKilled(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			sb := h.create(t, spec(runtime))
			pids := helpers(t, h.Pid())
			if len(pids) == 0 {
				t.Fatal("the daemon has no helpers")
			}
			for _, pid := range pids {
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					t.Error(err)
				}
			}
			settles(t, func() error { // one that is not dead yet would take a start with it
				if all := helpers(t, h.Pid()); slices.ContainsFunc(all, func(pid int) bool { return slices.Contains(pids, pid) }) {
					return fmt.Errorf("of the helpers %v live %v", pids, all)
				}
				return nil
			})
			h.answers(t, sb.ID)
			h.answers(t, h.create(t, spec(runtime)).ID)
			h.deleteAll(t)
		})
	}
}

// helpers lists the launchers among the children of the daemon: those that stay, and
// are in no sandbox.
func helpers(t *testing.T, daemon int) (pids []int) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", daemon))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		b, _ := os.ReadFile(task)
		for _, f := range strings.Fields(string(b)) {
			group, _ := os.ReadFile("/proc/" + f + "/cgroup")
			args, _ := os.ReadFile("/proc/" + f + "/cmdline")
			if pid, err := strconv.Atoi(f); err == nil && !sandboxes.Match(group) && bytes.Contains(args, []byte("sandboxd-runc")) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
