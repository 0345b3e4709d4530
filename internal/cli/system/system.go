// Package system has the commands for the daemon itself: what it is, its disks, its
// API keys, draining it, backing it up.
//
// What surprises: `system restore` runs sandboxd on this host, because the daemon
// is stopped for it.
package system

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
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

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newSystem(p), newVersion(p), newKey(p)}
}

func newSystem(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "system", Short: "Look at the daemon and its host, back up its state",
		Example: `  sandboxctl system info
  sandboxctl system backup -o state.tar.gz`,
	}
	cmd.AddCommand(newSystemInfo(p), newSystemDf(p), newSystemDrain(p), newSystemBackup(p), newSystemRestore())
	return cmd
}

func newSystemInfo(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "info",
		Short: "Print what the daemon is, on what host, with which limits",
		Example: `  sandboxctl system info
  sandboxctl system info -o json | jq .sandboxes`,
		Args: cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			i, err := cl.System().Info(ctx)
			if err != nil {
				return err
			}
			if o.Format == command.JSON {
				return text.JSON(os.Stdout, i)
			}
			return printInfo(i)
		}),
	}
	o.Flags(cmd, false)
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
	timeout := "no bound"
	if s := i.Limits.MaxTimeoutSeconds; s > 0 {
		timeout = (time.Duration(s) * time.Second).String()
	}
	g := i.Defaults
	lines := [][2]string{
		{"sandboxd", fmt.Sprintf("%s (%s), instance %s, started %s", i.Version.Version, i.Go, i.Instance, text.Ago(i.Started))},
		{"kernel", i.Kernel},
		{"cgroups", i.Cgroups},
		{"state", fmt.Sprintf("%s, schema %d", i.StateDir, i.Schema)},
		{"pool", i.Pool},
		{"network", i.Network},
		{"runtimes", strings.Join(i.Runtimes, " ") + ", default " + g.Runtime},
		{"defaults", fmt.Sprintf("memory %s, cpu %dm, pids %d, disk %s, network %s",
			text.Bytes(g.MemoryBytes), g.CPUMillis, g.Pids, text.Bytes(g.DiskBytes), g.Network)},
		{"limits", fmt.Sprintf("%d sandboxes, %d brought up at once, timeout: %s, ended ones kept %s",
			i.Limits.MaxSandboxes, i.Limits.MaxCreating, timeout, time.Duration(i.Limits.RetainEndedSeconds)*time.Second)},
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
		add("strays", strings.Join(i.Strays, " ")+" (the host holds something of them, and the state has no record)")
	}
	for _, l := range lines {
		if _, err := fmt.Printf("%-11s %s\n", l[0], text.Printable(l[1])); err != nil {
			return err
		}
	}
	return nil
}

func newSystemDf(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:     "df",
		Short:   "Print what images, sandboxes and snapshots take on the host's disks",
		Example: `  sandboxctl system df`,
		Args:    cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			df, err := cl.System().DiskUsage(ctx)
			if err != nil {
				return err
			}
			if o.Format == command.JSON {
				return text.JSON(os.Stdout, df)
			}
			return printDf(df)
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

func printDf(df wire.DiskUsage) error {
	var images, disks [][]string
	for _, i := range df.Images {
		images = append(images, []string{i.Name + ":" + i.Tag, text.Bytes(i.Bytes), text.Bytes(i.SharedBytes), fmt.Sprint(i.Sandboxes)})
	}
	for _, d := range df.Sandboxes {
		limit := "none"
		if d.LimitBytes > 0 {
			limit = text.Bytes(d.LimitBytes)
		}
		disks = append(disks, []string{d.ID, d.Name, d.State, text.Bytes(d.Bytes), limit})
	}
	if err := text.Table(os.Stdout, []string{"IMAGE", "SIZE", "SHARED", "SANDBOXES"}, images); err != nil {
		return err
	}
	fmt.Println()
	if err := text.Table(os.Stdout, []string{"SANDBOX", "NAME", "STATE", "SIZE", "LIMIT"}, disks); err != nil {
		return err
	}
	if len(df.Snapshots) > 0 {
		var snaps [][]string
		for _, d := range df.Snapshots {
			snaps = append(snaps, []string{d.ID, d.Name, d.State, text.Bytes(d.Bytes)})
		}
		fmt.Println()
		if err := text.Table(os.Stdout, []string{"SNAPSHOT", "NAME", "STATE", "SIZE"}, snaps); err != nil {
			return err
		}
	}
	fmt.Printf("\nlayers %s, pool %s free of %s, state directory %s free of %s\n",
		text.Bytes(df.LayerBytes), text.Bytes(df.Pool.FreeBytes), text.Bytes(df.Pool.TotalBytes),
		text.Bytes(df.State.FreeBytes), text.Bytes(df.State.TotalBytes))
	if df.Lost > 0 {
		fmt.Printf("%d disks without an owner go within a day\n", df.Lost)
	}
	_, err := fmt.Printf("%s would come back by removing unused images and ended sandboxes\n", text.Bytes(df.ReclaimableBytes))
	return err
}

func newSystemBackup(p *command.Program) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "backup",
		Short: "Write the state of the daemon to a file, while it runs",
		Long: `Writes what sandboxd knows (sandboxes, names, images) to a file, as of one moment, while all
goes on. It holds no files of sandboxes and no image layers. It is secret: the environment of
every sandbox is in it. Bring it back with "sandboxctl system restore", on the host itself.`,
		Example: `  sandboxctl system backup -o /root/sandboxd-$(date +%F).tar.gz`,
		Args:    cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			if file == "-" {
				if command.IsTerminal(os.Stdout) {
					return errs.New(errs.Invalid, "--output -: a backup is no text for a terminal; name a file or a pipe")
				}
				return cl.System().Backup(ctx, os.Stdout)
			}
			if file == "" {
				file = "sandboxd-backup-" + time.Now().UTC().Format("20060102T150405Z") + ".tar.gz"
			}
			if err := backupTo(file, func(f *os.File) error { return cl.System().Backup(ctx, f) }); err != nil {
				return err
			}
			_, err := fmt.Println(file)
			return err
		}),
	}
	cmd.Flags().StringVarP(&file, "output", "o", "", "file to write, - for stdout (default sandboxd-backup-TIME.tar.gz)")
	return cmd
}

// backupTo makes file from what fill writes, whole or not at all.
func backupTo(file string, fill func(*os.File) error) error {
	tmp := file + ".partial"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return errs.Wrap(err, errs.Invalid, "the backup can not be written: %v", err)
	}
	err = fill(f)
	if werr := errors.Join(f.Sync(), f.Close()); err == nil && werr != nil {
		err = errs.Wrap(werr, errs.Unavailable, "the backup can not be written: %v", werr)
	}
	if err == nil {
		err = os.Rename(tmp, file)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	return nil
}

// newSystemRestore runs `sandboxd restore`: the daemon is stopped for it, so there
// is nothing to connect to.
func newSystemRestore() *cobra.Command {
	var (
		accept bool
		config string
	)
	cmd := &cobra.Command{
		Use:     "restore FILE",
		Short:   `Bring back the state of a backup (runs "sandboxd restore" on this host)`,
		Example: `  sandboxctl system restore /root/sandboxd-2026-11-21.tar.gz`,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if accept {
				args = append(args, "--accept")
			}
			if config != "" {
				args = append(args, "--config", config)
			}
			program, err := exec.LookPath("sandboxd")
			if err != nil {
				return errs.New(errs.Unavailable,
					"sandboxd is not on this host's PATH; a restore runs where the daemon does: sandboxd restore FILE")
			}
			run := exec.CommandContext(cmd.Context(), program, append([]string{"restore"}, args...)...)
			run.Stdin, run.Stdout, run.Stderr = os.Stdin, os.Stdout, os.Stderr
			err = run.Run()
			if exit, ok := errors.AsType[*exec.ExitError](err); ok {
				return command.Status{Code: max(exit.ExitCode(), 1)} // it has said why
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&accept, "accept", false, "let the next daemon sweep what the restored state does not know")
	cmd.Flags().StringVar(&config, "config", "", "configuration file of the daemon")
	return cmd
}
