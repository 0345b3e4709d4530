package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newCp(p *command.Program) *cobra.Command {
	return &cobra.Command{
		Use:   "cp SANDBOX:PATH PATH | PATH SANDBOX:PATH",
		Short: "Copy files and directories between a sandbox and the local file system",
		Long: `Copy files and directories between a sandbox and the local file system.

A directory is copied with everything below it: into PATH if that is a directory, else
as PATH. "-" is standard input or output, for one file. cp leaves symbolic links out and
names them on standard error.`,
		Example: `  sandboxctl cp main.py lab:/tmp/
  sandboxctl cp lab:/var/log/. logs`,
		Args: cobra.ExactArgs(2),
		RunE: p.Run(func(ctx context.Context, cl *client.Client, args []string) error {
			from, src := splitRemote(args[0])
			to, dst := splitRemote(args[1])
			switch {
			case from == "" && to != "":
				return copyIn(ctx, cl, src, to, dst)
			case from != "" && to == "":
				return copyOut(ctx, cl, from, src, dst)
			}
			return errs.New(errs.Invalid, "one argument must be SANDBOX:PATH and the other a local path; "+
				"write ./a:b for a local file whose name contains a colon")
		}),
	}
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

// target says where in a sandbox a source named base goes: into dst if that is
// a directory or looks like one, else it becomes dst.
func target(ctx context.Context, cl *client.Client, sandbox, dst, base string) (string, error) {
	if strings.HasSuffix(dst, "/") {
		return path.Join(dst, base), nil
	}
	fi, err := cl.Files(sandbox).Stat(ctx, dst)
	switch {
	case err == nil && fi.Type == "directory":
		return path.Join(dst, base), nil
	case err == nil, isFileNotFound(err):
		return path.Clean(dst), nil
	}
	return "", err
}

// isFileNotFound tells a missing file from a missing sandbox.
func isFileNotFound(err error) bool {
	e, ok := errors.AsType[*errs.Error](err)
	return ok && e.Code == errs.NotFound && e.Wire == "FILE_NOT_FOUND"
}

func copyIn(ctx context.Context, cl *client.Client, src, sandbox, dst string) error {
	if src == "-" {
		if strings.HasSuffix(dst, "/") {
			return errs.New(errs.Invalid, "standard input can only be copied to a file, and %s is a directory", dst)
		}
		stdin := func() (io.ReadCloser, error) { return io.NopCloser(os.Stdin), nil }
		return cl.Files(sandbox).Put(ctx, []client.Upload{{Path: dst, Mode: 644, Size: -1, Open: stdin}})
	}
	fi, err := os.Stat(src)
	if err != nil {
		return errs.New(errs.NotFound, "%s", err)
	}
	base := filepath.Base(src)
	if base == "." || base == ".." || strings.HasSuffix(src, "/.") {
		base = "." // the content, not the directory
	}
	if dst, err = target(ctx, cl, sandbox, dst, base); err != nil {
		return err
	}
	if !fi.IsDir() {
		return cl.Files(sandbox).Put(ctx, []client.Upload{upload(src, dst, fi)})
	}
	return copyTree(ctx, cl, src, sandbox, dst)
}

func upload(src, dst string, fi fs.FileInfo) client.Upload {
	size := fi.Size()
	if size == 0 {
		size = -1 // it is empty, or lies in /proc
	}
	return client.Upload{Path: dst, Mode: decimalMode(fi.Mode()), Size: size, Open: func() (io.ReadCloser, error) { return os.Open(src) }}
}

// decimalMode writes 0644 as 644.
func decimalMode(m fs.FileMode) int {
	n, err := strconv.Atoi(strconv.FormatUint(uint64(m.Perm()), 8))
	if err != nil || n == 0 {
		return 644 // zero would mean "leave as it is"
	}
	return n
}

// batch is how many files travel in one request.
const batch = 256

func copyTree(ctx context.Context, cl *client.Client, src, sandbox, dst string) error {
	dirs := map[string]int{}
	var files []client.Upload
	var left []string
	err := filepath.WalkDir(src, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(src, p)
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		to := path.Join(dst, filepath.ToSlash(rel))
		switch {
		case d.IsDir():
			dirs[to] = decimalMode(fi.Mode())
		case fi.Mode().IsRegular():
			files = append(files, upload(p, to, fi))
		default:
			left = append(left, p)
		}
		return nil
	})
	if err != nil {
		return errs.New(errs.Invalid, "read %s: %s", src, err)
	}
	if err := cl.Files(sandbox).Mkdir(ctx, dirs); err != nil {
		return err
	}
	for len(files) > 0 {
		n := min(batch, len(files))
		if err := cl.Files(sandbox).Put(ctx, files[:n]); err != nil {
			return err
		}
		files = files[n:]
	}
	leftOut(left)
	return nil
}

func leftOut(left []string) {
	for i, p := range left {
		if i == 10 {
			fmt.Fprintf(os.Stderr, "sandboxctl: and %d more\n", len(left)-i)
			return
		}
		fmt.Fprintf(os.Stderr, "sandboxctl: left out %s: neither a file nor a directory\n", text.Printable(p))
	}
}
