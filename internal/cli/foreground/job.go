// Package foreground runs a command in a sandbox as if it ran here: its output
// and input are those of this process, signals go to it, and its exit status
// becomes that of sandboxctl. A Job is such a command; run, exec and shell are
// Jobs with other flags, attach comes back to one, and session and eval use
// parts of it.
//
// The order: Catch signals, start the command, Signals.To it, wait for its end,
// say why it ended. A daemon that is restarted meanwhile is waited for.
//
// What surprises: when the stream of a command breaks, its sandbox has most often
// ended, so WhyLost asks for the sandbox before it blames the connection.
package foreground

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A Job is a command in a sandbox.
type Job struct {
	Client  *client.Client
	Signals *Signals
	Sandbox string // id or name, as it was given
	Command client.Command
	User    string // to run as, as Flags.User; it is looked up in the sandbox
	// OOMs returns how many OOM kills the sandbox had before; nil: what the daemon
	// says when the command begins.
	OOMs func() int64
}

// SetUser looks up the user in the sandbox.
func (j *Job) SetUser(ctx context.Context) (err error) {
	if j.User != "" {
		j.Command.UID, j.Command.GID, err = j.Client.Commands(j.Sandbox).LookupUser(ctx, j.User)
	}
	return err
}

// execute runs a command to its end and returns its exit status as an error.
func (j Job) execute(stdin io.Reader) error {
	ctx := j.Signals.Context
	err := j.SetUser(ctx)
	var p *client.Process
	if err == nil {
		p, err = j.Client.Start(ctx, j.Sandbox, j.Command)
	}
	if err != nil && ctx.Err() != nil {
		return command.Status{Code: command.ExitInterrupted}
	}
	if err != nil {
		return err
	}
	if j.OOMs == nil {
		j.OOMs = func() int64 { return p.OOMKills }
	}
	if j.Command.Stdin {
		go p.SendStdin(ctx, stdin) //nolint:errcheck // a command may end before its input does
	}
	exit, err := j.Wait(p, "Use exec -d for a command that must survive that")
	if err != nil {
		return err
	}
	if exit.Code != 0 && exit.Error == "" {
		NoteDenials(ctx, j.Client, j.Sandbox, p.Denials)
	}
	return j.outcome(exit)
}

// Wait passes signals on to a command and prints its output until it ends. hint
// says what to do if the daemon goes away before that.
func (j Job) Wait(p *client.Process, hint string) (client.Exit, error) {
	j.Signals.To(p)
	exit, err := p.WaitOn(j.Signals.Context, j.Signals.Notices(), func(n int64) {
		command.Note(fmt.Sprintf("%s of output came while the daemon was away and are lost: the sandbox keeps the last part only; "+
			"see --log-max-size", text.Bytes(n)))
	}, os.Stdout, os.Stderr)
	switch {
	case err != nil && j.Signals.Context.Err() != nil:
		abort(p, "SIGKILL")
		return exit, command.Status{Code: command.ExitInterrupted}
	case errors.Is(err, client.ErrLost), errs.Is(err, errs.NotFound), errs.Is(err, errs.WrongState), errs.Is(err, errs.Unavailable):
		return exit, WhyLost(j.Client, j.Sandbox, err, "was the daemon restarted? "+hint)
	case errors.Is(err, syscall.EPIPE):
		abort(p, "SIGPIPE")
		return exit, command.Status{Code: command.ExitNoReader} // as shells report a writer whose reader left
	}
	return exit, err
}

// abort ends a command that is not waited for any longer, as far as the signal
// and the sandbox let it.
func abort(p *client.Process, signal string) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	p.Signal(ctx, signal) //nolint:errcheck // see above
}
