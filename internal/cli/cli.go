// Package cli is the command line of sandboxd: what `sandboxctl` does.
package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// The exit statuses that docker, env(1) and timeout(1) have made customary.
const (
	exitTool     = 125 // sandboxctl or the daemon failed
	exitTimeout  = 124
	exitNotExec  = 126
	exitNotFound = 127
	exitKilled   = 137
)

// status is an exit status that is not a failure of sandboxctl; text, if any,
// goes to stderr.
type status struct {
	code int
	text string
}

func (s status) Error() string { return s.text }

// Run runs the command that args name, and returns the exit status of the
// process. version is that of this program.
func Run(version string, args []string) int {
	// The one Ctrl-C ends what takes no care of signals itself (run and exec do).
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	root := newRoot(version)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if s, ok := errors.AsType[status](err); ok {
		if s.text != "" {
			fmt.Fprintln(os.Stderr, "sandboxctl:", s.text)
		}
		return s.code
	}
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		return 130
	}
	complain(err)
	return exitTool
}

// complain prints what a person can use of an error: its text, not its cause.
func complain(err error) {
	text := strings.TrimSpace(strings.ReplaceAll(err.Error(), "\t", "  ")) // cobra's suggestions
	if e, ok := errors.AsType[*errs.Error](err); ok {
		text = e.Text
	}
	fmt.Fprintln(os.Stderr, "sandboxctl:", printable(text, true))
}

// cli is what every command needs.
type cli struct {
	version   string // of this program
	host, key string
	client    *client.Client
}

// connect makes the client, once; nothing is sent yet.
func (c *cli) connect() (*client.Client, error) {
	if c.client != nil {
		return c.client, nil
	}
	var err error
	if c.host == "" {
		c.client, err = client.FromEnv()
	} else {
		c.client, err = client.New(c.host, c.key)
	}
	return c.client, err
}

func newRoot(version string) *cobra.Command {
	c := &cli{version: version, key: os.Getenv("OPEN_SANDBOX_API_KEY")}
	root := &cobra.Command{
		Use:   "sandboxctl",
		Short: "Run untrusted code in sandboxes of sandboxd",
		Example: `  sandboxctl run python -- python3 -c 'print(6*7)'
  sandboxctl create python --name lab --memory 256Mi --timeout 30m
  sandboxctl exec lab -- uname -a
  sandboxctl shell lab
  sandboxctl rm lab`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.PersistentFlags().StringVarP(&c.host, "host", "H", "", "daemon to talk to: unix:///path, tcp://host:port or an http(s) URL (default $SANDBOXD_HOST; $SSL_CERT_FILE names the CA of its own certificate)")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return errs.New(errs.Invalid, "%s; see `%s --help`", err, cmd.CommandPath())
	})
	root.AddCommand(
		newRun(c), newCreate(c), newPs(c), newExec(c), newCommand(c), newLogs(c),
		newCp(c), newStats(c), newInspect(c), newPause(c), newResume(c), newRenew(c),
		newUpdate(c), newRm(c), newEvents(c), newImage(c), newBench(c), newVersion(c),
		newTop(c), newShell(c), newAttach(c), newSystem(c), newStart(c), newStop(c),
		newSnapshot(c), newDiff(c), newKey(c), newEval(c), newCode(c),
		newEndpoint(c), newPort(c), newVolume(c), newEgress(c),
		newDiagnostics(c),
	)
	complete(c, root)
	for _, cmd := range root.Commands() {
		explainArgs(cmd)
	}
	return root
}

// explainArgs lets a wrong number of arguments say what is wanted.
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

// each does f for every argument, says what failed, and fails if any did.
func each(args []string, f func(string) error) error {
	var last error
	for _, a := range args {
		if err := f(a); err != nil {
			if last != nil {
				complain(last)
			}
			last = err
		}
	}
	return last
}
