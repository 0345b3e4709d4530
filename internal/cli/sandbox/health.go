package sandbox

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// healthFlags say when a sandbox is ready, whether it is started again when it ends, and
// what happens when it is idle. The daemon checks their values.
var healthFlags = []struct{ name, ext, usage string }{
	{"restart", wire.ExtRestart, "restart policy when the sandbox ends: no, on-failure[:max], always or unless-stopped (default no)"},
	{"ready-cmd", wire.ExtReadyCmd, "shell command that succeeds when the sandbox is ready; create waits for that"},
	{"ready-port", wire.ExtReadyPort, "TCP port that accepts connections when the sandbox is ready; create waits for that"},
	{"health-cmd", wire.ExtReadyCmd, "the same as --ready-cmd (docker's name)"},
	{"health-interval", wire.ExtReadyInterval, "time between two checks (default 10s; shorter until the sandbox is ready)"},
	{"health-timeout", wire.ExtReadyTimeout, "maximum time of one check (default 5s)"},
	{
		"health-retries", wire.ExtReadyRetries,
		"consecutive failures that make the sandbox unhealthy; with --restart it is then restarted (default 3)",
	},
	{"health-start-period", wire.ExtReadyStartPeriod, "time to become ready; failures in it do not count (default 30s)"},
	{"idle", wire.ExtIdleAfter, "time without any use after which the sandbox is idle: 10m; see --on-idle (default: never idle)"},
	{
		"on-idle", wire.ExtIdleAction,
		"what happens when it is idle: pause or hibernate (the next command or request to a port wakes it), stop or kill (default pause)",
	},
}

func addHealthFlags(cmd *cobra.Command) {
	for _, h := range healthFlags {
		cmd.Flags().String(h.name, "", h.usage)
	}
	command.Choices(cmd, "restart", "no", "on-failure", "always", "unless-stopped")
	command.Choices(cmd, "on-idle", "pause", "hibernate", "stop", "kill")
}

// healthExtensions writes the flags that were given, even empty ones, into ext.
func healthExtensions(flags *pflag.FlagSet, ext map[string]string) error {
	for _, h := range healthFlags {
		f := flags.Lookup(h.name)
		if f == nil || !f.Changed {
			continue
		}
		if _, twice := ext[h.ext]; twice {
			return errs.New(errs.Invalid, "--ready-cmd and --health-cmd are the same; give one of them")
		}
		ext[h.ext] = f.Value.String()
	}
	return nil
}

// unready says what is wrong with a sandbox that was waited for.
func unready(sb wire.Sandbox) error {
	if sb.Sandboxd == nil || sb.Sandboxd.Health == nil {
		return nil
	}
	switch h := sb.Sandboxd.Health; h.State {
	case wire.HealthUnhealthy:
		return errs.New(errs.Internal, "sandbox %s runs, but is not ready after %s: %s; look into it with `sandboxctl exec %s`",
			sb.ID, errs.Count(h.Failures, "try", "tries"), text.Printable(h.LastOutput), sb.ID)
	case wire.HealthStarting:
		fmt.Fprintf(os.Stderr, "sandboxctl: sandbox %s is not ready yet; `sandboxctl ps` shows when it is\n", sb.ID)
	}
	return nil
}

// stateOf is the state of a sandbox and, where there is one, the reason of it.
func stateOf(sb wire.Sandbox) string {
	st := sb.Status
	switch {
	case st.State == wire.Failed, st.State == wire.Terminated:
		if sb.Sandboxd != nil && sb.Sandboxd.ExitCode != nil {
			return fmt.Sprintf("%s (%s), code %d", st.State, st.Reason, *sb.Sandboxd.ExitCode)
		}
		return fmt.Sprintf("%s (%s)", st.State, st.Reason)
	case sb.Sandboxd != nil && sb.Sandboxd.HibernatedBytes > 0:
		return st.State + " (hibernated)"
	case sb.Sandboxd != nil && sb.Sandboxd.Idle != nil && sb.Sandboxd.Idle.Asleep:
		return st.State + " (idle)"
	case sb.Sandboxd != nil && sb.Sandboxd.NextStart != nil:
		return fmt.Sprintf("%s (restarting, %s)", st.State, st.Reason)
	case sb.Sandboxd != nil && sb.Sandboxd.Health != nil:
		return fmt.Sprintf("%s (%s)", st.State, sb.Sandboxd.Health.State)
	}
	return st.State
}
