package files

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/internal/tarball"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// copying is one run of cp.
type copying struct {
	cl      *client.Client
	sandbox string
	src     string
	dst     string

	owners, follow, quiet bool
}

func newCp(p *command.Program) *cobra.Command {
	var c copying
	cmd := &cobra.Command{
		Use:   "cp [-aLq] SANDBOX:PATH PATH|- | PATH|- SANDBOX:PATH",
		Short: "Copy files and directories between a sandbox and the local file system",
		Long: `Copy files and directories between a sandbox and the local file system, as docker cp
does. Paths in the sandbox begin at /. The sandbox must be running.

  the second path              a file is copied   a directory is copied
  does not exist               as this path       as this path
  does not exist, ends in "/"  error              as this path
  is a file                    over this file     error
  is a directory               into it            into it; its contents, if the first
                                                  path ends in "/."

cp does not make directories above the second path. It copies symbolic links as links,
and follows the first path with -L. It follows a second path that is a link. It keeps
modes, times and hard links. Files in the sandbox belong to root, unless -a is given.
Local files belong to you and lose setuid bits. A file that exists is replaced once the
new one is complete.

From a sandbox cp takes no link that leads out of what is copied, because your next copy
would write where it leads. -L copies the file behind a first path that is a link. All
links are in a tar: sandboxctl cp SANDBOX:PATH - | tar -x

"-" as the first path reads a tar and unpacks it into a directory that exists; the tar
may be compressed with gzip, bzip2 or zstd. "-" as the second path writes a tar.

If anything is not copied, cp names it and fails. Sockets and devices cannot be copied.`,
		Example: `  sandboxctl cp main.py lab:/tmp/
  sandboxctl cp lab:/var/log/. logs
  tar -c src | sandboxctl cp - lab:/srv
  sandboxctl cp lab:/etc - | tar -t`,
		Args: cobra.ExactArgs(2),
	}
	cmd.RunE = p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
		c.cl = cl
		if !cmd.Flags().Changed("quiet") {
			c.quiet = !command.IsTerminal(os.Stdout)
		}
		return c.run(ctx, args[0], args[1])
	})
	cmd.Flags().BoolVarP(&c.owners, "archive", "a", false, "keep users and groups, by number, when copying to a sandbox")
	cmd.Flags().BoolVarP(&c.follow, "follow-link", "L", false, "follow the first path if it is a symbolic link")
	cmd.Flags().BoolVarP(&c.quiet, "quiet", "q", false, "print no progress and no summary (default if standard output is no terminal)")
	return cmd
}

func (c *copying) run(ctx context.Context, from, to string) error {
	box, src := splitRemote(from)
	otherBox, dst := splitRemote(to)
	c.src, c.dst = src, dst
	switch {
	case from == "" || to == "":
		return errs.New(errs.Invalid, "a path is empty; name a file or a directory")
	case box != "" && otherBox != "":
		return errs.New(errs.Unsupported, "cp does not copy between sandboxes; copy through this host: "+
			"sandboxctl cp %s - | sandboxctl cp - %s", from, to)
	case otherBox != "":
		c.sandbox = otherBox
		return c.in(ctx)
	case box != "":
		c.sandbox = box
		return c.out(ctx)
	}
	return errs.New(errs.Invalid, "one argument must be SANDBOX:PATH and the other a local path; "+
		"write ./a:b for a local file whose name contains a colon")
}

// splitRemote takes SANDBOX:PATH apart; sandbox is empty for a path here.
func splitRemote(s string) (sandbox, p string) {
	name, p, ok := strings.Cut(s, ":")
	if !ok || name == "" || strings.ContainsAny(name, "/.") && strings.HasPrefix(name, ".") || strings.Contains(name, "/") {
		return "", s
	}
	if !strings.HasPrefix(p, "/") {
		p = "/" + p // as docker does
	}
	return name, p
}

// in copies to the sandbox.
func (c *copying) in(ctx context.Context) error {
	to := client.Target{Path: c.dst, Owners: c.owners}
	if c.src == "-" {
		return c.inTar(ctx, to)
	}
	src, err := tarball.Find(c.src, c.follow)
	if err != nil {
		return localErr("copy "+c.src, err)
	}
	to.Name = src.Name
	var size int64
	if !c.quiet {
		size = src.Bytes()
	}
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := src.Pack(w)
		packed <- err
		if _, ok := errors.AsType[tarball.LeftOut](err); ok {
			err = nil // the tar is whole
		}
		w.CloseWithError(err)
	}()
	progress := c.progress("copying to the sandbox", size)
	err = c.cl.Files(c.sandbox).Unpack(ctx, to, progress.of(r))
	r.Close()
	sent := progress.end()
	if perr := <-packed; perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		if _, ok := errors.AsType[tarball.LeftOut](perr); !ok || err == nil {
			err = localErr("copy "+c.src, perr) // why the request broke
		}
	}
	if err == nil {
		progress.summary(size, sent, c.sandbox+":"+c.dst)
	}
	return err
}

// inTar unpacks standard input.
func (c *copying) inTar(ctx context.Context, to client.Target) error {
	if command.IsTerminal(os.Stdin) {
		return errs.New(errs.Invalid, "standard input is a terminal: pipe in a tar, for example: tar -c src | sandboxctl cp - %s:%s",
			c.sandbox, c.dst)
	}
	body, err := uncompressed(os.Stdin)
	if err != nil {
		return err
	}
	in := &reading{Reader: body}
	progress := c.progress("copying to the sandbox", 0)
	err = c.cl.Files(c.sandbox).Unpack(ctx, to, progress.of(in))
	sent := progress.end()
	if lerr := in.err(); lerr != nil {
		return localErr("read standard input", lerr) // why the request broke
	}
	if err == nil {
		progress.summary(sent, sent, c.sandbox+":"+c.dst)
	}
	return err
}

// out copies from the sandbox.
func (c *copying) out(ctx context.Context) error {
	if c.dst == "-" && command.IsTerminal(os.Stdout) {
		return errs.New(errs.Invalid, "a tar cannot be written to a terminal: name a file or a directory, or use a pipe, "+
			"for example: sandboxctl cp %s:%s - | tar -t", c.sandbox, c.src)
	}
	var size int64
	if c.dst != "-" && !c.quiet {
		if fi, err := c.cl.Files(c.sandbox).Stat(ctx, c.src); err == nil && fi.Type == "file" {
			size = fi.Size
		}
	}
	tar, err := c.cl.Files(c.sandbox).Archive(ctx, c.src, c.follow)
	if err != nil {
		return err
	}
	defer tar.Close()
	if c.dst == "-" {
		_, err := io.Copy(os.Stdout, tar)
		return err
	}
	progress := c.progress("copying from the sandbox", size)
	err = tarball.Place(progress.of(tar), c.dst, tarball.BaseOf(c.src), tarball.Options{Untrusted: true})
	sent := progress.end()
	if err != nil {
		return c.outErr(err)
	}
	progress.summary(cmp.Or(size, sent), sent, c.dst)
	return nil
}

// outErr explains why a tar of the sandbox did not become files here.
func (c *copying) outErr(err error) error {
	if _, ok := errors.AsType[*errs.Error](err); ok || errors.Is(err, context.Canceled) {
		return err // of the sandbox
	}
	if tarball.DiskFull(err) {
		return errs.New(errs.Exhausted, "copy %s:%s: %s: the disk of this host is full", c.sandbox, c.src, text.Printable(err.Error()))
	}
	return localErr("copy "+c.sandbox+":"+c.src, err)
}

// localErr is an error about a file of this host, or about what a sandbox wants to become one.
func localErr(what string, err error) error {
	code := errs.Invalid
	if errors.Is(err, fs.ErrNotExist) {
		code = errs.NotFound
	}
	return errs.New(code, "%s: %s", what, text.Printable(err.Error()))
}
