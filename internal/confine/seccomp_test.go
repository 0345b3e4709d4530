package confine

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// decide runs a program as the kernel does (linux/filter.h), as far as ours go.
func decide(t *testing.T, program []unix.SockFilter, data map[uint32]uint32) uint32 {
	t.Helper()
	a := uint32(0)
	for pc := 0; pc < len(program); pc++ {
		i := program[pc]
		jump := func(yes bool) {
			if yes {
				pc += int(i.Jt)
			} else {
				pc += int(i.Jf)
			}
		}
		switch i.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			a = data[i.K]
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			a &= i.K
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			jump(a == i.K)
		case unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K:
			jump(a&i.K != 0)
		case unix.BPF_RET | unix.BPF_K:
			return i.K
		default:
			t.Fatalf("instruction %d, %#x, is not interpreted here", pc, i.Code)
		}
	}
	t.Fatal("the program ends without an answer")
	return 0
}

// anon are the flags of memory that is no file's.
const anon = unix.MAP_ANON | unix.MAP_PRIVATE

// eachFilter yields what filter makes programs of.
func eachFilter(yield func(arch uint32, serves bool) bool) {
	for _, arch := range arches {
		if !yield(arch, false) || !yield(arch, true) {
			return
		}
	}
}

// TestFilter gives the filter every number of a call, and the arguments that it looks at.
func TestFilter(t *testing.T) {
	const threads = unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND | unix.CLONE_SYSVSEM | unix.CLONE_THREAD
	for arch, serves := range eachFilter {
		program := filter(arch, serves)
		ask := func(number, arg0, arg2, arg3 uint32) uint32 {
			return decide(t, program, map[uint32]uint32{atArch: arch, atNumber: number, atArg0: arg0, atArg2: arg2, atArg3: arg3})
		}
		for n := range uint32(2000) {
			want := uint32(refused)
			switch {
			case slices.Contains(calls(serves), n), slices.Contains(beginning, n):
				want = unix.SECCOMP_RET_ALLOW
			case n == unix.SYS_CLONE, n == unix.SYS_MMAP:
				want = denied
			}
			if got := ask(n, 0, 0, 0); got != want {
				t.Errorf("call %d: %#x, want %#x", n, got, want)
			}
		}
		for _, c := range []struct{ number, arg0, arg2, arg3, want uint32 }{
			{unix.SYS_CLONE, threads, 0, 0, unix.SECCOMP_RET_ALLOW},
			{unix.SYS_CLONE, uint32(unix.SIGCHLD), 0, 0, denied},
			{unix.SYS_CLONE, threads &^ unix.CLONE_FILES, 0, 0, denied},
			{unix.SYS_CLONE, threads | unix.CLONE_NEWUSER, 0, 0, denied},
			{unix.SYS_CLONE, threads | unix.CLONE_NEWCGROUP, 0, 0, denied},
			{unix.SYS_MMAP, 0, unix.PROT_READ | unix.PROT_WRITE, anon, unix.SECCOMP_RET_ALLOW},
			{unix.SYS_MMAP, 0, unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED, denied},
			{unix.SYS_MMAP, 0, unix.PROT_EXEC, anon, denied},
			{unix.SYS_MMAP, 0, unix.PROT_READ | unix.PROT_WRITE | unix.PROT_EXEC, anon, denied},
			{0x40000000, 0, 0, 0, refused}, // read(2) of x32
			{^uint32(0), 0, 0, 0, refused},
		} {
			if got := ask(c.number, c.arg0, c.arg2, c.arg3); got != c.want {
				t.Errorf("call %d with %#x, %#x, %#x: %#x, want %#x", c.number, c.arg0, c.arg2, c.arg3, got, c.want)
			}
		}
		if got := decide(t, program, map[uint32]uint32{atArch: arch ^ 1, atNumber: unix.SYS_READ}); got != unix.SECCOMP_RET_KILL_PROCESS {
			t.Errorf("another machine: %#x", got)
		}
		for n := range uint32(2000) {
			both := []uint32{ask(n, 0, 0, 0), decide(t, sealed(), map[uint32]uint32{atArch: arch, atNumber: n})}
			if slices.Contains(beginning, n) && both[1] != refused || !slices.Contains(beginning, n) && both[1] != unix.SECCOMP_RET_ALLOW {
				t.Errorf("call %d is %#x, once sealed %#x", n, both[0], both[1])
			}
		}
	}
}

// TestFilterHasNoWayOut: none of the calls by which kernels were exploited, or by which
// processes, programs, sockets and mounts are made, is allowed.
func TestFilterHasNoWayOut(t *testing.T) {
	for name, n := range map[string]uint32{
		"execve": unix.SYS_EXECVE, "ptrace": unix.SYS_PTRACE, "bpf": unix.SYS_BPF, "io_uring_setup": unix.SYS_IO_URING_SETUP,
		"userfaultfd": unix.SYS_USERFAULTFD, "keyctl": unix.SYS_KEYCTL, "add_key": unix.SYS_ADD_KEY, "unshare": unix.SYS_UNSHARE,
		"setns": unix.SYS_SETNS, "mount": unix.SYS_MOUNT, "move_mount": unix.SYS_MOVE_MOUNT, "fsopen": unix.SYS_FSOPEN,
		"open_tree": unix.SYS_OPEN_TREE, "socket": unix.SYS_SOCKET, "socketpair": unix.SYS_SOCKETPAIR, "connect": unix.SYS_CONNECT,
		"bind": unix.SYS_BIND, "listen": unix.SYS_LISTEN, "splice": unix.SYS_SPLICE,
		"vmsplice": unix.SYS_VMSPLICE, "memfd_create": unix.SYS_MEMFD_CREATE, "mprotect": unix.SYS_MPROTECT, "ioctl": unix.SYS_IOCTL,
		"perf_event_open": unix.SYS_PERF_EVENT_OPEN, "prctl": unix.SYS_PRCTL, "clone3": unix.SYS_CLONE3, "kill": unix.SYS_KILL,
		"open_by_handle_at": unix.SYS_OPEN_BY_HANDLE_AT, "process_vm_readv": unix.SYS_PROCESS_VM_READV, "chroot": unix.SYS_CHROOT,
	} {
		if slices.Contains(allowed, n) || slices.Contains(beginning, n) {
			t.Errorf("%s is allowed", name)
		}
		if slices.Contains(serving, n) && name != "splice" {
			t.Errorf("%s is allowed to a child that serves", name)
		}
	}
}
