package server

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/output"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

func TestCommandStream(t *testing.T) {
	e := newEnv(t)
	for command, want := range map[string]string{
		"true":                        "complete",
		"false":                       "error CommandExecError 1 exit status 1",
		"echo hello world":            "stdout \"hello world\"\ncomplete",
		"exit 7":                      "error CommandExecError 7 exit status 7",
		"echo err >&2; exit 2":        "stderr \"err\"\nerror CommandExecError 2 exit status 2",
		"printf 'a\\n\\nb'":           "stdout \"a\"\nstdout \"\\n\"\nstdout \"b\"\ncomplete",
		"printf 'a\\rb\\r\\nc\\n'":    "stdout \"a\"\nstdout \"b\"\nstdout \"c\"\ncomplete",
		"printf 'x\\377y<&>\\033\\n'": "stdout \"x\ufffdy\\u003c\\u0026\\u003e\\u001b\"\ncomplete",
		"kill -9 $$":                  "error CommandExecError -1 signal: killed",
		"kill -TERM $$":               "error CommandExecError -1 signal: terminated",
		"nosuchprogram-x": "stderr \"bash: line 1: nosuchprogram-x: command not found\"\nerror CommandExecError 127 exit " +
			"status 127",
		"if": "stderr \"bash: -c: line 2: syntax error: unexpected end of file\"\nerror CommandExecError 2 " +
			"exit status 2",
		"cat":                 "complete", // stdin is /dev/null
		"sleep 300 & echo $?": "stdout \"0\"\ncomplete",
	} {
		if got := e.events(agent.CommandRequest{Command: command}); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", command, got, want)
		}
	}
	proc.KillDescendants(time.Second)
}

// TestLineEndings: who is new gets output as it was, who is known to be older
// gets lines.
func TestLineEndings(t *testing.T) {
	e := newEnv(t)
	bare, whole := `stdout "a" stdout "\n" stdout "b" stdout "c" complete`, `stdout "a\n" stdout "\n" stdout "b\r\n" stdout "c" complete`
	id := e.session(nil)
	for sdk, want := range map[string]string{
		"OpenSandbox-Python-SDK/1.1.1": whole, "OpenSandbox-Python-SDK/1.1.2.dev20261020": whole, "OpenSandbox-Python-SDK/1.2.0": whole,
		"OpenSandbox-Go-SDK/2": whole,
		"":                     whole, "curl/7.88": whole, "python-httpx/0.1.0": whole, "OpenSandbox-Python-SDK/": whole,
		"OpenSandbox-Python-SDK/x":      whole,
		"my-OpenSandbox-Python-SDK/0.1": whole,
		"OpenSandbox-Python-SDK/1.1.0":  bare, "OpenSandbox-Python-SDK/0.1.16": bare, "OpenSandbox-JS-SDK/0.1.11": bare,
		"OpenSandbox-Kotlin-SDK/1.0.0":  bare,
		"OpenSandbox-JS-SDK/1.1.0-rc.1": bare, "OpenSandbox-Python-SDK/1.1": bare,
	} {
		for _, path := range []string{"/command", "/session/" + id + "/run"} {
			r := e.request("POST", path, strings.NewReader(`{"command":"printf 'a\\n\\nb\\r\\nc'"}`))
			r.Header.Set("User-Agent", sdk)
			_, body := e.send(r)
			if got := strings.ReplaceAll(e.plain(body), "\n", " "); got != want {
				t.Errorf("%q, %s: %s", sdk, path, got)
			}
		}
	}
}

func TestCommandArgv(t *testing.T) {
	e := newEnv(t)
	if got := e.events(agent.CommandRequest{Argv: []string{"echo", "$HOME *", "b  c"}}); got != "stdout \"$HOME * b  c\"\ncomplete" {
		t.Error(got)
	}
	for _, argv := range [][]string{{"nosuchprogram-x"}, {"/etc/passwd"}, {"/nope/x"}, {"/tmp"}} {
		got := e.events(agent.CommandRequest{Argv: argv})
		if !strings.HasPrefix(got, "error CommandExecError start ") || !strings.Contains(got, argv[0]) {
			t.Error(got)
		}
	}
}

func TestCommandBadInput(t *testing.T) {
	e := newEnv(t)
	file := e.dir + "/file"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, body := range []string{
		"", "{", "[]", "null", `"x"`, "{}", `{"command":""}`, `{"command":5}`, `{"command":"a","argv":["a"]}`,
		`{"argv":[]}`, `{"argv":[""]}`,
		`{"command":"a","cwd":"/nope"}`, `{"command":"a","cwd":"` + file + `"}`, `{"command":"a","cwd":"$NOPE/x"}`,
		`{"command":"a","cwd":"a\u0000b"}`,
		`{"command":"a","gid":5}`, `{"command":"a","uid":-1}`, `{"command":"a","uid":4294967295}`, `{"command":"a","uid":1.5}`,
		`{"command":"a","uid":5,"gid":-5}`,
		`{"command":"a","timeout":-1}`, `{"command":"a","envs":{"":"x"}}`, `{"command":"a","envs":{"A=B":"x"}}`,
		`{"command":"a","envs":{"A":"\u0000"}}`, `{"command":"a","envs":{"A\u0000":"x"}}`, `{"command":"a","envs":{"A\nB":"x"}}`,
		`{"command":"a\u0000b"}`, `{"argv":["a\u0000b"]}`, `{"command":"a","stdin":true,"background":true}`,
		`{"command":"` + strings.Repeat("a", command.MaxArg+1) + `"}`, `{"command":"a","envs":{"EXECD_ENVS":"/tmp"}}`,
	} {
		e.call(http.StatusBadRequest, "POST", "/command", body)
	}
}

func TestCommandEnvironment(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{Env: map[string]string{"FROM": "boot", "X": "1"}, Hostname: "box"})
	envs := e.dir + "/envs"
	if err := os.WriteFile(envs, []byte("# no\nX=2\nY=$FROM-y\nbroken\n=z\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := e.events(agent.CommandRequest{
		Command: `echo "$FROM $X $Y $HOSTNAME $Z $LC_ALL"`,
		Envs:    map[string]string{"EXECD_ENVS": envs, "Z": "z"},
	})
	if got != "stdout \"boot 2 boot-y box z C\"\ncomplete" {
		t.Error(got)
	}
	if err := os.Mkdir(e.dir+"/sub", 0o755); err != nil {
		t.Fatal(err)
	}
	for cwd, want := range map[string]string{
		"": e.dir, "sub": e.dir + "/sub", "$D": "/usr", "${D}/bin": "/usr/bin", "~": "/tmp",
		"~/": "/tmp",
	} {
		got := e.events(agent.CommandRequest{Command: "pwd", Cwd: cwd, Envs: map[string]string{"D": "/usr", "HOME": "/tmp"}})
		if got != "stdout "+strconv.Quote(want)+"\ncomplete" {
			t.Errorf("cwd %q: %s", cwd, got)
		}
	}
}

// TestTimeoutKillsTheTree starts descendants that try to get away.
func TestTimeoutKillsTheTree(t *testing.T) {
	e := newEnv(t)
	mark := fmt.Sprintf("77.%09d", time.Now().UnixNano()%1e9)
	script := strings.ReplaceAll(`
		sleep MARK &
		setsid sleep MARK &
		(setsid env -i sh -c 'sleep MARK & sleep MARK' &)
		set -m; (setsid sh -c '(setsid sleep MARK &) ; exit' &)
		echo started; sleep MARK`, "MARK", mark)
	soonGone(t, mark, func() {
		got, limit := inTime(func(limit int64) string {
			return e.events(agent.CommandRequest{Command: script, Timeout: limit})
		})
		if want := `stdout "started"` + timedOut(limit); got != want {
			t.Errorf("%s\nwant\n%s", got, want)
		}
	})
	if got := e.events(agent.CommandRequest{Command: "setsid sleep " + mark + " & sleep 0.05", Timeout: 60_000}); got != "complete" {
		t.Error(got)
	}
	for end := time.Now().Add(10 * time.Second); len(sleepers(mark)) == 0 && time.Now().Before(end); {
		time.Sleep(5 * time.Millisecond) // a busy host has not begun with it
	}
	if len(sleepers(mark)) != 1 {
		t.Error("what a command left in the background must live on when it ends in time")
	}
	proc.KillDescendants(time.Second)
}

// inTime runs a command that says "started" and does not end, with ever longer
// time limits in ms: within the first a busy host may not get as far as that.
func inTime(run func(limit int64) string) (got string, limit int64) {
	for limit = 300; ; limit *= 4 {
		if got = run(limit); strings.HasPrefix(got, `stdout "started"`) || limit > 10_000 {
			return got, limit
		}
	}
}

// timedOut ends the events of a command that a time limit in ms has ended.
func timedOut(limit int64) string {
	return fmt.Sprintf("\nerror CommandExecError -1 signal: killed|command timed out after %v", time.Duration(limit)*time.Millisecond)
}

// soonGone has run start sleepers that a time limit ends: those who were killed are
// gone within two seconds, in one of ten runs on a busy host.
func soonGone(t *testing.T, mark string, run func()) {
	t.Helper()
	var took time.Duration
	for range 10 {
		run()
		start := time.Now()
		for len(sleepers(mark)) > 0 {
			if time.Since(start) > 20*time.Second {
				t.Fatalf("survived the timeout: %v", sleepers(mark))
			}
			time.Sleep(5 * time.Millisecond) // killed, but perhaps not gone
		}
		if took = time.Since(start); took <= 2*time.Second {
			return
		}
	}
	t.Errorf("who was killed was gone after %v", took)
}

func sleepers(mark string) (pids []int) {
	for _, p := range proc.List() {
		b, _ := os.ReadFile("/proc/" + strconv.Itoa(p.PID) + "/cmdline")
		if p.State != 'Z' && bytes.Contains(b, []byte("sleep\x00"+mark)) {
			pids = append(pids, p.PID)
		}
	}
	return pids
}

// TestReaper runs many short commands beside many orphans and wants every exit
// code, and no zombie.
func TestReaper(t *testing.T) {
	e := newEnv(t)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 25 {
				code := (w*25 + i) % 100
				req := agent.CommandRequest{Command: fmt.Sprintf("(true &); (sleep 0.01 &); exit %d", code)}
				want := fmt.Sprintf("error CommandExecError %d exit status %d", code, code)
				if i%2 == 0 {
					req, want = agent.CommandRequest{Command: "false"}, "error CommandExecError 1 exit status 1"
				} else if code == 0 {
					want = "complete"
				}
				if got := e.events(req); got != want {
					t.Errorf("%s: %s", req.Command, got)
				}
			}
		})
	}
	wg.Wait()
	deadline := time.Now().Add(5 * time.Second)
	for {
		var left []proc.Stat
		for _, p := range proc.List() {
			if p.Parent == os.Getpid() {
				left = append(left, p)
			}
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left: %+v", left)
		}
		time.Sleep(5 * time.Millisecond) // the reaper tells nobody of orphans
	}
}

// TestFollowLogs: every chunk arrives while the command still runs, because the
// command waits for what the reader does with it.
func TestFollowLogs(t *testing.T) {
	e := newEnv(t)
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	feed, err := os.OpenFile(fifo, os.O_RDWR, 0) // both ways, so that no open waits for the other side
	if err != nil {
		t.Fatal(err)
	}
	defer feed.Close()
	id := e.id(e.call(200, "POST", "/command", agent.CommandRequest{
		Command: "echo one; read x <" + fifo + "; echo $x; read x <" + fifo, Background: true,
	}))
	resp, err := http.DefaultClient.Do(e.request("GET", "/command/"+id+"/logs?follow=true&cursor=1", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got := resp.Header.Get(agent.CursorHeader); got != "1" {
		t.Errorf("cursor %s", got)
	}
	lines := bufio.NewReader(resp.Body)
	for _, want := range []string{"ne\n", "two\n"} {
		if got, err := lines.ReadString('\n'); got != want {
			t.Fatalf("%q %v, want %q", got, err, want)
		}
		if _, err := feed.WriteString("two\n"); err != nil {
			t.Fatal(err)
		}
	}
	if rest, err := io.ReadAll(lines); len(rest) > 0 || err != nil { // it ends with the command
		t.Errorf("%q %v", rest, err)
	}
	if logs := e.call(200, "GET", "/command/"+id+"/logs?follow=true", nil); logs != "one\ntwo\n" {
		t.Errorf("of a command that has ended: %q", logs)
	}
	e.call(400, "GET", "/command/"+id+"/logs?follow=x", nil)
}

// TestFollowLogsClientLeaves: a reader that hangs up ends its request, not the command.
func TestFollowLogsClientLeaves(t *testing.T) {
	e := newEnv(t)
	id := e.id(e.call(200, "POST", "/command", agent.CommandRequest{Command: "echo one; sleep 60", Background: true}))
	ctx, cancel := context.WithCancel(t.Context())
	resp, err := http.DefaultClient.Do(e.request("GET", "/command/"+id+"/logs?follow=true", nil).WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4)
	if _, err := io.ReadFull(resp.Body, b); err != nil || string(b) != "one\n" {
		t.Errorf("%q %v", b, err)
	}
	cancel()
	resp.Body.Close()
	if st := e.call(200, "GET", "/command/status/"+id, nil); !strings.Contains(st, `"running":true`) {
		t.Error(st)
	}
	e.call(200, "DELETE", "/command?id="+id, nil)
}

// TestLogsSince: what was written before a time is left out.
func TestLogsSince(t *testing.T) {
	e := newEnv(t)
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	feed, err := os.OpenFile(fifo, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer feed.Close()
	start := time.Now()
	id := e.id(e.call(200, "POST", "/command", agent.CommandRequest{Command: "echo old; read x <" + fifo + "; echo new", Background: true}))
	resp, err := http.DefaultClient.Do(e.request("GET", "/command/"+id+"/logs?follow=true", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewReader(resp.Body)
	if got, err := lines.ReadString('\n'); got != "old\n" {
		t.Fatalf("%q, %v", got, err)
	}
	time.Sleep(20 * time.Millisecond) // time is what this is about: output of 10 ms counts as one
	between := time.Now()
	if _, err := feed.WriteString("x\n"); err != nil {
		t.Fatal(err)
	}
	if got, err := lines.ReadString('\n'); got != "new\n" {
		t.Fatalf("%q, %v", got, err)
	}
	e.await(id)
	for at, want := range map[time.Time]string{start: "old\nnew\n", between: "new\n", time.Now().Add(time.Minute): ""} {
		resp, logs := e.send(e.request("GET", "/command/"+id+"/logs?since="+at.UTC().Format(time.RFC3339Nano), nil))
		if logs != want || resp.Header.Get(agent.SinceHeader) != itoa(8-len(want)) {
			t.Errorf("since %s: %q, from byte %s", at, logs, resp.Header.Get(agent.SinceHeader))
		}
	}
	if resp, _ := e.send(e.request("GET", "/command/"+id+"/logs", nil)); resp.Header.Get(agent.SinceHeader) != "" {
		t.Errorf("without a time: %v", resp.Header)
	}
	e.call(400, "GET", "/command/"+id+"/logs?since=yesterday", nil)
}

func TestBackgroundAndLogs(t *testing.T) {
	e := newEnv(t)
	out := e.call(200, "POST", "/command", agent.CommandRequest{
		Command:    "echo one; echo two >&2; sleep 0.2; printf three",
		Background: true,
	})
	if got := e.plain(out); got != "complete" {
		t.Error(got)
	}
	id := e.id(out)
	e.await(id)
	resp, logs := e.send(e.request("GET", "/command/"+id+"/logs", nil))
	if logs != "one\ntwo\nthree" || resp.Header.Get(agent.CursorHeader) != "13" || !strings.HasPrefix(resp.Header.Get("Content-Type"),
		"text/plain") {
		t.Errorf("%q %v", logs, resp.Header)
	}
	if resp, logs := e.send(e.request("GET", "/command/"+id+"/logs?cursor=4", nil)); logs != "two\nthree" ||
		resp.Header.Get(agent.CursorHeader) != "13" {
		t.Errorf("%q", logs)
	}
	for _, cursor := range []string{"13", "99"} {
		if resp, logs := e.send(e.request("GET", "/command/"+id+"/logs?cursor="+cursor, nil)); logs != "" ||
			resp.Header.Get(agent.CursorHeader) != cursor {
			t.Errorf("cursor %s: %q %s", cursor, logs, resp.Header.Get(agent.CursorHeader))
		}
	}
	e.call(400, "GET", "/command/"+id+"/logs?cursor=-1", nil)
	e.call(400, "GET", "/command/"+id+"/logs?cursor=x", nil)
	e.call(500, "DELETE", "/command?id="+id, nil) // it has ended
	e.call(409, "POST", "/command/"+id+"/signal?signal=INT", nil)
}

// await waits for the end of a command and returns its status.
func (e *env) await(id string) (st agent.CommandStatus) {
	e.Helper()
	c := e.s.commands.Get(id)
	if c == nil {
		e.Fatalf("command %s is not known", id)
	}
	select {
	case <-c.Flushed(): // all its output is in the ring; done may come before that
	case <-time.After(10 * time.Second):
		e.Fatal("the command does not end")
	}
	if err := json.Unmarshal([]byte(e.call(200, "GET", "/command/status/"+id, nil)), &st); err != nil || st.Running || st.ExitCode == nil ||
		st.FinishedAt == "" {
		e.Errorf("%+v, %v", st, err)
	}
	return st
}

func TestStatus(t *testing.T) {
	e := newEnv(t)
	for command, want := range map[string]string{"true": "0 ", "exit 3": "3 exit status 3", "kill -9 $$": "-1 signal: killed"} {
		st := e.await(e.id(e.call(200, "POST", "/command", agent.CommandRequest{Command: command})))
		if got := fmt.Sprint(*st.ExitCode, " ", st.Error); got != want || st.Content != command {
			t.Errorf("%s: %s %+v", command, got, st)
		}
	}
	st := e.await(e.id(e.call(200, "POST", "/command", agent.CommandRequest{Argv: []string{"/nope/x", "y"}})))
	if *st.ExitCode != 127 || st.Error == "" || st.Content != "/nope/x y" {
		t.Errorf("%+v", st)
	}
}

// TestOutputTimes: the agent says when output was written.
func TestOutputTimes(t *testing.T) {
	e := newEnv(t)
	fifo := filepath.Join(e.dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	began := time.Now().UnixMilli()
	id := e.id(e.call(200, "POST", "/command", agent.CommandRequest{Command: "echo one; read x <" + fifo + "; echo two", Background: true}))
	eventuallyTrue(t, func() bool { return e.s.commands.Get(id).Output.Times().End == 4 })
	came := time.Now().UnixMilli()
	time.Sleep(20 * time.Millisecond) // what comes within ten has one time
	fed := time.Now().UnixMilli()
	if err := os.WriteFile(fifo, []byte("go\n"), 0); err != nil {
		t.Fatal(err)
	}
	st := e.await(id)
	var got agent.OutputTimes
	if err := json.Unmarshal([]byte(e.call(200, "GET", "/command/"+st.ID+"/times", nil)), &got); err != nil || got.End != 8 ||
		len(got.Marks) != 2 || got.Marks[0][0] != 0 || got.Marks[1][0] != 4 {
		t.Fatalf("%+v, %v", got, err)
	}
	if first, second := got.Marks[0][1], got.Marks[1][1]; first < began || first > came || second < fed || second > time.Now().UnixMilli() {
		t.Errorf("%+v; it began at %d, the first had come at %d, the second was asked for at %d", got.Marks, began, came, fed)
	}
}

// TestCommandList: all that run and that have ended are there, the newest first, without
// probes; a long text is cut.
func TestCommandList(t *testing.T) {
	e := newEnv(t)
	if all := e.call(200, "GET", "/command", nil); strings.TrimSpace(all) != "[]" {
		t.Errorf("%s", all)
	}
	long := "exit 3 #" + strings.Repeat("é", 2000)
	first := e.await(e.id(e.call(200, "POST", "/command", agent.CommandRequest{Command: long})))
	e.call(200, "POST", "/command", agent.CommandRequest{Command: "true", Forget: true})
	second := e.id(e.call(200, "POST", "/command", agent.CommandRequest{Command: "sleep 1000", Background: true}))
	var all []agent.CommandStatus
	if err := json.Unmarshal([]byte(e.call(200, "GET", "/command", nil)), &all); err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	if all[0].ID != second || !all[0].Running || all[0].Content != "sleep 1000" {
		t.Errorf("%+v", all[0])
	}
	if c := all[1]; c.ID != first.ID || c.Running || *c.ExitCode != 3 || !strings.HasPrefix(long, strings.TrimSuffix(c.Content, "…")) ||
		len(c.Content) > 1100 {
		t.Errorf("%+v", c)
	}
	e.call(200, "DELETE", "/command?id="+second, nil)
}

// open starts a command and returns its id and the rest of its stream.
func (e *env) open(ctx context.Context, req agent.CommandRequest, frames bool) (string, *bufio.Reader) {
	e.Helper()
	b, _ := json.Marshal(req)
	r := e.request("POST", "/command", bytes.NewReader(b)).WithContext(ctx)
	if frames {
		r.Header.Set("Accept", agent.FramesType)
	}
	resp, err := e.http.Client().Do(r)
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { resp.Body.Close() })
	br := bufio.NewReader(resp.Body)
	if frames {
		return "", br
	}
	first, err := br.ReadString('\n')
	if err != nil {
		e.Fatal(err)
	}
	return e.id(first), br
}

func TestClientDisconnects(t *testing.T) {
	e := newEnv(t)
	ctx, cancel := context.WithCancel(t.Context())
	id, _ := e.open(ctx, agent.CommandRequest{Command: "echo before; sleep 0.3; echo after; exit 4"}, false)
	cancel()
	if st := e.await(id); *st.ExitCode != 4 {
		t.Errorf("%+v", st)
	}
	if logs := e.call(200, "GET", "/command/"+id+"/logs", nil); logs != "before\nafter\n" {
		t.Errorf("%q", logs)
	}
}

// TestStuckClient hangs up on a command that is blocked by a full connection.
func TestStuckClient(t *testing.T) {
	e := newEnv(t)
	ctx, cancel := context.WithCancel(t.Context())
	id, _ := e.open(ctx, agent.CommandRequest{Command: "head -c 30000000 /dev/zero; exit 5"}, false)
	time.Sleep(50 * time.Millisecond) // let it fill the connection; any state will do
	cancel()
	if st := e.await(id); *st.ExitCode != 5 {
		t.Errorf("%+v", st)
	}
	from, end := e.s.commands.Get(id).Output.Range()
	if end != 30000000 || end-from != output.OfCommand {
		t.Errorf("kept %d to %d", from, end)
	}
}

func TestSlowReaderLosesNothing(t *testing.T) {
	e := newEnv(t)
	_, br := e.open(t.Context(), agent.CommandRequest{Command: "seq 1 700000; seq 5 >&2; exit 9"}, true)
	time.Sleep(100 * time.Millisecond) // the command blocks meanwhile
	sum, want := sha256.New(), sha256.New()
	for i := 1; i <= 700000; i++ {
		fmt.Fprintln(want, i)
	}
	fr := agent.NewFrameReader(br)
	var stderr []byte
	for {
		s, p, err := fr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch s {
		case agent.FrameStdout:
			sum.Write(p)
		case agent.FrameStderr:
			stderr = append(stderr, p...)
		case agent.FrameEnd:
			if x, err := agent.ParseExit(p); err != nil || x.ExitCode != 9 {
				t.Error(x, err)
			}
		}
	}
	if !bytes.Equal(sum.Sum(nil), want.Sum(nil)) || string(stderr) != "1\n2\n3\n4\n5\n" {
		t.Error("output differs")
	}
}

func TestInterrupt(t *testing.T) {
	e := newEnv(t)
	id, br := e.open(t.Context(), agent.CommandRequest{Command: "sleep 300 & wait"}, false)
	e.call(200, "DELETE", "/command?id="+id, nil)
	if rest, _ := io.ReadAll(br); !strings.Contains(string(rest), "signal: terminated") {
		t.Errorf("%q", rest)
	}
	e.s.commands.Grace = 50 * time.Millisecond
	id, br = e.open(t.Context(), agent.CommandRequest{Command: "trap '' TERM; echo deaf; while :; do sleep 300; done"}, false)
	for line := ""; !strings.Contains(line, "deaf"); {
		var err error
		if line, err = br.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	e.call(200, "DELETE", "/command?id="+id, nil)
	if rest, _ := io.ReadAll(br); !strings.Contains(string(rest), "signal: killed") {
		t.Errorf("%q", rest)
	}
}

func TestSignal(t *testing.T) {
	e := newEnv(t)
	id, br := e.open(t.Context(), agent.CommandRequest{Command: "trap 'echo got; exit 6' INT; echo set; while :; do sleep 0.01; done"},
		false)
	for line := ""; !strings.Contains(line, "set"); {
		var err error
		if line, err = br.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	e.call(400, "POST", "/command/"+id+"/signal", nil)
	e.call(400, "POST", "/command/"+id+"/signal?signal=SIGNOPE", nil)
	e.call(400, "POST", "/command/"+id+"/signal?signal=0", nil)
	e.call(400, "POST", "/command/"+id+"/signal?signal=65", nil)
	e.call(200, "POST", "/command/"+id+"/signal?signal=int", nil)
	if rest, _ := io.ReadAll(br); !strings.Contains(string(rest), `"got"`) || !strings.Contains(string(rest), `"evalue":"6"`) {
		t.Errorf("%q", rest)
	}
}

func TestStdin(t *testing.T) {
	e := newEnv(t)
	id, br := e.open(t.Context(), agent.CommandRequest{Argv: []string{"sha256sum"}, Stdin: true}, false)
	data := bytes.Repeat([]byte("0123456789\n"), 300_000)
	e.call(200, "POST", "/command/"+id+"/stdin", string(data))
	if rest, _ := io.ReadAll(br); !strings.Contains(string(rest), fmt.Sprintf("%x", sha256.Sum256(data))) {
		t.Errorf("%q", rest)
	}
	e.call(409, "POST", "/command/"+id+"/stdin", "more")

	// A command that ends while nobody types ends the upload too.
	id, br = e.open(t.Context(), agent.CommandRequest{Argv: []string{"head", "-c1"}, Stdin: true}, false)
	pr, pw := io.Pipe()
	defer pw.Close()
	go io.WriteString(pw, "x") //nolint:errcheck // the server hangs up
	resp, err := e.http.Client().Do(e.request("POST", "/command/"+id+"/stdin", pr))
	if err == nil {
		resp.Body.Close()
	}
	if rest, _ := io.ReadAll(br); !strings.Contains(string(rest), "execution_complete") {
		t.Errorf("%q", rest)
	}
	id = e.id(e.call(200, "POST", "/command", agent.CommandRequest{Command: "true"}))
	e.call(400, "POST", "/command/"+id+"/stdin", "x")
}

func TestForgetsTheOldest(t *testing.T) {
	e := newEnv(t)
	var ids []string
	for range command.RememberFinished + 5 {
		c, ends, err := e.s.commands.New(command.NewID(), "x", 1)
		if err != nil {
			t.Fatal(err)
		}
		c.Output.Write([]byte("x")) //nolint:errcheck // never fails
		if e.s.commands.Start(c, &command.Launch{Way: command.Way{Argv: []string{"x"}}}, 0, false, ends) == nil {
			t.Fatal("a program without a path was started")
		}
		ids = append(ids, c.ID)
	}
	e.call(404, "GET", "/command/status/"+ids[4], nil)
	e.call(200, "GET", "/command/status/"+ids[5], nil)
	if n := e.s.commands.Known(); n != command.RememberFinished {
		t.Errorf("%d are remembered", n)
	}
}

// TestOtherUsers needs root to become somebody else; hosts run CI as root.
func TestOtherUsers(t *testing.T) {
	e := newEnv(t)
	uid, gid := int64(os.Getuid()), int64(os.Getgid())
	if uid == 0 {
		uid, gid = 65534, 65533
	}
	got := e.events(agent.CommandRequest{Command: "id -u; id -g; id -G", UID: &uid, GID: &gid, Cwd: "/"})
	if os.Getuid() == 0 && got != "stdout \"65534\"\nstdout \"65533\"\nstdout \"65533\"\ncomplete" {
		t.Error(got)
	}
	if os.Getuid() == 0 {
		dir := t.TempDir()
		if err := os.Chmod(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		got := e.events(agent.CommandRequest{Command: "true", UID: &uid, Cwd: dir})
		if !strings.Contains(got, "may not enter the working directory") {
			t.Errorf("a working directory the user may not enter: %s", got)
		}
	}
}
