package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
	"github.com/sandboxd/sandboxd/pkg/agent/shell"
)

// session makes one and returns its id.
func (e *env) session(body any) string {
	e.Helper()
	var c agent.SessionCreated
	if err := json.Unmarshal([]byte(e.call(http.StatusOK, "POST", "/session", body)), &c); err != nil || len(c.SessionID) != 32 {
		e.Fatalf("%+v, %v", c, err)
	}
	e.Cleanup(func() {
		e.s.sessions.Remove(c.SessionID)
	})
	return c.SessionID
}

// in runs a command in a session and returns its events as plain does, texts
// of one stream joined.
func (e *env) in(id, command string) string {
	e.Helper()
	return e.inFor(id, agent.SessionRun{Command: command})
}

func (e *env) inFor(id string, run agent.SessionRun) string {
	e.Helper()
	out := e.call(http.StatusOK, "POST", "/session/"+id+"/run", run)
	if got := e.id(out); got != id {
		e.Errorf("the stream is of %s, not of the session", got)
	}
	return scriptLine.ReplaceAllString(e.plain(out), "line N")
}

// Bash counts the lines of its script, which is that of the session.
var scriptLine = regexp.MustCompile(`line \d+`)

// a step of a session: a command and what its stream says.
type step struct{ command, want string }

func (e *env) steps(id string, steps []step) {
	e.Helper()
	for _, s := range steps {
		if got := e.in(id, s.command); got != s.want {
			e.Errorf("%s:\n%s\nwant\n%s", s.command, got, s.want)
		}
	}
}

func says(lines ...string) string {
	var out []string
	for _, l := range lines {
		b, _ := json.Marshal(l)
		out = append(out, "stdout "+string(b))
	}
	return strings.Join(append(out, "complete"), "\n")
}

func exits(code int) string {
	return fmt.Sprintf("error CommandExecError %d exit status %d", code, code)
}

func TestSessionKeepsWhatBashKeeps(t *testing.T) {
	e := newEnv(t)
	id := e.session(nil)
	e.steps(id, []step{
		{"pwd", says(e.dir)},
		{"export A=1; b='two words'; declare -a c=(x 'y z'); f() { echo f$1; }; alias g='echo g'; cd /usr; shopt -s nullglob; set -o " +
			"pipefail; umask 027; set -- p q", "complete"},
		{
			`echo "$A $b ${c[1]}"; f 1; g; pwd; echo /nope*; umask; echo $2; sh -c 'echo $A'`,
			says("1 two words y z", "f1", "g", "/usr", "\n", "0027", "q", "1"),
		},
		{"false | true", exits(1)},
		{"exec 7>" + e.dir + "/seven", "complete"},
		{"echo there >&7; cat " + e.dir + "/seven", says("there")},
		{"echo err >&2; true", "stderr \"err\"\ncomplete"},
		{"cat; read x; echo $?", says("1")}, // standard input is /dev/null
		{"exec </etc/passwd", "complete"},
		{"read -r x; echo \"[$x]\"", says("[]")}, // of each run anew
	})
}

// TestSessionKeepsJobs: a job that one run begins, another one knows and waits for. It ends between two runs:
// the shell itself may lose a process that ends while it is asked to wait (bash 5.2: "wait_for: No record of process").
func TestSessionKeepsJobs(t *testing.T) {
	e := newEnv(t)
	id := e.session(nil)
	file := filepath.Join(e.dir, "pid")
	e.steps(id, []step{
		{"sleep 300 & echo $! >" + file, "complete"},
		{"jobs -p >" + file + "s; [[ $! = $(<" + file + ") && $! = $(<" + file + "s) ]]", "complete"},
	})
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	eventuallyTrue(t, func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }) // the shell has reaped it
	e.steps(id, []step{{"wait $!", exits(143)}, {"jobs", "complete"}})
}

// TestSessionSurvives gives a session what ends a shell, or might.
func TestSessionSurvives(t *testing.T) {
	for _, c := range []struct{ name, command, want string }{
		{"exit", "exit 7", exits(7)},
		{"exit in a function", "f() { exit 9; }; f; echo no", exits(9)},
		{"errexit", "set -e; false; echo no", exits(1)},
		{"nounset", "set -u; : $nope; echo no", "stderr \"bash: line N: nope: unbound variable\"\n" + exits(1)},
		{"killed", "kill -9 $$", "error CommandExecError -1 signal: killed"},
		{"terminated", "kill $$", "error CommandExecError -1 signal: terminated"},
		{"exec", "exec sh -c 'echo other; exit 3'", "stdout \"other\"\n" + exits(3)},
		{"exec fails", "exec /nope/x; echo no", "stderr \"bash: line N: /nope/x: No such file or directory\"\n" + exits(127)},
		{"syntax", "if", "stderr \"bash: eval: line N: syntax error: unexpected end of file\"\n" + exits(2)},
		{"open quote", "echo 'abc", "stderr \"bash: eval: line N: unexpected EOF while looking for matching `''\"\n" + exits(2)},
		{"open here-document", "cat <<X\nabc", "stderr \"bash: line N: warning: here-document at line N delimited by end-of-file " +
			"(wanted `X')\"\nstdout \"abc\"\ncomplete"},
		{"braces", "}; echo no", "stderr \"bash: eval: line N: syntax error near unexpected token `}'\"\nstderr \"bash: eval: line N: " +
			"`}; echo no'\"\n" + exits(2)},
		{"outputs closed", "exec >&- 2>&-; echo x", exits(1)},
		{"break and return", "break 2>/dev/null; return 3 2>/dev/null; echo still", says("still")},
		{"an EXIT trap of its own", "trap 'echo bye' EXIT; exit 4", "stdout \"bye\"\n" + exits(4)},
		{"a RETURN and an ERR trap", "trap 'echo r' RETURN; trap 'echo e' ERR; trap - ERR RETURN", "complete"},
		{"its aliases", "alias eval=false printf=false builtin=false '{'=false; echo on", says("on")},
		{"its functions", "eval() { echo mine; }; printf() { echo mine; }; set() { echo mine; }; trap() { echo mine; }; declare() { " +
			"echo mine; }; echo on", says("on")},
		{"a job that holds the output open", "sleep 300 & echo on", says("on")},
		{"xtrace", "set -x; true; set +x", "stderr \"++ true\"\nstderr \"++ set +x\"\ncomplete"},
		{"division", "echo $((1/0)); echo no", "stderr \"bash: line N: 1/0: division by 0 (error token is \\\"0\\\")\"\n" + exits(1)},
		{"posix", "set -o posix; shift 5", "stderr \"bash: line N: shift: 5: shift count out of range\"\n" + exits(1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEnv(t)
			id := e.session(nil)
			e.steps(id, []step{
				{"export A=1; b=2; f1() { echo f; }; alias g='echo g'; cd /usr; set -o pipefail; d=([3]='$x')", "complete"},
			})
			if got := e.in(id, c.command); inOrder(got) != inOrder(c.want) {
				t.Errorf("%s:\n%s\nwant\n%s", c.command, got, c.want)
			}
			for range 2 { // the second time in a shell that was there
				got := e.in(id, `exec >&2; echo "$A $b ${d[3]} $-"; f1; g; pwd; sh -c 'echo $A'; ! (false | true) || echo no`)
				if strings.Contains(c.command, "exec >&-") {
					return // it has no output any more, as it asked for
				}
				lines := strings.Split(got, "\n")
				if !strings.HasPrefix(lines[0], `stderr "1 2 $x `) ||
					strings.Join(lines[1:], " ") != `stderr "f" stderr "g" stderr "/usr" stderr "1" complete` {
					t.Fatalf("afterwards: %s", got)
				}
			}
		})
	}
}

// inOrder sorts events: between stdout and stderr there is no order.
func inOrder(events string) string {
	return strings.Join(slices.Sorted(strings.SplitSeq(events, "\n")), "\n")
}

// TestSessionStateAfterExit: what a run did before it exited is not lost.
func TestSessionStateAfterExit(t *testing.T) {
	e := newEnv(t)
	for _, exit := range []string{"exit 3", "set -e; (exit 3)", "f() { exit 3; }; f"} {
		id := e.session(nil)
		e.steps(id, []step{
			{"export HOME; A=old; export B=1; unset LC_ALL", "complete"},
			{"A=new; unset B; x=$'a\\nb\\'c'; cd /usr/bin; cd ..; " + exit, exits(3)},
			{"set +e; echo \"$A ${B-unset} ${LC_ALL-unset} $x\"; pwd; echo $OLDPWD", says("new unset unset a", "b'c", "/usr", "/usr/bin")},
		})
	}
}

// TestSessionMarkers: what looks like an answer of the shell is output.
func TestSessionMarkers(t *testing.T) {
	e := newEnv(t)
	id := e.session(nil)
	e.steps(id, []step{
		{
			"echo __EXIT_CODE__:3; echo __ENV_DUMP_START__; echo __ENV_DUMP_END__; echo __PWD__:/x",
			says("__EXIT_CODE__:3", "__ENV_DUMP_START__", "__ENV_DUMP_END__", "__PWD__:/x"),
		},
		{"pwd", says(e.dir)},
		// Programs find nothing but the three descriptors they are to have.
		{`sh -c 'cd /proc/self/fd; echo *' | tr -d '\n'; for fd in 0 3 4 5 10 11 255; do sh -c "echo garbage 0 hB >&$fd" 2>/dev/null; done; true`, says("0 1 2 3")},
		// The shell itself may write to its channel: that is no answer.
		{
			"for i in 1 2 3; do echo " + strings.Repeat("0", 32) + " 0 hB >&10; head -c 3000000 /dev/zero >&10; done; echo on; (exit 5)",
			"stdout \"on\"\n" + exits(5),
		},
		{"echo x; (exit 6)", "stdout \"x\"\n" + exits(6)},
	})
}

// TestSessionLoses is what a session may lose, and that it goes on.
func TestSessionLoses(t *testing.T) {
	e := newEnv(t)
	for _, command := range []string{"exec 10>&-", "for fd in /proc/self/fd/*; do eval \"exec ${fd##*/}>&-\"; done"} {
		id := e.session(nil)
		e.in(id, "A=1")
		e.in(id, "A=2; "+command)
		if got := e.in(id, "echo $A"); got != says("1") {
			t.Errorf("after %s: %s", command, got)
		}
	}
	// A trap that prints whenever the shell does anything would print into its
	// state: so there is none to go on with.
	id := e.session(nil)
	e.in(id, "A=1; trap 'echo touch "+e.dir+"/owned' DEBUG")
	e.in(id, "kill -9 $$")
	if got := e.in(id, "echo [$A]"); got != says("[]") {
		t.Errorf("after a DEBUG trap: %s", got)
	}
	if _, err := os.Stat(e.dir + "/owned"); err == nil {
		t.Error("what a trap printed was executed")
	}
}

// TestSessionMute: a shell that cannot answer is replaced.
func TestSessionMute(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for two pings")
	}
	e := newEnv(t)
	id := e.session(nil)
	e.in(id, "A=1")
	if got := e.in(id, "builtin() { :; }"); !strings.Contains(got, shell.ErrMute.Error()) {
		t.Error(got)
	}
	if got := e.in(id, "echo on$A"); got != says("on") {
		t.Error(got)
	}
}

func TestSessionTimeout(t *testing.T) {
	e := newEnv(t)
	id := e.session(nil)
	mark, old := fmt.Sprintf("77.%09d", time.Now().UnixNano()%1e9), fmt.Sprintf("78.%09d", time.Now().UnixNano()%1e9)
	e.steps(id, []step{{"A=1; cd /usr; sleep " + old + " &", "complete"}})
	for _, script := range []string{
		"sleep MARK",
		"while :; do :; done",
		"trap '' TERM; sleep MARK & while :; do sleep 0.01; done",
		"sleep MARK & setsid sleep MARK & (setsid env -i sh -c 'sleep MARK & sleep MARK' &); wait",
		"exec sleep MARK",
		"sh -c 'kill -STOP $PPID'; sleep MARK",
	} {
		got, limit := inTime(func(limit int64) string {
			return e.inFor(id, agent.SessionRun{
				Command: "cd /bin; echo started; " + strings.ReplaceAll(script, "MARK", mark),
				Timeout: limit,
			})
		})
		if want := timedOut(limit); !strings.HasPrefix(got, `stdout "started"`) || !strings.HasSuffix(got, want) {
			t.Errorf("%s:\n%s\nwant%s", script, got, want)
		}
		if got := e.in(id, "echo $A; cd /usr; pwd"); got != says("1", "/usr") {
			t.Errorf("after %s: %s", script, got)
		}
		if left := sleepers(mark); len(left) > 0 { // at once, not soon
			t.Errorf("%s: survived the timeout: %v", script, left)
		}
	}
	if len(sleepers(old)) != 1 {
		t.Error("what an earlier run left in the background must outlive a timeout")
	}
	e.call(http.StatusOK, "DELETE", "/session/"+id, nil)
	if len(sleepers(old)) != 0 {
		t.Error("what a session left in the background outlived it")
	}
}

func TestSessionCwd(t *testing.T) {
	e := newEnv(t)
	made := e.dir + "/made/below"
	id := e.session(agent.SessionRequest{Cwd: made})
	if fi, err := os.Stat(made); err != nil || !fi.IsDir() {
		t.Fatal("the directory of a session is not made: ", err)
	}
	if err := os.Mkdir(made+"/sub dir's", 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ cwd, command, want string }{
		{"", "pwd", says(made)},
		{"/usr", "pwd; X=1", says("/usr")},
		{"", "pwd; echo $X", says(made, "1")},
		{"sub dir's", "pwd", says(made + "/sub dir's")},
		{"$HOME", "pwd; cd /; exit 3", "stdout " + quoted(e.s.guest().user.Home) + "\n" + exits(3)},
		{"", "pwd; cd /usr/bin; cd /usr", says(made)},
		{"bin", "pwd", says("/usr/bin")},
		{"", "pwd; echo $OLDPWD", says("/usr", "/usr/bin")},
	} {
		if got := e.inFor(id, agent.SessionRun{Command: c.command, Cwd: c.cwd}); got != c.want {
			t.Errorf("%s in %q:\n%s\nwant\n%s", c.command, c.cwd, got, c.want)
		}
	}
}

func quoted(s string) string { b, _ := json.Marshal(s); return string(b) }

func TestSessionBadInput(t *testing.T) {
	e := newEnv(t)
	file := e.dir + "/file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, body := range []string{
		"{", "[]", `{"cwd":5}`, `{"cwd":"` + file + `"}`, `{"cwd":"` + file + `/x"}`, `{"cwd":"$NOPE"}`,
		`{"cwd":"a\u0000b"}`, `{"cwd":"` + strings.Repeat("x", 5000) + `"}`,
	} {
		e.call(http.StatusBadRequest, "POST", "/session", body)
	}
	id := e.session("{}")
	for _, body := range []string{
		"", "{", "{}", `{"command":""}`, `{"command":5}`, `{"command":"a\u0000b"}`, `{"command":"a","timeout":-1}`,
		`{"command":"a","cwd":"/nope"}`,
		`{"command":"a","cwd":"` + file + `"}`, `{"command":"a","cwd":"$NOPE"}`, `{"command":"` + strings.Repeat("a", command.MaxArg+1) +
			`"}`,
	} {
		e.call(http.StatusBadRequest, "POST", "/session/"+id+"/run", body)
	}
	for _, other := range []string{"nope", strings.Repeat("0", 32), id + "x"} {
		for method, path := range map[string]string{"DELETE": "/session/" + other, "POST": "/session/" + other + "/run"} {
			if got := e.call(http.StatusNotFound, method, path, `{"command":"true"}`); !strings.Contains(got, reply.NoContext) {
				t.Errorf("%s %s: %s", method, path, got)
			}
		}
	}
	e.call(http.StatusMethodNotAllowed, "GET", "/session/"+id, nil)
	e.call(http.StatusMethodNotAllowed, "GET", "/session", nil)
	long := "echo " + strings.Repeat("a", 100_000) + " | wc -c"
	e.steps(id, []step{{long, says("100001")}})
	e.call(http.StatusOK, "DELETE", "/session/"+id, nil)
	e.call(http.StatusNotFound, "DELETE", "/session/"+id, nil)
}

// TestSessionBusy: a session does one thing at a time, and its run can be interrupted.
func TestSessionBusy(t *testing.T) {
	e := newEnv(t)
	id := e.session(nil)
	fifo := filepath.Join(e.dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan string)
	go func() {
		_, body := e.send(e.request("POST", "/session/"+id+"/run", strings.NewReader(`{"command":"A=1; echo >`+fifo+`; sleep 300"}`)))
		done <- body
	}()
	if _, err := os.ReadFile(fifo); err != nil { // it runs
		t.Fatal(err)
	}
	if got := e.call(http.StatusConflict, "POST", "/session/"+id+"/run", `{"command":"true"}`); !strings.Contains(got, "busy") {
		t.Error(got)
	}
	e.call(http.StatusOK, "DELETE", "/command?id="+id, nil)
	// A shell that hears of sleep's end before it meets its own signal says so.
	if got := strings.TrimPrefix(e.plain(<-done), "stderr \"Terminated\"\n"); got != "error CommandExecError -1 signal: terminated" {
		t.Error(got)
	}
	e.call(http.StatusInternalServerError, "DELETE", "/command?id="+id, nil)
	e.steps(id, []step{{"echo $A", says("1")}})
	// Removed while it runs: the run ends.
	go func() {
		_, body := e.send(e.request("POST", "/session/"+id+"/run", strings.NewReader(`{"command":"echo >`+fifo+`; sleep 300"}`)))
		done <- body
	}()
	if _, err := os.ReadFile(fifo); err != nil {
		t.Fatal(err)
	}
	e.call(http.StatusOK, "DELETE", "/session/"+id, nil)
	got := e.plain(<-done)
	if first, rest, ok := strings.Cut(got, "\n"); ok && strings.HasPrefix(first, "stderr ") && strings.Contains(first, "Hangup") {
		got = rest // likewise
	}
	if !strings.HasPrefix(got, "error CommandExecError -1 signal: ") {
		t.Error(got)
	}
}

// TestSessionOutput: all output comes before the end, and of each run its own.
func TestSessionOutput(t *testing.T) {
	e := newEnv(t)
	id := e.session(nil)
	for range 20 {
		got := e.in(id, "seq 5000; seq 100 >&2")
		if n := strings.Count(got, "\n"); n != 5100 || !strings.HasSuffix(got, "\ncomplete") {
			t.Fatalf("%d lines", n)
		}
	}
	// What runs on in the background is heard by the run that is there.
	e.steps(id, []step{
		{"mkfifo " + e.dir + "/go; (read -r x <" + e.dir + "/go; echo late) &", "complete"},
		{"echo >" + e.dir + "/go; wait; echo on", says("late", "on")},
	})
}

func TestSessionOfSh(t *testing.T) {
	e := newEnv(t)
	sh := e.dir + "/bin"
	if err := os.Mkdir(sh, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/bin/sh", sh+"/sh"); err != nil {
		t.Fatal(err)
	}
	id, err := e.s.sessions.Open(sh+"/sh", e.s.guest().env, e.dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.s.sessions.Remove(id) })
	e.steps(id, []step{
		{"export A=1; b=2; f() { echo f; }; cd /usr", "complete"},
		{"echo $A $b; f; pwd", says("1 2", "f", "/usr")},
		{"if", "stderr \"sh: 1: eval: Syntax error: end of file unexpected (expecting \\\"then\\\")\"\n" + exits(2)},
		{"exit 7", exits(7)},
		{"echo $A; pwd", says("1", "/usr")},
	})
	if got := e.inFor(id, agent.SessionRun{Command: "sleep 300", Timeout: 200}); !strings.Contains(got, "timed out") {
		t.Error(got)
	}
	e.steps(id, []step{{"echo $A; pwd", says("1", "/usr")}})
}

// TestSessionOfNobody: who asked for a session is gone before it is there, so it ends.
func TestSessionOfNobody(t *testing.T) {
	e := newEnv(t)
	dir := filepath.Join(e.dir, "nobody")
	shells := func() (n int) {
		all, err := filepath.Glob("/proc/[0-9]*/cwd")
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range all {
			if to, err := os.Readlink(link); err == nil && to == dir {
				n++
			}
		}
		return n
	}
	e.call(http.StatusOK, "POST", "/session", agent.SessionRequest{Cwd: dir})
	if shells() != 1 {
		t.Fatalf("a session is %d processes in its directory", shells())
	}
	ctx, hangUp := context.WithCancel(t.Context())
	hangUp()
	r := e.request("POST", "/session", strings.NewReader(`{"cwd":"`+dir+`"}`)).WithContext(ctx)
	e.http.Config.Handler.ServeHTTP(httptest.NewRecorder(), r)
	if shells() != 1 {
		t.Errorf("there are %d sessions, of which one has a client", shells())
	}
}
