package pool

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Ioctl is ioctl(2) with a pointer to a structure of the kernel, for drivers.
func Ioctl(fd int, req uintptr, arg unsafe.Pointer) error {
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
	runtime.KeepAlive(arg)
	if e != 0 {
		return e
	}
	return nil
}
