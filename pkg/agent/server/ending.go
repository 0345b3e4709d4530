package server

import (
	"fmt"
	"strconv"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// ending says how a command ended.
type ending struct {
	code     int            // 128+n after signal n
	signal   syscall.Signal // 0: it exited
	err      string         // it could not start
	timedOut bool
	timeout  time.Duration
	at       time.Time
	reason   string // agent.Reason…
	hint     string // which limit was met, or empty
}

// exit is e as the exit frame of a command that began at started.
func (e ending) exit(started time.Time) agent.FrameExit {
	x := agent.FrameExit{
		ExitCode: e.code, TimedOut: e.timedOut, Error: e.err, Reason: e.reason, Hint: e.hint,
		ExecutionTime: max(e.at.Sub(started).Milliseconds(), 0),
	}
	if e.signal != 0 {
		x.Signal = proc.SignalName(e.signal)
	}
	return x
}

// failure says how a command failed in the words SDKs know; nil: it ended well.
func (e ending) failure() *agent.EventError {
	if e.code == 0 && e.err == "" {
		return nil
	}
	if e.err != "" {
		return &agent.EventError{Name: "CommandExecError", Value: e.err, Traceback: []string{e.err}}
	}
	v := strconv.Itoa(e.code)
	if e.signal != 0 {
		v = "-1"
	}
	return &agent.EventError{Name: "CommandExecError", Value: v, Traceback: e.traceback()}
}

func (e ending) traceback() []string {
	if e.signal == 0 {
		t := []string{fmt.Sprintf("exit status %d", e.code)}
		if e.hint != "" {
			t = append(t, e.reason+": "+e.hint)
		}
		return t
	}
	t := []string{"signal: " + e.signal.String()}
	if e.timedOut {
		t = append(t, fmt.Sprintf("command timed out after %v", e.timeout))
	}
	return t
}

// frame is how a session's client learns of the end.
func (e ending) frame() agent.PtyFrame {
	f := agent.PtyFrame{Type: "exit", ExitCode: &e.code, TimedOut: e.timedOut, Error: e.err}
	if e.signal != 0 {
		f.Signal = proc.SignalName(e.signal)
	}
	return f
}
