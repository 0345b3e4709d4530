package command

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// The exit statuses that docker, env(1), timeout(1) and shells have made
// customary.
const (
	ExitTimeout     = 124
	ExitFailed      = 125 // sandboxctl or the daemon failed
	ExitNotExec     = 126 // the command is no program
	ExitNotFound    = 127 // there is no such command
	ExitInterrupted = 130 // by SIGINT
	ExitKilled      = 137 // by SIGKILL
	ExitNoReader    = 141 // by SIGPIPE: the reader of its output left
)

// Status is an error that ends sandboxctl with an exit status of its own. Text,
// if any, goes to standard error.
type Status struct {
	Code int
	Text string
}

func (s Status) Error() string { return s.Text }

// Exit returns a Status with a text.
func Exit(code int, format string, args ...any) error {
	return Status{Code: code, Text: fmt.Sprintf(format, args...)}
}

// Complain prints an error for a person: its text, not its cause.
func Complain(err error) {
	line := strings.TrimSpace(strings.ReplaceAll(err.Error(), "\t", "  ")) // cobra's suggestions
	if e, ok := errors.AsType[*errs.Error](err); ok {
		line = e.Text
	}
	say(text.Lines(line))
}

// Note prints a remark beside the answer, on standard error.
func Note(remark string) { say("note: " + text.Printable(remark)) }

// Notices tell a person at a terminal that a stream waits for the daemon.
func Notices() client.Notices {
	if !IsTerminal(os.Stderr) {
		return client.Notices{}
	}
	return client.Notices{
		Lost: func(error) { say("the connection to the daemon broke; waiting for the daemon (Ctrl-C ends this)") },
		Back: func() { say("reconnected") },
	}
}

func say(line string) { fmt.Fprintln(os.Stderr, "sandboxctl:", line) }
