package versions

import (
	"context"
	"crypto/subtle"
	"fmt"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// holdLimit is how long a request waits for the end of a trial: a trial that goes well is shorter.
const holdLimit = time.Minute

// A Hold is a trial as the daemon of the new version sees it: what it changes may be lost, and it may
// have to end. A nil Hold is one whose trial went well.
type Hold struct {
	j       *Journal
	over    chan struct{} // closed when the change is done, or is not to be
	err     error         // why the daemon must end; written before over is closed
	stopped chan struct{}
	stop    sync.Once
	limit   time.Duration // holdLimit, but in tests
}

// OnTrial returns the Hold of the version that runs; nil: it is not on trial. A trial lasts no longer
// than the program that holds the lock.
func (r Root) OnTrial(version string) (*Hold, error) {
	j, err := r.Journal()
	if err != nil || j == nil || j.Step != Trial || j.To != version {
		return nil, err
	}
	h := &Hold{j: j, over: make(chan struct{}), stopped: make(chan struct{}), limit: holdLimit}
	go func() {
		defer close(h.over)
		h.err = r.outcome(j)
	}()
	return h, nil
}

// outcome waits for the end of the trial, and returns why it is not well.
func (r Root) outcome(j *Journal) error {
	if err := r.Wait(); err != nil {
		return fmt.Errorf("wait for the end of the upgrade to %s: %w", j.To, err)
	}
	now, err := r.Journal()
	if err != nil {
		return err
	}
	if now != nil && (now.Nonce != j.Nonce || now.Step == Done) { // another change begins only after a good one
		return nil
	}
	return errs.New(errs.Unavailable, "the upgrade from %s to %s was not finished, so the service manager must start %[1]s again, which "+
		"undoes it", j.From, j.To)
}

// Over is closed when the trial has ended, one way or the other.
func (h *Hold) Over() <-chan struct{} {
	if h == nil {
		return closed
	}
	return h.over
}

// Free is closed when changes need not wait any more. It stays open if the daemon must end.
func (h *Hold) Free() <-chan struct{} {
	if h == nil || !h.j.Holds() {
		return closed
	}
	free := make(chan struct{})
	go func() {
		if <-h.over; h.err == nil {
			close(free)
		}
	}()
	return free
}

var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// Err is why the daemon must end; nil: it need not. Precondition: Over is closed.
func (h *Hold) Err() error {
	if h == nil {
		return nil
	}
	return h.err
}

// Stop refuses what waits: the daemon ends.
func (h *Hold) Stop() {
	if h != nil {
		h.stop.Do(func() { close(h.stopped) })
	}
}

// Trying reports whether nonce is that of the change and the trial lasts: the request is of the program
// that tries this version.
func (h *Hold) Trying(nonce string) bool {
	if h == nil {
		return false
	}
	select {
	case <-h.over:
		return false
	default:
		return subtle.ConstantTimeCompare([]byte(nonce), []byte(h.j.Nonce)) == 1
	}
}

// Await returns when a request may change the state. nonce is what the request says; with the nonce of
// the change it need not wait. An error says when to ask again.
func (h *Hold) Await(ctx context.Context, nonce string) error {
	if h == nil || !h.j.Holds() || h.Trying(nonce) {
		return nil
	}
	limit := time.NewTimer(h.limit)
	defer limit.Stop()
	after := time.Second
	select {
	case <-h.over:
		if h.err == nil {
			return nil
		}
	case <-h.stopped:
	case <-limit.C:
		after = 10 * time.Second
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return errs.Retry(errs.New(errs.Unavailable, "an upgrade of sandboxd from %s to %s is on trial, and what is changed meanwhile would "+
		"be lost if it were undone: try again in a moment", h.j.From, h.j.To), after)
}
