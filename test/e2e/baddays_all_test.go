//go:build all

package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// TestBrokenDisk: the disk of the state directory takes no writes any more, and so the pool, a file on it,
// does not. What changes nothing goes on, what would is refused with the reason, and the daemon and the
// doctor say so. A daemon does not start there. After a boot all is as it was on the disk.
func TestBrokenDisk(t *testing.T) {
	hosttest.Root(t)
	disk := hosttest.NewDisk(t, 3<<30)
	h := connect(t, daemontest.NewWith(t, daemontest.Options{
		Instance: daemontest.Other, StateDir: filepath.Join(disk.Dir, "state"), Pool: pool.BtrfsLoop, PoolSize: "1Gi",
	}))
	daemontest.Image(t, h.Daemon, "base")
	var ids []string
	for _, runtime := range runtimes {
		id := h.create(t, spec(runtime)).ID
		if _, err := h.exec(t.Context(), id, "sh", "-c", "echo precious >/mark; sync"); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	disk.Break()
	if err := h.api.Pause(t.Context(), ids[0]); !errs.Is(err, errs.Unavailable) || !strings.Contains(err.Error(), "takes no writes") {
		t.Errorf("a pause: %v", err)
	}
	if out, err := h.exec(t.Context(), ids[0], "sh", "-c", "echo lost >/more && sync /more"); err == nil {
		t.Errorf("a write that is lost: %q", out)
	}
	settles(t, func() error { // btrfs finds out when it commits
		askBy(t, http.MethodPost, adminSocket(h.Daemon), "/sweep")
		if n := strings.Count(scrape(t, h.Daemon), `sandboxd_disk_pressure_rung{space="`); n != 2 {
			t.Fatalf("%d spaces", n)
		}
		for _, space := range []string{"state", "pool"} {
			if !strings.Contains(scrape(t, h.Daemon), `sandboxd_disk_pressure_rung{space="`+space+`"} 4`) {
				return fmt.Errorf("the metric of %s is not 4", space)
			}
		}
		return nil
	})
	h.refused(t, errs.Exhausted, "takes no writes: read-only file system", "reboot")
	if _, err := h.api.Snapshots().Create(t.Context(), ids[0], "", true); !errs.Is(err, errs.Exhausted) ||
		!strings.Contains(err.Error(), "no room for another snapshot: the storage pool takes no writes") {
		t.Errorf("a snapshot: %v", err)
	}
	if err := h.api.Delete(t.Context(), ids[0]); !errs.Is(err, errs.Unavailable) || !strings.Contains(err.Error(), "takes no writes") {
		t.Errorf("a delete: %v", err)
	}
	if status, body := askBy(t, http.MethodGet, h.Socket, "/v1/system/backup"); status != http.StatusServiceUnavailable ||
		!strings.Contains(body, "takes no writes") {
		t.Errorf("a backup: %d %s", status, body)
	}
	if all, err := h.api.List(t.Context(), client.Filter{}); err != nil || len(all) != 2 {
		t.Errorf("list: %+v, %v", all, err)
	}
	found, _ := doctor(t, h.Config)
	if i := slices.IndexFunc(found, func(f finding) bool { return f.Check == "disk-pressure" }); i < 0 || found[i].Status != "fail" ||
		!strings.Contains(found[i].Detail, "failed: the disk of the state directory takes no writes") {
		t.Errorf("the doctor: %+v", found)
	}
	for _, id := range ids {
		h.answers(t, id)
	}
	h.Kill()
	if err := h.TryStart(); err == nil || !strings.Contains(h.Log(), "file system; file systems become read-only after an I/O error") {
		t.Errorf("a start: %v", err)
	}
	h.cut(t, ids)
	disk.Repair()
	h.Start()
	for _, id := range ids {
		if sb := h.awaitState(t, id, wire.Failed, patience); sb.Status.Reason == "" {
			t.Errorf("%+v", sb.Status)
		}
		if _, err := h.api.Restart(t.Context(), id, true); err != nil {
			t.Errorf("start: %v", err)
			continue
		}
		if out, err := h.exec(t.Context(), id, "cat", "/mark"); err != nil || out != "precious\n" {
			t.Errorf("after the boot: %q, %v", out, err)
		}
	}
	h.deleteAll(t)
}

// TestDaemonOutOfMemory: the daemon runs in a cgroup with a limit of memory, as with MemoryMax= of its
// unit. It knows of the limit. When the kernel kills it there, sandboxes and their commands go on, and the
// next one has them all.
func TestDaemonOutOfMemory(t *testing.T) {
	hosttest.Root(t)
	const limit, eaten = 256 << 20, 240 << 20
	dir, file, killed := limitedCgroup(t, limit)
	enter := func(score string) []string {
		return []string{"sh", "-c", "echo " + score + ` >/proc/self/oom_score_adj && echo $$ >"$0" && exec "$@"`, filepath.Join(dir, "cgroup.procs")}
	}
	h := newHost(t, daemontest.Options{Wrap: enter("900")})
	h.logged(t, time.Time{}, fmt.Sprintf("limited by its cgroup\" limit=%d heap=%d", limit, limit/4*3))
	before := h.empty(t)
	commands := map[string]string{} // by sandbox
	for _, runtime := range runtimes {
		id := h.create(t, spec(runtime)).ID
		p, err := h.api.Start(t.Context(), id, client.Command{
			Argv: []string{"sh", "-c", "until [ -e /go ]; do sleep 0.1; done; echo went on"}, Background: true,
		})
		must(t, err)
		p.Close()
		commands[id] = p.ID
	}
	// Something else in the cgroup of the daemon takes the memory. The kernel kills the daemon for it, after the
	// children that it kills first.
	argv := append(enter("0"), "sh", "-c", fmt.Sprintf("head -c %d /dev/zero | tail", eaten))
	eater := exec.Command(argv[0], argv[1:]...)
	eater.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := eater.StdoutPipe() // tail ends when it has printed all
	must(t, err)
	must(t, eater.Start())
	select {
	case <-h.Ended():
	case <-time.After(patience):
		t.Error("the kernel did not kill the daemon")
	}
	must(t, syscall.Kill(-eater.Process.Pid, syscall.SIGKILL))
	in.Close()
	_ = eater.Wait()
	if b, err := os.ReadFile(filepath.Join(dir, file)); err != nil || !killed.Match(b) {
		t.Errorf("the kernel killed nothing in the daemon's cgroup: %s, %v", b, err)
	}
	h.Start()
	for id, cmd := range commands {
		if _, err := h.exec(t.Context(), id, "touch", "/go"); err != nil {
			t.Error(err)
		}
		eventually(t, patience, func() error {
			var out bytes.Buffer
			if _, err := h.api.Commands(id).Logs(t.Context(), cmd, 0, &out); err != nil || out.String() != "went on\n" {
				return fmt.Errorf("command %s of %s: %q, %v", cmd, id, &out, err)
			}
			return nil
		})
	}
	for _, runtime := range runtimes {
		h.answers(t, h.create(t, spec(runtime)).ID)
	}
	h.deleteAll(t)
	h.holdsOnly(t, before)
}

// TestHostOutOfMemory: sandboxes together have less memory than their limits allow, as on a host that has no
// more. The kernel ends the one that takes it. Its reason does not blame its own limit, and others go on.
func TestHostOutOfMemory(t *testing.T) {
	h := newHost(t, daemontest.Options{})
	file, none := filepath.Join("/sys/fs/cgroup", h.Instance.CgroupRoot(), "memory.max"), "max"
	if _, err := os.Stat(file); err != nil {
		file, none = filepath.Join("/sys/fs/cgroup/memory", h.Instance.CgroupRoot(), "memory.limit_in_bytes"), "-1"
	}
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			other := h.create(t, spec(runtime)).ID
			must(t, os.WriteFile(file, []byte(strconv.Itoa(256<<20)), 0))
			r := spec(runtime, "sh", "-c", "until [ -e /go ]; do sleep 0.1; done; exec head -c 600M /dev/zero | tail")
			r.ResourceLimits["memory"] = "1Gi"
			id := h.create(t, r).ID
			if _, err := h.exec(t.Context(), id, "touch", "/go"); err != nil {
				t.Fatal(err)
			}
			sb := h.awaitState(t, id, wire.Failed, patience)
			if sb.Status.Reason != "oom" || !strings.Contains(sb.Status.Message, "the host had no memory left for it, although it was "+
				"below its limit of 1024 MiB") {
				t.Errorf("%+v", sb.Status)
			}
			h.answers(t, other)
			must(t, os.WriteFile(file, []byte(none), 0))
			h.answers(t, h.create(t, spec(runtime)).ID)
		})
	}
	h.deleteAll(t)
}

// limitedCgroup makes a cgroup with a limit of memory, until t ends. killed matches its file when the
// kernel has killed something there.
func limitedCgroup(t *testing.T, limit int) (dir, file string, killed *regexp.Regexp) {
	t.Helper()
	dir, bound, file := "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.oom_control"
	if _, err := os.Stat(dir); err != nil {
		dir, bound, file = "/sys/fs/cgroup", "memory.max", "memory.events"
	}
	dir = filepath.Join(dir, fmt.Sprintf("sandboxd-test-limit-%d", os.Getpid()))
	must(t, os.Mkdir(dir, 0o755))
	t.Cleanup(func() {
		settles(t, func() error { return os.Remove(dir) })
	})
	must(t, os.WriteFile(filepath.Join(dir, bound), []byte(strconv.Itoa(limit)), 0))
	return dir, file, regexp.MustCompile(`(?m)^oom_kill [1-9]`)
}

// cut ends what a power cut would end: the processes of sandboxes, and mounts.
func (h host) cut(t *testing.T, ids []string) {
	t.Helper()
	for _, id := range ids {
		for _, pid := range h.pids(id) {
			n, _ := strconv.Atoi(pid)
			_ = syscall.Kill(n, syscall.SIGKILL)
		}
		settles(t, func() error { return h.lifeless(id) })
		must(t, syscall.Unmount(filepath.Join(h.Instance.RunDir(), id, "rootfs"), 0))
	}
	if out, err := exec.CommandContext(context.Background(), "umount", filepath.Join(h.StateDir, "pool")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}
