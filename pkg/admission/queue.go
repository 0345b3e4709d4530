package admission

import (
	"context"
	"slices"
	"sync"
	"time"
)

type clientKey struct{}

// By returns a context that says who asks for a sandbox. Clients take turns;
// whoever comes without a name is one client.
func By(ctx context.Context, client string) context.Context {
	return context.WithValue(ctx, clientKey{}, client)
}

// Queue lets a bounded number of sandboxes be brought up at once. The others
// wait: one of each client in turn, of one client the first to come first. So
// whoever asks for a hundred holds up nobody who asks for one.
type Queue struct {
	max int

	mu      sync.Mutex
	going   int           // turns that have come and are not done; guarded by mu, as all below
	waiting int           // turns that have not come
	ring    []*line       // clients that wait; the first is served next and goes to the end
	pace    time.Duration // how long a turn takes: of each new one an eighth
}

// line is what one client waits for, first come first.
type line struct {
	client string
	turns  []*Turn
}

// Turn is the place of one sandbox among those that are brought up.
type Turn struct {
	queue *Queue
	id    string
	came  chan struct{} // closed when it has come

	// Guarded by queue.mu.
	line  *line     // nil: it does not wait
	since time.Time // when it came
	over  bool
}

// NewQueue makes a Queue in which max turns go on at once; at least one does.
func NewQueue(limit int) *Queue { return &Queue{max: max(limit, 1)} }

// Enter takes the next place for sandbox id, of the client that ctx names. The
// caller owes Done, whether or not the turn comes.
func (q *Queue) Enter(ctx context.Context, id string) *Turn {
	client, _ := ctx.Value(clientKey{}).(string)
	t := &Turn{queue: q, id: id, came: make(chan struct{})}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.going < q.max { // then nobody waits
		q.grant(t)
		return t
	}
	i := slices.IndexFunc(q.ring, func(l *line) bool { return l.client == client })
	if i < 0 {
		i = len(q.ring)
		q.ring = append(q.ring, &line{client: client})
	}
	t.line = q.ring[i]
	t.line.turns = append(t.line.turns, t)
	q.waiting++
	return t
}

// Came is closed when the turn has come.
func (t *Turn) Came() <-chan struct{} { return t.came }

// Done gives the place to the next, or gives up waiting for it. Only the first
// call does anything.
func (t *Turn) Done() {
	q := t.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case t.over:
		return
	case t.line != nil:
		q.leave(t)
	default:
		q.going--
		q.measure(time.Since(t.since))
		q.next()
	}
	t.over = true
}

// leave takes a turn that waits out of its line.
func (q *Queue) leave(t *Turn) {
	l := t.line
	l.turns = slices.DeleteFunc(l.turns, func(o *Turn) bool { return o == t })
	if len(l.turns) == 0 {
		q.ring = slices.DeleteFunc(q.ring, func(o *line) bool { return o == l })
	}
	t.line = nil
	q.waiting--
}

// next lets turns come while there is room.
func (q *Queue) next() {
	for q.going < q.max && len(q.ring) > 0 {
		l := q.ring[0]
		t := l.turns[0]
		q.ring = append(q.ring[1:], l) // leave drops it if this was its last
		q.leave(t)
		q.grant(t)
	}
}

func (q *Queue) grant(t *Turn) {
	q.going++
	t.since = time.Now()
	close(t.came)
}

func (q *Queue) measure(took time.Duration) {
	if q.pace == 0 {
		q.pace = took
		return
	}
	q.pace += (took - q.pace) / 8
}

// Positions says, of each sandbox that waits, after how many others its turn
// comes: the next one has 1, for one of those that are brought up must be done
// first. Who comes later, of a client that waits for less, may push it back.
func (q *Queue) Positions() map[string]int {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := make(map[string]int, q.waiting)
	for round := 0; len(all) < q.waiting; round++ {
		for _, l := range q.ring {
			if round < len(l.turns) {
				all[l.turns[round].id] = len(all) + 1
			}
		}
	}
	return all
}

// Len returns how many turns go on and how many wait.
func (q *Queue) Len() (going, waiting int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.going, q.waiting
}

// clears guesses how long all that there is now takes; 0 if nothing goes on.
func (q *Queue) clears() time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pace * time.Duration(q.going+q.waiting) / time.Duration(q.max)
}
