package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// childTimeout bounds the few microseconds that a child works: a create must not hang
// if somebody stops the child.
const childTimeout = 5 * time.Second

// UserNS returns a descriptor of a new user namespace that maps ids 0..size-1 to base
// and up (to themselves if base is 0). No process runs in it. mount_setattr(2) needs
// such a descriptor for MOUNT_ATTR_IDMAP. The caller closes it.
func UserNS(base, size uint32) (*os.File, error) {
	var f *os.File
	err := withChild(base, size, 0, nil, func(proc string) (err error) {
		f, err = os.Open(proc + "/ns/user")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create a user namespace that maps 0-%d to %d and up: %w", size-1, base, err)
	}
	return f, nil
}

// withChild makes a user namespace that maps 0..size-1 to base and up, and the
// namespaces of flags. It runs steps inside, and calls use with the /proc directory of
// a process in these namespaces. That process ends when use returns.
//
// The process is a fork of this one that runs only raw system calls. Measured at 60 MB
// of daemon, a fork costs a third of a re-exec, and it needs neither a second binary
// nor an order among package initialisers. The namespaces belong to base, because the
// thread that forks has base's ids for a moment; the process's other threads keep
// theirs.
func withChild(base, size uint32, flags uintptr, steps []step, use func(proc string) error) error {
	proc := -1
	if len(steps) > 0 {
		f, err := newProc()
		if err != nil {
			return err
		}
		defer func() { go f.Close() }() // it takes 0.1 ms, for which nobody waits
		proc = int(f.Fd())
	}
	runtime.LockOSThread()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer unix.Close(pair[0])
	back, err := become(base)
	if err != nil {
		unix.Close(pair[1])
		return err // the thread's state is unknown: it ends locked
	}
	pid, errno := spawn(flags|unix.CLONE_NEWUSER, pair, proc, steps)
	unix.Close(pair[1])
	if err := back(); err != nil {
		errs := []error{fmt.Errorf("switch back to root: %w", err)}
		if errno == 0 {
			errs = append(errs, end(pid))
		}
		return errors.Join(errs...) // as above
	}
	runtime.UnlockOSThread()
	if errno != 0 {
		return fmt.Errorf("clone into a new user namespace (see user.max_user_namespaces and, on Ubuntu, "+
			"kernel.apparmor_restrict_unprivileged_userns): %w", errno)
	}
	err = guide(pid, pair[0], base, size, steps, use)
	return errors.Join(err, end(pid))
}

// guide drives the child from the parent's side.
func guide(pid, sock int, base, size uint32, steps []step, use func(proc string) error) error {
	tv := unix.NsecToTimeval(childTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(sock, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return err
	}
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	mapping := fmt.Appendf(nil, "0 %d %d\n", base, size)
	for _, m := range []string{"/uid_map", "/gid_map"} {
		if err := writeFile(proc+m, mapping); err != nil {
			return err
		}
	}
	if err := retryEINTR(func() error { _, err := unix.Write(sock, []byte{1}); return err }); err != nil {
		return err
	}
	var verdict [8]byte
	var n int
	err := retryEINTR(func() (err error) { n, err = unix.Read(sock, verdict[:]); return err })
	if err != nil || n != len(verdict) {
		return fmt.Errorf("the process in the new namespace ended or does not answer (read %d bytes): %w", n, err)
	}
	if errno := binary.NativeEndian.Uint32(verdict[:4]); errno != 0 {
		s := &steps[binary.NativeEndian.Uint32(verdict[4:])]
		return fmt.Errorf("set %s = %s in the new namespace: %w", s.name, s.data, syscall.Errno(errno))
	}
	return use(proc)
}

// end kills the child and reaps it.
func end(pid int) error {
	if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	err := retryEINTR(func() error { _, err := unix.Wait4(pid, nil, unix.WALL, nil); return err })
	if errors.Is(err, unix.ECHILD) {
		return nil
	}
	return err
}

func retryEINTR(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// dumpable reports whether this process may dump core and be traced by its user.
// Changing ids clears that, as for a set-user-id program.
var dumpable = sync.OnceValue(func() bool {
	d, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	return err == nil && d == 1
})

// become changes this thread, which must be locked, to the user and group id, with all
// the capabilities it had. The real and saved ids stay 0, so that it can change back.
func become(id uint32) (back func() error, err error) {
	if id == 0 {
		return func() error { return nil }, nil
	}
	const keep = ^uintptr(0)
	dumpable() // read it before it changes
	set := func(id uintptr) error {
		// Raw, so that only this thread changes: syscall.Setresuid changes all threads.
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, keep, id, keep); e != 0 {
			return fmt.Errorf("setresgid %d: %w", id, e)
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, keep, id, keep); e != 0 {
			return fmt.Errorf("setresuid %d: %w", id, e)
		}
		return nil
	}
	if err := set(uintptr(id)); err != nil {
		return nil, err
	}
	// The kernel emptied the effective set; the permitted one is complete.
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		return nil, fmt.Errorf("capget: %w", err)
	}
	for i := range caps {
		caps[i].Effective = caps[i].Permitted
	}
	if err := unix.Capset(&hdr, &caps[0]); err != nil {
		return nil, fmt.Errorf("capset: %w", err)
	}
	return func() error {
		// User first: that restores the effective set, which setresgid needs.
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, keep, 0, keep); e != 0 {
			return e
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, keep, 0, keep); e != 0 {
			return e
		}
		if dumpable() {
			return unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0)
		}
		return nil
	}, nil
}

// step is one sysctl that the child writes, through a proc of its own. Everything it
// needs is prepared before the fork: after the fork nothing may allocate.
type step struct {
	name     string
	path     *byte // below proc, zero-terminated
	data     []byte
	optional bool // a kernel without the file is no error
}

func newStep(name, value string, optional bool) step {
	p, err := unix.BytePtrFromString("sys/" + name)
	if err != nil {
		panic(err) // names are constants
	}
	return step{name: name, path: p, data: []byte(value), optional: optional}
}

// spawn forks. The child has no exit signal, so that a wait for any child elsewhere in
// the daemon does not reap it; end waits for it with __WALL.
func spawn(flags uintptr, pair [2]int, proc int, steps []step) (pid int, errno syscall.Errno) {
	var all, old unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	// The child has the daemon's signal handlers but no Go runtime to serve them.
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &old); err != nil {
		return 0, unix.EINVAL
	}
	var buf [2]uint32
	r, errno := clone(flags, uintptr(pair[0]), uintptr(pair[1]), uintptr(proc), steps, &buf)
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &old, nil); err != nil && errno == 0 {
		return int(r), unix.EINVAL
	}
	return int(r), errno
}

// clone forks. In the child it never returns.
//
// Preconditions: the thread is locked and its signals are blocked. The code that the
// child runs must not split the stack, allocate, or take a lock: the child is one
// thread of a copy of a process that had many.
//
//go:nosplit
//go:norace
func clone(flags, parentEnd, childEnd, proc uintptr, steps []step, buf *[2]uint32) (uintptr, syscall.Errno) {
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, flags, 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	var failed syscall.Errno
	if len(steps) > 0 {
		_, _, failed = syscall.RawSyscall6(syscall.SYS_FCHDIR, proc, 0, 0, 0, 0, 0)
	}
	// Close the parent's end here, so that the parent's death reads as end of file. The
	// child must not hold the daemon's other descriptors either: pipes that others wait
	// on, locks, listeners.
	syscall.RawSyscall6(syscall.SYS_CLOSE, parentEnd, 0, 0, 0, 0, 0)
	if childEnd > 0 {
		syscall.RawSyscall6(unix.SYS_CLOSE_RANGE, 0, childEnd-1, 0, 0, 0, 0)
	}
	syscall.RawSyscall6(unix.SYS_CLOSE_RANGE, childEnd+1, 1<<32-1, 0, 0, 0, 0)
	// Wait for the id mappings.
	n, _, _ := syscall.RawSyscall6(syscall.SYS_READ, childEnd, uintptr(unsafe.Pointer(buf)), 1, 0, 0, 0)
	if n == 1 {
		at := 0
		if failed == 0 {
			failed, at = write(steps)
		}
		buf[0], buf[1] = uint32(failed), uint32(at)
		syscall.RawSyscall6(syscall.SYS_WRITE, childEnd, uintptr(unsafe.Pointer(buf)), 8, 0, 0, 0)
		// Hold the namespaces until the parent has pinned them.
		syscall.RawSyscall6(syscall.SYS_READ, childEnd, uintptr(unsafe.Pointer(buf)), 1, 0, 0, 0)
	}
	for {
		syscall.RawSyscall6(syscall.SYS_EXIT_GROUP, 0, 0, 0, 0, 0, 0)
	}
}

//go:nosplit
//go:norace
func write(steps []step) (errno syscall.Errno, at int) {
	const cwd = ^uintptr(99) // AT_FDCWD, -100
	for i := range steps {
		s := &steps[i]
		fd, _, errno := syscall.RawSyscall6(syscall.SYS_OPENAT, cwd, uintptr(unsafe.Pointer(s.path)), syscall.O_WRONLY|syscall.O_CLOEXEC,
			0, 0, 0)
		if errno == syscall.ENOENT && s.optional {
			continue
		}
		if errno != 0 {
			return errno, i
		}
		_, _, errno = syscall.RawSyscall6(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(s.data))), uintptr(len(s.data)),
			0, 0, 0)
		if errno != 0 {
			return errno, i
		}
		syscall.RawSyscall6(syscall.SYS_CLOSE, fd, 0, 0, 0, 0, 0)
	}
	return 0, 0
}
