package confine

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// newNamespaces are the flags of clone(2) that make namespaces. A user namespace of its
// own would give a child every capability in it, and with them access to kernel code
// that it does not need.
const newNamespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET |
	unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP

// refused are calls that no child makes and through which kernels were exploited.
var refused = []uint32{
	unix.SYS_UNSHARE, unix.SYS_SETNS, unix.SYS_BPF, unix.SYS_PTRACE, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD,
	unix.SYS_IO_URING_SETUP, unix.SYS_KEYCTL, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY,
}

// arches are the kernel's names for the machines that sandboxd is made for
// (linux/audit.h). On both, the flags of clone are its first argument.
var arches = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// Offsets in struct seccomp_data (linux/seccomp.h); both machines are little endian.
const (
	atNumber = 0
	atArch   = 4
	atFlags  = 16
)

// filter is a program for seccomp(2).
func filter(arch uint32) []unix.SockFilter {
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	ret := func(what uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: what}
	}
	// If the comparison does not hold, the next skip instructions are skipped.
	unless := func(op uint16, k uint32, skip uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | op | unix.BPF_K, K: k, Jf: skip}
	}
	const no = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	f := []unix.SockFilter{
		load(atArch),
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: arch, Jt: 1},
		ret(unix.SECCOMP_RET_KILL_PROCESS),
		load(atNumber),
		unless(unix.BPF_JGE, 0x40000000, 1), // x32, with other call numbers
		ret(no),
	}
	for _, n := range refused {
		f = append(f, unless(unix.BPF_JEQ, n, 1), ret(no))
	}
	return append(f,
		// A filter cannot read its flags. A program that gets ENOSYS uses clone.
		unless(unix.BPF_JEQ, unix.SYS_CLONE3, 1),
		ret(unix.SECCOMP_RET_ERRNO|uint32(unix.ENOSYS)),
		unless(unix.BPF_JEQ, unix.SYS_CLONE, 3),
		load(atFlags),
		unless(unix.BPF_JSET, newNamespaces, 1),
		ret(no),
		ret(unix.SECCOMP_RET_ALLOW),
	)
}

// refuse sets the filter for this thread and the program that it executes.
// Preconditions: no_new_privs is set.
func refuse() error {
	arch, ok := arches[runtime.GOARCH]
	if !ok {
		return fmt.Errorf("no seccomp filter for %s", runtime.GOARCH)
	}
	f := filter(arch)
	prog := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0); err != nil {
		return fmt.Errorf("install the seccomp filter: %w", err)
	}
	return nil
}
