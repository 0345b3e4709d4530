package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// x32 marks the number of a call of that ABI.
const x32 = 0x40000000

// Numbers that are equal on all architectures.
const (
	sysOpenTreeAttr = 467
	sysFileSetattr  = 469
)

// scratch is a directory in memory that every sandbox has.
const scratch = "/dev/shm"

func text(s string) uintptr {
	p, err := unix.BytePtrFromString(s)
	if err != nil {
		panic(err)
	}
	return uintptr(unsafe.Pointer(p))
}

const (
	nowhere = ^uintptr(0)  // -1: no descriptor
	here    = ^uintptr(99) // AT_FDCWD
)

// calls are system calls with arguments that do nothing, or nothing outside of this
// process. The comment says what the kernel answers to one who may call.
var calls = map[string]func() error{
	// namespaces
	"setns":  func() error { return setns("/proc/self/ns/uts", unix.CLONE_NEWUTS) }, // ok
	"clone3": func() error { return sys(unix.SYS_CLONE3, 0, 0) },                    // EINVAL: no arguments

	// mounts
	"mount-tmpfs":   func() error { return mount("none", "tmpfs") },     // ok
	"mount-cgroup2": func() error { return mount("none", "cgroup2") },   // ok
	"mount-proc":    func() error { return mount("none", "proc") },      // ok
	"mount-overlay": func() error { return mount("none", "overlay") },   // EINVAL: no layers
	"mount-bind":    func() error { return bindMount("/usr", scratch) }, // ok
	"remount-proc":  func() error { return remount("/proc/sys") },       // ok
	"remount-sys":   func() error { return remount("/sys") },            // ok
	"umount":        func() error { return unix.Unmount("/sys/firmware", unix.MNT_DETACH) },
	"pivot_root":    func() error { return unix.PivotRoot("/nowhere", "/nowhere") }, // ENOENT
	"fsopen":        func() error { return descriptor(unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)) },
	"fspick":        func() error { return descriptor(unix.Fspick(unix.AT_FDCWD, scratch, 0)) },
	"open_tree":     func() error { return descriptor(unix.OpenTree(unix.AT_FDCWD, scratch, unix.OPEN_TREE_CLONE)) },
	"move_mount": func() error { // EBADF
		return sys(unix.SYS_MOVE_MOUNT, nowhere, text(""), nowhere, text(""), unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	},
	"mount_setattr": func() error { // ok: nothing is set
		return unix.MountSetattr(unix.AT_FDCWD, scratch, 0, &unix.MountAttr{})
	},
	"statmount":      func() error { return sys(unix.SYS_STATMOUNT, 0, 0, 0, 0) },                            // EFAULT
	"listmount":      func() error { return sys(unix.SYS_LISTMOUNT, 0, 0, 0, 0) },                            // EFAULT
	"open_tree_attr": func() error { return sys(sysOpenTreeAttr, nowhere, text(""), 0x1000, 0, 0) },          // EBADF
	"file_setattr":   func() error { return sys(sysFileSetattr, here, text("/nowhere"), 0, 0, 0) },           // EINVAL: no size
	"lsm_modules":    func() error { var n uint32; return sys(unix.SYS_LSM_LIST_MODULES, 0, ptr(&n), 0xff) }, // EINVAL: flags

	// tables of the whole host
	"io_setup":              func() error { var ctx uintptr; return sys(unix.SYS_IO_SETUP, 1, ptr(&ctx)) }, // ok
	"filter-of-calls":       func() error { return filter(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0) },
	"filter-of-calls-prctl": func() error { return filter(unix.SYS_PRCTL, unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER) },
	"filter-of-a-socket":    filterOfSocket,
	"times-of-messages":     timesOfMessages,
	"message-with-its-time": messageWithItsTime,

	// bug farms and ways around a filter
	"bpf":             func() error { var attr [128]byte; return sys(unix.SYS_BPF, 0, ptr(&attr), 72) }, // EINVAL: a map without a type
	"perf_event_open": perfEvent,
	"userfaultfd":     func() error { return opened(unix.SYS_USERFAULTFD, 1|unix.O_CLOEXEC) },         // UFFD_USER_MODE_ONLY
	"fanotify_init":   func() error { return opened(unix.SYS_FANOTIFY_INIT, unix.FAN_REPORT_FID, 0) }, // ok without privileges
	"io_uring_setup":  func() error { var p [120]byte; return opened(unix.SYS_IO_URING_SETUP, 1, ptr(&p)) },
	"io_uring_enter":  func() error { return sys(unix.SYS_IO_URING_ENTER, nowhere, 0, 0, 0, 0, 0) }, // EBADF
	"vmsplice":        func() error { return sys(unix.SYS_VMSPLICE, nowhere, 0, 0, 0) },             // EBADF
	"personality":     func() error { return sys(unix.SYS_PERSONALITY, 0x0040000) },                 // ADDR_NO_RANDOMIZE

	// not namespaced
	"add_key": func() error {
		return sys(unix.SYS_ADD_KEY, text("user"), text("attack"), text("x"), 1, spec(unix.KEY_SPEC_PROCESS_KEYRING))
	},
	"request_key": func() error { return sys(unix.SYS_REQUEST_KEY, text("user"), text("attack"), 0, 0) }, // ENOKEY
	"keyctl": func() error {
		return sys(unix.SYS_KEYCTL, unix.KEYCTL_GET_KEYRING_ID, spec(unix.KEY_SPEC_PROCESS_KEYRING), 1)
	},
	"syslog":       func() error { return sys(unix.SYS_SYSLOG, 10, 0, 0) },                             // the size of the buffer
	"acct":         func() error { return sys(unix.SYS_ACCT, text("/nowhere/acct")) },                  // ENOENT
	"swapon":       func() error { return sys(unix.SYS_SWAPON, text("/nowhere/swap"), 0) },             // ENOENT
	"quotactl":     func() error { return sys(unix.SYS_QUOTACTL, 0x80000500, text("/nowhere"), 0, 0) }, // Q_GETINFO: ENOENT
	"reboot":       func() error { return sys(unix.SYS_REBOOT, 0, 0, 0, 0) },                           // EINVAL: wrong magic
	"settimeofday": func() error { return sys(unix.SYS_SETTIMEOFDAY, 0, 0) },                           // ok: sets nothing
	"adjtimex":     func() error { var t unix.Timex; _, err := unix.Adjtimex(&t); return err },         // ok: reads
	"kexec_load":   func() error { return sys(unix.SYS_KEXEC_LOAD, 0, 0, 0, 0x8000) },                  // EINVAL: flags
	"finit_module": func() error { return sys(unix.SYS_FINIT_MODULE, nowhere, text(""), 0) },           // EBADF
	"sethostname":  func() error { return unix.Sethostname([]byte("attack")) },

	// handles and foreign memory
	"name_to_handle_at": func() error { _, _, err := unix.NameToHandleAt(unix.AT_FDCWD, scratch, 0); return err },
	"open_by_handle_at": openByHandle,
	"process_vm_readv":  processVM,
	"pidfd_getfd":       pidfdGetfd,
	"kcmp":              func() error { pid := uintptr(os.Getpid()); return sys(unix.SYS_KCMP, pid, pid, 0, 0, 0) },
	"set_mempolicy":     func() error { return sys(unix.SYS_SET_MEMPOLICY, 0, 0, 0) }, // MPOL_DEFAULT

	// limits
	"core-limit": func() error { return unix.Prlimit(0, unix.RLIMIT_CORE, &unix.Rlimit{Cur: 0, Max: 1}, nil) },
	"file-limit": func() error {
		return unix.Prlimit(0, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1 << 19, Max: 1 << 19}, nil)
	},
	"lock-memory": func() error {
		b, err := unix.Mmap(-1, 0, 1<<20, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return err
		}
		return unix.Mlock(b)
	},
	"nice": func() error { return unix.Setpriority(unix.PRIO_PROCESS, 0, -10) },
	"oom-score": func() error { // of this process
		return os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0)
	},
}

func ptr[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }

func spec(id int) uintptr { return uintptr(id) }

func call(args []string) (string, error) {
	f := calls[args[0]]
	if f == nil {
		return args[0], wordError("unknown-call")
	}
	return "", f()
}

// descriptor closes what was opened.
func descriptor(fd int, err error) error {
	if err == nil {
		unix.Close(fd)
	}
	return err
}

// opened makes a call that returns a descriptor.
func opened(nr uintptr, args ...uintptr) error {
	var a [3]uintptr
	copy(a[:], args)
	fd, _, errno := syscall.Syscall(nr, a[0], a[1], a[2])
	if errno != 0 {
		return errno
	}
	return unix.Close(int(fd))
}

// in runs a program in namespaces.
func in(attr syscall.SysProcAttr) error {
	cmd := exec.Command("/proc/self/exe", "nothing")
	cmd.SysProcAttr = &attr
	return cmd.Run()
}

func setns(path string, kind int) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Setns(fd, kind)
}

// mount mounts a file system, and unmounts it.
func mount(source, kind string) error {
	at, err := os.MkdirTemp(scratch, "m")
	if err != nil {
		return err
	}
	defer os.Remove(at)
	if err := unix.Mount(source, at, kind, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	return unix.Unmount(at, unix.MNT_DETACH)
}

func bindMount(from, below string) error {
	at, err := os.MkdirTemp(below, "b")
	if err != nil {
		return err
	}
	defer os.Remove(at)
	if err := unix.Mount(from, at, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	return unix.Unmount(at, unix.MNT_DETACH)
}

// remount makes a read-only mount writable, and read-only again.
func remount(path string) error {
	const flags = unix.MS_REMOUNT | unix.MS_BIND | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("", path, "", flags, ""); err != nil {
		return err
	}
	return unix.Mount("", path, "", flags|unix.MS_RDONLY, "")
}

func perfEvent() error {
	attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_TASK_CLOCK, Bits: unix.PerfBitDisabled}
	attr.Size = uint32(unsafe.Sizeof(attr))
	return descriptor(unix.PerfEventOpen(&attr, 0, -1, -1, unix.PERF_FLAG_FD_CLOEXEC))
}

// openByHandle opens a file by a handle, as shocker.c did: no path is walked.
func openByHandle() error {
	handle, _, err := unix.NameToHandleAt(unix.AT_FDCWD, scratch, 0)
	if err != nil {
		handle = unix.NewFileHandle(1, make([]byte, 8))
	}
	fd, err := unix.Open(scratch, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return descriptor(unix.OpenByHandleAt(fd, handle, unix.O_RDONLY))
}

func processVM() error {
	from, to := []byte("x"), []byte(" ")
	_, err := unix.ProcessVMReadv(os.Getpid(), []unix.Iovec{{Base: &to[0], Len: 1}}, []unix.RemoteIovec{{Base: ptr(&from[0]), Len: 1}}, 0)
	return err
}

func pidfdGetfd() error {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return err
	}
	return descriptor(unix.PidfdGetfd(fd, 1, 0))
}

func socket(args []string) (string, error) {
	return "", descriptor(unix.Socket(int(number(args[0])), int(number(args[1])), int(number(args[2]))))
}

// mknod makes a character device, and with the argument "open" opens it for writing.
func mknod(args []string) (string, error) {
	path := filepath.Join(args[0], "attack-device")
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(uint32(number(args[1])), uint32(number(args[2]))))); err != nil {
		return "", err
	}
	defer os.Remove(path)
	if len(args) < 4 {
		return "", nil
	}
	return "", openAny([]string{path}, os.O_WRONLY)
}

// setuid has another user execute a copy of this program that is root's and setuid.
func setuid(args []string) (string, error) {
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return "", err
	}
	copied := filepath.Join(args[0], "attack-setuid")
	defer os.Remove(copied)
	if err := os.WriteFile(copied, b, 0o755); err != nil {
		return "", err
	}
	if err := os.Chmod(copied, 0o755|os.ModeSetuid); err != nil {
		return "", err
	}
	cmd := exec.Command(copied, "euid")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.Output()
	if len(out) == 0 {
		return "", err
	}
	if strings.HasPrefix(string(out), "ok") {
		return "", nil
	}
	return "", wordError(strings.Fields(string(out))[0])
}

// euid is "ok" for root.
func euid([]string) (string, error) {
	if id := os.Geteuid(); id != 0 {
		return "", wordError(fmt.Sprint("uid-", id))
	}
	return "", nil
}

// apart attacks in a process of its own: the kernel may kill a thread of it, which no other
// thread notices.
func apart(attack string) func([]string) (string, error) {
	return func([]string) (string, error) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		out, err := exec.CommandContext(ctx, "/proc/self/exe", attack).Output()
		switch said := strings.Fields(string(out)); {
		case len(said) > 0 && said[0] == "ok":
			return "", nil
		case len(said) > 0:
			return "", wordError(said[0])
		case err != nil:
			return err.Error(), wordError("killed")
		}
		return "", wordError("nothing")
	}
}

// passing is a filter that lets all pass.
var passing = []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW}}

// filter gives this thread a filter of system calls. It needs no rights with no_new_privs.
func filter(call, mode, second uintptr) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return sys(call, mode, second, ptr(&unix.SockFprog{Len: uint16(len(passing)), Filter: &passing[0]}))
}

const sentTimes = unix.SOF_TIMESTAMPING_TX_SOFTWARE | unix.SOF_TIMESTAMPING_SOFTWARE

// timesOfMessages asks for the times of all messages that a socket sends.
func timesOfMessages() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPING, sentTimes)
}

// messageWithItsTime asks for the time of one message beside that message, where no filter sees it, and then
// takes the message back, with its time. It is EAGAIN if the kernel has not kept it.
func messageWithItsTime() error {
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	if err == nil {
		err = unix.Listen(listener, 1)
	}
	if err != nil {
		return err
	}
	to, err := unix.Getsockname(listener)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Connect(fd, to)
	}
	if err != nil {
		return err
	}
	ask := make([]byte, unix.CmsgSpace(4))
	head := (*unix.Cmsghdr)(unsafe.Pointer(&ask[0]))
	head.Level, head.Type = unix.SOL_SOCKET, unix.SO_TIMESTAMPING
	head.SetLen(unix.CmsgLen(4))
	binary.NativeEndian.PutUint32(ask[unix.CmsgLen(0):], unix.SOF_TIMESTAMPING_TX_SOFTWARE)
	if _, err := unix.SendmsgN(fd, make([]byte, 60_000), ask, nil, 0); err != nil {
		return err
	}
	_, _, _, _, err = unix.Recvmsg(fd, make([]byte, 60_000), make([]byte, 256), unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
	return err
}

func filterOfSocket() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &passing[0]})
}
