package sandbox

import (
	"context"
	"errors"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// spec is what run and create ask of a sandbox.
type spec struct {
	limits
	name, runtime, network string
	security               string
	shm, logSize           string
	logOpts                []string
	readOnly               bool
	tmpfs, volumes, mounts []string
	prestart               []string
	pool                   string
	env, envFiles, labels  []string
	publish                []string
	rules                  command.Rules
	policy                 string
	entrypoint             string
	hostname, pull         string
	stopSignal             string
	given                  *pflag.FlagSet
}

func (s *spec) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&s.name, "name", "", "name of the sandbox; commands accept it instead of the id")
	f.StringVar(&s.runtime, "runtime", "", "runsc (gVisor) or runc (shares the host's kernel; for code you half trust)")
	f.StringVar(&s.security, "security", "",
		"level of security: strict, default or compat, if the daemon's configuration allows it; inspect prints what differs (default: the "+
			"daemon's, or that of the snapshot if it is stricter)")
	s.given = f
	s.limits.flags(cmd)
	addHealthFlags(cmd)
	f.StringVar(&s.shm, "shm-size", "", "size of /dev/shm, which counts as memory (default 64Mi)")
	f.BoolVar(&s.readOnly, "read-only", false, "mount the root file system read-only")
	f.StringArrayVar(&s.tmpfs, "tmpfs", nil,
		"mount a tmpfs: PATH[:size=64m,mode=1777,exec] (default size: half the memory limit)")
	f.StringArrayVarP(&s.volumes, "volume", "v", nil,
		"mount a volume, NAME:/PATH[:ro], or a directory that the daemon's host allows, /HOST/PATH:/PATH[:ro]")
	f.StringArrayVar(&s.mounts, "mount", nil,
		"the same as --volume in docker's long form: type=volume|bind,source=X,target=/PATH[,readonly][,volume-subpath=DIR]")
	f.StringVar(&s.pool, "pool", "", "take a ready member of this pool (sandboxctl pool)")
	f.StringSliceVar(&s.prestart, "prestart", nil, "start the interpreters of these languages with the sandbox, for eval: python,bash")
	f.StringVar(&s.logSize, "log-max-size", "", "limit on the output that is kept of each command: 1Mi (default 16Mi)")
	f.StringArrayVar(&s.logOpts, "log-opt", nil, "max-size=SIZE, the same as --log-max-size (docker's name)")
	f.StringArrayVarP(&s.env, "env", "e", nil, "environment variable: NAME=VALUE, or NAME to pass on the local value")
	f.StringArrayVar(&s.envFiles, "env-file", nil, "file of environment variables, one NAME=VALUE a line")
	f.StringArrayVarP(&s.labels, "label", "l", nil, "label KEY=VALUE")
	f.StringVar(&s.network, "network", "", "network mode: none, rules (only what --allow permits) or open (any public address that no "+
		"--deny names)")
	f.StringVar(&s.network, "net", "", "the same as --network (docker's older name)")
	_ = f.MarkHidden("net")
	s.rules.Flags(f)
	f.StringVar(&s.policy, "policy", "", "network policy: NAME of a policy to follow (sandboxctl policy), NAME@VERSION to keep that "+
		"version, or a JSON file, {\"defaultAction\", \"egress\"}, - for standard input; --allow and --deny come before the rules of "+
		"a file")
	f.StringArrayVarP(&s.publish, "publish", "p", nil,
		"publish a TCP port of the sandbox on the host: [HOSTIP:]HOSTPORT:PORT (default HOSTIP: 127.0.0.1)")
	f.StringVar(&s.entrypoint, "entrypoint", "", "program to run instead of the image's ENTRYPOINT; COMMAND and ARG become its arguments")
	f.StringVarP(&s.hostname, "hostname", "h", "", "host name inside (default: the name of the sandbox, or its id)")
	f.Bool("help", false, "help for "+cmd.Name()) // cobra's own has -h, too, which is docker's for the host name
	cmd.SetFlagErrorFunc(flagError)
	f.StringVar(&s.stopSignal, "stop-signal", "", "signal that stop sends to the entrypoint (default: the image's STOPSIGNAL, or SIGTERM)")
	f.StringVar(&s.pull, "pull", pullMissing, "pull the image first: always, missing (only if it is not on the daemon's host) or never")
	command.Choices(cmd, "pull", pullAlways, pullMissing, pullNever)
	command.Choices(cmd, "runtime", "runsc", "runc")
	command.Choices(cmd, "security", "strict", "default", "compat")
	command.Choices(cmd, "prestart", agent.CodeLanguages...)
	command.Choices(cmd, "network", "none", "rules", "open")
}

// request makes the body of create, without an entrypoint.
func (s *spec) request(image string) (wire.CreateRequest, error) {
	r := wire.CreateRequest{
		Image: &wire.Image{URI: image}, ResourceLimits: map[string]string{}, Extensions: map[string]string{},
	}
	if err := s.into(r.ResourceLimits); err != nil {
		return r, err
	}
	logSize, err := s.logLimit()
	if err != nil {
		return r, err
	}
	set := func(m map[string]string, k, v string) {
		if v != "" {
			m[k] = v
		}
	}
	set(r.ResourceLimits, "shm", command.Size(s.shm))
	set(r.ResourceLimits, "logSize", command.Size(logSize))
	if s.readOnly {
		r.Extensions[wire.ExtReadOnly] = "true"
	}
	set(r.Extensions, wire.ExtPool, s.pool)
	set(r.Extensions, wire.ExtPrestart, strings.Join(s.prestart, ","))
	set(r.Extensions, wire.ExtTmpfs, strings.Join(s.tmpfs, ";"))
	set(r.Extensions, wire.ExtName, s.name)
	set(r.Extensions, wire.ExtHostname, s.hostname)
	set(r.Extensions, wire.ExtStopSignal, s.stopSignal)
	set(r.Extensions, wire.ExtRuntime, s.runtime)
	set(r.Extensions, wire.ExtSecurity, s.security)
	set(r.Extensions, wire.ExtNetwork, s.network)
	set(r.Extensions, wire.ExtPublish, strings.Join(s.publish, ","))
	if err := s.networkInto(&r); err != nil {
		return r, err
	}
	if err := healthExtensions(s.given, r.Extensions); err != nil {
		return r, err
	}
	if r.Volumes, err = mounts(s.volumes, s.mounts); err != nil {
		return r, err
	}
	if r.Env, err = command.Environment(s.env, s.envFiles); err != nil {
		return r, err
	}
	r.Metadata, err = pairs("--label", s.labels)
	return r, err
}

// networkInto puts what the sandbox may reach into a request.
func (s *spec) networkInto(r *wire.CreateRequest) (err error) {
	switch {
	case s.policy == "" && len(s.rules) == 0:
		return nil
	case s.policy == "":
		key, value := s.rules.Extension()
		r.Extensions[key] = value
		return nil
	case s.network != "":
		return errs.New(errs.Invalid, "--policy and --network exclude each other: the defaultAction of the policy is the mode")
	case !command.IsPolicyFile(s.policy) && len(s.rules) > 0:
		return errs.New(errs.Invalid, "--policy %s and --allow or --deny exclude each other: the sandbox follows the policy of that name "+
			"(a file is a path with a slash, or a name that ends in .json)", text.Clip(s.policy, 60))
	case !command.IsPolicyFile(s.policy):
		r.Extensions[wire.ExtPolicy] = s.policy
		return nil
	}
	r.NetworkPolicy, err = command.ReadPolicy(s.policy, s.rules)
	return err
}

// logLimit is --log-max-size, or docker's way to say it.
func (s *spec) logLimit() (string, error) {
	size := s.logSize
	for _, o := range s.logOpts {
		k, v, _ := strings.Cut(o, "=")
		if k != "max-size" || v == "" || size != "" {
			return "", errs.New(errs.Invalid, "--log-opt %q: want max-size=SIZE once, and without --log-max-size", text.Clip(o, 60))
		}
		size = v
	}
	return size, nil
}

// pairs reads KEY=VALUE arguments of a flag.
func pairs(flag string, list []string) (map[string]string, error) {
	m := map[string]string{}
	for _, s := range list {
		k, v, _ := strings.Cut(s, "=")
		if k == "" {
			return nil, errs.New(errs.Invalid, "%s %q: want KEY=VALUE", flag, text.Clip(s, 60))
		}
		m[k] = v
	}
	return m, nil
}

// When run and create pull the image: docker's values of --pull.
const (
	pullAlways  = "always"
	pullMissing = "missing" // the daemon does that by itself
	pullNever   = "never"
)

// fetch does what --pull says before the sandbox is created, and if show is set shows the
// progress on a terminal.
func (s *spec) fetch(ctx context.Context, cl *client.Client, image string, show bool) error {
	show = show && command.IsTerminal(os.Stderr)
	switch s.pull {
	case pullMissing:
		if !show {
			return nil
		}
		return pullShown(ctx, cl, image)
	case pullAlways:
		var bar command.Bar
		if show {
			bar.On = os.Stderr
		}
		_, err := cl.Images().Pull(ctx, image, nil, bar.Image)
		bar.Clear()
		if err != nil {
			if _, here := cl.Images().Inspect(ctx, image); here == nil {
				err = errs.Wrap(err, errs.CodeOf(err), "--pull always: %s. The image %s that is on the daemon's host was built, imported "+
					"or pulled before; leave out --pull to use it", strings.TrimSuffix(err.Error(), "."), image)
			}
		}
		return err
	case pullNever:
		_, err := cl.Images().Inspect(ctx, image)
		return err
	}
	return errs.New(errs.Invalid, "--pull %q: want always, missing or never", text.Clip(s.pull, 20))
}

// argv is what runs as the flags and the words after the image say, and whether these
// are only arguments of the image's own command.
func (s *spec) argv(rest []string) (argv []string, ofImage bool) {
	rest = command.AfterDash(rest)
	switch {
	case s.entrypoint != "":
		return append([]string{s.entrypoint}, rest...), false
	case s.given.Changed("entrypoint"): // docker's way to leave out ENTRYPOINT
		return rest, false
	}
	return rest, true
}

// flagError explains what comes of docker's habits: -h alone asks for help, and create wants "--" before a command.
func flagError(cmd *cobra.Command, err error) error {
	if missing, ok := errors.AsType[*pflag.ValueRequiredError](err); ok && missing.GetSpecifiedName() == "h" {
		return pflag.ErrHelp
	}
	unknown, ok := errors.AsType[*pflag.NotExistError](err)
	if args := cmd.Flags().Args(); ok && len(args) > 1 {
		return errs.New(errs.Invalid, "%s; if it belongs to the command that begins with %s, write %s [flags] %s -- %s …", unknown,
			text.Clip(args[1], 40), cmd.CommandPath(), text.Clip(args[0], 60), text.Clip(args[1], 40))
	}
	return cmd.Parent().FlagErrorFunc()(cmd, err)
}
