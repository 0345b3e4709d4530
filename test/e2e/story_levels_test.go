package e2e_test

import (
	"strings"
	"testing"
)

// levelProbe tells what a level of security changes. /v is a volume, /id a setuid copy of
// id(1).
const levelProbe = `
import ctypes, errno, fcntl, json, os, sqlite3, struct, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def ptrace():
    ctypes.set_errno(0)
    libc.ptrace(16, 1 << 22, None, None) # PTRACE_ATTACH to no process: ESRCH if it is allowed
    return errno.errorcode[ctypes.get_errno()]
def run(p, **how):
    try: return subprocess.run([p, "-u"], capture_output=True, text=True, **how).stdout.strip()
    except OSError as e: return errno.errorcode[e.errno]
def lock(f, how):
    try: how(f)
    except OSError as e: return errno.errorcode[e.errno]
    return ""
part = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
with sqlite3.connect("/v/db") as db: # locks parts of its file
    db.execute("create table if not exists t (x)")
    db.execute("insert into t values (1)")
status = dict(l.split(":", 1) for l in open("/proc/self/status").read().splitlines() if ":" in l)
subprocess.run("cp /usr/bin/id /v/id && cp /usr/bin/id /id && chmod 4755 /id", shell=True, check=True)
print(json.dumps({
    "Caps": int(status["CapBnd"], 16),
    "NoNewPrivs": status.get("NoNewPrivs", "").strip(),
    "Ptrace": ptrace(),
    "HidePid": "hidepid=" in open("/proc/self/mountinfo").read(),
    "NoSuid": any("nosuid" in l.split()[5] for l in open("/proc/self/mountinfo") if l.split()[4] == "/"),
    "Sys": sorted(os.listdir("/sys")),
    "Lock": lock(open("/v/lock", "w"), lambda f: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)),
    "OpenFileLock": lock(open("/v/lock", "w"), lambda f: fcntl.fcntl(f, 37, part)), # F_OFD_SETLK
    "Volume": run("/v/id"),
    "SetUID": run("/id", user=1000, group=1000),
    "Env": "SANDBOXD_SECURITY" in os.environ or b"SANDBOXD_SECURITY" in open("/proc/1/environ", "rb").read(),
}))
`

type levelFindings struct {
	Caps           uint64
	NoNewPrivs     string
	Ptrace         string
	HidePid        bool
	NoSuid         bool // the root file system is mounted so
	Sys            []string
	Volume, SetUID string
	Lock           string
	OpenFileLock   string
	Env            bool
}

// tellLevels: what --security changes, on each level, and that it stays with a sandbox
// over a stop, and with its snapshots.
func tellLevels(t *testing.T, l *lab) {
	for _, level := range []string{"strict", "default", "compat"} {
		id := l.make("--security", level, "-v", "level-"+level+":/v", "python")
		for _, when := range []string{"new", "started again"} {
			if when != "new" {
				l.ok("stop", id)
				l.ok("start", id)
			}
			var f levelFindings
			l.python(id, &f, levelProbe)
			l.wantLevel(level, when, f)
		}
		in := l.inspect(id)
		if in.Sandboxd.Security != level || (len(in.SecurityDifferences) == 0) != (level == "default") {
			t.Errorf("inspect says %q, which differs in %q", in.Sandboxd.Security, in.SecurityDifferences)
		}
		l.ok("rm", "-f", id)
		l.ok("volume", "rm", "level-"+level)
	}
	// A user and group of its own sees its own processes, and the agent still runs and ends
	// them. A number alone, which the image does not know, would have group 0.
	id := l.make("--security", "strict", "python")
	if out := l.ok("exec", "-u", "1000:1000", id, "--", "sh", "-c", "cat /proc/self/comm; ls -d /proc/1 2>&1; true"); l.runtime == "runc" &&
		(!strings.HasPrefix(out, "cat\n") || !strings.Contains(out, "No such file")) {
		t.Errorf("user 1000 sees %q", out)
	}
	l.wants(l.ctl("exec", "-u", "1000:1000", "--timeout", "1s", id, "--", "sleep", "1000"), 124)
	snapshot := strings.TrimSpace(l.ok("snapshot", "create", id))
	if in := l.inspect(l.make("--from", snapshot)); in.Sandboxd.Security != "strict" {
		t.Errorf("a sandbox made from a snapshot of a strict one is %q", in.Sandboxd.Security)
	}
	l.ok("snapshot", "rm", snapshot)
	l.wants(l.ctl("create", "--security", "lax", "base"), 125, "its levels are strict, default, compat")
}

func (l *lab) wantLevel(level, when string, f levelFindings) {
	l.Helper()
	runc := l.runtime == "runc"
	want := levelFindings{Caps: capabilities, NoNewPrivs: "1", Ptrace: "ESRCH", Volume: "0", SetUID: "1000"}
	switch level {
	case "strict":
		want.Caps = 0x4eb // CHOWN DAC_OVERRIDE FOWNER KILL SETGID SETUID and NET_BIND_SERVICE
		want.Volume = "EACCES"
		if runc {
			want.Ptrace, want.OpenFileLock = "EPERM", "EINVAL"
		}
	case "compat":
		want.NoNewPrivs, want.SetUID = "0", "0"
	}
	if !runc && f.NoNewPrivs == "" {
		want.NoNewPrivs = "" // gVisor does not show it
	}
	got := f
	got.HidePid, got.NoSuid, got.Sys = false, false, nil
	if got.Caps != want.Caps || got.NoNewPrivs != want.NoNewPrivs || got.Ptrace != want.Ptrace || got.Volume != want.Volume ||
		got.SetUID != want.SetUID || got.Lock != want.Lock || got.OpenFileLock != want.OpenFileLock || got.Env {
		l.Errorf("%s, %s: %+v, want %+v", level, when, got, want)
	}
	if runc && f.NoSuid != (level != "compat") {
		l.Errorf("%s, %s: the root file system is mounted nosuid: %v", level, when, f.NoSuid)
	}
	hidden := level == "strict" && runc
	if (len(f.Sys) == 0) != hidden || f.HidePid != hidden {
		l.Errorf("%s, %s: /proc hides processes: %v, /sys has %v", level, when, f.HidePid, f.Sys)
	}
}
