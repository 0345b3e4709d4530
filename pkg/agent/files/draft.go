package files

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/tarball"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// A draft becomes a file in one step: written beside its target, renamed over it. A
// reader of the target sees the old file or the new one, and a writer that breaks off
// leaves the old one. The draft holds its directory open, so it stays in that directory
// even if another one takes the directory's name.
type draft struct {
	f      *os.File
	dir    *os.File   // of the target
	name   string     // in dir; "": it has none
	target string     // final symbolic links are followed
	like   attributes // of the file it replaces, or of a new one
	fills  bool       // it is written over its target's content in the end
}

// newDraft begins a file at path and makes its directories. A target that is
// there must be a regular file.
func (f *Files) newDraft(path string) (_ *draft, err error) {
	d := &draft{like: f.ownerOfNew().or(attributes{mode: 0o644})}
	if d.target, err = followLinks(path); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.discard()
		}
	}()
	if d.dir, err = openDir(filepath.Dir(d.target)); missing(err) { // made only then: most directories exist
		if err = f.makeParents(d.target); err == nil {
			d.dir, err = openDir(filepath.Dir(d.target))
		}
	}
	if err != nil {
		return nil, err
	}
	there, err := d.meetTarget(f.as)
	if err != nil {
		return nil, err
	}
	var b [8]byte
	rand.Read(b[:]) //nolint:errcheck // never fails since Go 1.24
	name := tarball.DraftPrefix + hex.EncodeToString(b[:])
	const create = unix.O_RDWR | unix.O_CREAT | unix.O_EXCL
	d.f, err = openAt(d.dir, name, create)
	if err == nil {
		d.name = name
	} else if f.as != nil && there && errors.Is(err, fs.ErrPermission) { // a user who may write the file may not write its directory
		d.fills = true
		tmp := filepath.Join(os.TempDir(), name)
		if d.f, err = openAt(nil, tmp, create); err == nil {
			err = os.Remove(tmp)
		}
	}
	return d, err
}

// meetTarget checks the file that exists at the target, and reports whether there is
// one.
func (d *draft) meetTarget(as *proc.Identity) (bool, error) {
	base := filepath.Base(d.target)
	var st unix.Stat_t
	err := unix.Fstatat(int(d.dir.Fd()), base, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case missing(err):
		return false, nil
	case err != nil:
		return false, &fs.PathError{Op: "lstat", Path: d.target, Err: err}
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return false, reply.Fail(http.StatusBadRequest, reply.BadFile, "%s is a directory", d.target)
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return false, reply.Fail(http.StatusBadRequest, reply.BadFile,
			"%s is a device, pipe or socket: only regular files are written", d.target)
	}
	d.like = attributes{int(st.Uid), int(st.Gid), int(st.Mode & 0o7777)}
	if as != nil {
		// A user who may replace a file by its directory may still not write it.
		w, err := openAt(d.dir, base, unix.O_WRONLY)
		if err != nil {
			return true, err
		}
		w.Close()
		d.fills = d.like.uid != int(as.UID) || d.like.gid != int(as.GID)
	}
	return true, nil
}

// openDir opens a directory so that files in it can be named.
func openDir(path string) (*os.File, error) { return openAt(nil, path, unix.O_PATH|unix.O_DIRECTORY) }

// openAt opens name in dir, nil of an absolute one. A link is not followed in dir.
// os.OpenFile would need two more system calls to find out whether the file can be
// polled.
func openAt(dir *os.File, name string, flags int) (*os.File, error) {
	at, path := unix.AT_FDCWD, name
	if dir != nil {
		at, path, flags = int(dir.Fd()), filepath.Join(dir.Name(), name), flags|unix.O_NOFOLLOW|unix.O_NONBLOCK
	}
	for {
		fd, err := unix.Openat(at, name, flags|unix.O_CLOEXEC, 0o600)
		switch {
		case err == unix.EINTR: //nolint:errorlint // of unix.Openat it is bare
		case err != nil:
			return nil, &fs.PathError{Op: "open", Path: path, Err: err}
		default:
			return os.NewFile(uintptr(fd), path), nil
		}
	}
}

// commit gives the draft its attributes and its name. Attributes that a leaves open are
// those of the file it replaces.
func (d *draft) commit(a attributes) error {
	if d.fills {
		return d.fill(a)
	}
	all := a.or(d.like)
	if all.uid == os.Geteuid() && all.gid == os.Getegid() {
		all.uid, all.gid = -1, -1 // as whom it was made
	}
	if err := all.applyTo(d.f); err != nil {
		return err
	}
	dir := int(d.dir.Fd())
	err := unix.Renameat(dir, d.name, dir, filepath.Base(d.target))
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EXDEV) {
		// A file mounted by itself, as /etc/resolv.conf: it can be filled, not replaced.
		return d.fill(a)
	}
	if err != nil {
		return &fs.PathError{Op: "rename", Path: d.target, Err: err}
	}
	d.name = ""
	return d.f.Close()
}

// fill writes the draft over its target in place.
func (d *draft) fill(a attributes) error {
	if _, err := d.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	out, err := openAt(d.dir, filepath.Base(d.target), unix.O_WRONLY|unix.O_TRUNC)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, d.f)
	if err == nil {
		err = a.applyTo(out)
	}
	return errors.Join(err, out.Close())
}

// discard closes a draft, and removes it if it was not committed.
func (d *draft) discard() {
	if d.f != nil {
		d.f.Close()
	}
	if d.name != "" {
		unix.Unlinkat(int(d.dir.Fd()), d.name, 0) //nolint:errcheck // it may have been removed
	}
	if d.dir != nil {
		d.dir.Close()
	}
}

// followLinks resolves symbolic links at the end of path, dangling ones too, so
// that writing through a link writes where the link points.
func followLinks(path string) (string, error) {
	for range 40 { // as the kernel does
		to, err := os.Readlink(path)
		if err != nil {
			return path, nil // no link, or nothing there: either will do
		}
		if !filepath.IsAbs(to) {
			to = filepath.Dir(path) + "/" + to
		}
		if path, err = withoutDots(to); err != nil {
			return "", err
		}
	}
	return "", &fs.PathError{Op: "open", Path: path, Err: unix.ELOOP}
}
