package seccomp

import (
	"slices"
	"syscall"
)

// A Call is a row of Table.
type Call struct {
	Name         string
	AMD64, ARM64 int // its number; -1: the architecture does not have it
	Verdict      Verdict
	Why          string
}

// A Refusal refuses a call with Errno if all tests hold; without tests, always.
type Refusal struct {
	Errno syscall.Errno
	If    []Test
}

// A Test looks at 32 bits of an argument, as the kernel does where it takes an int. It
// holds if these bits, and-ed with Mask, are one of In; with Not, if they are none of In.
type Test struct {
	Arg  int
	High bool   // the upper 32 bits, not the lower ones
	Mask uint32 // 0: all bits
	Not  bool
	In   []uint32
}

// A Verdict says when a call is refused; At says it in full. It is a number, and not the
// rules themselves, so that Table costs PID 1 nothing: the linker drops it there.
type Verdict uint8

const (
	allow    Verdict = iota
	perm             // EPERM
	nosys            // ENOSYS
	laxPerm          // EPERM, but only on Strict
	laxNosys         // ENOSYS, but only on Strict

	cloneArgs
	socketArgs
	ioctlArgs
	personalityArgs
	setrlimitArgs
	prlimitArgs
	setsockoptArgs
	seccompArgs
	prctlArgs
	fcntlArgs
)

// At returns what level refuses of a call, the first that applies first; nothing: the call
// is allowed.
func (v Verdict) At(level Level) []Refusal {
	if level != Default && level != Strict {
		return nil
	}
	switch v {
	case perm:
		return refuse(syscall.EPERM)
	case nosys:
		return refuse(syscall.ENOSYS)
	case laxPerm:
		if level == Strict {
			return refuse(syscall.EPERM)
		}
	case laxNosys:
		if level == Strict {
			return refuse(syscall.ENOSYS)
		}
	case cloneArgs:
		// 0x80, CLONE_NEWTIME, is part of the exit signal here and counts for unshare only.
		return refuse(syscall.EPERM, Test{Arg: 0, Mask: newNamespaces, Not: true, In: []uint32{0}})
	case socketArgs:
		return sockets()
	case ioctlArgs: // as stage 1, with the same reasons (pkg/oci/seccomp.go)
		return slices.Concat(
			refuse(syscall.EPERM, Test{Arg: 1, In: []uint32{tiocsti, tioclinux, fsIocFssetxattr}}),
			refuse(syscall.ENOTTY, Test{Arg: 1, Mask: 0xff00, In: []uint32{btrfsType}},
				Test{Arg: 1, Not: true, In: []uint32{ficlone, ficloneRange, fideduperange}}),
		)
	case personalityArgs:
		allowed := []uint32{ask}
		if level == Default {
			allowed = []uint32{0, perLinux32, ask}
		}
		return refuse(syscall.EPERM, Test{Arg: 0, Not: true, In: allowed})
	case setrlimitArgs:
		return refuse(syscall.EPERM, Test{Arg: 0, In: []uint32{rlimitCore}})
	case prlimitArgs: // the address of a new limit is in argument 2: neither half may have a bit set
		core := Test{Arg: 1, In: []uint32{rlimitCore}}
		return slices.Concat(
			refuse(syscall.EPERM, core, Test{Arg: 2, Not: true, In: []uint32{0}}),
			refuse(syscall.EPERM, core, Test{Arg: 2, High: true, Not: true, In: []uint32{0}}),
		)
	case setsockoptArgs: // as stage 1
		return refuse(syscall.ENOPROTOOPT, Test{Arg: 1, In: []uint32{solSocket}},
			Test{Arg: 2, In: []uint32{
				soAttachFilter, soAttachBPF, soAttachReuseportCBPF, soAttachReuseportEBPF,
				soTimestamping, soTimestampingNew,
			}})
	case seccompArgs:
		return refuse(syscall.EINVAL, Test{Arg: 0, In: []uint32{setModeFilter}})
	case prctlArgs:
		return refuse(syscall.EINVAL, Test{Arg: 0, In: []uint32{prSetSeccomp}}, Test{Arg: 1, In: []uint32{modeFilter}})
	case fcntlArgs:
		if level == Strict { // as a kernel without them
			return refuse(syscall.EINVAL, Test{Arg: 1, In: []uint32{ofdGetlk, ofdSetlk, ofdSetlkw}})
		}
	}
	return nil
}

// sockets allows the families UNIX, INET, INET6 and NETLINK. The others (ALG, VSOCK,
// PACKET, XDP, TIPC) load kernel modules that no sandbox needs, and so do the other types
// and protocols of INET (SCTP, DCCP, L2TP, MPTCP, SMC, UDPLITE). SOCK_PACKET is a type of
// INET that makes a socket of PACKET. The raw type stays: the kernel refuses it for want
// of CAP_NET_RAW.
func sockets() []Refusal {
	inet := Test{Arg: 0, In: []uint32{afInet, afInet6}}
	return slices.Concat(
		refuse(syscall.EAFNOSUPPORT, Test{Arg: 0, Not: true, In: []uint32{afUnix, afInet, afInet6, afNetlink}}),
		refuse(syscall.EPROTONOSUPPORT, Test{Arg: 0, In: []uint32{afNetlink}}, Test{Arg: 2, Not: true, In: []uint32{netlinkRoute}}),
		refuse(syscall.ESOCKTNOSUPPORT, inet, Test{Arg: 1, Mask: socketType, Not: true, In: []uint32{sockStream, sockDgram, sockRaw}}),
		refuse(syscall.EPROTONOSUPPORT, inet,
			Test{Arg: 2, Not: true, In: []uint32{protoAny, protoICMP, protoTCP, protoUDP, protoICMPv6, protoRaw}}),
	)
}

func refuse(errno syscall.Errno, tests ...Test) []Refusal { return []Refusal{{errno, tests}} }

// Numbers of the kernel's ABI, equal on amd64 and arm64.
const (
	newNamespaces = 0x7e020000 // NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

	afUnix, afInet, afInet6, afNetlink      = 1, 2, 10, 16
	netlinkRoute                            = 0
	socketType                              = 0xf // the rest are flags
	sockStream, sockDgram, sockRaw          = 1, 2, 3
	protoAny, protoICMP, protoTCP, protoUDP = 0, 1, 6, 17
	protoICMPv6, protoRaw                   = 58, 255
	tiocsti, tioclinux                      = 0x5412, 0x541c
	fsIocFssetxattr                         = 0x401c5820
	perLinux32                              = 8
	ask                                     = 0xffffffff
	rlimitCore                              = 4

	btrfsType                            = 0x9400 // the second byte of an ioctl of btrfs
	ficlone, ficloneRange, fideduperange = 0x40049409, 0x4020940d, 0xc0189436

	solSocket                                    = 1
	soAttachFilter, soAttachBPF                  = 26, 50
	soAttachReuseportCBPF, soAttachReuseportEBPF = 51, 52
	soTimestamping, soTimestampingNew            = 37, 65

	setModeFilter            = 1 // seccomp(2)
	prSetSeccomp, modeFilter = 22, 2

	ofdGetlk, ofdSetlk, ofdSetlkw = 36, 37, 38 // fcntl(2)
)

// Errno returns what level answers to a call with args; 0: it is allowed.
func (v Verdict) Errno(level Level, args [6]uint64) syscall.Errno {
	for _, r := range v.At(level) {
		if !slices.ContainsFunc(r.If, func(t Test) bool { return !t.holds(args) }) {
			return r.Errno
		}
	}
	return 0
}

func (t Test) holds(args [6]uint64) bool {
	v := args[t.Arg]
	if t.High {
		v >>= 32
	}
	bits := uint32(v)
	if t.Mask != 0 {
		bits &= t.Mask
	}
	return slices.Contains(t.In, bits) != t.Not
}

// NoCall is the number that a tracer sets to make the kernel skip a call (ptrace(2)): no
// call of any kernel, and nothing to refuse.
const NoCall = 0xffffffff

// Number returns the number of c on goarch, amd64 or arm64; -1: there is none.
func (c Call) Number(goarch string) int {
	if goarch == "arm64" {
		return c.ARM64
	}
	return c.AMD64
}

// Lookup returns the row of call nr on goarch. What is in no row gets one that refuses
// with ENOSYS, as a kernel answers that does not have the call.
func Lookup(goarch string, nr uint32) Call {
	for _, c := range Table {
		if n := c.Number(goarch); n >= 0 && uint32(n) == nr {
			return c
		}
	}
	if nr == NoCall {
		return Call{Name: "none", Verdict: allow, Why: "a tracer skips a call"}
	}
	return Call{Name: "unknown", Verdict: nosys, Why: "this program does not know it"}
}
