package server

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// files answers the requests about files, as somebody.
type files struct {
	accounts *proc.Accounts
	workdir  string
	stateDir string         // the agent's own, which is not listed
	user     proc.Identity  // whom ~ is the home of, and whom new files belong to
	as       *proc.Identity // whom files are accessed as; nil: the agent itself, which may do all
}

func (f *files) routes(path string) reply.Methods {
	switch path {
	case "/files":
		return reply.Methods{"DELETE": f.around(f.removeFiles)}
	case "/files/info":
		return reply.Methods{"GET": f.around(f.filesInfo)}
	case "/files/permissions":
		return reply.Methods{"POST": f.around(f.permissions)}
	case "/files/mv":
		return reply.Methods{"POST": f.around(f.moveFiles)}
	case "/files/search":
		return reply.Methods{"GET": f.around(f.searchFiles)}
	case "/files/replace":
		return reply.Methods{"POST": f.around(f.replaceFiles)}
	case "/files/upload":
		return reply.Methods{"POST": f.refusing(f.upload)}
	case "/files/download":
		return reply.Methods{"GET": f.around(f.download)}
	case "/directories":
		return reply.Methods{"POST": f.around(f.makeDirs), "DELETE": f.around(f.removeDirs)}
	case "/directories/list":
		return reply.Methods{"GET": f.around(f.listDir)}
	}
	return nil
}

// resolve makes an absolute path of what a client names: relative ones start at
// the working directory of the image, ~ is the home of the user.
func (f *files) resolve(path string) (string, error) {
	switch {
	case path == "":
		return "", reply.Fail(http.StatusBadRequest, reply.BadFile, "the path is empty")
	case strings.IndexByte(path, 0) >= 0:
		return "", reply.Fail(http.StatusBadRequest, reply.BadFile, "the path holds a NUL byte")
	case path == "~" || strings.HasPrefix(path, "~/"):
		path = f.user.Home + path[1:]
	}
	if !filepath.IsAbs(path) {
		path = f.workdir + "/" + path
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

// withoutDots cleans an absolute path without changing what it names: where the
// component before a .. is a symbolic link, .. is the parent of where it points,
// as the kernel has it. What does not exist yet is no link.
func withoutDots(path string) (string, error) {
	if !strings.Contains(path, "..") {
		return filepath.Clean(path), nil
	}
	at := "/"
	for name := range strings.SplitSeq(path, "/") {
		switch name {
		case "", ".":
		case "..":
			dir, err := physical(at)
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

// physical returns the path of a directory without symbolic links.
func physical(dir string) (string, error) {
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

// paths returns the paths of the query, as asked and resolved.
func (f *files) paths(r *http.Request) (asked, resolved []string, err error) {
	asked = r.URL.Query()["path"]
	if len(asked) == 0 {
		return nil, nil, reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter path is missing")
	}
	for _, p := range asked {
		q, err := f.resolve(p)
		if err != nil {
			return nil, nil, err
		}
		resolved = append(resolved, q)
	}
	return asked, resolved, nil
}

func (f *files) fileInfo(path string, fi fs.FileInfo) agent.FileInfo {
	info := agent.FileInfo{
		Path:     path,
		Type:     "other",
		Size:     fi.Size(),
		Modified: fi.ModTime().Format(time.RFC3339Nano),
	}
	switch {
	case fi.Mode().IsRegular():
		info.Type = "file"
	case fi.IsDir():
		info.Type = "directory"
	case fi.Mode()&fs.ModeSymlink != 0:
		info.Type = "symlink"
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		info.Created = time.Unix(st.Ctim.Sec, st.Ctim.Nsec).Format(time.RFC3339Nano) //nolint:unconvert // int32 elsewhere
		info.Owner, info.Group = f.accounts.UserName(st.Uid), f.accounts.GroupName(st.Gid)
		info.Mode = digits(st.Mode)
	}
	return info
}

// digits writes the octal permission as a decimal number: 0644 is 644.
func digits(mode uint32) int {
	mode &= 0o7777
	return int(mode>>9&7)*1000 + int(mode>>6&7)*100 + int(mode>>3&7)*10 + int(mode&7)
}

// fromDigits is digits backwards.
func fromDigits(n int) (uint32, error) {
	if n < 0 || n > 7777 {
		return 0, fmt.Errorf("mode %d: not an octal permission as 644 or 4755", n)
	}
	mode, shift := uint32(0), 0
	for m := n; m > 0; m /= 10 {
		if m%10 > 7 {
			return 0, fmt.Errorf("mode %d: not an octal permission as 644 or 4755", n)
		}
		mode |= uint32(m%10) << shift
		shift += 3
	}
	return mode, nil
}

// filesInfo is GET /files/info.
func (f *files) filesInfo(w http.ResponseWriter, r *http.Request) error {
	asked, resolved, err := f.paths(r)
	if err != nil {
		return err
	}
	infos := make(map[string]agent.FileInfo, len(asked))
	for i, p := range resolved {
		fi, err := os.Lstat(p)
		if err != nil {
			return fsFail("describe a file", err)
		}
		infos[asked[i]] = f.fileInfo(p, fi)
	}
	return reply.JSON(w, http.StatusOK, infos)
}

// removeFiles is DELETE /files.
func (f *files) removeFiles(w http.ResponseWriter, r *http.Request) error {
	_, resolved, err := f.paths(r)
	if err != nil {
		return err
	}
	for _, p := range resolved {
		if err := unix.Unlink(p); err != nil && !missing(err) {
			if fi, statErr := os.Lstat(p); statErr == nil && fi.IsDir() {
				return reply.Fail(http.StatusInternalServerError, reply.Failed, "delete %s: is a directory; use DELETE /directories", p)
			}
			return fsFail("delete "+p, err)
		}
	}
	return reply.OK(w)
}

// missing reports whether err is of a path of which a part is not there, or is no
// directory.
func missing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)
}

// permissions is POST /files/permissions.
func (f *files) permissions(w http.ResponseWriter, r *http.Request) error {
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
		if err := a.apply(p); err != nil {
			return fsFail("set permissions of "+p, err)
		}
	}
	return reply.OK(w)
}

// attributes are resolved owner, group and mode; -1 leaves as is.
type attributes struct{ uid, gid, mode int }

// attributes resolves m with the guest's own accounts.
func (f *files) attributes(m agent.FileMode) (attributes, error) {
	a := attributes{-1, -1, -1}
	if m.Owner != "" {
		uid, err := f.accounts.UID(m.Owner)
		if err != nil {
			return a, reply.Fail(http.StatusInternalServerError, reply.Failed, "owner: %v", err)
		}
		a.uid = int(uid)
	}
	if m.Group != "" {
		gid, err := f.accounts.GID(m.Group)
		if err != nil {
			return a, reply.Fail(http.StatusInternalServerError, reply.Failed, "group: %v", err)
		}
		a.gid = int(gid)
	}
	if m.Mode != 0 {
		mode, err := fromDigits(m.Mode)
		if err != nil {
			return a, reply.BadRequest("%v", err)
		}
		a.mode = int(mode)
	}
	return a, nil
}

// or fills what a leaves open from b.
func (a attributes) or(b attributes) attributes {
	if a.uid < 0 {
		a.uid = b.uid
	}
	if a.gid < 0 {
		a.gid = b.gid
	}
	if a.mode < 0 {
		a.mode = b.mode
	}
	return a
}

// apply sets a on path; links are followed. The owner comes first, because
// changing it clears setuid.
func (a attributes) apply(path string) error {
	if a.uid >= 0 || a.gid >= 0 {
		if err := os.Chown(path, a.uid, a.gid); err != nil {
			return err
		}
	}
	if a.mode >= 0 {
		return os.NewSyscallError("chmod", unix.Chmod(path, uint32(a.mode)))
	}
	if a.uid < 0 && a.gid < 0 {
		_, err := os.Stat(path) // nothing to set, but the file must be there
		return err
	}
	return nil
}

// ownerOfNew is whom new files belong to.
func (f *files) ownerOfNew() attributes {
	return attributes{uid: int(f.user.UID), gid: int(f.user.GID), mode: -1}
}

// chown gives path to uid and gid, unless they are this process's own, as which
// it was made.
func (a attributes) chown(path string) error {
	if a.uid == os.Geteuid() && a.gid == os.Getegid() {
		return nil
	}
	return os.Lchown(path, a.uid, a.gid)
}

// makeParents makes the missing directories of path.
func (f *files) makeParents(path string) error {
	_, err := f.mkdirAll(filepath.Dir(path), f.ownerOfNew())
	return err
}

// mkdirAll makes dir and what is missing above it, owned as a says and 0755. It
// reports whether dir itself is new.
func (f *files) mkdirAll(dir string, a attributes) (created bool, err error) {
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

// A move is one item of POST /files/mv.
type move struct {
	Src  string `json:"src"`
	Dest string `json:"dest"`
}

// moveFiles is POST /files/mv.
func (f *files) moveFiles(w http.ResponseWriter, r *http.Request) error {
	var moves []move
	if err := reply.ReadJSON(w, r, &moves); err != nil {
		return err
	}
	for _, m := range moves {
		if err := f.moveFile(m); err != nil {
			return err
		}
	}
	return reply.OK(w)
}

func (f *files) moveFile(m move) error {
	src, err := f.resolve(m.Src)
	if err != nil {
		return err
	}
	dest, err := f.resolve(m.Dest)
	if err != nil {
		return err
	}
	fi, err := os.Lstat(src)
	if err != nil {
		return fsFail("move "+src, err)
	}
	if err := f.makeParents(dest); err != nil {
		return writeFail("move "+src+" to "+dest, err)
	}
	err = unix.Renameat2(unix.AT_FDCWD, src, unix.AT_FDCWD, dest, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) { // a file system without it
		if _, statErr := os.Lstat(dest); statErr == nil {
			err = unix.EEXIST
		} else {
			err = os.Rename(src, dest)
		}
	}
	if errors.Is(err, unix.EXDEV) {
		err = f.moveAcross(src, dest, fi)
	}
	if err != nil {
		return writeFail("move "+src+" to "+dest, err)
	}
	return nil
}

// moveAcross moves a regular file to another file system, by copy.
func (f *files) moveAcross(src, dest string, fi fs.FileInfo) error {
	if _, err := os.Lstat(dest); err == nil {
		return unix.EEXIST
	}
	if !fi.Mode().IsRegular() {
		return errors.New("source and destination are different file systems, over which only regular files move: use cp -a and rm")
	}
	in, err := openRegular(src)
	if err != nil {
		return err
	}
	defer in.Close()
	d, err := f.newDraft(dest)
	if err != nil {
		return err
	}
	defer d.discard()
	if _, err := io.Copy(d.f, in); err != nil {
		return err
	}
	a := attributes{-1, -1, -1}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		a = attributes{int(st.Uid), int(st.Gid), int(st.Mode & 0o7777)}
	}
	if f.as != nil { // who can not give files away has a copy of their own, as by mv
		a.uid, a.gid = -1, -1
	}
	if err := d.commit(a); err != nil {
		return err
	}
	os.Chtimes(dest, time.Time{}, fi.ModTime()) //nolint:errcheck // as far as it goes
	return os.Remove(src)
}

// openRegular is proc.OpenRegular for what a client names: another kind of file is its mistake.
func openRegular(path string) (*os.File, error) {
	f, err := proc.OpenRegular(path)
	if e, ok := errors.AsType[*proc.NotRegular](err); ok {
		return nil, reply.Fail(http.StatusBadRequest, reply.BadFile, "%v", e)
	}
	return f, err
}

// fsFail gives an error of the file system its place: missing is 404, what no path can be is
// 400, all else 500.
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
