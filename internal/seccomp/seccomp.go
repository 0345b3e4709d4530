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
	"bytes"
	"errors"
	"fmt"
	"iter"
	"os"
	"strconv"
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
// environment, also as /proc/PID/environ shows it. Without it nothing is installed: this
// is gVisor, or no sandbox at all.
func InstallAsked() error {
	name, ok := os.LookupEnv(Variable)
	if !ok {
		return nil
	}
	level, err := ParseLevel(name)
	if err != nil {
		return fmt.Errorf("read %s: %w", Variable, err)
	}
	if err := erase(Variable + "=" + name); err != nil {
		return fmt.Errorf("remove %s from what /proc shows of this process: %w", Variable, err)
	}
	if err := Install(level); err != nil {
		return err
	}
	return os.Unsetenv(Variable)
}

// erase writes zeros over a variable of the environment with which this process began.
// Go has a copy of it: os.Unsetenv does not reach what proc_pid_environ(5) shows.
func erase(variable string) error {
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return err
	}
	f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:]) // proc_pid_stat(5); the third field is the first
	if len(f) < 49 {
		return fmt.Errorf("/proc/self/stat has %d fields after the name, and not 49 or more: %q", len(f), stat)
	}
	start, serr := strconv.ParseInt(string(f[47]), 10, 64) // env_start
	end, eerr := strconv.ParseInt(string(f[48]), 10, 64)   // env_end
	if err := errors.Join(serr, eerr); err != nil {
		return fmt.Errorf("find the environment in /proc/self/stat: %w", err)
	}
	memory, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer memory.Close()
	env := make([]byte, max(end-start, 0))
	if _, err := memory.ReadAt(env, start); err != nil {
		return fmt.Errorf("read the environment: %w", err)
	}
	for at, kv := range entries(env) {
		if string(kv) != variable {
			continue
		}
		if _, err := memory.WriteAt(make([]byte, len(kv)), start+int64(at)); err != nil {
			return fmt.Errorf("write zeros over the variable: %w", err)
		}
	}
	return nil
}

// entries are the strings of env, which end with a zero each, by where they begin.
func entries(env []byte) iter.Seq2[int, []byte] {
	return func(yield func(int, []byte) bool) {
		at := 0
		for kv := range bytes.SplitSeq(env, []byte{0}) {
			if !yield(at, kv) {
				return
			}
			at += len(kv) + 1
		}
	}
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
