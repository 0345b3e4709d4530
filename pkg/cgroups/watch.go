package cgroups

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A watcher waits for changes of cgroup.events of any number of groups. It uses one
// inotify descriptor and one goroutine that sleeps in Go's poller: no thread, and no
// descriptor or goroutine for each group.
type watcher struct {
	file *os.File
	fd   int // of file; file.Fd would make it blocking

	mu    sync.Mutex
	byWD  map[int32]*subject
	byDir map[string]*subject
	done  bool
}

// A subject is a group that somebody waits for.
type subject struct {
	dir   string
	wd    int32
	waits map[*wait]bool
}

// A wait ends, and closes its channel, when met returns true, the group is gone, or the
// context ends.
type wait struct {
	met  func(events) bool
	ch   chan struct{}
	stop func() bool // stops waiting for the context
}

var errClosed = errors.New("watch cgroups: closed")

func newWatcher() (*watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch cgroups: inotify: %w: raise fs.inotify.max_user_instances", err)
	}
	w := &watcher{fd: fd, file: os.NewFile(uintptr(fd), "inotify"), byWD: map[int32]*subject{}, byDir: map[string]*subject{}}
	go w.run()
	return w, nil
}

// run ends when close closes the descriptor.
func (w *watcher) run() {
	buf := make([]byte, 64<<10)
	for {
		n, err := w.file.Read(buf)
		if err != nil {
			return
		}
		for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
			ev := (*unix.InotifyEvent)(unsafe.Pointer(&b[0]))
			b = b[unix.SizeofInotifyEvent+int(ev.Len):]
			w.changed(ev.Wd, ev.Mask&unix.IN_Q_OVERFLOW != 0)
		}
	}
}

// changed checks the group behind wd, or all groups if events were lost.
func (w *watcher) changed(wd int32, all bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.byWD[wd]; s != nil {
		w.look(s)
	}
	if all {
		for _, s := range w.byWD {
			w.look(s)
		}
	}
}

// look ends the waits of s that are over. If cgroup.events cannot be read, the waits go
// on until their context or the next event ends them.
func (w *watcher) look(s *subject) {
	e, err := readEvents(s.dir)
	if err != nil {
		return
	}
	for x := range s.waits {
		if e.gone || x.met(e) {
			w.end(s, x)
		}
	}
}

// end closes the channel of x, and removes s when nobody waits for it.
func (w *watcher) end(s *subject, x *wait) {
	if !s.waits[x] {
		return
	}
	delete(s.waits, x)
	x.stop()
	close(x.ch)
	if len(s.waits) == 0 {
		delete(w.byWD, s.wd)
		delete(w.byDir, s.dir)
		if !w.done {
			// EINVAL: the kernel removed the watch with its file.
			_, _ = unix.InotifyRmWatch(w.fd, uint32(s.wd))
		}
	}
}

// wait returns a channel that is closed when met holds for cgroup.events of dir, dir is
// gone or ctx ends.
func (w *watcher) wait(ctx context.Context, dir string, met func(events) bool) (<-chan struct{}, error) {
	x := &wait{met: met, ch: make(chan struct{})}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done {
		return nil, errClosed
	}
	// Most kills are over before anybody waits.
	if e, err := readEvents(dir); err != nil {
		return nil, err
	} else if e.gone || met(e) || ctx.Err() != nil {
		close(x.ch)
		return x.ch, nil
	}
	s := w.byDir[dir]
	if s == nil {
		wd, err := unix.InotifyAddWatch(w.fd, dir+"/cgroup.events", unix.IN_MODIFY)
		if gone(err) {
			close(x.ch)
			return x.ch, nil
		}
		if err != nil {
			return nil, fmt.Errorf("watch %s: %w (ENOSPC: raise fs.inotify.max_user_watches)", dir, err)
		}
		s = &subject{dir: dir, wd: int32(wd), waits: map[*wait]bool{}}
		w.byWD[s.wd], w.byDir[dir] = s, s
	}
	s.waits[x] = true
	x.stop = context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.end(s, x)
	})
	w.look(s) // for changes before the watch was set
	return x.ch, nil
}

// removed ends all waits for dir: inotify sends no event when a cgroup is removed.
func (w *watcher) removed(dir string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.byDir[dir]; s != nil {
		for x := range s.waits {
			w.end(s, x)
		}
	}
}

// close ends every wait.
func (w *watcher) close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = true
	for _, s := range w.byDir {
		for x := range s.waits {
			w.end(s, x)
		}
	}
	return w.file.Close()
}
