package command

import (
	"bufio"
	"cmp"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Choices makes the shell complete the values of a flag.
func Choices(cmd *cobra.Command, flag string, values ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
}

var dockerForm = regexp.MustCompile(`^([0-9]+)([kmgtKMGT])[bB]?$`)

// Size turns docker's 256m, which is 2^28 bytes there, into 256Mi: to the API 256m is
// OpenSandbox's 256·10^6. Other texts stay as they are.
func Size(s string) string {
	if m := dockerForm.FindStringSubmatch(s); m != nil {
		return m[1] + strings.ToUpper(m[2]) + "i"
	}
	return s
}

// Duration reads a time of a command line: 30m, 1h30m, or a number of seconds, as docker takes it.
func Duration(s string) (time.Duration, error) {
	if n, err := strconv.ParseInt(s, 10, 32); err == nil {
		return time.Duration(n) * time.Second, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, errs.New(errs.Invalid, "want a time such as 90s, 30m or 2h, or a number of seconds")
	}
	return d, nil
}

// DurationFlag adds a flag that Duration reads. short may be empty, and a default of 0 is not printed.
func DurationFlag(f *pflag.FlagSet, d *time.Duration, name, short string, value time.Duration, usage string) {
	*d = value
	f.VarP((*durationFlag)(d), name, short, usage)
}

type durationFlag time.Duration

func (d *durationFlag) Type() string { return "duration" }

func (d *durationFlag) String() string {
	if *d == 0 {
		return ""
	}
	return time.Duration(*d).String()
}

func (d *durationFlag) Set(s string) error {
	v, err := Duration(s)
	*d = durationFlag(v)
	return err
}

// Environment reads --env-file and then --env, as docker does.
func Environment(list, files []string) (map[string]*string, error) {
	env := map[string]*string{}
	add := func(where, line string) error {
		k, v, ok := strings.Cut(line, "=")
		if k == "" {
			return errs.New(errs.Invalid, "%s %q: want NAME=VALUE", where, text.Clip(line, 60))
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

// Flat is an environment without the pointers.
func Flat(env map[string]*string) map[string]string {
	out := map[string]string{}
	for k, v := range env {
		out[k] = *v
	}
	return out
}

// AfterDash returns args without the "--" that they may begin with.
func AfterDash(args []string) []string {
	if len(args) > 0 && args[0] == "--" {
		return args[1:]
	}
	return args
}

// FlagsFirst explains the commonest slip: a flag behind the image or sandbox
// belongs to the command, as with docker.
func FlagsFirst(cmd *cobra.Command, args []string) error {
	if len(args) > 1 && strings.HasPrefix(args[1], "-") && args[1] != "--" {
		return errs.New(errs.Invalid, "%s is taken as the command, because it follows %s; put flags of %s before it",
			args[1], args[0], cmd.CommandPath())
	}
	return nil
}

// SignalName is the full name of a signal, of which kill(1) takes the number and the
// name with and without SIG. What is no signal is returned as it is, for the agent to
// refuse.
func SignalName(s string) string {
	if n, err := strconv.Atoi(s); err == nil {
		return cmp.Or(unix.SignalName(syscall.Signal(n)), s)
	}
	return "SIG" + strings.TrimPrefix(strings.ToUpper(s), "SIG")
}

// Since reads docker's forms of a time: a duration before now such as 10m, RFC 3339 with or
// without a zone or a time of day, and Unix seconds with or without a fraction. The
// empty text is the zero time.
func Since(flag, s string, now time.Time) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(s); err == nil && s != "0" { // 0 is the beginning of all Unix seconds
		return now.Add(-d), nil
	}
	for _, form := range []string{time.RFC3339Nano, "2006-01-02T15:04:05.999999999", "2006-01-02T15:04", "2006-01-02"} {
		if t, err := time.ParseInLocation(form, s, time.Local); err == nil {
			return t, nil
		}
	}
	whole, fraction, _ := strings.Cut(s, ".")
	seconds, err := strconv.ParseInt(whole, 10, 64)
	nanos, ferr := strconv.ParseUint((fraction + "000000000")[:9], 10, 32)
	if err != nil || ferr != nil || len(fraction) > 9 {
		return time.Time{}, errs.New(errs.Invalid,
			"%s %q: want a duration such as 10m, a time such as 2026-01-02T15:04:05Z, or Unix seconds", flag, text.Clip(s, 40))
	}
	return time.Unix(seconds, int64(nanos)), nil
}
