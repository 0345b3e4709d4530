package cli

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newVolume(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "volume",
		Aliases: []string{"volumes"},
		Short:   "Keep files apart from sandboxes, and share them among sandboxes",
		Long: `Keep files apart from sandboxes, and share them among sandboxes.

A volume is made when a sandbox first names it (-v NAME:/path), or by "create"; it
begins with what the image of the first sandbox has at that path. It stays until
it is removed, and can not be while a sandbox has it mounted, also one that has
ended. Snapshots of sandboxes do not contain it.`,
		Example: `  sandboxctl volume create data --size 1Gi
  sandboxctl run -v data:/data python -- python3 -c 'open("/data/x","w")'
  sandboxctl volume ls`,
	}
	rm := verb(c, "rm VOLUME...", "Remove volumes and all that is in them", (*client.Client).RemoveVolume)
	rm.Example = `  sandboxctl volume rm data`
	cmd.AddCommand(newVolumeCreate(c), newVolumeLs(c), newVolumeInspect(c), rm, newVolumePrune(c))
	return cmd
}

func newVolumeCreate(c *cli) *cobra.Command {
	var (
		o    output
		size string
	)
	cmd := &cobra.Command{
		Use:   "create [flags] NAME",
		Short: "Make a volume and print its name",
		Example: `  sandboxctl volume create data
  sandboxctl volume create models --size 20Gi`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			v, err := cl.CreateVolume(cmd.Context(), args[0], dockerSize(size))
			if err != nil {
				return err
			}
			if o.format == "json" {
				return printJSON(os.Stdout, v)
			}
			_, err = fmt.Println(v.Name)
			return err
		},
	}
	o.flags(cmd, true)
	cmd.Flags().StringVar(&size, "size", "", "how much it may hold, as 1Gi (default: the host's, volume_size of its configuration)")
	return cmd
}

func newVolumeLs(c *cli) *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List volumes",
		Example: `  sandboxctl volume ls
  sandboxctl volume ls -o json`,
		Args: cobra.NoArgs,
		RunE: volumes.of(c, &o, func(ctx context.Context, cl *client.Client, _ []string) ([]client.Volume, error) {
			return cl.Volumes(ctx)
		}),
	}
	o.flags(cmd, true)
	return cmd
}

var volumes = listing[client.Volume]{
	name:   func(v client.Volume) string { return v.Name },
	header: []string{"NAME", "USED", "SIZE", "SANDBOXES", "CREATED"},
	row: func(v client.Volume) []string {
		used, size := "", "no limit"
		if v.UsedBytes != nil {
			used = bytesOf(*v.UsedBytes)
		}
		if v.SizeBytes > 0 {
			size = bytesOf(v.SizeBytes)
		}
		return []string{v.Name, used, size, strconv.Itoa(len(v.UsedBy)), ago(v.CreatedAt)}
	},
}

func newVolumeInspect(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:     "inspect VOLUME...",
		Short:   "Show all there is to know of volumes, as JSON",
		Example: `  sandboxctl volume inspect data`,
		Args:    cobra.MinimumNArgs(1),
		RunE:    inspecting(c, (*client.Client).Volume),
	}
}

func newVolumePrune(c *cli) *cobra.Command {
	var (
		o     output
		force bool
	)
	cmd := &cobra.Command{
		Use:   "prune -f",
		Short: "Remove every volume that no sandbox has mounted",
		Long: `Remove every volume that no sandbox has mounted, with all that is in it. Sandboxes
that have ended count. It asks nothing, so it wants -f.`,
		Example: `  sandboxctl volume prune -f`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			if !force {
				return errs.New(errs.Invalid, "this removes every volume that no sandbox has mounted, for good; -f says that this is meant (`sandboxctl volume ls` shows them)")
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			p, err := cl.PruneVolumes(cmd.Context())
			if err != nil {
				return err
			}
			if o.format == "json" {
				return printJSON(os.Stdout, p)
			}
			for _, name := range p.Volumes {
				fmt.Println(printable(name, false))
			}
			return nil
		},
	}
	o.flags(cmd, true)
	cmd.Flags().BoolVarP(&force, "force", "f", false, "do it")
	return cmd
}

// mounts reads -v and --mount, docker's forms.
func mounts(volumes, long []string) (all []client.VolumeMount, err error) {
	add := func(source, target string, bind bool, m client.VolumeMount) {
		m.Name, m.MountPath = fmt.Sprint("volume-", len(all)+1), target
		if bind {
			m.Host = &client.HostPath{Path: source}
		} else {
			m.PVC = &client.PVC{ClaimName: source}
		}
		all = append(all, m)
	}
	for _, s := range volumes {
		f := strings.Split(s, ":")
		if len(f) < 2 || len(f) > 3 || f[0] == "" || f[1] == "" {
			return nil, errs.New(errs.Invalid, "-v %q: want NAME:/PATH or /HOST/PATH:/PATH, and perhaps :ro", clip(s, 80))
		}
		if strings.HasPrefix(f[0], ".") || strings.HasPrefix(f[0], "~") {
			return nil, errs.New(errs.Invalid, "-v %q: want the name of a volume, or an absolute path of the daemon's host", clip(s, 80))
		}
		m := client.VolumeMount{}
		if len(f) == 3 {
			if f[2] != "ro" && f[2] != "rw" {
				return nil, errs.New(errs.Invalid, "-v %q: the option %q is not known; there are ro and rw", clip(s, 80), clip(f[2], 20))
			}
			m.ReadOnly = f[2] == "ro"
		}
		add(f[0], f[1], f[0][0] == '/', m)
	}
	for _, s := range long {
		m, kind, source, target := client.VolumeMount{}, "volume", "", ""
		for o := range strings.SplitSeq(s, ",") {
			k, v, _ := strings.Cut(o, "=")
			switch k {
			case "type":
				kind = v
			case "source", "src":
				source = v
			case "target", "dst", "destination":
				target = v
			case "readonly", "ro":
				if m.ReadOnly = v == "" || v == "true" || v == "1"; !m.ReadOnly && v != "false" && v != "0" {
					return nil, errs.New(errs.Invalid, "--mount %q: %q: want readonly, or readonly=false", clip(s, 80), clip(o, 40))
				}
			case "volume-subpath":
				m.SubPath = v
			default:
				return nil, errs.New(errs.Invalid, "--mount %q: %q is not known; there are type, source, target, readonly and volume-subpath", clip(s, 80), clip(o, 40))
			}
		}
		if kind != "volume" && kind != "bind" || source == "" || target == "" {
			return nil, errs.New(errs.Invalid, "--mount %q: want type=volume or type=bind, a source and a target", clip(s, 80))
		}
		add(source, target, kind == "bind", m)
	}
	return all, nil
}
