package e2e_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// tellReadOnly: nothing is written but where that was asked for, and the agent
// goes on doing all it does.
func tellReadOnly(t *testing.T, l *lab) {
	id := l.make("python", "--read-only", "--tmpfs", "/tmp:size=8m", "--tmpfs", "/work:exec,size=16m", "--shm-size", "32m", "--disk",
		"256Mi", "--memory", "256Mi")
	for _, path := range []string{"/x", "/root/x", "/var/x", "/opt/opensandbox/x", "/etc/hosts"} {
		l.wants(l.ctl("exec", id, "--", "sh", "-c", "echo x >"+path), 2, "ead-only file system")
	}
	for dir, mib := range map[string]int{"/tmp": 8, "/work": 16, "/dev/shm": 32} {
		r := l.ctl("exec", id, "--", "dd", "if=/dev/zero", "of="+dir+"/fill", "bs=1M", "count=64")
		if full := fmt.Sprintf("%d bytes", mib<<20); !strings.Contains(r.errout, full) && !strings.Contains(r.errout, "No space") {
			t.Errorf("%s of %d MiB: %s", dir, mib, r.errout)
		}
		if size := strings.TrimSpace(l.ok("exec", id, "--", "stat", "-c", "%s", dir+"/fill")); size > fmt.Sprint(mib<<20) &&
			len(size) >= len(fmt.Sprint(mib<<20)) {
			t.Errorf("%s took %s bytes", dir, size)
		}
		l.ok("exec", id, "--", "rm", dir+"/fill")
	}
	l.ok("exec", id, "--", "sh", "-c", "cp /bin/true /work/ && /work/true")
	l.wants(l.ctl("exec", id, "--", "sh", "-c", "cp /bin/true /tmp/ && /tmp/true"), 126, "ermission denied")

	// More output than stays in memory, in a command that goes on by itself.
	const lines = 40_000
	cmd := strings.TrimSpace(l.ok("exec", "-d", id, "--", "seq", "-w", fmt.Sprint(lines)))
	if out := l.ok("command", "logs", "-f", id, cmd); len(out) != 6*lines {
		t.Errorf("%d bytes of output, want %d", len(out), 6*lines)
	}
	small := filepath.Join(t.TempDir(), "small")
	if err := os.WriteFile(small, []byte("small\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l.ok("cp", small, id+":/work/")
	if got := l.ok("exec", id, "--", "cat", "/work/small"); got != "small\n" {
		t.Errorf("cp: %q", got)
	}
	i := l.inspect(id)
	if !i.Sandboxd.ReadOnly || len(i.Sandboxd.Tmpfs) != 2 || i.Sandboxd.ShmBytes != 32<<20 {
		t.Errorf("inspect: %+v", i.Sandboxd)
	}
	l.ok("rm", "-f", id)

	// Its end is remembered as any other's.
	id = strings.TrimSpace(l.ctl("create", "--runtime", l.runtime, "--read-only", "base", "--", "sh", "-c", "echo bye; exit 5").out)
	l.awaitState(t, id, wire.Failed, 10*time.Second)
	if i := l.inspect(id); i.Status.Reason != "exited" || i.Sandboxd.ExitCode == nil || *i.Sandboxd.ExitCode != 5 ||
		i.LastOutput != "bye\n" {
		t.Errorf("it ended as %+v, %q", i.Status, i.LastOutput)
	}
}

// tellLogLimit: of each command as much is kept as was asked for, the end of it.
func tellLogLimit(t *testing.T, l *lab) {
	id := l.make("base", "--log-opt", "max-size=256k")
	const lines = 100_000
	cmd := strings.TrimSpace(l.ok("exec", "-d", id, "--", "seq", "-w", fmt.Sprint(lines)))
	var out string
	eventually(t, 20*time.Second, func() error {
		if out = l.ok("command", "logs", id, cmd); !strings.HasSuffix(out, fmt.Sprintf("%06d\n", lines)) {
			return fmt.Errorf("%d bytes, which end with %.20q", len(out), out[max(0, len(out)-20):])
		}
		return nil
	})
	if len(out) != 256<<10 {
		t.Errorf("%d bytes are kept", len(out))
	}
	const last = "099999\n100000\n"
	if out := l.ok("command", "logs", "-n", "2", id, cmd); out != last {
		t.Errorf("the last two lines are %q", out)
	}
	id = l.make("base", "--log-opt", "max-size=256k", "--", "sh", "-c", fmt.Sprintf("seq -w %d; exec sleep infinity", lines))
	eventually(t, 20*time.Second, func() error {
		if out := l.ok("logs", "-n", "2", id); out != last {
			return fmt.Errorf("the last two lines are %q", out)
		}
		return nil
	})
}

// tellUpdate: limits change under a living sandbox, and hold.
func tellUpdate(t *testing.T, l *lab) {
	id := l.make("python", "--memory", "512Mi", "--cpu", "1", "--disk", "64Mi", "--label", "team=a", "--label", "owner=x")
	seen := l.events(t)
	holds := "import time; x = b'x' * (200 << 20); print('holds', flush=True); time.sleep(1000)"
	cmd := strings.TrimSpace(l.ok("exec", "-d", id, "--", "python3", "-c", holds))
	eventually(t, 20*time.Second, func() error {
		if out := l.ok("command", "logs", id, cmd); out != "holds\n" {
			return fmt.Errorf("it said %q", out)
		}
		return nil
	})
	l.wants(l.ctl("update", "--memory", "128Mi", id), 125, "uses", "MiB of memory")
	r := l.ctl("update", "--memory", "1Gi", "--cpu", "500m", "--disk", "256Mi", "--cpu-shares", "512", id)
	if r.code != 0 || strings.TrimSpace(r.out) != id || strings.Contains(r.errout, "gVisor") != (l.runtime == "runsc") {
		t.Errorf("update: %+v", r)
	}
	seen(t, id, "updated", "")
	if i := l.inspect(id).Sandboxd; i.MemoryBytes != 1<<30 || i.CPUMillis != 500 || i.DiskBytes != 256<<20 || i.CPUShares != 512 {
		t.Errorf("after the update: %+v", i)
	}
	l.ok("update", "--label", "team=b", "--label-rm", "owner", id)
	if m := l.inspect(id).Metadata; len(m) != 1 || m["team"] != "b" {
		t.Errorf("after the update of labels: %v", m)
	}
	l.ok("exec", id, "--", "sh", "-c", "head -c 100000000 /dev/urandom >/var/some && sync")
	l.wants(l.ctl("update", "--disk", "32Mi", id), 125, "holds")
	l.ok("exec", "-d", id, "--", "python3", "-c", spin)
	before := l.usage(id)
	time.Sleep(2 * time.Second) // this is what is measured
	after := l.usage(id)
	if share := float64(after.CPUMicros-before.CPUMicros) / float64(after.Time.Sub(before.Time).Microseconds()); share > 0.62 {
		t.Errorf("with 500m the sandbox got %.2f of a core", share)
	}
	if l.runtime == "runsc" {
		l.wants(l.ctl("update", "--pids", "100", id), 125, "runsc", "create another")
	} else {
		l.ok("update", "--pids", "20", id)
		l.wants(l.ctl("exec", id, "--", "sh", "-c", "for i in $(seq 30); do sleep 5 & done; wait"), 2, "fork")
	}
	l.ok("command", "kill", "-s", "KILL", id, cmd)
	if l.runtime == "runc" { // gVisor gives back in its own time
		eventually(t, 10*time.Second, func() error {
			if r := l.ctl("update", "--memory", "128Mi", id); r.code != 0 {
				return fmt.Errorf("after its process was killed: %+v", r)
			}
			return nil
		})
		l.wants(l.ctl("exec", id, "--", "python3", "-c", holds), 137, "memory limit", "128MiB")
	}
	l.ok("pause", id)
	if r := l.ctl("update", "--cpu", "750m", id); r.code != 0 {
		t.Errorf("update while paused: %+v", r)
	}
	l.ok("resume", id)
	l.ok("exec", id, "--", "true")
	l.ok("rm", "-f", id)
	l.wants(l.ctl("update", "--cpu", "1", id), 125, "no sandbox")
	l.wants(l.ctl("update", id), 125, "nothing to change")
}

// tellIO: what really goes to the disk and comes from it is as fast as the
// limit, and that changes live.
func tellIO(t *testing.T, l *lab) {
	id := l.make("base", "--io-read-bps", "8Mi", "--io-write-bps", "8Mi", "--disk", "1Gi")
	i := l.inspect(id)
	t.Logf("notes: %q", i.Notes)
	// What is said to be limited is what is; on v2 all is, and nothing needs to be said.
	if said := strings.Join(i.Notes, "; "); strings.Contains(said, "cgroup v1") &&
		strings.Contains(said, "(O_DIRECT)") != (l.runtime == "runsc") {
		t.Errorf("notes on %s: %s", l.runtime, said)
	}
	neighbour := l.make("base") // which nothing limits
	free := l.inspect(neighbour)
	// gVisor opens without O_DIRECT, so what was just written must leave the
	// page cache of the host.
	read := func(i wire.Inspection) float64 {
		forget(t, i.Host["rootfs"]+"/var/file")
		return l.rate(i, "Read", "if=/var/file", "of=/dev/null", "iflag=direct")
	}
	write := func(i wire.Inspection) float64 {
		return l.rate(i, "Write", "if=/dev/zero", "of=/var/file", "conv=fsync")
	}
	write(free) // for read
	l.wantRate("synced writes within 8", write, i, free, 2, 10.5)
	l.wantRate("direct reads within 8", read, i, free, 2, 10.5)
	l.besideThrottled(id, neighbour)
	l.ctl("update", "--io-read-bps", "32Mi", "--io-write-bps", "max", id)
	l.wantRate("direct reads within 32", read, i, free, 9, 42)
	l.wantRate("synced writes without a limit", write, i, free, 12, math.Inf(1))
}

// rate is how fast a disk is read or written (what: "Read", "Write") for a sandbox
// while dd copies 16 MiB in it, in MiB/s. The kernel's count for the sandbox is what
// its limit is held against. On cgroup v1 that is less than what dd copies, if
// somebody else calls sync(2) meanwhile: what was dirty is then written for nobody.
func (l *lab) rate(i wire.Inspection, what string, args ...string) float64 {
	l.Helper()
	before := carried(l.T, i.Host["cgroup"], what)
	lasted := took(func() {
		l.ok("exec", i.ID, "--", "sh", "-c", "dd "+strings.Join(args, " ")+" bs=1M count=16 2>/dev/null")
	})
	most := 0
	for device, n := range carried(l.T, i.Host["cgroup"], what) {
		most = max(most, n-before[device])
	}
	return float64(most) / (1 << 20) / lasted.Seconds()
}

// carried is how many bytes each device has read or written for a cgroup.
func carried(t *testing.T, cgroup, what string) map[string]int {
	t.Helper()
	bytes := map[string]int{}
	if b, err := os.ReadFile("/sys/fs/cgroup/blkio" + cgroup + "/blkio.throttle.io_service_bytes_recursive"); err == nil {
		for line := range strings.Lines(string(b)) { // 7:0 Write 4096
			if f := strings.Fields(line); len(f) == 3 && f[1] == what {
				bytes[f[0]], _ = strconv.Atoi(f[2])
			}
		}
		return bytes
	}
	b, err := os.ReadFile("/sys/fs/cgroup" + cgroup + "/io.stat")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) { // 7:0 rbytes=0 wbytes=4096 rios=0 ...
		f := strings.Fields(line)
		for _, key := range f[1:] {
			if n, ok := strings.CutPrefix(key, strings.ToLower(what[:1])+"bytes="); ok {
				bytes[f[0]], _ = strconv.Atoi(n)
			}
		}
	}
	return bytes
}

// wantRate fails the test if a sandbox is ever faster than most, and unless it is
// as fast as least at one of five times. What others do on the disk makes it
// slower: where it is slow, half as fast as one without limits is enough.
func (l *lab) wantRate(what string, rate func(wire.Inspection) float64, i, free wire.Inspection, least, most float64) {
	l.Helper()
	var seen []string
	for range 5 {
		r := rate(i)
		seen = append(seen, fmt.Sprintf("%.1f", r))
		if r > most {
			l.Errorf("%s go at %.1f MiB/s", what, r)
		}
		if r >= least {
			l.Logf("%s: %v MiB/s", what, seen)
			return
		}
		unlimited := rate(free)
		seen = append(seen, fmt.Sprintf("(free: %.1f)", unlimited))
		if r >= unlimited/2 {
			l.Logf("%s: %v MiB/s", what, seen)
			return
		}
	}
	l.Errorf("%s go at %v MiB/s, want %v", what, seen, least)
}

// besideThrottled: who waits for his own limit keeps nobody else waiting. On a
// disk that is slow for all, that takes at most twice as long as alone.
func (l *lab) besideThrottled(id, neighbour string) {
	l.Helper()
	syncs := func() time.Duration {
		return took(func() {
			for range 5 {
				l.ok("exec", neighbour, "--", "sh", "-c", "dd if=/dev/zero of=/var/five bs=1M count=4 conv=fsync 2>/dev/null")
			}
		})
	}
	var seen []string
	for range 5 {
		l.ok("exec", "-d", id, "--", "sh", "-c", "while :; do dd if=/dev/zero of=/var/loop bs=1M count=4 conv=fsync; done")
		time.Sleep(time.Second) // until it is well behind
		beside := syncs()
		l.ok("exec", id, "--", "pkill", "-f", "while :")
		if beside <= 4*time.Second {
			l.Logf("beside a throttled writer 20 MiB in five fsyncs took %v %v", beside, seen)
			return
		}
		alone := syncs()
		seen = append(seen, fmt.Sprintf("%v, alone %v", beside, alone))
		if beside <= 2*alone {
			l.Logf("beside a throttled writer 20 MiB in five fsyncs took %v", seen)
			return
		}
	}
	l.Errorf("beside a throttled writer 20 MiB in five fsyncs took %v", seen)
}

// forget has the page cache drop a file.
func forget(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
}

// TestUpdateSurvivesDeath: limits that are durable hold after a daemon that died
// before, or in the middle of, writing them, and again after a restart.
func TestUpdateSurvivesDeath(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	for _, runtime := range runtimes {
		// Adopting a sandbox passes limit once, before anybody can ask for an update.
		for _, point := range []string{"store:put:running", "after:store:put:running", "limit:2", "after:limit:2"} {
			t.Run(runtime+"/"+point, func(t *testing.T) {
				sb := h.create(t, spec(runtime))
				h.Stop()
				if err := h.StartArmed(point + "=kill"); err != nil {
					t.Fatal(err)
				}
				_, err := h.api.Update(t.Context(), sb.ID, map[string]string{"memory": "384Mi", "cpu": "300m"})
				if err == nil {
					t.Fatal("nobody died")
				}
				<-h.Ended()
				if err := h.TryStart(); err != nil {
					t.Fatal(err)
				}
				i, err := h.api.Inspect(t.Context(), sb.ID)
				if err != nil {
					t.Fatal(err)
				}
				want := int64(384 << 20)
				if point == "store:put:running" {
					want = 256 << 20
				}
				if i.Sandboxd.MemoryBytes != want {
					t.Errorf("the record says %d bytes, want %d", i.Sandboxd.MemoryBytes, want)
				}
				if runtime == "runsc" {
					want += 64 << 20 // head-room
				}
				if got := memoryLimit(t, i.Host["cgroup"]); got != want {
					t.Errorf("the cgroup says %d bytes, want %d", got, want)
				}
				h.answers(t, sb.ID)
				h.deleteAll(t)
			})
		}
	}
}

// memoryLimit reads the limit of a leaf, on v1 or v2.
func memoryLimit(t *testing.T, leaf string) (n int64) {
	t.Helper()
	for _, f := range []string{"/sys/fs/cgroup/memory" + leaf + "/memory.limit_in_bytes", "/sys/fs/cgroup" + leaf + "/memory.max"} {
		if b, err := os.ReadFile(f); err == nil {
			if _, err := fmt.Sscan(string(b), &n); err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no limit of memory in %s", leaf)
	return 0
}
