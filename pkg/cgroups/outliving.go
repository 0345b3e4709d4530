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

// outliving is the cgroup beside the sandboxes in which processes are that outlive the
// daemon: a service manager ends what is in the daemon's own. No sandbox has such an id.
const outliving = "heads"

// Outliving is that cgroup. It has no limits.
type Outliving struct{ t *Tree }

// Outliving returns it. Add makes it.
func (t *Tree) Outliving() Outliving { return Outliving{t} }

// in are the hierarchies that it is in: those of sandboxes, and the one in which systemd
// keeps its units.
func (o Outliving) in() (dirs []string) {
	for _, h := range o.t.layout.all {
		if slices.Contains(o.t.layout.ours, h) || slices.Contains(h.names, "name=systemd") {
			dirs = append(dirs, o.t.rootDir(h)+"/"+outliving)
		}
	}
	return dirs
}

// Add moves a process there.
func (o Outliving) Add(pid int) error {
	for _, dir := range o.in() {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make a cgroup for what outlives the daemon: %w", err)
		}
		if err := writeFile(dir+"/cgroup.procs", strconv.Itoa(pid)); err != nil {
			return fmt.Errorf("move process %d out of the daemon's cgroup: %w", pid, err)
		}
	}
	return nil
}

// dir is where its processes are counted, and ended.
func (o Outliving) dir() string { return o.t.controlled(outliving) }

// Processes lists the processes there.
func (o Outliving) Processes() ([]int, error) {
	list, err := pidsBelow(o.dir())
	if err != nil {
		return nil, fmt.Errorf("list what outlives the daemon: %w", err)
	}
	return list, nil
}

// Remove ends the processes there, and removes the cgroup. The Tree may be closed.
func (o Outliving) Remove(ctx context.Context) error {
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
				return fmt.Errorf("end what outlives the daemon: %w", err)
			}
		}
	}
	var errs []error
	for _, dir := range o.in() {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove the cgroup of what outlived the daemon: %w", err))
		}
	}
	return errors.Join(errs...)
}
