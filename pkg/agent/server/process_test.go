package server

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/agent"
)

// ofProcess is a program that writes what it was started with to the file $1.
const ofProcess = `#!/bin/sh
[ -z "$1" ] && exit 1
{
echo ids $(id -u) $(id -g) $(grep Groups /proc/self/status)
echo home "$HOME", user "${USER-none}" "${LOGNAME-none}", of the agent "${OF_THE_AGENT-none}"
echo umask $(umask), open $(ls /proc/self/fd)
grep -E '^(SigBlk|SigIgn|CapInh|CapPrm|CapEff|CapAmb)' /proc/self/status
} >"$1.new"
mv "$1.new" "$1"
`

// asInDocker is what ofProcess writes where docker starts it as the user daemon of Debian. 3 is
// ls itself, which reads the directory.
const asInDocker = `ids 1 1 Groups: 1
home /usr/sbin, user none none, of the agent none
umask 0022, open 0 1 2 3
SigBlk:	0000000000000000
SigIgn:	0000000000000000
CapInh:	0000000000000000
CapPrm:	0000000000000000
CapEff:	0000000000000000
CapAmb:	0000000000000000
`

// newUserEnv is an agent of an image whose USER is daemon, and a program in its directory.
func newUserEnv(t *testing.T, program string, env map[string]string) *env {
	t.Helper()
	hosttest.Root(t)
	e := aheadEnvWith(t, agent.Bootstrap{User: "daemon", Env: env})
	e.passable(0o777)
	if err := os.WriteFile(e.dir+"/program", []byte(program), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, c := range e.s.code.contexts.List("") {
			e.s.code.contexts.Remove(c.ID) //nolint:errcheck // gone is what is wanted
		}
	})
	return e
}

// ways are the ways to run ./program of the guest with one argument.
func (e *env) ways() map[string]func(arg string) {
	run := func(arg string, req agent.CommandRequest) {
		req.Command = "./program " + arg + req.Command
		e.events(req)
	}
	in := func(language, code string) func(string) {
		return func(arg string) { e.cell(agent.CodeContext{Language: language}, strings.ReplaceAll(code, "ARG", arg)) }
	}
	terminal := func(query string) func(string) {
		return func(arg string) {
			c := e.join(e.terminal(agent.PtyRequest{Argv: []string{"./program", arg}}), query)
			c.until(func() bool { return c.exit.Type != "" })
		}
	}
	return map[string]func(arg string){
		"entrypoint": func(arg string) {
			st := start{guest: e.s.guest(), argv: []string{"./program", arg}}
			if code, err := e.s.startEntrypoint(&st); err != nil {
				e.Error(code, err)
				return
			}
			<-e.s.entrypoint.Load().Done()
		},
		"program":    func(arg string) { e.events(agent.CommandRequest{Argv: []string{"./program", arg}}) },
		"words":      func(arg string) { run(arg, agent.CommandRequest{}) },
		"shell":      func(arg string) { e.cold(agent.CommandRequest{Command: "./program " + arg + "; :"}) },
		"input":      func(arg string) { run(arg, agent.CommandRequest{Stdin: true}) },
		"background": func(arg string) { run(arg, agent.CommandRequest{Background: true}) },
		"ahead": func(arg string) {
			if _, took := e.warm(agent.CommandRequest{Command: "./program " + arg + "; :"}); !took {
				e.Error("another shell took it")
			}
		},
		"session":  func(arg string) { e.in(e.session(nil), "./program "+arg) },
		"terminal": terminal(""),
		"pipes":    terminal("pty=0"),
		"bash":     in("bash", "./program ARG"),
		"python":   in("python", "import subprocess; subprocess.run(['./program', 'ARG'])"),
	}
}

// written waits for a file, and returns what is in it.
func written(t *testing.T, path string) string {
	t.Helper()
	for late := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) { // files are polled
		b, err := os.ReadFile(path)
		if err == nil {
			return string(b)
		}
		if time.Now().After(late) {
			t.Error(err)
			return ""
		}
	}
}

// TestProcessIsAsInDocker: nothing of the agent's own state is in what it starts, by whatever way.
func TestProcessIsAsInDocker(t *testing.T) {
	t.Setenv("OF_THE_AGENT", "yes")
	t.Setenv("HOME", "/root")
	e := newUserEnv(t, ofProcess, nil)
	ways := e.ways()
	for _, way := range slices.Sorted(maps.Keys(ways)) {
		t.Run(way, func(t *testing.T) {
			file := filepath.Join(e.dir, "of-"+way)
			ways[way](file)
			// make(1) starts this test by posix_spawn(3), and so ignores a signal of glibc's own (SIGCANCEL, 32).
			got := strings.Replace(written(t, file), "SigIgn:\t0000000080000000", "SigIgn:\t0000000000000000", 1)
			if got != asInDocker {
				t.Errorf("%s\nin docker\n%s", got, asInDocker)
			}
		})
	}
}

// TestHome: HOME is that of the image or the sandbox if they set it, also for another user, or
// else the user's.
func TestHome(t *testing.T) {
	root := int64(0)
	nobody := int64(61234) // whom /etc/passwd does not know
	for set, want := range map[string][3]string{
		"":         {"/usr/sbin", "/root", "/"},
		"HOME=":    {"/usr/sbin", "/root", "/"},
		"HOME=/ap": {"/ap", "/ap", "/ap"},
	} {
		env := map[string]string{}
		if k, v, ok := strings.Cut(set, "="); ok {
			env[k] = v
		}
		e := newUserEnv(t, "", env)
		for i, uid := range []*int64{nil, &root, &nobody} {
			want := `stdout "` + want[i] + "\"\ncomplete"
			if got := e.events(agent.CommandRequest{Command: "echo $HOME", UID: uid}); got != want {
				t.Errorf("%q, user %d of 3: %s, want %s", set, i+1, got, want)
			}
		}
		req := agent.CommandRequest{Command: "echo $HOME; pwd", Cwd: "~", Envs: map[string]string{"HOME": "/usr"}}
		if got := e.events(req); got != "stdout \"/usr\"\nstdout \"/usr\"\ncomplete" {
			t.Errorf("%q, the request's: %s", set, got)
		}
	}
}

// reopens is a program that opens its standard streams by their names, and writes to the file $1
// which it could open.
const reopens = `#!/bin/sh
exec 3>"$1.new"
for f in /dev/stdin /proc/self/fd/0; do true <$f && echo $f >&3; done
for f in /dev/stdout /dev/stderr /proc/self/fd/1 /proc/self/fd/2; do echo $f >$f && echo $f >&3; done
mv "$1.new" "$1"
`

// TestStreamsCanBeOpened: images link /dev/stdout to a log, and their USER is not root.
func TestStreamsCanBeOpened(t *testing.T) {
	e := newUserEnv(t, reopens, nil)
	const all = "/dev/stdin\n/proc/self/fd/0\n/dev/stdout\n/dev/stderr\n/proc/self/fd/1\n/proc/self/fd/2\n"
	ways := e.ways()
	for _, way := range slices.Sorted(maps.Keys(ways)) {
		t.Run(way, func(t *testing.T) {
			file := filepath.Join(e.dir, "of-"+way)
			ways[way](file)
			if got := written(t, file); got != all {
				t.Errorf("it could open only\n%s", got)
			}
		})
	}
	root := int64(0)
	req := agent.CommandRequest{Command: "echo by name >/dev/stdout", UID: &root}
	if got := e.events(req); got != "stdout \"by name\"\ncomplete" {
		t.Errorf("root: %s", got)
	}
	if fi, err := os.Stat(os.DevNull); err != nil || fi.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Errorf("the null device was given away: %v", err)
	}
}
