package system

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

func newSystemDf(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "df",
		Short: "Print the disk usage of images, sandboxes, snapshots and volumes on the host",
		Long: `Print the disk usage of images, sandboxes, snapshots and volumes on the host.

ACTIVE are images that a sandbox uses, sandboxes that have not ended, snapshots that are
being taken or read, or from which a sandbox is being created, and volumes that a sandbox
has mounted, even if that sandbox has ended. The size of a snapshot
is what it held when it was taken. What it shares with others counts in each, so
removing it may give back less.`,
		Example: `  sandboxctl system df`,
		Args:    cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			df, err := cl.System().DiskUsage(ctx)
			if err != nil {
				return err
			}
			if done, err := o.Value(os.Stdout, df, nil); done {
				return err
			}
			return printDf(df)
		}),
	}
	o.Flags(cmd, false)
	o.FormatFlag(cmd, nil)
	return cmd
}

// summary says of each kind how many there are, how many are used, what they take and what
// removing the others would give back. Of files that several snapshots and sandboxes share,
// nothing comes back before the last of them is gone.
func summary(df wire.DiskUsage) [][]string {
	row := func(kind string, total, active int, size, reclaimable int64) []string {
		percent := ""
		if size > 0 {
			percent = fmt.Sprintf(" (%d%%)", 100*reclaimable/size)
		}
		return []string{kind, fmt.Sprint(total), fmt.Sprint(active), text.Bytes(size), text.Bytes(reclaimable) + percent}
	}
	var imagesUsed, live, held int
	var disks, ended, snapshots, free int64
	for _, i := range df.Images {
		if i.Sandboxes > 0 {
			imagesUsed++
		}
	}
	for _, d := range df.Sandboxes {
		disks += d.Bytes
		if d.State == wire.Terminated || d.State == wire.Failed {
			ended += d.Bytes
		} else {
			live++
		}
	}
	for _, d := range df.Snapshots {
		snapshots += d.Bytes
		if d.InUse {
			held++
		} else {
			free += d.Bytes
		}
	}
	mounted := 0
	var volumes, unmounted int64
	for _, v := range df.Volumes {
		volumes += v.Bytes
		if v.Sandboxes > 0 {
			mounted++
		} else {
			unmounted += v.Bytes
		}
	}
	return [][]string{
		row("Images", len(df.Images), imagesUsed, df.LayerBytes, max(0, df.ReclaimableBytes-ended)),
		row("Sandboxes", len(df.Sandboxes), live, disks, ended),
		row("Snapshots", len(df.Snapshots), held, snapshots, free),
		row("Volumes", len(df.Volumes), mounted, volumes, unmounted),
	}
}

func printDf(df wire.DiskUsage) error {
	if err := text.Table(os.Stdout, []string{"TYPE", "TOTAL", "ACTIVE", "SIZE", "RECLAIMABLE"}, summary(df)); err != nil {
		return err
	}
	fmt.Println()
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
	if len(df.Volumes) > 0 {
		var volumes [][]string
		for _, v := range df.Volumes {
			limit := "none"
			if v.LimitBytes > 0 {
				limit = text.Bytes(v.LimitBytes)
			}
			volumes = append(volumes, []string{v.Name, text.Bytes(v.Bytes), limit, fmt.Sprint(v.Sandboxes)})
		}
		fmt.Println()
		if err := text.Table(os.Stdout, []string{"VOLUME", "SIZE", "LIMIT", "SANDBOXES"}, volumes); err != nil {
			return err
		}
	}
	fmt.Printf("\nlayers %s, pool %s free of %s, state directory %s free of %s\n",
		text.Bytes(df.LayerBytes), text.Bytes(df.Pool.FreeBytes), text.Bytes(df.Pool.TotalBytes),
		text.Bytes(df.State.FreeBytes), text.Bytes(df.State.TotalBytes))
	if ready := df.Pool.ReadyBytes; ready > 0 {
		fmt.Printf("ready %s of the pool: written once; the first write to the rest is slow\n", text.Bytes(ready))
	}
	if d := df.Deleting; d != nil {
		fmt.Printf("deleted sandboxes that the kernel is still taking apart: %d (%s); the first was deleted %s\n",
			d.Sandboxes, text.Bytes(d.Bytes), text.Ago(d.Since))
	}
	if p := df.Prepared; p.Slots > 0 {
		fmt.Printf("prepared slots, which wait for a create: %d (%s)\n", p.Slots, text.Bytes(p.Bytes))
	}
	if df.Lost > 0 {
		fmt.Printf("disks and snapshots in lost+found: %d; each is removed after a day\n", df.Lost)
	}
	_, err := fmt.Printf("%s can be freed by removing unused images and ended sandboxes (sandboxctl system prune -a)\n",
		text.Bytes(df.ReclaimableBytes))
	return err
}
