package files

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/bmatcuk/doublestar/v4"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/tarball"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// makeDirs is POST /directories. The mode applies to a directory that is new,
// not to those above it, which are 0755.
func (f *Files) makeDirs(w http.ResponseWriter, r *http.Request) error {
	var req map[string]agent.FileMode
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	for _, asked := range slices.Sorted(maps.Keys(req)) {
		p, err := f.resolve(asked)
		if err != nil {
			return err
		}
		a, err := f.attributes(req[asked])
		if err != nil {
			return err
		}
		created, err := f.mkdirAll(p, attributes{a.uid, a.gid, -1}.or(f.ownerOfNew()))
		if err == nil && created && a.mode >= 0 {
			err = attributes{-1, -1, a.mode}.apply(p)
		}
		if err != nil {
			return writeFail("make directory "+p, err)
		}
	}
	return reply.OK(w)
}

// MakeDir makes dir, an absolute path, and what is missing above it, for the user.
func (f *Files) MakeDir(dir string) error {
	_, err := f.mkdirAll(dir, f.ownerOfNew())
	return err
}

// makeParents makes the missing directories of path.
func (f *Files) makeParents(path string) error { return f.MakeDir(filepath.Dir(path)) }

// mkdirAll makes dir and what is missing above it, owned as a says and 0755. It
// reports whether dir itself is new.
func (f *Files) mkdirAll(dir string, a attributes) (created bool, err error) {
	fi, err := os.Stat(dir)
	if err == nil {
		if !fi.IsDir() {
			return false, &fs.PathError{Op: "mkdir", Path: dir, Err: unix.ENOTDIR}
		}
		return false, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	if parent := filepath.Dir(dir); parent != dir {
		if _, err := f.mkdirAll(parent, a); err != nil {
			return false, err
		}
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		if errors.Is(err, fs.ErrExist) { // made by another meanwhile, or a dangling link
			fi, err2 := os.Stat(dir)
			if err2 == nil && fi.IsDir() {
				return false, nil
			}
		}
		return false, err
	}
	if err := unix.Chmod(dir, 0o755); err != nil { // whatever the umask
		return true, err
	}
	return true, a.chown(dir)
}

// removeDirs is DELETE /directories: rm -rf.
func (f *Files) removeDirs(w http.ResponseWriter, r *http.Request) error {
	_, resolved, err := f.paths(r)
	if err != nil {
		return err
	}
	for _, p := range resolved {
		if p == "/" {
			return reply.Fail(http.StatusBadRequest, reply.BadFile, "refused to delete /: delete the sandbox instead")
		}
	}
	for _, p := range resolved {
		if err := os.RemoveAll(p); err != nil {
			return fsFail("delete "+p, err)
		}
	}
	return reply.OK(w)
}

// listDir is GET /directories/list.
func (f *Files) listDir(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	root, err := f.existing(q.Get("path"))
	if err != nil {
		return err
	}
	depth := 1
	if d := q.Get("depth"); d != "" {
		if depth, err = strconv.Atoi(d); err != nil || depth < 0 {
			return reply.Fail(http.StatusBadRequest, reply.BadFile, "depth is %.32q: want a number of levels, 0 or more", d)
		}
	}
	if fi, err := os.Lstat(root); err != nil || !fi.IsDir() {
		return reply.Fail(http.StatusBadRequest, reply.BadFile, "list %s: not a directory (a symbolic link to one does not count)", root)
	}
	if depth > 0 {
		if _, err := os.ReadDir(root); err != nil {
			return fsFail("list "+root, err)
		}
	}
	out := newList(w)
	f.walk(root, func(path string, d fs.DirEntry, level int) error {
		if level > depth {
			return fs.SkipDir
		}
		f.emit(out, path, d)
		if d.IsDir() && level == depth {
			return fs.SkipDir
		}
		return nil
	})
	return out.end()
}

// searchFiles is GET /files/search. A pattern without a slash matches base
// names, as in execd; one with a slash the path below the root.
func (f *Files) searchFiles(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	root, err := f.existing(q.Get("path"))
	if err != nil {
		return err
	}
	pattern := cmp.Or(q.Get("pattern"), "**")
	if !doublestar.ValidatePattern(pattern) {
		return reply.Fail(http.StatusBadRequest, reply.BadFile, "pattern %.128q is malformed", pattern)
	}
	wholePath := strings.Contains(pattern, "/")
	pattern = strings.TrimPrefix(pattern, "/")
	out := newList(w)
	f.walk(root, func(path string, d fs.DirEntry, _ int) error {
		if r.Context().Err() != nil {
			return fs.SkipAll
		}
		if d.IsDir() {
			return nil
		}
		name := d.Name()
		if wholePath {
			name = strings.TrimPrefix(strings.TrimPrefix(path, root), "/")
		}
		if doublestar.MatchUnvalidated(pattern, name) {
			f.emit(out, path, d)
		}
		return nil
	})
	return out.end()
}

// existing resolves a path that must be there.
func (f *Files) existing(asked string) (string, error) {
	if asked == "" {
		return "", reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter path is missing")
	}
	p, err := f.resolve(asked)
	if err != nil {
		return "", err
	}
	if _, err := os.Lstat(p); err != nil {
		return "", fsFail("read directory", err)
	}
	return p, nil
}

// walk visits what lies below root, in lexical order, with its level from 1. It follows
// no links. It skips names that cannot be read, the agent's own files and, unless root
// is in them, /proc and /sys, whose files are made when they are read.
func (f *Files) walk(root string, visit func(path string, d fs.DirEntry, level int) error) {
	base := strings.Count(strings.TrimSuffix(root, "/"), "/")
	filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error { //nolint:errcheck // visit's only
		if path == root {
			return nil
		}
		if err != nil {
			return fs.SkipDir
		}
		if path == "/proc" || path == "/sys" || path == f.StateDir || strings.HasPrefix(d.Name(), tarball.DraftPrefix) {
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		return visit(path, d, strings.Count(path, "/")-base)
	})
}

func (f *Files) emit(out *list, path string, d fs.DirEntry) {
	if fi, err := d.Info(); err == nil { // else it went meanwhile
		out.add(f.fileInfo(path, fi))
	}
}

// A list is a JSON array that is sent while it is made.
type list struct {
	w *bufio.Writer
	n int
}

func newList(w http.ResponseWriter) *list {
	w.Header().Set("Content-Type", "application/json")
	l := &list{w: bufio.NewWriterSize(w, 32<<10)}
	l.w.WriteByte('[') //nolint:errcheck // sticky
	return l
}

func (l *list) add(v any) {
	b, err := json.Marshal(v)
	if err != nil {
		return // strings and numbers always encode
	}
	if l.n++; l.n > 1 {
		l.w.WriteByte(',') //nolint:errcheck // sticky
	}
	l.w.Write(b) //nolint:errcheck // sticky
}

func (l *list) end() error {
	l.w.WriteByte(']') //nolint:errcheck // sticky
	l.w.Flush()        //nolint:errcheck // the client is gone
	return nil
}
