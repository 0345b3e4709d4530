// Package pidfd finds out how a process ended that is not a child of this one.
//
// Until its parent has reaped it, root can read that in /proc. Later the kernel reports
// it only to a process that has held a descriptor of it since before its end
// (PIDFD_GET_INFO with PIDFD_INFO_EXIT, since Linux 6.15). On an older kernel Ended may
// return false.
package pidfd

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Process is a process that lives or has ended.
type Process struct {
	f   *os.File
	pid int
}

// Open opens a process. If the process was reaped, the error is ESRCH.
func Open(pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("pidfd_open of %d: %w", pid, err)
	}
	return &Process{os.NewFile(uintptr(fd), "pidfd"), pid}, nil
}

// Close closes the descriptor.
func (p *Process) Close() error { return p.f.Close() }

// info is the first version of struct pidfd_info in linux/pidfd.h.
type info struct {
	mask, cgroup                                                            uint64
	pid, tgid, ppid, ruid, rgid, euid, egid, suid, sgid, fsuid, fsgid, exit uint32
}

const (
	getInfo  = 3<<30 | uint(unsafe.Sizeof(info{}))<<16 | 0xff<<8 | 11 // _IOWR(0xFF, 11, struct pidfd_info)
	infoExit = 1 << 3
)

// An Exit is how a process ended.
type Exit struct {
	Code   int            // if Signal is 0
	Signal syscall.Signal // that killed it, or 0
}

// String is "killed by SIGKILL", or "exited with code 2".
func (e Exit) String() string {
	if e.Signal != 0 {
		return "killed by " + unix.SignalName(e.Signal)
	}
	return fmt.Sprintf("exited with code %d", e.Code)
}

// Ended returns how it ended. It returns false if that is not known, or the process has not ended
// within limit.
func (p *Process) Ended(limit time.Duration) (Exit, bool) {
	fd := []unix.PollFd{{Fd: int32(p.f.Fd()), Events: unix.POLLIN}}
	for deadline := time.Now().Add(limit); ; {
		_, err := unix.Poll(fd, int(max(time.Until(deadline), 0).Milliseconds()))
		if err != unix.EINTR {
			break
		}
	}
	s, ok := p.zombie()
	if !ok {
		s, ok = p.reaped()
	}
	switch {
	case !ok:
		return Exit{}, false
	case s.Signaled():
		return Exit{Signal: s.Signal()}, true
	}
	return Exit{Code: s.ExitStatus()}, true
}

// zombie reads the last field of proc_pid_stat(5) that is documented, exit_code. A
// process that waits to be reaped keeps its id.
func (p *Process) zombie() (syscall.WaitStatus, bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid))
	if err != nil {
		return 0, false
	}
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:]) // the third field is the first
	if len(f) < 50 || string(f[0]) != "Z" {
		return 0, false
	}
	n, err := strconv.ParseUint(string(f[49]), 10, 32)
	return syscall.WaitStatus(n), err == nil
}

func (p *Process) reaped() (syscall.WaitStatus, bool) {
	i := info{mask: infoExit}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, p.f.Fd(), uintptr(getInfo), uintptr(unsafe.Pointer(&i)))
	return syscall.WaitStatus(i.exit), errno == 0 && i.mask&infoExit != 0
}
