package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/shell"
)

func aheadEnv(t *testing.T) *env { return aheadEnvWith(t, agent.Bootstrap{}) }

func aheadEnvWith(t *testing.T, b agent.Bootstrap) *env {
	t.Helper()
	b.ShellAhead = true
	b.Limits.MemoryBytes = 1 << 50 // the memory of the host, all of which the agent sees here, is never short
	e := newEnvWith(t, b)
	e.s.ahead.Answer = time.Minute // a shell of a busy host is not stuck: TestAheadThatDied tells of one that is
	t.Cleanup(e.s.ahead.Close)
	return e
}

// waits makes a shell wait, ready, and returns it.
func (e *env) waits() *shell.Waiting {
	e.Helper()
	e.s.ahead.Refill()
	w := e.s.ahead.Waiting()
	if w == nil {
		e.Fatal("no shell waits")
	}
	if !e.s.ahead.AwaitReady(10 * time.Second) {
		e.Fatal("the shell is not ready")
	}
	return w
}

// warm runs a command while a shell waits, and says whether that took it.
func (e *env) warm(req agent.CommandRequest) (events string, took bool) {
	e.Helper()
	w := e.waits()
	events = e.events(req)
	return events, e.s.commands.Get(w.Command.ID) == w.Command
}

// cold runs a command by a shell of its own.
func (e *env) cold(req agent.CommandRequest) string {
	e.Helper()
	e.s.ahead.On.Store(false)
	defer func() { e.s.ahead.On.Store(true) }()
	return e.events(req)
}

// seen is a program that says all it can see of where it is.
const seen = `#!/bin/bash
read -r pid comm state ppid pgrp sid rest </proc/self/stat
echo "$0 leader $([ $$ = "$sid" ] && echo yes || echo no), args $*"
grep -E '^(Sig(Blk|Ign|Cgt)|Uid|Gid|Groups)' /proc/self/status
ls /proc/self/fd | tr '\n' ' '
readlink /proc/self/fd/0; readlink /proc/self/cwd
umask; ulimit -a | grep -v 'max memory size' # its marker
env | sort
`

func (e *env) programs() {
	e.Helper()
	bin := e.TempDir()
	for name, text := range map[string]string{
		"seen": seen, "noshebang": "echo script $0\n", "fails": "#!/bin/sh\nkill -9 $$\n",
		"lost": "#!/nope/x\n", "garbage": "\177ELF\x00\x00garbage",
	} {
		for _, dir := range []string{e.dir, bin} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
				e.Fatal(err)
			}
		}
	}
	e.s.guest().env["PATH"] = bin + ":/usr/bin:/bin"
	if err := os.Mkdir(filepath.Join(e.dir, "sub dir"), 0o755); err != nil {
		e.Fatal(err)
	}
	if err := os.Symlink("sub dir", filepath.Join(e.dir, "link")); err != nil {
		e.Fatal(err)
	}
}

var ofKilled = regexp.MustCompile(`line (\d+): +\d+ `)

// apart sorts events by stream, which come by ways of their own; pids go.
func apart(events string) string {
	lines := strings.Split(ofKilled.ReplaceAllString(events, "line $1: pid "), "\n")
	slices.SortStableFunc(lines, func(a, b string) int { return strings.Compare(a[:6], b[:6]) })
	return strings.Join(lines, "\n")
}

func sorted(events string) string {
	return strings.Join(slices.Sorted(strings.SplitSeq(events, "\n")), "\n")
}

// commandsOfShells are read from pkg/agent/shell, whose tests look at the same.
func commandsOfShells(t *testing.T) (taken, avoided []string) {
	t.Helper()
	b, err := os.ReadFile("../shell/testdata/commands.json")
	if err != nil {
		t.Fatal(err)
	}
	var all struct {
		// The shell ahead runs these.
		Taken []string
		// It leaves these to a shell of their own: they would notice, cannot be seen through, or
		// are about a message of bash's own.
		Avoided []string
		// It leaves these as well. Only the parser takes them: bash says where the error is.
		Misread []string
	}
	if err := json.Unmarshal(b, &all); err != nil || len(all.Taken) == 0 || len(all.Avoided) == 0 || len(all.Misread) == 0 {
		t.Fatalf("%d, %d and %d commands, %v", len(all.Taken), len(all.Avoided), len(all.Misread), err)
	}
	return all.Taken, append(all.Avoided, all.Misread...)
}

// TestAheadIsLikeTheShell runs a table of commands both ways. Output, end and
// what a program sees of itself must be the same, whichever way it went; and
// the shell ahead must be what ran those that are for it.
func TestAheadIsLikeTheShell(t *testing.T) {
	e := aheadEnv(t)
	e.programs()
	check := func(req agent.CommandRequest, ahead bool) {
		t.Helper()
		cold := e.cold(req)
		warm, took := e.warm(req)
		if apart(warm) != apart(cold) {
			t.Errorf("%q, by the shell ahead: %v:\n%s\nwant\n%s", req.Command, took, warm, cold)
		}
		if took != ahead {
			t.Errorf("%q: the shell ahead took it: %v", req.Command, took)
		}
	}
	taken, avoided := commandsOfShells(t)
	for _, c := range taken {
		check(agent.CommandRequest{Command: c}, true)
	}
	for _, c := range avoided {
		check(agent.CommandRequest{Command: c}, false)
	}
	uid := int64(os.Getuid())
	for _, v := range []struct {
		req   agent.CommandRequest
		ahead bool
	}{
		{agent.CommandRequest{Cwd: "sub dir"}, true},
		{agent.CommandRequest{Cwd: "link"}, true},
		{agent.CommandRequest{Cwd: "/"}, true},
		{agent.CommandRequest{Envs: map[string]string{"A": "it's $HOME \"x\"\n\\", "B2": "", "HOME": "/usr", "\u00e4": "x"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"A": "it's $HOME \"x\"\n\\ \u20ac", "B2": "", "HOME": "/usr"}, Cwd: "~"}, true},
		{agent.CommandRequest{Timeout: 60_000}, true},
		{agent.CommandRequest{Envs: map[string]string{"LC_ALL": "C.UTF-8"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"BASH_ENV": "/nope"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"BASH_FUNC_ls%%": "() { echo mine; }"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"IFS": ","}}, false},
		{agent.CommandRequest{Envs: map[string]string{"a.b": "c"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"SHLVL": "7"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"PS1": "7"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"PS2": "7"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"COMP_WORDBREAKS": "7"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"LD_PRELOAD": "/nope.so"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"POSIX_PEDANTIC": "1"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"SSH_CLIENT": "1", "HOME": "/usr"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"A": "\x01"}}, false},
		{agent.CommandRequest{Envs: map[string]string{"A": strings.Repeat("x", 100_000)}}, false},
		{agent.CommandRequest{Envs: map[string]string{"PATH": "/bin"}}, false}, // another bash, by name
		{agent.CommandRequest{UID: &uid}, false},
	} {
		v.req.Command = "seen 'x' $A"
		check(v.req, v.ahead)
		v.req.Command = "echo $PWD $OLDPWD $A; cd ..; pwd; declare -i x=1; nosuchprog-x; echo $?"
		check(v.req, v.ahead)
	}
	proc.KillDescendants(time.Second)
}

// TestAheadReadsAll: a text arrives as it is, however long and in any locale.
func TestAheadReadsAll(t *testing.T) {
	text := "cat <<'END'\n" + strings.Repeat("a\u00e4\u20ac\U0001F600 \\ $x #y \"'\t\n", 400) + "END"
	for _, locale := range []string{"C", "C.UTF-8"} {
		e := aheadEnvWith(t, agent.Bootstrap{Env: map[string]string{"LC_ALL": locale}})
		cold := e.cold(agent.CommandRequest{Command: text})
		if warm, took := e.warm(agent.CommandRequest{Command: text}); warm != cold || !took || strings.Count(warm, "\n") != 400 {
			t.Errorf("%s, by the shell ahead: %v, %d lines and not %d", locale, took, strings.Count(warm, "\n"), strings.Count(cold, "\n"))
		}
	}
}

// TestAheadInBackground: both streams are one there, in the order they were
// written in, and the status is that of the process.
func TestAheadInBackground(t *testing.T) {
	e := aheadEnv(t)
	for command, want := range map[string]string{
		"echo a; echo b >&2; echo c": "a\nb\nc\n 0 exited ", "sh -c 'echo a; kill -9 $$'": "a\n -1 killed signal: killed",
		"exit 7": " 7 exited exit status 7",
	} {
		w := e.waits()
		id := e.id(e.call(200, "POST", "/command", agent.CommandRequest{Command: command, Background: true}))
		st := e.await(id)
		logs := e.call(200, "GET", "/command/"+id+"/logs", nil)
		if got := fmt.Sprint(logs, " ", *st.ExitCode, " ", st.Reason, " ", st.Error); got != want || st.Content != command {
			t.Errorf("%q: %q, want %q; %+v", command, got, want, st)
		}
		if id != w.Command.ID {
			t.Errorf("%q was not run by the shell ahead", command)
		}
	}
}

// TestAheadServesOnce: nothing of a command is there for the next.
func TestAheadServesOnce(t *testing.T) {
	e := aheadEnv(t)
	pids := map[string]bool{}
	for range 5 {
		got, took := e.warm(agent.CommandRequest{Command: "echo $$ ${left-none} $PWD $(umask); left=here; export left; cd /; umask 0; " +
			"f() { :; }", Envs: map[string]string{"ONCE": "1"}})
		pid, rest, _ := strings.Cut(strings.TrimPrefix(got, `stdout "`), " ")
		if pids[pid] || !strings.HasPrefix(rest, "none "+e.dir+" 0022") || !took {
			t.Errorf("%v %s", took, got)
		}
		pids[pid] = true
	}
}

// TestAheadWaitsForNobody: there is none before the first command, none for
// what it could not run, and none where it is switched off.
func TestAheadWaitsForNobody(t *testing.T) {
	off := newEnv(t)
	off.events(agent.CommandRequest{Command: "echo $HOME"})
	on := aheadEnv(t)
	if on.s.ahead.Waiting() != nil {
		t.Error("a shell waits before the first command")
	}
	for _, req := range []agent.CommandRequest{
		{Command: "ls"},
		{Command: "trap"},
		{Argv: []string{"true"}},
		{Command: "true", Forget: true},
		{Command: "cat", Stdin: true, Timeout: 1},
	} {
		on.events(req)
	}
	if off.s.ahead.Waiting() != nil || on.s.ahead.Waiting() != nil {
		t.Error("a shell waits for what does not come")
	}
	c := on.s.commands.Get(on.id(on.call(200, "POST", "/command", agent.CommandRequest{Command: "sleep 60; true", Background: true})))
	on.s.ahead.RefillAfter(c)
	if on.s.ahead.Waiting() == nil {
		t.Error("none waits while a long command runs")
	}
	proc.KillDescendants(time.Second)
}

// TestAheadRests: the next shell does not start while a command's answer is on its way.
func TestAheadRests(t *testing.T) {
	e := aheadEnv(t)
	e.s.ahead.Rest, e.s.ahead.Delay = 50*time.Millisecond, time.Hour // it waits for this command, however slow that is
	c := e.s.commands.Get(e.id(e.call(200, "POST", "/command", agent.CommandRequest{Command: "true; true", Background: true})))
	e.s.ahead.RefillAfter(c)
	w := e.s.ahead.Waiting()
	if w == nil {
		t.Fatal("no shell waits")
	}
	if rested := w.Command.Started.Sub(c.End().At); rested < e.s.ahead.Rest {
		t.Errorf("it started %v after the command", rested)
	}
}

// gone waits for the end of a waiting shell.
func (e *env) gone(w *shell.Waiting) {
	e.Helper()
	select {
	case <-w.Command.Process.Done():
	case <-time.After(10 * time.Second):
		e.Error("the shell goes on")
	}
}

// TestAheadIsDropped: it goes when it is not used, when memory is short, and
// when what it began with is no more.
func TestAheadIsDropped(t *testing.T) {
	e := aheadEnv(t)
	e.s.ahead.Idle = 10 * time.Millisecond
	var w *shell.Waiting
	for w == nil { // on a busy host it may go before it is seen
		e.s.ahead.Refill()
		w = e.s.ahead.Waiting()
	}
	e.gone(w)
	if e.s.ahead.Waiting() != nil {
		t.Error("a shell that is gone still counts as waiting")
	}
	e.s.ahead.Idle = time.Minute

	w = e.waits()
	file := filepath.Join(e.dir, "envs")
	e.s.guest().env["EXECD_ENVS"] = file
	e.waits()
	e.gone(w) // the environment is another
	if err := os.WriteFile(file, []byte("FROM=file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	// What the file says is said to the one that waits, and the next begins with it.
	for range 2 {
		if got, took := e.warm(agent.CommandRequest{Command: "echo $FROM; env | grep -c FROM"}); got != "stdout \"file\"\nstdout "+
			"\"1\"\ncomplete" || !took {
			t.Errorf("%v %s", took, got)
		}
	}
	w = e.waits()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if got := e.events(agent.CommandRequest{Command: "echo ${FROM-none}"}); got != "stdout \"none\"\ncomplete" {
		t.Error(got)
	}
	e.waits()
	e.gone(w)

	w = e.waits()
	if err := os.Rename(e.dir, e.dir+".old"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(e.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if got := e.events(agent.CommandRequest{Command: "touch x; echo *"}); got != "stdout \"x\"\ncomplete" {
		t.Errorf("in the directory that was renamed: %s", got)
	}
	e.waits()
	e.gone(w)

	w = e.waits()
	e.s.limits.Store(&agent.Limits{MemoryBytes: 1 << 10})
	e.s.ahead.Look()
	e.gone(w)
	e.s.ahead.Refill()
	if e.s.ahead.Waiting() != nil {
		t.Error("a shell waits though memory is short")
	}
}

// TestAheadThatDied: who kills, stops or soils the shell that waits gets a
// shell of their own, and their command runs once.
func TestAheadThatDied(t *testing.T) {
	e := aheadEnv(t)
	e.s.ahead.Answer = 50 * time.Millisecond
	for name, harm := range map[string]func(w *shell.Waiting){
		"killed": func(w *shell.Waiting) {
			syscall.Kill(w.Command.Process.PID, syscall.SIGKILL)
			<-w.Command.Process.Done()
		},
		"dying":   func(w *shell.Waiting) { syscall.Kill(w.Command.Process.PID, syscall.SIGKILL) },
		"stopped": func(w *shell.Waiting) { syscall.Kill(w.Command.Process.PID, syscall.SIGSTOP) },
		"soiled": func(w *shell.Waiting) {
			f, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/2", w.Command.Process.PID), os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := f.WriteString("soiled"); err != nil {
				t.Fatal(err)
			}
		},
	} {
		w := e.waits()
		harm(w)
		if got := e.events(agent.CommandRequest{Command: "echo $((1+1)) | tee -a " + name}); got != "stdout \"2\"\ncomplete" {
			t.Errorf("%s: %s", name, got)
		}
		if e.s.commands.Get(w.Command.ID) != nil {
			t.Errorf("%s: it was run by that shell", name)
		}
		if b, err := os.ReadFile(filepath.Join(e.dir, name)); string(b) != "2\n" || err != nil {
			t.Errorf("%s: it has run %d times, %v", name, bytes.Count(b, []byte("2")), err)
		}
		e.s.ahead.Refill()
		e.waits()
	}
}

// TestAheadThatWarns: where each shell would begin its command's output with a
// warning of its start, there is none after a while.
func TestAheadThatWarns(t *testing.T) {
	e := aheadEnv(t)
	e.s.guest().env["LC_ALL"] = "xx_XX.UTF-8"
	for deadline := time.Now().Add(20 * time.Second); !e.s.ahead.Never(); time.Sleep(time.Millisecond) { // until bash has written
		if e.s.ahead.Refill(); time.Now().After(deadline) {
			t.Fatal("they are made for ever")
		}
	}
	if e.s.ahead.Waiting() != nil {
		t.Error("one waits")
	}
	if got := e.events(agent.CommandRequest{Command: "echo $((1+1))"}); !strings.Contains(got, "stdout \"2\"") ||
		!strings.HasSuffix(got, "complete") {
		t.Error(got)
	}
}

// TestAheadDiesAfterItsStart: a command that has started is not run again.
func TestAheadDiesAfterItsStart(t *testing.T) {
	e := aheadEnv(t)
	for range 20 {
		w := e.waits()
		got := e.events(agent.CommandRequest{Command: "echo x >> runs; kill -9 $$"})
		if got != "error CommandExecError -1 signal: killed" || e.s.commands.Get(w.Command.ID) == nil {
			t.Fatal(got)
		}
	}
	if b, _ := os.ReadFile(e.dir + "/runs"); len(b) != 40 {
		t.Errorf("%d runs of 20", len(b)/2)
	}
}

// TestAheadOfOthers: what is no bash of 5.1 or later is never made to wait.
func TestAheadOfOthers(t *testing.T) {
	bin := t.TempDir()
	e := aheadEnvWith(t, agent.Bootstrap{Env: map[string]string{"PATH": bin + ":/usr/bin:/bin"}})
	if err := os.WriteFile(bin+"/bash", []byte("#!/bin/sh\n[ \"$2\" = 'echo $0' ] && exec /bin/bash \"$@\"\nexit "+strconv.Itoa(75)+"\n"),
		0o755); err != nil {
		t.Fatal(err)
	}
	e.s.ahead.Refill()
	w := e.s.ahead.Waiting()
	if w == nil {
		t.Fatal("no shell was started")
	}
	e.gone(w)
	for range 2 {
		if got := e.events(agent.CommandRequest{Command: "echo $0"}); got != "stdout \"/bin/bash\"\ncomplete" {
			t.Error(got)
		}
		e.s.ahead.Refill()
	}
	if !e.s.ahead.Never() || e.s.ahead.Waiting() != nil {
		t.Error("it is tried again")
	}
	sh := aheadEnvWith(t, agent.Bootstrap{Env: map[string]string{"PATH": "/nope"}})
	sh.s.guest().env["BASH_ENV"] = "/nope"
	sh.s.ahead.Refill()
	if sh.s.ahead.Waiting() != nil {
		t.Error("a shell waits whose start would have effects")
	}
}

// TestAheadDifferences are all that is known: the list in docs/commands.md.
func TestAheadDifferences(t *testing.T) {
	e := aheadEnv(t)
	e.programs()
	see := func(command string) (cmdline string, started uint64) {
		id := e.id(e.call(200, "POST", "/command", agent.CommandRequest{Command: command, Background: true}))
		c := e.s.commands.Get(id)
		for line := ""; !strings.Contains(line, "go"); {
			grown := c.Output.Grown()
			if line = string(c.Output.Tail(100)); line == "" {
				<-grown
			}
		}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", c.Process.PID))
		if err != nil {
			t.Fatal(err)
		}
		fi, err := os.Stat(fmt.Sprintf("/proc/%d", c.Process.PID))
		if err != nil {
			t.Fatal(err)
		}
		e.call(200, "POST", "/command/"+id+"/signal?signal=KILL", nil)
		return string(b), uint64(fi.ModTime().UnixNano())
	}
	const command = "echo go; sleep 60; echo no"
	e.s.ahead.On.Store(false)
	if got, _ := see(command); got != "bash\x00-c\x00"+command+"\x00" {
		t.Errorf("cold: %q", got)
	}
	e.s.ahead.On.Store(true)
	// 1. The command line of the shell is not the command's, and it is older.
	w := e.waits()
	before := time.Now()
	if got, _ := see(command); got != "bash\x00-c\x00"+shell.Loader+"\x00" {
		t.Errorf("ahead: %q", got)
	}
	if w.Used.After(before) {
		t.Error("it is not older than its command")
	}
	// 2. Of a program that is there but cannot be executed one more line is said.
	cold := e.cold(agent.CommandRequest{Command: "garbage 'x'"})
	warm, took := e.warm(agent.CommandRequest{Command: "garbage 'x'"})
	coldSays, coldEnd, _ := strings.Cut(cold, "error Command")
	warmSays, warmEnd, _ := strings.Cut(warm, "error Command")
	if !took || coldEnd != warmEnd || !strings.Contains(coldSays, "Exec format error") || !strings.HasPrefix(warmSays, coldSays) ||
		warmSays == coldSays {
		t.Errorf("%v\n%s\nwant, but for a line,\n%s", took, warm, cold)
	}
	// If the command itself takes the program away, exec is named.
	bin, _, _ := strings.Cut(e.s.guest().env["PATH"], ":")
	says := func(run func(c agent.CommandRequest) string) string {
		if err := os.WriteFile(bin+"/removed", []byte("#!/bin/sh\n"), 0o755); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
		return run(agent.CommandRequest{Command: "rm " + bin + "/removed; removed 'x'"})
	}
	cold = says(e.cold)
	warm = says(func(c agent.CommandRequest) string { got, _ := e.warm(c); return got })
	if strings.Replace(cold, "removed: command not found", "exec: removed: not found", 1) != warm || cold == warm {
		t.Errorf("%s\nwant, but for exec,\n%s", warm, cold)
	}
	// 3. The environment of the program that bash is replaced by has another order.
	cold = e.cold(agent.CommandRequest{Command: "true; env"})
	warm, took = e.warm(agent.CommandRequest{Command: "true; env"})
	if !took || cold == warm || sorted(cold) != sorted(warm) {
		t.Errorf("%v\n%s\nwant, in another order,\n%s", took, warm, cold)
	}
	proc.KillDescendants(time.Second)
}

// TestAheadUnderLoad runs commands in random order, some at once, some one after
// the other: each gets its own output and its own end, whoever runs it.
func TestAheadUnderLoad(t *testing.T) {
	e := aheadEnv(t)
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(worker), 5))
			for i := range 75 {
				word := fmt.Sprintf("w%d-%d", worker, i)
				code := r.IntN(3)
				var command, want string
				switch r.IntN(5) {
				case 0:
					command, want = fmt.Sprintf("echo %s; (exit %d)", word, code), "stdout \""+word+"\""
				case 1:
					command, want = fmt.Sprintf("echo $W | cat; sh -c 'exit %d'", code), "stdout \""+word+"\""
				case 2:
					command, want = fmt.Sprintf("echo %s >&2; exit %d", word, code), "stderr \""+word+"\""
				case 3:
					command, want = fmt.Sprintf("for i in a b; do echo $i-$W; done\nexit %d", code),
						"stdout \"a-"+word+"\"\nstdout \"b-"+word+"\""
				case 4:
					command, want = fmt.Sprintf("trap 'exit %d' EXIT; echo $W", code), "stdout \""+word+"\""
				}
				want += map[int]string{
					0: "\ncomplete", 1: "\nerror CommandExecError 1 exit status 1",
					2: "\nerror CommandExecError 2 exit status 2",
				}[code]
				if got := e.events(agent.CommandRequest{Command: command, Envs: map[string]string{"W": word}}); got != want {
					t.Errorf("%s:\n%s\nwant\n%s", command, got, want)
				}
			}
		})
	}
	wg.Wait()
}

// TestAheadEndsLikeOthers: time limit, interrupt and signals reach all it started.
func TestAheadEndsLikeOthers(t *testing.T) {
	e := aheadEnv(t)
	mark := fmt.Sprintf("76.%09d", time.Now().UnixNano()%1e9)
	soonGone(t, mark, func() {
		var w *shell.Waiting
		got, limit := inTime(func(limit int64) string {
			w = e.waits()
			return e.events(agent.CommandRequest{Command: strings.ReplaceAll("sleep MARK & setsid sleep MARK & (setsid env -i sh -c "+
				"'sleep MARK & sleep MARK' &); echo started; sleep MARK; true", "MARK", mark), Timeout: limit})
		})
		if got != `stdout "started"`+timedOut(limit) || e.s.commands.Get(w.Command.ID) == nil {
			t.Error(got)
		}
	})
	// A program that ends well when it is interrupted is the process, not a child of it.
	e.waits()
	id, br := e.open(t.Context(), agent.CommandRequest{Command: "true; python3 -c 'import signal,sys; " +
		"signal.pthread_sigmask(signal.SIG_BLOCK, [15]); print(\"set\", flush=True); signal.sigwait([15]); sys.exit(3)'"}, false)
	for line := ""; !strings.Contains(line, "set"); {
		var err error
		if line, err = br.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	e.call(200, "DELETE", "/command?id="+id, nil)
	if st := e.await(id); *st.ExitCode != 3 {
		t.Errorf("%+v", st)
	}
}

// TestAheadOfAnotherUser needs root to become somebody else; hosts run CI as root.
func TestAheadOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can become another user")
	}
	e := aheadEnvWith(t, agent.Bootstrap{User: "65534:65533", Workdir: "/"})
	e.programs()
	e.s.guest().env["PATH"] = "/usr/bin:/bin"
	closed := t.TempDir()
	if err := os.Chmod(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, v := range []struct {
		req  agent.CommandRequest
		want string
		took bool
	}{
		{agent.CommandRequest{Command: "id -u; id -g; id -G; (umask)"}, "stdout \"65534\"\nstdout \"65533\"\nstdout \"65533\"\nstdout " +
			"\"0022\"\ncomplete", true},
		{agent.CommandRequest{Command: "pwd; true", Cwd: "/usr"}, "stdout \"/usr\"\ncomplete", true},
		{agent.CommandRequest{Command: "pwd; true", Cwd: closed}, "may not enter the working directory", false},
	} {
		cold := e.cold(v.req)
		warm, took := e.warm(v.req)
		if warm != cold || !strings.Contains(warm, v.want) || took != v.took {
			t.Errorf("%q, by the shell ahead: %v:\n%s\nwant\n%s", v.req.Command, took, warm, cold)
		}
	}
}
