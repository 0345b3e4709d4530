package netns

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The request that ends a sandbox does not delete its link: RTM_DELLINK waits for an
// RCU grace period under the RTNL lock, 28 ms in which no other sandbox can be linked.
// The link goes when its network namespace goes. The kernel does that by itself and for
// many at once. Only a link that is still there after grace, because something else
// holds the namespace, is deleted explicitly.
const grace = 400 * time.Millisecond

// Detach cuts id off: when it returns, the link is down and the host has no route to
// it. The link itself is gone once DeleteNamespaces has unpinned its other end, at the
// latest after half a second; Gone waits for that. Absent is success.
func (m *Manager) Detach(_ context.Context, id string) error {
	if err := m.check(id); err != nil {
		return err
	}
	h, err := m.host()
	if err != nil {
		return fmt.Errorf("detach %s: %w", Link(id), err)
	}
	l, err := h.LinkByName(Link(id))
	if err == nil {
		// This removes its routes and neighbours, too.
		err = h.LinkSetDown(l)
	}
	if isGone(err) {
		return nil
	}
	if err == nil {
		err = m.reap.enlist(m, Link(id), l.Attrs().Index)
	}
	if err != nil {
		return fmt.Errorf("detach %s: %w", Link(id), err)
	}
	return nil
}

// Gone waits until the link of id is gone, or ctx ends. Until then the
// address of id must not be given to another.
func (m *Manager) Gone(ctx context.Context, id string) error {
	if err := m.check(id); err != nil {
		return err
	}
	gone, err := m.reap.watch(m, Link(id))
	if err != nil {
		return fmt.Errorf("wait until %s is deleted: %w", Link(id), err)
	}
	select {
	case <-gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait until %s is deleted: %w", Link(id), ctx.Err())
	}
}

// deleteLink deletes a link by name and waits until it is gone.
func (m *Manager) deleteLink(h *netlink.Handle, name string) error {
	l, err := h.LinkByName(name)
	if err == nil {
		err = h.LinkDel(l)
	}
	if err != nil && !isGone(err) {
		return fmt.Errorf("delete %s: %w", name, err)
	}
	return nil
}

// The reaper waits for links to go. One goroutine serves all of them; it runs while
// there are any.
type reaper struct {
	mu      sync.Mutex
	running bool
	waiting map[string]*leaving // by link name
	wake    chan struct{}       // cap 1: waiting has a new deadline
}

// leaving is a link that somebody waits for until it is gone.
type leaving struct {
	gone  chan struct{} // closed when the link is gone
	index int           // index of the link that is deleted by force at due; 0: none
	due   time.Time
}

// watch returns a channel that is closed when the link called name is gone.
func (r *reaper) watch(m *Manager, name string) (<-chan struct{}, error) {
	if err := r.enlist(m, name, 0); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.waiting[name]; l != nil {
		return l.gone, nil
	}
	gone := make(chan struct{})
	close(gone)
	return gone, nil
}

// cancel cancels a forced deletion and reports whether there was one to cancel.
func (r *reaper) cancel(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.waiting[name]
	if l == nil || l.index == 0 {
		return false
	}
	l.index = 0
	return true
}

// enlist adds the link called name to those waited for. If index is not 0, the link
// with that index is deleted after grace.
func (r *reaper) enlist(m *Manager, name string, index int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.waiting[name]
	if l == nil {
		l = &leaving{gone: make(chan struct{})}
		r.waiting[name] = l
	}
	if l.index == 0 && index != 0 {
		l.index, l.due = index, time.Now().Add(grace)
	}
	if r.running {
		select {
		case r.wake <- struct{}{}:
		default:
		}
		return nil
	}
	// Subscribe before the first look, so that no event is missed.
	updates, done := make(chan netlink.LinkUpdate, 64), make(chan struct{})
	err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
		ErrorCallback: func(error) {}, // the channel closes, and run looks again
	})
	if err != nil {
		delete(r.waiting, name)
		return fmt.Errorf("watch links: %w", err)
	}
	r.running, r.wake = true, make(chan struct{}, 1)
	r.wake <- struct{}{}
	go r.run(m, updates, done)
	return nil
}

// run ends when nobody waits any more.
func (r *reaper) run(m *Manager, updates <-chan netlink.LinkUpdate, done chan<- struct{}) {
	defer unsubscribe(updates, done)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	heard := updates
	for {
		select {
		case u, ok := <-heard:
			if !ok {
				// The kernel lost events: from here on, poll.
				heard = nil
				r.look(m)
			} else if u.Header.Type == unix.RTM_DELLINK {
				r.see(u.Attrs().Name)
			}
		case <-r.wake:
			r.look(m)
		case <-timer.C:
			r.force(m)
			r.look(m)
		}
		next, any := r.next()
		if !any {
			return
		}
		if heard == nil {
			next = min(next, 20*time.Millisecond)
		}
		timer.Reset(next)
	}
}

// unsubscribe ends a LinkSubscribe, whose sender may be blocked on its channel.
func unsubscribe(updates <-chan netlink.LinkUpdate, done chan<- struct{}) {
	close(done)
	go func() {
		for range updates {
		}
	}()
}

// see marks the link called name as gone.
func (r *reaper) see(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.waiting[name]; l != nil {
		delete(r.waiting, name)
		close(l.gone)
	}
}

// look checks every link that is waited for: it may have gone before the subscription.
func (r *reaper) look(m *Manager) {
	h, err := m.host()
	if err != nil {
		return
	}
	for _, name := range r.names() {
		if _, err := h.LinkByName(name); isGone(err) {
			r.see(name)
		}
	}
}

// force deletes the links whose grace has passed.
func (r *reaper) force(m *Manager) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE) // its own: a delete blocks the socket for 28 ms
	if err != nil {
		return // the sweep, once a minute, tries again
	}
	defer h.Close()
	for name, index := range r.overdue() {
		// By index: another link may have the name by now.
		err := h.LinkDel(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}})
		if err != nil && !isGone(err) && m.Log != nil {
			m.Log.Warn("cannot delete a link of an ended sandbox", "link", name, "err", err)
		}
	}
}

// overdue returns the links whose grace has passed, and sets their next deadline.
func (r *reaper) overdue() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	links, now := map[string]int{}, time.Now()
	for name, l := range r.waiting {
		if l.index != 0 && !now.Before(l.due) {
			links[name], l.due = l.index, now.Add(grace)
		}
	}
	return links
}

func (r *reaper) names() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.waiting))
}

// next returns the time to the earliest deadline, and whether anybody waits. If not,
// the goroutine ends.
func (r *reaper) next() (d time.Duration, any bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.waiting) == 0 {
		r.running = false
		return 0, false
	}
	d = time.Hour
	for _, l := range r.waiting {
		if l.index != 0 {
			d = min(d, max(time.Until(l.due), time.Millisecond))
		}
	}
	return d, true
}
