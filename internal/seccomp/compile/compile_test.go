package compile

import (
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/seccomp"
)

var update = flag.Bool("update", false, "write the programs of internal/seccomp anew")

var levels = []seccomp.Level{seccomp.Default, seccomp.Strict}

func TestPrograms(t *testing.T) {
	for goarch := range Arches {
		got, err := Source(goarch)
		if err != nil {
			t.Fatal(err)
		}
		path := "../program_" + goarch + ".go"
		if *update {
			if err := os.WriteFile(path, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != string(want) {
			t.Errorf("%s is not what the table says; go generate ./internal/seccomp, and read the diff of the table", path)
		}
	}
}

// A machine runs the bytes of a program, not the instructions that they were made of.
type machine struct {
	*testing.T
	arch uint32
	vm   *bpf.VM
}

func newMachine(t *testing.T, goarch string, level seccomp.Level) machine {
	t.Helper()
	program, err := Program(goarch, level)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := bpf.Assemble(program)
	if err != nil {
		t.Fatal(err)
	}
	if len(raw) > 4096 { // BPF_MAXINSNS
		t.Fatalf("%d instructions: no kernel takes them", len(raw))
	}
	back, ok := bpf.Disassemble(raw)
	if !ok {
		t.Fatal("it has instructions that x/net/bpf does not know")
	}
	vm, err := bpf.NewVM(back)
	if err != nil {
		t.Fatal(err)
	}
	return machine{t, Arches[goarch], vm}
}

// run returns what a program answers, as the kernel would read it. Packets are big endian
// for the VM, struct seccomp_data is little endian.
func (m machine) run(arch, nr uint32, args [6]uint64) uint32 {
	m.Helper()
	data := binary.BigEndian.AppendUint32(nil, nr)
	data = binary.BigEndian.AppendUint32(data, arch)
	data = append(data, make([]byte, 8)...) // the instruction pointer
	for _, a := range args {
		data = binary.BigEndian.AppendUint32(data, uint32(a))
		data = binary.BigEndian.AppendUint32(data, uint32(a>>32))
	}
	got, err := m.vm.Run(data)
	if err != nil {
		m.Fatal(err)
	}
	return uint32(got)
}

// check compares the answer to a call with want; 0 is allowed.
func (m machine) check(what string, nr uint32, args [6]uint64, want syscall.Errno) {
	m.Helper()
	action := uint32(unix.SECCOMP_RET_ALLOW)
	if want != 0 {
		action = unix.SECCOMP_RET_ERRNO | uint32(want)
	}
	if got := m.run(m.arch, nr, args); got != action {
		m.Errorf("%s, number %#x with %#x: %#x, want %#x", what, nr, args, got, action)
	}
}

// Each number there may be, with arguments that allow and with some that refuse, is
// answered as the table says.
func TestEveryNumber(t *testing.T) {
	const x32 = 0x40000000
	for goarch := range Arches {
		for _, level := range levels {
			t.Run(goarch+" "+string(level), func(t *testing.T) {
				m := newMachine(t, goarch, level)
				r := rand.New(rand.NewPCG(1, 2))
				for nr := range uint32(601) {
					c := seccomp.Lookup(goarch, nr)
					for range 400 {
						args := draw(r)
						m.check(c.Name, nr, args, c.Verdict.Errno(level, args))
					}
					m.check("x32", x32|nr, [6]uint64{}, syscall.ENOSYS)
				}
				for _, nr := range []uint32{1 << 10, 1 << 16, x32 - 1, 1<<31 - 1, 1 << 31, seccomp.NoCall - 1} {
					m.check("unknown", nr, [6]uint64{}, syscall.ENOSYS)
				}
				m.check("skipped by a tracer", seccomp.NoCall, [6]uint64{}, 0)
				for _, other := range []uint32{unix.AUDIT_ARCH_I386, unix.AUDIT_ARCH_ARM, unix.AUDIT_ARCH_RISCV64, m.arch ^ 1, 0} {
					if got := m.run(other, 0, [6]uint64{}); got != unix.SECCOMP_RET_KILL_PROCESS {
						t.Errorf("architecture %#x: %#x, want it killed", other, got)
					}
				}
			})
		}
	}
}

// draw returns arguments, each one that some rule may look for.
func draw(r *rand.Rand) (args [6]uint64) {
	values := []uint64{
		0, 1, 2, 3, 4, 5, 6, 8, 10, 16, 17, 38, 40, 58, 132, 136, 255, 256, 262, 0x5401, 0x5412, 0x541c, 0x401c5820,
		0x5000940e, 0x40049409, 22, 26, 51,
		0x11, 0x3d0f00, 0x10000000, 0x7e020000, 0x20000, 0x80000, 0x80001, 1 << 31, 1 << 32, 1<<32 - 1, 1<<63 | 4, ^uint64(0),
	}
	for i := range args {
		args[i] = values[r.IntN(len(values))]
		if r.IntN(4) == 0 {
			args[i] |= uint64(r.Uint32()) << 32
		}
	}
	return args
}

// TestAnswers holds the answers that matter most, by name and apart from the table.
func TestAnswers(t *testing.T) {
	const high = 1 << 32 // bits that the kernel does not look at
	perm, nosys := syscall.EPERM, syscall.ENOSYS
	family, proto, kind := syscall.EAFNOSUPPORT, syscall.EPROTONOSUPPORT, syscall.ESOCKTNOSUPPORT
	for _, c := range []struct {
		name             string
		args             []uint64
		normal, onStrict syscall.Errno
	}{
		{"read", nil, 0, 0},
		{"chroot", nil, 0, 0},
		{"openat2", nil, 0, 0},
		{"rt_sigreturn", nil, 0, 0},
		{"ptrace", nil, 0, perm},
		{"mincore", nil, 0, nosys},
		{"cachestat", nil, 0, nosys},
		{"io_setup", nil, nosys, nosys},
		{"io_submit", nil, nosys, nosys},
		{"unshare", nil, perm, perm},
		{"setns", nil, perm, perm},
		{"mount", nil, perm, perm},
		{"open_tree_attr", nil, perm, perm},
		{"statmount", nil, nosys, nosys},
		{"listmount", nil, nosys, nosys},
		{"listns", nil, nosys, nosys},
		{"file_setattr", nil, nosys, nosys},
		{"lsm_get_self_attr", nil, nosys, nosys},
		{"lsm_set_self_attr", nil, nosys, nosys},
		{"lsm_list_modules", nil, nosys, nosys},
		{"io_uring_setup", nil, nosys, nosys},
		{"bpf", nil, perm, perm},
		{"keyctl", nil, perm, perm},
		{"process_vm_readv", nil, perm, perm},
		{"clone3", nil, nosys, nosys},
		{"clone", []uint64{0x11}, 0, 0},          // fork
		{"clone", []uint64{0x3d0f00}, 0, 0},      // a thread
		{"clone", []uint64{0x80 | 0x4000}, 0, 0}, // 0x80 is no namespace here
		{"clone", []uint64{0x10000011}, perm, perm},
		{"clone", []uint64{high | 0x00020000}, perm, perm},
		{"clone", []uint64{0x7e020000}, perm, perm},
		{"socket", []uint64{1, 1, 0}, 0, 0},
		{"socket", []uint64{1, 5, 1}, 0, 0},
		{"socket", []uint64{2, 1, 6}, 0, 0},
		{"socket", []uint64{2, 2 | 0x80000, 0}, 0, 0}, // SOCK_CLOEXEC
		{"socket", []uint64{2, 2, 1}, 0, 0},           // ping
		{"socket", []uint64{10, 2, 17}, 0, 0},
		{"socket", []uint64{10, 2, 58}, 0, 0},
		{"socket", []uint64{2, 3, 255}, 0, 0}, // the kernel says EPERM
		{"socket", []uint64{2, 1, 262}, proto, proto},
		{"socket", []uint64{10, 1, 262}, proto, proto},
		{"socket", []uint64{high | 2, high | 1, high | 262}, proto, proto},
		{"socket", []uint64{2, 2, 136}, proto, proto},
		{"socket", []uint64{10, 2, 136}, proto, proto},
		{"socket", []uint64{2, 1, 132}, proto, proto},  // SCTP
		{"socket", []uint64{2, 1, 256}, proto, proto},  // SMC
		{"socket", []uint64{2, 5, 132}, kind, kind},    // SCTP
		{"socket", []uint64{2, 6, 33}, kind, kind},     // DCCP
		{"socket", []uint64{2, 10, 0x300}, kind, kind}, // SOCK_PACKET
		{"socket", []uint64{16, 3, 0}, 0, 0},
		{"socket", []uint64{16, 3, 15}, proto, proto}, // KOBJECT_UEVENT
		{"socket", []uint64{16, 3, 12}, proto, proto}, // NETFILTER
		{"socket", []uint64{0, 3, 0}, family, family},
		{"socket", []uint64{17, 3, 0}, family, family},
		{"socket", []uint64{high | 17, 3, 0}, family, family},
		{"socket", []uint64{38, 5, 0}, family, family},
		{"socket", []uint64{40, 1, 0}, family, family},
		{"socket", []uint64{1<<32 - 1, 1, 0}, family, family},
		{"socketpair", []uint64{1, 1, 0}, 0, 0},
		{"socketpair", []uint64{30, 1, 0}, family, family},
		{"ioctl", []uint64{0, 0x5401}, 0, 0}, // TCGETS
		{"ioctl", []uint64{0, 0x5412}, perm, perm},
		{"ioctl", []uint64{0, high | 0x5412}, perm, perm},
		{"ioctl", []uint64{0, 0x541c}, perm, perm},
		{"ioctl", []uint64{0, 0x401c5820}, perm, perm},
		{"ioctl", []uint64{0, 0x40049409}, 0, 0},                           // FICLONE
		{"ioctl", []uint64{0, 0x4020940d}, 0, 0},                           // FICLONERANGE
		{"ioctl", []uint64{0, 0xc0189436}, 0, 0},                           // FIDEDUPERANGE
		{"ioctl", []uint64{0, 0x9408}, syscall.ENOTTY, syscall.ENOTTY},     // BTRFS_IOC_SYNC
		{"ioctl", []uint64{0, 0x8400941f}, syscall.ENOTTY, syscall.ENOTTY}, // BTRFS_IOC_FS_INFO
		{"setsockopt", []uint64{3, 1, 26}, syscall.ENOPROTOOPT, syscall.ENOPROTOOPT},
		{"setsockopt", []uint64{3, high | 1, high | 51}, syscall.ENOPROTOOPT, syscall.ENOPROTOOPT},
		{"setsockopt", []uint64{3, 1, 8}, 0, 0}, // SO_RCVBUF
		{"setsockopt", []uint64{3, 0, 50}, 0, 0},
		{"seccomp", []uint64{1}, syscall.EINVAL, syscall.EINVAL},
		{"seccomp", []uint64{0}, 0, 0},
		{"prctl", []uint64{22, 2}, syscall.EINVAL, syscall.EINVAL},
		{"prctl", []uint64{high | 22, high | 2}, syscall.EINVAL, syscall.EINVAL},
		{"prctl", []uint64{38, 1}, 0, 0}, // PR_SET_NO_NEW_PRIVS
		{"ioctl", []uint64{0, high | 0x50009418}, syscall.ENOTTY, syscall.ENOTTY},
		{"personality", []uint64{0}, 0, perm},
		{"personality", []uint64{8}, 0, perm},
		{"personality", []uint64{0xffffffff}, 0, 0},
		{"personality", []uint64{0x0040000}, perm, perm},
		{"setrlimit", []uint64{7, 1}, 0, 0},
		{"setrlimit", []uint64{high | 4, 1}, perm, perm},
		{"prlimit64", []uint64{0, 4, 0, 1}, 0, 0}, // reads
		{"prlimit64", []uint64{0, 4, 1, 0}, perm, perm},
		{"prlimit64", []uint64{0, 4, high, 0}, perm, perm},
		{"prlimit64", []uint64{0, 7, 1, 0}, 0, 0},
	} {
		for goarch := range Arches {
			for level, want := range map[seccomp.Level]syscall.Errno{seccomp.Default: c.normal, seccomp.Strict: c.onStrict} {
				nr := numberOf(t, goarch, c.name)
				var args [6]uint64
				copy(args[:], c.args)
				newMachine(t, goarch, level).check(goarch+" "+string(level)+": "+c.name, nr, args, want)
			}
		}
	}
}

func numberOf(t *testing.T, goarch, name string) uint32 {
	t.Helper()
	for _, c := range seccomp.Table {
		if c.Name == name && c.Number(goarch) >= 0 {
			return uint32(c.Number(goarch))
		}
	}
	t.Fatalf("%s has no call %s", goarch, name)
	return 0
}
