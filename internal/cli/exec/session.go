package exec

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/foreground"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newSession(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "session",
		Short: "Run commands one after the other in a shell that keeps its state",
		Long: `Run commands one after the other in a shell of a sandbox. The shell keeps its
variables, functions, directory and background jobs for the next command. A session
needs no terminal. It outlives this client and the daemon.`,
		Example: `  s=$(sandboxctl command session create lab)
  sandboxctl command session run lab $s -- cd /usr
  sandboxctl command session run lab $s 'A=$(ls | wc -l); echo $A'
  sandboxctl command session rm lab $s`,
	}
	cmd.AddCommand(newSessionCreate(p), newSessionRun(p), newSessionRm(p))
	return cmd
}

func newSessionCreate(p *command.Program) *cobra.Command {
	var (
		o   command.Output
		dir string
	)
	cmd := &cobra.Command{
		Use:   "create [flags] SANDBOX",
		Short: "Start a session and print its id",
		Example: `  sandboxctl command session create lab
  sandboxctl command session create -w /tmp lab`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			s, err := cl.Sessions(args[0]).Create(ctx, dir)
			if err != nil {
				return err
			}
			return o.One(s, s.SessionID)
		}),
	}
	o.Flags(cmd, false)
	cmd.Flags().StringVarP(&dir, "workdir", "w", "", "directory to start in, created if it is missing (default: the image's)")
	return cmd
}

func newSessionRun(p *command.Program) *cobra.Command {
	var line client.Line
	cmd := &cobra.Command{
		Use:   "run [flags] SANDBOX SESSION [--] COMMAND [ARG...]",
		Short: "Run a command in a session",
		Long: `Run a command in a session. A COMMAND without arguments is a line of shell code.
With arguments, each word is passed on unchanged.

The exit status is the command's, or 124 if it ran longer than --timeout. Ctrl-C and
--timeout end the command and the processes it has started. The session keeps running
and keeps its state.`,
		Example: `  sandboxctl command session run lab $s -- cd /usr
  sandboxctl command session run lab $s 'for f in s*; do echo "$f"; done'
  sandboxctl command session run --timeout 30s -w /tmp lab $s -- make test`,
		Args: cobra.MinimumNArgs(3),
	}
	cmd.RunE = p.Run(func(_ context.Context, cl *client.Client, args []string) error {
		if err := command.FlagsFirst(cmd, args[1:]); err != nil {
			return err
		}
		words := command.AfterDash(args[2:])
		if len(words) == 0 {
			return errs.New(errs.Invalid, "no command; example: %s %s %s -- pwd", cmd.CommandPath(), args[0], args[1])
		}
		if line.Timeout < 0 {
			return errs.New(errs.Invalid, "--timeout %s is negative", line.Timeout)
		}
		line.Shell = shellLine(words)
		return runLine(cl, args[0], args[1], line)
	})
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().StringVarP(&line.Dir, "workdir", "w", "", "working directory of this command only")
	command.DurationFlag(cmd.Flags(), &line.Timeout, "timeout", "", 0,
		"end the command after this time, such as 30s; the exit status is then 124")
	return cmd
}

// shellLine is a line that a shell reads as these words; one word is the line.
func shellLine(words []string) string {
	if len(words) == 1 {
		return words[0]
	}
	quoted := make([]string, len(words))
	for i, w := range words {
		quoted[i] = w
		if w == "" || strings.Trim(w, plainInShell) != "" {
			quoted[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
		}
	}
	return strings.Join(quoted, " ")
}

// plainInShell are the characters that mean themselves to a shell.
const plainInShell = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=:,./@%"

// runLine runs a line in a session to its end.
func runLine(cl *client.Client, sandbox, session string, line client.Line) error {
	j := foreground.Job{Client: cl, Signals: foreground.Catch(), Sandbox: sandbox}
	defer j.Signals.Stop()
	ctx := j.Signals.Context
	p, err := cl.Sessions(sandbox).Run(ctx, session, line)
	if err != nil && ctx.Err() != nil {
		return command.Status{Code: command.ExitInterrupted}
	}
	if err != nil {
		return err
	}
	exit, err := j.Wait(p, "The command keeps running without this client, and its session can be used again")
	switch {
	case err != nil:
		return err
	case exit.TimedOut:
		return command.Exit(command.ExitTimeout, "the command was ended: it ran longer than --timeout %s", line.Timeout)
	case exit.Error != "":
		return command.Exit(max(exit.Code, 1), "%s", text.Printable(exit.Error))
	case exit.Code != 0:
		return command.Status{Code: exit.Code, Text: foreground.LimitHint(exit)}
	}
	return nil
}

func newSessionRm(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:     "rm SANDBOX SESSION...",
		Aliases: []string{"delete"},
		Short:   "End sessions and the commands that run in them",
		Example: `  sandboxctl command session rm lab $s`,
		Args:    cobra.MinimumNArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			return command.Each(args[1:], func(id string) error { return cl.Sessions(args[0]).Remove(ctx, id) })
		}),
	}
}
