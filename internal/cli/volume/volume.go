// Package volume has the commands for volumes: files that outlive sandboxes. The
// flags that mount one are those of run and create, in package sandbox.
package volume

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// Commands makes the commands of this room.
func Commands(p *command.Program) []*cobra.Command {
	return []*cobra.Command{newVolume(p)}
}

func newVolume(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "volume",
		Aliases: []string{"volumes"},
		Short:   "Keep files outside sandboxes and share them between sandboxes",
		Long: `Keep files outside sandboxes and share them between sandboxes.

A volume is created when a sandbox first names it (-v NAME:/path), or by "create". It
starts with the files that the image of the first sandbox has at that path. It stays
until it is removed. A volume cannot be removed while a sandbox has it mounted, even if
that sandbox has ended. Snapshots of sandboxes do not contain volumes.`,
		Example: `  sandboxctl volume create data --size 1Gi
  sandboxctl run -v data:/data python -- python3 -c 'open("/data/x","w")'
  sandboxctl volume ls`,
	}
	cmd.AddCommand(newVolumeCreate(p), newVolumeLs(p), newVolumeInspect(p), newVolumeRm(p), newVolumePrune(p))
	return cmd
}

func newVolumeRm(p *command.Program) *cobra.Command {
	return p.Verb(&cobra.Command{
		Use:     "rm VOLUME...",
		Short:   "Remove volumes and all files in them",
		Example: `  sandboxctl volume rm data`,
	}, func(ctx context.Context, cl *client.Client, name string) error { return cl.Volumes().Remove(ctx, name) })
}

func newVolumeCreate(p *command.Program) *cobra.Command {
	var (
		o    command.Output
		size string
	)
	cmd := &cobra.Command{
		Use:   "create [flags] NAME",
		Short: "Create a volume and print its name",
		Example: `  sandboxctl volume create data
  sandboxctl volume create models --size 20Gi`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			v, err := cl.Volumes().Create(ctx, args[0], command.Size(size))
			if err != nil {
				return err
			}
			return o.One(v, v.Name)
		}),
	}
	o.Flags(cmd, true)
	cmd.Flags().StringVar(&size, "size", "",
		"size limit, such as 1Gi (default: volume_size in the daemon's configuration)")
	return cmd
}

func newVolumeLs(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List volumes",
		Example: `  sandboxctl volume ls
  sandboxctl volume ls -o json`,
		Args: cobra.NoArgs,
		RunE: volumes.Of(p, &o, func(ctx context.Context, cl *client.Client, _ []string) ([]wire.Volume, error) {
			return cl.Volumes().List(ctx)
		}),
	}
	o.Flags(cmd, true)
	volumes.FormatFlag(cmd, &o)
	return cmd
}

// volumes is how volumes are listed.
var volumes = command.Listing[wire.Volume]{
	Name:   func(v wire.Volume) string { return v.Name },
	Header: []string{"NAME", "USED", "SIZE", "SANDBOXES", "CREATED"},
	Row: func(v wire.Volume) []string {
		used, size := "", "no limit"
		if v.UsedBytes != nil {
			used = text.Bytes(*v.UsedBytes)
		}
		if v.SizeBytes > 0 {
			size = text.Bytes(v.SizeBytes)
		}
		return []string{v.Name, used, size, strconv.Itoa(len(v.UsedBy)), text.Ago(v.CreatedAt)}
	},
	Docker: func(v wire.Volume) command.Fields {
		used := "N/A" // docker's word
		if v.UsedBytes != nil {
			used = text.Bytes(*v.UsedBytes)
		}
		return command.Fields{
			"Name": v.Name, "Driver": "local", "Scope": "local", "Links": len(v.UsedBy), "Size": used,
			"CreatedAt": v.CreatedAt.Local().Format(time.RFC3339),
		}
	},
}

func newVolumeInspect(p *command.Program) *cobra.Command {
	return command.Inspect(p, &cobra.Command{
		Use:     "inspect VOLUME...",
		Short:   "Print detailed information on volumes, as JSON",
		Example: `  sandboxctl volume inspect data`,
	}, volumes.Docker, func(ctx context.Context, cl *client.Client, name string) (wire.Volume, error) {
		return cl.Volumes().Get(ctx, name)
	})
}

func newVolumePrune(p *command.Program) *cobra.Command {
	var (
		o          command.Output
		all, force bool
	)
	cmd := &cobra.Command{
		Use:   "prune -a [-f]",
		Short: "Remove every volume that no sandbox has mounted",
		Long: `Remove every volume that no sandbox has mounted, with all files in it. A volume
that an ended sandbox has mounted stays.

Like docker's, prune removes volumes that have a name only with -a. All volumes have
names here, so without -a it removes nothing. It asks first. With -f, which it needs where
nobody can be asked, it does not.`,
		Example: `  sandboxctl volume prune -a`,
		Args:    cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			var p wire.VolumePruneReport
			if all {
				if !force {
					goes := []string{"all volumes that no sandbox has mounted, with their files"}
					if err := command.Confirm("sandboxctl volume ls", goes, nil); err != nil {
						return err
					}
				}
				var err error
				if p, err = cl.Volumes().PruneAll(ctx); err != nil {
					return err
				}
			} else {
				p.Volumes = []string{}
				fmt.Fprintln(os.Stderr, "sandboxctl: no volume was removed: all volumes have names, and prune keeps those, as "+
					"docker does; -a also removes named volumes that no sandbox has mounted")
			}
			if o.Format == command.JSON {
				return text.JSON(os.Stdout, p)
			}
			for _, name := range p.Volumes {
				fmt.Println(text.Printable(name))
			}
			return nil
		}),
	}
	o.Flags(cmd, true)
	cmd.Flags().BoolVarP(&all, "all", "a", false, "remove named volumes, too: here these are all")
	cmd.Flags().BoolVarP(&force, "force", "f", false, "do not ask")
	return cmd
}
