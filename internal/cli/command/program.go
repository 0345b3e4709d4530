// Package command is what the commands of sandboxctl have in common. A command
// is declared as
//
//	var o command.Output
//	cmd := &cobra.Command{
//		Use: …, Short: …, Example: …, // its texts
//		Args: cobra.ExactArgs(1),
//		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
//			…
//			return o.One(v, v.ID)
//		}),
//	}
//	o.Flags(cmd, true)
//
// and needs no more than that: its arguments and its -o are checked before it
// runs (Prepare, Output), the client is made for it (Run), its arguments are
// completed by the words of its usage line (complete.go), and its error is
// printed and becomes the exit status of the process (Execute).
package command

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sandboxd/sandboxd/internal/cli/group"
	"github.com/sandboxd/sandboxd/internal/cli/words"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A Program is one run of sandboxctl.
type Program struct {
	Version string // of this program

	host   string // the flag --host; empty: from the environment
	key    string
	client *client.Client
}

// New returns the Program of this version.
func New(version string) *Program {
	return &Program{Version: version, key: os.Getenv("OPEN_SANDBOX_API_KEY")}
}

// Prepare completes root and the commands below it: it adds --version, the flag that
// names the daemon, errors that say how a command is used, and completion.
func (p *Program) Prepare(root *cobra.Command) {
	root.SilenceErrors, root.SilenceUsage = true, true
	root.Version = p.Version // --version
	root.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	root.PersistentFlags().StringVarP(&p.host, "host", "H", "", "daemon to connect to: unix:///path, tcp://host:port or an http(s) URL "+
		"(default $SANDBOXD_HOST; for a private CA set $SSL_CERT_FILE)")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return errs.New(errs.Invalid, "%s; see `%s --help`", err, cmd.CommandPath())
	})
	completeInBash(root)
	p.complete(root)
	words.Prepare(root)
	for _, cmd := range root.Commands() {
		explainArgs(cmd)
	}
}

// Execute runs the command that args name and returns the exit status of the
// process. Its error, if any, goes to standard error.
func Execute(root *cobra.Command, args []string) int {
	// One Ctrl-C ends commands that do not handle signals themselves, as run and exec do.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	group.Strict(root)
	args, err := words.Line(args)
	if err == nil {
		root.SetArgs(args)
		err = root.ExecuteContext(ctx)
	}
	if err == nil {
		return 0
	}
	if s, ok := errors.AsType[Status](err); ok {
		if s.Text != "" {
			say(s.Text)
		}
		return s.Code
	}
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return ExitInterrupted
	}
	Complain(err)
	return ExitFailed
}

// Client returns the client of the daemon, which it makes the first time. Nothing
// is sent yet: an error means that the address is wrong.
func (p *Program) Client() (*client.Client, error) {
	if p.client != nil {
		return p.client, nil
	}
	var err error
	if p.host == "" {
		p.client, err = client.FromEnv()
	} else {
		p.client, err = client.New(p.host, p.key)
	}
	return p.client, err
}

// An Action is what a command does. ctx ends with the first SIGINT, SIGTERM or
// SIGHUP.
type Action func(ctx context.Context, cl *client.Client, args []string) error

// Run returns the function that cobra runs for a command that does f.
func (p *Program) Run(f Action) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		cl, err := p.Client()
		if err != nil {
			return err
		}
		return f(cmd.Context(), cl, args)
	}
}

// explainArgs makes the error about a wrong number of arguments say what is wanted.
func explainArgs(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		explainArgs(sub)
	}
	check := cmd.Args
	if check == nil {
		return
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return errs.New(errs.Invalid, "%s; usage: %s", err, strings.TrimSpace(cmd.UseLine()))
		}
		return nil
	}
}

// IsTerminal reports whether f is a terminal.
func IsTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }
