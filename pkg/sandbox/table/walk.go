package table

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Step is how long one row took to come up or to go away.
type Step struct {
	Name string
	Took time.Duration
}

// Acquire brings all rows up, each as soon as what it stands on is up. After
// the first error, which it returns, it starts no more of them and cancels
// those that run. The steps are in the order of the table.
func Acquire(ctx context.Context, rows []Row, r *record.Record) ([]Step, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	steps := make([]Step, len(rows))
	var (
		mu    sync.Mutex
		first error
	)
	walk(rows, func(i, j int) bool { return standsOn(rows[i], rows[j]) }, func(i int) {
		if ctx.Err() != nil || !rows[i].Wants(r) {
			return
		}
		var err error
		verb, up := rows[i].bring(r)
		steps[i], err = Do(ctx, verb, rows[i], up, r)
		if err == nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if first == nil {
			first = err
			cancel(err)
		}
	})
	if first == nil && ctx.Err() != nil {
		first = context.Cause(ctx)
	}
	return done(steps), first
}

// Release takes rows away, each as soon as what stands on it is away. It does
// not stop at an error, so that one stuck mount keeps nothing else, and
// returns all of them.
func Release(ctx context.Context, rows []Row, r *record.Record) ([]Step, error) {
	steps := make([]Step, len(rows))
	errs := make([]error, len(rows))
	walk(rows, func(i, j int) bool { return standsOn(rows[j], rows[i]) }, func(i int) {
		if rows[i].Down != nil {
			steps[i], errs[i] = Do(ctx, "down:", rows[i], rows[i].Down, r)
		}
	})
	return done(steps), errors.Join(errs...)
}

// walk does every row once, at the same time as others but after those that
// it waits for.
func walk(rows []Row, waits func(i, j int) bool, do func(i int)) {
	ready := make([]chan struct{}, len(rows))
	for i := range ready {
		ready[i] = make(chan struct{})
	}
	var wg sync.WaitGroup
	for i := range rows {
		wg.Go(func() {
			defer close(ready[i])
			for j := range rows {
				if waits(i, j) {
					<-ready[j]
				}
			}
			do(i)
		})
	}
	wg.Wait()
}

func standsOn(a, b Row) bool {
	for _, name := range a.After {
		if name == b.Name {
			return true
		}
	}
	return false
}

// Do does one row: bounded, timed, with its name in the error and a
// failpoint on either side.
func Do(ctx context.Context, verb string, row Row, f func(context.Context, *record.Record) error, r *record.Record) (Step, error) {
	limit := row.Limit
	if r.Recalls() {
		limit = max(limit, row.Recall)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, ErrTooLong)
	defer cancel()
	start := time.Now()
	err := Pass(verb+row.Name, func() error { return f(ctx, r) })
	s := Step{Name: row.Name, Took: time.Since(start)}
	if err != nil {
		return s, &StepError{row.Name, errors.Join(err, context.Cause(ctx))}
	}
	return s, nil
}

// StepError carries the name of the step for what a client may read.
type StepError struct {
	Name string
	Err  error
}

func (e *StepError) Error() string { return e.Name + ": " + e.Err.Error() }
func (e *StepError) Unwrap() error { return e.Err }

// done drops the steps that were never taken.
func done(steps []Step) []Step {
	taken := steps[:0]
	for _, s := range steps {
		if s.Name != "" {
			taken = append(taken, s)
		}
	}
	return taken
}
