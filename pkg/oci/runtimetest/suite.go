package runtimetest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/oci"
)

// Open makes the runtime under test on h.
type Open func(t testing.TB, h *Host) Runtime

// Run runs the suite against runtime name, oci.Runsc or oci.Runc.
func Run(t *testing.T, name string, open Open) {
	h := NewHost(t, name)
	rt := open(t, h)
	t.Cleanup(func() { must(t, rt.Close()) })

	t.Run("Report", func(t *testing.T) { testReport(t, h, rt) })
	if name == oci.Runc {
		t.Run("Calls", func(t *testing.T) { testCalls(t, h, rt) })
	}
	t.Run("ReadOnly", func(t *testing.T) { testReadOnly(t, h, rt) })
	t.Run("Levels", func(t *testing.T) { testLevels(t, h, rt) })
	t.Run("Trust", func(t *testing.T) { testTrust(t, h, rt) })
	t.Run("Places", func(t *testing.T) { testPlaces(t, h, rt) })
	t.Run("BadEntrypoint", func(t *testing.T) { testBadEntrypoint(t, h, rt) })
	t.Run("MissingRootFS", func(t *testing.T) { testMissingRootFS(t, h, rt) })
	t.Run("TwoOfOneID", func(t *testing.T) { testTwoOfOneID(t, h, rt) })
	t.Run("ForgetAndList", func(t *testing.T) { testForgetAndList(t, h, rt) })
	t.Run("InitExits", func(t *testing.T) { testInitExits(t, h, rt) })
	t.Run("Canceled", func(t *testing.T) { testCanceled(t, h, rt) })
	t.Run("EightAtOnce", func(t *testing.T) { testEightAtOnce(t, h, rt) })
	t.Run("AnotherDaemon", func(t *testing.T) { testAnotherDaemon(t, h, rt, open) })
}

// testReport asks the sandbox about its environment and compares the answer with
// docs/design/hardening.md ("What does a sandbox get by default?").
func testReport(t *testing.T, h *Host, rt Runtime) {
	b := h.NewBox(t, rt)
	must(t, b.Start(t.Context()))
	var r map[string]string
	must(t, b.Ask("report", &r))

	// CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT SETFCAP
	const caps = "00000000800405fb"
	status := fields(r["/proc/self/status"])
	for key, want := range map[string]string{
		"CapInh": "0000000000000000", "CapPrm": caps, "CapEff": caps, "CapBnd": caps, "CapAmb": "0000000000000000",
		"NoNewPrivs": "1",
	} {
		if got := status[key]; got != want && !(h.runtime == oci.Runsc && key == "NoNewPrivs" && got == "") {
			t.Errorf("status %s = %q, want %q", key, got, want)
		}
	}
	for key, want := range map[string]string{
		"hostname": "lab", "pid": "1", "cwd": "/", "dev": "", "unmasked": "", "rootfs": "",
		"/etc/resolv.conf": "# resolv.conf of sandboxd\n", "/etc/hosts": "# hosts of sandboxd\n",
		"/etc/hostname": "# hostname of sandboxd\n",
	} {
		if got := r[key]; got != want {
			t.Errorf("%s = %q, want %q", key, got, want)
		}
	}
	bootID, err := os.ReadFile(oci.BootIDPath)
	must(t, err)
	if got := r[oci.BootIDPath]; got == "" || got == string(bootID) {
		t.Errorf("the boot id is %q, that of the host %q", got, bootID)
	}
	if !slices.Contains(strings.Split(r["env"], "\n"), "ANSWER=42") {
		t.Errorf("env lacks ANSWER=42: %q", r["env"])
	}
	if _, err := os.Stat(filepath.Join(b.Config.RootFS, "tmp/new")); err != nil {
		t.Errorf("what the guest writes to /tmp is not on its root file system: %v", err)
	}
	core, _ := find(r["/proc/self/limits"], "Max core file size")
	if f := strings.Fields(core); len(f) < 6 || f[4] != "1" || f[5] != "1" {
		t.Errorf("core limit is %q, want exactly 1", core)
	}
	checkHostSide(t, b)
	if h.runtime == oci.Runsc {
		reportRunsc(t, r)
	} else {
		reportRunc(t, b, r, status)
	}
	for _, name := range []string{"route", "inet", "chroot"} {
		if got := r["sys."+name]; got != "ok" {
			t.Errorf("%s: %s, want it allowed", name, got)
		}
	}
}

// gvisorCaps are the most capabilities of sentry and gofer, in their user namespaces:
// CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID SYS_CHROOT SYS_PTRACE.
const gvisorCaps = 0xc001f

// checkHostSide holds what a guest gets that takes over a process of its sandbox, as
// docs/design/threat-model.md has it.
func checkHostSide(t *testing.T, b *Box) {
	t.Helper()
	own, err := os.Readlink("/proc/self/ns/user")
	must(t, err)
	each := map[string]string{"oom_score_adj": "500", "Seccomp": "2", "NoNewPrivs": "1", "core": "Max core file size 1 1 bytes"}
	for pid, p := range b.hostSide(t) {
		for key, want := range each {
			if p[key] != want {
				t.Errorf("host process %s %s has %s %q, want %s", pid, p["Name"], key, p[key], want)
			}
		}
		if p["userns"] == own {
			t.Errorf("host process %s %s is in the user namespace of the host", pid, p["Name"])
		}
		caps, err := strconv.ParseUint(p["CapPrm"], 16, 64)
		if b.h.runtime == oci.Runsc && (err != nil || caps&^gvisorCaps != 0) {
			t.Errorf("host process %s %s has the capabilities %s, want at most %x", pid, p["Name"], p["CapPrm"], gvisorCaps)
		}
		uid, err := strconv.Atoi(strings.Fields(p["Uid"] + " -")[0])
		if b.h.runtime == oci.Runc && (err != nil || uid < int(inst.UIDBase(0))) {
			t.Errorf("host process %s %s is user %q of the host", pid, p["Name"], p["Uid"])
		}
	}
}

func reportRunsc(t *testing.T, r map[string]string) {
	t.Helper()
	// The guest sees its limit, not the host. (Under runc /proc/meminfo is the host's.)
	if got := fields(r["/proc/meminfo"])["MemTotal"]; got != "262144 kB" {
		t.Errorf("MemTotal is %s, want the 256 MiB of the spec", got)
	}
	// The sentry stands before the host: the test is that no call reaches the host.
	for _, name := range []string{"bpf", "io_uring", "alg", "vsock", "perf", "reboot", "mknod"} {
		if got := r["sys."+name]; got == "ok" {
			t.Errorf("%s: allowed", name)
		}
	}
	if strings.Contains(r["writable"], "/opt/") {
		t.Errorf("writable: %s", r["writable"])
	}
}

func reportRunc(t *testing.T, b *Box, r, status map[string]string) {
	t.Helper()
	want := map[string]string{
		"unshare": "EPERM", "setns": "EPERM", "clone3": "ENOSYS", "clonens": "EPERM", "mount": "EPERM", "fsopen": "EPERM",
		"bpf": "EPERM", "io_uring": "ENOSYS", "keyctl": "EPERM", "perf": "EPERM", "reboot": "EPERM",
		"vsock": "EAFNOSUPPORT", "alg": "EAFNOSUPPORT", "packet": "EAFNOSUPPORT", "netfilter": "EPROTONOSUPPORT",
		"mptcp": "EPROTONOSUPPORT", "udplite": "EPROTONOSUPPORT", "sctp": "ESOCKTNOSUPPORT",
		"tiocsti": "EPERM", "core": "EPERM", "mknod": "EPERM",
	}
	for name, errno := range want {
		if got := r["sys."+name]; got != errno {
			t.Errorf("%s: %s, want %s", name, got, errno)
		}
	}
	for _, name := range []string{"Max nice priority", "Max realtime priority"} {
		line, _ := find(r["/proc/self/limits"], name)
		if f := strings.Fields(line); len(f) < 5 || f[3] != "0" || f[4] != "0" {
			t.Errorf("limit %q, want 0", line)
		}
	}
	if status["Seccomp"] != "2" || status["Seccomp_filters"] != "2" {
		t.Errorf("seccomp mode %s with %s filters, want 2 with 2", status["Seccomp"], status["Seccomp_filters"])
	}
	if f := strings.Fields(r["/proc/self/uid_map"]); len(f) != 3 || f[0] != "0" || f[2] != "65536" || f[1] == "0" {
		t.Errorf("uid_map is %q, want 65536 ids of its own", r["/proc/self/uid_map"])
	}
	if got := r[oci.BootIDPath]; got != "# boot_id of sandboxd\n" {
		t.Errorf("the boot id is %q", got)
	}
	if got := r["writable"]; got != "" {
		t.Errorf("writable: %s", got)
	}
	for _, m := range []struct{ dst, options string }{
		{"/proc", "nosuid,nodev,noexec"},
		{"/sys", "ro,nosuid,nodev,noexec"},
		{"/run", "nosuid,nodev,noexec"},
		{"/dev/shm", "nosuid,nodev,noexec"},
		{"/opt/opensandbox", "ro,nosuid,nodev"},
		{"/etc/hosts", "ro,nosuid,nodev,noexec"},
		{"/proc/sys", "ro"},
		{oci.BootIDPath, "ro,nosuid,nodev,noexec"},
	} {
		line, ok := find(r["/proc/self/mountinfo"], " "+m.dst+" ")
		if !ok {
			t.Errorf("%s is no mount", m.dst)
			continue
		}
		options := strings.Split(strings.Fields(line)[5], ",")
		for _, o := range strings.Split(m.options, ",") {
			if !slices.Contains(options, o) {
				t.Errorf("%s is mounted %v, want %s", m.dst, options, o)
			}
		}
	}
	if _, ok := find(r["/proc/self/mountinfo"], " cgroup"); ok {
		t.Error("a cgroup file system is mounted")
	}
	for line := range strings.Lines(r["fds"]) {
		fd, to, _ := strings.Cut(strings.TrimSpace(line), " ")
		ok := to == "/dev/null" || to == "" /* the listing itself */ || strings.HasPrefix(to, "socket:") && fd == "0" ||
			strings.HasPrefix(to, "anon_inode:") || strings.HasPrefix(to, "/proc/1/fd")
		if !ok {
			t.Errorf("PID 1 of %s holds descriptor %s to %s", b.ID, fd, to)
		}
	}
}

func testReadOnly(t *testing.T, h *Host, rt Runtime) {
	b := h.NewBox(t, rt)
	b.Config.ReadOnly = true
	must(t, b.Start(t.Context()))
	var r map[string]string
	must(t, b.Ask("report", &r))
	if !strings.Contains(r["rootfs"], "read-only") {
		t.Errorf("write to a read-only root: %q", r["rootfs"])
	}
}

// testPlaces: on a read-only root, file systems in memory have the requested sizes, and
// the agent has a place on the disk that the host can read.
func testPlaces(t *testing.T, h *Host, rt Runtime) {
	b := h.NewBox(t, rt)
	b.Config.ReadOnly, b.Config.ShmBytes = true, 8<<20
	b.Config.Tmpfs = []oci.Tmpfs{
		{Path: "/run", Bytes: 4 << 20, Mode: 0o700},
		{Path: "/work", Bytes: 16 << 20, Mode: 0o1777, Exec: true}, // in no image
	}
	b.Config.AgentState = filepath.Join(b.Config.RootFS, oci.AgentState)
	base, err := os.Stat(b.Config.RootFS)
	must(t, err)
	must(t, os.Mkdir(b.Config.AgentState, 0o700))
	owner := base.Sys().(*syscall.Stat_t)
	must(t, os.Chown(b.Config.AgentState, int(owner.Uid), int(owner.Gid)))
	must(t, b.Start(t.Context()))
	var got map[string]map[string]string
	must(t, b.Ask("places", &got))
	for dir, want := range map[string]map[string]string{
		"/run":       {"bytes": "4194304", "mode": "700", "write": "ok", "fill": "4"},
		"/work":      {"bytes": "16777216", "mode": "1777", "write": "ok", "exec": "ok", "fill": "16"},
		"/dev/shm":   {"bytes": "8388608", "mode": "1777", "write": "ok", "fill": "8"},
		"/.sandboxd": {"mode": "700", "write": "ok", "fill": "32"},
	} {
		for key, v := range want {
			// the program itself takes a page
			if near := key == "fill" && dir != "/.sandboxd" && got[dir][key] == less(v); got[dir][key] != v && !near {
				t.Errorf("%s: %s is %q, want %q", dir, key, got[dir][key], v)
			}
		}
	}
	for _, dir := range []string{"/", "/tmp"} {
		if w := got[dir]["write"]; !strings.Contains(w, "read-only") {
			t.Errorf("%s: write says %q", dir, w)
		}
	}
	if _, err := os.Stat(filepath.Join(b.Config.AgentState, "program")); err != nil {
		t.Errorf("what the agent writes is not on the disk: %v", err)
	}
}

// less is n-1.
func less(n string) string {
	i, _ := strconv.Atoi(n)
	return strconv.Itoa(i - 1)
}

func testBadEntrypoint(t *testing.T, h *Host, rt Runtime) {
	b := h.NewBox(t, rt)
	b.Config.AgentDir = t.TempDir()
	must(t, os.Chmod(b.Config.AgentDir, 0o755))
	err := b.Start(t.Context())
	says(t, err, b.ID, oci.AgentPath, "no such file")
	if err := os.WriteFile(filepath.Join(b.Config.AgentDir, "sandbox-agent"), []byte("#!"), 0o644); err != nil {
		t.Fatal(err)
	}
	b.Kill(t)
	must(t, rt.Forget(t.Context(), b.ID))
	remakeLeaf(t, b)
	says(t, b.Start(t.Context()), b.ID, oci.AgentPath, "permission denied")
}

func testMissingRootFS(t *testing.T, h *Host, rt Runtime) {
	b := h.NewBox(t, rt)
	b.Config.RootFS = filepath.Join(h.dir, "nowhere")
	says(t, b.Start(t.Context()), b.ID, "no such file")
}

func testTwoOfOneID(t *testing.T, h *Host, rt Runtime) {
	b := h.NewBox(t, rt)
	must(t, b.Start(t.Context()))
	says(t, b.Start(t.Context()), b.ID)
	var pong string
	if err := b.Ask("ping", &pong); err != nil {
		t.Errorf("the first of two did not survive the second: %v", err)
	}
}

func testForgetAndList(t *testing.T, h *Host, rt Runtime) {
	ctx := t.Context()
	b := h.NewBox(t, rt)
	listed(t, rt, b.ID, false)
	must(t, rt.Forget(ctx, b.ID)) // it never existed
	must(t, b.Start(ctx))
	listed(t, rt, b.ID, true)
	b.Kill(t)
	listed(t, rt, b.ID, true)
	for range 2 {
		must(t, rt.Forget(ctx, b.ID))
		listed(t, rt, b.ID, false)
	}
	left, err := filepath.Glob(filepath.Join(h.Root, "*"+b.ID+"*"))
	must(t, err)
	if len(left) > 0 {
		t.Errorf("left in %s: %v", h.Root, left)
	}
	// The same id may start again.
	remakeLeaf(t, b)
	must(t, b.Start(ctx))
	var pong string
	must(t, b.Ask("ping", &pong))
}

func testInitExits(t *testing.T, h *Host, rt Runtime) {
	b := h.NewBox(t, rt)
	must(t, b.Start(t.Context()))
	b.stdin.Close() // so that the end of PID 1 closes the socket
	if err := b.Ask("exit", new(string)); err == nil {
		t.Error("an answer from the dead")
	}
	b.AwaitDead(t)
}

func testCanceled(t *testing.T, h *Host, rt Runtime) {
	b := h.NewBox(t, rt)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Millisecond)
	defer cancel()
	if err := b.Start(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("start under a context that ended: %v", err)
	}
	// Remove, by Cleanup, must clear whatever was left.
}

func testEightAtOnce(t *testing.T, h *Host, rt Runtime) {
	var all sync.WaitGroup
	boxes := make([]*Box, 8)
	for i := range boxes {
		boxes[i] = h.NewBox(t, rt)
	}
	for _, b := range boxes {
		all.Go(func() {
			if err := b.Start(t.Context()); err != nil {
				t.Error(err)
				return
			}
			var pong string
			if err := b.Ask("ping", &pong); err != nil || pong != "pong" {
				t.Errorf("%s says %q, %v", b.ID, pong, err)
			}
		})
	}
	all.Wait()
	ids, err := rt.List(t.Context())
	must(t, err)
	if len(ids) != len(boxes) {
		t.Errorf("listed %v, want %d", ids, len(boxes))
	}
}

// testAnotherDaemon: sandboxes outlive the driver that started them, and the next
// driver lists and forgets them.
func testAnotherDaemon(t *testing.T, h *Host, rt Runtime, open Open) {
	first := open(t, h)
	b := h.NewBox(t, rt)
	b.rt = first
	must(t, b.Start(t.Context()))
	must(t, first.Close())
	b.rt = rt
	var pong string
	must(t, b.Ask("ping", &pong))
	listed(t, rt, b.ID, true)
	b.Remove(t)
	listed(t, rt, b.ID, false)
}

// remakeLeaf makes the cgroup leaf again: a runtime may remove it when its start fails,
// and Linux 6.18 kills every process that is cloned into a cgroup whose cgroup.kill was
// ever written (it compares the clone with the count of kills of its parent's cgroup).
func remakeLeaf(t *testing.T, b *Box) {
	t.Helper()
	for _, m := range hierarchies(t) {
		rmdir(t, filepath.Join(m, leaf(b.ID)))
		must(t, os.MkdirAll(filepath.Join(m, leaf(b.ID)), 0o755))
	}
}

func listed(t *testing.T, rt Runtime, id string, want bool) {
	t.Helper()
	ids, err := rt.List(context.Background())
	must(t, err)
	if slices.Contains(ids, id) != want {
		t.Errorf("List says %v; want %s in it: %v", ids, id, want)
	}
}

func says(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	t.Log(err)
	for _, w := range words {
		if !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(w)) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

// fields reads the "Key:\tvalue" lines of a /proc status file.
func fields(s string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(s) {
		k, v, _ := strings.Cut(line, ":")
		m[k] = strings.TrimSpace(v)
	}
	return m
}

func find(s, part string) (string, bool) {
	for line := range strings.Lines(s) {
		if strings.Contains(line, part) {
			return line, true
		}
	}
	return "", false
}
