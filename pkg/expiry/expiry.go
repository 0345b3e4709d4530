// Package expiry erases sandboxes when their time has come: when their timeout
// has passed, or when they ended and were kept for long enough.
//
// It calls the Manager like anybody else and holds no truth of its own: the
// deadlines are in the records, so a restart forgets none.
//
// What surprises: time here is the wall clock, since that is what a client was
// promised (expiresAt). It runs while the host sleeps, and it can be set. A
// kernel timer that is cancelled by such a step (timerfd_create(2),
// TFD_TIMER_CANCEL_ON_SET) wakes this package, which then looks again.
package expiry

import (
	"container/heap"
	"context"
	"log/slog"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox"
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
	Subscribe(ctx context.Context) <-chan sandbox.Event
}

// retry is how long after one try the next one comes.
const retry = 10 * time.Second

// alarm is a timer on the wall clock.
type alarm interface {
	// set has C receive at t, or now if t has passed, or never if t is zero,
	// and when the clock is set.
	set(t time.Time) error
	C() <-chan struct{}
	close()
}

// Run erases what is due until ctx ends. It returns the cause, or why there is
// no timer.
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
	events := m.Subscribe(ctx) // before the list: nothing falls in between
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
		case e, ok := <-events:
			switch {
			case !ok: // ctx has ended
				events = nil
			case e.Type == sandbox.EventLost:
				if err := q.fill(ctx, m); err != nil {
					log.Error("expiry cannot list sandboxes; the sweep stands in", "err", err)
				}
			default:
				q.update(ctx, m, e.ID, time.Time{})
			}
		case id := <-tried: // it may be there still: renewed, or not to be killed
			q.update(ctx, m, id, time.Now().Add(retry))
		case <-a.C():
			for _, id := range q.due(time.Now()) {
				// One that does not die holds up no other.
				go func() {
					if err := m.Expire(ctx, id); err != nil {
						log.Error("expire", "sandbox", id, "err", err)
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
	i  int // in items
}

func newQueue() *queue { return &queue{byID: map[string]*item{}} }

// fill takes all deadlines anew.
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

// update takes the deadline of one sandbox anew, or notBefore if that is later.
// One that is gone has none.
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

// set gives id a deadline, or none if it is zero.
func (q *queue) set(id string, at time.Time) {
	at = at.Round(0) // by the wall clock, also when it was read in this process
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

// due takes out what has come to its time.
func (q *queue) due(now time.Time) (ids []string) {
	now = now.Round(0)
	for len(q.items) > 0 && !q.items[0].at.After(now) {
		ids = append(ids, heap.Pop(q).(*item).id)
	}
	return ids
}

// What container/heap asks for.

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

// Pop takes the last one out.
func (q *queue) Pop() any {
	last := len(q.items) - 1
	it := q.items[last]
	q.items[last] = nil
	q.items = q.items[:last]
	delete(q.byID, it.id)
	return it
}
