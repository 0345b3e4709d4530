package foreground

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	moby "github.com/moby/term"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// comeBack is how long a terminal waits for a daemon that went away.
const comeBack = time.Minute

// ErrDetached means that somebody left a terminal by its detach keys. It is no failure.
var ErrDetached error = command.Status{}

// DetachKeysFlag adds --detach-keys, which ParseKeys reads.
func DetachKeysFlag(cmd *cobra.Command, keys *string) {
	cmd.Flags().StringVar(keys, "detach-keys", "ctrl-p,ctrl-q", "key sequence that detaches from the terminal")
}

// ParseKeys returns what is typed when keys as "ctrl-p,x" are pressed.
func ParseKeys(s string) ([]byte, error) {
	keys, err := moby.ToBytes(s)
	if err != nil {
		return nil, errs.New(errs.Invalid, "--detach-keys %q: %s; want keys such as ctrl-p or x, separated by commas", s, err)
	}
	return keys, nil
}

// atTerminal is execute for a command at a terminal.
func (e *Flags) atTerminal(j Job) error {
	ctx := j.Signals.Context
	keys, err := ParseKeys(e.DetachKeys)
	if err != nil {
		return err
	}
	if j.OOMs == nil {
		j.OOMs = oomsOf(j.Client, j.Sandbox)
	}
	err = j.SetUser(ctx)
	var t *client.Terminal
	if err == nil {
		cols, rows := screen()
		t, err = j.Client.Terminals(j.Sandbox).Create(ctx, j.Command, cols, rows)
	}
	if err != nil && ctx.Err() != nil {
		return command.Status{Code: command.ExitInterrupted}
	}
	if err != nil {
		return err
	}
	j.Signals.To(t)
	v := client.View{Takeover: true} // any other client there is an earlier attempt of this process
	exit, err := lend(ctx, j.Signals, t, v, e.Interactive, keys)
	switch {
	case errors.Is(err, ErrDetached):
		fmt.Fprintf(os.Stderr, "sandboxctl: detached; attach again with: sandboxctl attach %s %.12s\n", j.Sandbox, t.ID)
		return err
	case err != nil && ctx.Err() != nil:
		removeTerminal(t)
		return command.Status{Code: command.ExitInterrupted}
	case errors.Is(err, syscall.EPIPE):
		removeTerminal(t)
		return command.Status{Code: command.ExitNoReader}
	case err != nil:
		return j.lost(err)
	}
	return j.outcome(exit)
}

// Attach comes back to a terminal, shown as v says, until its process ends. With
// typing, keys go there too. The job needs Client, Sandbox and Command.
func (j Job) Attach(ctx context.Context, t *client.Terminal, v client.View, typing bool, detach []byte) error {
	j.OOMs = oomsOf(j.Client, j.Sandbox)
	exit, err := lend(ctx, nil, t, v, typing, detach)
	switch {
	case err == nil:
		return j.outcome(exit)
	case ctx.Err() != nil:
		return err
	}
	return j.lost(err)
}

// lost explains why a terminal was lost.
func (j Job) lost(err error) error {
	switch {
	case errors.Is(err, client.ErrTakenOver):
		return command.Exit(command.ExitFailed, "another client has taken over this terminal")
	case errors.Is(err, client.ErrLost), errs.Is(err, errs.NotFound), errs.Is(err, errs.WrongState):
		return WhyLost(j.Client, j.Sandbox, err,
			"it keeps running: when the daemon runs again, use sandboxctl attach "+j.Sandbox)
	}
	return err
}

// removeTerminal ends a terminal that nobody will come back to, as far as the
// sandbox lets it.
func removeTerminal(t *client.Terminal) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	t.Remove(ctx) //nolint:errcheck // see above
}

// lend connects this terminal to one in a sandbox until that ends, is left, or ctx
// ends. With typing, every key goes there except those that detach. Whatever
// happens, this terminal is as before afterwards. sig may be nil.
func lend(
	ctx context.Context, sig *Signals, t *client.Terminal, v client.View, typing bool, detach []byte,
) (client.Exit, error) {
	signal.Ignore(syscall.SIGPIPE) // a reader that leaves is an error of Write
	v.Out, v.Patience = os.Stdout, comeBack
	if typing {
		v.In = moby.NewEscapeProxy(os.Stdin, detach)
	}
	if typing && !v.Pipe {
		restore, err := raw(os.Stdin)
		if err != nil {
			return client.Exit{}, err
		}
		defer restore()
		if sig != nil {
			sig.onExit(restore)
			defer sig.onExit(nil)
		}
	}
	if command.IsTerminal(os.Stdin) || command.IsTerminal(os.Stdout) {
		v.Size, v.Resized = screen, resizes(ctx)
	}
	if command.IsTerminal(os.Stderr) {
		v.Lost = func(error) {
			fmt.Fprintf(os.Stderr, "\r\nsandboxctl: the connection broke; trying again for %s\r\n", comeBack)
		}
		v.Back = func() { fmt.Fprint(os.Stderr, "sandboxctl: reconnected\r\n") }
	}
	exit, err := t.Attach(ctx, v)
	if _, ok := errors.AsType[moby.EscapeError](err); ok {
		if command.IsTerminal(os.Stdout) {
			fmt.Print("\r\n")
		}
		return exit, ErrDetached
	}
	return exit, err
}

// raw lets every key through. restore may be called by anybody, any number of times.
func raw(f *os.File) (restore func(), err error) {
	before, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, errs.New(errs.Invalid, "the input device is not a TTY: %s", err)
	}
	return func() { term.Restore(int(f.Fd()), before) }, nil //nolint:errcheck // it is gone, then
}

// screen is the size of this terminal, or zeros.
func screen() (cols, rows int) {
	for _, f := range []*os.File{os.Stdout, os.Stdin} {
		if cols, rows, err := term.GetSize(int(f.Fd())); err == nil {
			return cols, rows
		}
	}
	return 0, 0
}

// resizes sends at every change of this terminal's size, until ctx ends.
func resizes(ctx context.Context) <-chan struct{} {
	got, changed := make(chan os.Signal, 1), make(chan struct{}, 1)
	signal.Notify(got, syscall.SIGWINCH)
	go func() {
		defer signal.Stop(got)
		for {
			select {
			case <-ctx.Done():
				return
			case <-got:
			}
			select {
			case changed <- struct{}{}:
			default: // a change that was not read yet stands for both
			}
		}
	}()
	return changed
}
