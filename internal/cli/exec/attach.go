package exec

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/foreground"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// scrollback is how many bytes of earlier output an attach shows: some screens.
const scrollback = 32 << 10

func newAttach(p *command.Program) *cobra.Command {
	var (
		keys     string
		takeover bool
		noStdin  bool
	)
	cmd := &cobra.Command{
		Use:   "attach [flags] SANDBOX [TERMINAL]",
		Short: "Attach to a terminal in a sandbox",
		Long: `Attach to a terminal that exec -it, run -it, shell or an API client has opened.
Without TERMINAL, attach to the terminal that runs. If several run, name one by
the beginning of its id. The exit status is that of the terminal's command.`,
		Example: `  sandboxctl attach lab`,
		Args:    cobra.RangeArgs(1, 2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			detach, err := foreground.ParseKeys(keys)
			if err != nil {
				return err
			}
			all, err := cl.Terminals(args[0]).List(ctx)
			if err != nil {
				return err
			}
			info, err := choose(all, args)
			if err != nil {
				return err
			}
			if info.Connected && !takeover {
				return errs.New(errs.WrongState, "another client is attached to terminal %.12s; use --takeover to detach it",
					info.SessionID)
			}
			v := client.View{
				Since: max(0, info.OutputOffset-scrollback), Takeover: takeover, Redraw: true, Pipe: info.Mode == "pipe", Err: os.Stderr,
			}
			if !noStdin && !v.Pipe && !command.IsTerminal(os.Stdin) {
				return errs.New(errs.Invalid, "the input device is not a TTY; see --no-stdin")
			}
			t, err := cl.Terminals(args[0]).Get(info.SessionID)
			if err != nil {
				return err
			}
			j := foreground.Job{Client: cl, Sandbox: args[0], Command: client.Command{Argv: []string{info.Command}}}
			return j.Attach(ctx, t, v, !noStdin, detach)
		}),
	}
	foreground.DetachKeysFlag(cmd, &keys)
	cmd.Flags().BoolVar(&takeover, "takeover", false, "detach the client that is attached")
	cmd.Flags().BoolVar(&noStdin, "no-stdin", false, "do not attach standard input, only show the output")
	return cmd
}

// choose finds the terminal that attach is asked for.
func choose(all []agent.PtyStatus, args []string) (agent.PtyStatus, error) {
	var found []agent.PtyStatus
	for _, t := range all {
		if len(args) == 1 && t.Running || len(args) == 2 && strings.HasPrefix(t.SessionID, args[1]) {
			found = append(found, t)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		all = found
	case len(args) == 1:
		return agent.PtyStatus{}, errs.New(errs.NotFound, "no terminal runs in sandbox %s; open one with `sandboxctl shell %s`",
			args[0], args[0])
	}
	var rows [][]string
	for _, t := range all {
		made, _ := time.Parse(time.RFC3339Nano, t.CreatedAt)
		rows = append(rows, []string{fmt.Sprintf("%.12s", t.SessionID), text.Clip(t.Command, 40), state(t), text.Ago(made)})
	}
	//nolint:errcheck // the error below says the main thing
	text.Table(os.Stderr, []string{"TERMINAL", "COMMAND", "STATE", "CREATED"}, rows)
	if len(args) == 2 && len(found) == 0 {
		return agent.PtyStatus{}, errs.New(errs.NotFound, "sandbox %s has no terminal %q; its terminals are listed above", args[0], args[1])
	}
	return agent.PtyStatus{}, errs.New(errs.Invalid, "sandbox %s has several terminals; give the id of one of those above", args[0])
}

func state(t agent.PtyStatus) string {
	switch {
	case t.ExitCode != nil:
		return "exited " + strconv.Itoa(*t.ExitCode)
	case !t.Running:
		return "not started"
	case t.Connected:
		return "attached"
	}
	return "detached"
}
