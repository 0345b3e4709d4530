package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// execFlags are how a command is run, in run and exec.
type execFlags struct {
	workdir, user    string
	interactive, tty bool
	timeout          time.Duration
	detachKeys       string
}

func (e *execFlags) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVarP(&e.workdir, "workdir", "w", "", "directory to run in (default: the image's)")
	f.StringVarP(&e.user, "user", "u", "", "user to run as: NAME or UID, and :GROUP or :GID (default: the image's)")
	f.BoolVarP(&e.interactive, "interactive", "i", false, "pass standard input on")
	f.BoolVarP(&e.tty, "tty", "t", false, "run it at a terminal; -it is this one")
	f.DurationVar(&e.timeout, "timeout", 0, "kill the command after this time, as 30s; the exit status is 124 then")
	detachKeysFlag(cmd, &e.detachKeys)
}

func (e *execFlags) check() error {
	if e.tty && e.interactive && !isTerminal(os.Stdin) {
		return errs.New(errs.Invalid, "the input device is not a TTY; leave out -t to pass a file or a pipe on")
	}
	if e.timeout < 0 {
		return errs.New(errs.Invalid, "--timeout %s is negative", e.timeout)
	}
	return nil
}

// checkEntrypoint refuses what a command has and an entrypoint has not: a create
// request says neither who runs it, nor where, and nobody is connected to it.
func (e *execFlags) checkEntrypoint() error {
	switch {
	case e.tty:
		return errs.New(errs.Invalid, "-d and -t exclude one another: an entrypoint has no terminal; create the sandbox and use sandboxctl shell")
	case e.interactive:
		return errs.New(errs.Invalid, "-d and -i exclude one another: an entrypoint has no standard input; create the sandbox and use sandboxctl exec -i, or put the input into a file by sandboxctl cp")
	case e.user != "":
		return errs.New(errs.Invalid, "-d and -u exclude one another: an entrypoint runs as the image's user; create the sandbox and use sandboxctl exec -d -u %s", e.user)
	case e.workdir != "":
		return errs.New(errs.Invalid, "-d and -w exclude one another: an entrypoint runs in the image's directory; create the sandbox and use sandboxctl exec -d -w %s", e.workdir)
	}
	return nil
}

func (e *execFlags) command(argv []string, env map[string]string) client.Command {
	return client.Command{Argv: argv, Dir: e.workdir, Env: env, Timeout: e.timeout, Stdin: e.interactive}
}

func newExec(c *cli) *cobra.Command {
	var (
		e             execFlags
		env, envFiles []string
		detach        bool
	)
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX [--] COMMAND [ARG...]",
		Short: "Run a command in a sandbox",
		Long: `Run a command in a sandbox. The exit status is as for run. Ctrl-C goes to the
command; a second one kills it.

With -it the command runs at this terminal. It lives on when the daemon is
restarted, which is waited for, and when the detach keys are pressed: see
sandboxctl attach.

With --detach it prints the command's id, and the command goes on by itself:
see sandboxctl command.`,
		Example: `  sandboxctl exec lab -- uname -a
  echo hello | sandboxctl exec -i lab cat
  sandboxctl exec --timeout 30s -u 1000 -w /tmp lab -- sh -c 'make && ./a.out'
  id=$(sandboxctl exec -d lab sleep 60)`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := flagsFirst(cmd, args); err != nil {
				return err
			}
			if err := e.check(); err != nil {
				return err
			}
			argv := afterDash(args[1:])
			if len(argv) == 0 {
				return errs.New(errs.Invalid, "no command; as in: sandboxctl exec %s -- uname -a", args[0])
			}
			vars, err := environment(env, envFiles)
			if err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			command := e.command(argv, flat(vars))
			if detach && e.tty {
				return errs.New(errs.Invalid, "-d and -t exclude one another; start it with -it and leave it by the detach keys")
			}
			if detach {
				return background(cmd.Context(), cl, args[0], command, e.user)
			}
			sig := catchSignals()
			defer sig.stop()
			if e.tty {
				return e.atTerminal(cl, sig, args[0], command, oomsOf(cl, args[0]))
			}
			return execute(cl, sig, args[0], command, e.user, os.Stdin, nil)
		},
	}
	cmd.Flags().SetInterspersed(false)
	e.flags(cmd)
	cmd.Flags().StringArrayVarP(&env, "env", "e", nil, "environment variable NAME=VALUE, or NAME to pass it on")
	cmd.Flags().StringArrayVar(&envFiles, "env-file", nil, "file of NAME=VALUE lines")
	cmd.Flags().BoolVarP(&detach, "detach", "d", false, "print the command's id and leave it running")
	return cmd
}

func background(ctx context.Context, cl *client.Client, sandbox string, command client.Command, user string) error {
	if command.Stdin {
		return errs.New(errs.Invalid, "-d and -i exclude one another: nobody would feed a command that is left alone")
	}
	command.Background = true
	if err := setUser(ctx, cl, sandbox, &command, user); err != nil {
		return err
	}
	p, err := cl.Start(ctx, sandbox, command)
	if err != nil {
		return err
	}
	defer p.Close()
	_, err = fmt.Println(p.ID)
	return err
}

func setUser(ctx context.Context, cl *client.Client, sandbox string, command *client.Command, user string) (err error) {
	if user != "" {
		command.UID, command.GID, err = cl.LookupUser(ctx, sandbox, user)
	}
	return err
}

// execute runs a command to its end and returns its exit status as an error.
// ooms tells how many OOM kills its sandbox had before; nil: what the daemon says.
func execute(cl *client.Client, sig *signals, sandbox string, command client.Command, user string, stdin io.Reader, ooms func() int64) error {
	ctx := sig.ctx
	err := setUser(ctx, cl, sandbox, &command, user)
	var p *client.Process
	if err == nil {
		p, err = cl.Start(ctx, sandbox, command)
	}
	if err != nil && ctx.Err() != nil {
		return status{code: 130}
	}
	if err != nil {
		return err
	}
	if ooms == nil {
		ooms = func() int64 { return p.OOMKills }
	}
	sig.to(p)
	if command.Stdin {
		go p.SendStdin(ctx, stdin) //nolint:errcheck // a command may end before its input does
	}
	exit, err := attend(cl, sig, sandbox, p, "A command that must outlive that is started with exec -d")
	if err != nil {
		return err
	}
	return outcome(cl, sandbox, command, exit, ooms)
}

// attend prints what a command says until it ends. hint is for one that the
// daemon was lost under.
func attend(cl *client.Client, sig *signals, sandbox string, p *client.Process, hint string) (client.Exit, error) {
	exit, err := p.Wait(os.Stdout, os.Stderr)
	switch {
	case err != nil && sig.ctx.Err() != nil:
		abort(p, "SIGKILL")
		return exit, status{code: 130}
	case errors.Is(err, client.ErrLost):
		return exit, autopsy(cl, sandbox, err, "was the daemon restarted? "+hint)
	case errors.Is(err, syscall.EPIPE):
		abort(p, "SIGPIPE")
		return exit, status{code: 141} // as a shell says of a writer whose reader left
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

// oomsOf asks how many OOM kills a sandbox has had, and waits for the answer
// only when somebody wants it.
func oomsOf(cl *client.Client, sandbox string) func() int64 {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	answer := make(chan int64, 1)
	go func() {
		defer cancel()
		n := int64(math.MaxInt64) // unknown: no kill is blamed on memory
		if u, err := cl.Stats(ctx, sandbox); err == nil {
			n = u.OOMKills
		}
		answer <- n
	}()
	return func() int64 { return <-answer }
}

// outcome says how a command ended.
func outcome(cl *client.Client, sandbox string, command client.Command, exit client.Exit, ooms func() int64) error {
	switch {
	case exit.TimedOut:
		return status{exitTimeout, fmt.Sprintf("the command was killed: it ran longer than --timeout %s", command.Timeout)}
	case exit.Error != "":
		hint := "is it installed in the image?"
		switch {
		case exit.Reason == "pids_limit":
			hint = "give it more with --pids"
		case exit.Code != exitNotFound:
			hint = "is it executable?"
		}
		name := "a shell"
		if len(command.Argv) > 0 {
			name = command.Argv[0]
		}
		return status{exit.Code, fmt.Sprintf("cannot run %q in sandbox %s: %s; %s", name, sandbox, printable(exit.Error, false), hint)}
	case exit.Signal == "SIGKILL":
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		text := "the command was killed by SIGKILL"
		if u, err := cl.Stats(ctx, sandbox); err == nil && u.OOMKills > ooms() {
			text = fmt.Sprintf("the command was killed (oom): the sandbox went over its memory limit of %s; give it more with --memory", bytesOf(u.MemoryLimitBytes))
		}
		return status{exitKilled, text}
	case exit.Code != 0:
		return status{exit.Code, limitHint(exit)}
	}
	return nil
}

// limitHint names the limit that a command failed at, and the flag that raises it.
func limitHint(exit client.Exit) string {
	flag := map[string]string{"disk_full": "--disk", "pids_limit": "--pids"}[exit.Reason]
	if exit.Hint == "" || flag == "" {
		return ""
	}
	return fmt.Sprintf("the command failed (%s): %s; give it more with %s", exit.Reason, printable(exit.Hint, false), flag)
}

// autopsy finds out why a command's stream broke: most often because its
// sandbox has ended, which the daemon may notice a moment later than we do. If it
// has not, hint says what to do.
func autopsy(cl *client.Client, sandbox string, lost error, hint string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		sb, err := cl.Get(ctx, sandbox)
		switch {
		case errs.Is(err, errs.NotFound):
			return status{exitKilled, fmt.Sprintf("sandbox %s was removed, or its timeout passed, while the command ran", sandbox)}
		case err == nil && sb.Status.Reason == "expired":
			return status{exitTimeout, fmt.Sprintf("the timeout of sandbox %s passed while the command ran", sandbox)}
		case err == nil && sb.Status.Reason == "oom":
			limit := ""
			if sb.Sandboxd != nil {
				limit = " of " + bytesOf(sb.Sandboxd.MemoryBytes)
			}
			return status{exitKilled, fmt.Sprintf("killed (oom): sandbox %s went over its memory limit%s; give it more with --memory", sandbox, limit)}
		case err == nil && (sb.Status.State == client.Failed || sb.Status.State == client.Terminated):
			return status{exitKilled, fmt.Sprintf("killed: sandbox %s ended while the command ran (%s) %s", sandbox, sb.Status.Reason, printable(sb.Status.Message, false))}
		}
		select {
		case <-ctx.Done():
			if _, ok := errors.AsType[*errs.Error](lost); ok && !errors.Is(lost, client.ErrLost) {
				return lost // it says why
			}
			return errs.Wrap(lost, errs.Unavailable, "the connection to the command in sandbox %s broke; %s", sandbox, hint)
		case <-tick.C:
		}
	}
}

// trimSignal takes SIG off, so that both INT and SIGINT work.
func trimSignal(s string) string { return "SIG" + strings.TrimPrefix(strings.ToUpper(s), "SIG") }
