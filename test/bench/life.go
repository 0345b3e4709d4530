package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/oci"
)

// pick returns v[0] for runc, v[1] for runsc.
func pick[T any](runtime string, runc, runsc T) T {
	if runtime == oci.Runc {
		return runc
	}
	return runsc
}

// launched names the baseline of a start.
func launched(runtime string) string {
	return pick(runtime, "libcontainer in a running launcher, to the agent's first answer",
		"runsc run --detach, to the agent's first answer")
}

// coldCreate: from the request to the first byte of echo, without prepared slots, against
// the bare runtime from its start to the agent's first answer; and against the same work
// without a daemon, which shows what the daemon adds: requests, and records on disk.
func coldCreate(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		ours := func() (float64, error) { return b.firstCommand(ctx, rt) }
		theirs := func() (float64, error) {
			x, err := b.bare.prepare(ctx, rt)
			if err != nil {
				return 0, err
			}
			start := time.Now()
			err = x.start(ctx)
			took := ms(time.Since(start))
			return took, errors.Join(err, x.drop(ctx))
		}
		a, c, err := turns(b.times(pick(rt, 40, 25), pick(rt, 6, 4)), 2, ours, theirs)
		if err != nil {
			return err
		}
		b.add(row("cold_create_first_command", rt, "ms", a, launched(rt), c, goal{maxRatio: pick(rt, 1.25, 1.15)}))
		a, c, err = turns(b.times(20, 2), 1, ours, func() (float64, error) { return b.bare.firstCommand(ctx, rt) })
		if err != nil {
			return err
		}
		b.add(row("cold_create_first_command", rt, "ms", a, withoutDaemon, c, goal{maxRatio: 1.05}))
	}
	return nil
}

const withoutDaemon = "the same without a daemon: environment, start, echo"

// firstCommand is from the request to the first byte of echo.
func (b *bench) firstCommand(ctx context.Context, rt string) (float64, error) {
	start := time.Now()
	sb, timing, err := b.cl.CreateTimed(ctx, request(rt), true)
	if err != nil {
		return 0, err
	}
	created := time.Since(start)
	at, err := b.exec(ctx, sb.ID, "echo", "hello")
	if err != nil {
		return 0, err
	}
	if b.verbose {
		fmt.Fprintf(os.Stderr, "%s created %.1f first byte %.1f: %s\n", rt, ms(created), ms(at.Sub(start)), timing)
	}
	return ms(at.Sub(start)), b.drop(ctx, sb.ID)
}

// freezing: pause and resume, each from the request to the answer: then all processes stand, or go
// on, and the record says so.
func freezing(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		sb, err := b.create(ctx, rt)
		if err != nil {
			return err
		}
		var down, up []float64
		for range b.times(200, 10) {
			start := time.Now()
			if err := b.cl.Pause(ctx, sb.ID); err != nil {
				return err
			}
			mid := time.Now()
			if err := b.cl.Resume(ctx, sb.ID); err != nil {
				return err
			}
			down, up = append(down, ms(mid.Sub(start))), append(up, ms(time.Since(mid)))
		}
		b.add(row("freeze", rt, "ms", down, "", nil, goal{maxP50: 2}))
		b.add(row("resume", rt, "ms", up, "", nil, goal{maxP50: 2}))
		if err := b.drop(ctx, sb.ID); err != nil {
			return err
		}
	}
	return nil
}

// createOnce is how long a create takes until the sandbox runs. The sandbox is gone then.
func createOnce(ctx context.Context, b *bench, r wire.CreateRequest) (float64, error) {
	start := time.Now()
	sb, err := b.createOf(ctx, r)
	took := ms(time.Since(start))
	if err != nil {
		return 0, err
	}
	return took, b.drop(ctx, sb.ID)
}

// firstCommand is the same as that of bench, without a daemon.
func (b *bare) firstCommand(ctx context.Context, rt string) (float64, error) {
	start := time.Now()
	x, err := b.prepare(ctx, rt)
	if err != nil {
		return 0, err
	}
	err = x.start(ctx)
	var at time.Time
	if err == nil {
		at, err = ask(ctx, x.agent, "echo", "hello")
	}
	return ms(at.Sub(start)), errors.Join(err, x.drop(ctx))
}

// What coldPrepared measures: how many prepared slots of each runtime there are, how many
// creations come one after the other, and how long it waits between two.
const (
	preparedSlots = 2
	preparedRound = 5
	preparedGap   = 200 * time.Millisecond
)

// coldPrepared is coldCreate with prepared slots, for creations that come one after the
// other, and for some with a gap between them. Daemon and baseline take turns by rounds,
// and each waits until all slots are there: none is made during the baseline's turn.
func coldPrepared(ctx context.Context, b *bench) (err error) {
	if err := b.restart(ctx, preparedSlots); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.restart(context.WithoutCancel(ctx), 0)) }()
	for _, rt := range runtimes {
		for _, gap := range []time.Duration{0, preparedGap} {
			var a, c []float64
			round := func(into *[]float64, once func(context.Context, string) (float64, error)) error {
				if err := slotsThere(ctx, b); err != nil {
					return err
				}
				for range preparedRound {
					time.Sleep(gap)
					took, err := once(ctx, rt)
					if err != nil {
						return err
					}
					*into = append(*into, took)
				}
				return nil
			}
			for range b.times(6, 1) {
				if err := errors.Join(round(&a, b.firstCommand), round(&c, b.bare.firstCommand)); err != nil {
					return err
				}
			}
			name := "cold_create_first_command_prepared"
			if gap > 0 {
				name += "_gap"
			}
			b.add(row(name, rt, "ms", a, withoutDaemon, c, goal{maxRatio: 0.9}))
		}
	}
	return nil
}

// slotsThere waits until all prepared slots are there.
func slotsThere(ctx context.Context, b *bench) error {
	deadline := time.Now().Add(10 * time.Second)
	for {
		df, err := b.cl.System().DiskUsage(ctx)
		if err != nil || df.Prepared.Slots == 2*preparedSlots {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("after 10 s there are %d prepared slots", df.Prepared.Slots)
		}
		time.Sleep(2 * time.Millisecond) // no event tells of a slot
	}
}

// deletion: from the request to 204, against the runtimes' own deletion; and what is left
// on the host a second later.
func deletion(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		var remains []float64
		ours := func() (float64, error) {
			sb, err := b.create(ctx, rt)
			if err != nil {
				return 0, err
			}
			start := time.Now()
			err = b.cl.Delete(ctx, sb.ID)
			took := time.Since(start)
			if err != nil {
				return 0, err
			}
			time.Sleep(time.Second - took) // the goal says one second
			remains = append(remains, float64(len(left(sb.ID))))
			return ms(took), settle(sb.ID)
		}
		theirs := func() (float64, error) {
			x, err := b.bare.prepare(ctx, rt)
			if err != nil {
				return 0, err
			}
			if err := x.start(ctx); err != nil {
				return 0, errors.Join(err, x.remove(ctx))
			}
			end := pick(rt, x.kill, x.runscDelete)
			start := time.Now()
			err = end(ctx)
			took := ms(time.Since(start))
			return took, errors.Join(err, x.drop(ctx))
		}
		a, c, err := turns(b.times(20, 2), 1, ours, theirs)
		if err != nil {
			return err
		}
		name := pick(rt, "kill of the cgroup, libcontainer's state removed", "runsc delete -force")
		b.add(row("delete", rt, "ms", a, name, c, goal{maxP50: pick(rt, 5.0, 15.0)}))
		r := row("delete_left_after_1s", rt, "things", remains, "", nil, goal{})
		b.add(r)
		if percentile(remains, 100) > 0 {
			fmt.Fprintf(os.Stderr, "bench: delete on %s left up to %.0f things for more than a second\n", rt, percentile(remains, 100))
		}
	}
	return nil
}

const (
	burstSize    = 50
	burstClients = 8
)

// burst: 50 creations by 8 clients.
func burst(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		ours := func() (float64, error) {
			ids := make([]string, burstSize)
			rate, err := inParallel(burstSize, func(i int) error {
				sb, err := b.create(ctx, rt)
				ids[i] = sb.ID
				return err
			})
			return rate, errors.Join(err, b.dropAll(ctx, ids))
		}
		theirs := func() (float64, error) {
			boxes := make([]*box, burstSize)
			_, err := inParallel(burstSize, func(i int) (err error) {
				boxes[i], err = b.bare.prepare(ctx, rt)
				return err
			})
			var rate float64
			if err == nil {
				rate, err = inParallel(burstSize, func(i int) error { return boxes[i].start(ctx) })
			}
			_, removeErr := inParallel(burstSize, func(i int) error {
				if boxes[i] == nil {
					return nil
				}
				return boxes[i].remove(ctx)
			})
			return rate, errors.Join(err, removeErr)
		}
		a, c, err := turns(b.times(pick(rt, 6, 3), 1), 0, ours, theirs)
		if err != nil {
			return err
		}
		b.add(row("burst_50", rt, "creates/s", a, launched(rt)+", environments made before", c,
			goal{minRatio: pick(rt, 0.8, 0.85)}))
	}
	return nil
}

// inParallel does 0..n-1 with burstClients clients and returns how many per second.
func inParallel(n int, do func(i int) error) (rate float64, err error) {
	next := make(chan int)
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		errz []error
	)
	start := time.Now()
	for range burstClients {
		wg.Go(func() {
			for i := range next {
				if err := do(i); err != nil {
					mu.Lock()
					errz = append(errz, err)
					mu.Unlock()
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	return float64(n) / time.Since(start).Seconds(), errors.Join(errz...)
}

// dropAll deletes sandboxes, even if ctx has ended, and waits until all of them are gone.
func (b *bench) dropAll(ctx context.Context, ids []string) error {
	var errz []error
	for _, id := range ids {
		if id != "" {
			errz = append(errz, b.cl.Delete(context.WithoutCancel(ctx), id))
		}
	}
	if err := errors.Join(errz...); err != nil {
		return err // a sandbox that was not deleted stays
	}
	for _, id := range ids {
		if id != "" {
			errz = append(errz, settle(id))
		}
	}
	return errors.Join(errz...)
}
