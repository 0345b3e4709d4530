package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newRun(c *cli) *cobra.Command {
	var (
		s      spec
		e      execFlags
		rm     bool
		detach bool
	)
	cmd := &cobra.Command{
		Use:   "run [flags] IMAGE [--] COMMAND [ARG...]",
		Short: "Run a command in a sandbox of its own, which is destroyed afterwards",
		Long: `Run a command in a sandbox of its own, which is destroyed afterwards.

The exit status is the command's; 124 if it ran into --timeout, 125 if
sandboxctl or the daemon failed, 126 or 127 if the command can not be run or
does not exist, 137 if it was killed (the reason is on stderr). Ctrl-C goes to
the command; a second one destroys the sandbox at once, a third does not even
wait for that.

With -it the command runs at this terminal, without one a shell does. The detach
keys leave the sandbox alone; it is destroyed a day later at the latest.

With -d the command is the entrypoint of a sandbox that stays: it runs as the
user and in the directory of the image, and sandboxctl logs shows what it says.
The sandbox is removed by --timeout or sandboxctl rm, also after its end.

If sandboxctl is killed, or is stopped (Ctrl-Z) or can not reach the daemon for
ten minutes, the sandbox goes by itself: it is made with a timeout that is
renewed while the command runs. With --rm=false it has none.`,
		Example: `  sandboxctl run python -- python3 -c 'print(6*7)'
  sandboxctl run --runtime runc --memory 256Mi base uname -a
  sandboxctl run -it base
  tar c . | sandboxctl run -i base -- sh -c 'tar x && ls'
  sandboxctl run -d --name web python -- python3 -m http.server 8000`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := flagsFirst(cmd, args); err != nil {
				return err
			}
			if err := e.check(); err != nil {
				return err
			}
			command := argv(s.entrypoint, args[1:])
			if len(command) == 0 && !e.tty {
				return errs.New(errs.Invalid, "no command: images here have none of their own; as in: sandboxctl run %s -- sh -c 'echo hello'", args[0])
			}
			r, err := s.request(args[0])
			if err != nil {
				return err
			}
			if detach {
				if err := e.checkEntrypoint(); err != nil {
					return err
				}
				if rm && cmd.Flags().Changed("rm") {
					return errs.New(errs.Invalid, "-d and --rm exclude one another: a sandbox whose entrypoint ended keeps its logs and its exit code until sandboxctl rm; leave --rm out and give --timeout to have it removed by itself")
				}
				return c.create(cmd.Context(), r, command, e.timeout, true, output{format: "table"})
			}
			return c.run(r, e, command, rm)
		},
	}
	cmd.Flags().SetInterspersed(false)
	s.flags(cmd)
	e.flags(cmd)
	cmd.Flags().BoolVar(&rm, "rm", true, "destroy the sandbox afterwards")
	cmd.Flags().BoolVarP(&detach, "detach", "d", false, "create the sandbox with the command as its entrypoint, print its id and keep it")
	return cmd
}

// cleanup bounds how long the end of a run may take.
const cleanup = 30 * time.Second

// run makes a sandbox, runs the command, and destroys the sandbox whatever
// happens. Three requests over one connection; the last begins the moment the
// exit status is known.
func (c *cli) run(r client.CreateRequest, e execFlags, command []string, rm bool) (err error) {
	cl, err := c.connect()
	if err != nil {
		return err
	}
	sig := catchSignals()
	defer sig.stop()
	r.Extensions[client.ExtIdle] = "true"
	if rm {
		r.Extensions[client.ExtOneShot] = "true"
		r.Extensions[client.ExtTimeout] = lease.String()
	}
	if rm {
		if r.Metadata == nil {
			r.Metadata = map[string]string{}
		}
		r.Metadata[runLabel] = rand.Text()
	}
	sb, err := cl.Create(sig.ctx, r, true)
	if err != nil && sig.ctx.Err() != nil {
		if rm {
			abandon(cl, r.Metadata[runLabel])
		}
		return status{code: 130}
	}
	if err != nil {
		return err
	}
	if rm {
		defer func() {
			ctx, cancel := context.WithTimeout(context.Background(), cleanup)
			defer cancel()
			if errors.Is(err, errDetached) {
				err = leave(ctx, cl, sb)
				return
			}
			derr := cl.Delete(ctx, sb.ID)
			if derr != nil && !errs.Is(derr, errs.NotFound) {
				err = errs.Wrap(derr, errs.Internal, "sandbox %s could not be destroyed; try `sandboxctl rm %s`", sb.ID, sb.ID)
			}
		}()
	}
	if sb.Status.State != client.Running {
		return errs.New(errs.Internal, "the sandbox failed (%s): %s", sb.Status.Reason, sb.Status.Message)
	}
	if err := unready(sb); err != nil {
		return err
	}
	if sig.pending() {
		return status{code: 130}
	}
	if rm && sb.ExpiresAt != nil {
		go keepLease(sig.ctx, cl, sb.ID, *sb.ExpiresAt, sb.ExpiresAt.Sub(sb.CreatedAt)/3)
	}
	// Env went to the sandbox, where all of its processes see it.
	if e.tty {
		return e.atTerminal(cl, sig, sb.ID, e.command(command, nil), func() int64 { return 0 })
	}
	return execute(cl, sig, sb.ID, e.command(command, nil), e.user, os.Stdin, func() int64 { return 0 })
}

// leave keeps the sandbox of a run for as long as a person may be away.
func leave(ctx context.Context, cl *client.Client, sb client.Sandbox) error {
	until := time.Now().Add(24 * time.Hour)
	if _, err := cl.Renew(ctx, sb.ID, until); err != nil { // the host allows less
		if now, err := cl.Get(ctx, sb.ID); err == nil && now.ExpiresAt != nil {
			until = *now.ExpiresAt
		}
	}
	fmt.Fprintf(os.Stderr, "sandboxctl: sandbox %s is destroyed at %s; see sandboxctl renew and sandboxctl rm\n", sb.ID, until.Format(time.DateTime))
	return nil
}

// runLabel carries a number of its own for each run, by which a sandbox is found
// again whose creation was interrupted: its id never arrived.
const runLabel = "sandboxctl.run"

// abandon destroys the sandbox of an interrupted creation. The daemon may still
// be writing it down, or have dropped it: it is looked for during two seconds.
func abandon(cl *client.Client, run string) {
	ctx, cancel := context.WithTimeout(context.Background(), cleanup)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for range 10 {
		found, err := cl.List(ctx, client.Filter{Metadata: map[string]string{runLabel: run}})
		if err != nil {
			complain(errs.Wrap(err, errs.Unavailable, "the sandbox that was being made could not be looked for, it may still be there; see `sandboxctl ps`"))
			return
		}
		for _, sb := range found {
			if err := cl.Delete(ctx, sb.ID); err != nil && !errs.Is(err, errs.NotFound) {
				complain(errs.Wrap(err, errs.Internal, "sandbox %s could not be destroyed; try `sandboxctl rm %s`", sb.ID, sb.ID))
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
// counts from the expiry that the daemon gave, not from the clock here, which
// may be another; but on that clock, not on Go's monotonic one, which a host
// that sleeps does not move. A renewal that fails is made up for by the next.
func keepLease(ctx context.Context, cl *client.Client, id string, expires time.Time, every time.Duration) {
	start := time.Now().Round(0)
	tick := time.NewTicker(max(every, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			cl.Renew(ctx, id, expires.Add(time.Now().Round(0).Sub(start))) //nolint:errcheck // see above; one that is gone ends the command too
		}
	}
}
