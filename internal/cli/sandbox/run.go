package sandbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/foreground"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// runFlags are the flags of run.
type runFlags struct {
	spec       spec
	foreground foreground.Flags
	rm         bool
	detach     bool
}

func newRun(p *command.Program) *cobra.Command {
	var o runFlags
	cmd := &cobra.Command{
		Use:   "run [flags] IMAGE [--] [COMMAND [ARG...]]",
		Short: "Run a command in a new sandbox and remove the sandbox afterwards",
		Long: `Run a command in a new sandbox and remove the sandbox afterwards.

As with docker, the ENTRYPOINT of the image comes before COMMAND, and without COMMAND
the CMD of the image is run. --entrypoint replaces both; --entrypoint '' leaves out
ENTRYPOINT.

The exit status is the command's, or

  124  the command ran longer than --timeout
  125  sandboxctl or the daemon failed
  126  the command cannot be run
  127  the command does not exist
  137  the command was killed; the reason is on standard error

Ctrl-C goes to the command. A second Ctrl-C removes the sandbox at once. A third
does not wait until it is removed.

With -it the command runs at this terminal. Without a command, and if the image has
none, a shell runs. The detach keys leave the sandbox running. The daemon removes it a
day later at the latest.

With -d the command is the entrypoint of a sandbox that stays. It runs as the image's
user in the image's directory, and sandboxctl logs prints its output. --timeout or
sandboxctl rm removes the sandbox, even after the command has ended.

Without -d the sandbox has a timeout, which sandboxctl renews while the command runs.
If sandboxctl is killed, or is stopped (Ctrl-Z) or cannot reach the daemon for ten
minutes, the sandbox is removed when the timeout ends. When the daemon is restarted, the
command keeps running. sandboxctl waits for the daemon, and the output goes on where it
was; Ctrl-C ends the waiting.

With --rm=false the sandbox is stopped when the command has ended, and kept: sandboxctl
start runs it again, sandboxctl rm removes it. It has no timeout.`,
		Example: `  sandboxctl run python -- python3 -c 'print(6*7)'
  sandboxctl run --runtime runc --memory 256Mi base uname -a
  sandboxctl run -it base
  tar c . | sandboxctl run -i base -- sh -c 'tar x && ls'
  sandboxctl run -d --name web python -- python3 -m http.server 8000`,
		Args: cobra.MinimumNArgs(1),
	}
	cmd.RunE = p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
		if err := command.FlagsFirst(cmd, args); err != nil && !takesFlags(ctx, cl, &o.spec, args[0]) {
			return err
		}
		return o.run(ctx, cl, args[0], args[1:])
	})
	cmd.Flags().SetInterspersed(false)
	o.spec.flags(cmd)
	o.foreground.Add(cmd)
	cmd.Flags().BoolVar(&o.rm, "rm", true, "remove the sandbox afterwards; --rm=false stops it and keeps it")
	cmd.Flags().BoolVarP(&o.detach, "detach", "d", false,
		"run the command in the background as the entrypoint of a sandbox that stays, and print the sandbox's id")
	return cmd
}

func (o *runFlags) run(ctx context.Context, cl *client.Client, image string, args []string) error {
	s, f := &o.spec, o.foreground
	if err := f.Check(); err != nil {
		return err
	}
	argv, ofImage := s.argv(args)
	if len(argv) == 0 && !ofImage && !f.TTY {
		return noCommand(image)
	}
	r, err := s.request(image)
	if err != nil {
		return err
	}
	if o.detach {
		if err := checkEntrypoint(f); err != nil {
			return err
		}
		if o.rm && s.given.Changed("rm") {
			return errs.New(errs.Invalid, "-d and --rm exclude each other: a sandbox whose entrypoint ended keeps its logs and "+
				"its exit code until sandboxctl rm; leave out --rm and use --timeout to have it removed automatically")
		}
	}
	if err := s.fetch(ctx, cl, image, true); err != nil {
		return err
	}
	if !o.detach {
		return runOnce(cl, r, f, argv, ofImage, o.rm)
	}
	r.Entrypoint = argv
	if ofImage {
		r.Extensions[wire.ExtImageCommand] = "true"
	}
	return createKept(ctx, cl, r, f.Timeout, true, command.Output{Format: command.Table})
}

// takesFlags reports whether words behind the image are arguments of a program: of --entrypoint, or of the image's own.
func takesFlags(ctx context.Context, cl *client.Client, s *spec, image string) bool {
	if s.entrypoint != "" {
		return true
	}
	i, err := cl.Images().Inspect(ctx, image)
	return err != nil || len(i.Entrypoint) > 0 // one that is not here yet may have an ENTRYPOINT
}

func noCommand(image string) error {
	return errs.New(errs.Invalid,
		"no command, and image %s has neither ENTRYPOINT nor CMD; example: sandboxctl run %s -- sh -c 'echo hello'",
		image, image)
}

// checkEntrypoint refuses flags that a command can have and an entrypoint
// cannot: a create request says neither who runs the entrypoint, nor where, and
// nobody is connected to it.
func checkEntrypoint(f foreground.Flags) error {
	switch {
	case f.TTY:
		return errs.New(errs.Invalid, "-d and -t exclude each other: an entrypoint has no terminal; "+
			"create the sandbox and use sandboxctl shell")
	case f.Interactive:
		return errs.New(errs.Invalid, "-d and -i exclude each other: an entrypoint has no standard input; "+
			"create the sandbox and use sandboxctl exec -i, or copy the input into a file with sandboxctl cp")
	case f.User != "":
		return errs.New(errs.Invalid, "-d and -u exclude each other: an entrypoint runs as the image's user; "+
			"create the sandbox and use sandboxctl exec -d -u %s", f.User)
	case f.Workdir != "":
		return errs.New(errs.Invalid, "-d and -w exclude each other: an entrypoint runs in the image's directory; "+
			"create the sandbox and use sandboxctl exec -d -w %s", f.Workdir)
	}
	return nil
}

// cleanup bounds how long the end of a run may take.
const cleanup = 30 * time.Second

// runOnce makes a sandbox, runs the command, or if ofImage is set the image's with argv
// as its arguments, and then destroys the sandbox, or without rm stops it, whatever
// happens. That takes three requests over one connection; the last begins the moment the
// exit status is known.
func runOnce(cl *client.Client, r wire.CreateRequest, f foreground.Flags, argv []string, ofImage, rm bool) (err error) {
	sig := foreground.Catch()
	defer sig.Stop()
	r.Extensions[wire.ExtIdle] = "true"
	if rm {
		r.Extensions[wire.ExtOneShot] = "true"
		r.Extensions[wire.ExtTimeout] = lease.String()
		if r.Metadata == nil {
			r.Metadata = map[string]string{}
		}
		r.Metadata[runLabel] = rand.Text()
	}
	sb, err := cl.Create(sig.Context, r, true)
	if err != nil && sig.Context.Err() != nil {
		if rm {
			abandon(cl, r.Metadata[runLabel])
		}
		return command.Status{Code: command.ExitInterrupted}
	}
	if err != nil {
		return err
	}
	defer func() { err = finish(cl, sig, sb, rm, err) }()
	noted(sb)
	if sb.Status.State != wire.Running {
		return errs.New(errs.Internal, "the sandbox failed (%s): %s", sb.Status.Reason, sb.Status.Message)
	}
	if err := unready(sb); err != nil {
		return err
	}
	if ofImage {
		argv = imageCommand(sb, argv)
	}
	if len(argv) == 0 && !f.TTY {
		if rm {
			return noCommand(r.Image.URI)
		}
		return errors.Join(noCommand(r.Image.URI), cl.Delete(sig.Context, sb.ID)) // nothing ran: there is nothing to keep
	}
	if sig.Pending() {
		return command.Status{Code: command.ExitInterrupted}
	}
	if rm && sb.ExpiresAt != nil {
		go keepLease(sig.Context, cl, sb.ID, *sb.ExpiresAt, sb.ExpiresAt.Sub(sb.CreatedAt)/3)
	}
	return f.Run(foreground.Job{
		Client: cl, Signals: sig, Sandbox: sb.ID,
		Command: f.Command(argv, nil), // the environment went to the sandbox, where all of its processes see it
		User:    f.User, OOMs: func() int64 { return 0 },
	})
}

// finish removes the sandbox of a run that ended with err, or without rm stops it. A
// sandbox that somebody has detached from runs on. A daemon that is away is waited for,
// unless the run was interrupted.
func finish(cl *client.Client, sig *foreground.Signals, sb wire.Sandbox, rm bool, err error) error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanup)
	defer cancel()
	try := func(f func(ctx context.Context) error) error {
		if sig.Context.Err() != nil {
			return f(ctx)
		}
		return cl.Persist(sig.Context, sig.Notices(), func() error {
			ctx, cancel := context.WithTimeout(context.Background(), cleanup)
			defer cancel()
			return f(ctx)
		})
	}
	detached := errors.Is(err, foreground.ErrDetached)
	switch {
	case detached && rm:
		return leave(ctx, cl, sb)
	case detached:
	case rm:
		derr := try(func(ctx context.Context) error { return cl.Delete(ctx, sb.ID) })
		if derr != nil && !errs.Is(derr, errs.NotFound) {
			return notDestroyed(derr, sb.ID)
		}
	default:
		serr := try(func(ctx context.Context) error { return cl.Stop(ctx, sb.ID, 0) })
		if serr != nil && !errs.Is(serr, errs.NotFound) && !errs.Is(serr, errs.WrongState) { // it has ended by itself
			return errs.Wrap(serr, errs.Internal, "sandbox %s could not be stopped and runs on; try `sandboxctl stop %s`", sb.ID, sb.ID)
		}
	}
	return err
}

// imageCommand is what the image of a sandbox runs with these arguments.
func imageCommand(sb wire.Sandbox, args []string) []string {
	if sb.Sandboxd == nil {
		return args
	}
	if len(args) == 0 {
		args = sb.Sandboxd.ImageCmd
	}
	return slices.Concat(sb.Sandboxd.ImageEntrypoint, args)
}

func notDestroyed(err error, id string) error {
	return errs.Wrap(err, errs.Internal, "sandbox %s could not be removed; try `sandboxctl rm %s`", id, id)
}

// leave keeps the sandbox of a run for as long as a person may be away.
func leave(ctx context.Context, cl *client.Client, sb wire.Sandbox) error {
	until := time.Now().Add(24 * time.Hour)
	if _, err := cl.Renew(ctx, sb.ID, until); err != nil { // the host allows less
		if now, err := cl.Get(ctx, sb.ID); err == nil && now.ExpiresAt != nil {
			until = *now.ExpiresAt
		}
	}
	fmt.Fprintf(os.Stderr, "sandboxctl: sandbox %s will be removed at %s; see sandboxctl renew and sandboxctl rm\n",
		sb.ID, until.Format(time.DateTime))
	return nil
}

// runLabel has a random value for each run. If the creation of a sandbox is
// interrupted, its id never arrives, and it is found by this label.
const runLabel = "sandboxctl.run"

// abandon destroys the sandbox of an interrupted creation. The daemon may still
// be recording it, or have dropped it, so we look for it for two seconds.
func abandon(cl *client.Client, run string) {
	ctx, cancel := context.WithTimeout(context.Background(), cleanup)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for range 10 {
		found, err := cl.List(ctx, client.Filter{Metadata: map[string]string{runLabel: run}})
		if err != nil {
			command.Complain(errs.Wrap(err, errs.Unavailable,
				"cannot look for the sandbox that was being created; it may still exist: see `sandboxctl ps`"))
			return
		}
		for _, sb := range found {
			if err := cl.Delete(ctx, sb.ID); err != nil && !errs.Is(err, errs.NotFound) {
				command.Complain(notDestroyed(err, sb.ID))
			}
		}
		if len(found) > 0 {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// lease is the timeout of a run's sandbox, so that it does not outlive a
// sandboxctl that was killed. A host may allow less.
const lease = 10 * time.Minute

// keepLease moves the expiry of a sandbox as time passes, until ctx ends. It
// starts from the expiry that the daemon gave, because the clock here may differ,
// and adds the time that passes on the wall clock here, because Go's monotonic
// clock stops while the host sleeps. A renewal that fails is made up for by the
// next.
func keepLease(ctx context.Context, cl *client.Client, id string, expires time.Time, every time.Duration) {
	start := time.Now().Round(0)
	tick := time.NewTicker(max(every, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			//nolint:errcheck // see above; if the sandbox is gone, the command ends too
			cl.Renew(ctx, id, expires.Add(time.Now().Round(0).Sub(start)))
		}
	}
}
