// Package seccomp is the second filter of system calls that a sandbox on runc gets.
//
// The first one, a deny-list, comes from the runtime (pkg/oci/seccomp.go). The second is
// an allow-list by number: what it does not name is refused, also calls that are younger
// than this program. PID 1 installs it before it runs anything of the guest's, and all
// processes of a sandbox descend from PID 1.
//
// Table says what is refused, and why. The package below, compile, makes programs of it;
// they are part of this package, so that a start compiles nothing. A test compares.
//
// The kernel runs both filters, and the answer of the younger one counts if both refuse a
// call with an error. It does not run them at all for a call that both allow whatever its
// arguments are: since Linux 5.11 it keeps these in a bitmap (kernel/seccomp.c,
// seccomp_cache_check_allow). So only calls whose arguments are checked cost anything.
//
// Sources: seccomp(2), linux/seccomp.h, Documentation/userspace-api/seccomp_filter.rst.
package seccomp

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

//go:generate go test ./compile -run TestPrograms -update

// A Level says how much of the kernel a sandbox on runc may use. gVisor's sentry stands
// before the kernel at each level.
type Level string

// The levels, the weakest first.
const (
	Compat  Level = "compat"  // the first filter only
	Default Level = "default" // both
	Strict  Level = "strict"  // both; the second also refuses what few programs need: "lax" in Table
)

// ParseLevel returns the level of that name; "" is Default.
func ParseLevel(name string) (Level, error) {
	switch l := Level(name); l {
	case "":
		return Default, nil
	case Compat, Default, Strict:
		return l, nil
	}
	return "", fmt.Errorf("security level %q is none of %s, %s and %s", name, Strict, Default, Compat)
}

// Variable is the environment variable that tells PID 1 its level. Only pkg/oci sets it,
// for runc.
const Variable = "SANDBOXD_SECURITY"

// InstallAsked installs the level that Variable names, and takes Variable out of the
// environment. Without it nothing is installed: this is gVisor, or no sandbox at all.
func InstallAsked() error {
	name, ok := os.LookupEnv(Variable)
	if !ok {
		return nil
	}
	level, err := ParseLevel(name)
	if err != nil {
		return fmt.Errorf("read %s: %w", Variable, err)
	}
	if err := Install(level); err != nil {
		return err
	}
	return os.Unsetenv(Variable)
}

// Install sets the filter of level for all threads of this process and all its children,
// for ever.
//
// Preconditions: no_new_privs is set, as the runtime does.
func Install(level Level) error {
	var program []uint64 // an element is struct sock_filter
	switch level {
	case Compat:
		return nil
	case Default:
		program = defaultProgram[:]
	case Strict:
		program = strictProgram[:]
	default:
		return fmt.Errorf("install the second seccomp filter: there is no level %q", level)
	}
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: (*unix.SockFilter)(unsafe.Pointer(&program[0]))}
	// TSYNC, because Go has threads before main. SPEC_ALLOW as runc for the first filter: otherwise
	// kernels before 5.16 slow down every process with a filter (spec_store_bypass_disable).
	const flags = unix.SECCOMP_FILTER_FLAG_TSYNC | unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW
	thread, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return fmt.Errorf("install the second seccomp filter (level %s): seccomp(2): %w; does this kernel have "+
			"CONFIG_SECCOMP_FILTER?", level, errno)
	}
	if thread != 0 {
		return fmt.Errorf("install the second seccomp filter (level %s): thread %d has another one already", level, thread)
	}
	return nil
}
