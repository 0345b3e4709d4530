package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// createFlags are the flags of create.
type createFlags struct {
	spec    spec
	output  command.Output
	timeout time.Duration
	noWait  bool
	from    string
	memory  bool
	secure  bool
	renew   string
	ofImage bool
	proxy   bool
}

func newCreate(p *command.Program) *cobra.Command {
	var o createFlags
	cmd := &cobra.Command{
		Use:   "create [flags] IMAGE [-- COMMAND [ARG...]]",
		Short: "Create a sandbox and print its id",
		Long: `Create a sandbox and print its id.

With a COMMAND the sandbox ends when the command ends. Without a COMMAND it runs until
its timeout or until it is removed. The ENTRYPOINT and CMD of the image are used only
with --image-command: then COMMAND, if given, takes the place of CMD. With --restart, a
sandbox that ends is started again. With --ready-port or --ready-cmd, create prints the
id when the sandbox is ready. With --idle, a sandbox that nobody uses is paused, stopped
or deleted (--on-idle).

With --from, the sandbox starts with the files of a snapshot, and IMAGE is left out: the
image is the snapshot's. Either runtime can use the snapshot.

With --with-memory, too, the programs in the memory of the snapshot run on in the new
sandbox, which has an id, address, host name, limits and network policy of its own. What
these programs have been given before, such as their environment, stays.`,
		Example: `  sandboxctl create python --name lab --memory 256Mi --timeout 30m
  sandboxctl create base --runtime runc --allow pypi.org:443 --allow '*.pythonhosted.org:443'
  sandboxctl create -p 8080:8000 python -- python3 -m http.server 8000
  sandboxctl create --idle 10m --name lab python
  sandboxctl create --restart on-failure:5 --ready-port 8000 python -- python3 -m http.server 8000
  sandboxctl create --timeout 10m --renew-on-access 600 --secure-access python
  sandboxctl create --credential-proxy --allow api.example.com:443 --name agent python
  sandboxctl create --from before-upgrade --name lab2
  sandboxctl create --from warmed-up --with-memory`,
		Args: func(cmd *cobra.Command, args []string) error {
			if o.memory && o.from == "" {
				return errors.New("--with-memory needs --from, a snapshot with memory")
			}
			if o.from == "" {
				return cobra.MinimumNArgs(1)(cmd, args)
			}
			if n := cmd.ArgsLenAtDash(); n > 0 || n < 0 && len(args) > 0 {
				return fmt.Errorf("%q and --from are both given; --from uses the image of the snapshot; put a command after --", args[0])
			}
			return nil
		},
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			if o.from != "" {
				return o.create(ctx, cl, "", args)
			}
			return o.create(ctx, cl, args[0], args[1:])
		}),
	}
	o.spec.flags(cmd)
	o.output.Flags(cmd, true)
	command.DurationFlag(cmd.Flags(), &o.timeout, "timeout", "", 0, "remove the sandbox after this time, such as 30m (default: never)")
	cmd.Flags().StringVar(&o.from, "from", "", "id or name of a snapshot to start from, instead of an image")
	cmd.Flags().BoolVar(&o.memory, "with-memory", false, "with --from: start with the memory of the snapshot, too; its programs run on")
	cmd.Flags().BoolVar(&o.secure, "secure-access", false,
		"require the token of a port even where the daemon serves other sandboxes' ports without one; see sandboxctl endpoint")
	cmd.Flags().BoolVar(&o.proxy, "credential-proxy", false,
		"let the sandbox have secrets that it never sees (sandboxctl secret) and rules about requests; it trusts a certificate authority "+
			"of its own for that")
	cmd.Flags().StringVar(&o.renew, "renew-on-access", "",
		"minimum time left after each request to a port and each command: 300 to 86400 seconds, or a duration such as 10m")
	cmd.Flags().BoolVar(&o.ofImage, "image-command", false, "run the ENTRYPOINT and CMD of the image, as sandboxctl run does")
	cmd.Flags().BoolVar(&o.noWait, "no-wait", false, "print the id at once, without waiting until the sandbox runs")
	return cmd
}

// create makes a sandbox of image, or of the snapshot that --from names.
func (o *createFlags) create(ctx context.Context, cl *client.Client, image string, args []string) error {
	r, err := o.spec.request(image)
	if err != nil {
		return err
	}
	if o.from != "" {
		r.Image, r.SnapshotID = nil, o.from
	}
	if o.memory {
		r.Extensions[wire.ExtMemory] = "true"
	}
	r.SecureAccess = o.secure
	if o.proxy {
		r.CredentialProxy = &wire.CredentialProxy{Enabled: true}
	}
	if err := renewOnAccess(o.renew, r.Extensions); err != nil {
		return err
	}
	r.Entrypoint, _ = o.spec.argv(args)
	if o.ofImage {
		if o.spec.given.Changed("entrypoint") {
			return errs.New(errs.Invalid,
				"--image-command uses the ENTRYPOINT of the image, and --entrypoint replaces it; leave one out")
		}
		r.Extensions[wire.ExtImageCommand] = "true"
	}
	if o.from == "" {
		if err := o.spec.fetch(ctx, cl, image, !o.noWait); err != nil {
			return err
		}
	}
	return createKept(ctx, cl, r, o.timeout, !o.noWait, o.output)
}

// renewOnAccess writes --renew-on-access, in seconds or as a duration, into
// extensions. The daemon says how much it may be.
func renewOnAccess(given string, extensions map[string]string) error {
	if given == "" {
		return nil
	}
	if _, err := strconv.Atoi(given); err != nil {
		d, err := time.ParseDuration(given)
		if err != nil || d%time.Second != 0 {
			return errs.New(errs.Invalid, "--renew-on-access %q: want whole seconds, such as 600 or 10m", text.Clip(given, 40))
		}
		given = strconv.FormatInt(int64(d/time.Second), 10)
	}
	extensions[wire.ExtRenew] = given
	return nil
}

// createKept makes a sandbox that stays and prints it; without an entrypoint, its own or
// the image's, it idles.
// A timeout of 0 is none.
func createKept(
	ctx context.Context, cl *client.Client, r wire.CreateRequest, timeout time.Duration, wait bool, o command.Output,
) error {
	if len(r.Entrypoint) == 0 && r.Extensions[wire.ExtImageCommand] == "" && r.Extensions[wire.ExtMemory] == "" {
		r.Extensions[wire.ExtIdle] = "true"
	}
	if len(r.Entrypoint) == 1 && strings.ContainsAny(r.Entrypoint[0], " \t\n") {
		r.Extensions[wire.ExtLiteral] = "true" // a shell has made these arguments
	}
	if timeout != 0 {
		r.Extensions[wire.ExtTimeout] = timeout.String()
	}
	sb, err := cl.Create(ctx, r, wait)
	if err != nil {
		return err
	}
	noted(sb)
	if err := o.One(sb, sb.ID); err != nil {
		return err
	}
	if sb.Status.State == wire.Failed {
		return notUp(sb, errs.New(errs.Internal,
			"sandbox %s failed (%s): %s; `sandboxctl inspect %s` shows what is left, `sandboxctl rm %s` removes it",
			sb.ID, sb.Status.Reason, sb.Status.Message, sb.ID, sb.ID))
	}
	if wait {
		return unready(sb)
	}
	return nil
}

// noted prints the notes of a sandbox.
func noted(sb wire.Sandbox) {
	if sb.Sandboxd == nil {
		return
	}
	for _, note := range sb.Sandboxd.Notes {
		command.Note(note)
	}
}

// notUp gives the failure of a sandbox whose entrypoint cannot be run the exit
// status that a shell and docker have for that: 127 if the entrypoint is not
// there, 126 if it is no program.
func notUp(sb wire.Sandbox, failed error) error {
	reason := sb.Status.Reason
	if sb.Sandboxd == nil || sb.Sandboxd.ExitCode == nil || reason != "create_failed" && reason != "start_failed" {
		return failed
	}
	if code := *sb.Sandboxd.ExitCode; code == command.ExitNotFound || code == command.ExitNotExec {
		return command.Status{Code: code, Text: text.Printable(failed.Error())}
	}
	return failed
}
