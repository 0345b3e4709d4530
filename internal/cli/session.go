package cli

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newSession(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "session",
		Short: "Run commands in a shell that remembers, one after the other",
		Long: `Run commands in a shell of a sandbox that remembers, one after the other: its
variables, functions, directory and background jobs are there for the next
command. It needs no terminal, and outlives this client and the daemon.`,
		Example: `  s=$(sandboxctl command session create lab)
  sandboxctl command session run lab $s -- cd /usr
  sandboxctl command session run lab $s 'A=$(ls | wc -l); echo $A'
  sandboxctl command session rm lab $s`,
	}
	cmd.AddCommand(newSessionCreate(c), newSessionRun(c), newSessionRm(c))
	return cmd
}

func newSessionCreate(c *cli) *cobra.Command {
	var (
		o   output
		dir string
	)
	cmd := &cobra.Command{
		Use:   "create [flags] SANDBOX",
		Short: "Start a shell and print its id",
		Example: `  sandboxctl command session create lab
  sandboxctl command session create -w /tmp lab`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			s, err := cl.NewSession(cmd.Context(), args[0], dir)
			if err != nil {
				return err
			}
			if o.format == "json" {
				return printJSON(os.Stdout, s)
			}
			_, err = fmt.Println(printable(s.SessionID, false))
			return err
		},
	}
	o.flags(cmd, false)
	cmd.Flags().StringVarP(&dir, "workdir", "w", "", "directory it starts in, made if it is missing (default: the image's)")
	return cmd
}

func newSessionRun(c *cli) *cobra.Command {
	var line client.Line
	cmd := &cobra.Command{
		Use:   "run [flags] SANDBOX SESSION [--] COMMAND [ARG...]",
		Short: "Run a command in a session",
		Long: `Run a command in a session. A COMMAND without arguments is a line for the shell;
with arguments each word is passed on as it is here.

The exit status is the command's, 124 if it ran into --timeout. Ctrl-C and
--timeout end the command and what it has started; the session lives on with
what it had.`,
		Example: `  sandboxctl command session run lab $s -- cd /usr
  sandboxctl command session run lab $s 'for f in s*; do echo "$f"; done'
  sandboxctl command session run --timeout 30s -w /tmp lab $s -- make test`,
		Args: cobra.MinimumNArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := flagsFirst(cmd, args[1:]); err != nil {
				return err
			}
			words := afterDash(args[2:])
			if len(words) == 0 {
				return errs.New(errs.Invalid, "no command; as in: %s %s %s -- pwd", cmd.CommandPath(), args[0], args[1])
			}
			if line.Timeout < 0 {
				return errs.New(errs.Invalid, "--timeout %s is negative", line.Timeout)
			}
			line.Shell = shellLine(words)
			cl, err := c.connect()
			if err != nil {
				return err
			}
			return runLine(cl, args[0], args[1], line)
		},
	}
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().StringVarP(&line.Dir, "workdir", "w", "", "directory of this command only")
	cmd.Flags().DurationVar(&line.Timeout, "timeout", 0, "end the command after this time, as 30s; the exit status is 124 then")
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
	sig := catchSignals()
	defer sig.stop()
	p, err := cl.RunInSession(sig.ctx, sandbox, session, line)
	if err != nil && sig.ctx.Err() != nil {
		return status{code: 130}
	}
	if err != nil {
		return err
	}
	sig.to(p)
	exit, err := attend(cl, sig, sandbox, p, "The command goes on without this client, and its session can be used again")
	switch {
	case err != nil:
		return err
	case exit.TimedOut:
		return status{exitTimeout, fmt.Sprintf("the command was ended: it ran longer than --timeout %s", line.Timeout)}
	case exit.Error != "":
		return status{max(exit.Code, 1), printable(exit.Error, false)}
	case exit.Code != 0:
		return status{exit.Code, limitHint(exit)}
	}
	return nil
}

func newSessionRm(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:     "rm SANDBOX SESSION...",
		Aliases: []string{"delete"},
		Short:   "End sessions, and what runs in them",
		Example: `  sandboxctl command session rm lab $s`,
		Args:    cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := c.connect()
			if err != nil {
				return err
			}
			return each(args[1:], func(id string) error {
				if err := cl.RemoveSession(cmd.Context(), args[0], id); err != nil {
					return err
				}
				_, err := fmt.Println(id)
				return err
			})
		},
	}
}
