package cgroups

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/cgroups/v3"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A door starts a new process in its cgroups. On v2 it uses CLONE_INTO_CGROUP. On v1 a
// locked thread of this process enters the cgroups first, forks there, and goes back.
type door struct {
	v1   []*hierarchy // in the order of entering
	home []int        // the tasks files of this process's own cgroups, in the same order
	own  *os.File     // a file that moves processes into this process's own cgroup
}

// newDoor opens the files for the way back.
func newDoor(lay *layout) (*door, error) {
	d := &door{}
	own, unified, err := cgroups.ParseCgroupFileUnified("/proc/self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("find own cgroups: %w", err)
	}
	for _, h := range lay.ours {
		if h.v2 {
			continue
		}
		fd, err := openRaw(h.inside(own[h.names[0]])+"/tasks", unix.O_WRONLY)
		if err != nil {
			d.close()
			return nil, fmt.Errorf("find own cgroups: %w", err)
		}
		d.v1, d.home = append(d.v1, h), append(d.home, fd)
	}
	// A host may not show this process its own cgroup. Then Rouse fails, and nothing else.
	if n := len(d.v1); n > 0 {
		d.own, _ = os.OpenFile(d.v1[n-1].inside(own[d.v1[n-1].names[0]])+"/tasks", os.O_WRONLY, 0)
	} else {
		d.own, _ = os.OpenFile(lay.v2.inside(unified)+"/cgroup.procs", os.O_WRONLY, 0)
	}
	return d, nil
}

// inside is where the mount of h shows a path of /proc/<pid>/cgroup, which is relative to
// the hierarchy; the mount may show only a part of it.
func (h *hierarchy) inside(path string) string {
	return h.mount + strings.TrimPrefix(path, strings.TrimSuffix(h.base, "/"))
}

func (d *door) close() {
	for _, fd := range d.home {
		_ = unix.Close(fd)
	}
	d.home = nil
	if d.own != nil {
		d.own.Close()
	}
}

// Rouse makes it cheap for some 10 ms to move processes by their number into cgroups, as
// libcontainer does with each sandbox: on an idle host the first move waits as long for
// RCU (see Start). Rouse waits in its place. It moves the main thread of this process to
// where it is, which changes nothing. It is done early, beside the work that comes before
// the move.
func (t *Tree) Rouse() error {
	_, err := t.door.own.WriteString(strconv.Itoa(os.Getpid()))
	return err
}

// Start starts cmd like cmd.Start, with its first instruction already inside the leaf
// of id in every hierarchy. So nothing has to be moved later, and a kill of id misses
// nothing.
//
// On v1 the thread moves itself by writing "0" to tasks. This is the only write for
// which the kernel does not stop all forks and exits of the host
// (cgroup_procs_write_start in kernel/cgroup/cgroup.c: "skip the global lock"). On an
// idle host that stop waits for RCU. Measured here (6.18, hybrid), ms p50/p90 for 4 v1
// hierarchies, on top of a fork with CLONE_INTO_CGROUP, whose cost is below the noise:
//
//	                                      back to back    200 ms apart
//	"0" to tasks of each leaf (this)      0.05 / 0.08     0.16 / 0.20
//	  and back home through held files    0.02 / 0.03     0.04 / 0.08
//	thread id to tasks                    0.05 / 0.07      6.2 / 14.2
//	child's pid to tasks after the fork   0.05 / 0.07      6.0 / 10.0
//	child's pid to cgroup.procs           0.04 / 0.06      6.1 / 10.1
//
// The thread goes back and is not discarded: the end of the thread that forked triggers
// the child's Pdeathsig, and an exiting thread would keep the leaf busy.
//
// A frozen id is refused: the child would stop before its exec, and with it every fork
// of this process. On v1 the thread counts as one task of id while it forks.
func (t *Tree) Start(id string, cmd *exec.Cmd) error {
	if err := t.check(id); err != nil {
		return err
	}
	frozen, err := t.Frozen(id)
	if err != nil {
		return err
	}
	if frozen {
		return errs.New(errs.WrongState, "start a process in sandbox %s: it is frozen; thaw it first", id)
	}
	if err := t.start(id, cmd); err != nil {
		return fmt.Errorf("start %s in cgroup of %s: %w", cmd.Path, id, err)
	}
	return nil
}

func (t *Tree) start(id string, cmd *exec.Cmd) error {
	if h := t.layout.v2; h != nil {
		fd, err := openRaw(t.leafIn(h, id), unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // a path
		if cmd.SysProcAttr == nil {
			cmd.SysProcAttr = &syscall.SysProcAttr{}
		}
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, fd
	}
	if len(t.door.v1) == 0 {
		return cmd.Start()
	}
	return onThread(func() (spoilt bool, err error) {
		var in int
		for _, h := range t.door.v1 {
			if err = writeFile(t.leafIn(h, id)+"/tasks", "0"); err != nil {
				break
			}
			in++
		}
		if err == nil {
			err = cmd.Start()
		}
		for i := in - 1; i >= 0; i-- {
			if _, werr := retry(func() (int, error) { return unix.Write(t.door.home[i], []byte("0")) }); werr != nil {
				spoilt = true
			}
		}
		return spoilt, err
	})
}

// onThread runs f on a thread of its own that is not the main one: the kernel charges a
// process's memory to the cgroup of its main thread, and the OOM killer kills the
// process whose main thread is in the group. If f reports that the thread is unusable,
// the thread ends.
func onThread(f func() (spoilt bool, err error)) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			done <- onThread(f) // this is the main thread and stays locked, so f runs on another
			runtime.UnlockOSThread()
			return
		}
		spoilt, err := f()
		if !spoilt {
			runtime.UnlockOSThread()
		} // otherwise the goroutine ends locked, and its thread ends with it
		done <- err
	}()
	return <-done
}
