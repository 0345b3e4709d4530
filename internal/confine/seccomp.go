package confine

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// allowed are all system calls of a child: those of Go's runtime, of reading standard
// input and archives, and of making the files of a layer. What is not here answers ENOSYS,
// as on a kernel without it: programs and the runtime fall back only on that. The calls
// that a child makes most often come first, because the filter tries them in this order.
//
// Found with strace -f in the second life of each verb, and in Go's source: runtime,
// internal/runtime/syscall/linux, os, internal/poll.
var allowed = slices.Concat([]uint32{
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_PWRITE64, unix.SYS_PREAD64, unix.SYS_FUTEX, unix.SYS_NANOSLEEP,
	// files
	unix.SYS_OPENAT, unix.SYS_OPENAT2, unix.SYS_CLOSE, unix.SYS_FSTAT, unix.SYS_NEWFSTATAT, unix.SYS_FCHOWN, unix.SYS_FCHOWNAT,
	unix.SYS_FCHMOD, unix.SYS_FCHMODAT, unix.SYS_FSETXATTR, unix.SYS_UTIMENSAT, unix.SYS_FTRUNCATE, unix.SYS_LSEEK, unix.SYS_FCNTL,
	unix.SYS_MKDIRAT, unix.SYS_SYMLINKAT, unix.SYS_LINKAT, unix.SYS_MKNODAT, unix.SYS_UNLINKAT, unix.SYS_READLINKAT,
	unix.SYS_GETDENTS64,
	// memory; for mmap see filter
	unix.SYS_MUNMAP, unix.SYS_MADVISE,
	// threads and signals; for clone see filter
	unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY, unix.SYS_GETPID, unix.SYS_GETTID, unix.SYS_TGKILL, unix.SYS_RT_SIGACTION,
	unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_RESTART_SYSCALL,
	unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2, unix.SYS_PIPE2,
	// the rest
	unix.SYS_CLOCK_GETTIME, unix.SYS_GETRANDOM, unix.SYS_PRLIMIT64, unix.SYS_GETUID, unix.SYS_GETEUID, unix.SYS_GETGID, unix.SYS_GETEGID,
	unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
}, ofMachine)

// serving are the calls that a child has beside allowed if it serves: those of sockets that
// it was given. It makes no socket, and connects and binds none. It writes by write(2), which
// reaches what a socket is connected to. sendto(2) and sendmsg(2) name an address, and a
// socket for UDP, connected or not, sends to any address of its network. Go's net asks a
// descriptor for its kind and its addresses; internal/relay splices.
var serving = []uint32{
	unix.SYS_RECVMSG, unix.SYS_RECVFROM, unix.SYS_SPLICE, unix.SYS_ACCEPT4, unix.SYS_SHUTDOWN,
	unix.SYS_GETSOCKOPT, unix.SYS_SETSOCKOPT, unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME, unix.SYS_WRITEV,
}

// calls are all that a child may make.
func calls(serves bool) []uint32 {
	if serves {
		return slices.Concat(serving, allowed)
	}
	return allowed
}

// beginning are the calls by which the second life of a child begins. It then gives them
// up: see seal.
var beginning = []uint32{unix.SYS_EXECVEAT, unix.SYS_SECCOMP}

// newNamespaces are the flags of clone(2) that make namespaces.
const newNamespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET |
	unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP

// thread are the flags of clone(2) that make a thread of this process, with its descriptors.
const thread = unix.CLONE_THREAD | unix.CLONE_FILES

// arches are the kernel's names for the machines that sandboxd is made for
// (linux/audit.h). On both, the flags of clone are its first argument.
var arches = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// Offsets in struct seccomp_data (linux/seccomp.h); both machines are little endian.
const (
	atNumber = 0
	atArch   = 4
	atArg0   = 16
	atArg2   = 32
	atArg3   = 40
)

const (
	refused = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	denied  = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
)

func load(at uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
}

func ret(what uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: what}
}

// unless skips the next instructions if a comparison does not hold.
func unless(op uint16, k uint32, skip uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | op | unix.BPF_K, K: k, Jf: skip}
}

// filter is a program for seccomp(2) that allows only what a child needs.
func filter(arch uint32, serves bool) []unix.SockFilter {
	f := []unix.SockFilter{
		load(atArch),
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: arch, Jt: 1},
		ret(unix.SECCOMP_RET_KILL_PROCESS), // another ABI, with other call numbers
		load(atNumber),
	}
	for _, n := range slices.Concat(calls(serves), beginning) {
		f = append(f, unless(unix.BPF_JEQ, n, 1), ret(unix.SECCOMP_RET_ALLOW))
	}
	return append(f,
		// Memory, but none to execute: a static program has all its code from the start.
		// And none of a descriptor: the mapping would hold it when that is closed.
		unless(unix.BPF_JEQ, unix.SYS_MMAP, 7),
		load(atArg2),
		unless(unix.BPF_JSET, unix.PROT_EXEC, 1),
		ret(denied),
		load(atArg3),
		unless(unix.BPF_JSET, unix.MAP_ANONYMOUS, 1),
		ret(unix.SECCOMP_RET_ALLOW),
		ret(denied),
		// Threads, but no processes and no namespaces, and no thread with descriptors of its
		// own, which /proc/<pid>/fd would not show. clone3 has its flags in memory, where no
		// filter can read them.
		unless(unix.BPF_JEQ, unix.SYS_CLONE, 5),
		load(atArg0),
		unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: newNamespaces | thread},
		unless(unix.BPF_JEQ, thread, 1),
		ret(unix.SECCOMP_RET_ALLOW),
		ret(denied),
		ret(refused),
	)
}

// sealed is a program that takes back what only the beginning needs.
func sealed() []unix.SockFilter {
	f := []unix.SockFilter{load(atNumber)}
	for _, n := range beginning {
		f = append(f, unless(unix.BPF_JEQ, n, 1), ret(refused))
	}
	return append(f, ret(unix.SECCOMP_RET_ALLOW))
}

// refuse sets the filter for this thread and the program that it executes.
// Preconditions: no_new_privs is set.
func refuse(serves bool) error {
	arch, ok := arches[runtime.GOARCH]
	if !ok {
		return fmt.Errorf("no seccomp filter for %s", runtime.GOARCH)
	}
	return install(filter(arch, serves), 0)
}

// seal makes all threads of a child in its second life unable to begin another.
func seal() error { return install(sealed(), unix.SECCOMP_FILTER_FLAG_TSYNC) }

func install(f []unix.SockFilter, flags uintptr) error {
	prog := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	// A positive result is a thread that TSYNC could not reach.
	r, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
	if errno == 0 && r != 0 {
		errno = unix.ESRCH
	}
	if errno != 0 {
		return os.NewSyscallError("install the seccomp filter", errno)
	}
	return nil
}
