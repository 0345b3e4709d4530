package cgroups

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// unified controls groups through the v2 tree. The kernel reports each change of
// "populated" and "frozen" in cgroup.events by an inotify event, but no second one
// within 10 ms of the last (CGROUP_FILE_NOTIFY_MIN_INTV). So a caller that waits for an
// expected change first uses linger and bridge.
type unified struct{ *watcher }

func newUnified() (*unified, error) {
	w, err := newWatcher()
	if err != nil {
		return nil, err
	}
	return &unified{w}, nil
}

// events is the content of cgroup.events; gone: there is no such cgroup.
type events struct{ populated, frozen, gone bool }

func (e events) empty() bool    { return !e.populated }
func (e events) isFrozen() bool { return e.frozen }

func readEvents(dir string) (events, error) {
	text, err := readFile(dir + "/cgroup.events")
	if gone(err) {
		return events{gone: true}, nil
	}
	if err != nil {
		return events{}, err
	}
	populated, ok1 := field(text, "populated")
	frozen, ok2 := field(text, "frozen")
	if !ok1 || !ok2 {
		return events{}, fmt.Errorf("read %s/cgroup.events: %q has not both populated and frozen", dir, text)
	}
	return events{populated: populated == 1, frozen: frozen == 1}, nil
}

func (*unified) populated(dir string) (bool, error) {
	e, err := readEvents(dir)
	return e.populated, err
}

// frozen reports whether dir is set to frozen and all processes in it have stopped. The
// event alone lags behind a thaw.
func (*unified) frozen(dir string) (bool, error) {
	e, err := readEvents(dir)
	if err != nil || !e.frozen {
		return false, err
	}
	asked, err := readFile(dir + "/cgroup.freeze")
	if gone(err) {
		return false, nil
	}
	return strings.TrimSpace(asked) == "1", err
}

func (u *unified) freeze(ctx context.Context, dir string) error {
	if err := writeFile(dir+"/cgroup.freeze", "1"); err != nil {
		return err
	}
	linger(dir, events.isFrozen)
	if err := u.await(ctx, dir, events.isFrozen); err != nil {
		return err
	}
	if e, err := readEvents(dir); err != nil || e.gone {
		return errors.Join(err, fs.ErrNotExist)
	}
	return nil
}

func (*unified) thaw(dir string) error {
	if err := writeFile(dir+"/cgroup.freeze", "0"); err != nil && !gone(err) {
		return err
	}
	return nil
}

// kill sends SIGKILL to all processes of dir, frozen or not, and to their forks
// meanwhile (cgroup-v2.rst, "cgroup.kill").
func (u *unified) kill(ctx context.Context, dir string) error {
	list, _ := pids(dir + "/" + leaf) // an incomplete list is enough, see bridge
	err := writeFile(dir+"/cgroup.kill", "1")
	if gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	bridge(list, dir)
	if err := u.await(ctx, dir, events.empty); err != nil {
		return dying(ctx, err)
	}
	return nil
}

// bridge waits for the end of dying processes by their pidfds, at most as long as the
// kernel may hold back an event. Without it a kill shortly after a start, a freeze or a
// thaw takes 10 ms, with it 0.3.
func bridge(list []int, dir string) {
	const silence = 10 // ms
	end := time.Now().Add(silence * time.Millisecond)
	for _, p := range list[:min(len(list), 64)] {
		fd, err := unix.PidfdOpen(p, 0)
		if err != nil {
			continue // dead
		}
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, max(0, int(time.Until(end).Milliseconds())))
		_ = unix.Close(fd)
	}
	// A process counts as dead a few µs before the kernel removes it from the group's
	// count.
	linger(dir, events.empty)
}

// linger polls for about 0.2 ms for a change that takes a few µs, before the caller
// waits for an event that the kernel may hold back.
func linger(dir string, met func(events) bool) {
	for range 64 {
		if e, err := readEvents(dir); err != nil || e.gone || met(e) {
			return
		}
		runtime.Gosched()
	}
}

func (u *unified) watch(ctx context.Context, dir string) (<-chan struct{}, error) {
	return u.wait(ctx, dir, events.empty)
}

// await calls wait and blocks until it ends. It returns why ctx ended, or that the
// watcher was closed.
func (u *unified) await(ctx context.Context, dir string, met func(events) bool) error {
	ch, err := u.wait(ctx, dir, met)
	if err != nil {
		return err
	}
	<-ch
	// Both may have happened: then await succeeds.
	if e, err := readEvents(dir); err == nil && (e.gone || met(e)) {
		return nil
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return errClosed
}
