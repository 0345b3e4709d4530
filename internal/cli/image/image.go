// Package image has the commands for images. Two ways bring one here: an archive
// that is sent (import, load) and a registry that the daemon asks (pull); both
// show a bar on a terminal (command.Bar).
//
// What surprises: an archive on standard input or in a pipe has no known size, and
// so no percentage.
package image

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
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
	images := newImageLs(p, "sandboxctl images")
	images.Use, images.Aliases = "images", nil
	return []*cobra.Command{newImage(p), images, newRmi(p), newTag(p, "sandboxctl tag"), newCommit(p)}
}

func newImage(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "List, build, pull, import, export, tag and remove images",
		Example: `  sandboxctl image ls
  sandboxctl image build python`,
	}
	cmd.AddCommand(
		newImageLs(p, "sandboxctl image ls"), newImageInspect(p), newImageBuild(p), newImagePull(p), newImageImport(p), newImageLoad(p),
		newImageExport(p), newTag(p, "sandboxctl image tag"), newImageRm(p), newImagePrune(p),
	)
	return cmd
}

// newImageLs makes the command that lists images, as it is called.
func newImageLs(p *command.Program, called string) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List images",
		Long: `List the images of the daemon's host. ALIASES are other names of an image, from
images.aliases in the daemon's configuration; :* means any tag.`,
		Example: fmt.Sprintf("  %[1]s\n  %[1]s -o name", called),
		Args:    cobra.NoArgs,
		RunE: images(&o).Of(p, &o, func(ctx context.Context, cl *client.Client, _ []string) ([]wire.ImageInfo, error) {
			return cl.Images().List(ctx)
		}),
	}
	o.Flags(cmd, true)
	images(&o).FormatFlag(cmd, &o)
	cmd.Flags().BoolVar(&o.Full, "no-trunc", false, "do not truncate digests")
	return cmd
}

// images is how images are listed.
func images(o *command.Output) command.Listing[wire.ImageInfo] {
	return command.Listing[wire.ImageInfo]{
		Name:   func(i wire.ImageInfo) string { return i.Name + ":" + i.Tag },
		Header: []string{"NAME", "TAG", "DIGEST", "CREATED", "SIZE", "ALIASES"},
		Row: func(i wire.ImageInfo) []string {
			digest := i.Digest
			if !o.Full {
				digest = text.Clip(digest, 20)
			}
			return []string{i.Name, i.Tag, digest, text.Ago(i.Created), text.Bytes(i.Bytes), strings.Join(i.Aliases, " ")}
		},
		Docker: func(i wire.ImageInfo) command.Fields {
			id := strings.TrimPrefix(i.Digest, "sha256:")
			if !o.Full {
				id = id[:min(12, len(id))]
			}
			return command.Fields{
				"Repository": i.Name, "Tag": i.Tag, "ID": id, "Digest": i.Digest, "Size": text.Bytes(i.Bytes),
				"CreatedSince": text.Ago(i.Created), "CreatedAt": i.Created.Local().Format(time.RFC3339),
			}
		},
	}
}

func newImageBuild(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "build RECIPE",
		Short: "Build an image from a recipe in rootfs/",
		Example: `  sandboxctl image build base
  sandboxctl image build -q python`,
		Args: cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			im, err := cl.Images().Build(ctx, args[0], func(line string) {
				if !o.Quiet {
					fmt.Fprintln(os.Stderr, text.Printable(line))
				}
			})
			if err != nil {
				return err
			}
			return o.One(im, im.Name+":"+im.Tag)
		}),
	}
	o.Flags(cmd, true)
	return cmd
}

func newImageRm(p *command.Program) *cobra.Command {
	return p.Verb(&cobra.Command{
		Use:   "rm IMAGE...",
		Short: "Remove images that no sandbox uses",
		Example: `  sandboxctl image rm python
  sandboxctl image rm $(sandboxctl image ls -q)`,
	}, func(ctx context.Context, cl *client.Client, ref string) error {
		_, err := cl.Images().Remove(ctx, ref)
		return err
	})
}

func newRmi(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:     "rmi IMAGE...",
		Short:   "Remove images that no sandbox uses, and print what was removed as docker does",
		Example: `  sandboxctl rmi python mine:1`,
		Args:    cobra.MinimumNArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			return command.Every(args, func(ref string) error {
				gone, err := cl.Images().Remove(ctx, ref)
				for _, name := range gone.Images {
					fmt.Println("Untagged:", text.Printable(name))
				}
				for _, digest := range gone.Layers {
					fmt.Println("Deleted:", text.Printable(digest))
				}
				return err
			})
		}),
	}
}

func newCommit(p *command.Program) *cobra.Command {
	var o command.Output
	cmd := &cobra.Command{
		Use:   "commit SANDBOX|SNAPSHOT NAME[:TAG]",
		Short: "Make an image of the files of a sandbox or a snapshot, and print its digest",
		Long: `Make an image of the files of a sandbox that runs, is paused or has ended, or of a
snapshot that is ready. What the sandbox has written becomes a layer over its image.
Environment, directory, user, ENTRYPOINT, CMD and STOPSIGNAL are the image's. Volumes, sockets and
pipes are left out. A sandbox that runs stands still for a moment. If a sandbox and a
snapshot have the same name, the sandbox is meant: use the id of the snapshot.`,
		Example: `  sandboxctl commit lab mine/lab:1
  sandboxctl commit before-upgrade mine/lab:0 && sandboxctl image save mine/lab:0 -o lab.tar`,
		Args: cobra.ExactArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			im, err := cl.Commit(ctx, args[0], args[1])
			if errs.Is(err, errs.NotFound) {
				if im, err = cl.Snapshots().Commit(ctx, args[0], args[1]); errs.Is(err, errs.NotFound) {
					err = errs.New(errs.NotFound, "there is no sandbox and no snapshot %q; `sandboxctl ps -a` and "+
						"`sandboxctl snapshot ls` list them", args[0])
				}
			}
			if err != nil {
				return err
			}
			return o.One(im, im.Digest)
		}),
	}
	o.Flags(cmd, false)
	return cmd
}

// newTag makes the command that names an image, as it is called.
func newTag(p *command.Program, called string) *cobra.Command {
	return &cobra.Command{
		Use:   "tag IMAGE NAME[:TAG]",
		Short: "Give an image a further name",
		Long: `Give an image a further name. Only a key of the role admin may take a name that is
another image's.`,
		Example: fmt.Sprintf("  %s python mine/python:1", called),
		Args:    cobra.ExactArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			_, err := cl.Images().Tag(ctx, args[0], args[1])
			return err
		}),
	}
}

func newImageInspect(p *command.Program) *cobra.Command {
	return command.Inspect(p, &cobra.Command{
		Use:   "inspect IMAGE...",
		Short: "Print detailed information on images, as JSON",
		Example: `  sandboxctl image inspect python
  sandboxctl image inspect -f '{{.Config.Cmd}}' python`,
	}, func(i wire.ImageInspection) command.Fields {
		config := map[string]any{
			"Entrypoint": i.Entrypoint, "Cmd": i.Cmd, "Env": i.Env, "WorkingDir": i.Workdir, "User": i.User, "Labels": i.Labels,
			"StopSignal": i.StopSignal,
		}
		for name, raw := range i.Unused {
			var v any
			if json.Unmarshal(raw, &v) == nil {
				config[name] = v
			}
		}
		return command.Fields{
			"Id": i.Digest, "RepoTags": []string{i.Name + ":" + i.Tag}, "Created": i.Created.Format(time.RFC3339), "Size": i.Bytes,
			"Config": config,
		}
	}, func(ctx context.Context, cl *client.Client, ref string) (wire.ImageInspection, error) {
		return cl.Images().Inspect(ctx, ref)
	})
}

func newImagePrune(p *command.Program) *cobra.Command {
	var o command.Output
	var all, force bool
	cmd := &cobra.Command{
		Use:   "prune [-af]",
		Short: "Remove unused layers; with -a, also images that no sandbox uses",
		Long: `Remove unused layers; with -a, also images that no sandbox and no snapshot uses. -a asks
first. With -f, which it needs where nobody can be asked, it does not.`,
		Example: `  sandboxctl image prune -a`,
		Args:    cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			if all && !force {
				goes := []string{"all images that no sandbox and no snapshot uses"}
				if err := command.Confirm("sandboxctl image ls", goes, nil); err != nil {
					return err
				}
			}
			p, err := cl.Images().Prune(ctx, all)
			if err != nil {
				return err
			}
			if o.Format == command.JSON {
				return text.JSON(os.Stdout, p)
			}
			for _, name := range append(p.Images, p.Layers...) {
				fmt.Println(text.Printable(name))
			}
			if o.Format == command.Table {
				fmt.Println("Total reclaimed space:", text.Bytes(p.BytesReclaimed))
			}
			return nil
		}),
	}
	o.Flags(cmd, true)
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also remove images that no sandbox uses")
	cmd.Flags().BoolVarP(&force, "force", "f", false, "do not ask")
	return cmd
}
