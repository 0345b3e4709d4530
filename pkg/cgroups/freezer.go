package cgroups

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// freezer controls groups of a host without any v2 tree, through the v1 freezer and the
// pids in it. It is slower and has no events: a watch costs a goroutine, which waits
// for the processes one after the other.
type freezer struct{}

// poll is the interval for checking a state that has no event.
const poll = time.Millisecond

func (*freezer) populated(dir string) (bool, error) {
	p, err := pidsBelow(dir)
	return len(p) > 0, err
}

func (*freezer) frozen(dir string) (bool, error) {
	s, err := readFile(dir + "/freezer.state")
	if gone(err) {
		return false, nil
	}
	return strings.TrimSpace(s) == "FROZEN", err
}

// freeze writes repeatedly, as cgroup-v1/freezer-subsystem.rst requires: a fork may
// escape one write.
func (f *freezer) freeze(ctx context.Context, dir string) error {
	for {
		if err := writeFile(dir+"/freezer.state", "FROZEN"); err != nil {
			return err
		}
		if yes, err := f.frozen(dir); yes || err != nil {
			return err
		}
		if err := pause(ctx); err != nil {
			return err
		}
	}
}

func (*freezer) thaw(dir string) error {
	if err := writeFile(dir+"/freezer.state", "THAWED"); err != nil && !gone(err) {
		return err
	}
	return nil
}

// kill freezes, so that nothing forks; kills; thaws, so that the processes die; and
// checks again. A process that waits in the kernel is not frozen in time, so a fork may
// escape one round. When time is up, only what is left of the killed ones is ErrDying.
func (f *freezer) kill(ctx context.Context, dir string) error {
	killed := map[int]bool{}
	for {
		// Killing works without freezing, only less surely.
		if err := writeFile(dir+"/freezer.state", "FROZEN"); gone(err) {
			return nil
		}
		list, err := pidsBelow(dir)
		for _, p := range list {
			_ = unix.Kill(p, unix.SIGKILL) // ESRCH: it has exited already
			killed[p] = true
		}
		err = errors.Join(err, walk(dir, f.thaw))
		if err != nil || len(list) == 0 {
			return err
		}
		for _, p := range list {
			err := waitExit(ctx, p)
			if err == nil {
				continue
			}
			left, lerr := pidsBelow(dir)
			if lerr != nil || slices.ContainsFunc(left, func(p int) bool { return !killed[p] }) {
				return errors.Join(err, lerr)
			}
			return dying(ctx, err)
		}
	}
}

func (f *freezer) watch(ctx context.Context, dir string) (<-chan struct{}, error) {
	ch := make(chan struct{})
	if list, err := pidsBelow(dir); err != nil || len(list) == 0 {
		close(ch)
		return ch, err
	}
	go func() {
		defer close(ch)
		for {
			list, err := pidsBelow(dir)
			if err != nil || len(list) == 0 || waitExit(ctx, list[0]) != nil {
				return
			}
		}
	}()
	return ch, nil
}

func (*freezer) removed(string) {}
func (*freezer) close() error   { return nil }

// pause waits where the kernel has no event.
func pause(ctx context.Context) error {
	timer := time.NewTimer(poll)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// waitExit waits until a process has ended, whoever its parent is, without blocking a
// thread. If there is no such pid, that is success.
func waitExit(ctx context.Context, pid int) error {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) { // EINVAL: a thread, not a process
		return pause(ctx)
	}
	if err != nil {
		return fmt.Errorf("open pidfd of %d: %w", pid, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close() //nolint:errcheck // read only
	defer context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Now()) })()
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait for %d: %w", pid, err)
	}
	err = raw.Read(func(fd uintptr) bool { // a pidfd is readable when its process has ended
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("wait for %d: %w", pid, err)
	}
	return nil
}
