package attacks_test

import (
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/doctor"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/weak"
)

// Why there is no proof on gVisor.
var (
	noSuchCall = unproven("the sentry does not have the call, with any right")
	inSentry   = unproven("the sentry answers; its own filters cannot be taken down")
)

// kernelAttacks are system calls with arguments that do nothing.
var kernelAttacks = []attack{
	// namespaces; gVisor makes them in its own kernel, which is no way out
	{
		name: "unshare a user namespace", wall: "seccomp, limits of the user namespace", run: []string{"unshare", "0x10000000"},
		held: refused.and("ENOSPC"), runc: without(weak.Seccomp, weak.UserLimits),
	},
	{
		name: "clone a user namespace", wall: "seccomp, limits of the user namespace", run: []string{"clone", "0x10000000"},
		held: refused.and("ENOSPC"), runc: without(weak.Seccomp, weak.UserLimits),
	},
	{
		name: "unshare mounts", wall: "seccomp, no CAP_SYS_ADMIN", run: []string{"unshare", "0x20000"},
		held: refused, runc: without(weak.Seccomp, weak.Caps),
	},
	{
		name: "unshare a network namespace", wall: "seccomp, limits of the user namespace", run: []string{"unshare", "0x40000000"},
		held: refused.and("ENOSPC"), runc: without(weak.Seccomp, weak.Caps, weak.UserLimits),
	},
	{ // CVE-2022-0492 begins with it
		name: "unshare cgroups", wall: "seccomp, no CAP_SYS_ADMIN", run: []string{"unshare", "0x2000000"},
		held: refused.and("EINVAL"), runc: without(weak.Seccomp, weak.Caps),
	},
	{
		name: "clone a pid namespace", wall: "seccomp, no CAP_SYS_ADMIN", run: []string{"clone", "0x20000000"},
		held: refused, runc: without(weak.Seccomp, weak.Caps),
	},
	attackByCall("setns", "seccomp, no CAP_SYS_ADMIN", nil, without(weak.Seccomp, weak.Caps), nil),
	attackByCall("clone3", "seccomp", words{"EINVAL"}, without(weak.Seccomp), nil),

	// mounts, old and new
	attackByCall("mount-tmpfs", "seccomp, no CAP_SYS_ADMIN", nil, without(weak.Seccomp, weak.Caps), without(weak.Caps)),
	attackByCall("mount-cgroup2", "seccomp, no CAP_SYS_ADMIN", nil, without(weak.Seccomp, weak.Caps), inSentry),
	attackByCall("mount-proc", "seccomp, no CAP_SYS_ADMIN, masked paths (the kernel shows no more than was seen)", nil,
		without(weak.Seccomp, weak.Caps, weak.MaskedPaths, weak.ReadOnlyPaths, weak.BootID), inSentry),
	attackByCall("mount-overlay", "seccomp, no CAP_SYS_ADMIN", words{"EINVAL"}, without(weak.Seccomp, weak.Caps), inSentry),
	attackByCall("mount-bind", "seccomp, no CAP_SYS_ADMIN", nil, without(weak.Seccomp, weak.Caps), without(weak.Caps)),
	attackByCall("remount-proc", "seccomp, no CAP_SYS_ADMIN", nil, without(weak.Seccomp, weak.Caps), nil),
	attackByCall("remount-sys", "seccomp, no CAP_SYS_ADMIN", nil, without(weak.Seccomp, weak.Caps), nil),
	attackByCall("umount", "seccomp, no CAP_SYS_ADMIN", nil, without(weak.Seccomp, weak.Caps), nil),
	attackByCall("pivot_root", "seccomp, no CAP_SYS_ADMIN", nil, unproven("its answer without walls, ENOENT, is a refusal elsewhere"),
		unproven("its answer without walls, ENOENT, is a refusal elsewhere")),
	attackByCall("fsopen", "seccomp, no CAP_SYS_ADMIN", nil, without(weak.Seccomp, weak.Caps), without(weak.Caps)), // CVE-2022-0185
	attackByCall("fspick", "seccomp, no CAP_SYS_ADMIN", nil, without(weak.Seccomp, weak.Caps), noSuchCall),
	attackByCall("open_tree", "seccomp, no CAP_SYS_ADMIN", nil, without(weak.Seccomp, weak.Caps), without(weak.Caps)),
	attackByCall("move_mount", "seccomp, no CAP_SYS_ADMIN", words{"EBADF"}, without(weak.Seccomp, weak.Caps), without(weak.Caps)),
	attackByCall("mount_setattr", "seccomp, no CAP_SYS_ADMIN", nil, without(weak.Seccomp, weak.Caps), inSentry),

	// calls that libseccomp 2.5.4 has no name for
	newCall("statmount", words{"EFAULT"}, 6, 8),
	newCall("listmount", words{"EFAULT"}, 6, 8),
	newCall("open_tree_attr", words{"EBADF"}, 6, 15),
	newCall("file_setattr", words{"EINVAL"}, 6, 17),
	newCall("lsm_modules", words{"EINVAL"}, 6, 8, "/proc/self/attr/current"),

	// frequent bugs, ways around a filter
	attackByCall("bpf", "seccomp, no CAP_BPF, sysctl", words{"EINVAL"}, without(weak.Seccomp, weak.Caps, weak.UserNS), nil),
	attackByCall("perf_event_open", "seccomp, sysctl", nil, without(weak.Seccomp, weak.Caps, weak.UserNS), noSuchCall),
	attackByCall("userfaultfd", "seccomp", nil, without(weak.Seccomp), noSuchCall),
	attackByCall("fanotify_init", "seccomp, limits of the user namespace", nil, without(weak.Seccomp, weak.UserLimits), noSuchCall),
	attackByCall("io_uring_setup", "seccomp; runsc: --iouring=false", nil, without(weak.Seccomp), without(weak.SentryFlags)),
	attackByCall("io_uring_enter", "seccomp; runsc: --iouring=false", words{"EBADF"}, without(weak.Seccomp), nil),
	attackByCall("vmsplice", "seccomp", words{"EBADF"}, without(weak.Seccomp), noSuchCall), // CVE-2022-0847
	attackByCall("personality", "seccomp", nil, without(weak.Seccomp), nil),
	{
		name: "calls of i386", wall: "seccomp, for one architecture", run: []string{"int80"},
		held: refused.and("killed", "SIGSYS"), runc: without(weak.Seccomp),
		needs: exists("/proc/sys/abi/vsyscall32"), // of a kernel that runs them
	},
	{
		name: "calls of x32", wall: "seccomp, for one architecture", run: []string{"x32"},
		held: refused.and("killed", "SIGSYS"), runc: unproven("kernels have x32 only if they are booted with syscall.x32=y"),
	},

	// not namespaced
	attackByCall("add_key", "seccomp", nil, without(weak.Seccomp), noSuchCall),
	attackByCall("request_key", "seccomp", words{"ENOKEY"}, without(weak.Seccomp), noSuchCall),
	attackByCall("keyctl", "seccomp", nil, without(weak.Seccomp), nil),
	attackByCall("syslog", "seccomp, no CAP_SYSLOG on the host", nil, without(weak.Seccomp, weak.Caps, weak.UserNS, weak.Privileges), nil),
	attackByCall("quotactl", "seccomp", nil, unproven("its answer without walls, ENOENT, is a refusal elsewhere"), noSuchCall),
	attackByCall("acct", "seccomp, no CAP_SYS_PACCT on the host", nil,
		unproven("its answer without walls, ENOENT, is a refusal elsewhere"), noSuchCall),
	attackByCall("swapon", "seccomp, no CAP_SYS_ADMIN on the host", nil,
		unproven("its answer without walls, ENOENT, is a refusal elsewhere"), noSuchCall),
	attackByCall("reboot", "seccomp, no CAP_SYS_BOOT", words{"EINVAL"}, without(weak.Seccomp, weak.Caps), noSuchCall),
	attackByCall("settimeofday", "seccomp, no CAP_SYS_TIME on the host", nil,
		without(weak.Seccomp, weak.Caps, weak.UserNS, weak.Privileges), noSuchCall),
	attackByCall("adjtimex", "seccomp", nil, without(weak.Seccomp), noSuchCall),
	withNeeds(attackByCall("kexec_load", "seccomp, no CAP_SYS_BOOT on the host", words{"EINVAL"},
		without(weak.Seccomp, weak.Caps, weak.UserNS), noSuchCall), exists("/sys/kernel/kexec_loaded")),
	withNeeds(attackByCall("finit_module", "seccomp, no CAP_SYS_MODULE on the host", words{"EBADF"},
		without(weak.Seccomp, weak.Caps, weak.UserNS), noSuchCall), exists("/proc/modules")),
	attackByCall("sethostname", "no CAP_SYS_ADMIN, seccomp", nil, without(weak.Seccomp, weak.Caps), without(weak.Caps)),

	// handles, foreign memory
	attackByCall("name_to_handle_at", "seccomp", nil, without(weak.Seccomp), noSuchCall),
	attackByCall("open_by_handle_at", "seccomp, no CAP_DAC_READ_SEARCH on the host", nil,
		without(weak.Seccomp, weak.Caps, weak.UserNS), noSuchCall),
	attackByCall("process_vm_readv", "seccomp", nil, without(weak.Seccomp), nil),
	attackByCall("pidfd_getfd", "seccomp", nil, without(weak.Seccomp), nil),
	attackByCall("kcmp", "seccomp", nil, without(weak.Seccomp), noSuchCall),
	attackByCall("set_mempolicy", "seccomp", nil, without(weak.Seccomp), nil),

	// limits
	attackByCall("core-limit", "seccomp", nil, without(weak.Seccomp), nil),
	withNeeds(attackByCall("file-limit", "no CAP_SYS_RESOURCE on the host", nil, without(weak.Caps, weak.UserNS),
		without(weak.Caps)), mayRaiseLimits),
	withHeld(attackByCall("lock-memory", "RLIMIT_MEMLOCK, no CAP_IPC_LOCK on the host", nil,
		without(weak.Caps, weak.UserNS, weak.Privileges), without(weak.Caps)), "ENOMEM", "EAGAIN"),
	attackByCall("nice", "no CAP_SYS_NICE on the host", nil, without(weak.Caps, weak.UserNS, weak.Privileges), nil),
	withNeeds(attackByCall("oom-score", "no CAP_SYS_RESOURCE on the host", nil, without(weak.Caps, weak.UserNS), nil), mayRaiseLimits),

	// sockets
	attackBySocket("AF_ALG", unix.AF_ALG, unix.SOCK_SEQPACKET, 0, without(weak.Seccomp), noSuchCall), // CVE-2026-31431
	attackBySocket("AF_VSOCK", unix.AF_VSOCK, unix.SOCK_STREAM, 0, without(weak.Seccomp), noSuchCall),
	attackBySocket("AF_XDP", unix.AF_XDP, unix.SOCK_RAW, 0, without(weak.Seccomp, weak.Caps), noSuchCall),
	attackBySocket("AF_PACKET", unix.AF_PACKET, unix.SOCK_RAW, 0, without(weak.Seccomp, weak.Caps), without(weak.Caps, weak.SentryFlags)),
	attackBySocket("raw IP", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP, without(weak.Seccomp, weak.Caps),
		without(weak.Caps, weak.SentryFlags)),
	attackBySocket("nf_tables", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER, without(weak.Seccomp), noSuchCall), // CVE-2024-1086
	attackBySocket("MPTCP", unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP, without(weak.Seccomp), noSuchCall),
	attackBySocket("UDPLITE", unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE, without(weak.Seccomp), noSuchCall),
	attackBySocket("SMC", unix.AF_INET, unix.SOCK_STREAM, 256, without(weak.Seccomp), noSuchCall),

	// ioctl of no descriptor: EBADF from the kernel itself
	attackByIoctl("type into a terminal (TIOCSTI)", "0x5412"),
	attackByIoctl("type into a console (TIOCLINUX)", "0x541c"),
	attackByIoctl("leave the project quota (FS_IOC_FSSETXATTR)", "0x401c5820"),
	attackByIoctl("make a subvolume (BTRFS_IOC_SUBVOL_CREATE)", "0x5000940e"),
	attackByIoctl("sync the whole pool (BTRFS_IOC_SYNC)", "0x9408"),
	attackByIoctl("read about the pool (BTRFS_IOC_FS_INFO)", "0x8400941f"),

	// tables of the whole host
	attackByCall("io_setup", "seccomp", nil, without(weak.Seccomp), nil),
	withHeld(attackByCall("filter-of-calls", "seccomp", nil, without(weak.Seccomp), nil), "EINVAL"),
	withHeld(attackByCall("filter-of-calls-prctl", "seccomp", nil, without(weak.Seccomp), nil), "EINVAL"),
	withHeld(attackByCall("filter-of-a-socket", "seccomp", nil, without(weak.Seccomp), nil), "ENOPROTOOPT"),
	withHeld(attackByCall("times-of-messages", "seccomp", nil, without(weak.Seccomp), nil), "ENOPROTOOPT"),
	attackByTime(),
}

// attackByCall is one of the calls of the program guest. got is what it gets without the
// walls, nil: success.
func attackByCall(name, wall string, got words, runc, runsc *proof) attack {
	return attack{name: name, wall: wall, run: []string{"call", name}, held: refused, got: got, runc: runc, runsc: runsc}
}

// attackByTime needs a kernel that has the setting for each network namespace.
func attackByTime() attack {
	a := withHeld(attackByCall("message-with-its-time", "no message in its time", nil, without(weak.KernelMemory), nil), "EAGAIN")
	a.needs = timesByNamespace
	return a
}

func timesByNamespace(t testing.TB) bool {
	own, err := doctor.TimesByNamespace()
	if err != nil {
		t.Fatal(err)
	}
	return own
}

// newCall is a call that only the filter of the agent knows, by its number.
func newCall(name string, got words, major, minor int, files ...string) attack {
	a := attackByCall(name, "seccomp, stage 2", got, without(weak.Seccomp), noSuchCall)
	return withNeeds(a, func(t testing.TB) bool {
		return hosttest.Kernel(t, major, minor) && (len(files) == 0 || exists(files[0])(t))
	})
}

func attackBySocket(name string, family, kind, protocol int, runc, runsc *proof) attack {
	return attack{
		name: "socket of " + name, wall: "seccomp; raw sockets: no CAP_NET_RAW",
		run:  []string{"socket", strconv.Itoa(family), strconv.Itoa(kind), strconv.Itoa(protocol)},
		held: refused.and("EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT", "EINVAL"), runc: runc, runsc: runsc,
		needs: func(testing.TB) bool {
			fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
			if err == nil {
				unix.Close(fd)
			}
			return err == nil
		},
	}
}

func attackByIoctl(name, request string) attack {
	return attack{
		name: name, wall: "seccomp", run: []string{"ioctl", request},
		held: words{"EPERM", "ENOTTY"}, got: words{"EBADF"}, runc: without(weak.Seccomp),
	}
}

func withNeeds(a attack, needs func(testing.TB) bool) attack {
	a.needs = needs
	return a
}

func withHeld(a attack, more ...string) attack {
	a.held = a.held.and(more...)
	return a
}

// exists reports whether this host has a file.
func exists(path string) func(testing.TB) bool {
	return func(testing.TB) bool { _, err := os.Lstat(path); return err == nil }
}

// mayRaiseLimits reports whether this process, and so the daemon, has CAP_SYS_RESOURCE. Root
// of a container has it not.
func mayRaiseLimits(testing.TB) bool {
	have, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, unix.CAP_SYS_RESOURCE, 0, 0, 0)
	return err == nil && have == 1
}
