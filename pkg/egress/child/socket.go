package child

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Socket is a descriptor that the daemon keeps of a socket which a child has. It is in no
// poller of this process, so what passes there wakes the child alone.
type Socket int

// CopyOf makes another descriptor of a socket.
func CopyOf(raw syscall.RawConn) (Socket, error) {
	fd, err := -1, error(nil)
	if cerr := raw.Control(func(s uintptr) { fd, err = unix.FcntlInt(s, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil {
		return -1, cerr
	}
	return Socket(fd), err
}

// Close closes the descriptor.
func (s Socket) Close() error { return unix.Close(int(s)) }

// Reset ends a connection of TCP at once, whoever else has a descriptor of it (connect(2),
// AF_UNSPEC).
func (s Socket) Reset() {
	none := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	unix.Syscall(unix.SYS_CONNECT, uintptr(s), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none)) //nolint:errcheck // it has ended
}

// Dead reports whether a connection of TCP has ended on both sides, or was reset, and nothing
// of it is left to read.
func (s Socket) Dead() bool {
	info, err := unix.GetsockoptTCPInfo(int(s), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil || info.State != unix.BPF_TCP_CLOSE {
		return false
	}
	unread, err := unix.IoctlGetInt(int(s), unix.SIOCINQ)
	return err != nil || unread == 0
}
