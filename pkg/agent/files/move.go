package files

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// A move is one item of POST /files/mv.
type move struct {
	Src  string `json:"src"`
	Dest string `json:"dest"`
}

// moveFiles is POST /files/mv.
func (f *Files) moveFiles(w http.ResponseWriter, r *http.Request) error {
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

func (f *Files) moveFile(m move) error {
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
func (f *Files) moveAcross(src, dest string, fi fs.FileInfo) error {
	if _, err := os.Lstat(dest); err == nil {
		return unix.EEXIST
	}
	if !fi.Mode().IsRegular() {
		return errors.New("source and destination are on different file systems, where only regular files can be moved: use cp -a and rm")
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
	if f.as != nil { // a user who cannot give files away gets a copy, as by mv
		a.uid, a.gid = -1, -1
	}
	if err := d.commit(a); err != nil {
		return err
	}
	os.Chtimes(dest, time.Time{}, fi.ModTime()) //nolint:errcheck // as far as it goes
	return os.Remove(src)
}
