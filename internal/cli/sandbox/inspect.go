package sandbox

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newInspect(p *command.Program) *cobra.Command {
	return command.Inspect(p, &cobra.Command{
		Use:   "inspect SANDBOX...",
		Short: "Print detailed information on sandboxes, as JSON",
		Example: `  sandboxctl inspect lab
  sandboxctl inspect -f '{{.State.Status}}' lab
  sandboxctl inspect lab | jq -r '.[0].status.reason'`,
	}, asDocker, func(ctx context.Context, cl *client.Client, id string) (wire.Inspection, error) {
		return cl.Inspect(ctx, id)
	})
}

// asDocker has what docker inspect prints of a container, as far as a sandbox has it.
func asDocker(i wire.Inspection) command.Fields {
	info := i.Sandboxd
	if info == nil {
		info = &wire.Info{}
	}
	state := dockerState(i.Sandbox)
	code := 0
	if state == "exited" {
		code = exitCode(i.Sandbox)
	}
	changed := ""
	if at := i.Status.LastTransitionAt; at != nil {
		changed = at.Format(time.RFC3339Nano)
	}
	return command.Fields{
		"Id": i.ID, "Name": info.Name, "Created": i.CreatedAt.Format(time.RFC3339Nano), "Image": info.ImageDigest,
		"RestartCount": info.Restarts,
		"State": map[string]any{
			"Status": state, "Running": state == "running" || state == "paused", "Paused": state == "paused",
			"Restarting": state == "restarting", "OOMKilled": i.Status.Reason == "oom", "ExitCode": code, "Error": i.Status.Message,
			"ChangedAt": changed,
		},
		"Config": map[string]any{"Image": imageOf(i.Sandbox), "Cmd": i.Entrypoint, "Labels": i.Metadata, "StopSignal": info.StopSignal},
	}
}

// dockerState is docker's word for the state of a sandbox.
func dockerState(sb wire.Sandbox) string {
	switch sb.Status.State {
	case wire.Running, wire.Pausing, wire.Stopping:
		return "running"
	case wire.Paused, wire.Resuming:
		return "paused"
	case wire.Pending:
		if sb.Sandboxd != nil && sb.Sandboxd.NextStart != nil {
			return "restarting"
		}
		return "created"
	}
	return "exited"
}
