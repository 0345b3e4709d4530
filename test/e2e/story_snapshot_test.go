package e2e_test

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// furnish does to a root file system what copies lose: odd owners and modes,
// extended attributes, whiteouts and opaque directories, links, holes. Nothing
// of it is synced. It prints what the runtime refused.
const furnish = `
import os, json, shutil
os.umask(0)
os.makedirs('/srv/m/deep/' + '/'.join('d' * 30))
refused = []
def try_(what, f, *a, **k):
    try: f(*a, **k)
    except OSError as e: refused.append(what + ': ' + str(e))
def put(name, text='x', mode=0o644, uid=0, gid=0):
    p = '/srv/m/' + name
    with open(p, 'w') as f: f.write(text)
    os.chown(p, uid, gid); os.chmod(p, mode)
    return p
for i, (uid, gid) in enumerate([(0, 0), (33, 33), (1000, 100), (65534, 65534), (65535, 1)]):
    put('own-%d' % i, str(i) * 1000, 0o640, uid, gid)
put('setuid', mode=0o4755, uid=1000); put('setgid', mode=0o2755, gid=50); put('none', mode=0)
put('odd \t\n name'); put('\u00e4\u20ac')
os.mkdir('/srv/m/sticky'); os.chmod('/srv/m/sticky', 0o1777)
os.mkdir('/srv/m/sg'); os.chown('/srv/m/sg', 5, 50); os.chmod('/srv/m/sg', 0o2775)
os.symlink('../own-1', '/srv/m/sticky/link'); os.symlink('/nowhere', '/srv/m/dangling')
os.link('/srv/m/own-2', '/srv/m/sticky/hard')
try_('fifo', os.mkfifo, '/srv/m/fifo', 0o622)
with open('/srv/m/sparse', 'wb') as f: f.seek(64 << 20); f.write(b'end')
try_('user xattr', os.setxattr, '/srv/m/own-1', 'user.note', b'kept')
try_('capability', os.setxattr, '/srv/m/own-0', 'security.capability', bytes([1,0,0,2,0,4,0,0] + [0] * 12))
os.remove('/etc/debian_version')
shutil.rmtree('/usr/share/pam'); os.mkdir('/usr/share/pam'); put('../../usr/share/pam/new')
os.chmod('/usr/share/perl5', 0o700); os.chown('/etc/passwd', 0, 4)
with open('/etc/hostname.d', 'w') as f: f.write('late')
os.utime('/srv/m/own-3', ns=(1, 1234567890123456789))
print(json.dumps(refused))
`

// census prints what furnish changed and where.
const census = `
import os, json, hashlib
out = []
first = {}
def look(p):
    st = os.lstat(p)
    text = ''
    if os.path.islink(p): text = os.readlink(p)
    elif os.path.isfile(p):
        h = hashlib.sha256()
        with open(p, 'rb') as f:
            while b := f.read(1 << 20): h.update(b)
        text = h.hexdigest()
    try: x = {n: os.getxattr(p, n, follow_symlinks=False).hex() for n in os.listxattr(p, follow_symlinks=False)}
    except OSError: x = {}
    links = st.st_nlink if os.path.isfile(p) else 0 # gVisor counts two names of a fifo
    if links > 1: text += ' is ' + first.setdefault((st.st_dev, st.st_ino), p)
    out.append('%s %o %d:%d %d %d %d %s %s' % (ascii(p), st.st_mode, st.st_uid, st.st_gid, 0 if os.path.isdir(p) else st.st_size, links, st.st_mtime_ns, text, sorted(x.items())))
for top in ['/srv', '/usr/share/pam', '/usr/share/perl5', '/etc']:
    look(top)
    for d, dirs, files in os.walk(top):
        dirs.sort()
        for n in sorted(dirs + files):
            if os.path.join(d, n) not in ('/etc/hosts', '/etc/hostname', '/etc/resolv.conf'): look(os.path.join(d, n))
out.append('holes %s' % (os.stat('/srv/m/sparse').st_blocks * 512 < 1 << 20))
print(json.dumps(out))
`

func (l *lab) census(id string) (lines []string) {
	l.Helper()
	l.python(id, &lines, census)
	if len(lines) < 50 {
		l.Fatalf("the census of %s has %d lines", id, len(lines))
	}
	return lines
}

func (l *lab) same(what string, want, got []string) {
	l.Helper()
	n := 0
	for _, line := range want {
		if !slices.Contains(got, line) && n < 10 {
			l.Errorf("%s: lost %s", what, line)
			n++
		}
	}
	for _, line := range got {
		if !slices.Contains(want, line) && n < 20 {
			l.Errorf("%s: came %s", what, line)
			n++
		}
	}
}

// from makes a sandbox of a snapshot.
func (l *lab) from(snap, runtime string, args ...string) string {
	l.Helper()
	return strings.TrimSpace(l.ok(append([]string{"create", "--from", snap, "--runtime", runtime}, args...)...))
}

// tellSnapshots: what a sandbox has on its disk comes back on the other
// runtime, and from there on this one, whether it ran, was paused or had ended.
func tellSnapshots(t *testing.T, l *lab) {
	defer l.deleteSnapshots(t)
	other := runtimes[1-slices.Index(runtimes, l.runtime)]
	id := l.make("python", "--name", "origin", "--", "sleep", "1000")
	var refused []string
	l.python(id, &refused, furnish)
	t.Logf("%s refused %q", l.runtime, refused)
	if len(refused) > 0 && l.runtime == "runc" {
		t.Errorf("runc refused %q", refused)
	}
	want := l.census(id)
	if l.runtime == "runsc" { // which keeps named pipes in memory, on no disk
		want = slices.DeleteFunc(want, func(line string) bool { return strings.HasPrefix(line, "'/srv/m/fifo'") })
	}
	snap := func(args ...string) string {
		return strings.TrimSpace(l.ok(append([]string{"snapshot", "create"}, args...)...))
	}
	running := snap("origin", "--name", "while it runs")
	l.wants(l.ctl("snapshot", "create", "origin", "--name", "while it runs"), 125, running+" has the name")
	l.answers(t, id) // it goes on
	for range 3 {    // also frozen again and again, with nothing to do in between (tools/runsc/patches/frozen-twice.patch)
		l.ok("snapshot", "rm", snap("origin"))
		l.ok("pause", "origin")
		l.ok("resume", "origin")
	}
	for range 3 {
		l.answers(t, id)
	}
	changes := l.ok("diff", "origin")
	for _, want := range []string{
		"A /srv/m/own-4", "A /srv/m/odd \\x09\\n name", "D /etc/debian_version", "C /usr/share/pam",
		"A /usr/share/pam/new", "D /usr/share/pam/", "C /usr/share/perl5", "C /etc/passwd", "A /etc/hostname.d",
	} {
		if !strings.Contains(changes, "\n"+want) {
			t.Errorf("diff lacks %q", want)
		}
	}
	if strings.Contains(changes, "sandboxd") || strings.Contains(changes, "/etc/hosts\n") {
		t.Errorf("diff shows what is not the guest's: %s", changes)
	}
	if same := l.ok("diff", "origin", "while it runs"); same != "" {
		t.Errorf("diff against a snapshot of now: %.500s", same)
	}
	if out := l.ok("diff", "-o", "name", running); strings.Count(out, "\n") != strings.Count(changes, "\n") {
		t.Errorf("the snapshot differs in %d, the sandbox in %d", strings.Count(out, "\n"), strings.Count(changes, "\n"))
	}
	l.ok("pause", "origin")
	paused := snap("origin")
	l.wants(l.ctl("exec", "origin", "--", "true"), 125, "Paused")
	l.ok("stop", "-t", "1", "origin")
	ended := snap(id)

	ls := l.ok("snapshot", "ls", "-o", "json")
	var list []wire.Snapshot
	if err := json.Unmarshal([]byte(ls), &list); err != nil || len(list) != 3 || list[2].Name != "while it runs" ||
		list[0].SandboxID != id || list[0].Status.State != wire.SnapshotReady {
		t.Errorf("snapshot ls: %v, %s", err, ls)
	}
	for what, s := range map[string]string{"running": running, "paused": paused, "ended": ended} {
		there := l.from(s, other, "--name", what)
		l.same(what+" on "+other, shown(want), shown(l.census(there)))
		back := l.from(snap(there), l.runtime)
		got := l.census(back)
		if l.runtime == "runsc" {
			want, got = shown(want), shown(got)
		}
		l.same(what+" there and back", want, got)
		l.ok("rm", "-f", there, back)
	}
	// A snapshot outlives its source; what was made from it outlives both.
	l.ok("rm", "-f", "origin")
	last := l.from("while it runs", other)
	l.ok("snapshot", "rm", running, paused, ended)
	l.answers(t, last)
	if sb := l.inspect(last); sb.SnapshotID != running || sb.Image != nil || sb.Sandboxd.ImageName != "python:latest" {
		t.Errorf("%+v", sb.Sandbox)
	}
	if ps := l.ok("ps"); !strings.Contains(ps, "python:latest") {
		t.Errorf("ps: %s", ps)
	}
	l.wants(l.ctl("create", "--from", running), 125, "no snapshot")
	l.wants(l.ctl("snapshot", "rm", running), 125, "no snapshot")
	l.wants(l.ctl("create", "--from", running, "python"), 125, "--from uses the image of the snapshot")
}

// times are the last change and the number of links in a line of a census.
var times = regexp.MustCompile(`^(.* \d+:\d+ \d+) \d+ \d{16,} `)

// shown is what of a census both runtimes show alike. gVisor shows neither the
// capabilities of files nor holes, and, until a file is closed by all, times of
// its own clock, some microseconds off what is on the disk.
func shown(census []string) (out []string) {
	for _, line := range census {
		line = strings.TrimSuffix(line, " []")
		if i := strings.Index(line, " [('security.capability'"); i >= 0 {
			line = line[:i]
		}
		if !strings.HasPrefix(line, "holes") {
			if !strings.Contains(line, " 1234567890123456789 ") { // which was set, not noted
				line = times.ReplaceAllString(line, "$1 ")
			}
			out = append(out, line)
		}
	}
	return out
}

// tellSnapshotsRefused: what cannot be says why, and leaves nothing.
func tellSnapshotsRefused(t *testing.T, l *lab) {
	defer l.deleteSnapshots(t)
	failed := l.ctl("create", "--runtime", l.runtime, "base", "--", "/etc/passwd")
	l.wants(failed, 126, `create_failed): could not be created: entrypoint "/etc/passwd": not executable`)
	failed = l.ctl("create", "--runtime", l.runtime, "base", "--", "/no/such/program")
	l.wants(failed, 127, `create_failed): could not be created: entrypoint "/no/such/program": no such file in the image; `)
	l.wants(l.ctl("snapshot", "create", strings.TrimSpace(failed.out)), 125, "could not be created")
	l.wants(l.ctl("snapshot", "create", "nobody"), 125, "not found")
	l.wants(l.ctl("start", strings.TrimSpace(failed.out)), 125, "could not be created")
	id := l.make("base", "--disk", "64Mi")
	l.wants(l.ctl("snapshot", "create", id, "--name", ""), 0)
	big := strings.TrimSpace(l.ok("snapshot", "create", id))
	l.ok("exec", id, "--", "sh", "-c", "head -c 20000000 /dev/urandom >/srv/f && sync")
	full := strings.TrimSpace(l.ok("snapshot", "create", id))
	l.from(big, l.runtime, "--disk", "16Mi")
	l.wants(l.ctl("create", "--from", full, "--disk", "16Mi"), 125, "holds", "--disk")
	if out := l.ok("snapshot", "inspect", full); !strings.Contains(out, `"bytes": 2`) {
		t.Errorf("inspect: %s", out)
	}
	if err := l.api.Delete(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if _, err := l.api.Snapshots().Create(t.Context(), id, "", true); !errs.Is(err, errs.NotFound) {
		t.Errorf("a snapshot of what is being deleted: %v", err)
	}
}

// tellStopAndStart: what was stopped starts again as it was, but for its memory.
func tellStopAndStart(t *testing.T, l *lab) {
	id := l.make("base", "--name", "sleeper", "--timeout", "1h", "--", "sh", "-c",
		`trap 'echo bye; exit 5' TERM; echo up; echo run >>/srv/runs; while :; do sleep 0.1; done`)
	l.ok("exec", id, "--", "sh", "-c", "echo kept >/srv/file; chown 33:44 /srv/file")
	before := l.inspect(id)
	l.hasRun("sleeper", 1)
	start := time.Now()
	if out := l.ok("stop", "-t", "60", "sleeper"); out != "sleeper\n" || time.Since(start) > 45*time.Second {
		t.Errorf("stop printed %q after %v", out, time.Since(start))
	}
	i := l.inspect(id)
	if i.Status.State != wire.Terminated || i.Status.Reason != "stopped" || i.Sandboxd.ExitCode == nil || *i.Sandboxd.ExitCode != 5 ||
		!strings.HasPrefix(i.LastOutput, "up\n") || !strings.HasSuffix(i.LastOutput, "bye\n") {
		t.Errorf("stopped as %+v, %q", i.Status, i.LastOutput)
	}
	if r := l.ctl("stop", "sleeper"); r.code != 0 || r.out != "sleeper\n" ||
		!strings.Contains(r.errout, "sandbox sleeper is already Terminated") {
		t.Errorf("stop of what is stopped: %+v", r) // docker says 0
	}
	for run := range 2 {
		if out := l.ok("start", "sleeper"); out != "sleeper\n" {
			t.Errorf("start printed %q", out)
		}
		l.answers(t, id)
		i = l.inspect(id)
		if i.Status.State != wire.Running || i.Slot != before.Slot || !i.ExpiresAt.Equal(*before.ExpiresAt) || i.Sandboxd.ExitCode != nil {
			t.Errorf("started as %+v", i)
		}
		if r := l.ctl("start", "sleeper"); r.code != 0 || r.out != "sleeper\n" ||
			!strings.Contains(r.errout, "sandbox sleeper is already Running") {
			t.Errorf("start of what runs: %+v", r)
		}
		l.ok("pause", "sleeper")
		l.wants(l.ctl("start", "sleeper"), 125, "paused")
		l.ok("resume", "sleeper")
		l.hasRun("sleeper", 2+run)
		l.ok("stop", "-t", "0", "sleeper")
	}
	l.ok("start", "sleeper")
	l.hasRun("sleeper", 4)
	if out := l.ok("exec", id, "--", "sh", "-c", "cat /srv/file; stat -c %u:%g /srv/file"); out != "kept\n33:44\n" {
		t.Errorf("its files are %q", out)
	}
	// One that ended by itself starts again, too, and its old end is forgotten.
	l.ctl("exec", "sleeper", "--", "sh", "-c", "kill -TERM -1") // all but the agent
	l.awaitState(t, id, wire.Failed, 10*time.Second)
	l.ok("start", "sleeper")
	l.answers(t, id)
}

// hasRun waits for the n-th line of what writes one into /srv/runs each time it is started.
func (l *lab) hasRun(sandbox string, n int) {
	l.Helper()
	want := strings.Repeat("run\n", n)
	settles(l.T, func() error {
		if r := l.ctl("exec", sandbox, "--", "cat", "/srv/runs"); r.out != want {
			return fmt.Errorf("/srv/runs has %q, want %q", r.out, want)
		}
		return nil
	})
}

func (l *lab) deleteSnapshots(t *testing.T) { l.host.deleteSnapshots(t) }

// deleteSnapshots deletes every snapshot.
func (h host) deleteSnapshots(t testing.TB) {
	t.Helper()
	all, err := h.api.Snapshots().List(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if err := h.api.Snapshots().Remove(t.Context(), s.ID); err != nil {
			t.Errorf("delete %s, which was %s: %v", s.ID, s.Status.State, err)
		}
	}
}

// TestSnapshotsOnPlainPool: the same where nothing can be shared.
func TestSnapshotsOnPlainPool(t *testing.T) {
	h := newHost(t, daemontest.Options{StateDir: t.TempDir(), Pool: "plain"})
	daemontest.Image(t, h.Daemon, "python")
	l := &lab{host: h, T: t, runtime: "runc"}
	tellSnapshots(t, l)
	h.deleteAll(t)
}
