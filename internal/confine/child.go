package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A Verb does a child's work: from standard input and descriptors FirstFile and
// up to standard output. Its error becomes the Failure that the parent reads.
type Verb func(args []string) error

// second follows name in the arguments of a child's second life.
const second = "-"

// MainOfTest is Main for TestMain. A test binary that links libc finds no libc in a
// child's root, so it stays in its first life: the verb runs on the one thread that has
// dropped its privileges; the other threads have not. It has neither filter nor Landlock.
func MainOfTest(verbs map[string]Verb) {
	oneLife = true
	Main(verbs)
}

var oneLife bool

// Main returns at once, unless this process is a child: then it runs one of the verbs
// and exits. It is the first statement of main. The program must be linked statically.
func Main(verbs map[string]Verb) {
	if len(os.Args) < 3 || os.Args[0] != name {
		return
	}
	err := live(verbs)
	if err == nil {
		os.Exit(0)
	}
	os.Stderr.Write(lastWords(err))
	os.Exit(1)
}

// lastWords is a line that the parent reads as a Failure. The parent keeps maxTail bytes, and
// JSON writes some bytes as six.
func lastWords(err error) []byte {
	f := Failure{Code: errs.CodeOf(err), Text: err.Error()}
	if e, ok := errors.AsType[*errs.Error](err); ok {
		f.Text = e.Error()
	}
	if len(f.Text) > maxTail/8 {
		f.Text = f.Text[:maxTail/8]
	}
	line, _ := json.Marshal(f) // a struct of two strings: cannot fail
	return append(append([]byte{'\n'}, line...), '\n')
}

func live(verbs map[string]Verb) error {
	if os.Args[1] == second {
		if err := seal(); err != nil {
			return err
		}
		do := verbs[os.Args[2]]
		if do == nil {
			return fmt.Errorf("unknown verb %q", os.Args[2])
		}
		return do(os.Args[3:])
	}
	l, err := parseLimits(os.Args[1])
	if err != nil {
		return err
	}
	err = settle(l)
	if do := verbs[os.Args[2]]; oneLife && errors.Is(err, unix.ENOENT) && do != nil {
		return do(os.Args[3:])
	}
	return err
}

// limits are what a child may use, as its first life reads them.
type limits struct {
	files  int // that it was given, beside the standard ones
	cpu    time.Duration
	data   int64 // bytes
	serves bool
}

const limitsForm = "%d files, %d s, %d bytes, serves %t"

func (l limits) String() string {
	return fmt.Sprintf(limitsForm, l.files, int64(l.cpu/time.Second), l.data, l.serves)
}

func parseLimits(s string) (l limits, err error) {
	var seconds int64
	if _, err := fmt.Sscanf(s, limitsForm, &l.files, &seconds, &l.data, &l.serves); err != nil {
		return l, fmt.Errorf("read the limits %q: %w", s, err)
	}
	l.cpu = time.Duration(seconds) * time.Second
	return l, nil
}

// resources are the limits as the kernel has them.
func (l limits) resources() map[int]uint64 {
	r := map[int]uint64{
		unix.RLIMIT_CORE: 1, // at any other value the kernel starts the core handler of the host
		unix.RLIMIT_CPU:  uint64(l.cpu / time.Second), unix.RLIMIT_DATA: uint64(l.data), unix.RLIMIT_AS: maxSpace,
		unix.RLIMIT_FSIZE: maxFile, unix.RLIMIT_NOFILE: maxFiles, unix.RLIMIT_MEMLOCK: 0,
		unix.RLIMIT_NPROC: maxTasks,
	}
	if l.serves {
		var ours unix.Rlimit
		_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &ours) // it cannot fail
		r[unix.RLIMIT_CPU], r[unix.RLIMIT_NOFILE] = unix.RLIM_INFINITY, min(maxServe, ours.Max)
	}
	return r
}

// environment: the collector gives up before the limit on data is reached. An unpacker
// runs two threads; a child that serves runs as many as there are processors, but stays
// far below maxTasks.
func (l limits) environment() []string {
	threads := 2
	if l.serves {
		threads = min(runtime.NumCPU(), maxTasks/8)
	}
	return append([]string{fmt.Sprintf("GOMEMLIMIT=%d", l.data/3*2), fmt.Sprintf("GOMAXPROCS=%d", threads)}, weak.Environ()...)
}

// settle gives this process its root and its limits, leaves it only the capabilities
// that its second life needs, and executes that.
func settle(l limits) error {
	root := FirstFile + l.files
	runtime.LockOSThread() // credentials belong to a thread
	self, err := unix.Open("/proc/self/exe", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open this program: %w", err)
	}
	// The kernel kills the daemon last for memory, and this process first.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0); err != nil {
		return fmt.Errorf("set oom_score_adj: %w", err)
	}
	unix.Umask(0o022) // not the daemon's
	if err := moveInto(root); err != nil {
		return err
	}
	if err := unix.CloseRange(uint(root), ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close_range: %w", err)
	}
	for what, max := range l.resources() {
		if err := unix.Setrlimit(what, &unix.Rlimit{Cur: max, Max: max}); err != nil {
			return fmt.Errorf("limit resource %d to %d: %w", what, max, err)
		}
	}
	if err := dropAll(); err != nil {
		return err
	}
	return again(self, "/", l, os.Args[2:])
}

// again begins the second life: it executes the program self with a verb and its
// arguments, and leaves it only the files below root and the system calls that it needs.
// Preconditions: no_new_privs is set, and this thread is locked.
func again(self int, root string, l limits, args []string) error {
	if !oneLife { // libc, and the threads beside this one, need more
		if err := lock(self, root); err != nil {
			return err
		}
		if err := refuse(l.serves); err != nil {
			return err
		}
	}
	argv, err := syscall.SlicePtrFromStrings(append([]string{name, second}, args...))
	if err != nil {
		return err
	}
	env, err := syscall.SlicePtrFromStrings(l.environment())
	if err != nil {
		return err
	}
	empty := [1]byte{}
	_, _, errno := unix.Syscall6(unix.SYS_EXECVEAT, uintptr(self), uintptr(unsafe.Pointer(&empty[0])),
		uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&env[0])), unix.AT_EMPTY_PATH, 0)
	return fmt.Errorf("execute this program again: %w", errno)
}

// moveInto makes the mount root the only mount there is. It attaches it to /proc on the
// way, because every host has that directory.
func moveInto(root int) error {
	const at = "/proc"
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.MoveMount(root, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach the root: %w", err)
	}
	// The mount is a clone of a shared one under systemd, and pivot_root(2) accepts no
	// shared mount.
	if err := unix.Mount("", at, "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the root private: %w", err)
	}
	if err := unix.Chdir(at); err != nil {
		return fmt.Errorf("enter the root: %w", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	// The old root is now on top of the new one, and is still ".".
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the host: %w", err)
	}
	return unix.Chdir("/")
}

// dropAll leaves this thread only those capabilities of FileCaps that it has, also for
// the program that it executes, and nothing that could give it others.
func dropAll() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	var keep uint32
	for _, c := range FileCaps {
		keep |= caps[0].Permitted & (1 << c)
	}
	for c := range uintptr(64) {
		if c < 32 && keep&(1<<c) != 0 {
			continue
		}
		// EINVAL: this kernel has fewer capabilities.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	caps = [2]unix.CapUserData{{Effective: keep, Permitted: keep, Inheritable: keep}}
	if err := unix.Capset(&hdr, &caps[0]); err != nil { // a capability that is not inheritable leaves the ambient set
		return fmt.Errorf("capset: %w", err)
	}
	return nil
}
