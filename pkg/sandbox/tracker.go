package sandbox

import (
	"context"
	"slices"
	"sync"

	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// A tracker holds what a Manager knows in memory only: the operations that go on,
// and a handle for each sandbox that has processes or is about to have them. All of
// it is lost with the daemon; Recover makes it anew from the host and the store.
type tracker struct {
	operations sync.WaitGroup // what Close waits for

	mu      sync.Mutex
	closed  bool               // guarded by mu, as all below
	active  int                // operations
	quiet   chan struct{}      // closed when active becomes 0; nil: nobody waits for that
	handles map[string]*handle // by the sandbox's ID
}

// A handle holds the in-memory state of one life of a sandbox: from the start of
// its creation until it has ended. A sandbox that is started again has another.
type handle struct {
	id     string
	ctx    context.Context // until the sandbox has ended; for streams
	cancel context.CancelCauseFunc
	// creation ends with ctx, or when abort ends a creation that no client wants any
	// more.
	creation context.Context
	abort    context.CancelCauseFunc
	settled  chan struct{} // closed when the creation has ended, either way
	steps    []table.Step  // of the creation; written before settled is closed

	queued bool // it waits for its turn and its lock is free; guarded by tracker.mu
	// limited: a sweep has made its limits hold, and they did not change since. It is
	// guarded by tracker.mu.
	limited bool
	// unregistered: when it was adopted, the egress could not be given its policy. It is
	// guarded by tracker.mu.
	unregistered bool
	lost         []string // the rows it was found without; guarded by tracker.mu
	ends         ends     // the processes by whose ends its own is explained; guarded by tracker.mu
}

// begin notes the begin of an operation, which Close waits for. It reports false when
// none may begin any more; otherwise the caller must call end.
func (t *tracker) begin() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.operations.Add(1)
	t.active++
	return true
}

// end notes the end of an operation.
func (t *tracker) end() {
	t.mu.Lock()
	if t.active--; t.active == 0 && t.quiet != nil {
		close(t.quiet)
		t.quiet = nil
	}
	t.mu.Unlock()
	t.operations.Done()
}

// quieted returns a channel that is closed when no operation goes on.
func (t *tracker) quieted() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.active == 0 {
		return closedChan
	}
	if t.quiet == nil {
		t.quiet = make(chan struct{})
	}
	return t.quiet
}

// close lets no operation begin any more, and aborts those that only wait for their
// turn: they have no resources yet.
func (t *tracker) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	for _, h := range t.handles {
		if h.queued {
			h.abort(errClosing)
		}
	}
}

// add makes the handle of a sandbox that is about to have processes. Its contexts
// end with ctx.
func (t *tracker) add(ctx context.Context, id string) *handle {
	h := &handle{id: id, settled: make(chan struct{})}
	h.ctx, h.cancel = context.WithCancelCause(ctx)
	h.creation, h.abort = context.WithCancelCause(h.ctx)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.handles[id] = h
	return h
}

// remove forgets a sandbox that has no processes, or is about to have none, and ends
// its contexts with why.
func (t *tracker) remove(id string, why error) {
	t.mu.Lock()
	h := t.handles[id]
	delete(t.handles, id)
	t.mu.Unlock()
	if h != nil {
		h.cancel(why)
	}
}

// get returns the handle of a sandbox, or nil.
func (t *tracker) get(id string) *handle {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.handles[id]
}

// setQueued notes whether a sandbox waits for its turn.
func (t *tracker) setQueued(h *handle, queued bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h.queued = queued
	if queued && t.closed { // close has passed already
		h.abort(errClosing)
	}
}

// queued reports whether a sandbox waits for its turn: then its lock is free, and yet
// it is not dead.
func (t *tracker) queued(id string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.handles[id]
	return h != nil && h.queued
}

// setLimited notes whether the limits of a sandbox are known to hold.
func (t *tracker) setLimited(id string, yes bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.handles[id]; h != nil {
		h.limited = yes
	}
}

// limited reports whether the limits of a sandbox are known to hold.
func (t *tracker) limited(id string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.handles[id]
	return h != nil && h.limited
}

// setUnregistered notes whether the egress still has to be given the policy of a sandbox.
func (t *tracker) setUnregistered(id string, yes bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.handles[id]; h != nil {
		h.unregistered = yes
	}
}

// unregistered reports whether the egress still has to be given the policy of a sandbox.
func (t *tracker) unregistered(id string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.handles[id]
	return h != nil && h.unregistered
}

// setEnds notes the processes by whose ends that of a sandbox is explained.
func (t *tracker) setEnds(h *handle, e ends) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h.ends = e
}

func (t *tracker) ends(h *handle) ends {
	t.mu.Lock()
	defer t.mu.Unlock()
	return h.ends
}

// setLost notes that a sandbox was found without a row, and reports whether that is
// news.
func (t *tracker) setLost(id, row string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.handles[id]
	if h == nil || slices.Contains(h.lost, row) {
		return h == nil
	}
	h.lost = append(h.lost, row)
	return true
}

// setFound undoes setLost.
func (t *tracker) setFound(id, row string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.handles[id]; h != nil {
		h.lost = slices.DeleteFunc(h.lost, func(s string) bool { return s == row })
	}
}
