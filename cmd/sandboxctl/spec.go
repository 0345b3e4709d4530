package main

import (
	"bufio"
	"os"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// spec is what run and create ask of a sandbox.
type spec struct {
	name, runtime, network  string
	memory, cpu, cpus, disk string
	pids, pidsLimit         int64
	env, envFiles, labels   []string
	allow                   []string
	entrypoint              string
}

func (s *spec) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&s.name, "name", "", "name of the sandbox, accepted wherever its id is")
	f.StringVar(&s.runtime, "runtime", "", "runsc (gVisor) or runc (shares the host's kernel: for code you half trust)")
	f.StringVarP(&s.memory, "memory", "m", "", "memory limit: 256Mi, 1Gi; docker's 256m and 1g mean the same")
	f.StringVar(&s.cpu, "cpu", "", "CPU limit: 500m, 0.5 or 2")
	f.StringVar(&s.cpus, "cpus", "", "CPU limit in cores, as docker's")
	f.Int64Var(&s.pids, "pids", 0, "limit of processes and threads")
	f.Int64Var(&s.pidsLimit, "pids-limit", 0, "the same, as docker's")
	f.StringVar(&s.disk, "disk", "", "limit of what the sandbox may write: 1Gi")
	f.StringArrayVarP(&s.env, "env", "e", nil, "environment variable NAME=VALUE, or NAME to pass it on")
	f.StringArrayVar(&s.envFiles, "env-file", nil, "file of NAME=VALUE lines")
	f.StringArrayVarP(&s.labels, "label", "l", nil, "label KEY=VALUE")
	f.StringVar(&s.network, "network", "", "none, rules (what --allow says) or open (any public address)")
	f.StringArrayVar(&s.allow, "allow", nil, "allow flows to CIDR[:port[/proto]], as 203.0.113.0/24:443")
	f.StringVar(&s.entrypoint, "entrypoint", "", "program that comes before the arguments")
	_ = cmd.RegisterFlagCompletionFunc("runtime", cobra.FixedCompletions([]string{"runsc", "runc"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("network", cobra.FixedCompletions([]string{"none", "rules", "open"}, cobra.ShellCompDirectiveNoFileComp))
}

// request makes the body of create, without an entrypoint.
func (s *spec) request(image string) (client.CreateRequest, error) {
	r := client.CreateRequest{
		Image: &client.Image{URI: image}, ResourceLimits: map[string]string{}, Extensions: map[string]string{},
	}
	if s.cpu != "" && s.cpus != "" || s.pids != 0 && s.pidsLimit != 0 {
		return r, errs.New(errs.Invalid, "--cpu and --cpus, and --pids and --pids-limit, are the same; give one of them")
	}
	set := func(m map[string]string, k, v string) {
		if v != "" {
			m[k] = v
		}
	}
	set(r.ResourceLimits, "memory", dockerSize(s.memory))
	set(r.ResourceLimits, "disk", dockerSize(s.disk))
	set(r.ResourceLimits, "cpu", s.cpu+s.cpus)
	if n := s.pids + s.pidsLimit; n != 0 {
		r.ResourceLimits["pids"] = strconv.FormatInt(n, 10)
	}
	set(r.Extensions, client.ExtName, s.name)
	set(r.Extensions, client.ExtRuntime, s.runtime)
	set(r.Extensions, client.ExtNetwork, s.network)
	set(r.Extensions, client.ExtAllow, strings.Join(s.allow, ","))
	var err error
	if r.Env, err = environment(s.env, s.envFiles); err != nil {
		return r, err
	}
	r.Metadata, err = pairs("--label", s.labels)
	return r, err
}

var dockerForm = regexp.MustCompile(`^([0-9]+)([kmgtKMGT])[bB]?$`)

// dockerSize turns docker's 256m, which is 2^28 bytes there, into 256Mi: to
// the API 256m is OpenSandbox's 256·10^6. All else goes as it is.
func dockerSize(s string) string {
	if m := dockerForm.FindStringSubmatch(s); m != nil {
		return m[1] + strings.ToUpper(m[2]) + "i"
	}
	return s
}

// environment reads --env-file and then --env, as docker does.
func environment(list, files []string) (map[string]*string, error) {
	env := map[string]*string{}
	add := func(where, line string) error {
		k, v, ok := strings.Cut(line, "=")
		if k == "" {
			return errs.New(errs.Invalid, "%s: %q is no NAME=VALUE", where, clip(line, 60))
		}
		if !ok {
			if v, ok = os.LookupEnv(k); !ok {
				return nil // docker leaves out what is not set here
			}
		}
		env[k] = &v
		return nil
	}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, errs.Wrap(nil, errs.Invalid, "--env-file: %s", err)
		}
		sc := bufio.NewScanner(f)
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			line := strings.TrimLeft(sc.Text(), " \t")
			if line == "" || line[0] == '#' {
				continue
			}
			if err := add("--env-file "+name, line); err != nil {
				f.Close()
				return nil, err
			}
		}
		f.Close()
		if err := sc.Err(); err != nil {
			return nil, errs.New(errs.Invalid, "--env-file %s: %s", name, err)
		}
	}
	for _, line := range list {
		if err := add("--env", line); err != nil {
			return nil, err
		}
	}
	return env, nil
}

// flat is an environment without the pointers.
func flat(env map[string]*string) map[string]string {
	out := map[string]string{}
	for k, v := range env {
		out[k] = *v
	}
	return out
}

func pairs(flag string, list []string) (map[string]string, error) {
	m := map[string]string{}
	for _, s := range list {
		k, v, _ := strings.Cut(s, "=")
		if k == "" {
			return nil, errs.New(errs.Invalid, "%s %q: want KEY=VALUE", flag, clip(s, 60))
		}
		m[k] = v
	}
	return m, nil
}

// argv is --entrypoint and what follows the image, "--" left out.
func argv(entrypoint string, rest []string) []string {
	rest = afterDash(rest)
	if entrypoint != "" {
		return append([]string{entrypoint}, rest...)
	}
	return rest
}

func afterDash(args []string) []string {
	if len(args) > 0 && args[0] == "--" {
		return args[1:]
	}
	return args
}

// flagsFirst explains the commonest slip: a flag behind the image or sandbox
// belongs to the command, as with docker.
func flagsFirst(cmd *cobra.Command, args []string) error {
	if len(args) > 1 && strings.HasPrefix(args[1], "-") && args[1] != "--" {
		return errs.New(errs.Invalid, "%s is taken for the command, because it follows %s; flags of %s stand before it", args[1], args[0], cmd.CommandPath())
	}
	return nil
}
