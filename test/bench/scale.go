package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/test/bench/downtime"
)

// restart: how long the API is unavailable when the daemon is restarted with 100 running
// sandboxes, half on each runtime, whose output is followed in every other one; whether all of them
// answer afterwards, and what they lost.
func restart(ctx context.Context, b *bench) error {
	each := b.times(50, 5)
	ids, err := b.crowd(ctx, oci.Runc, each)
	if err == nil {
		var more []string
		more, err = b.crowd(ctx, oci.Runsc, each)
		ids = append(ids, more...)
	}
	var crowd *downtime.Crowd
	if err == nil {
		crowd, err = downtime.Write(ctx, b.cl, ids, each)
	}
	var away, starts, reached []float64
	for range b.times(5, 1) {
		if err != nil {
			break
		}
		var w *downtime.Watch
		if w, err = downtime.Ask(ctx, filepath.Join(inst.RunDir(), "sandboxd.sock")); err != nil {
			break
		}
		err = b.end()
		began := time.Now()
		if err == nil {
			err = b.start(ctx)
		}
		if err == nil {
			_, err = b.cl.List(ctx, client.Filter{})
		}
		starts = append(starts, ms(time.Since(began)))
		gap, _, _ := w.Longest()
		away = append(away, ms(gap))
		n := 0.0
		for _, id := range ids {
			if _, execErr := b.exec(ctx, id, "true"); execErr == nil {
				n++
			}
		}
		reached = append(reached, n)
	}
	var lost downtime.Loss
	if err == nil {
		lost, err = crowd.End(ctx)
	}
	if err := errors.Join(err, b.dropAll(ctx, ids)); err != nil {
		return err
	}
	b.add(row("restart_100", "-", "ms", starts, "", nil, goal{maxP50: 500}))
	b.add(row("restart_100_away", "-", "ms", away, "", nil, goal{maxP50: 1000}))
	b.add(row("restart_100_reachable", "-", "sandboxes", reached, "", nil, goal{minP50: float64(2 * each)}))
	b.add(row("restart_100_lost", "-", "bytes", []float64{float64(lost.Bytes + lost.Unread)}, "", nil, goal{none: true}))
	return nil
}

// scale: how long a listing, a creation and a sweep take with 1000 idle sandboxes on runc,
// and with 500 on runsc, against 10.
func scale(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		n := b.times(pick(rt, 1000, 500), 20)
		var few, all latencies
		ids, err := b.crowd(ctx, rt, 10)
		if err == nil {
			few, err = b.latencies(ctx, rt, 10)
		}
		if err == nil {
			var more []string
			more, err = b.crowd(ctx, rt, n-10)
			ids = append(ids, more...)
		}
		if err == nil {
			all, err = b.latencies(ctx, rt, n)
		}
		rss := float64(processKB(b.pid, "status", "VmRSS:")) * 1024 / 1e6
		if err := errors.Join(err, b.dropAll(ctx, ids)); err != nil {
			return err
		}
		name := fmt.Sprintf("sandboxes_%d", n)
		b.add(row(name+"_list", rt, "ms", all.list, "the same beside 10", few.list, goal{}))
		b.add(row(name+"_page", rt, "ms", all.page, "the same beside 10", few.page, goal{maxRatio: 2}))
		b.add(row(name+"_create", rt, "ms", all.create, "the same beside 10", few.create, goal{maxRatio: 2}))
		b.add(row(name+"_create_swept", rt, "ms", all.swept, "the same without a sweep at the same time", all.create,
			goal{maxRatio: 1.2}))
		b.add(row(name+"_sweep", rt, "ms", all.sweep, "the same beside 10", few.sweep, goal{maxP50: pick(rt, 100.0, 0)}))
		b.add(row(name+"_rss", rt, "MB", []float64{rss}, "", nil, goal{maxP50: 150}))
	}
	return nil
}

// latencies are times in ms.
type latencies struct{ list, page, create, swept, sweep []float64 }

// latencies measures a daemon that has n sandboxes. A full listing has n items; a page,
// which is what clients ask for, has 10 for every n.
func (b *bench) latencies(ctx context.Context, rt string, n int) (l latencies, err error) {
	for range b.times(50, 5) {
		start := time.Now()
		all, err := b.cl.List(ctx, client.Filter{})
		if err == nil && len(all) != n {
			err = fmt.Errorf("listed %d sandboxes of %d", len(all), n)
		}
		if err != nil {
			return l, err
		}
		l.list = append(l.list, ms(time.Since(start)))
		start = time.Now()
		if err := b.get(ctx, filepath.Join(inst.RunDir(), "sandboxd.sock"), "/sandboxes?pageSize=10", func(string) {}); err != nil {
			return l, err
		}
		l.page = append(l.page, ms(time.Since(start)))
	}
	plain := func() (float64, error) { return createOnce(ctx, b, request(rt)) }
	swept := func() (float64, error) { // asked for together with a sweep
		ended := make(chan error, 1)
		go func() { _, err := b.sweep(ctx); ended <- err }()
		took, err := plain()
		return took, errors.Join(err, <-ended)
	}
	if l.create, l.swept, err = turns(b.times(20, 3), 1, plain, swept); err != nil {
		return l, err
	}
	for range b.times(20, 3) {
		took, err := b.sweep(ctx)
		if err != nil {
			return l, err
		}
		l.sweep = append(l.sweep, took)
	}
	return l, nil
}

// sweep asks for a sweep and returns how long it took, in ms, from the daemon's own
// metrics.
func (b *bench) sweep(ctx context.Context) (float64, error) {
	sum, count, err := b.sweeps(ctx)
	if err != nil {
		return 0, err
	}
	if err := onSocket(ctx, http.MethodPost, filepath.Join(inst.RunDir(), "admin.sock"), "/sweep", nil); err != nil {
		return 0, err
	}
	s, n, err := b.sweeps(ctx)
	return (s - sum) / (n - count) * 1e3, err
}

func (b *bench) sweeps(ctx context.Context) (sum, count float64, err error) {
	err = b.get(ctx, filepath.Join(inst.RunDir(), "admin.sock"), "/metrics", func(line string) {
		for name, into := range map[string]*float64{"sandboxd_sweep_seconds_sum": &sum, "sandboxd_sweep_seconds_count": &count} {
			if v, ok := strings.CutPrefix(line, name+" "); ok {
				*into, _ = strconv.ParseFloat(v, 64)
			}
		}
	})
	return sum, count, err
}

// get reads an answer from a Unix socket, line by line.
func (b *bench) get(ctx context.Context, socket, path string, each func(line string)) error {
	return onSocket(ctx, http.MethodGet, socket, path, each)
}

// onSocket makes a request without a body on a Unix socket.
func onSocket(ctx context.Context, method, socket, path string, each func(line string)) error {
	c := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://sandboxd"+path, nil)
	if err != nil {
		return err
	}
	res, err := c.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s: %s", method, path, res.Status)
	}
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		each(lines.Text())
	}
	return lines.Err()
}

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
		// The pool of the bare lives is new, and its first writes are slow.
		err := soakBy(tenth, func(int) error { _, err := b.bare.life(ctx, rt); return err })
		if err != nil {
			return err
		}
		err = soakBy(n, func(i int) error {
			if err := t.life(ctx, b, rt, tenth); err != nil {
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
		if b.verbose {
			fmt.Fprintf(os.Stderr, "%s: lives %.1f, then %.1f; bare %.1f, then %.1f\n", rt, percentile(first, 50), percentile(last, 50),
				percentile(t.bare[0], 50), percentile(t.bare[1], 50))
		}
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

// life is one life of a sandbox of the daemon.
func (t *tally) life(ctx context.Context, b *bench, rt string, tenth int) error {
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
