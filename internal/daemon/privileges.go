package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime/debug"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/judge"
	"github.com/sandboxd/sandboxd/pkg/egress/names"
	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
	"github.com/sandboxd/sandboxd/pkg/image/archive"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/layer"
)

// kept are the capabilities that the daemon, its helpers and the runtimes need; the
// capabilities of guests are among them, because nobody can give what he lacks. It is the
// list of systemd/sandboxd.service: under systemd the daemon never has others, and
// elsewhere it drops the rest, also for all that it starts.
var kept = []int{
	unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN, unix.CAP_NET_RAW, unix.CAP_NET_BIND_SERVICE,
	unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_DAC_READ_SEARCH, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_MKNOD, unix.CAP_SETFCAP,
	unix.CAP_SETUID, unix.CAP_SETGID, unix.CAP_SETPCAP, unix.CAP_KILL, unix.CAP_SYS_PTRACE, unix.CAP_SYS_CHROOT, unix.CAP_SYS_RESOURCE,
}

// dropPrivileges turns core dumps off, and drops the capabilities that are not kept, from all
// threads and for good.
// Afterwards neither the daemon nor a program that it executes can, among others, load
// modules, access hardware, reboot or set the clock.
func dropPrivileges() error {
	if err := noCores(); err != nil {
		return err
	}
	if weak.Off(weak.Privileges) {
		return nil
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	for c := range 64 {
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0)
		if err != nil { // this kernel has no more
			break
		}
		if has == 0 || slices.Contains(kept, c) {
			continue
		}
		if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(c), 0); errno != 0 {
			return fmt.Errorf("drop capability %d from the bounding set: %w (the daemon needs CAP_SETPCAP, and must be built without cgo, "+
				"as by `make build`)", c, errno)
		}
	}
	var mask [2]uint32
	for _, c := range kept {
		mask[c/32] |= 1 << (c % 32)
	}
	for i := range caps {
		caps[i].Permitted &= mask[i]
		caps[i].Effective &= mask[i]
		caps[i].Inheritable &= mask[i]
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&hdr)), uintptr(unsafe.Pointer(&caps[0])),
		0); errno != 0 {
		return fmt.Errorf("drop capabilities: %w", errno)
	}
	return nil
}

// noCores keeps the memory of this process, and of what it starts, out of core dumps: secrets of
// sandboxes are in it. At 1 byte, and at no other value, the kernel neither writes a file nor starts
// the program of core_pattern (core(5)). The service has the same (LimitCORE).
func noCores() error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1}); err != nil {
		return fmt.Errorf("turn core dumps off: %w", err)
	}
	return nil
}

// noNewPrivileges reports whether this process has no_new_privs, which everything that it
// starts inherits for good (prctl(2)).
func noNewPrivileges() bool {
	on, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	return err == nil && on == 1
}

// differences is oci.Differences, and what this daemon keeps of it from having an effect.
func differences(runtime string, level record.Security) []string {
	texts := oci.Differences(runtime, level)
	if runtime == oci.Runc && level == record.SecurityCompat && noNewPrivileges() {
		texts = append(texts, "not so here: this daemon has no_new_privs, which sandboxes on runc inherit (`systemctl edit sandboxd`, and "+
			"set NoNewPrivileges=no under [Service])")
	}
	return texts
}

// Confined returns the tasks for which this program starts itself again without
// privileges, to read untrusted bytes.
func Confined() map[string]confine.Verb {
	verbs := archive.Verbs()
	verbs[layer.UnpackVerb] = layer.Unpack
	verbs[heads.Verb] = heads.Serve
	verbs[names.ServeVerb] = names.Serve
	verbs[terminate.Verb] = terminate.Serve(judge.Make)
	return verbs
}

// boundHeap makes Go collect garbage before the daemon reaches the limit of memory of its cgroup, such as
// MemoryMax= of its unit, where the kernel would kill it, and before it has a fourth of the host's memory,
// also where no cgroup has a limit. By itself Go lets the heap double, from any size on. GOMEMLIMIT of the
// environment goes before.
func boundHeap(log *slog.Logger) {
	if debug.SetMemoryLimit(-1) != math.MaxInt64 {
		return
	}
	limit, err := cgroups.OwnMemoryLimit()
	total, err2 := memory("MemTotal")
	if err = errors.Join(err, err2); err != nil {
		log.Warn("cannot find out how much memory the daemon may use", "err", err)
	}
	heap := heapLimit(limit, total)
	debug.SetMemoryLimit(heap)
	if limit > 0 {
		log.Info("the memory of the daemon is limited by its cgroup", "limit", limit, "heap", heap)
	} else {
		log.Info("the memory of the daemon has no limit but that of its heap, which follows from the host's memory", "heap", heap)
	}
}

// leastHeap is a heap that no small host makes smaller: the daemon took 30 MB without a sandbox and 35 MB with 200
// (docs/benchmarks.md), which is 57 MB with 1,000 if it grows on like that, and bodies that are being decoded take
// some tens. Backups know fewer chunks there (chunks.mostChunks).
const leastHeap = 256 << 20

// heapLimit is where Go is to keep the heap, with the limit of the cgroup, if there is one, and the host's
// memory. A fourth of the limit is left for children of the daemon and for what the kernel counts
// beside the heap: 265 KB for each sandbox on runc, measured with 50 in a memory cgroup of v1.
func heapLimit(limit, total int64) int64 {
	heap := max(total/4, leastHeap)
	if limit > 0 {
		heap = min(heap, limit/4*3)
	}
	return heap
}
