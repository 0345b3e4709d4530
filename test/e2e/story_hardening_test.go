package e2e_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// probe asks from inside, as root of the guest, how a sandbox is set up. What a guest can
// try is in test/attacks.
const probe = `
import errno, json, os, resource, socket
name = lambda n: errno.errorcode.get(n, n)
def attempt(f):
    try:
        f()
        return "ok"
    except OSError as e:
        return name(e.errno)
def read(p, mode="r"):
    try: return open(p, mode).read()
    except OSError: return ""
def links(d):
    out = {}
    try:
        for f in os.listdir(d):
            try: out[f] = os.readlink(d + "/" + f)
            except OSError: pass
    except OSError: pass
    return out
status = dict(l.split(":", 1) for l in open("/proc/self/status").read().splitlines() if ":" in l)
mounts = {}
for l in open("/proc/self/mountinfo"):
    f = l.split()
    mounts[f[4]] = f[5]
out = {
    "UIDMap": open("/proc/self/uid_map").read().split(),
    "Status": {k: v.strip() for k, v in status.items()},
    "Core": list(resource.getrlimit(resource.RLIMIT_CORE)),
    "NoFile": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
    "Memlock": list(resource.getrlimit(resource.RLIMIT_MEMLOCK)),
    "BootID": read("/proc/sys/kernel/random/boot_id").strip(),
    "Sockets": {n: attempt(lambda: socket.socket(f, socket.SOCK_STREAM, 0).close()) for n, f in (("INET", 2), ("UNIX", 1))},
    "Agent": mounts.get("/opt/opensandbox", "not a mount"),
    "Cgroup": [p for p, o in mounts.items() if p.startswith("/sys/fs/cgroup")],
    "Env1": read("/proc/1/environ").split("\0"),
    "Args1": read("/proc/1/cmdline").split("\0"),
    "Fds1": links("/proc/1/fd"),
    "Fds": links("/proc/self/fd"),
    "Pids": sorted(int(p) for p in os.listdir("/proc") if p.isdigit()),
    "Devices": sorted(os.listdir("/dev")),
}
print(json.dumps(out))
`

type findings struct {
	UIDMap                []string
	Status                map[string]string
	Core, NoFile, Memlock []int64
	Sockets               map[string]string
	Agent                 string
	Cgroup, Env1, Args1   []string
	Fds1, Fds             map[string]string
	Pids                  []int
	Devices               []string
	BootID                string
}

// capabilities is the list of docs/design/hardening.md as a mask: CHOWN DAC_OVERRIDE
// FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT SETFCAP.
const capabilities = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID | 1<<unix.CAP_KILL |
	1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID | 1<<unix.CAP_SETPCAP | 1<<unix.CAP_NET_BIND_SERVICE | 1<<unix.CAP_SYS_CHROOT |
	1<<unix.CAP_SETFCAP

// tellHardening holds both runtimes to docs/design/hardening.md, from inside. The comments
// below name its rows: of the table of defaults, unless they say otherwise.
func tellHardening(t *testing.T, l *lab) {
	id := l.make("python", "-e", "SECRET_OF_USER=x")
	var f findings
	l.python(id, &f, probe)
	mask := func(field string) uint64 {
		t.Helper()
		n, err := strconv.ParseUint(f.Status[field], 16, 64)
		if err != nil {
			t.Errorf("%s: %q", field, f.Status[field])
		}
		return n
	}
	for _, field := range []string{"CapEff", "CapBnd", "CapPrm"} { // row "capabilities"
		if got := mask(field); got != capabilities {
			t.Errorf("capabilities: %s is %x, want %x", field, got, uint64(capabilities))
		}
	}
	for _, field := range []string{"CapInh", "CapAmb"} { // the same row: both empty; gVisor has no CapAmb line
		if f.Status[field] != "" && mask(field) != 0 {
			t.Errorf("capabilities: %s is %s", field, f.Status[field])
		}
	}
	for _, family := range []string{"INET", "UNIX"} {
		if f.Sockets[family] != "ok" {
			t.Errorf("sockets: AF_%s: %s", family, f.Sockets[family])
		}
	}
	// the daemon itself, "/proc/self/exe": one file for all sandboxes
	if !strings.HasPrefix(f.Agent, "ro,") || !strings.Contains(f.Agent, "nosuid") {
		t.Errorf("the agent's mount: %s", f.Agent)
	}
	if len(f.Cgroup) > 0 { // row "cgroup file system": not mounted
		t.Errorf("cgroups are mounted at %v", f.Cgroup)
	}
	for _, list := range [][]string{f.Env1, f.Args1} { // docs/design/agent.md: the token comes by a pipe and stays out of sight
		for _, s := range list {
			if strings.Contains(strings.ToLower(s), "token") {
				t.Errorf("PID 1 shows %q", s)
			}
		}
	}
	for _, fds := range []map[string]string{f.Fds1, f.Fds} { // the daemon itself, "Descriptors": nothing of the host to reopen
		for fd, to := range fds {
			if strings.HasPrefix(to, "/") && to != "/dev/null" && !strings.HasPrefix(to, "/proc") && !strings.HasPrefix(to, "/.") &&
				!strings.HasPrefix(to, "/dev/pts") && !strings.HasPrefix(to, "/run/") {
				t.Errorf("descriptor %s is %s", fd, to)
			}
		}
	}
	if len(f.Pids) > 6 || f.Pids[0] != 1 { // row "/proc": own pid namespace
		t.Errorf("processes in sight: %v", f.Pids)
	}
	host, err := os.ReadFile("/proc/sys/kernel/random/boot_id") // row "boot_id"
	if err != nil {
		t.Error(err)
	}
	var again string
	l.python(id, &again, `import json; print(json.dumps(open("/proc/sys/kernel/random/boot_id").read().strip()))`)
	if len(f.BootID) != 36 || f.BootID == strings.TrimSpace(string(host)) || again != f.BootID {
		t.Errorf("the boot id is %q, then %q; that of the host is %q", f.BootID, again, host)
	}
	if f.NoFile[1] > 65536 { // row "open files"
		t.Errorf("RLIMIT_NOFILE is %v", f.NoFile)
	}
	if l.runtime == "runc" {
		tellKernelHardening(t, f)
		tellFilters(l, id)
	}
	tellDaemonHardening(t, l)
}

// tellDaemonHardening: no thread of the daemon has, or can get, capabilities that it does
// not need ("How is the daemon itself protected?").
func tellDaemonHardening(t *testing.T, l *lab) {
	const never = 1<<unix.CAP_SYS_MODULE | 1<<unix.CAP_SYS_RAWIO | 1<<unix.CAP_SYS_BOOT | 1<<unix.CAP_SYS_TIME | 1<<unix.CAP_SYSLOG |
		1<<unix.CAP_MAC_ADMIN | 1<<unix.CAP_AUDIT_CONTROL | 1<<unix.CAP_PERFMON
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", l.Pid()))
	if err != nil || len(threads) < 2 {
		t.Fatalf("the daemon has the threads %v (%v)", threads, err)
	}
	for _, status := range threads {
		b, err := os.ReadFile(status)
		if err != nil {
			continue // it has just ended
		}
		for line := range strings.Lines(string(b)) {
			set, value, _ := strings.Cut(line, ":")
			if !strings.HasPrefix(set, "Cap") {
				continue
			}
			if n, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64); err != nil || n&never != 0 {
				t.Errorf("%s of the daemon is %s", set, value)
			}
		}
	}
}

// tellFilters: everything in a sandbox has both filters of system calls (table of filters).
// cmd/sandbox-agent tells it of terminals as well.
func tellFilters(l *lab, id string) {
	count := func(path string) string { return `sed -n "s/^Seccomp_filters:[[:space:]]*//p" ` + path }
	session := strings.TrimSpace(l.ok("command", "session", "create", id))
	for who, out := range map[string]string{
		"PID 1":     l.ok("exec", id, "--", "sh", "-c", count("/proc/1/status")),
		"a command": l.ok("exec", id, "--", "sh", "-c", count("/proc/self/status")),
		"a session": l.ok("command", "session", "run", id, session, "--", count("/proc/self/status")),
		"bash":      l.ok("eval", "-l", "bash", id, count("/proc/self/status")),
		"python": l.ok("eval", id, `import subprocess; print(subprocess.run(["sh", "-c", '`+count("/proc/self/status")+
			`'], capture_output=True, text=True).stdout, end="")`),
	} {
		if out != "2\n" {
			l.Errorf("%s has the filters %q, want 2", who, out)
		}
	}
	l.ok("command", "session", "rm", id, session)
}

// tellKernelHardening is what only counts where guests use the host's kernel.
func tellKernelHardening(t *testing.T, f findings) {
	if len(f.UIDMap) != 3 || f.UIDMap[0] != "0" || f.UIDMap[2] != "65536" { // row "user namespace"
		t.Fatalf("uid map %v", f.UIDMap)
	}
	if base, err := strconv.Atoi(f.UIDMap[1]); err != nil || base < 100000 { // its own range of unprivileged ids
		t.Errorf("uid map %v", f.UIDMap)
	}
	if f.Status["NoNewPrivs"] != "1" { // row "no_new_privs"
		t.Errorf("NoNewPrivs is %q", f.Status["NoNewPrivs"])
	}
	if f.Status["Seccomp"] != "2" { // row "seccomp"
		t.Errorf("Seccomp is %q", f.Status["Seccomp"])
	}
	if f.Core[0] != 1 || f.Core[1] != 1 { // traps, "core_pattern": exactly 1
		t.Errorf("RLIMIT_CORE is %v", f.Core)
	}
	if !strings.Contains(f.Agent, "nodev") { // gVisor does not print this option
		t.Errorf("the agent's mount: %s", f.Agent)
	}
	for _, dev := range f.Devices { // row "/dev"; gVisor makes up its own net/tun and fuse
		switch dev {
		case "kvm", "fuse", "mem", "kmem", "port", "loop-control", "net":
			t.Errorf("/dev has %s", dev)
		}
	}
	if f.Memlock[1] > 64<<10 { // row "locked memory"
		t.Errorf("RLIMIT_MEMLOCK is %v", f.Memlock)
	}
}
