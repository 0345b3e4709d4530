package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/seccomp"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/interpreter"
)

// The test binary is the agent too: it runs as a child, which is no PID 1 but
// adopts orphans like one.
func TestMain(m *testing.M) {
	interpreter.Drive(os.Args) // as main does
	if os.Getenv("BE_THE_AGENT") != "" {
		if os.Getenv(seccomp.Variable) != "" { // then the runtime has set no_new_privs
			runtime.LockOSThread()
			if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
				panic(err)
			}
		}
		main()
	}
	os.Exit(m.Run())
}

type box struct {
	*testing.T
	cmd    *exec.Cmd
	stderr bytes.Buffer
	state  string
	addr   string
	*agent.Client
}

// start runs the agent with line, or b, on standard input, and with env.
func start(t *testing.T, b agent.Bootstrap, line string, env ...string) *box {
	t.Helper()
	return startBy(t, nil, nil, b, line, env...)
}

// startBy is start with flags, by a program that becomes the agent.
func startBy(t *testing.T, by, flags []string, b agent.Bootstrap, line string, env ...string) *box {
	t.Helper()
	x := &box{T: t, addr: hosttest.FreePort(t).String(), state: filepath.Join(t.TempDir(), "state")}
	b.Protocol, b.Token = agent.Protocol, "secret-token"
	image := map[string]string{"PATH": os.Getenv("PATH")}
	maps.Copy(image, b.Env)
	b.Env = image
	if b.User == "" {
		b.User = fmt.Sprintf("%d:%d", os.Getuid(), os.Getgid())
	}
	stdin, err := b.File()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	// Who starts the agent may ignore signals, as nohup does, and leave it a umask and descriptors: no
	// child of its may begin so.
	args := slices.Concat([]string{"-c", `trap "" HUP INT QUIT PIPE TSTP TTIN TTOU; umask 077; exec 7</dev/null; exec "$@"`, "sh"}, by,
		[]string{os.Args[0], "-listen", x.addr, "-state-dir", x.state}, flags)
	x.cmd = exec.Command("sh", args...)
	x.cmd.Env = append([]string{"BE_THE_AGENT=1", "PATH=" + os.Getenv("PATH"), "OF_THE_AGENT=yes"}, env...)
	x.cmd.Stdin, x.cmd.Stderr = stdin, &x.stderr
	if line != "" {
		x.cmd.Stdin = strings.NewReader(line)
	}
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		x.cmd.Process.Kill() //nolint:errcheck // most have ended
		x.cmd.Wait()         //nolint:errcheck // waited for already
	})
	x.talk(b.Token)
	return x
}

// talk makes a client with a token.
func (x *box) talk(token string) {
	x.Client = agent.New(func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", x.addr)
	}, token)
	x.Cleanup(x.Client.Close)
}

func (x *box) ready() {
	x.Helper()
	ctx, cancel := context.WithTimeout(x.Context(), 10*time.Second)
	defer cancel()
	if err := x.Ready(ctx); err != nil {
		x.Fatalf("%v; it said: %s", err, x.stderr.String())
	}
}

// run runs a command and returns its output, both streams, and exit code.
func (x *box) run(command string) (string, int) {
	x.Helper()
	body, _ := json.Marshal(agent.CommandRequest{Command: command})
	r, _ := http.NewRequestWithContext(x.Context(), "POST", "http://sandbox/command", bytes.NewReader(body))
	r.Header.Set("Accept", agent.FramesType)
	resp, err := x.RoundTripper().RoundTrip(r)
	if err != nil {
		x.Fatal(err)
	}
	defer resp.Body.Close()
	var out []byte
	for fr := agent.NewFrameReader(resp.Body); ; {
		s, p, err := fr.Next()
		switch {
		case err != nil:
			x.Fatalf("%s: %v", command, err)
		case s == agent.FrameEnd:
			e, err := agent.ParseExit(p)
			if err != nil {
				x.Fatal(err)
			}
			return string(out), e.ExitCode
		case s != agent.FrameControl:
			out = append(out, p...)
		}
	}
}

// ended waits for the agent's end and returns what it left.
func (x *box) ended(wantCode int) (agent.Obituary, string) {
	x.Helper()
	timer := time.AfterFunc(15*time.Second, func() { x.cmd.Process.Kill() }) //nolint:errcheck // then the code is wrong
	err := x.cmd.Wait()
	timer.Stop()
	code := 0
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		code = e.ExitCode()
	}
	if code != wantCode {
		x.Errorf("the agent exited with %d, want %d; it said: %s", code, wantCode, x.stderr.String())
	}
	b, err := os.ReadFile(filepath.Join(x.state, filepath.Base(agent.ObituaryFile)))
	if err != nil {
		x.Fatal(err)
	}
	o, err := agent.ParseObituary(b)
	if err != nil {
		x.Fatal(err)
	}
	last, _ := os.ReadFile(filepath.Join(x.state, filepath.Base(agent.OutputFile)))
	return o, string(last)
}

func TestLifeAndDeath(t *testing.T) {
	dir := t.TempDir()
	x := start(t, agent.Bootstrap{Entrypoint: []string{"sh", "-c", "echo hello from $FROM_BOOT $OF_THE_AGENT; while [ ! -e $0/stop ]; do " +
		"sleep 0.01; done; exit 42", dir}, Env: map[string]string{"FROM_BOOT": "boot"}}, "")
	x.ready()
	if out, code := x.run("echo $FROM_BOOT $OF_THE_AGENT; umask; exit 3"); out != "boot\n0022\n" || code != 3 {
		t.Errorf("%q %d", out, code)
	}
	x.awaitLogs("hello from boot\n")
	pid := x.cmd.Process.Pid
	for _, f := range []string{"environ", "cmdline"} {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, f)); err != nil || bytes.Contains(b, []byte("secret")) {
			t.Errorf("%s holds the token, or: %v", f, err)
		}
	}
	if out, _ := x.run("env"); strings.Contains(out, "secret") {
		t.Error("a command sees the token")
	}
	for fd := range 3 {
		if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, fd)); to != "/dev/null" {
			t.Errorf("fd %d of the agent is %s, %v", fd, to, err)
		}
	}
	if out, _ := x.run("ls /proc/self/fd"); out != "0\n1\n2\n3\n" { // 3 is ls reading the directory
		t.Errorf("a command has the descriptors %q", out)
	}
	// The entrypoint ends; whoever is still there ends with it.
	mark := fmt.Sprintf("88.%09d", time.Now().UnixNano()%1e9)
	x.run("setsid sleep " + mark + " >/dev/null 2>&1 & (setsid env -i sleep " + mark + " &)")
	if err := os.WriteFile(dir+"/stop", nil, 0o600); err != nil { // not by a command: the agent ends with the entrypoint
		t.Fatal(err)
	}
	o, last := x.ended(42)
	if o.ExitCode != 42 || o.Signal != "" || o.Message != "" || last != "hello from boot\n" {
		t.Errorf("%+v %q", o, last)
	}
	if out, _ := exec.Command("pgrep", "-f", "sleep "+mark).Output(); len(out) > 0 {
		t.Errorf("survived the sandbox: %s", out)
	}
}

// awaitLogs waits until the entrypoint has said want.
func (x *box) awaitLogs(want string) {
	x.Helper()
	deadline := time.Now().Add(5 * time.Second)
	for {
		r, _ := http.NewRequestWithContext(x.Context(), "GET", "http://sandbox/command/entrypoint/logs", nil)
		resp, err := x.RoundTripper().RoundTrip(r)
		if err != nil {
			x.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(b) == want {
			return
		}
		if time.Now().After(deadline) {
			x.Fatalf("the entrypoint said %q, want %q", b, want)
		}
		time.Sleep(time.Millisecond) // logs are polled
	}
}

func TestEntrypointThatCanNotStart(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"plain": "x", "noshebang": "echo hi", "badloader": "#! /nope/x -y\n", "windows": "#!/bin/sh\r\ntrue\r\n",
	} {
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	os.Chmod(dir+"/plain", 0o644) //nolint:errcheck // the case fails then
	for _, c := range []struct {
		argv []string
		code int
		says string
	}{
		{[]string{"nosuchprogram-x", "arg"}, 127, `entrypoint "nosuchprogram-x": no such file in the image's PATH`},
		{[]string{"/nope/foo"}, 127, `entrypoint "/nope/foo": no such file in the image`},
		{[]string{dir + "/plain"}, 126, "not executable"},
		{[]string{dir}, 126, "is a directory"},
		{[]string{dir + "/noshebang"}, 126, "without #!"},
		{[]string{dir + "/badloader"}, 127, `the file exists, but its interpreter "/nope/x" does not`},
		{[]string{dir + "/windows"}, 127, `its interpreter "/bin/sh\r" (its lines end as on Windows) does not`},
		{[]string{""}, 127, "no such file"},
	} {
		x := start(t, agent.Bootstrap{Entrypoint: c.argv}, "")
		o, _ := x.ended(c.code)
		said := x.stderr.String()
		if o.ExitCode != c.code || !strings.Contains(o.Message, c.says) || !strings.Contains(said, c.says) ||
			strings.Count(said, "\n") != 1 {
			t.Errorf("%q: %+v; %q", c.argv, o, said)
		}
	}
}

func TestBootErrors(t *testing.T) {
	for name, c := range map[string]struct {
		b    agent.Bootstrap
		line string
		says string
	}{
		"no line":    {line: "\n", says: "bootstrap"},
		"no JSON":    {line: "hello\n", says: "bootstrap"},
		"no token":   {line: `{"protocol":1}` + "\n", says: "token"},
		"protocol":   {line: `{"protocol":7,"token":"x"}` + "\n", says: "protocol 7"},
		"user":       {b: agent.Bootstrap{User: "nosuchuser-x"}, says: `user "nosuchuser-x": no such user in /etc/passwd of the image; build`},
		"group":      {b: agent.Bootstrap{User: "root:nosuch-x"}, says: `group "nosuch-x": no such group in /etc/group of the image; build`},
		"workdir":    {b: agent.Bootstrap{Workdir: "/dev/null/x"}, says: "working directory"},
		"workdir, 2": {b: agent.Bootstrap{Workdir: "rel"}, says: "not absolute"},
	} {
		x := start(t, c.b, c.line)
		o, _ := x.ended(1) // in a sandbox only the obituary is read
		if said := x.stderr.String(); said != "sandbox-agent: "+o.Message+"\n" || o.ExitCode != 1 || !strings.Contains(said, c.says) {
			t.Errorf("%s: %+v; %q", name, o, said)
		}
	}
}

func TestSignals(t *testing.T) {
	x := start(t, agent.Bootstrap{Entrypoint: []string{"sh", "-c", "trap 'echo term; exit 5' TERM; echo up; while :; do sleep 0.01; done"}},
		"")
	x.ready()
	x.awaitLogs("up\n")
	x.cmd.Process.Signal(syscall.SIGHUP)  //nolint:errcheck // it must survive this
	x.cmd.Process.Signal(syscall.SIGQUIT) //nolint:errcheck // and this
	if _, code := x.run("true"); code != 0 {
		t.Error(code)
	}
	x.cmd.Process.Signal(syscall.SIGTERM) //nolint:errcheck // seen below
	if o, last := x.ended(5); o.ExitCode != 5 || last != "up\nterm\n" {
		t.Errorf("%+v %q", o, last)
	}

	x = start(t, agent.Bootstrap{Entrypoint: []string{"sh", "-c", "seq 1 100000; kill -9 $$"}}, "")
	if o, last := x.ended(137); o.ExitCode != 137 || o.Signal != "SIGKILL" || len(last) != agent.MaxLastOutput ||
		!strings.HasSuffix(last, "\n100000\n") {
		t.Errorf("%+v, %d bytes", o, len(last))
	}

	x = start(t, agent.Bootstrap{}, "") // without an entrypoint it lives until told
	x.ready()
	x.cmd.Process.Signal(syscall.SIGTERM) //nolint:errcheck // seen below
	if o, _ := x.ended(143); o.ExitCode != 143 || o.Signal != "SIGTERM" {
		t.Errorf("%+v", o)
	}
}

// What the agent was started with (start ignores signals) is not passed on.
func TestIgnoresNothing(t *testing.T) {
	x := start(t, agent.Bootstrap{}, "")
	x.ready()
	out, code := x.run("grep SigIgn /proc/self/status")
	mask, err := strconv.ParseUint(strings.TrimSpace(strings.TrimPrefix(out, "SigIgn:")), 16, 64)
	if standard := uint64(1)<<31 - 1; err != nil || code != 0 || mask&standard != 0 {
		t.Errorf("%q, exit %d: commands begin with signals ignored", out, code)
	}
}

// The agent has its threads before any code of the guest runs, although its first answer
// does not wait for them: a guest at its limit leaves none.
func TestThreadsBeforeChildren(t *testing.T) {
	const want, count = 30, "ls /proc/$PPID/task | wc -l"
	x := start(t, agent.Bootstrap{Entrypoint: []string{"sh", "-c", fmt.Sprintf("[ $(%s) -ge %d ]", count, want)}}, "")
	x.ended(0)

	x = start(t, agent.Bootstrap{}, "") // the first request is a command: nothing was answered before it
	for deadline := time.Now().Add(10 * time.Second); ; {
		conn, err := net.Dial("tcp", x.addr)
		if err == nil {
			conn.Close()
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v; it said: %s", err, x.stderr.String())
		}
		time.Sleep(time.Millisecond) // nothing tells that it listens
	}
	out, code := x.run(count)
	if n, err := strconv.Atoi(strings.TrimSpace(out)); err != nil || code != 0 || n < want {
		t.Errorf("at the first command the agent has %q threads, want %d; exit %d", out, want, code)
	}

	x = start(t, agent.Bootstrap{}, "")
	x.ready() // the first command will not wait for them either
	for deadline := time.Now().Add(10 * time.Second); ; {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", x.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		if len(tasks) >= want {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("10 s after its first answer the agent has %d threads", len(tasks))
		}
		time.Sleep(time.Millisecond) // the kernel tells of a thread by no event
	}
}

func TestRunsAsTheUser(t *testing.T) {
	if os.Getuid() != 0 {
		return // only root can become somebody else
	}
	x := start(t, agent.Bootstrap{
		Entrypoint: []string{"sh", "-c", "id -u; id -g; id -G; echo $HOME; sleep 100"},
		User:       "daemon", Workdir: "/",
	}, "")
	x.ready()
	out, code := x.run("id -u; id -g; id -G; echo $HOME; pwd")
	if out != "1\n1\n1\n/usr/sbin\n/\n" || code != 0 {
		t.Errorf("%q %d", out, code)
	}
	if _, code := x.run("ls " + x.state); code == 0 {
		t.Error("a command of another user can read the agent's directory")
	}
}

// post sends JSON to the agent, and returns the answer to read on.
func (x *box) post(path string, body any) *http.Response {
	x.Helper()
	b, _ := json.Marshal(body)
	r, _ := http.NewRequestWithContext(x.Context(), "POST", "http://sandbox"+path, bytes.NewReader(b))
	resp, err := x.RoundTripper().RoundTrip(r)
	if err != nil {
		x.Fatal(err)
	}
	x.Cleanup(func() { resp.Body.Close() })
	return resp
}

// What runs code dies with the agent, also while the code spins and minds
// nothing; and so does what a context that was started ahead runs.
func TestDriversDieWithTheAgent(t *testing.T) {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	x := start(t, agent.Bootstrap{
		Env:      map[string]string{"HOME": t.TempDir(), "GOCACHE": cmp.Or(os.Getenv("GOCACHE"), cache+"/go-build")},
		Prestart: []string{"bash", "bash", "python"},
	}, "")
	x.ready()
	printPid := map[string]string{
		"python":     "import os; print(os.getpid(), flush=True)\nwhile True: pass",
		"javascript": "console.log(process.pid); while (true);",
		"java":       "System.out.println(ProcessHandle.current().pid()); while (true);",
		"go":         "import (\"fmt\"; \"os\")\nfunc main() { fmt.Println(os.Getpid()); for {} }",
		"bash":       "echo $$; while :; do :; done",
	}
	var pids []int
	for _, code := range slices.Sorted(maps.Keys(printPid)) {
		r := bufio.NewScanner(x.post("/code", agent.CodeRequest{Code: printPid[code], Context: agent.CodeContext{Language: code}}).Body)
		var ev agent.Event
		for ev.Type != "stdout" {
			if !r.Scan() {
				t.Fatalf("%s: %v", code, r.Err())
			}
			if len(r.Bytes()) > 0 && json.Unmarshal(r.Bytes(), &ev) != nil || ev.Type == "error" {
				t.Fatalf("%s: %s", code, r.Bytes())
			}
		}
		pid, err := strconv.Atoi(strings.TrimSpace(ev.Text))
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	var ends []unix.PollFd
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatalf("process %d of %v, in the order of their languages: %v", pid, pids, err)
		}
		defer unix.Close(fd)
		ends = append(ends, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	x.cmd.Process.Kill() //nolint:errcheck // it lives
	x.cmd.Wait()         //nolint:errcheck // it was killed
	for i := range ends {
		n, err := unix.Poll(ends[i:i+1], 10_000)
		for err == unix.EINTR { // a signal for Go's scheduler
			n, err = unix.Poll(ends[i:i+1], 10_000)
		}
		if n != 1 || err != nil {
			t.Errorf("process %d of a context lives on: %v", pids[i], err)
			unix.Kill(pids[i], unix.SIGKILL) //nolint:errcheck // gone is what is wanted
		}
	}
}
