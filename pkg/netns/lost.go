package netns

import (
	"context"
	"errors"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// WatchLost calls lost with the ID of every sandbox of this instance whose link is
// deleted, whoever deletes it, until ctx ends. Calls come one at a time. If the kernel
// loses events, WatchLost misses those and goes on.
func (m *Manager) WatchLost(ctx context.Context, lost func(id string)) error {
	for ctx.Err() == nil {
		updates, done := make(chan netlink.LinkUpdate, 256), make(chan struct{})
		err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
			ErrorCallback: func(error) {}, // the channel closes
		})
		if err != nil {
			return errors.Join(errors.New("watch links"), err)
		}
		m.hearLost(ctx, updates, lost)
		unsubscribe(updates, done)
	}
	return ctx.Err()
}

// hearLost returns when there are no more updates, or ctx ends.
func (m *Manager) hearLost(ctx context.Context, updates <-chan netlink.LinkUpdate, lost func(id string)) {
	for {
		select {
		case u, ok := <-updates:
			if !ok {
				return
			}
			id, ours := strings.CutPrefix(u.Attrs().Name, Link(""))
			if ours && u.Header.Type == unix.RTM_DELLINK && m.check(id) == nil {
				lost(id)
			}
		case <-ctx.Done():
			return
		}
	}
}
