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

// healthFlags say when a sandbox is ready and whether it is started again when it
// ends. The daemon checks their values.
var healthFlags = []struct{ name, ext, usage string }{
	{"restart", wire.ExtRestart, "start it again when it ends: no, on-failure[:max], always or unless-stopped (default no)"},
	{"ready-cmd", wire.ExtReadyCmd, "it is ready when this shell command succeeds in it; create waits for that"},
	{"ready-port", wire.ExtReadyPort, "it is ready when this TCP port accepts connections; create waits for that"},
	{"health-cmd", wire.ExtReadyCmd, "--ready-cmd, as docker's"},
	{"health-interval", wire.ExtReadyInterval, "between two tries (default 10s; sooner until it is ready)"},
	{"health-timeout", wire.ExtReadyTimeout, "what one try may take (default 5s)"},
	{
		"health-retries", wire.ExtReadyRetries,
		"failures in a row that make it unhealthy; with --restart it is started anew then (default 3)",
	},
	{"health-start-period", wire.ExtReadyStartPeriod, "time to become ready, in which failures do not count (default 30s)"},
}

func addHealthFlags(cmd *cobra.Command) {
	for _, h := range healthFlags {
		cmd.Flags().String(h.name, "", h.usage)
	}
	command.Choices(cmd, "restart", "no", "on-failure", "always", "unless-stopped")
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
		return errs.New(errs.Internal, "sandbox %s runs, but is not ready after %d tries: %s; look into it with `sandboxctl exec %s`",
			sb.ID, h.Failures, text.Printable(h.LastOutput), sb.ID)
	case wire.HealthStarting:
		fmt.Fprintf(os.Stderr, "sandboxctl: sandbox %s is not ready yet; `sandboxctl ps` tells when it is\n", sb.ID)
	}
	return nil
}

// stateOf is the state of a sandbox and, where there is one, the reason of it.
func stateOf(sb wire.Sandbox) string {
	st := sb.Status
	switch {
	case st.State == wire.Failed, st.State == wire.Terminated:
		return fmt.Sprintf("%s (%s)", st.State, st.Reason)
	case sb.Sandboxd != nil && sb.Sandboxd.NextStart != nil:
		return fmt.Sprintf("%s (restarting, %s)", st.State, st.Reason)
	case sb.Sandboxd != nil && sb.Sandboxd.Health != nil:
		return fmt.Sprintf("%s (%s)", st.State, sb.Sandboxd.Health.State)
	}
	return st.State
}
