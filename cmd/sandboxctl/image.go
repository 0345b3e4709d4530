package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/pkg/client"
)

func newImage(c *cli) *cobra.Command {
	cmd := &cobra.Command{Use: "image", Aliases: []string{"images"}, Short: "List, build and remove images"}
	cmd.AddCommand(newImageLs(c), newImageBuild(c), newImageRm(c))
	return cmd
}

func newImageLs(c *cli) *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List images",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			cl, err := c.connect()
			if err != nil {
				return err
			}
			list, err := cl.Images(cmd.Context())
			if err != nil {
				return err
			}
			return o.images(list)
		},
	}
	o.flags(cmd, true)
	cmd.Flags().BoolVar(&o.noTrunc, "no-trunc", false, "do not shorten digests")
	return cmd
}

func (o *output) images(list []client.ImageInfo) error {
	switch o.format {
	case "json":
		return printJSON(os.Stdout, list)
	case "name":
		for _, i := range list {
			fmt.Println(printable(i.Name+":"+i.Tag, false))
		}
		return nil
	}
	rows := make([][]string, 0, len(list))
	for _, i := range list {
		digest := i.Digest
		if !o.noTrunc {
			digest = clip(digest, 20)
		}
		rows = append(rows, []string{i.Name, i.Tag, digest, ago(i.Created), bytesOf(i.Bytes)})
	}
	return table(os.Stdout, []string{"NAME", "TAG", "DIGEST", "CREATED", "SIZE"}, rows)
}

func newImageBuild(c *cli) *cobra.Command {
	var o output
	cmd := &cobra.Command{
		Use:   "build RECIPE",
		Short: "Make the image of a recipe in rootfs/",
		Args:  cobra.ExactArgs(1),
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
	return verb(c, "rm IMAGE...", "Remove images that no sandbox uses", (*client.Client).RemoveImage)
}
