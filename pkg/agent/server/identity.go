package server

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// identityPrefix begins the routes of files accessed as somebody:
// /v1/filesystem/{uid}/{gid}/files/info is GET /files/info as uid and gid.
const identityPrefix = "/v1/filesystem/"

// filesAs takes uid and gid off path, and returns the files as whom they name.
func (s *Server) filesAs(path string) (*files, string, error) {
	uid, path, _ := strings.Cut(path, "/")
	gid, path, _ := strings.Cut(path, "/")
	for _, n := range []string{uid, gid} {
		if _, err := parseID(n); err != nil {
			return nil, "", fail(http.StatusBadRequest, badBody, "access files as %.32q and %.32q: each is a number from 0 to 4294967294", uid, gid)
		}
	}
	id, err := s.accounts.resolve(uid + ":" + gid)
	if err != nil {
		return nil, "", fail(http.StatusBadRequest, badBody, "access files as %s:%s: %v", uid, gid, err)
	}
	f := s.files
	f.user, f.as = id, &id
	runtime.LockOSThread()
	if err = id.enter(); err == nil {
		leaveIdentity()
	}
	runtime.UnlockOSThread()
	if err != nil {
		return nil, "", fail(http.StatusBadRequest, badBody, "access files as %s:%s: %v; a sandbox on runc has the numbers up to 65535", uid, gid, err)
	}
	return &f, "/" + path, nil
}

// enter gives the calling thread, to which the caller is locked, the credentials
// that the kernel asks for when it opens files: setresuid(2) of the thread
// alone, which takes its capabilities. The real and saved ids stay, by which it
// leaves again, and by which no process of that user may signal or trace it.
func (id *identity) enter() error {
	groups, first := id.groups, unsafe.Pointer(nil)
	if len(groups) > 0 {
		first = unsafe.Pointer(&groups[0])
	}
	const keep = ^uintptr(0)
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(first), 0)
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETRESGID, keep, uintptr(id.gid), keep)
	}
	if errno == 0 {
		_, _, errno = unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(id.uid), keep)
	}
	if errno != 0 {
		leaveIdentity()
		return os.NewSyscallError("setresuid", errno)
	}
	return nil
}

// The agent's own, before any thread had others.
var ownUID, ownGID, ownGroups = os.Geteuid(), os.Getegid(), func() []uint32 {
	have, _ := os.Getgroups()
	groups := make([]uint32, len(have))
	for i, g := range have {
		groups[i] = uint32(g)
	}
	return groups
}()

// leaveIdentity undoes enter.
func leaveIdentity() {
	const keep = ^uintptr(0)
	var first unsafe.Pointer
	if len(ownGroups) > 0 {
		first = unsafe.Pointer(&ownGroups[0])
	}
	_, _, e1 := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(ownUID), keep)
	_, _, e2 := unix.RawSyscall(unix.SYS_SETRESGID, keep, uintptr(ownGID), keep)
	_, _, e3 := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(ownGroups)), uintptr(first), 0)
	if e1 != 0 || e2 != 0 || e3 != 0 {
		// Not to be met: the saved ids are the agent's. The thread must serve nobody.
		panic(fmt.Sprintf("leave an identity: %v, %v, %v", e1, e2, e3))
	}
}

// enter and leave are around all access to files.
func (f *files) enter() {
	if f.as == nil {
		return
	}
	runtime.LockOSThread()
	if err := f.as.enter(); err != nil { // it could when the request came
		runtime.UnlockOSThread()
		panic(http.ErrAbortHandler)
	}
}

func (f *files) leave() {
	if f.as != nil {
		leaveIdentity()
		runtime.UnlockOSThread()
	}
}

// do calls fn, which accesses files, in a turn.
func (f *files) do(fn func()) {
	fileTurns.do(func() {
		f.enter()
		defer f.leave()
		fn()
	})
}

// lend calls fn, which accesses none, outside the turn that the caller has.
func (f *files) lend(fn func()) {
	f.leave()
	defer f.enter()
	fileTurns.lend(fn)
}

// around answers requests in a turn. While one waits for its client, others
// have the turn, so a slow client holds up nobody.
func (f *files) around(h handler) handler {
	return func(w http.ResponseWriter, r *http.Request) (err error) {
		r.Body = &lendingBody{r.Body, f}
		f.do(func() { err = f.refusing(h)(&lendingWriter{w, f}, r) })
		return err
	}
}

// refusing answers 403 for what somebody may not do. The agent itself may do all:
// what stops that is no refusal.
func (f *files) refusing(h handler) handler {
	if f.as == nil {
		return h
	}
	return func(w http.ResponseWriter, r *http.Request) error {
		err := h(w, r)
		if e, ok := errors.AsType[*apiError](err); ok && errors.Is(err, fs.ErrPermission) {
			e.status, e.code = http.StatusForbidden, denied
		}
		return err
	}
}

type lendingBody struct {
	io.ReadCloser
	f *files
}

func (b *lendingBody) Read(p []byte) (n int, err error) {
	b.f.lend(func() { n, err = b.ReadCloser.Read(p) })
	return n, err
}

// lendingWriter has no ReadFrom: sendfile reads the disk and waits for the client
// in one.
type lendingWriter struct {
	http.ResponseWriter
	f *files
}

func (w *lendingWriter) Write(p []byte) (n int, err error) {
	w.f.lend(func() { n, err = w.ResponseWriter.Write(p) })
	return n, err
}

// inTurns writes each piece in a turn.
type inTurns struct {
	w io.Writer
	f *files
}

func (i inTurns) Write(p []byte) (n int, err error) {
	i.f.do(func() { n, err = i.w.Write(p) })
	return n, err
}
