package command

import (
	"fmt"
	"strconv"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// Ending says how a command ended.
type Ending struct {
	Code     int            // 128+n after signal n; 126, 127: it could not start
	Signal   syscall.Signal // 0: it exited
	Err      string         // it could not start
	TimedOut bool
	Timeout  time.Duration // its limit; 0: it had none
	At       time.Time
	Reason   string // agent.Reason…
	Hint     string // which limit was met, or empty
}

// Exit is e as the exit frame of a command that began at started.
func (e Ending) Exit(started time.Time) agent.FrameExit {
	x := agent.FrameExit{
		ExitCode: e.Code, TimedOut: e.TimedOut, Error: e.Err, Reason: e.Reason, Hint: e.Hint,
		ExecutionTime: max(e.At.Sub(started).Milliseconds(), 0),
	}
	if e.Signal != 0 {
		x.Signal = proc.SignalName(e.Signal)
	}
	return x
}

// Failure says how a command failed in the words SDKs know; nil: it ended well.
func (e Ending) Failure() *agent.EventError {
	if e.Code == 0 && e.Err == "" {
		return nil
	}
	if e.Err != "" {
		return &agent.EventError{Name: "CommandExecError", Value: e.Err, Traceback: []string{e.Err}}
	}
	v := strconv.Itoa(e.Code)
	if e.Signal != 0 {
		v = "-1"
	}
	return &agent.EventError{Name: "CommandExecError", Value: v, Traceback: e.traceback()}
}

func (e Ending) traceback() []string {
	if e.Signal == 0 {
		t := []string{fmt.Sprintf("exit status %d", e.Code)}
		if e.Hint != "" {
			t = append(t, e.Reason+": "+e.Hint)
		}
		return t
	}
	t := []string{"signal: " + e.Signal.String()}
	if e.TimedOut {
		t = append(t, fmt.Sprintf("command timed out after %v", e.Timeout))
	}
	return t
}

// Frame is the message about the end for a terminal's client.
func (e Ending) Frame() agent.PtyFrame {
	f := agent.PtyFrame{Type: "exit", ExitCode: &e.Code, TimedOut: e.TimedOut, Error: e.Err}
	if e.Signal != 0 {
		f.Signal = proc.SignalName(e.Signal)
	}
	return f
}
