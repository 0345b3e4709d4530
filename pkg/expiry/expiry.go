// Package expiry erases sandboxes at their deadline: when their timeout has passed, or
// when they ended and the time for keeping them has passed.
//
// It calls the Manager like any other caller and stores nothing itself: the deadlines
// are in the records, so they survive a restart.
//
// What surprises: time here is the wall clock, since the promise to the client
// (expiresAt) is in wall time. It runs while the host sleeps, and it can be set. A
// kernel timer that such a step cancels (timerfd_create(2), TFD_TIMER_CANCEL_ON_SET)
// wakes this package, which then checks all deadlines again.
package expiry

import (
	"container/heap"
	"context"
	"log/slog"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Manager is what expiry needs of sandbox.Manager.
type Manager interface {
	Get(ctx context.Context, idOrName string) (record.Record, error)
	List(ctx context.Context) ([]*record.Record, error)
	// Deadline is when a sandbox is to be erased; zero is never.
	Deadline(r record.Record) time.Time
	// Expire erases a sandbox if its deadline has passed, and only then.
	Expire(ctx context.Context, id string) error
	Subscribe(ctx context.Context) <-chan events.Event
}

// retry is the wait between two attempts to erase a sandbox.
const retry = 10 * time.Second

// alarm is a timer on the wall clock.
type alarm interface {
	// set makes C receive at t, or now if t has passed, or never if t is zero. C also
	// receives when the clock is set.
	set(t time.Time) error
	C() <-chan struct{}
	close()
}

// Run erases sandboxes at their deadlines until ctx ends. It returns the cause, or why
// there is no timer.
func Run(ctx context.Context, m Manager, log *slog.Logger) error {
	a, err := newWallAlarm()
	if err != nil {
		return err
	}
	defer a.close()
	return run(ctx, m, a, log)
}

func run(ctx context.Context, m Manager, a alarm, log *slog.Logger) error {
	q := newQueue()
	news := m.Subscribe(ctx) // before the list, so that no change is missed
	if err := q.fill(ctx, m); err != nil {
		return err
	}
	tried := make(chan string)
	for {
		if err := a.set(q.next()); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case e, ok := <-news:
			switch {
			case !ok: // ctx has ended
				news = nil
			case e.Type == events.Lost:
				if err := q.fill(ctx, m); err != nil {
					log.Error("cannot list sandboxes to expire them; the sweep takes over", "err", err)
				}
			default:
				q.update(ctx, m, e.ID, time.Time{})
			}
		case id := <-tried: // it may still exist: renewed, or it could not be killed
			q.update(ctx, m, id, time.Now().Add(retry))
		case <-a.C():
			for _, id := range q.due(time.Now()) {
				// A sandbox that does not die must not hold up others.
				go func() {
					if err := m.Expire(ctx, id); err != nil {
						log.Error("cannot expire a sandbox", "sandbox", id, "err", err)
					}
					select {
					case tried <- id:
					case <-ctx.Done():
					}
				}()
			}
		}
	}
}

// queue is a heap of deadlines, earliest first.
type queue struct {
	items []*item
	byID  map[string]*item
}

type item struct {
	id string
	at time.Time
	i  int // index in items
}

func newQueue() *queue { return &queue{byID: map[string]*item{}} }

// fill replaces all deadlines by those of the Manager.
func (q *queue) fill(ctx context.Context, m Manager) error {
	all, err := m.List(ctx)
	if err != nil {
		return err
	}
	*q = *newQueue()
	for _, r := range all {
		q.set(r.ID, m.Deadline(*r))
	}
	return nil
}

// update reads the deadline of one sandbox again, or uses notBefore if that is later. A
// sandbox that is gone has no deadline.
func (q *queue) update(ctx context.Context, m Manager, id string, notBefore time.Time) {
	r, err := m.Get(ctx, id)
	if err != nil {
		q.set(id, time.Time{})
		return
	}
	at := m.Deadline(r)
	if !at.IsZero() && at.Before(notBefore) {
		at = notBefore
	}
	q.set(id, at)
}

// set sets the deadline of id; zero removes it.
func (q *queue) set(id string, at time.Time) {
	at = at.Round(0) // wall clock only: drop the monotonic reading
	switch it := q.byID[id]; {
	case it == nil && at.IsZero():
	case it == nil:
		heap.Push(q, &item{id: id, at: at})
	case at.IsZero():
		heap.Remove(q, it.i)
	default:
		it.at = at
		heap.Fix(q, it.i)
	}
}

// next is the earliest deadline; zero if there is none.
func (q *queue) next() time.Time {
	if len(q.items) == 0 {
		return time.Time{}
	}
	return q.items[0].at
}

// due removes and returns the sandboxes whose deadline has come.
func (q *queue) due(now time.Time) (ids []string) {
	now = now.Round(0)
	for len(q.items) > 0 && !q.items[0].at.After(now) {
		ids = append(ids, heap.Pop(q).(*item).id)
	}
	return ids
}

// The methods that container/heap needs.

func (q *queue) Len() int           { return len(q.items) }
func (q *queue) Less(i, j int) bool { return q.items[i].at.Before(q.items[j].at) }

func (q *queue) Swap(i, j int) {
	q.items[i], q.items[j] = q.items[j], q.items[i]
	q.items[i].i, q.items[j].i = i, j
}

// Push adds x, an *item, at the end.
func (q *queue) Push(x any) {
	it := x.(*item)
	it.i = len(q.items)
	q.items = append(q.items, it)
	q.byID[it.id] = it
}

// Pop removes and returns the last item.
func (q *queue) Pop() any {
	last := len(q.items) - 1
	it := q.items[last]
	q.items[last] = nil
	q.items = q.items[:last]
	delete(q.byID, it.id)
	return it
}
