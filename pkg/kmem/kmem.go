// Package kmem watches memory of the kernel that guests take and that no cgroup is charged with. Messages
// that nobody reads are one kind: of netlink and ICMP, errors of UDP, and on v1 all of TCP and UDP. Locks on
// files are the other one.
//
// On runc a guest fills half a gigabyte a second with messages and 20 MiB with locks, however small its
// memory limit is. The kernel has no limit for that, so a sandbox that holds more than Limit or Locks is
// ended, with that reason.
//
// To look at a sandbox costs 20 µs or more, so not all are looked at each time. Each tick reads one
// number, the memory that the host has left. All sandboxes are looked at when that fell by Step
// since the last look, and every Often in any case. Sockets and locks are looked at by loops of their own: a
// guest can make the look at locks slow, and must not make the one at sockets late by that.
//
// What surprises: guests that use their own memory make that number fall, too. So on a busy host
// the looks are many, and Share bounds what part of the time each of the two takes.
package kmem

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const (
	// Limit is what the sockets of one sandbox may hold: 150 of them full, at the size that a kernel
	// gives them (net.core.rmem_default). A program that reads its messages holds next to nothing.
	Limit = 32 << 20
	// Counted is what v1 may count of TCP and UDP, beside the memory limit: twice from when on the kernel keeps
	// them short (pkg/cgroups).
	Counted = 128 << 20
	// Step is by how much the memory of the host falls before all are looked at.
	Step = 64 << 20
	// Often is the longest time between two looks.
	Often = 5 * time.Second
	// Share is how many times as long as a look the time until the next one is.
	Share = 10

	tick = 100 * time.Millisecond
)

// A Watch ends sandboxes that hold too much.
type Watch struct {
	Sandboxes func(ctx context.Context) ([]*record.Record, error)
	// Held is what those of ids hold that hold more than least.
	Held func(ids []string, least int64) (map[string]netns.Held, error)
	// Counts is what cgroup v1 counts of TCP and UDP of a sandbox beside its memory; 0 on v2.
	Counts func(id string) (int64, error)
	// Processes lists the processes of a sandbox.
	Processes func(id string) ([]int, error)
	// Available is the memory that the host has left, in bytes.
	Available func() (int64, error)
	// End ends a sandbox, if the life is not over that was has. text says why.
	End func(ctx context.Context, was record.Record, text string) error
	// Watched reports whether the sockets and locks of a sandbox are the host's kernel's.
	Watched func(r *record.Record) bool
	Log     *slog.Logger

	unseen bool // the last look at locks has found some that no sandbox shows
	ends   sync.WaitGroup
	mu     sync.Mutex
	ending map[string]bool // sandboxes that are being ended; guarded by mu
}

// A finder adds to over those of ids that hold too much, with the reason.
type finder func(ids []string, over map[string]string) error

// Run looks until ctx ends.
func (w *Watch) Run(ctx context.Context) {
	var loops sync.WaitGroup
	loops.Go(func() { w.every(ctx, w.sockets) })
	loops.Go(func() { w.every(ctx, w.locks) })
	loops.Wait()
	w.ends.Wait()
}

// every looks each time that it is due, until ctx ends.
func (w *Watch) every(ctx context.Context, find finder) {
	ticks := time.NewTicker(tick)
	defer ticks.Stop()
	base, looked, took, failed := int64(0), time.Time{}, time.Duration(0), ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		left, err := w.Available()
		base = max(base, left)
		due := err != nil || base-left >= Step || time.Since(looked) >= Often
		if !due || time.Since(looked) < Share*took {
			continue
		}
		start := time.Now()
		failed = w.complain(ctx, w.look(ctx, find), failed)
		base, looked, took = left, time.Now(), time.Since(start)
	}
}

// look looks at all sandboxes once, and begins to end those that hold too much. It does not wait for their ends:
// a guest can make its own slow, and the others are watched all the same.
func (w *Watch) look(ctx context.Context, find finder) error {
	all, err := w.Sandboxes(ctx)
	if err != nil {
		return fmt.Errorf("look at what sandboxes hold in the kernel: %w", err)
	}
	live := map[string]*record.Record{}
	ids := make([]string, 0, len(all))
	for _, r := range all {
		if (r.State == record.Running || r.State == record.Paused) && w.Watched(r) {
			live[r.ID], ids = r, append(ids, r.ID)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	over := map[string]string{}
	err = find(ids, over)
	for id, text := range over {
		w.end(ctx, *live[id], text)
	}
	return err
}

// locks is the finder of locks on files.
func (w *Watch) locks(ids []string, over map[string]string) error {
	unseen, err := lockBounds.look(ids, w.Processes, over)
	if unseen && !w.unseen {
		w.Log.Warn(fmt.Sprintf("this host has more than %d locks on parts of files, and no sandbox on runc shows that it holds so many: "+
			"programs of the host hold them, or a guest hides locks of open file descriptions, which the security level strict refuses",
			Locks))
	}
	w.unseen = unseen
	return err
}

// sockets is the finder of messages in sockets.
func (w *Watch) sockets(ids []string, over map[string]string) error {
	held, err := w.Held(ids, Limit)
	for id, h := range held {
		over[id] = fmt.Sprintf("its sockets held %s of the kernel's memory in messages that it did not read (most of them %s), which its "+
			"memory limit does not count; %s are allowed: read what is received, or open fewer sockets", record.Mebibytes(h.Bytes), h.Most,
			record.Mebibytes(Limit))
	}
	failed := []error{err}
	for _, id := range ids {
		n, err := w.Counts(id)
		if failed = append(failed, err); n > Counted {
			over[id] = fmt.Sprintf("its TCP and UDP sockets held %s of the kernel's memory, which its memory limit does not count on a "+
				"host with cgroup v1; %s are allowed: read what is received, or open fewer connections", record.Mebibytes(n),
				record.Mebibytes(Counted))
		}
	}
	return errors.Join(failed...)
}

// end ends a sandbox, unless that is under way. It is tried again after Often.
func (w *Watch) end(ctx context.Context, was record.Record, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ending[was.ID] {
		return
	}
	if w.ending == nil {
		w.ending = map[string]bool{}
	}
	w.ending[was.ID] = true
	w.ends.Go(func() {
		if err := w.End(ctx, was, text); err != nil && ctx.Err() == nil {
			w.Log.Error("cannot end a sandbox that holds too much memory of the kernel; it is tried again", "sandbox", was.ID,
				"err", err)
			again := time.NewTimer(Often)
			defer again.Stop()
			select {
			case <-ctx.Done():
			case <-again.C:
			}
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.ending, was.ID)
	})
}

// complain logs an error, unless it is the one that was logged before, and returns its text.
func (w *Watch) complain(ctx context.Context, err error, before string) string {
	if err == nil {
		return ""
	}
	if err.Error() != before && ctx.Err() == nil {
		w.Log.Error("cannot watch what sandboxes hold in the kernel; it is tried again", "err", err)
	}
	return err.Error()
}
