package child

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A Home is where a child that outlives the daemon is found again.
type Home struct {
	Name    string // of its socket in the directory, without the ending
	Pid     int
	Started uint64 // in ticks since the host's start, as /proc/<pid>/stat has it
}

// SocketPath is the path of the socket at which a child takes the line of the next daemon.
func SocketPath(dir, name string) string { return filepath.Join(dir, name+".sock") }

// listen makes that socket. Only root may enter dir.
func listen(dir, name string) (*os.File, error) {
	return onSocket(dir, name, "listen", func(fd int, at *unix.SockaddrUnix) error {
		if err := unix.Bind(fd, at); err != nil {
			return err
		}
		return unix.Listen(fd, 16)
	})
}

// onSocket makes a socket, and does do with it and its address, which may be longer than the
// kernel takes it.
func onSocket(dir, name, what string, do func(fd int, at *unix.SockaddrUnix) error) (*os.File, error) {
	d, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(d)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if err := do(fd, &unix.SockaddrUnix{Name: SocketPath("/proc/self/fd/"+strconv.Itoa(d), name)}); err != nil {
		unix.Close(fd)
		return nil, &os.PathError{Op: what, Path: SocketPath(dir, name), Err: err}
	}
	return os.NewFile(uintptr(fd), what), nil
}

// started is when a process was started: the 22nd field of /proc/<pid>/stat.
func started(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	if f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:]); len(f) > 19 { // the third is the first here
		return strconv.ParseUint(string(f[19]), 10, 64)
	}
	return 0, errForm
}

// An Old is a child of an earlier daemon.
type Old struct {
	pid int
	fd  int // its pidfd
}

// Find finds the child of a Home; ErrGone: it has ended, whoever has its id now.
func Find(h Home) (*Old, error) {
	// The same before and after: then the descriptor is of no other process.
	before, err := started(h.Pid)
	if err != nil || before != h.Started {
		return nil, ErrGone
	}
	fd, err := unix.PidfdOpen(h.Pid, 0)
	switch {
	case errors.Is(err, unix.ESRCH), errors.Is(err, unix.EINVAL):
		return nil, ErrGone
	case err != nil:
		return nil, fmt.Errorf("pidfd_open of %d: %w", h.Pid, err)
	}
	o := &Old{h.Pid, fd}
	if after, err := started(h.Pid); err != nil || after != before || o.Ended(0) {
		o.Close() //nolint:errcheck // nothing is written
		return nil, ErrGone
	}
	return o, nil
}

// Ended waits until all threads of the child have ended; false: they have not within limit.
func (o *Old) Ended(limit time.Duration) bool {
	poll := []unix.PollFd{{Fd: int32(o.fd), Events: unix.POLLIN}}
	for end := time.Now().Add(limit); ; {
		n, err := unix.Poll(poll, int(max(time.Until(end), 0).Milliseconds()))
		if err != unix.EINTR {
			return n == 1
		}
	}
}

// Kill ends the child, and waits for its end for at most a second: it is killed then, but
// the kernel may need more time for it.
func (o *Old) Kill() {
	unix.PidfdSendSignal(o.fd, unix.SIGKILL, nil, 0) //nolint:errcheck // it has ended
	o.Ended(time.Second)
}

// Close lets go of the child, which goes on.
func (o *Old) Close() error { return unix.Close(o.fd) }

// Line takes the child's line, and returns when the child says so: it has then read all that
// the last daemon has sent.
func (o *Old) Line(ctx context.Context, dir, name string, max int) (*Conn, error) {
	f, err := onSocket(dir, name, "connect", func(fd int, at *unix.SockaddrUnix) error { return unix.Connect(fd, at) })
	if err != nil {
		return nil, err
	}
	c, err := NewConn(f, max, false)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	m, err := c.receive(make([]byte, header+max+1))
	switch {
	case err == nil && m.Kind != hello:
		err = errForm
	case !stop():
		err = ctx.Err()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("take the line of the child %d: %w", o.pid, err), c.Close())
	}
	return c, nil
}

// errHides says that a child has more than it should: see Sockets.
var errHides = errors.New("it has other sockets than it should: it may hide some")

// Sockets makes descriptors of all sockets of TCP that the child has, by their cookies. It
// takes the kernel's word for them (pidfd_getfd(2)), not the child's.
//
// A child whose line was taken has two sockets beside them: the one at which it listens, and
// the line. If it has another, it has kept the line of the last daemon, in which descriptors
// may wait: then there is an error. It cannot hide descriptors elsewhere: it can send none,
// its filter lets no thread have descriptors of its own, and if its main thread has ended,
// the two are missing.
func (o *Old) Sockets() (_ map[uint64]Socket, err error) {
	all := map[uint64]Socket{}
	defer func() {
		if err != nil {
			for _, s := range all {
				s.Close() //nolint:errcheck // nothing is written
			}
		}
	}()
	dir := fmt.Sprintf("/proc/%d/fd", o.pid)
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	listens, lines := 0, 0
	for _, n := range names {
		if to, err := os.Readlink(filepath.Join(dir, n.Name())); err != nil || !strings.HasPrefix(to, "socket:") {
			continue // it was closed, or is none
		}
		theirs, err := strconv.Atoi(n.Name())
		if err != nil {
			return nil, err
		}
		fd, err := unix.PidfdGetfd(o.fd, theirs, 0)
		if errors.Is(err, unix.EBADF) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("pidfd_getfd of a descriptor of %d: %w (see kernel.yama.ptrace_scope: 3 forbids it)", o.pid, err)
		}
		domain, derr := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		cookie, cerr := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		if err := errors.Join(derr, cerr); err != nil {
			return nil, errors.Join(os.NewSyscallError("getsockopt", err), unix.Close(fd))
		}
		if _, twice := all[cookie]; domain == unix.AF_INET && !twice {
			all[cookie] = Socket(fd)
			continue
		}
		if domain == unix.AF_UNIX {
			if on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err == nil && on == 1 {
				listens++
			} else {
				lines++
			}
		}
		unix.Close(fd)
	}
	if listens != 1 || lines != 1 {
		return nil, errHides
	}
	return all, nil
}

// Cookie is the kernel's number of a socket, which no other of its network has until the host restarts.
func (s Socket) Cookie() (uint64, error) {
	c, err := unix.GetsockoptUint64(int(s), unix.SOL_SOCKET, unix.SO_COOKIE)
	return c, os.NewSyscallError("getsockopt SO_COOKIE", err)
}
