package health

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const (
	// firstTry is the wait before the first try, after a sandbox or a daemon starts.
	firstTry = 100 * time.Millisecond
	// eagerly is the longest wait between two tries of a starting sandbox: a client may
	// be waiting until it is ready.
	eagerly = time.Second
	// slack is how much longer than its command an agent may take.
	slack = 2 * time.Second
)

// watch probes a sandbox until ctx ends, that is, until the sandbox ends or is paused,
// or until it was recycled.
func (w *Watcher) watch(ctx context.Context, r record.Record, h Health) {
	p := r.Spec.Ready
	wait := firstTry
	for sleep(ctx, wait) {
		stood := w.m.StandsStill(r.ID)
		output, err := w.once(ctx, r)
		if ctx.Err() != nil {
			return // that says nothing about the sandbox
		}
		patient := h.State == Starting && time.Since(r.Started) < p.StartPeriod
		was := h.State
		h = next(h, p, output, err, patient || stood || w.m.StandsStill(r.ID))
		if !w.note(ctx, r, h) {
			return
		}
		if h.State != was {
			w.m.Announce(r, string(h.State), h.Output)
		}
		if h.State == Unhealthy && r.Spec.Restart.Policy != record.RestartNo {
			if err := w.m.Recycle(ctx, r, h.Output); err != nil && ctx.Err() == nil {
				w.log.Error("cannot end an unhealthy sandbox", "sandbox", r.ID, "err", err)
			}
		}
		if patient && h.State == Starting {
			wait = min(wait*3/2, eagerly, p.Interval)
		} else {
			wait = p.Interval
		}
	}
}

// next returns h after one more try. If patient is set (the sandbox is starting, or
// stands still), a failure does not count.
func next(h Health, p record.Probe, output string, err error, patient bool) Health {
	h.Output, h.Checked = output, time.Now()
	switch {
	case err == nil:
		h.State, h.Failures = Healthy, 0
		return h
	case output == "":
		h.Output = err.Error()
	default:
		h.Output = err.Error() + ": " + output
	}
	if patient {
		return h
	}
	if h.Failures++; h.Failures >= p.Retries {
		h.State = Unhealthy
	}
	return h
}

// once runs the probe of r once.
func (w *Watcher) once(ctx context.Context, r record.Record) (output string, err error) {
	p := r.Spec.Ready
	if p.Port != 0 {
		err = within(ctx, p.Timeout, func(ctx context.Context) error { return w.try.ProbePort(ctx, r, p.Port) })
	}
	if err == nil && p.Command != "" {
		err = within(ctx, p.Timeout+slack, func(ctx context.Context) (err error) {
			output, err = w.try.ProbeCommand(ctx, r, p.Command, p.Timeout)
			return err
		})
	}
	return output, err
}

func within(ctx context.Context, limit time.Duration, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := try(ctx)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("no answer within %v", limit)
	}
	return err
}

// note stores the health of r. It returns false if the watch of r has ended.
func (w *Watcher) note(ctx context.Context, r record.Record, h Health) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	d := w.wards[r.ID]
	if ctx.Err() != nil || d == nil {
		return false
	}
	d.health = h
	w.tell()
	return true
}

// sleep waits for about d, at random, so that sandboxes that began together spread out.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d - d/10 + rand.N(d/5+1))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
