package server

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
)

// draftPrefix begins the name of a file that is being written beside its target.
const draftPrefix = ".sandboxd-draft-"

// A draft becomes a file in one step: written beside its target, renamed over
// it. Whoever reads the target sees the old file or the new one, and a writer
// that breaks off leaves the old one.
type draft struct {
	f      *os.File
	target string     // final symbolic links are followed
	like   attributes // of the file it replaces, or of a new one
	done   bool
}

// newDraft begins a file at path and makes its directories. A target that is
// there must be a regular file.
func (s *Server) newDraft(path string) (*draft, error) {
	target, err := followLinks(path)
	if err != nil {
		return nil, err
	}
	if err := s.makeParents(target); err != nil {
		return nil, err
	}
	d := &draft{target: target, like: s.ownerOfNew().or(attributes{mode: 0o644})}
	fi, err := os.Lstat(target)
	switch {
	case err == nil && fi.IsDir():
		return nil, fail(http.StatusBadRequest, badFile, "%s is a directory", target)
	case err == nil && !fi.Mode().IsRegular():
		return nil, fail(http.StatusBadRequest, badFile, "%s is a device, pipe or socket: only regular files are written", target)
	case err == nil:
		if st, ok := fi.Sys().(*syscall.Stat_t); ok {
			d.like = attributes{int(st.Uid), int(st.Gid), int(st.Mode & 0o7777)}
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	var b [8]byte
	rand.Read(b[:]) //nolint:errcheck // never fails since Go 1.24
	name := filepath.Join(filepath.Dir(target), draftPrefix+hex.EncodeToString(b[:]))
	d.f, err = os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	return d, err
}

// commit gives the draft its attributes, what a leaves open as its
// predecessor's, and its name.
func (d *draft) commit(a attributes) error {
	a = a.or(d.like)
	fd := int(d.f.Fd())
	if a.uid != os.Geteuid() || a.gid != os.Getegid() {
		if err := unix.Fchown(fd, a.uid, a.gid); err != nil {
			return &fs.PathError{Op: "chown", Path: d.target, Err: err}
		}
	}
	if err := unix.Fchmod(fd, uint32(a.mode)); err != nil {
		return &fs.PathError{Op: "chmod", Path: d.target, Err: err}
	}
	err := unix.Rename(d.f.Name(), d.target)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EXDEV) {
		// A file mounted by itself, as /etc/resolv.conf: it can be filled, not replaced.
		return d.fill(a)
	}
	if err != nil {
		return &fs.PathError{Op: "rename", Path: d.target, Err: err}
	}
	d.done = true
	return d.f.Close()
}

// fill writes the draft over its target in place.
func (d *draft) fill(a attributes) error {
	if _, err := d.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	out, err := os.OpenFile(d.target, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	if _, err = io.Copy(out, d.f); err != nil {
		out.Close()
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	return a.apply(d.target)
}

// discard removes a draft that was not committed.
func (d *draft) discard() {
	if !d.done {
		d.f.Close()
		os.Remove(d.f.Name()) //nolint:errcheck // its directory may be gone by now
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

// A replacement is one value of POST /files/replace.
type replacement struct {
	Old string `json:"old"`
	New string `json:"new"`
}

// replaced is one value of its reply.
type replaced struct {
	Count int `json:"replacedCount"`
}

// replaceFiles is POST /files/replace. It replies with the counts, asked for or
// not: SDKs parse a 200 as JSON.
func (s *Server) replaceFiles(w http.ResponseWriter, r *http.Request) error {
	var req map[string]replacement
	if err := readJSON(w, r, &req); err != nil {
		return err
	}
	keys := sortedKeys(req)
	for _, asked := range keys { // all are checked before any is changed
		if req[asked].Old == "" {
			return fail(http.StatusBadRequest, badBody, "%s: old is empty, so there is nothing to look for", asked)
		}
		p, err := s.resolve(asked)
		if err != nil {
			return err
		}
		if _, err := os.Stat(p); err != nil {
			return fsFail("replace in "+p, err)
		}
	}
	counts := make(map[string]replaced, len(req))
	for _, asked := range keys {
		p, _ := s.resolve(asked)
		n, err := s.replaceIn(p, []byte(req[asked].Old), []byte(req[asked].New))
		if err != nil {
			return fsFail("replace in "+p, err)
		}
		counts[asked] = replaced{n}
	}
	return writeJSON(w, http.StatusOK, counts)
}

func (s *Server) replaceIn(path string, old, with []byte) (int, error) {
	in, err := openRegular(path)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	d, err := s.newDraft(path)
	if err != nil {
		return 0, err
	}
	defer d.discard()
	n, err := replaceStream(d.f, in, old, with)
	if err != nil || n == 0 {
		return 0, err // without a match the file is left alone, times included
	}
	return n, d.commit(attributes{-1, -1, -1})
}

// replaceStream copies r to w with every old replaced, left to right, holding
// no more than a chunk and the length of old.
func replaceStream(w io.Writer, r io.Reader, old, with []byte) (count int, err error) {
	buf := make([]byte, 0, max(256<<10, 2*len(old)))
	for {
		n, readErr := io.ReadFull(r, buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		last := readErr == io.EOF || readErr == io.ErrUnexpectedEOF
		if readErr != nil && !last {
			return count, readErr
		}
		rest := buf
		for {
			i := bytes.Index(rest, old)
			if i < 0 {
				break
			}
			if _, err := w.Write(rest[:i]); err != nil {
				return count, err
			}
			if _, err := w.Write(with); err != nil {
				return count, err
			}
			rest = rest[i+len(old):]
			count++
		}
		keep := 0
		if !last {
			keep = min(len(old)-1, len(rest)) // may be the beginning of a match
		}
		if _, err := w.Write(rest[:len(rest)-keep]); err != nil {
			return count, err
		}
		if last {
			return count, nil
		}
		copy(buf, rest[len(rest)-keep:])
		buf = buf[:keep]
	}
}

// metadataOf decodes the JSON of an upload's metadata part.
func metadataOf(b []byte) (path string, m agent.FileMode, err error) {
	var raw struct {
		Path string `json:"path"`
		agent.FileMode
	}
	if err := json.Unmarshal(b, &raw); err != nil {
		return "", m, err
	}
	if raw.Path == "" {
		return "", m, errors.New("it names no path")
	}
	if _, err := fromDigits(raw.Mode); err != nil {
		return "", m, err
	}
	return raw.Path, raw.FileMode, nil
}
