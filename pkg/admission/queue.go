package admission

import (
	"context"
	"slices"
	"sync"
	"time"
)

type clientKey struct{}

// By returns a context that names the client that asks for a sandbox. Clients take
// turns; all clients without a name count as one.
func By(ctx context.Context, client string) context.Context {
	return context.WithValue(ctx, clientKey{}, client)
}

// Queue bounds how many sandboxes are brought up at once. The others wait. Clients are
// served in turn, one sandbox each; the sandboxes of one client in order of arrival. So
// a client that asks for a hundred does not hold up a client that asks for one.
type Queue struct {
	max int

	mu      sync.Mutex
	going   int           // turns that have begun and are not done; guarded by mu, as all below
	waiting int           // turns that have not begun
	ring    []*line       // clients that wait; the first is served next and goes to the end
	pace    time.Duration // average time of a turn; each new turn weighs an eighth
}

// line is the waiting turns of one client, in order of arrival.
type line struct {
	client string
	turns  []*Turn
}

// Turn is the place of one sandbox in the queue.
type Turn struct {
	queue *Queue
	id    string
	came  chan struct{} // closed when the turn begins

	// Guarded by queue.mu.
	line  *line     // nil: the turn does not wait
	since time.Time // when the turn began
	over  bool
}

// NewQueue makes a Queue with max turns at once, at least one.
func NewQueue(limit int) *Queue { return &Queue{max: max(limit, 1)} }

// Enter takes the next place for sandbox id, for the client named in ctx. The caller
// must call Done, whether or not the turn comes.
func (q *Queue) Enter(ctx context.Context, id string) *Turn {
	client, _ := ctx.Value(clientKey{}).(string)
	t := &Turn{queue: q, id: id, came: make(chan struct{})}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.going < q.max { // then no turn waits
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

// Came returns a channel that is closed when the turn begins.
func (t *Turn) Came() <-chan struct{} { return t.came }

// Done ends the turn, so that the next can begin, or gives up waiting. Only the first
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

// leave removes a waiting turn from its line.
func (q *Queue) leave(t *Turn) {
	l := t.line
	l.turns = slices.DeleteFunc(l.turns, func(o *Turn) bool { return o == t })
	if len(l.turns) == 0 {
		q.ring = slices.DeleteFunc(q.ring, func(o *line) bool { return o == l })
	}
	t.line = nil
	q.waiting--
}

// next begins waiting turns while there is room.
func (q *Queue) next() {
	for q.going < q.max && len(q.ring) > 0 {
		l := q.ring[0]
		t := l.turns[0]
		q.ring = append(q.ring[1:], l) // leave removes l if this was its last turn
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

// Positions returns the position of each waiting sandbox. The next one has position 1,
// because one that is coming up must be done first. A later sandbox of a client with
// fewer waiting sandboxes may push others back.
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

// Len returns how many turns have begun and how many wait.
func (q *Queue) Len() (going, waiting int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.going, q.waiting
}

// clears estimates how long all current turns take; 0 if there are none.
func (q *Queue) clears() time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pace * time.Duration(q.going+q.waiting) / time.Duration(q.max)
}
