package cli

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
)

func newImage(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Aliases: []string{"images"}, Short: "List, build, pull, import, export and remove images",
		Example: `  sandboxctl image ls
  sandboxctl image build python`,
	}
	cmd.AddCommand(newImageLs(c), newImageInspect(c), newImageBuild(c), newImagePull(c), newImageImport(c), newImageLoad(c), newImageExport(c), newImageRm(c), newImagePrune(c))
	return cmd
}

func newImageLs(c *cli) *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List images",
		Long: `List the images of this host. ALIASES are the names that stand for them, by
images.aliases of the daemon's configuration; :* is for any tag.`,
		Example: `  sandboxctl image ls
  sandboxctl image ls -o name`,
		Args: cobra.NoArgs,
		RunE: images(&o).of(c, &o, func(ctx context.Context, cl *client.Client, _ []string) ([]client.ImageInfo, error) {
			return cl.Images(ctx)
		}),
	}
	o.flags(cmd, true)
	cmd.Flags().BoolVar(&o.noTrunc, "no-trunc", false, "do not shorten digests")
	return cmd
}

func images(o *output) listing[client.ImageInfo] {
	return listing[client.ImageInfo]{
		name:   func(i client.ImageInfo) string { return i.Name + ":" + i.Tag },
		header: []string{"NAME", "TAG", "DIGEST", "CREATED", "SIZE", "ALIASES"},
		row: func(i client.ImageInfo) []string {
			digest := i.Digest
			if !o.noTrunc {
				digest = clip(digest, 20)
			}
			return []string{i.Name, i.Tag, digest, ago(i.Created), bytesOf(i.Bytes), strings.Join(i.Aliases, " ")}
		},
	}
}

func newImageBuild(c *cli) *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:   "build RECIPE",
		Short: "Make the image of a recipe in rootfs/",
		Example: `  sandboxctl image build base
  sandboxctl image build -q python`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(); err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			im, err := cl.BuildImage(cmd.Context(), args[0], func(line string) {
				if !o.quiet {
					fmt.Fprintln(os.Stderr, printable(line, false))
				}
			})
			if err != nil {
				return err
			}
			if o.format == "json" {
				return printJSON(os.Stdout, im)
			}
			_, err = fmt.Println(im.Name + ":" + im.Tag)
			return err
		},
	}
	o.flags(cmd, true)
	return cmd
}

func newImageRm(c *cli) *cobra.Command {
	cmd := verb(c, "rm IMAGE...", "Remove images that no sandbox uses", (*client.Client).RemoveImage)
	cmd.Example = `  sandboxctl image rm python
  sandboxctl image rm $(sandboxctl image ls -q)`
	return cmd
}

func newImageInspect(c *cli) *cobra.Command {
	return &cobra.Command{
		Use:     "inspect IMAGE...",
		Short:   "Print all there is to know of images, as JSON",
		Example: `  sandboxctl image inspect python`,
		Args:    cobra.MinimumNArgs(1),
		RunE:    inspecting(c, (*client.Client).InspectImage),
	}
}

func newImagePrune(c *cli) *cobra.Command {
	var o output
	var all bool
	cmd := &cobra.Command{
		Use:     "prune [-a]",
		Short:   "Remove layers that nobody needs, with -a also images that no sandbox uses",
		Example: `  sandboxctl image prune -a`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			p, err := cl.PruneImages(cmd.Context(), all)
			if err != nil {
				return err
			}
			if o.format == "json" {
				return printJSON(os.Stdout, p)
			}
			for _, name := range append(p.Images, p.Layers...) {
				fmt.Println(printable(name, false))
			}
			if o.format == "table" {
				fmt.Println("Total reclaimed space:", bytesOf(p.BytesReclaimed))
			}
			return nil
		},
	}
	o.flags(cmd, true)
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also remove images that no sandbox uses")
	return cmd
}
