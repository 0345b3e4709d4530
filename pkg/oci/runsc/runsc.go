// Package runsc starts sandboxes on gVisor.
//
// It starts, forgets and lists, and keeps the memory of those that run (memory.go); it does
// not kill. A sandbox on gVisor is five or six
// host processes in one cgroup, and the cgroup kills them: `runsc kill` and `runsc
// delete` would each start a process to do the same worse. Three files below
// Config.Root are left then, and Forget removes them.
//
// What surprises: runsc gives its own stdin, stdout and stderr to the guest. So runsc
// writes its errors with --log, to a file in the bundle, and its stdout and stderr are
// /dev/null.
package runsc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/oci"
)

// Config says which runsc to drive, and where.
type Config struct {
	Binary string // runsc, absolute
	// Installed lists the directories of other versions that have a runsc and an agent, as that of
	// Binary: for memory that was kept by them. It may be nil.
	Installed func() []string
	Root      string                 // its state; on a tmpfs, as it is useless after a boot
	Bundle    func(id string) string // directory of a sandbox's config.json

	// StartInCgroup starts cmd in the cgroup leaf of id. All of gVisor's
	// processes stay there: it runs with --ignore-cgroups.
	StartInCgroup func(id string, cmd *exec.Cmd) error

	// Processes lists the processes in the cgroup of id, and below it.
	Processes func(id string) ([]int, error)

	Platform string // "systrap" if empty
}

// A Driver starts sandboxes on gVisor. It keeps nothing of them in memory, so any daemon can
// forget a sandbox that another one started.
type Driver struct {
	c       Config
	null    *os.File
	builds  builds
	cpuinfo string // /proc/cpuinfo, but in tests
}

// New checks c and makes its Root.
func New(c Config) (*Driver, error) {
	if c.Platform == "" {
		c.Platform = "systrap"
	}
	if _, err := exec.LookPath(c.Binary); err != nil {
		return nil, fmt.Errorf("find runsc at %s (make build puts it into build/bin): %w", c.Binary, err)
	}
	// 12 characters of id and "runsc-.sock"; with a longer path runsc puts the socket
	// elsewhere.
	if n := len(c.Root) + len("/runsc-abcdefghijkl.sock"); n >= 108 {
		return nil, fmt.Errorf("runsc root %s is %d bytes too long for a unix socket; choose a shorter run_dir", c.Root, n-107)
	}
	if err := os.MkdirAll(c.Root, 0o700); err != nil {
		return nil, fmt.Errorf("make runsc root: %w", err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	return &Driver{c: c, null: null, cpuinfo: "/proc/cpuinfo"}, nil
}

// Start returns when the init of id runs, or with runsc's error. stdin becomes PID 1's;
// Start does not close it. If ctx ends first, processes may be left in the cgroup of
// id: kill the cgroup, then call Forget.
func (d *Driver) Start(ctx context.Context, id string, stdin *os.File) error {
	_, err := d.begin(ctx, d.c.Binary, "start", id, stdin, "run")
	return err
}

// begin is Start by a command of binary, which is a runsc; what it does is for its errors. ran is whether the guest may
// have run, also after an error: not if the command itself says that it failed. One that was killed says
// nothing: the guest shares its cgroup, and may have had the kernel kill it for want of memory.
func (d *Driver) begin(ctx context.Context, binary, what, id string, stdin *os.File, command ...string) (ran bool, err error) {
	wrong := func(err error) error { return fmt.Errorf("%s %s on runsc: %w", what, id, err) }
	bundle := d.c.Bundle(id)
	log := filepath.Join(bundle, "runsc.log")
	if err := os.Remove(log); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, wrong(err)
	}
	command = append(command[:len(command):len(command)], "--detach", "--bundle="+bundle, id)
	cmd := exec.CommandContext(ctx, binary, d.args(log, command...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, d.null, d.null
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	if err := d.c.StartInCgroup(id, cmd); err != nil {
		return false, wrong(fmt.Errorf("start runsc in the cgroup: %w", err))
	}
	limitErr := restrain(cmd.Process.Pid) // its children inherit the limits
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			return true, wrong(context.Cause(ctx))
		}
		return killed(cmd), wrong(errors.New(words(log, err)))
	}
	if err := errors.Join(limitErr, d.restrainAll(id)); err != nil {
		return true, wrong(err)
	}
	return true, nil
}

// killed reports whether a command that has ended did not end by itself.
func killed(cmd *exec.Cmd) bool { return cmd.ProcessState == nil || !cmd.ProcessState.Exited() }

// restrainAll restrains all processes of id: on a busy host the first may have made
// others before it was restrained. It ends when it finds no new one.
func (d *Driver) restrainAll(id string) error {
	done := map[int]bool{}
	for {
		pids, err := d.c.Processes(id)
		if err != nil {
			return err
		}
		fresh := false
		for _, pid := range pids {
			if done[pid] {
				continue
			}
			done[pid], fresh = true, true
			if err := restrain(pid); err != nil {
				return err
			}
		}
		if !fresh {
			return nil
		}
	}
}

// restrain sets the limits of one of gVisor's processes.
func restrain(pid int) error {
	// At exactly 1 no crash of the sentry reaches the host's core_pattern helper (pkg/oci).
	core := unix.Rlimit{Cur: 1, Max: 1}
	if err := unix.Prlimit(pid, unix.RLIMIT_CORE, &core, nil); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("set RLIMIT_CORE: %w", err)
	}
	// runsc sets it for the sentry only, not for the gofer and the guest's stubs.
	err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), strconv.AppendInt(nil, oci.OOMScoreAdj, 10), 0)
	if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("set oom_score_adj: %w", err)
	}
	return nil
}

// args are the common flags of runsc, followed by one command.
func (d *Driver) args(log string, command ...string) []string {
	args := []string{
		"--root=" + d.c.Root,
		"--log=" + log,
		"--log-format=json",
		"--platform=" + d.c.Platform,
		"--network=sandbox",
		"--overlay2=none", // the upper is a directory of the host: cp, diff, limits and snapshots need no other code
		"--host-uds=none",
		"--host-fifo=none",
		"--net-raw=false",
		"--iouring=false",
		"--ignore-cgroups", // pkg/cgroups made and limited the leaf; this saves 16 ms
		"--host-settings=ignore",
		"--allow-flag-override", // by the bundle, which pkg/oci alone writes: what a level of security changes
		"--sidecar-usage-policy=LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK", // one binary, without gvisor-bin/ beside it
	}
	if weak.Off(weak.SentryFlags) {
		args = append(args, "--net-raw=true", "--iouring=true")
	}
	return append(args, command...)
}

// words returns the text that runsc logged before it failed with err.
func words(log string, err error) string {
	f, openErr := os.Open(log)
	if openErr != nil {
		return err.Error()
	}
	defer f.Close()
	var all []string
	for dec := json.NewDecoder(io.LimitReader(f, 8<<10)); ; { // JSON values, not separated by lines
		var entry struct {
			Msg string `json:"msg"`
		}
		if dec.Decode(&entry) != nil {
			break
		}
		if entry.Msg != "" {
			all = append(all, entry.Msg)
		}
	}
	if len(all) == 0 {
		return err.Error()
	}
	return strings.Join(all, "; ")
}

// Forget removes runsc's state of id, whose processes must be dead. It is no error if
// there is none.
//
// It does what `runsc delete` does after its start and its waiting, for containers
// without a cgroup, hooks and an overlay of gVisor's own
// (gvisor.dev/gvisor/runsc/container, Destroy).
func (d *Driver) Forget(_ context.Context, id string) error {
	name := id + "_sandbox:" + id
	var failed error
	// The state file goes last: as long as it exists, List names id.
	for _, f := range []string{"runsc-" + id + ".sock", name + ".lock", name + ".state"} {
		if err := os.Remove(filepath.Join(d.c.Root, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = errors.Join(failed, fmt.Errorf("remove runsc's state of %s: %w", id, err))
		}
	}
	return failed
}

// MainPID is the process ID of the sentry of id.
func (d *Driver) MainPID(id string) (pid int, err error) {
	return oci.MainPID(d.stateFile(id), "sandbox", "pid")
}

// HelperPID is the process ID of the gofer of id. When it is gone, the sentry kills the guest.
func (d *Driver) HelperPID(id string) (pid int, err error) {
	return oci.MainPID(d.stateFile(id), "goferPid")
}

// stateFile is where runsc keeps its state of id (gvisor.dev/gvisor/runsc/container, StateFile).
func (d *Driver) stateFile(id string) string {
	return filepath.Join(d.c.Root, id+"_sandbox:"+id+".state")
}

// List returns the ids with a state of runsc, including those whose start was cut
// short.
func (d *Driver) List(context.Context) ([]string, error) {
	entries, err := os.ReadDir(d.c.Root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list runsc's sandboxes: %w", err)
	}
	seen := map[string]bool{}
	var ids []string
	for _, e := range entries {
		id, _, ok := strings.Cut(e.Name(), "_sandbox:")
		if !ok {
			id, ok = strings.CutPrefix(strings.TrimSuffix(e.Name(), ".sock"), "runsc-")
		}
		if ok && !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Close removes the network namespace that all gofers of Root share, which is empty.
// Running sandboxes keep theirs; the next Start makes another.
func (d *Driver) Close() error {
	path := filepath.Join(d.c.Root, "null-netns")
	for {
		// Starts at the same time mount theirs on top of each other.
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return d.null.Close()
}
