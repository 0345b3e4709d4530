package e2e_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// tellBench: a user measures their host, with the names that make bench has.
func tellBench(t *testing.T, l *lab) {
	r := l.ctl("bench", "-n", "1", "--runtime", l.runtime, "-o", "json")
	var report struct {
		Machine struct{ Kernel, Sandboxd, Cgroups string }
		Results []struct {
			Name, Runtime, Unit string
			P50                 float64
		}
	}
	if err := json.Unmarshal([]byte(r.out), &report); err != nil || r.code != 0 {
		t.Fatalf("%v, %d: %s%s", err, r.code, r.out, r.errout)
	}
	var rows []string
	for _, x := range report.Results {
		rows = append(rows, x.Name+" "+x.Runtime+" "+x.Unit)
		if x.P50 <= 0 {
			t.Errorf("%+v", x)
		}
	}
	rt := l.runtime
	want := []string{
		"cold_create_first_command " + rt + " ms", "run_once " + rt + " ms", "delete " + rt + " ms",
		"exec_true " + rt + " ms", "file_put_100MB " + rt + " MB/s", "file_get_100MB " + rt + " MB/s", "list - ms",
	}
	if m := report.Machine; !slices.Equal(rows, want) || m.Kernel == "" || m.Sandboxd == "" || m.Cgroups == "" {
		t.Errorf("%+v of %+v, want rows %v", rows, m, want)
	}
	if left := l.ctl("ps", "-q", "-a"); left.out != "" {
		t.Errorf("left: %s", left.out)
	}
}

// tellRun: a command, its output and its exit status, and nothing after it.
func tellRun(t *testing.T, l *lab) {
	run := func(args ...string) result { return l.ctl(append([]string{"run", "--runtime", l.runtime}, args...)...) }
	if r := run("python", "--", "python3", "-c", "print(6*7)"); r != (result{"42\n", "", 0}) {
		t.Errorf("%+v", r)
	}
	if r := run("base", "--", "sh", "-c", "echo out; echo err >&2; exit 7"); r != (result{"out\n", "err\n", 7}) {
		t.Errorf("%+v", r)
	}
	if r := run("-e", "A=b c", "-w", "/var/tmp", "-u", "nobody", "base", "--", "sh", "-c",
		`echo "$A"; pwd; id -u; id -gn`); r.out != "b c\n/var/tmp\n65534\nnogroup\n" {
		t.Errorf("%+v", r)
	}
	if r := run("-u", "1000:1001", "base", "--", "sh", "-c",
		"id -u; id -g; touch /root/x 2>/dev/null || echo denied"); r.out != "1000\n1001\ndenied\n" {
		t.Errorf("%+v", r)
	}
	in := make([]byte, 1<<20)
	rand.Read(in) //nolint:errcheck // never fails since Go 1.24
	if r := l.feed(bytes.NewReader(in), "run", "--runtime", l.runtime, "-i", "base", "--", "cat"); r.out != string(in) || r.code != 0 {
		t.Errorf("cat of %d random bytes: %d bytes, %d, %q", len(in), len(r.out), r.code, r.errout)
	}
	if r := run("base", "--", "cat"); r != (result{}) { // without -i there is no input
		t.Errorf("%+v", r)
	}
	r := run("python", "--", "python3", "-c", "import sys; sys.stdout.buffer.write(bytes(range(256))*40960)")
	if want := bytes.Repeat(every, 40960); r.code != 0 || r.out != string(want) {
		t.Errorf("%d bytes of output, want %d; %d %q", len(r.out), len(want), r.code, r.errout)
	}
	if ps := l.ok("ps", "-a", "-q"); ps != "" {
		t.Errorf("left after run: %q", ps)
	}
	// Without --rm the sandbox ends with the command, and is kept.
	if r := run("--rm=false", "--name", "kept", "base", "--", "sh", "-c", "exit 3"); r != (result{"", "", 3}) {
		t.Errorf("%+v", r)
	}
	if sb := l.ok("inspect", "kept"); !strings.Contains(sb, `"state": "Terminated"`) {
		t.Errorf("after run --rm=false: %s", sb)
	}
	l.ok("rm", "-f", "kept")
}

// every is each byte once.
var every = func() (b []byte) {
	for i := range 256 {
		b = append(b, byte(i))
	}
	return b
}()

// tellRunFails: the exit statuses that docker, env and timeout have made
// customary, and errors that say what to do.
func tellRunFails(t *testing.T, l *lab) {
	run := func(args ...string) result { return l.ctl(append([]string{"run", "--runtime", l.runtime}, args...)...) }
	l.wants(run("base", "--", "no-such-program"), 127, "no-such-program")
	l.wants(run("base", "--", "/no/such/program"), 127, "/no/such/program")
	l.wants(run("base", "--", "/etc/passwd"), 126, "/etc/passwd", "executable")
	l.wants(run("--timeout", "1s", "base", "--", "sleep", "60"), 124, "--timeout 1s")
	l.wants(run("--memory", "128Mi", "python", "--", "python3", "-c", eat), 137, "memory limit", "--memory")
	l.wants(run("no-such-image", "--", "true"), 125, "no-such-image", "sandboxctl image ls")
	l.wants(l.ctl("run", "--runtime", "kata", "base", "--", "true"), 125, "kata", "runsc", "runc")
	for _, memory := range []string{"lots", "12x", "-1", "0", "NaN", "1", "999999Ti", "1.5Gi"} {
		l.wants(run("--memory="+memory, "base", "--", "true"), 125, "memory")
	}
	for _, cpu := range []string{"-1", "0", "NaN", "1e9", "many"} {
		l.wants(run("--cpu="+cpu, "base", "--", "true"), 125, "cpu")
	}
	l.wants(run("base"), 125, "no command")
	l.wants(run("--no-such-flag", "base", "true"), 125, "--no-such-flag", "--help")
	l.wants(l.ctl("-H", "unix:///run/no-such-daemon.sock", "run", "base", "true"), 125, "/run/no-such-daemon.sock")
	l.wants(run("-d", "-u", "nobody", "base", "--", "sleep", "60"), 125, "-u", "exec -d -u nobody")
	if ps := l.ok("ps", "-a", "-q"); ps != "" {
		t.Errorf("left after failures: %q", ps)
	}
}

// tellLab is the line of docs/tour.md: create by name, look, use, remove.
func tellLab(t *testing.T, l *lab) {
	events, stop := l.watch()
	id := l.make("python", "--name", "lab", "--memory", "256Mi", "--cpu", "500m", "--pids", "256", "--disk", "1Gi",
		"--timeout", "30m", "--label", "team=a", "--allow", "203.0.113.0/24:443",
		"--secure-access", "--renew-on-access", "3600", "-o", "name")
	if !regexp.MustCompile(`^[a-z][a-z2-7]{11}$`).MatchString(id) {
		t.Fatalf("create printed %q", id)
	}
	if ps := l.ok("ps"); !regexp.MustCompile(`(?m)^` + id + ` +lab +python\S* +` + l.runtime +
		` +Running .*in \d+ minutes`).MatchString(ps) {
		t.Errorf("ps printed %s", ps)
	}
	for args, want := range map[string]string{
		"ps -q": id, "ps -o name --filter label=team=a": id, "ps -q --filter label=team=b": "", "ps -q --filter name=lab": id,
		"ps -q --filter state=Paused": "",
	} {
		if got := strings.TrimSpace(l.ok(strings.Fields(args)...)); got != want {
			t.Errorf("%s: %q, want %q", args, got, want)
		}
	}
	if js := l.ok("ps", "-o", "json"); !strings.Contains(js, `"name": "lab"`) || !strings.HasPrefix(js, "[") {
		t.Errorf("ps -o json printed %s", js)
	}
	l.wants(l.ctl("create", "base", "--name", "lab"), 125, `"lab"`)
	if out := l.ok("endpoint", "lab", "80"); !strings.Contains(out, "\nOpenSandbox-Secure-Access: ") {
		t.Errorf("endpoint of one made with --secure-access printed %q", out)
	}
	if out := l.ok("exec", "-e", "X=1", "-w", "/tmp", "lab", "--", "sh", "-c", "echo $X; pwd"); out != "1\n/tmp\n" {
		t.Errorf("exec printed %q", out)
	}
	eventually(t, 5*time.Second, func() error {
		sb, err := l.api.Get(t.Context(), "lab")
		if err == nil && time.Until(*sb.ExpiresAt) < 50*time.Minute {
			err = fmt.Errorf("after a command it expires at %v", sb.ExpiresAt)
		}
		return err
	})
	l.wants(l.ctl("exec", "lab", "--", "sh", "-c", "exit 9"), 9)
	l.wants(l.ctl("exec", "nobody", "--", "true"), 125, "nobody")

	cmd := strings.TrimSpace(l.ok("exec", "-d", "lab", "--", "sh", "-c", "echo one; echo two >&2; exit 5"))
	if out := l.ok("command", "logs", "-f", "lab", cmd); out != "one\ntwo\n" {
		t.Errorf("command logs -f printed %q", out)
	}
	eventually(t, 5*time.Second, func() error { _, err := l.api.Commands(id).Status(t.Context(), cmd); return err })
	if st := l.ok("command", "status", "lab", cmd); !strings.Contains(st, `"exit_code": 5`) {
		t.Errorf("command status printed %s", st)
	}
	if out := l.ok("command", "logs", "lab", cmd); out != "one\ntwo\n" {
		t.Errorf("command logs printed %q", out)
	}
	if out := l.ok("command", "logs", "-f", "-n", "1", "lab", cmd); out != "two\n" {
		t.Errorf("command logs -f -n 1 printed %q", out)
	}

	if st := l.ok("stats", "--no-stream", "lab"); !strings.Contains(st, "256MiB") || !strings.Contains(st, "/ 256") {
		t.Errorf("stats printed %s", st)
	}
	if i := l.inspect("lab"); i.Sandboxd.MemoryBytes != 256<<20 || i.Sandboxd.CPUMillis != 500 || i.Sandboxd.DiskBytes != 1<<30 ||
		i.Metadata["team"] != "a" || !slices.Equal(i.Rules, []string{"allow 203.0.113.0/24:443"}) || i.Host["address"] == "" {
		t.Errorf("inspect: %+v", i)
	}
	l.wants(l.ctl("rm", "lab"), 125, "running", "sandboxctl stop", "sandboxctl rm -f")
	l.ok("pause", "lab")
	l.wants(l.ctl("rm", "lab"), 125, "paused")
	l.wants(l.ctl("exec", "lab", "--", "true"), 125, "Paused", "resume")
	l.ok("resume", "lab")
	l.ok("exec", "lab", "--", "true")
	if until, err := time.Parse(time.RFC3339, strings.TrimSpace(l.ok("renew", "lab", "3h"))); err != nil ||
		time.Until(until) < 179*time.Minute {
		t.Errorf("renewed until %v, %v", until, err)
	}
	l.ok("stop", "lab")
	l.ok("rm", "lab")
	l.wants(l.ctl("rm", "lab"), 125, "lab")
	l.ok("rm", "-f", "lab")
	eventually(t, 5*time.Second, func() error { return events.has("running", "paused", "renewed", "deleted") })
	stop()
}

// tellCopy: cp does what docker cp does, byte for byte, in both directions.
func tellCopy(t *testing.T, l *lab) {
	id := l.make("base", "--disk", "1Gi")
	dir := t.TempDir()
	big := make([]byte, 50<<20)
	rand.Read(big) //nolint:errcheck // never fails since Go 1.24
	for name, b := range map[string][]byte{"big": big, "tree/a": []byte("a"), "tree/sub/b": nil, "tree/sub/c d": []byte("c")} {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, b, 0o640); err != nil {
			t.Fatal(err)
		}
	}
	then := time.Unix(1_600_000_000, 0)
	if err := errors.Join(os.Symlink("sub/../a", filepath.Join(dir, "tree", "link")), os.Chown(filepath.Join(dir, "tree", "a"), 12, 13),
		os.Link(filepath.Join(dir, "tree", "a"), filepath.Join(dir, "tree", "hard")),
		os.Chtimes(filepath.Join(dir, "tree", "a"), then, then)); err != nil {
		t.Fatal(err)
	}
	l.ok("cp", filepath.Join(dir, "big"), id+":/tmp/")
	l.ok("cp", id+":/tmp/big", filepath.Join(dir, "back"))
	if back, err := os.ReadFile(filepath.Join(dir, "back")); err != nil || !bytes.Equal(back, big) {
		t.Errorf("50 MB came back as %d bytes, %v", len(back), err)
	}
	const census = "find . ! -type d | sort && stat -c '%a %Y %h %u:%g' a && readlink link"
	const all = "./a\n./hard\n./link\n./sub/b\n./sub/c d\n640 1600000000 2 "
	l.ok("cp", filepath.Join(dir, "tree"), id+":/srv")
	l.ok("cp", "-a", filepath.Join(dir, "tree"), id+":/srv/kept")
	for where, owner := range map[string]string{"/srv/tree": "0:0", "/srv/kept": "12:13"} {
		if out := l.ok("exec", id, "--", "sh", "-c", "cd "+where+" && "+census); out != all+owner+"\nsub/../a\n" {
			t.Errorf("%s arrived as %q", where, out)
		}
	}
	l.ok("cp", id+":/srv/tree", filepath.Join(dir, "tree2"))
	l.ok("cp", id+":/srv/tree/.", filepath.Join(dir, "tree2"))
	packed := l.ctl("cp", id+":/srv/tree", "-")
	if packed.code != 0 || packed.errout != "" {
		t.Errorf("%d %s", packed.code, packed.errout)
	}
	unpack := exec.Command("tar", "-C", t.TempDir(), "-x")
	unpack.Stdin = strings.NewReader(packed.out)
	if out, err := unpack.CombinedOutput(); err != nil {
		t.Errorf("tar: %s %v", out, err)
	}
	for _, at := range []string{filepath.Join(dir, "tree2"), filepath.Join(unpack.Args[2], "tree")} {
		out, err := exec.Command("sh", "-c", "cd "+at+" && "+census).CombinedOutput()
		if err != nil || string(out) != all+"0:0\nsub/../a\n" {
			t.Errorf("%s came back as %q, %v", at, out, err)
		}
	}
	// A guest that sends a link first, and then a file, does not write where the link leads.
	result, victim := filepath.Join(dir, "result.json"), filepath.Join(dir, "tree", "a")
	l.ok("exec", id, "--", "ln", "-s", victim, "/srv/result")
	l.wants(l.ctl("cp", id+":/srv/result", result), 125, "it is a symbolic link to")
	l.ok("exec", id, "--", "sh", "-c", "rm /srv/result; echo evil > /srv/result")
	l.ok("cp", id+":/srv/result", result)
	if b, err := os.ReadFile(victim); err != nil || strings.Contains(string(b), "evil") {
		t.Errorf("the second copy wrote through a link of the guest: %q %v", b, err)
	}
	l.ok("exec", id, "--", "mkdir", "/srv/in")
	if r := l.feed(strings.NewReader(packed.out), "cp", "-", id+":/srv/in"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	if out := l.ok("exec", id, "--", "cat", "/srv/in/tree/link"); out != "a" {
		t.Errorf("the tar was unpacked to %q", out)
	}
	l.wants(l.feed(strings.NewReader(packed.out[:len(packed.out)/2]), "cp", "-", id+":/srv/in"), 125, "cut off")
	l.wants(l.ctl("cp", filepath.Join(dir, "big"), id+":/no/such"), 125, "/no does not exist; create it first")
	l.wants(l.ctl("cp", id+":/no/such/file", dir), 125, "/no/such/file")
	l.wants(l.ctl("cp", filepath.Join(dir, "nothing"), id+":/tmp"), 125, "nothing")

	// A disk that is full is named, and of the file that did not fit there is nothing.
	small := l.make("base", "--disk", "64Mi")
	l.ok("cp", filepath.Join(dir, "big"), small+":/srv/1")
	l.wants(l.ctl("cp", filepath.Join(dir, "big"), small+":/srv/2"), 125, "/srv/2", "64Mi, is reached", "give it more with --disk")
	if out := l.ok("exec", small, "--", "ls", "-A", "/srv"); out != "1\n" {
		t.Errorf("a full disk holds %q", out)
	}
}

// tellFollow: logs arrive while the command runs, and -f ends when it does, or
// when its sandbox is removed under it.
func tellFollow(t *testing.T, l *lab) {
	id := l.make("base", "--", "sh", "-c", "echo begin; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo end")
	follow := func(args ...string) (*watched, func() int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		t.Cleanup(cancel)
		w := &watched{}
		cmd := l.command(ctx, args...)
		cmd.Stdout = w
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return w, func() int { _ = cmd.Wait(); return cmd.ProcessState.ExitCode() }
	}
	logs, wait := follow("logs", "-f", id)
	eventually(t, patience, func() error { return logs.has("begin\n") })
	if out := l.ok("logs", "-n", "1", id); out != "begin\n" {
		t.Errorf("logs -n 1: %q", out)
	}
	last, waitLast := follow("logs", "-f", "-n", "1", id)
	eventually(t, patience, func() error { return last.has("begin\n") })
	l.ok("exec", id, "--", "touch", "/tmp/go")
	if code := wait(); code != 0 || logs.String() != "begin\nend\n" {
		t.Errorf("logs -f: %d, %q", code, logs)
	}
	if code := waitLast(); code != 0 || last.String() != "begin\nend\n" {
		t.Errorf("logs -f -n 1: %d, %q", code, last)
	}
	l.awaitState(t, id, wire.Terminated, patience)
	if out := l.ok("logs", id); out != "begin\nend\n" {
		t.Errorf("logs of an ended sandbox: %q", out)
	}
	if out := l.ok("logs", "--tail", "1", id); out != "end\n" {
		t.Errorf("the last line of an ended sandbox: %q", out)
	}

	id = l.make("base")
	cmd := strings.TrimSpace(l.ok("exec", "-d", id, "--", "sh", "-c", "echo begin; sleep 1000"))
	logs, wait = follow("command", "logs", "-f", id, cmd)
	eventually(t, patience, func() error { return logs.has("begin\n") })
	l.ok("rm", "-f", id)
	started := time.Now()
	wait()
	if took := time.Since(started); took > 5*time.Second {
		t.Errorf("command logs -f went on for %v after its sandbox was removed", took)
	}

	id = l.make("base")
	out, wait := follow("exec", id, "--", "sh", "-c", "echo begin; sleep 1000")
	eventually(t, patience, func() error { return out.has("begin\n") })
	l.ok("rm", "-f", id)
	started = time.Now()
	if code := wait(); code != 137 || time.Since(started) > 10*time.Second {
		t.Errorf("exec in a sandbox that was removed: %d after %v", code, time.Since(started))
	}
}

// tellNoShell: an image need not have a shell; only what asks for one fails.
func tellNoShell(t *testing.T, l *lab) {
	id := l.make("python")
	l.ok("exec", id, "--", "python3", "-c",
		"import os; [os.remove(p) for p in ('/bin/sh', '/bin/bash', '/bin/dash') if os.path.lexists(p)]")
	if out := l.ok("exec", id, "--", "python3", "-c", "print(1)"); out != "1\n" {
		t.Errorf("without a shell: %q", out)
	}
	l.wants(l.ctl("exec", id, "--", "sh", "-c", "true"), 127, "sh")
	a := l.request("POST", "/v1/sandboxes/"+id+"/proxy/44772/command", strings.NewReader(`{"command":"echo hello; echo again"}`),
		"X-EXECD-ACCESS-TOKEN", daemontest.Key)
	if !strings.Contains(a.body, "sh") || !strings.Contains(a.body, "error") && a.status < 400 {
		t.Errorf("a shell line without a shell: %d %s", a.status, a.body)
	}
}

// watch collects events until stop is called.
func (l *lab) watch() (w *watched, stop func()) {
	l.Helper()
	w = &watched{}
	cmd := l.command(l.Context(), "events", "-f")
	cmd.Stdout = w
	if err := cmd.Start(); err != nil {
		l.Fatal(err)
	}
	// It prints nothing of the past, and does not say when it listens: make
	// something happen until it does.
	eventually(l.T, 10*time.Second, func() error {
		l.make("base", "--name", "early")
		l.ok("rm", "-f", "early")
		return w.has("deleted early")
	})
	return w, func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	}
}
