package e2e_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// eat takes 400 MB of memory and touches all of it.
const eat = "x = b'x' * (400 << 20); print('fed')"

// tellMemory: who goes over the limit dies with the reason. Under runc that is
// the command, under runsc the sandbox, because one sentry is one process to
// the kernel.
func tellMemory(t *testing.T, l *lab) {
	id := l.make("python", "--memory", "128Mi")
	neighbour := l.make("base")
	r := l.ctl("exec", id, "--", "python3", "-c", eat)
	l.wants(r, 137, "memory limit", "128MiB")
	if r.out != "" {
		t.Errorf("400 MB fit into 128 MiB: %q", r.out)
	}
	if l.runtime == "runc" {
		l.ok("exec", id, "--", "true")
		if u := l.usage(id); u.OOMKills < 1 || u.MemoryPeakBytes > 130<<20 {
			t.Errorf("after the kill: %+v", u)
		}
	} else {
		if sb := l.awaitState(t, id, wire.Failed, patience); sb.Status.Reason != "oom" {
			t.Errorf("a sandbox over its limit is %+v", sb.Status)
		}
		if ps := l.ok("ps", "-a"); !strings.Contains(ps, "Failed (oom)") {
			t.Errorf("ps -a printed %s", ps)
		}
	}
	l.ok("exec", neighbour, "--", "true")

	// What the guest is told. gVisor makes /proc/meminfo from the limit; under
	// runc it is the host's, which only a file system in user space could change.
	id = l.make("base", "--memory", "256Mi", "--cpu", "1")
	f := strings.Fields(l.ok("exec", id, "--", "grep", "MemTotal", "/proc/meminfo"))
	kib, err := strconv.ParseInt(f[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if l.runtime == "runsc" && kib > 256<<10 {
		t.Errorf("a guest of 256 MiB sees %d KiB", kib)
	}
}

const fork = `
import json, os, signal
n, err = 0, None
kids = []
try:
    while n < 5000:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        kids.append(pid)
        n += 1
except OSError as e:
    err = e.strerror
for k in kids: os.kill(k, 9)
print(json.dumps({"Forks": n, "Err": err}))
`

const crowd = `
import os, signal, time
kids = []
try:
    while True:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        kids.append(pid)
except OSError as e:
    open("/root/full", "w").close()
while not os.path.exists("/root/enough"):
    time.sleep(.05)
for k in kids: os.kill(k, 9)
`

// tellFull: a guest without a task left does not take its agent with it,
// whatever that is asked to do, and answers again when there is room.
func tellFull(t *testing.T, l *lab) {
	id := l.make("python", "--pids", "16")
	l.ok("exec", "-d", id, "--", "python3", "-c", crowd)
	eventually(t, 20*time.Second, func() error {
		_, err := l.api.Files(id).Stat(l.Context(), "/root/full")
		return err
	})
	var all sync.WaitGroup
	body := filepath.Join(t.TempDir(), "enough")
	if err := os.WriteFile(body, bytes.Repeat([]byte("x"), 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range 32 {
		all.Go(func() { l.ctl("exec", id, "--", "true") })
		all.Go(func() {
			if r := l.ctl("cp", body, fmt.Sprintf("%s:/root/%d", id, i)); r.code != 0 {
				t.Errorf("an upload into a full sandbox: %+v", r)
			}
		})
	}
	all.Wait()
	l.wants(l.ctl("exec", id, "--", "true"), 126, "")
	l.ok("cp", body, id+":/root/")
	eventually(t, 20*time.Second, func() error {
		if r := l.ctl("exec", id, "--", "true"); r.code != 0 {
			return fmt.Errorf("%+v", r)
		}
		return nil
	})
}

// tellPids: a fork bomb meets a wall in its own sandbox, and nobody else
// notices.
func tellPids(t *testing.T, l *lab) {
	id, neighbour := l.make("python", "--pids", "64"), l.make("base")
	var got struct {
		Forks int
		Err   string
	}
	l.python(id, &got, fork)
	// The agent has 30 of its 32 tasks (pkg/agent/proc); the guest can take the other two
	// while they are not in use, and one of its tasks is the program that forks.
	if got.Forks > 65 || got.Forks < 16 || got.Err == "" {
		t.Errorf("with 64 processes allowed %d forks succeeded, then %q", got.Forks, got.Err)
	}
	l.ok("exec", "-d", id, "--", "bash", "-c", ":(){ :|:& };:")
	var calls []time.Duration
	for range 9 {
		calls = append(calls, took(func() {
			l.ok("exec", neighbour, "--", "true")
			l.ok("ps")
		}))
	}
	slices.Sort(calls)
	if calls[4] > 2*time.Second { // a busy host delays some
		t.Errorf("two calls beside a fork bomb took %v", calls)
	}
	l.ok("rm", "-f", id)
}

const spin = `
import os, time
for _ in range(3):
    if os.fork() == 0: break
end = time.time() + 2.5
while time.time() < end: pass
`

// tellCPU: four spinning processes get half a core between them.
func tellCPU(t *testing.T, l *lab) {
	id := l.make("python", "--cpu", "500m")
	l.ok("exec", "-d", id, "--", "python3", "-c", spin)
	before, held := l.usage(id), l.throttled(id)
	time.Sleep(2 * time.Second) // this is what is measured
	held, after := l.throttled(id)-held, l.usage(id)
	used := after.CPUMicros - before.CPUMicros
	share := float64(used) / float64(after.Time.Sub(before.Time).Microseconds())
	// A busy host may have less for it than the limit. But in each period in which the
	// limit held it up it had had its 50 ms.
	if share > 0.62 || share < 0.2 && used < held*40_000-50_000 {
		t.Errorf("with 500m the sandbox got %.2f of a core, and was held up in %d periods", share, held)
	}
	t.Logf("500m is %.2f of a core; held up in %d periods", share, held)
}

// throttled is in how many periods of 100 ms its limit of CPU time held a sandbox up.
func (l *lab) throttled(id string) (most int64) {
	l.Helper()
	leaf, found := l.inspect(id).Host["cgroup"], false
	for _, group := range []string{leaf, filepath.Dir(leaf)} { // the limit is on one of them, or both
		for _, mount := range []string{"/sys/fs/cgroup/cpu", "/sys/fs/cgroup"} {
			b, err := os.ReadFile(mount + group + "/cpu.stat")
			if _, rest, ok := strings.Cut(string(b), "nr_throttled "); err == nil && ok {
				var n int64
				fmt.Sscan(rest, &n) //nolint:errcheck // the kernel's
				most, found = max(most, n), true
			}
		}
	}
	if !found {
		l.Fatalf("no cpu.stat of %s", leaf)
	}
	return most
}

// tellDisk: who fills its disk gets an error; the neighbour and the pool do not.
func tellDisk(t *testing.T, l *lab) {
	id, neighbour := l.make("base", "--disk", "64Mi"), l.make("base", "--disk", "256Mi")
	r := l.ctl("exec", id, "--", "dd", "if=/dev/urandom", "of=/var/fill", "bs=1M", "count=300", "conv=fsync")
	if r.code == 0 || !strings.Contains(r.errout, "No space left") && !strings.Contains(r.errout, "quota exceeded") {
		t.Errorf("300 MB onto 64 MiB: %d %q", r.code, r.errout)
	}
	size, err := strconv.ParseInt(strings.TrimSpace(l.ok("exec", id, "--", "stat", "-c", "%s", "/var/fill")), 10, 64)
	if err != nil || size > 66<<20 {
		t.Errorf("%d bytes fit onto 64 MiB, %v", size, err)
	}
	l.ok("exec", neighbour, "--", "sh", "-c", "head -c 100000000 /dev/urandom >/var/some && sync")
	var fs unix.Statfs_t
	if err := unix.Statfs(l.inspect(neighbour).Host["rootfs"], &fs); err != nil {
		t.Fatal(err)
	}
	if free := int64(fs.Bavail) * fs.Bsize; free < 1<<30 {
		t.Errorf("only %d bytes are left in the pool", free)
	}
	l.ok("exec", id, "--", "rm", "/var/fill")
	l.ok("exec", id, "--", "sh", "-c", "head -c 10000000 /dev/urandom >/var/again && sync")
}

// tellSmall: the least there is still runs commands, on gVisor too.
func tellSmall(t *testing.T, l *lab) {
	id := l.make("base", "--memory", "64Mi", "--cpu", "100m")
	for range 3 {
		if out := l.ok("exec", id, "--", "sh", "-c", "echo $((6*7))"); out != "42\n" {
			t.Errorf("it printed %q", out)
		}
	}
	l.ok("exec", id, "--", "sh", "-c", "head -c 8000000 /dev/urandom | sha256sum >/dev/null")
	if sb := l.inspect(id); sb.Status.State != wire.Running {
		t.Errorf("it is %+v", sb.Status)
	}
}
