package system

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newSystemInfo(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "info",
		Short: "Print information on the daemon, its host and its limits",
		Example: `  sandboxctl system info
  sandboxctl system info -o json | jq .sandboxes`,
		Args: cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			i, err := cl.System().Info(ctx)
			if err != nil {
				return err
			}
			if done, err := o.Value(os.Stdout, i, nil); done {
				return err
			}
			return printInfo(i)
		}),
	}
	o.Flags(cmd, false)
	o.FormatFlag(cmd, nil)
	return cmd
}

func printInfo(i wire.SystemInfo) error {
	var counts []string
	for _, state := range slices.Sorted(maps.Keys(i.Sandboxes)) {
		counts = append(counts, fmt.Sprintf("%d %s", i.Sandboxes[state], state))
	}
	if counts == nil {
		counts = []string{"none"}
	}
	timeout := "no limit"
	if s := i.Limits.MaxTimeoutSeconds; s > 0 {
		timeout = (time.Duration(s) * time.Second).String()
	}
	g := i.Defaults
	lines := [][2]string{
		{"sandboxd", fmt.Sprintf("%s (%s), instance %s, started %s", i.Version.Version, i.Go, i.Instance, text.Ago(i.Started))},
		{"kernel", i.Kernel},
		{"cpu", text.CPUs(i.CPUs, i.CPU)},
		{"cgroups", i.Cgroups},
		{"state", fmt.Sprintf("%s, schema %d", i.StateDir, i.Schema)},
		{"pool", i.Pool},
		{"network", i.Network},
		{"runtimes", strings.Join(i.Runtimes, " ") + ", default " + g.Runtime},
		{"defaults", fmt.Sprintf("memory %s, cpu %dm, pids %d, disk %s, network %s",
			text.Bytes(g.MemoryBytes), g.CPUMillis, g.Pids, text.Bytes(g.DiskBytes), g.Network)},
		{"limits", fmt.Sprintf("%s, %d starting at a time, timeout: %s, ended sandboxes kept %s",
			errs.Count(i.Limits.MaxSandboxes, "sandbox", "sandboxes"), i.Limits.MaxCreating, timeout,
			time.Duration(i.Limits.RetainEndedSeconds)*time.Second)},
		{"reserve", fmt.Sprintf("memory %s, disk %s", text.Bytes(i.Limits.MemoryReserveBytes), text.Bytes(i.Limits.DiskReserveBytes))},
		{"sandboxes", strings.Join(counts, ", ")},
		{"images", fmt.Sprint(i.Images)},
	}
	add := func(name, value string) { lines = append(lines, [2]string{name, value}) }
	if i.DrainingSince != nil {
		add("draining", "since "+i.DrainingSince.Format(time.RFC3339)+": no sandbox is created (sandboxctl system drain --off)")
	}
	if len(i.Unreadable) > 0 {
		add("unreadable", strings.Join(i.Unreadable, " ")+" (records; delete them with sandboxctl rm, snapshot rm, image rm)")
	}
	if i.NoSweep != "" {
		add("not swept", i.NoSweep)
	}
	if len(i.Strays) > 0 {
		add("strays", strings.Join(i.Strays, " ")+" (the host has resources of them, but the state has no record)")
	}
	for _, l := range lines {
		if _, err := fmt.Printf("%-11s %s\n", l[0], text.Printable(l[1])); err != nil {
			return err
		}
	}
	return nil
}
