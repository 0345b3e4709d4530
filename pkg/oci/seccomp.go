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
		// a pointer, and no filter can read them. All contexts of io_setup come out of one
		// number for the whole host (fs.aio-max-nr, 65,536), and so do as many with one event
		// each, so no bound of the argument would do.
		refuse(eNOSYS, []string{"clone3", "io_setup", "io_uring_enter", "io_uring_register", "io_uring_setup"}),
	}
	for _, bit := range namespaceBits {
		s.Syscalls = append(s.Syscalls, refuse(ePERM, []string{"clone"}, masked(0, bit, bit)))
	}
	s.Syscalls = append(s.Syscalls, sockets()...)
	s.Syscalls = append(s.Syscalls, personality()...)
	for _, cmd := range []uint64{tiocsti, tioclinux, fsIocFssetxattr} {
		s.Syscalls = append(s.Syscalls, refuse(ePERM, []string{"ioctl"}, low32(1, cmd)))
	}
	s.Syscalls = append(s.Syscalls, btrfs()...)
	for _, option := range refusedOptions {
		s.Syscalls = append(s.Syscalls, refuse(eNOPROTOOPT, []string{"setsockopt"}, low32(1, solSocket), low32(2, option)))
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

// btrfs refuses the requests of linux/btrfs.h, whose second byte is 0x94, but for the
// three that linux/fs.h has from there: FICLONE (number 0x09), FICLONERANGE (0x0d) and
// FIDEDUPERANGE (0x36). btrfs allows to everybody, in a volume, what concerns the whole
// pool: to read how large it is, on which devices it lies and which errors these had, to
// sync it, and to make subvolumes, which are not counted in the volume's limit and keep the
// volume from being deleted. Overlays answer some, too.
//
// "Not one of three" needs three conditions on one argument (see above). So each rule is for
// numbers that have some bits set and others clear, and together they are all but the three.
func btrfs() (rules []specs.LinuxSyscall) {
	for _, bits := range []struct{ mask, value uint64 }{
		{0x80, 0x80}, {0x40, 0x40}, {0x30, 0x20}, {0x30, 0x10}, // none of the three
		{0x38, 0x00}, {0x32, 0x02}, {0x31, 0x00}, // 0x00 to 0x0f, but 0x09 and 0x0d
		{0x38, 0x38}, {0x34, 0x30}, {0x32, 0x30}, {0x31, 0x31}, // 0x30 to 0x3f, but 0x36
	} {
		rules = append(rules, refuse(eNOTTY, []string{"ioctl"}, masked(1, 0xff00|bits.mask, 0x9400|bits.value)))
	}
	return rules
}

// refusedOptions are options of sockets (asm-generic/socket.h). The answer is that of a kernel without them.
//
// Four attach a filter: FILTER, BPF, REUSEPORT_CBPF and REUSEPORT_EBPF. The kernel compiles each, into one store of
// machine code for the whole host (net.core.bpf_jit_limit). When guests have filled it, no
// filter can be installed any more, and no sandbox starts on runc. Without AF_PACKET
// and AF_NETLINK's other protocols hardly a program has use for one.
//
// Two ask for the times when messages were sent: TIMESTAMPING, old and new. Until it is read, each time holds memory
// that no cgroup is charged with. TIMESTAMP and TIMESTAMPNS, the times when messages were received, stay.
var refusedOptions = []uint64{26, 50, 51, 52, 37, 65}

// ownFilters refuses filters of system calls that a guest makes for itself, with the answer of a
// kernel that has none: they fill the same store. On the level Compat the first filter does it;
// on others the second one does, because PID 1 installs that one after the first.
func ownFilters() []specs.LinuxSyscall {
	const setModeFilter, prSetSeccomp, modeFilter = 1, 22, 2
	return []specs.LinuxSyscall{
		refuse(eINVAL, []string{"seccomp"}, low32(0, setModeFilter)),
		refuse(eINVAL, []string{"prctl"}, low32(0, prSetSeccomp), low32(1, modeFilter)),
	}
}

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
	solSocket       = 1

	ePERM           = 1
	eINVAL          = 22
	eNOTTY          = 25
	eNOSYS          = 38
	eNOPROTOOPT     = 92
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
