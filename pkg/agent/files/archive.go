package files

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/tarball"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// pack is GET /files/archive: a tar of a file or of a directory. What the guest's kernel makes up
// is left out of a copy from above it, as is what belongs to the agent.
func (f *Files) pack(w http.ResponseWriter, r *http.Request) error {
	asked, path, err := f.archivePath(r)
	if err != nil {
		return err
	}
	follow, err := flag(r, "follow")
	if err != nil {
		return err
	}
	src, err := tarball.Find(path, follow)
	if errors.Is(err, unix.ENOTDIR) {
		return reply.Fail(http.StatusBadRequest, reply.BadFile, "copy %s: %w", asked, err)
	}
	if err != nil {
		return fsFail("copy "+asked, err)
	}
	src.Hollow, src.Hidden = []string{"/dev", "/proc", "/sys"}, []string{f.StateDir}
	out := newTarWriter(w, r)
	if r.Method == http.MethodHead {
		return nil
	}
	err = src.Pack(out)
	if err != nil && !out.begun { // nothing but an error was sent
		if _, ok := errors.AsType[tarball.LeftOut](err); !ok {
			return fsFail("copy "+asked, err)
		}
	}
	out.end(err)
	return nil
}

// unpack is PUT /files/archive: it copies the file or directory in a tar to path as name, by the
// rules of docker cp; without a name, it unpacks any tar into the directory path.
func (f *Files) unpack(_ http.ResponseWriter, r *http.Request) error {
	asked, path, err := f.archivePath(r)
	if err != nil {
		return err
	}
	var o tarball.Options
	if o.Owners, err = flag(r, "owners"); err != nil {
		return err
	}
	if b, ok := r.Body.(*lendingBody); ok {
		b.ReadCloser = whole{b.ReadCloser}
	}
	if q := r.URL.Query(); q.Has("name") {
		err = tarball.Place(r.Body, path, q.Get("name"), o)
	} else {
		err = tarball.Unpack(r.Body, path, o)
	}
	return f.unpackFail(asked, path, err)
}

// whole reads as much as there is room for, so that the turn is lent less often: a body comes in
// pieces of 32 KiB at most.
type whole struct{ io.ReadCloser }

func (w whole) Read(p []byte) (int, error) {
	n, err := io.ReadFull(w.ReadCloser, p)
	if n > 0 {
		err = nil // it comes again
	}
	return n, err
}

// unpackFail gives an error of package tarball its status.
func (f *Files) unpackFail(asked, path string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[tarball.LeftOut](err); ok {
		return reply.Fail(http.StatusBadRequest, reply.BadContent, "copy to %s: %w", asked, err)
	}
	if _, ok := errors.AsType[*tarball.Broken](err); ok {
		return reply.Fail(http.StatusBadRequest, reply.BadContent, "copy to %s: %w", asked, err)
	}
	if e, ok := errors.AsType[*tarball.Refusal](err); ok && !missing(err) {
		return reply.Fail(http.StatusBadRequest, reply.BadFile, "copy to %s: %w", asked, e)
	}
	if tarball.DiskFull(err) && sameDisk(path, f.StateDir) {
		return reply.Fail(http.StatusInsufficientStorage, agent.ReasonDiskFull, "copy to %s: %w: %s", asked, err, f.Limits().DiskFull())
	}
	return fsFail("copy to "+asked, err)
}

// sameDisk reports whether a path, or the directory above it, is on the file system of a directory:
// if that is the agent's own, it is the disk of the sandbox, and neither a volume nor a tmpfs.
func sameDisk(path, dir string) bool {
	var at, own unix.Stat_t
	err := unix.Stat(path, &at)
	if err != nil {
		err = unix.Stat(filepath.Dir(path), &at)
	}
	return err == nil && unix.Stat(dir, &own) == nil && own.Dev == at.Dev
}

// archivePath returns the path of the query, as asked and resolved. What follows the name of a
// directory, "/" or "/.", has a meaning and stays.
func (f *Files) archivePath(r *http.Request) (asked, path string, err error) {
	if asked = r.URL.Query().Get("path"); asked == "" {
		return "", "", reply.Fail(http.StatusBadRequest, reply.NoQuery, "the query parameter path is missing")
	}
	if path, err = f.resolve(asked); err != nil || path == "/" {
		return asked, path, err
	}
	for _, end := range []string{"/", "/."} {
		if strings.HasSuffix(asked, end) {
			path += end
		}
	}
	return asked, path, nil
}

// flag reads a parameter that is true or false.
func flag(r *http.Request, name string) (bool, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return false, nil
	}
	is, err := strconv.ParseBool(s)
	if err != nil {
		return false, reply.Fail(http.StatusBadRequest, reply.BadFile, "%s is %.32q: want true or false", name, s)
	}
	return is, nil
}

// A tarWriter sends a tar: as frames to clients that ask for them, so that an error in the middle
// has a text, or as it is.
type tarWriter struct {
	w      http.ResponseWriter
	frames bool
	begun  bool
	buf    []byte // with room for the header of a frame
}

func newTarWriter(w http.ResponseWriter, r *http.Request) *tarWriter {
	t := &tarWriter{w: w, frames: strings.Contains(r.Header.Get("Accept"), agent.FramesType)}
	t.buf = make([]byte, agent.FrameHeader, agent.FrameHeader+ioBuffer)
	w.Header().Set("Content-Type", "application/x-tar")
	if t.frames {
		w.Header().Set("Content-Type", agent.FramesType)
	}
	return t
}

func (t *tarWriter) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		m := copy(t.buf[len(t.buf):cap(t.buf)], p)
		t.buf, p, n = t.buf[:len(t.buf)+m], p[m:], n+m
		if len(t.buf) == cap(t.buf) {
			if err := t.flush(); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// flush sends what is in the buffer.
func (t *tarWriter) flush() error {
	out := t.buf
	if len(out) == agent.FrameHeader {
		return nil
	}
	t.buf = t.buf[:agent.FrameHeader]
	if !t.frames {
		t.begun = true
		_, err := t.w.Write(out[agent.FrameHeader:])
		return err
	}
	if !t.begun {
		t.begun = true
		if _, err := t.w.Write(agent.AppendFrame(nil, agent.FrameControl, []byte("{}"))); err != nil {
			return err
		}
	}
	agent.AppendFrameHeader(out[:0], agent.FrameStdout, len(out)-agent.FrameHeader)
	_, err := t.w.Write(out)
	return err
}

// end sends the rest. Frames end with the error. A bare tar that is not complete is cut off, so
// that no client takes it for one that is; sockets are not missed in it.
func (t *tarWriter) end(err error) {
	if _, ok := errors.AsType[tarball.LeftOut](err); ok && !t.frames {
		err = nil
	}
	if ferr := t.flush(); err == nil {
		err = ferr
	}
	if !t.frames {
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		return
	}
	exit := agent.FrameExit{}
	if err != nil {
		exit = agent.FrameExit{ExitCode: 1, Error: err.Error()}
	}
	if b, err := json.Marshal(exit); err == nil { // it always encodes
		t.w.Write(agent.AppendFrame(nil, agent.FrameEnd, b)) //nolint:errcheck // the client is gone
	}
}
