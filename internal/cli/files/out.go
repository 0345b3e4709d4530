package files

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func copyOut(ctx context.Context, cl *client.Client, sandbox, src, dst string) error {
	if dst == "-" {
		return fetch(ctx, cl, sandbox, src, os.Stdout)
	}
	content := strings.HasSuffix(src, "/.") || path.Clean(src) == "/"
	src = path.Clean(src)
	fi, err := cl.Files(sandbox).Stat(ctx, src)
	if err != nil {
		return err
	}
	isDir := false
	if here, err := os.Stat(dst); err == nil {
		isDir = here.IsDir()
	} else if strings.HasSuffix(dst, "/") {
		return errs.New(errs.NotFound, "the local directory %s does not exist; create it first", dst)
	}
	if isDir && !content {
		dst = filepath.Join(dst, path.Base(src))
	}
	switch fi.Type {
	case "file":
		return fetchFile(ctx, cl, sandbox, src, dst, fi.Mode)
	case "directory":
		return fetchTree(ctx, cl, sandbox, src, dst)
	}
	return errs.New(errs.Unsupported, "%s in sandbox %s is a %s; only files and directories can be copied", src, sandbox, fi.Type)
}

func fetch(ctx context.Context, cl *client.Client, sandbox, src string, w io.Writer) error {
	rc, err := cl.Files(sandbox).Download(ctx, src)
	if err != nil {
		return err
	}
	defer rc.Close()
	if _, err := io.Copy(w, rc); err != nil {
		return errs.New(errs.Unavailable, "copy %s out of sandbox %s: %s", src, sandbox, err)
	}
	return nil
}

// fetchFile writes the file that the user named. It follows links, and writes into
// a device or a pipe.
func fetchFile(ctx context.Context, cl *client.Client, sandbox, src, dst string, mode int) error {
	if fi, err := os.Stat(dst); err == nil {
		if !fi.Mode().IsRegular() {
			return overwrite(ctx, cl, sandbox, src, dst)
		}
		if dst, err = filepath.EvalSymlinks(dst); err != nil {
			return errs.New(errs.Invalid, "write %s: %s", dst, err)
		}
	}
	root, err := os.OpenRoot(filepath.Dir(dst))
	if err != nil {
		return errs.New(errs.NotFound, "%s", err)
	}
	defer root.Close()
	err = fetchInto(ctx, cl, sandbox, src, root, filepath.Base(dst), mode)
	if errors.Is(err, errBeside) { // it may still be written itself, as a mount is
		if _, statErr := os.Stat(dst); statErr == nil {
			return overwrite(ctx, cl, sandbox, src, dst)
		}
	}
	return err
}

func overwrite(ctx context.Context, cl *client.Client, sandbox, src, dst string) error {
	f, err := os.OpenFile(dst, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return errs.New(errs.Invalid, "write %s: %s", dst, err)
	}
	return errors.Join(fetch(ctx, cl, sandbox, src, f), f.Close())
}

// errBeside is why a file cannot be made beside another, or take its place.
var errBeside = errors.New("its directory cannot be written")

// fetchInto writes below root and nowhere else, whatever the guest calls its
// files: beside, then renamed, so that what is there stays whole until all of
// the new has come. It keeps mode and owner of what is there.
func fetchInto(ctx context.Context, cl *client.Client, sandbox, src string, root *os.Root, name string, mode int) error {
	fail := func(err error) error {
		code := errs.Wrap(err, errs.Invalid, "write %s: %s", text.Printable(name), err)
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) || errors.Is(err, syscall.EBUSY) {
			return errors.Join(errBeside, code)
		}
		return code
	}
	old, err := root.Lstat(name)
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fail(err)
	case err == nil && !old.Mode().IsRegular():
		return errs.New(errs.Denied, "write %s: it exists and is not a regular file; remove it, or copy to another path",
			text.Printable(name))
	}
	draft := filepath.Join(filepath.Dir(name), ".sandboxctl-"+rand.Text())
	f, err := root.OpenFile(draft, os.O_CREATE|os.O_EXCL|os.O_WRONLY, modeOf(mode, 0o644))
	if err != nil {
		return fail(err)
	}
	if old != nil {
		st := old.Sys().(*syscall.Stat_t)
		f.Chown(int(st.Uid), int(st.Gid)) //nolint:errcheck // as far as we may
		err = f.Chmod(old.Mode().Perm())
	}
	err = errors.Join(err, fetch(ctx, cl, sandbox, src, f), f.Close())
	if err == nil {
		if err = root.Rename(draft, name); err == nil {
			return nil
		}
		err = fail(err)
	}
	return errors.Join(err, root.Remove(draft))
}

// modeOf reads 644 as 0644, without what the guest has no say in: setuid and the like.
func modeOf(decimal int, other fs.FileMode) fs.FileMode {
	n, err := strconv.ParseUint(strconv.Itoa(decimal%1000), 8, 32)
	if err != nil || n == 0 {
		return other
	}
	return fs.FileMode(n).Perm()
}

// maxTreeDepth is deeper than any path of 4096 bytes.
const maxTreeDepth = 4096

func fetchTree(ctx context.Context, cl *client.Client, sandbox, src, dst string) error {
	list, err := cl.Files(sandbox).List(ctx, src, maxTreeDepth)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dst, 0o755); err != nil {
		return errs.New(errs.Invalid, "%s", err)
	}
	root, err := os.OpenRoot(dst)
	if err != nil {
		return errs.New(errs.Invalid, "%s", err)
	}
	defer root.Close()
	var left []string
	for _, fi := range list {
		rel, ok := strings.CutPrefix(fi.Path, strings.TrimSuffix(src, "/")+"/")
		if !ok || !filepath.IsLocal(rel) {
			return errs.New(errs.Denied, "the sandbox reported %q as a file in %s, but it is outside; the copy was stopped",
				text.Printable(fi.Path), src)
		}
		switch fi.Type {
		case "directory":
			err = root.MkdirAll(rel, modeOf(fi.Mode, 0o755)|0o700)
		case "file":
			if dir := filepath.Dir(rel); dir != "." {
				err = root.MkdirAll(dir, 0o755)
			}
			if err == nil {
				err = fetchInto(ctx, cl, sandbox, fi.Path, root, rel, fi.Mode)
			}
		default:
			left = append(left, sandbox+":"+fi.Path)
		}
		if err != nil {
			return err
		}
	}
	leftOut(left)
	return nil
}
