package child

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
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
	unix.PidfdSendSignal(o.fd, unix.SIGCONT, nil, 0) //nolint:errcheck // a daemon may have died in Sockets; shows in what follows
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
// takes the kernel's word for them (pidfd_getfd(2)), not the child's. After an error the
// child may be stopped, and is to be ended.
//
// The child is stopped meanwhile: while its threads run they can move a socket from one
// descriptor to another behind the reader's back, or hold it by a call that waits, without a
// descriptor. The stop ends those calls. One that starts again looks for its descriptor anew.
//
// A child whose line was taken has two sockets beside them: the one at which it listens, and
// the line. If it has another, it has kept the line of the last daemon, in which descriptors
// may wait: then there is an error. It cannot hide descriptors elsewhere: it can send none,
// its filter lets no thread have descriptors of its own, and if its main thread has ended,
// the two are missing.
func (o *Old) Sockets(ctx context.Context) (_ map[uint64]Socket, err error) {
	all := map[uint64]Socket{}
	defer func() {
		if err != nil {
			for _, s := range all {
				s.Close() //nolint:errcheck // nothing is written
			}
			err = fmt.Errorf("take the sockets of the child %d: %w", o.pid, err)
		}
	}()
	if err := o.stop(ctx); err != nil {
		return nil, err
	}
	names, err := os.ReadDir(o.proc("fd"))
	if err != nil {
		return nil, err
	}
	listens, lines := 0, 0
	for _, n := range names {
		s, err := o.socket(n.Name())
		if err != nil {
			return nil, err
		}
		if s.fd < 0 {
			continue
		}
		if _, twice := all[s.cookie]; s.domain == unix.AF_INET && !twice {
			all[s.cookie] = Socket(s.fd)
			continue
		}
		if s.domain == unix.AF_UNIX {
			if on, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err == nil && on == 1 {
				listens++
			} else {
				lines++
			}
		}
		unix.Close(s.fd)
	}
	if listens != 1 || lines != 1 {
		return nil, errHides
	}
	// Nothing in the child can stop it, as it is the first process of its namespace. So if it
	// is stopped now, it was all the time.
	if still, err := o.stopped(); err != nil || !still {
		return nil, errors.Join(errors.New("it went on while its descriptors were read"), err)
	}
	return all, os.NewSyscallError("pidfd_send_signal SIGCONT", unix.PidfdSendSignal(o.fd, unix.SIGCONT, nil, 0))
}

// taken is a descriptor that was taken from a child; -1: it is no socket.
type taken struct {
	fd, domain int
	cookie     uint64
}

// socket takes a descriptor of the child, which is stopped: what is not there any more is an
// error, too.
func (o *Old) socket(name string) (s taken, err error) {
	s.fd = -1
	to, err := os.Readlink(filepath.Join(o.proc("fd"), name))
	if err != nil || !strings.HasPrefix(to, "socket:") {
		return s, err
	}
	theirs, err := strconv.Atoi(name)
	if err != nil {
		return s, err
	}
	fd, err := unix.PidfdGetfd(o.fd, theirs, 0)
	if err != nil {
		return s, fmt.Errorf("pidfd_getfd of %s: %w (see kernel.yama.ptrace_scope: 3 forbids it)", name, err)
	}
	domain, derr := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	cookie, cerr := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err := errors.Join(derr, cerr); err != nil {
		return s, errors.Join(os.NewSyscallError("getsockopt", err), unix.Close(fd))
	}
	return taken{fd, domain, cookie}, nil
}

func (o *Old) proc(what string) string { return fmt.Sprintf("/proc/%d/%s", o.pid, what) }

// stop stops all threads of the child. A thread that sleeps in the kernel where no signal
// reaches it may hold a socket: then the child is not stopped until ctx ends.
func (o *Old) stop(ctx context.Context) error {
	if err := unix.PidfdSendSignal(o.fd, unix.SIGSTOP, nil, 0); err != nil {
		return os.NewSyscallError("pidfd_send_signal SIGSTOP", err)
	}
	// Only a parent hears of a stop.
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if all, err := o.stopped(); all || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("it does not stop: %w", ctx.Err())
		}
	}
}

// stopped reports whether all threads of the child are stopped. Of two lists of them the
// second has those that began during the first: they join the stop before they run.
func (o *Old) stopped() (bool, error) {
	for range 2 {
		tasks, err := os.ReadDir(o.proc("task"))
		if err != nil {
			return false, err
		}
		for _, t := range tasks {
			b, err := os.ReadFile(filepath.Join(o.proc("task"), t.Name(), "stat"))
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
				return false, nil // it has just ended
			}
			if err != nil {
				return false, err
			}
			if f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:]); len(f) == 0 || string(f[0]) != "T" {
				return false, nil
			}
		}
	}
	return true, nil
}

// EndOthers ends the processes that list has, but for those that are kept.
func EndOthers(list func() ([]int, error), kept map[int]bool) error {
	before, err := list()
	if err != nil {
		return err
	}
	open := map[int]int{}
	defer func() {
		for _, fd := range open {
			unix.Close(fd)
		}
	}()
	for _, pid := range before {
		if kept[pid] {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
			continue // it has ended
		}
		if err != nil {
			return fmt.Errorf("pidfd_open of %d: %w", pid, err)
		}
		open[pid] = fd
	}
	// Its id may have been another's when it was opened. That one is not in the list.
	after, err := list()
	if err != nil {
		return err
	}
	for _, pid := range after {
		if fd, ok := open[pid]; ok {
			unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) //nolint:errcheck // it has ended
		}
	}
	return nil
}

// Cookie is the kernel's number of a socket, which no other of its network has until the host restarts.
func (s Socket) Cookie() (uint64, error) {
	c, err := unix.GetsockoptUint64(int(s), unix.SOL_SOCKET, unix.SO_COOKIE)
	return c, os.NewSyscallError("getsockopt SO_COOKIE", err)
}
