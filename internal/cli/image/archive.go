package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newImageImport(p *command.Program) *cobra.Command {
	var o command.Output
	var format string
	cmd := &cobra.Command{
		Use:   "import FILE|DIRECTORY|- [NAME[:TAG]]",
		Short: "Import an image from an archive: a root file system, docker save or an OCI layout",
		Long: `Import an image from an archive: a tar of a root file system, the output of docker
save, podman save or buildx, or an OCI image layout as a tar or a directory. Tars may
be compressed with gzip or zstd. Without NAME the image gets all names in its archive.`,
		Example: `  docker save alpine:3 | sandboxctl image import -
  sandboxctl image import rootfs.tar.gz mine:1
  tar -C /srv/chroot -c . | sandboxctl image import - chroot`,
		Args: cobra.RangeArgs(1, 2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			name := ""
			if len(args) > 1 {
				name = args[1]
			}
			return importImage(ctx, cl, &o, args[0], client.Archive{Name: name, Format: format})
		}),
	}
	o.Flags(cmd, true)
	cmd.Flags().StringVar(&format, "format", "auto", "archive format: auto, rootfs, docker or oci")
	command.Choices(cmd, "format", "auto", "rootfs", "docker", "oci")
	return cmd
}

func newImageLoad(p *command.Program) *cobra.Command {
	var o command.Output
	var input string
	cmd := &cobra.Command{
		Use:     "load [-i FILE]",
		Short:   "Load an image from the output of docker save, under the name in it",
		Example: "  docker save alpine:3 | sandboxctl image load",
		Args:    cobra.NoArgs,
		RunE: p.Run(func(ctx context.Context, cl *client.Client, _ []string) error {
			return importImage(ctx, cl, &o, input, client.Archive{})
		}),
	}
	o.Flags(cmd, true)
	cmd.Flags().StringVarP(&input, "input", "i", "-", "read from this file instead of standard input")
	return cmd
}

// importImage sends an archive and shows its progress on a terminal.
func importImage(ctx context.Context, cl *client.Client, o *command.Output, file string, a client.Archive) error {
	body, size, err := openArchive(file)
	if err != nil {
		return err
	}
	defer body.Close()
	a.Body, a.Size = body, size
	return comes(o, func(progress func(wire.ImportProgress)) (wire.ImageInfo, error) {
		return cl.Images().Import(ctx, a, progress)
	})
}

// comes shows the progress of an import or a pull on a terminal, and then prints the
// image.
func comes(o *command.Output, get func(progress func(wire.ImportProgress)) (wire.ImageInfo, error)) error {
	var bar command.Bar
	if !o.Quiet && command.IsTerminal(os.Stderr) {
		bar.On = os.Stderr
	}
	im, err := get(bar.Image)
	bar.Clear() // before anything else is printed on its line
	if err != nil {
		return err
	}
	for _, n := range im.Notes {
		command.Note(fmt.Sprintf("image %s:%s: %s", im.Name, im.Tag, n))
	}
	return o.One(im, im.Name+":"+im.Tag)
}

// openArchive opens a file, standard input, or a directory as a tar of it. The
// size is 0 if it is not known.
func openArchive(file string) (io.ReadCloser, int64, error) {
	if file == "-" {
		if command.IsTerminal(os.Stdin) {
			return nil, 0, errs.New(errs.Invalid, "standard input is a terminal: give a file, or pipe in an archive, "+
				"for example: docker save alpine | sandboxctl image import -")
		}
		return os.Stdin, 0, nil
	}
	fi, err := os.Stat(file)
	if err != nil {
		return nil, 0, err
	}
	if !fi.IsDir() {
		f, err := os.Open(file)
		if err != nil {
			return nil, 0, err
		}
		if !fi.Mode().IsRegular() {
			return f, 0, nil
		}
		return f, fi.Size(), nil
	}
	if _, err := os.Stat(filepath.Join(file, "oci-layout")); err != nil {
		return nil, 0, errs.New(errs.Invalid, "%s is a directory, but not an OCI layout; to import a root file system: "+
			"tar -C %s --numeric-owner -c . | sandboxctl image import - NAME", file, file)
	}
	r, w := io.Pipe()
	go func() {
		tw := tar.NewWriter(w)
		w.CloseWithError(errors.Join(tw.AddFS(os.DirFS(file)), tw.Close()))
	}()
	return r, 0, nil
}

func newImageExport(p *command.Program) *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use:     "export IMAGE [-o FILE]",
		Aliases: []string{"save"},
		Short:   "Save an image as an OCI archive, which docker load, podman load and image import read",
		Example: "  sandboxctl image export mine:1 -o mine.tar\n  sandboxctl image export mine:1 | podman load",
		Args:    cobra.ExactArgs(1),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			if out == "" || out == "-" {
				if command.IsTerminal(os.Stdout) {
					return errs.New(errs.Invalid, "an archive cannot be written to a terminal: use -o FILE or a pipe")
				}
				return cl.Images().Export(ctx, args[0], os.Stdout)
			}
			return command.WriteFile(out, 0o644, func(w io.Writer) error { return cl.Images().Export(ctx, args[0], w) })
		}),
	}
	cmd.Flags().StringVarP(&out, "output", "o", "", "write to this file instead of standard output")
	return cmd
}
