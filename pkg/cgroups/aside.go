package cgroups

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// The cgroups beside those of sandboxes. No sandbox has such an id.
const (
	outliving  = "heads"
	inspecting = "inspect"
)

// An Aside is a cgroup beside those of sandboxes, with processes of the daemon.
type Aside struct {
	t          *Tree
	name, what string
	limits     Limits
	secret     bool // nothing of it goes to swap
}

// Outliving is for processes that outlive the daemon: a service manager ends what is in the
// daemon's own cgroup. It has no limits.
func (t *Tree) Outliving() Aside {
	return Aside{t: t, name: outliving, what: "what outlives the daemon"}
}

// Inspecting is for the children that decrypt for sandboxes. Together they use at most memory
// bytes, and of processors that are short as much as one sandbox. They have secrets, so nothing of
// them goes to swap.
func (t *Tree) Inspecting(memory int64) Aside {
	return Aside{t, inspecting, "what decrypts for sandboxes", Limits{MemoryBytes: memory, CPUShares: 1024}, true}
}

// in are the hierarchies that it is in: those of sandboxes, and the one in which systemd
// keeps its units.
func (o Aside) in() (dirs []string) {
	for _, h := range o.t.layout.all {
		if slices.Contains(o.t.layout.ours, h) || slices.Contains(h.names, "name=systemd") {
			dirs = append(dirs, o.t.rootDir(h)+"/"+o.name)
		}
	}
	return dirs
}

// Add moves a process there. It makes the cgroup.
func (o Aside) Add(pid int) error {
	made := false
	for _, dir := range o.in() {
		err := os.Mkdir(dir, 0o755)
		if errors.Is(err, fs.ErrNotExist) {
			err = os.MkdirAll(dir, 0o755)
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make a cgroup for %s: %w", o.what, err)
		}
		made = made || err == nil
	}
	if made && o.limits != (Limits{}) {
		for _, c := range []string{"memory", "cpu"} {
			if err := o.t.write(c, o.t.rootDir(o.t.layout.of[c])+"/"+o.name, o.limits); err != nil {
				return fmt.Errorf("limit %s: %w", o.what, err)
			}
		}
	}
	// On v2 each limit of memory forbids swap. On v1 it is one of memory with swap, and the kernel
	// may choose which.
	if memory := o.t.layout.of["memory"]; made && o.secret && !memory.v2 {
		if err := writeFile(o.t.rootDir(memory)+"/"+o.name+"/memory.swappiness", "0"); err != nil {
			return fmt.Errorf("keep %s out of swap: %w", o.what, err)
		}
	}
	for _, dir := range o.in() {
		if err := writeFile(dir+"/cgroup.procs", strconv.Itoa(pid)); err != nil {
			return fmt.Errorf("move process %d out of the daemon's cgroup: %w", pid, err)
		}
	}
	return nil
}

// dir is where its processes are counted, and ended.
func (o Aside) dir() string { return o.t.controlled(o.name) }

// Processes lists the processes there.
func (o Aside) Processes() ([]int, error) {
	list, err := pidsBelow(o.dir())
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", o.what, err)
	}
	return list, nil
}

// Remove ends the processes there, and removes the cgroup. The Tree may be closed.
func (o Aside) Remove(ctx context.Context) error {
	ctx, cancel := o.t.within(ctx)
	defer cancel()
	for {
		list, err := o.Processes()
		if err != nil {
			return err
		}
		if len(list) == 0 {
			break
		}
		for _, pid := range list {
			_ = unix.Kill(pid, unix.SIGKILL) // ESRCH: it has exited already
			if err := waitExit(ctx, pid); err != nil {
				return fmt.Errorf("end %s: %w", o.what, err)
			}
		}
	}
	var errs []error
	for _, dir := range o.in() {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove the cgroup of %s: %w", o.what, err))
		}
	}
	return errors.Join(errs...)
}
