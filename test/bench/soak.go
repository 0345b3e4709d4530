package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const soakClients = 4

// A tally is what the clients of a soak have measured, in the order of its ends, in ms.
type tally struct {
	mu    sync.Mutex
	lives []float64    // of the daemon: create, command, delete
	steps [3][]float64 // of the latest tenth
	bare  [2][]float64 // lives without a daemon, in the first and in the last tenth
}

// soak: 4 clients create, run one command and delete. The last tenth of their lives must
// be as fast as the first, both as multiples of bare ones that the same clients lead in
// turns with them, and the daemon no larger.
func soak(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		n := b.times(pick(rt, 2000, 1000), 40)
		tenth := n / 10
		var t tally
		var after size // after the first tenth, when the daemon has everything that it keeps
		err := soakBy(n, func(i int) error {
			if err := b.soakLife(ctx, rt, &t, tenth); err != nil {
				return err
			}
			if i == tenth {
				after = b.size(ctx)
			}
			if i >= tenth && i < n-tenth {
				return nil
			}
			took, err := b.bare.life(ctx, rt)
			t.mu.Lock()
			defer t.mu.Unlock()
			at := &t.bare[i/(n-tenth)]
			*at = append(*at, took)
			return err
		})
		if err != nil {
			return err
		}
		time.Sleep(2 * time.Second) // deletion frees some things in the background
		end := b.size(ctx)
		first, last := t.lives[:tenth], t.lives[n-tenth:]
		b.add(row("soak", rt, "× bare", multiples(last, t.bare[1]), fmt.Sprintf("first %d of %d", tenth, n), multiples(first, t.bare[0]),
			goal{maxRatio: 1.05}))
		b.add(row("soak_life", rt, "ms", last, "bare, in the same minutes", t.bare[1], goal{}))
		for _, v := range []struct {
			name, unit string
			was, is    float64
			slack      float64
		}{
			{"soak_rss", "MB", after.rss, end.rss, 1.15},
			{"soak_fds", "fds", after.fds, end.fds, 1},
			{"soak_goroutines", "goroutines", after.goroutines, end.goroutines, 1},
			{"soak_db", "MB", after.db, end.db, 1},
		} {
			b.add(row(v.name, rt, v.unit, []float64{v.is}, fmt.Sprintf("after %d, under load", tenth), []float64{v.was},
				goal{maxRatio: v.slack}))
		}
	}
	return nil
}

// soakLife is one life of a sandbox of the daemon.
func (b *bench) soakLife(ctx context.Context, rt string, t *tally, tenth int) error {
	start := time.Now()
	sb, err := b.create(ctx, rt)
	if err != nil {
		return err
	}
	created := time.Now()
	_, execErr := b.exec(ctx, sb.ID, "true")
	ran := time.Now()
	err = errors.Join(execErr, b.cl.Delete(context.WithoutCancel(ctx), sb.ID))
	ended := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lives = append(t.lives, ms(ended.Sub(start)))
	for i, d := range []time.Duration{created.Sub(start), ran.Sub(created), ended.Sub(ran)} {
		t.steps[i] = append(t.steps[i], ms(d))
	}
	if b.verbose && len(t.lives)%tenth == 0 {
		fmt.Fprintf(os.Stderr, "%s %d: create %.1f, command %.1f, delete %.1f\n", rt, len(t.lives),
			percentile(t.steps[0], 50), percentile(t.steps[1], 50), percentile(t.steps[2], 50))
		clear(t.steps[:])
	}
	return err
}

// life is a life without a daemon: environment, start, one command, and removal.
func (b *bare) life(ctx context.Context, rt string) (float64, error) {
	start := time.Now()
	x, err := b.prepare(ctx, rt)
	if err != nil {
		return 0, err
	}
	if err = x.start(ctx); err == nil {
		_, err = ask(ctx, x.agent, "true")
	}
	err = errors.Join(err, x.remove(ctx))
	return ms(time.Since(start)), err
}

// multiples divides times by the median of others.
func multiples(times, others []float64) []float64 {
	unit := percentile(others, 50)
	out := make([]float64, len(times))
	for i, v := range times {
		out[i] = v / unit
	}
	return out
}

// soakBy has the clients do rounds 0 to n-1, and ends with the first error of each.
func soakBy(n int, round func(i int) error) error {
	var wg sync.WaitGroup
	var next atomic.Int64
	errz := make([]error, soakClients)
	for c := range soakClients {
		wg.Go(func() {
			for errz[c] == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				errz[c] = round(i)
			}
		})
	}
	wg.Wait()
	return errors.Join(errz...)
}

// size is how large the daemon is.
type size struct{ rss, fds, goroutines, db float64 }

func (b *bench) size(ctx context.Context) (s size) {
	s.rss = float64(processKB(b.pid, "status", "VmRSS:")) * 1024 / 1e6
	fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", b.pid))
	s.fds = float64(len(fds))
	// Without it the row is 0, which the reader sees.
	_ = b.get(ctx, filepath.Join(inst.RunDir(), "admin.sock"), "/metrics", func(line string) {
		if v, ok := strings.CutPrefix(line, "go_goroutines "); ok {
			s.goroutines, _ = strconv.ParseFloat(v, 64)
		}
	})
	if fi, err := os.Stat(filepath.Join(inst.StateDir(), "sandboxd.db")); err == nil {
		s.db = float64(fi.Size()) / 1e6
	}
	return s
}
