package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A change is one caller's part of a transaction.
type change struct {
	// do checks first and writes after: when it returns a refusal, it has
	// written nothing.
	do func(*bbolt.Tx) error
	// then runs under db.mu once the change is durable.
	then func()
	err  error
	done chan struct{}
}

// refusal is an error of a change that left the transaction as it was.
type refusal struct{ error }

func (r refusal) Unwrap() error { return r.error }

// maxGroup bounds a transaction, so that its first caller does not wait for
// ever under load.
const maxGroup = 64

// commit makes a change durable. Once it is in the queue, ctx counts no more:
// an error then means that the change was not made, never that one does not know.
func (db *DB) commit(ctx context.Context, do func(*bbolt.Tx) error, then func()) error {
	c := &change{do: do, then: then, done: make(chan struct{})}
	select {
	case db.queue <- c:
	case <-db.closed:
		return errs.New(errs.Unavailable, "sandboxd is shutting down")
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	<-c.done
	return db.explain(c.err)
}

// commitLoop is the only writer. While it syncs one transaction, callers queue
// up for the next: nobody waits for a timer, and eight callers share a sync.
func (db *DB) commitLoop() {
	defer close(db.done)
	for {
		var group []*change
		select {
		case c := <-db.queue:
			group = append(group, c)
		case <-db.closed:
			return
		}
	more:
		for len(group) < maxGroup {
			select {
			case c := <-db.queue:
				group = append(group, c)
			default:
				break more
			}
		}
		db.running.Lock()
		db.run(group)
		db.running.Unlock()
		for _, c := range group {
			close(c.done)
		}
	}
}

// settle waits until memory has what the file has.
func (db *DB) settle() {
	db.running.Lock()
	defer db.running.Unlock()
}

// run commits a group in one transaction. If that fails, each change gets a
// transaction of its own, so that none fails by the fault of another.
func (db *DB) run(group []*change) {
	err := db.update(func(tx *bbolt.Tx) error {
		for _, c := range group {
			if c.err = c.do(tx); c.err != nil && !errors.As(c.err, new(refusal)) {
				return c.err
			}
		}
		return nil
	})
	if err != nil && len(group) > 1 {
		for _, c := range group {
			db.run([]*change{c})
		}
		return
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	for _, c := range group {
		if c.err == nil {
			c.err = err
		}
		if c.err == nil && c.then != nil {
			c.then()
		}
	}
}

// update is bbolt's, which panics on what it finds impossible.
func (db *DB) update(f func(*bbolt.Tx) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = damaged(db.path, fmt.Errorf("%v", p))
		}
	}()
	return db.bolt.Update(f)
}

// explain gives an error of a commit the code and the words of a client. bbolt
// does not wrap all of its causes, hence the look at the text.
func (db *DB) explain(err error) error {
	var r refusal
	switch {
	case err == nil:
		return nil
	case errors.As(err, &r):
		return r.error
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), strings.Contains(err.Error(), syscall.ENOSPC.Error()):
		return errs.Wrap(fmt.Errorf("write %s: %w", db.path, err), errs.Unavailable,
			"no space is left in the state directory of sandboxd: nothing was changed and nothing is lost; free some space there and try again")
	}
	return fmt.Errorf("write %s: %w", db.path, err)
}
