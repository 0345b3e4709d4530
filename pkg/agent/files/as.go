package files

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
	"runtime"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/agent/proc"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// identityPrefix begins the routes of files accessed as somebody:
// /v1/filesystem/{uid}/{gid}/files/info is GET /files/info as uid and gid.
const identityPrefix = "/v1/filesystem/"

// asNamed takes uid and gid off path, and returns the files as whom they name.
func (f *Files) asNamed(path string) (*Files, string, error) {
	uid, path, _ := strings.Cut(path, "/")
	gid, path, _ := strings.Cut(path, "/")
	for _, n := range []string{uid, gid} {
		if _, err := proc.ParseID(n); err != nil {
			return nil, "", reply.BadRequest("access files as %.32q and %.32q: each is a number from 0 to 4294967294", uid, gid)
		}
	}
	id, err := f.Accounts.Resolve(uid + ":" + gid)
	if err != nil {
		return nil, "", reply.BadRequest("access files as %s:%s: %v", uid, gid, err)
	}
	as := *f
	as.User, as.as = id, &id
	runtime.LockOSThread()
	if err = id.Enter(); err == nil {
		proc.LeaveIdentity()
	}
	runtime.UnlockOSThread()
	if err != nil {
		return nil, "", reply.BadRequest("access files as %s:%s: %v; a sandbox on runc has only the ids up to %d", uid, gid, err,
			proc.MaxID)
	}
	return &as, "/" + path, nil
}

// enter and leave are around all access to files.
func (f *Files) enter() {
	if f.as == nil {
		return
	}
	runtime.LockOSThread()
	if err := f.as.Enter(); err != nil { // it could when the request came
		runtime.UnlockOSThread()
		panic(http.ErrAbortHandler)
	}
}

func (f *Files) leave() {
	if f.as != nil {
		proc.LeaveIdentity()
		runtime.UnlockOSThread()
	}
}

// do calls fn, which accesses files, in a turn.
func (f *Files) do(fn func()) {
	proc.FileTurns.Do(func() {
		f.enter()
		defer f.leave()
		fn()
	})
}

// lend calls fn, which accesses no files, outside the turn that the caller has.
func (f *Files) lend(fn func()) {
	f.leave()
	defer f.enter()
	proc.FileTurns.Lend(fn)
}

// around answers requests in a turn. While one waits for its client, others
// have the turn, so a slow client holds up nobody.
func (f *Files) around(h reply.Handler) reply.Handler {
	return func(w http.ResponseWriter, r *http.Request) (err error) {
		r.Body = &lendingBody{r.Body, f}
		f.do(func() { err = f.refusing(h)(&lendingWriter{w, f}, r) })
		return err
	}
}

// refusing answers 403 if a user may not do something. The agent itself may do
// everything, so its errors are not refusals.
func (f *Files) refusing(h reply.Handler) reply.Handler {
	if f.as == nil {
		return h
	}
	return func(w http.ResponseWriter, r *http.Request) error {
		err := h(w, r)
		if e, ok := errors.AsType[*reply.Error](err); ok && errors.Is(err, fs.ErrPermission) {
			e.Status, e.Code = http.StatusForbidden, reply.Denied
		}
		return err
	}
}

type lendingBody struct {
	io.ReadCloser
	f *Files
}

func (b *lendingBody) Read(p []byte) (n int, err error) {
	b.f.lend(func() { n, err = b.ReadCloser.Read(p) })
	return n, err
}

// lendingWriter has no ReadFrom: sendfile reads the disk and waits for the client
// in one.
type lendingWriter struct {
	http.ResponseWriter
	f *Files
}

func (w *lendingWriter) Write(p []byte) (n int, err error) {
	w.f.lend(func() { n, err = w.ResponseWriter.Write(p) })
	return n, err
}

// inTurns writes each piece in a turn.
type inTurns struct {
	w io.Writer
	f *Files
}

func (i inTurns) Write(p []byte) (n int, err error) {
	i.f.do(func() { n, err = i.w.Write(p) })
	return n, err
}
