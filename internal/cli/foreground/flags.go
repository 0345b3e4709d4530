package foreground

import (
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Flags are how a command is run, as the flags of run, exec and shell say.
type Flags struct {
	Workdir, User    string
	Interactive, TTY bool
	Timeout          time.Duration
	DetachKeys       string
}

// Add adds the flags to cmd.
func (e *Flags) Add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVarP(&e.Workdir, "workdir", "w", "", "working directory (default: the image's)")
	f.StringVarP(&e.User, "user", "u", "", "user to run as, NAME|UID[:GROUP|GID] (default: the image's)")
	f.BoolVarP(&e.Interactive, "interactive", "i", false, "pass standard input to the command")
	f.BoolVarP(&e.TTY, "tty", "t", false, "allocate a terminal for the command; -it connects it to this one")
	command.DurationFlag(f, &e.Timeout, "timeout", "", 0, "kill the command after this time, such as 30s; the exit status is then 124")
	DetachKeysFlag(cmd, &e.DetachKeys)
}

// Check refuses flags that cannot be obeyed.
func (e *Flags) Check() error {
	if e.TTY && e.Interactive && !command.IsTerminal(os.Stdin) {
		return errs.New(errs.Invalid, "the input device is not a TTY; leave out -t to pass a file or a pipe on")
	}
	if e.Timeout < 0 {
		return errs.New(errs.Invalid, "--timeout %s is negative", e.Timeout)
	}
	return nil
}

// Command is what the daemon is asked to run.
func (e *Flags) Command(argv []string, env map[string]string) client.Command {
	return client.Command{Argv: argv, Dir: e.Workdir, Env: env, Timeout: e.Timeout, Stdin: e.Interactive}
}

// Run runs a job to its end, at this terminal if the flags say so. An error may
// be a command.Status with the exit status of the job.
func (e *Flags) Run(j Job) error {
	if e.TTY {
		return e.atTerminal(j)
	}
	return j.execute(os.Stdin)
}
