package e2e_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// nextVersion is the version after 0.9.0, of a tree that has no tag.
const nextVersion = "0.9.1-dev+0000000"

// service is a daemon that is started as a service manager does it: as the version that is current,
// and after the program of the version before had a chance to undo an upgrade.
type service struct {
	host
	t    *testing.T
	root versions.Root
	dir  string
}

// newService installs a version, and starts it with additions to its configuration.
func newService(t *testing.T, version string, config ...string) *service {
	t.Helper()
	hosttest.Root(t)
	s := &service{t: t, dir: t.TempDir()}
	s.root = versions.Root(filepath.Join(s.dir, "root"))
	s.install(version, store.Schema)
	if err := s.root.Point(versions.Current, version); err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(s.dir, "state") // of its own: other tests cannot read a newer schema
	s.host = connect(t, daemontest.Prepare(t, daemontest.Options{
		Root: string(s.root), StateDir: state, PoolSize: "1Gi", Config: config,
	}))
	t.Cleanup(func() { // before the teardown
		if err := s.stop(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			log, _ := os.ReadFile(s.path("log"))
			t.Logf("the daemons said:\n%s", log)
		}
	})
	// PID 1 may be slow to reap what has ended.
	script := `set -eu
if [ -s pid ] && kill -TERM "$(cat pid)" 2>/dev/null; then
	while grep -qs '^State:.[^Z]' "/proc/$(cat pid)/status"; do sleep 0.01; done
fi
[ ! -x root/undo/bin/sandboxd ] || root/undo/bin/sandboxd settle --config ` + s.Config + ` 2>>log || :
root/current/bin/sandboxd serve --detach --pid-file pid --log-file log --config ` + s.Config + "\n"
	if err := os.WriteFile(s.path("restart"), []byte("cd "+s.dir+"\n"+script), 0o600); err != nil {
		t.Fatal(err)
	}
	s.restart()
	daemontest.Image(t, s.Daemon, "base")
	return s
}

func (s *service) path(name string) string { return filepath.Join(s.dir, name) }

// install puts a version into the root: the programs of make build, and a daemon that says it is of
// this version and reads state up to the schema.
func (s *service) install(version string, schema int) {
	s.t.Helper()
	dir := s.root.Dir(version)
	for _, name := range []string{"runsc", "sandboxd-runc", "agent"} {
		s.link(daemontest.Bin(name), filepath.Join(dir, "libexec/sandboxd", name))
	}
	s.link("../../rootfs", filepath.Join(dir, "share/sandboxd/rootfs"))
	if err := os.WriteFile(filepath.Join(dir, "share/sandboxd/schema"), []byte(strconv.Itoa(schema)), 0o644); err != nil {
		s.t.Fatal(err)
	}
	described := "v" + version + "-0-g0000000"
	if version == nextVersion {
		described = "v0.9.0-1-g0000000"
	}
	args := []string{
		"build", "-trimpath", "-o", s.root.Program(version, "sandboxd"),
		"-ldflags", "-s -w -X github.com/sandboxd/sandboxd/internal/release.described=" + described,
	}
	if schema != store.Schema {
		args = append(args, "-overlay", s.overlay(schema))
	}
	build := exec.Command("go", append(args, "./cmd/sandboxd")...)
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		s.t.Fatalf("build sandboxd %s: %v\n%s", version, err, out)
	}
}

// overlay makes of pkg/store one with a newer schema, which differs in nothing else.
func (s *service) overlay(schema int) string {
	s.t.Helper()
	replace := map[string]string{}
	for name, change := range map[string][2]string{
		"store.go": {fmt.Sprintf("const Schema = %d\n", store.Schema), fmt.Sprintf("const Schema = %d\n", schema)},
		"migrate.go": {
			"var migrations = []migration{\n",
			fmt.Sprintf("var migrations = []migration{\n%d: func(*bbolt.Tx) error { return nil },\n", schema-1),
		},
	} {
		path, err := filepath.Abs("../../pkg/store/" + name)
		if err != nil {
			s.t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			s.t.Fatal(err)
		}
		text := strings.Replace(string(b), change[0], change[1], 1)
		if text == string(b) {
			s.t.Fatalf("%s has no %q", path, change[0])
		}
		replace[path] = s.path("overlaid-" + name)
		if err := os.WriteFile(replace[path], []byte(text), 0o600); err != nil {
			s.t.Fatal(err)
		}
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		s.t.Fatal(err)
	}
	if err := os.WriteFile(s.path("overlay.json"), b, 0o600); err != nil {
		s.t.Fatal(err)
	}
	return s.path("overlay.json")
}

// link makes hard links of a file or of all files below a directory.
func (s *service) link(from, to string) {
	s.t.Helper()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		s.t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-al", from, to).CombinedOutput(); err != nil {
		s.t.Fatalf("%v: %s", err, out)
	}
}

// broken installs a version whose daemon ends at its start, or if the file hang is there hangs, in a
// session of its own. All else is that of another version.
func (s *service) broken(version, of string) {
	s.t.Helper()
	s.link(s.root.Dir(of), s.root.Dir(version))
	program := s.root.Program(version, "sandboxd")
	text := fmt.Sprintf(`#!/bin/sh
if [ "$1" = serve ]; then
	if [ -e hang ]; then setsid sleep infinity & echo $! >pid; wait; fi
	echo 'this version is broken' >&2
	exit 1
fi
exec %s "$@"
`, s.root.Program(of, "sandboxd"))
	if err := errors.Join(os.Remove(program), os.WriteFile(program, []byte(text), 0o755)); err != nil {
		s.t.Fatal(err)
	}
}

// deadGVisor lets runsc of a version start nothing, until mend is called.
func (s *service) deadGVisor(version string) (mend func()) {
	s.t.Helper()
	program := filepath.Join(s.root.Dir(version), "libexec/sandboxd/runsc")
	text := fmt.Sprintf(`#!/bin/sh
case " $* " in *" run "* | *" restore "*) echo 'this gVisor is dead' >&2; exit 1 ;; esac
exec %s.whole "$@"
`, program)
	if err := errors.Join(os.Rename(program, program+".whole"), os.WriteFile(program, []byte(text), 0o755)); err != nil {
		s.t.Fatal(err)
	}
	return func() {
		s.t.Helper()
		if err := os.Rename(program+".whole", program); err != nil {
			s.t.Error(err)
		}
	}
}

// keep has a program run from each version: the daemon's sweep leaves those alone, also if no link
// names them. An operator's `sandboxd upgrade` holds the root's lock meanwhile.
func (s *service) keep(all ...string) {
	s.t.Helper()
	for _, version := range all {
		program := filepath.Join(s.root.Dir(version), "libexec/sandboxd/sleep")
		if out, err := exec.Command("cp", "/bin/sleep", program).CombinedOutput(); err != nil {
			s.t.Fatalf("%v: %s", err, out)
		}
		keeper := exec.Command(program, "infinity")
		if err := keeper.Start(); err != nil {
			s.t.Fatal(err)
		}
		s.t.Cleanup(func() {
			keeper.Process.Kill() //nolint:errcheck // it runs
			keeper.Wait()         //nolint:errcheck // it was killed
		})
	}
}

// settled does something to the versions while no sweep removes any: it holds the lock, as
// `sandboxd upgrade` does.
func (s *service) settled(do func()) {
	s.t.Helper()
	lock, err := s.root.Lock()
	if err != nil {
		s.t.Fatal(err)
	}
	defer lock.Unlock()
	do()
}

// restart does what "systemctl restart" does.
func (s *service) restart() {
	s.t.Helper()
	if out, err := exec.Command("sh", s.path("restart")).CombinedOutput(); err != nil {
		s.t.Fatalf("restart: %v: %s", err, out)
	}
}

func (s *service) pid() int {
	b, _ := os.ReadFile(s.path("pid"))
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	return pid
}

func (s *service) stop() error {
	pid := s.pid()
	if pid == 0 {
		return nil
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		return nil // it has ended
	}
	return exec.Command("tail", "-s", "0.02", "--pid", strconv.Itoa(pid), "-f", "/dev/null").Run()
}

// change runs a command of the present version that changes the version, if env does not stop it.
func (s *service) change(env string, args ...string) (string, error) {
	s.t.Helper()
	args = append(args, "--root", string(s.root), "--config", s.Config, "--restart", "sh "+s.path("restart"))
	cmd := exec.Command(filepath.Join(string(s.root), "current/bin/sandboxd"), args...)
	cmd.Env = append(os.Environ(), env)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// runs fails if another version than want runs and is current, or a crash of it would be undone.
func (s *service) runs(want string) {
	s.t.Helper()
	s.armed(want, "")
}

// armed fails if another version than want runs and is current, or a crash of it leads to another one than before.
func (s *service) armed(want, before string) {
	s.t.Helper()
	v, err := s.api.Version(s.t.Context())
	if err != nil || v.Version != want {
		s.t.Fatalf("version %q runs, %v; want %s", v.Version, err, want)
	}
	current, err := s.root.Named(versions.Current)
	if err != nil || current != want {
		s.t.Errorf("current is %q, %v; want %s", current, err, want)
	}
	if j, err := s.root.Journal(); err != nil || j.UnderWay() {
		s.t.Errorf("the journal: %+v, %v", j, err)
	}
	if armed, err := s.root.Named(versions.Undo); armed != before || err != nil {
		s.t.Errorf("the link undo names %q, %v", armed, err)
	}
}

// counter is a sandbox with a command that counts until it is told to stop.
type counter struct {
	sandbox, command string
	counted          strings.Builder // what was read of it
	read             int64           // the cursor after that
}

func (s *service) counters() (all []*counter) {
	s.t.Helper()
	for _, runtime := range runtimes {
		sb := s.create(s.t, spec(runtime))
		p, err := s.api.Start(s.t.Context(), sb.ID, client.Command{Background: true, Argv: []string{
			"bash", "-c", "for ((i = 1; ; i++)); do echo $i; [ ! -e /dev/shm/stop ] || break; sleep 0.01; done; echo end",
		}})
		if err != nil {
			s.t.Fatal(err)
		}
		c := &counter{sandbox: sb.ID, command: p.ID}
		s.goesOn(c)
		all = append(all, c)
	}
	return all
}

// goesOn waits until a counter has counted on, and reads that.
func (s *service) goesOn(c *counter) {
	s.t.Helper()
	eventually(s.t, patience, func() error {
		var more strings.Builder
		next, err := s.api.Commands(c.sandbox).Logs(s.t.Context(), c.command, c.read, &more)
		if err != nil {
			return err
		}
		if next == c.read {
			return fmt.Errorf("the counter of sandbox %s stands still after %d bytes", c.sandbox, next)
		}
		c.read = next
		c.counted.WriteString(more.String())
		return nil
	})
}

// whole fails if a counter does not count any more, or has lost a line.
func (s *service) whole(c *counter) {
	s.t.Helper()
	s.goesOn(c)
	if _, err := s.exec(s.t.Context(), c.sandbox, "touch", "/dev/shm/stop"); err != nil {
		s.t.Fatal(err)
	}
	var all strings.Builder
	if err := s.api.Commands(c.sandbox).Follow(s.t.Context(), c.command, 0, client.Notices{}, &all); err != nil {
		s.t.Fatal(err)
	}
	lines := strings.Fields(all.String())
	for i, line := range lines {
		if want := strconv.Itoa(i + 1); line != want && !(i == len(lines)-1 && line == "end") {
			s.t.Fatalf("line %d is %q of %d", i+1, line, len(lines))
		}
	}
	if n := len(lines); n == 0 || lines[n-1] != "end" || !strings.HasPrefix(all.String(), c.counted.String()) {
		s.t.Errorf("lines are missing, or the end: there are %d", n)
	}
}

// TestChangeVersion tells the story of an installation: a new version, back, versions that are not good,
// and one with a new schema, while a command runs on each runtime.
func TestChangeVersion(t *testing.T) {
	s := newService(t, "0.9.0")
	s.settled(func() {
		s.install(nextVersion, store.Schema)
		s.install("0.10.0", store.Schema+1)
		s.broken("0.9.2", nextVersion)
		s.keep(nextVersion, "0.10.0", "0.9.2")
	})
	counters := s.counters()
	alive := func() {
		t.Helper()
		for _, c := range counters {
			s.answers(t, c.sandbox)
			s.goesOn(c)
		}
	}

	if out, err := s.change("", "rollback"); err == nil || !strings.Contains(out, "no version ran before") {
		t.Errorf("a rollback without a version before: %v\n%s", err, out)
	}
	if err := s.api.System().Drain(t.Context(), true); err != nil { // as operators do first
		t.Fatal(err)
	}
	out, err := s.change("", "rollback", nextVersion, "--soak", "1h")
	if err != nil {
		t.Fatalf("to the next version, on a host that drains: %v\n%s", err, out)
	}
	if _, err := s.api.Create(t.Context(), spec("runc"), true); !errs.Is(err, errs.Unavailable) {
		t.Errorf("a create after that, on a host that drains: %v", err)
	}
	if err := s.api.System().Drain(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"checking " + nextVersion, "changing from 0.9.0 to " + nextVersion, "2 sandboxes answer", "a new sandbox on runc came up",
		"a new sandbox on runsc came up: a file, a command, a name, a fork, its end", "sandboxd " + nextVersion + " runs",
		"if it crashes within 1h0m0s, 0.9.0 runs again by itself",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q:\n%s", want, out)
		}
	}
	s.armed(nextVersion, "0.9.0")
	alive()
	s.restart() // it is asked to end, which is no crash
	s.armed(nextVersion, "0.9.0")
	s.startsLate(nextVersion, "0.9.0")
	alive()
	if err := syscall.Kill(s.pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := s.stop(); err != nil { // this waits
		t.Fatal(err)
	}
	s.restart()
	s.runs("0.9.0")
	alive()
	if out, err := s.change("", "rollback", nextVersion); err != nil {
		t.Fatalf("to the next version again: %v\n%s", err, out)
	}
	s.runs(nextVersion)
	alive()
	if out, err := s.change("", "rollback"); err != nil {
		t.Fatalf("back: %v\n%s", err, out)
	}
	s.runs("0.9.0")
	alive()

	// A version that a package installed does not start: a rollback leads to the one before.
	if err := errors.Join(s.root.Point(versions.Previous, "0.9.0"), s.root.Point(versions.Current, "0.9.2"), s.stop()); err != nil {
		t.Fatal(err)
	}
	out, err = s.change("", "rollback")
	if err != nil || !strings.Contains(out, "sandboxd 0.9.2 does not serve: cannot connect") || !strings.Contains(out, "0.9.0 runs") {
		t.Errorf("back from a version that does not start: %v\n%s", err, out)
	}
	s.runs("0.9.0")
	alive()

	// A version on whose gVisor nothing starts is undone, though its daemon serves.
	mend := s.deadGVisor(nextVersion)
	out, err = s.change("", "rollback", nextVersion)
	if err == nil || !strings.Contains(out, "on runsc did not come up") || !strings.Contains(out, "0.9.0 runs again") {
		t.Errorf("to a version with a dead gVisor: %v\n%s", err, out)
	}
	mend()
	s.runs("0.9.0")
	alive()

	// A daemon that does not start is undone.
	out, err = s.change("", "rollback", "0.9.2")
	if err == nil || !strings.Contains(out, "this version is broken") || !strings.Contains(out, "0.9.0 runs again") {
		t.Errorf("to a broken version: %v\n%s", err, out)
	}
	s.runs("0.9.0")
	alive()

	// So is one that hangs.
	if err := os.WriteFile(s.path("hang"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err = s.change("", "rollback", "0.9.2", "--gate", "5s")
	if err == nil || !strings.Contains(out, "it was not found good within 5s") || !strings.Contains(out, "0.9.0 runs again") {
		t.Errorf("to a version that hangs: %v\n%s", err, out)
	}
	s.runs("0.9.0")
	alive()

	// So is one that brought the state forward, and the state with it.
	out, err = s.change(failpoint.Env+"=upgrade:done=error", "rollback", "0.10.0")
	if err == nil || !strings.Contains(out, "0.9.0 runs again") {
		t.Errorf("to a newer schema, and back: %v\n%s", err, out)
	}
	s.runs("0.9.0")
	alive()
	if _, err := os.Stat(filepath.Join(s.StateDir, "sandboxd.db.undone")); err != nil {
		t.Errorf("the state of the newer schema was not kept: %v", err)
	}

	// Whoever changes the version is killed, and then the host loses its power: here, the daemon.
	for _, point := range []string{"upgrade:current", "upgrade:gate"} {
		if out, err := s.change(failpoint.Env+"="+point+"=kill", "rollback", "0.10.0"); err == nil {
			t.Fatalf("killed at %s: it went on\n%s", point, out)
		}
		if err := s.stop(); err != nil {
			t.Fatal(err)
		}
		s.restart()
		s.runs("0.9.0")
		alive()
	}

	if out, err := s.change("", "rollback", "0.10.0"); err != nil {
		t.Fatalf("to 0.10.0: %v\n%s", err, out)
	}
	s.runs("0.10.0")
	alive()
	if out, err := s.change("", "rollback"); err == nil || !strings.Contains(out, "reads state up to schema") {
		t.Errorf("to a version that cannot read the state: %v\n%s", err, out)
	}
	s.runs("0.10.0")
	for _, c := range counters {
		s.whole(c)
	}
}
