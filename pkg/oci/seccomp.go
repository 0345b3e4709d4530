package oci

import "github.com/opencontainers/runtime-spec/specs-go"

// denyList is the first filter for runc, for one architecture. PID 1 installs the second
// one, an allow-list (internal/seccomp), but for the level Compat.
//
// It is a deny-list because libseccomp compiles it again in every start: about 1 ms
// against 9 for an allow-list. It stays beside the second filter because it holds before
// PID 1 runs. It is for one architecture because the filter then kills every call of
// another ABI (int 0x80, x32).
//
// Three rules of the trade:
//   - libcontainer ORs several conditions on one argument, so a rule holds at
//     most one per argument: masks and single values, no ranges.
//   - The kernel reads the low 32 bits of an int argument, the filter all 64.
//     Every comparison is masked, or refuses too much rather than too little
//     (CVE-2019-10063).
//   - libcontainer names calls only by name, not by number, and skips a name that
//     the host's libseccomp does not know. 2.5.4 (Debian 12) knows none of
//     open_tree_attr, statmount and listmount, so there only the second filter
//     refuses them.
func denyList(goarch string) *specs.LinuxSeccomp {
	s := &specs.LinuxSeccomp{DefaultAction: specs.ActAllow}
	names := append([]string(nil), denied...)
	switch goarch {
	case "amd64":
		s.Architectures = []specs.Arch{specs.ArchX86_64}
		names = append(names, "ioperm", "iopl")
	case "arm64":
		s.Architectures = []specs.Arch{specs.ArchAARCH64}
	default:
		panic("oci: no seccomp filter for " + goarch)
	}
	s.Syscalls = []specs.LinuxSyscall{
		refuse(ePERM, names),
		// Programs fall back from these on ENOSYS only. The flags of clone3 are behind
		// a pointer, and no filter can read them.
		refuse(eNOSYS, []string{"clone3", "io_uring_enter", "io_uring_register", "io_uring_setup"}),
	}
	for _, bit := range namespaceBits {
		s.Syscalls = append(s.Syscalls, refuse(ePERM, []string{"clone"}, masked(0, bit, bit)))
	}
	s.Syscalls = append(s.Syscalls, sockets()...)
	s.Syscalls = append(s.Syscalls, personality()...)
	for _, cmd := range []uint64{tiocsti, tioclinux, fsIocFssetxattr} {
		s.Syscalls = append(s.Syscalls, refuse(ePERM, []string{"ioctl"}, low32(1, cmd)))
	}
	for _, cmd := range subvolumes {
		s.Syscalls = append(s.Syscalls, refuse(eNOTTY, []string{"ioctl"}, low32(1, cmd)))
	}
	// RLIMIT_CORE stays 1 (see process): reading it is allowed, setting it is not.
	s.Syscalls = append(s.Syscalls,
		refuse(ePERM, []string{"setrlimit"}, low32(0, rlimitCore)),
		refuse(ePERM, []string{"prlimit64"}, low32(1, rlimitCore), not(2, 0)),
	)
	return s
}

// denied are the calls that are refused with any arguments. ptrace stays allowed (gdb,
// strace): since 4.8 the kernel checks the filter again after it.
var denied = []string{
	// namespaces
	"setns", "unshare",
	// mounts, old and new; chroot stays
	"fsconfig", "fsmount", "fsopen", "fspick", "listmount", "mount", "mount_setattr", "move_mount",
	"open_tree", "open_tree_attr", "pivot_root", "statmount", "umount", "umount2",
	// bug farms and ways around a filter
	"bpf", "fanotify_init", "lookup_dcookie", "perf_event_open", "userfaultfd", "vmsplice",
	// not namespaced
	"acct", "add_key", "adjtimex", "clock_adjtime", "clock_settime", "delete_module", "finit_module", "init_module",
	"kexec_file_load", "kexec_load", "keyctl", "quotactl", "quotactl_fd", "reboot", "request_key",
	"settimeofday", "swapoff", "swapon", "syslog",
	// handles and foreign memory
	"kcmp", "mbind", "migrate_pages", "move_pages", "name_to_handle_at", "open_by_handle_at", "pidfd_getfd",
	"process_madvise", "process_vm_readv", "process_vm_writev", "set_mempolicy",
}

// subvolumes are the requests that make and remove subvolumes of a btrfs
// (linux/btrfs.h: SNAP_CREATE, SUBVOL_CREATE, SNAP_DESTROY, and their second versions).
// btrfs allows them to everybody. A subvolume made in a volume is not counted in the
// volume's limit, and keeps the volume from being deleted. Overlays answer these
// requests, too.
var subvolumes = []uint64{0x50009401, 0x5000940e, 0x5000940f, 0x50009417, 0x50009418, 0x5000943f}

// namespaceBits are the CLONE_NEW* flags of clone(2). 0x80, CLONE_NEWTIME, is
// part of the exit signal there and counts only for unshare.
var namespaceBits = []uint64{
	0x00020000, // NEWNS
	0x02000000, // NEWCGROUP
	0x04000000, // NEWUTS
	0x08000000, // NEWIPC
	0x10000000, // NEWUSER
	0x20000000, // NEWPID
	0x40000000, // NEWNET
}

// sockets allows AF_UNIX (1), INET (2), INET6 (10) and NETLINK (16, ROUTE only). The
// others (ALG, VSOCK, PACKET, XDP, TIPC, ...) load kernel modules that no sandbox
// needs; a user namespace does not stop most of them.
func sockets() (rules []specs.LinuxSyscall) {
	const (
		inet, inet6, netlink = 2, 10, 16
		protoSMC             = 256 // AF_SMC as a protocol of AF_INET
	)
	calls := []string{"socket", "socketpair"}
	for family := uint64(3); family < netlink; family++ {
		if family != inet6 {
			rules = append(rules, refuse(eAFNOSUPPORT, calls, low32(0, family)))
		}
	}
	return append(rules,
		refuse(eAFNOSUPPORT, calls, specs.LinuxSeccompArg{Index: 0, Value: netlink + 1, Op: specs.OpGreaterEqual}),
		refuse(ePROTONOSUPPORT, calls, low32(0, netlink), not(2, 0)),
		refuse(ePROTONOSUPPORT, calls, low32(0, inet), low32(2, protoSMC)),
		refuse(ePROTONOSUPPORT, calls, low32(0, inet6), low32(2, protoSMC)),
	)
}

// personality refuses every value but 0, 8 (PER_LINUX32) and 0xffffffff, which only
// reads. "Not one of three" needs three conditions on one argument, which libcontainer
// cannot express. But 0 and 0xffffffff are the two values in which every bit equals its
// upper neighbour (that of bit 31 being 0). So there are 32 rules "this bit set, the
// next one clear"; the rule for bit 3 also wants bit 2, to allow 8.
func personality() (rules []specs.LinuxSyscall) {
	for i := range 32 {
		bit, next := uint64(1)<<i, uint64(1)<<((i+1)%32)
		if i == 3 {
			rules = append(rules, refuse(ePERM, []string{"personality"}, masked(0, bit|next|4, bit|4)))
			continue
		}
		rules = append(rules, refuse(ePERM, []string{"personality"}, masked(0, bit|next, bit)))
	}
	return rules
}

// Numbers of the kernel's ABI, equal on amd64 and arm64.
const (
	tiocsti         = 0x5412
	tioclinux       = 0x541c
	fsIocFssetxattr = 0x401c5820 // makes a file leave the project quota of its disk
	rlimitCore      = 4

	ePERM           = 1
	eNOTTY          = 25
	eNOSYS          = 38
	ePROTONOSUPPORT = 93
	eAFNOSUPPORT    = 97
)

func refuse(errno uint, names []string, args ...specs.LinuxSeccompArg) specs.LinuxSyscall {
	return specs.LinuxSyscall{Names: names, Action: specs.ActErrno, ErrnoRet: &errno, Args: args}
}

// masked is true if argument i, and-ed with mask, is value.
func masked(i uint, mask, value uint64) specs.LinuxSeccompArg {
	return specs.LinuxSeccompArg{Index: i, Value: mask, ValueTwo: value, Op: specs.OpMaskedEqual}
}

// low32 is true if the 32 bits that the kernel reads are value.
func low32(i uint, value uint64) specs.LinuxSeccompArg { return masked(i, 0xffffffff, value) }

// not is true for everything but value, also for value with a high bit set.
func not(i uint, value uint64) specs.LinuxSeccompArg {
	return specs.LinuxSeccompArg{Index: i, Value: value, Op: specs.OpNotEqual}
}
