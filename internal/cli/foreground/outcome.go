package foreground

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// outcome says how a command ended.
func (j Job) outcome(exit client.Exit) error {
	switch {
	case exit.TimedOut:
		return command.Exit(command.ExitTimeout, "the command was killed: it ran longer than --timeout %s", j.Command.Timeout)
	case exit.Error != "":
		hint := ""
		switch {
		case exit.Reason == "pids_limit":
			hint = "; give it more with --pids"
		case exit.Code == command.ExitNotFound:
			hint = "; is it installed in the image?"
		}
		name := "a shell"
		if len(j.Command.Argv) > 0 {
			name = j.Command.Argv[0]
		}
		return command.Exit(exit.Code, "cannot run %q in sandbox %s: %s%s", name, j.Sandbox, text.Printable(exit.Error), hint)
	case exit.Signal == "SIGKILL":
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if u, err := j.Client.Stats(ctx, j.Sandbox); err == nil && u.OOMKills > j.OOMs() {
			return command.Exit(command.ExitKilled,
				"the command was killed (oom): the sandbox went over its memory limit of %s; give it more with --memory",
				text.Bytes(u.MemoryLimitBytes))
		}
		return command.Exit(command.ExitKilled, "the command was killed by SIGKILL")
	case exit.Code != 0:
		return command.Status{Code: exit.Code, Text: LimitHint(exit)}
	}
	return nil
}

// NoteDenials prints what the network refused a sandbox after so many denials: that may be
// why a command failed. If the daemon does not say, nothing is printed.
func NoteDenials(ctx context.Context, cl *client.Client, sandbox string, before int64) {
	if before == math.MaxInt64 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	d, err := cl.Policy(sandbox).Denials(ctx)
	if line := d.Line(before); err == nil && line != "" {
		command.Note(line)
	}
}

// LimitHint names the limit that a command failed at, and the flag that raises
// it; it is empty for a command that met none.
func LimitHint(exit client.Exit) string {
	flag := map[string]string{"disk_full": "--disk", "pids_limit": "--pids"}[exit.Reason]
	if exit.Hint == "" || flag == "" {
		return ""
	}
	return fmt.Sprintf("the command failed (%s): %s; give it more with %s", exit.Reason, text.Printable(exit.Hint), flag)
}

// WhyLost finds out why a command's stream broke: most often because its
// sandbox has ended, which the daemon may notice a moment later than we do. If
// the sandbox has not ended, hint says what to do.
func WhyLost(cl *client.Client, sandbox string, lost error, hint string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		sb, err := cl.Get(ctx, sandbox)
		switch {
		case errs.Is(err, errs.NotFound):
			return command.Exit(command.ExitKilled, "sandbox %s was removed, or its timeout passed, while the command ran", sandbox)
		case err == nil && sb.Status.Reason == "expired":
			return command.Exit(command.ExitTimeout, "the timeout of sandbox %s passed while the command ran", sandbox)
		case err == nil && sb.Status.Reason == "oom":
			limit := ""
			if sb.Sandboxd != nil {
				limit = " of " + text.Bytes(sb.Sandboxd.MemoryBytes)
			}
			return command.Exit(command.ExitKilled, "killed (oom): sandbox %s went over its memory limit%s; give it more with --memory",
				sandbox, limit)
		case err == nil && (sb.Status.State == wire.Failed || sb.Status.State == wire.Terminated):
			return command.Exit(command.ExitKilled, "killed: sandbox %s ended while the command ran (%s) %s",
				sandbox, sb.Status.Reason, text.Printable(sb.Status.Message))
		}
		select {
		case <-ctx.Done():
			if _, ok := errors.AsType[*errs.Error](lost); ok && !errors.Is(lost, client.ErrLost) {
				return lost // it says why
			}
			return errs.Wrap(lost, errs.Unavailable, "the connection to the command in sandbox %s broke; %s", sandbox, hint)
		case <-tick.C:
		}
	}
}

// oomsOf asks how many OOM kills a sandbox has had. The function that it returns
// waits for the answer.
func oomsOf(cl *client.Client, sandbox string) func() int64 {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	answer := make(chan int64, 1)
	go func() {
		defer cancel()
		n := int64(math.MaxInt64) // unknown: no kill is blamed on memory
		if u, err := cl.Stats(ctx, sandbox); err == nil {
			n = u.OOMKills
		}
		answer <- n
	}()
	return func() int64 { return <-answer }
}
