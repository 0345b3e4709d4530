package files

import (
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// resolve makes an absolute path of what a client names: relative ones start at
// the working directory of the image, ~ is the home of the user.
func (f *Files) resolve(path string) (string, error) {
	switch {
	case path == "":
		return "", reply.Fail(http.StatusBadRequest, reply.BadFile, "the path is empty")
	case strings.IndexByte(path, 0) >= 0:
		return "", reply.Fail(http.StatusBadRequest, reply.BadFile, "the path holds a NUL byte")
	case path == "~" || strings.HasPrefix(path, "~/"):
		path = f.User.Home + path[1:]
	}
	if !filepath.IsAbs(path) {
		path = f.Workdir + "/" + path
	}
	path, err := withoutDots(path)
	if err != nil {
		return "", fsFail("resolve a path", err)
	}
	for name := range strings.SplitSeq(path, "/") { // gVisor says of such a name that it does not exist
		if len(name) > maxName {
			return "", fsFail("resolve a path", &fs.PathError{Op: "look up", Path: name[:40] + "…", Err: syscall.ENAMETOOLONG})
		}
	}
	return path, nil
}

// maxName is how long a name in a path may be, in bytes: NAME_MAX of limits.h.
const maxName = 255

// withoutDots cleans an absolute path without changing what it names: after a symbolic
// link, .. is the parent of the directory that the link points to, as for the kernel. A
// path that does not exist yet is no link.
func withoutDots(path string) (string, error) {
	if !strings.Contains(path, "..") {
		return filepath.Clean(path), nil
	}
	at := "/"
	for name := range strings.SplitSeq(path, "/") {
		switch name {
		case "", ".":
		case "..":
			dir, err := Physical(at)
			if errors.Is(err, fs.ErrNotExist) {
				if _, lerr := os.Lstat(at); errors.Is(lerr, fs.ErrNotExist) {
					dir, err = at, nil
				}
			}
			if err != nil {
				return "", err
			}
			at = filepath.Dir(dir)
		default:
			at = filepath.Join(at, name)
		}
	}
	return at, nil
}

// Physical returns the path of a directory without symbolic links.
func Physical(dir string) (string, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	p, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil { // no /proc
		return filepath.EvalSymlinks(dir)
	}
	return p, nil
}

// openRegular is proc.OpenRegular for what a client names: another kind of file is its mistake.
func openRegular(path string) (*os.File, error) {
	f, err := proc.OpenRegular(path)
	if e, ok := errors.AsType[*proc.NotRegular](err); ok {
		return nil, reply.Fail(http.StatusBadRequest, reply.BadFile, "%v", e)
	}
	return f, err
}

// fsFail gives an error of the file system its status: a missing file is 404, an
// impossible path 400, all else 500.
func fsFail(what string, err error) error {
	if e, ok := errors.AsType[*reply.Error](err); ok {
		return e
	}
	if errors.Is(err, fs.ErrNotExist) {
		return reply.Fail(http.StatusNotFound, reply.NoFile, "%s: %w", what, err)
	}
	if noPath(err) {
		return reply.Fail(http.StatusBadRequest, reply.BadFile, "%s: %w", what, err)
	}
	return reply.Fail(http.StatusInternalServerError, reply.Failed, "%s: %w", what, err)
}

// noPath reports whether err says that a path can name nothing: it has too many characters, or
// links that lead to each other (path_resolution(7)).
func noPath(err error) bool {
	return errors.Is(err, syscall.ENAMETOOLONG) || errors.Is(err, syscall.ELOOP)
}

// writeFail is fsFail for a file that is made: a missing directory is not a file that
// the client asked for.
func writeFail(what string, err error) error {
	if _, given := errors.AsType[*reply.Error](err); !given && errors.Is(err, fs.ErrNotExist) {
		return reply.Fail(http.StatusInternalServerError, reply.Failed, "%s: %w", what, err)
	}
	return fsFail(what, err)
}

// missing reports whether err is of a path of which a part is not there, or is no
// directory.
func missing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)
}
