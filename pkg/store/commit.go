package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A change is one caller's part of a transaction.
type change struct {
	// do checks first and writes after: when it returns a refusal, it has written
	// nothing.
	do func(*bbolt.Tx) error
	// then runs under committer.mu once the change is durable.
	then func()
	err  error
	done chan struct{}
}

// refusal is an error of a change that left the transaction as it was.
type refusal struct{ error }

func (r refusal) Unwrap() error { return r.error }

// A committer writes changes to the file, in the order in which they come.
type committer struct {
	bolt *bbolt.DB
	path string

	queue  chan *change // to the loop
	closed chan struct{}
	done   chan struct{} // the loop has ended
	once   sync.Once

	running sync.Mutex   // held from the start of a transaction until memory has the same
	mu      sync.RWMutex // guards the copy of the file in memory
}

// maxGroup bounds a transaction, so that its first caller does not wait for ever under
// load.
const maxGroup = 64

// commit makes a change durable. Once the change is in the queue, commit ignores ctx:
// an error then means that the change was not made, never that its result is unknown.
func (w *committer) commit(ctx context.Context, do func(*bbolt.Tx) error, then func()) error {
	c := &change{do: do, then: then, done: make(chan struct{})}
	select {
	case w.queue <- c:
	case <-w.closed:
		return errs.New(errs.Unavailable, "sandboxd is shutting down")
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	<-c.done
	return w.explain(c.err)
}

// loop is the only writer. While it syncs one transaction, callers queue up for the
// next: no caller waits for a timer, and eight callers share a sync.
func (w *committer) loop() {
	defer close(w.done)
	for {
		var group []*change
		select {
		case c := <-w.queue:
			group = append(group, c)
		case <-w.closed:
			return
		}
	more:
		for len(group) < maxGroup {
			select {
			case c := <-w.queue:
				group = append(group, c)
			default:
				break more
			}
		}
		w.running.Lock()
		w.run(group)
		w.running.Unlock()
		for _, c := range group {
			close(c.done)
		}
	}
}

// settle waits until memory has the same as the file.
func (w *committer) settle() {
	w.running.Lock()
	defer w.running.Unlock()
}

// run commits a group in one transaction. If that fails, each change gets a transaction
// of its own, so that no change fails because of another.
func (w *committer) run(group []*change) {
	err := w.update(func(tx *bbolt.Tx) error {
		for _, c := range group {
			if c.err = c.do(tx); c.err != nil && !errors.As(c.err, new(refusal)) {
				return c.err
			}
		}
		return nil
	})
	if err != nil && len(group) > 1 {
		for _, c := range group {
			w.run([]*change{c})
		}
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range group {
		if c.err == nil {
			c.err = err
		}
		if c.err == nil && c.then != nil {
			c.then()
		}
	}
}

// update is bbolt's Update, which panics on a damaged file.
func (w *committer) update(f func(*bbolt.Tx) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = damaged(w.path, fmt.Errorf("%v", p))
		}
	}()
	return w.bolt.Update(f)
}

// explain gives an error of a commit a code and a text for clients. bbolt does not wrap
// all of its causes, so explain compares their text.
func (w *committer) explain(err error) error {
	var r refusal
	switch {
	case err == nil:
		return nil
	case errors.As(err, &r):
		return r.error
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), strings.Contains(err.Error(), syscall.ENOSPC.Error()):
		return errs.Wrap(fmt.Errorf("write %s: %w", w.path, err), errs.Unavailable,
			"no space is left in the state directory of sandboxd: nothing was changed and nothing is lost; free some space there and "+
				"try again")
	case errors.Is(err, syscall.EROFS), errors.Is(err, syscall.EIO):
		return errs.Wrap(fmt.Errorf("write %s: %w", w.path, err), errs.Unavailable,
			"the disk of the state directory of sandboxd takes no writes (%s): nothing was changed; check the disk, which dmesg tells of, "+
				"and reboot the host to have it checked and mounted again", cause(err))
	}
	return fmt.Errorf("write %s: %w", w.path, err)
}

// cause is the error of the system call in err, without a path.
func cause(err error) string {
	if no, ok := errors.AsType[syscall.Errno](err); ok {
		return no.Error()
	}
	return "I/O error"
}
