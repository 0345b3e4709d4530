package main

import (
	"fmt"
	"log"
	"runtime"
	"slices"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// timed makes one system call again and again, and returns the median of some batches, in
// nanoseconds a call.
func timed(call string) float64 {
	runtime.LockOSThread()
	do := calls()[call]
	if do == nil {
		log.Fatalf("unknown call %q", call)
	}
	const batches, each = 11, 10_000
	var took []float64
	for range batches {
		start := time.Now()
		for range each {
			if errno := do(); errno != 0 {
				log.Fatalf("%s: %v", call, errno)
			}
		}
		took = append(took, float64(time.Since(start).Nanoseconds())/each)
	}
	slices.Sort(took)
	return took[batches/2]
}

// calls are the system calls by name, without what Go's own wrappers add.
func calls() map[string]func() syscall.Errno {
	raw := func(nr, a, b, c uintptr) (uintptr, syscall.Errno) {
		r, _, errno := syscall.RawSyscall(nr, a, b, c)
		return r, errno
	}
	null := append([]byte("/dev/null"), 0)
	zero, err := unix.Open("/dev/zero", unix.O_RDONLY, 0)
	if err != nil {
		log.Fatal(fmt.Errorf("/dev/zero: %w", err))
	}
	sock, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		log.Fatal(fmt.Errorf("socket: %w", err))
	}
	there := unix.RawSockaddrInet4{Family: unix.AF_INET, Port: 9, Addr: [4]byte{127, 0, 0, 1}}
	var one [1]byte
	at := unix.AT_FDCWD
	return map[string]func() syscall.Errno{
		"getpid": func() syscall.Errno { _, errno := raw(unix.SYS_GETPID, 0, 0, 0); return errno },
		"read": func() syscall.Errno {
			_, errno := raw(unix.SYS_READ, uintptr(zero), uintptr(unsafe.Pointer(&one)), 1)
			return errno
		},
		"open": func() syscall.Errno { // and close
			fd, errno := raw(unix.SYS_OPENAT, uintptr(at), uintptr(unsafe.Pointer(&null[0])), unix.O_RDONLY)
			if errno == 0 {
				_, errno = raw(unix.SYS_CLOSE, fd, 0, 0)
			}
			return errno
		},
		"connect": func() syscall.Errno { // of UDP: no packet is sent
			_, errno := raw(unix.SYS_CONNECT, uintptr(sock), uintptr(unsafe.Pointer(&there)), unsafe.Sizeof(there))
			return errno
		},
	}
}
