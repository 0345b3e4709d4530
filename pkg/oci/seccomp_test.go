package oci

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/internal/seccomp"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// errnoOf runs the rules as libcontainer and libseccomp do: the conditions of
// one rule are ANDed, any rule that matches decides. 0 is allowed.
func errnoOf(t *testing.T, name string, args ...uint64) uint {
	t.Helper()
	var full [6]uint64
	copy(full[:], args)
	var errno uint
	for _, r := range denyList("amd64").Syscalls {
		if !slices.Contains(r.Names, name) {
			continue
		}
		seen := map[uint]bool{}
		match := true
		for _, a := range r.Args {
			if seen[a.Index] {
				t.Fatalf("%s: two conditions on argument %d: libcontainer would OR them", name, a.Index)
			}
			seen[a.Index] = true
			v := full[a.Index]
			switch a.Op {
			case specs.OpMaskedEqual:
				match = match && v&a.Value == a.ValueTwo
			case specs.OpNotEqual:
				match = match && v != a.Value
			case specs.OpGreaterEqual:
				match = match && v >= a.Value
			default:
				t.Fatalf("%s: operator %s is not interpreted here", name, a.Op)
			}
		}
		if match {
			if errno != 0 && errno != *r.ErrnoRet {
				t.Errorf("%s%x: two rules with different errors", name, args)
			}
			errno = *r.ErrnoRet
		}
	}
	return errno
}

func TestSeccompArguments(t *testing.T) {
	const high = 1 << 32 // bits that the kernel does not look at
	for _, c := range []struct {
		name string
		args []uint64
		want uint
	}{
		{"read", nil, 0},
		{"chroot", nil, 0},
		{"ptrace", nil, 0},
		{"unshare", nil, ePERM},
		{"clone3", nil, eNOSYS},
		{"clone", []uint64{0x11}, 0},          // fork
		{"clone", []uint64{0x3d0f00}, 0},      // a thread
		{"clone", []uint64{0x80 | 0x4000}, 0}, // 0x80 is no namespace here
		{"clone", []uint64{0x10000011}, ePERM},
		{"clone", []uint64{0x7e020000}, ePERM},
		{"socket", []uint64{1, 1, 0}, 0},
		{"socket", []uint64{2, 1, 6}, 0},
		{"socket", []uint64{2, 1, 262}, 0}, // MPTCP
		{"socket", []uint64{2, 1, 256}, ePROTONOSUPPORT},
		{"socket", []uint64{10, 2, 17}, 0},
		{"socket", []uint64{16, 3, 0}, 0},
		{"socket", []uint64{16, 3, 15}, ePROTONOSUPPORT},
		{"socket", []uint64{16, 3, 12}, ePROTONOSUPPORT},
		{"socket", []uint64{high | 17, 3, 0}, eAFNOSUPPORT},
		{"socket", []uint64{17, 3, 0}, eAFNOSUPPORT},
		{"socket", []uint64{38, 5, 0}, eAFNOSUPPORT},
		{"socket", []uint64{40, 1, 0}, eAFNOSUPPORT},
		{"socket", []uint64{3, 1, 0}, eAFNOSUPPORT},
		{"socket", []uint64{9, 1, 0}, eAFNOSUPPORT},
		{"socket", []uint64{15, 1, 0}, eAFNOSUPPORT},
		{"socketpair", []uint64{1, 1, 0}, 0},
		{"socketpair", []uint64{30, 1, 0}, eAFNOSUPPORT},
		{"ioctl", []uint64{0, 0x5401}, 0}, // TCGETS
		{"ioctl", []uint64{0, tiocsti}, ePERM},
		{"ioctl", []uint64{0, high | tiocsti}, ePERM},
		{"ioctl", []uint64{0, fsIocFssetxattr}, ePERM},
		{"ioctl", []uint64{0, 0x40049409}, 0},             // FICLONE
		{"ioctl", []uint64{0, 0x5000940e}, eNOTTY},        // BTRFS_IOC_SUBVOL_CREATE
		{"ioctl", []uint64{0, high | 0x50009418}, eNOTTY}, // BTRFS_IOC_SUBVOL_CREATE_V2
		{"ioctl", []uint64{0, 0x50009417}, eNOTTY},        // BTRFS_IOC_SNAP_CREATE_V2
		{"ioctl", []uint64{0, 0x5000943f}, eNOTTY},        // BTRFS_IOC_SNAP_DESTROY_V2
		{"ioctl", []uint64{0, 0x9408}, eNOTTY},            // BTRFS_IOC_SYNC
		{"io_setup", []uint64{1}, eNOSYS},
		{"setsockopt", []uint64{3, 1, 26}, eNOPROTOOPT},
		{"setsockopt", []uint64{3, high | 1, high | 51}, eNOPROTOOPT},
		{"setsockopt", []uint64{3, 1, 37}, eNOPROTOOPT},
		{"setsockopt", []uint64{3, 1, 65}, eNOPROTOOPT},
		{"setsockopt", []uint64{3, 1, 8}, 0},  // SO_RCVBUF
		{"setsockopt", []uint64{3, 1, 29}, 0}, // SO_TIMESTAMP
		{"setsockopt", []uint64{3, 0, 50}, 0}, // an option of IP
		{"seccomp", []uint64{1}, 0},           // PID 1 still needs it
		{"setrlimit", []uint64{7, 1}, 0},
		{"setrlimit", []uint64{high | rlimitCore, 1}, ePERM},
		{"prlimit64", []uint64{0, rlimitCore, 0, 1}, 0}, // reads
		{"prlimit64", []uint64{0, rlimitCore, 1, 0}, ePERM},
		{"prlimit64", []uint64{0, 7, 1, 0}, 0},
	} {
		if got := errnoOf(t, c.name, c.args...); got != c.want {
			t.Errorf("%s%#x: errno %d, want %d", c.name, c.args, got, c.want)
		}
	}
}

// Of the requests of btrfs only the three remain that all file systems have.
func TestBtrfs(t *testing.T) {
	for number := range uint64(256) {
		for _, size := range []uint64{0, 0x4004, 0x4020, 0x5000, 0xc018, 0x15000} {
			request := size<<16 | 0x9400 | number
			want := uint(eNOTTY)
			if number == 0x09 || number == 0x0d || number == 0x36 {
				want = 0
			}
			if got := errnoOf(t, "ioctl", 0, request); got != want {
				t.Errorf("ioctl %#x: errno %d, want %d", request, got, want)
			}
		}
		if got := errnoOf(t, "ioctl", 0, 0x9500|number); got != 0 {
			t.Errorf("ioctl %#x of another type: errno %d", 0x9500|number, got)
		}
	}
}

func TestPersonality(t *testing.T) {
	check := func(v uint64) {
		t.Helper()
		want := uint(ePERM)
		if low := uint32(v); low == 0 || low == 8 || low == 0xffffffff {
			want = 0
		}
		if got := errnoOf(t, "personality", v); got != want {
			t.Errorf("personality(%#x): errno %d, want %d", v, got, want)
		}
	}
	for v := range uint64(300) {
		check(v)
	}
	for i := range 32 {
		check(1 << i)
		check(1<<i | 8)
		check(0xffffffff &^ (1 << i))
		check(0xffffffff << i)
		check(0xffffffff >> i)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		check(r.Uint64())
	}
}

func TestEveryArchitectureIsOne(t *testing.T) {
	for _, arch := range []string{"amd64", "arm64"} {
		if n := len(denyList(arch).Architectures); n != 1 {
			t.Errorf("%s: %d architectures; each costs milliseconds in every start and opens an ABI", arch, n)
		}
	}
}

// The second filter refuses all that the first one refuses.
func TestSecondFilterRefusesNoLess(t *testing.T) {
	rows := map[string]seccomp.Call{}
	for _, c := range seccomp.Table {
		rows[c.Name] = c
	}
	for _, r := range denyList("amd64").Syscalls {
		var args [6]uint64 // that the rule refuses
		for _, a := range r.Args {
			switch a.Op {
			case specs.OpMaskedEqual:
				args[a.Index] = a.ValueTwo
			case specs.OpNotEqual:
				args[a.Index] = a.Value + 1
			default: // OpGreaterEqual
				args[a.Index] = a.Value
			}
		}
		for _, name := range r.Names {
			c, ok := rows[name]
			if !ok && name != "umount" { // which 64-bit machines do not have
				t.Errorf("%s is no system call", name)
			}
			for _, level := range []seccomp.Level{seccomp.Default, seccomp.Strict} {
				if ok && c.Verdict.Errno(level, args) == 0 {
					t.Errorf("%s%#x: the first filter refuses it, level %s of the second does not", name, args, level)
				}
			}
		}
	}
}

// Only runc's PID 1 is told a level, and nobody else can tell it one.
func TestLevel(t *testing.T) {
	told := func(runtime string, level record.Security) (all []string) {
		c := Config{Env: []string{"A=1", seccomp.Variable + "=compat", "SANDBOXD_SECURITYX=2"}, Security: level}
		for _, kv := range NewSpec(runtime, c).Process.Env {
			if strings.HasPrefix(kv, seccomp.Variable+"=") {
				all = append(all, kv)
			}
		}
		return all
	}
	for level, want := range map[record.Security]string{"": "default", record.SecurityCompat: "compat", record.SecurityStrict: "strict"} {
		if got := told(Runc, level); !slices.Equal(got, []string{seccomp.Variable + "=" + want}) {
			t.Errorf("runc, level %q: PID 1 is told %q", level, got)
		}
		if got := told(Runsc, level); len(got) > 0 {
			t.Errorf("runsc, level %q: PID 1 is told %q", level, got)
		}
	}
	env := []string{seccomp.Variable + "=x", "A=1"}
	if NewSpec(Runc, Config{Env: env}); env[0] != seccomp.Variable+"=x" {
		t.Error("the caller's environment was changed")
	}
}
