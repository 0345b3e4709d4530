package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/internal/seccomp"
	"github.com/sandboxd/sandboxd/pkg/agent"
)

// filters returns how many seccomp filters stand before a thread.
func filters(t *testing.T, status string) int {
	t.Helper()
	b, err := os.ReadFile(status)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if n, ok := strings.CutPrefix(line, "Seccomp_filters:"); ok {
			i, err := strconv.Atoi(strings.TrimSpace(n))
			if err != nil {
				t.Fatal(err)
			}
			return i
		}
	}
	t.Fatalf("%s does not count filters", status)
	return 0
}

// All threads of the agent and all that it starts have the filter of its level, and work.
func TestEverythingHasTheFilter(t *testing.T) {
	here := filters(t, "/proc/self/status")
	for level, more := range map[seccomp.Level]int{seccomp.Compat: 0, seccomp.Default: 1, seccomp.Strict: 1} {
		t.Run(string(level), func(t *testing.T) {
			say := `sed -n "s/^Seccomp_filters:[[:space:]]*/filters=/p" /proc/self/status`
			want := fmt.Sprintf("filters=%d", here+more)
			x := start(t, agent.Bootstrap{
				Env: map[string]string{"HOME": t.TempDir()}, Entrypoint: []string{"sh", "-c", say + "; sleep 1000"},
			}, "", seccomp.Variable+"="+string(level))
			x.ready()
			x.awaitLogs(want + "\n")
			threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", x.cmd.Process.Pid))
			if err != nil || len(threads) < 5 {
				t.Fatalf("the agent has the threads %v, %v", threads, err)
			}
			for _, thread := range threads {
				if got := filters(t, thread); got != here+more {
					t.Errorf("%s: %d filters, want %d", thread, got, here+more)
				}
			}
			got := map[string]string{}
			got["command"], _ = x.run(say)
			got["session"] = x.session(say)
			got["pty"] = x.pty(say)
			got["bash"] = x.code("bash", say)
			const open = `open("/proc/self/status").read().split("Seccomp_filters:")[1].split()[0]`
			got["python"] = x.code("python", `print("filters=" + `+open+`)`)
			const read = `require("fs").readFileSync("/proc/self/status", "utf8").split("Seccomp_filters:")[1].trim().split("\n")[0]`
			got["javascript"] = x.code("javascript", `console.log("filters=" + `+read+`)`)
			for who, said := range got {
				if !strings.Contains(said, want) {
					t.Errorf("%s: %q, want %s", who, said, want)
				}
			}
			if env, _ := x.run("env"); strings.Contains(env, seccomp.Variable) {
				t.Errorf("a command sees %s", seccomp.Variable)
			}
		})
	}
}

func (x *box) session(command string) string {
	x.Helper()
	var made agent.SessionCreated
	if err := json.NewDecoder(x.post("/session", struct{}{}).Body).Decode(&made); err != nil {
		x.Fatal(err)
	}
	b, err := io.ReadAll(x.post("/session/"+made.SessionID+"/run", agent.SessionRun{Command: command}).Body)
	if err != nil {
		x.Fatal(err)
	}
	return string(b)
}

func (x *box) code(language, code string) string {
	x.Helper()
	b, err := io.ReadAll(x.post("/code", agent.CodeRequest{Code: code, Context: agent.CodeContext{Language: language}}).Body)
	if err != nil {
		x.Fatal(err)
	}
	return string(b)
}

// pty returns all that a command says on a terminal.
func (x *box) pty(command string) string {
	x.Helper()
	var made agent.PtyCreated
	if err := json.NewDecoder(x.post("/pty", agent.PtyRequest{Command: command}).Body).Decode(&made); err != nil {
		x.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(x.Context(), 20*time.Second)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, "ws://"+x.addr+"/pty/"+made.SessionID+"/ws",
		&websocket.DialOptions{HTTPHeader: http.Header{agent.TokenHeader: {"secret-token"}}})
	if err != nil {
		x.Fatal(err)
	}
	defer ws.CloseNow()
	var said strings.Builder
	for {
		kind, b, err := ws.Read(ctx)
		if err != nil {
			return said.String() // it ended
		}
		if kind == websocket.MessageBinary {
			said.Write(b[1:])
		}
	}
}

// An agent that cannot install its filter runs nothing, and says why where the daemon
// reads it.
func TestNoFilterNoSandbox(t *testing.T) {
	ran := filepath.Join(t.TempDir(), "ran")
	x := start(t, agent.Bootstrap{Entrypoint: []string{"touch", ran}}, "", seccomp.Variable+"=none")
	o, _ := x.ended(1)
	if want := `security level "none"`; !strings.Contains(o.Message, want) || !strings.Contains(x.stderr.String(), want) {
		t.Errorf("%+v, %q", o, x.stderr.String())
	}
	if _, err := os.Stat(ran); err == nil {
		t.Error("the entrypoint ran")
	}
}
