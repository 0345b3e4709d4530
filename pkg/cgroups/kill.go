package cgroups

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// within limits ctx to the tree's patience.
func (t *Tree) within(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, t.patience, fmt.Errorf("gave up after %v", t.patience))
}

// Processes lists the processes of id, in no order. An id without cgroups has none.
func (t *Tree) Processes(id string) ([]int, error) {
	if err := t.check(id); err != nil {
		return nil, err
	}
	pids, err := pidsBelow(t.controlled(id))
	if err != nil {
		return nil, fmt.Errorf("list the processes of %s: %w", id, err)
	}
	return pids, nil
}

// Populated reports whether id has a process. Zombies do not count. An id without
// cgroups has none.
func (t *Tree) Populated(id string) (bool, error) {
	if err := t.check(id); err != nil {
		return false, err
	}
	yes, err := t.control.populated(t.controlled(id))
	if err != nil {
		return false, fmt.Errorf("check for processes of %s: %w", id, err)
	}
	return yes, nil
}

// Freeze stops every process of id and returns when all have stopped. If that takes
// longer than the patience or ctx, Freeze thaws id again. Freezing a frozen or empty id
// is success; an id without cgroups is fs.ErrNotExist.
func (t *Tree) Freeze(ctx context.Context, id string) error {
	if err := t.check(id); err != nil {
		return err
	}
	ctx, cancel := t.within(ctx)
	defer cancel()
	dir := t.controlled(id)
	err := t.control.freeze(ctx, dir)
	if err == nil {
		return nil
	}
	if gone(err) {
		return fmt.Errorf("freeze %s: %w", id, fs.ErrNotExist)
	}
	return errors.Join(fmt.Errorf("freeze %s: %w: a process waits in the kernel for a disk or a vfork", id, err),
		t.control.thaw(dir))
}

// Thaw lets the processes of id run. It does not wait until they run.
func (t *Tree) Thaw(_ context.Context, id string) error {
	if err := t.check(id); err != nil {
		return err
	}
	if err := t.control.thaw(t.controlled(id)); err != nil {
		return fmt.Errorf("thaw %s: %w", id, err)
	}
	return nil
}

// Frozen reports whether id was frozen and not thawed since.
func (t *Tree) Frozen(id string) (bool, error) {
	if err := t.check(id); err != nil {
		return false, err
	}
	yes, err := t.control.frozen(t.controlled(id))
	if err != nil {
		return false, fmt.Errorf("check whether %s is frozen: %w", id, err)
	}
	return yes, nil
}

// ErrDying is the error of Kill when every process has been killed, and the kernel has
// not ended all of them in time. They run no code of theirs any more. A process that
// closes thousands of things that are slow to close takes minutes.
var ErrDying = errors.New("killed, but the kernel has not ended them yet")

// Kill ends every process of id, frozen ones too, and returns when none is left.
// Zombies whose parent is outside do not count. It takes 0.3 ms for a handful. If the
// patience or ctx ends before the processes do, the error is ErrDying.
func (t *Tree) Kill(ctx context.Context, id string) error {
	if err := t.check(id); err != nil {
		return err
	}
	ctx, cancel := t.within(ctx)
	defer cancel()
	if err := t.thawStray(id); err != nil {
		return fmt.Errorf("kill %s: %w", id, err)
	}
	err := t.control.kill(ctx, t.controlled(id))
	if err == nil {
		err = t.killStray(ctx, id)
	}
	if err != nil {
		return fmt.Errorf("kill %s: %w; remaining processes: %s", id, err, t.who(id))
	}
	return nil
}

// thawStray thaws processes that a runtime froze in the v1 freezer before the runtime
// died. libcontainer uses that freezer on hybrid hosts; cgroup.kill would wait for
// ever.
func (t *Tree) thawStray(id string) error {
	if t.layout.v2 == nil {
		return nil
	}
	for _, h := range t.layout.all {
		for _, n := range h.names {
			if n != "freezer" {
				continue
			}
			for _, d := range []string{t.dir(h, id), t.leafIn(h, id)} {
				if err := writeFile(d+"/freezer.state", "THAWED"); err != nil && !gone(err) {
					return err
				}
			}
		}
	}
	return nil
}

// killStray kills processes that are in a v1 group of id but not in the controlled
// group. A runtime that places a pid by hand enters one hierarchy after the other, and
// may be killed half way.
func (t *Tree) killStray(ctx context.Context, id string) error {
	for _, h := range t.layout.all {
		if h.v2 {
			continue
		}
		for _, d := range []string{t.dir(h, id), t.leafIn(h, id)} {
			text, err := readFile(d + "/cgroup.procs")
			if gone(err) || err == nil && text == "" {
				continue
			}
			list, err := pids(d)
			if err != nil && !gone(err) {
				return err
			}
			for _, p := range list {
				_ = unix.Kill(p, unix.SIGKILL) // ESRCH: it has exited already
			}
			for _, p := range list {
				if err := waitExit(ctx, p); err != nil {
					return dying(ctx, err)
				}
			}
		}
	}
	return nil
}

// dying makes err, for which a wait for killed processes ended, ErrDying if the wait
// ended because time was up.
func dying(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return fmt.Errorf("%w: %w", ErrDying, err)
}

// who names the processes of id, for errors.
func (t *Tree) who(id string) string {
	list, err := pidsBelow(t.controlled(id))
	if err != nil {
		return err.Error()
	}
	names := make([]string, 0, len(list))
	for _, p := range list {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p))
		names = append(names, fmt.Sprintf("%d (%s)", p, strings.TrimSpace(string(comm))))
		if len(names) == 8 && len(list) > 8 {
			names = append(names, fmt.Sprintf("and %d more", len(list)-8))
			break
		}
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// Watch returns a channel that is closed when the last process of id is gone,
// or ctx ends; at once if there is none, or no such cgroup. With a v2 tree any
// number of watches costs one goroutine and one descriptor.
func (t *Tree) Watch(ctx context.Context, id string) (<-chan struct{}, error) {
	if err := t.check(id); err != nil {
		return nil, err
	}
	ch, err := t.control.watch(ctx, t.controlled(id))
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", id, err)
	}
	return ch, nil
}

// Remove removes every cgroup of id in every hierarchy, including those that a runtime
// made beside or below ours. If a process lives in one of them, Remove removes nothing
// and returns an error: call Kill first.
func (t *Tree) Remove(ctx context.Context, id string) error {
	populated, err := t.Populated(id)
	if err != nil {
		return err
	}
	if populated {
		return fmt.Errorf("remove cgroup of %s: %w: kill its processes first: %s", id, unix.EBUSY, t.who(id))
	}
	ctx, cancel := t.within(ctx)
	defer cancel()
	if err := t.removeAll(ctx, id); err != nil {
		return fmt.Errorf("remove cgroup of %s: %w", id, err)
	}
	return nil
}

// removeAll goes through all hierarchies, the v2 tree last: as long as the v2 group
// exists, the processes in it can be killed.
func (t *Tree) removeAll(ctx context.Context, id string) error {
	var errs []error
	for _, h := range t.layout.all {
		errs = append(errs, t.remove(ctx, t.dir(h, id)))
	}
	t.control.removed(t.controlled(id))
	return errors.Join(errs...)
}

// remove removes dir and the groups below it. It removes the two levels of ours first,
// without listing; it looks for a runtime's sub-cgroups only if they are in the way.
func (t *Tree) remove(ctx context.Context, dir string) error {
	_ = unix.Rmdir(dir + "/" + leaf)
	for {
		err := unix.Rmdir(dir)
		if err == nil || gone(err) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENOTEMPTY) {
			return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
		}
		if err := walk(dir, func(d string) error { return rmdirWait(ctx, d) }); err != nil {
			return err
		}
	}
}

// rmdirWait removes one cgroup. A group outside the v2 tree may hold a process that was
// killed and is not yet dead: rmdirWait waits for its end.
func rmdirWait(ctx context.Context, dir string) error {
	for {
		err := unix.Rmdir(dir)
		if err == nil || gone(err) {
			return nil
		}
		failed := &fs.PathError{Op: "rmdir", Path: dir, Err: err}
		if !errors.Is(err, unix.EBUSY) {
			return failed
		}
		list, err := pids(dir)
		if err != nil && !gone(err) {
			return err
		}
		if len(list) > 0 {
			err = waitExit(ctx, list[0])
		} else {
			err = pause(ctx) // its last process is no longer listed; v1 has no event for the rest
		}
		if err != nil {
			return errors.Join(failed, err)
		}
	}
}
