//go:build all

package year

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

var (
	days = flag.Int("days", 4*cycle, "how many to simulate")
	doc  = flag.String("doc", "", "document whose table the run replaces")
	seed = flag.Uint64("seed", 1, "of the moments of kill -9")
)

// Odd days. The clock goes back by an hour in the middle of a day, and forth again; and once in a
// while a day is a week.
const (
	hourBack = 7
	weekLong = 31
)

// TestYear simulates days, and fails unless disk, memory, descriptors and what the host holds are flat.
func TestYear(t *testing.T) {
	hosttest.Root(t)
	if *days < 2*cycle {
		t.Fatalf("-days %d: want at least %d, to fit a line", *days, 2*cycle)
	}
	t.Logf("seed %d", *seed)
	c := newClock(t, "/run/sandboxd-year."+daemontest.Instance.String())
	t.Cleanup(func() { os.Remove(c.file) })
	versions := build(t, c)
	newOutside(t)
	front := newRegistry(t)
	registries := []string{
		"[[registries]]", fmt.Sprintf("prefix = %q", front.Addr), fmt.Sprintf("ca = %q", front.File),
	}
	var boxes []*box
	for i, b := range []*box{{name: "restarted", hands: true}, {name: "untouched"}} {
		b.clock, b.versions, b.registry = c, versions, front.Addr
		b.random = rand.New(rand.NewPCG(*seed, uint64(i)))
		o := daemontest.Options{Instance: daemontest.Instance, PoolSize: "2Gi", Config: registries}
		if i == 1 {
			o.Instance = daemontest.Other
		}
		boxes = append(boxes, newBox(t, o, b))
		if err := b.begin(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	rows := make([][]row, len(boxes))
	for day := 1; day <= *days; day++ {
		midnight(c, day)
		front.Forget()
		errs := make([]error, len(boxes))
		var wg sync.WaitGroup
		for i, b := range boxes {
			wg.Go(func() {
				r, err := b.day(t.Context(), day)
				errs[i] = err
				rows[i] = append(rows[i], r)
			})
		}
		jump(t.Context(), c, day)
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatalf("day %d: %v", day, err)
		}
		t.Logf("day %d, %s: %s", day, time.Since(began).Round(time.Second/10), brief(rows))
	}
	for i, b := range boxes {
		b.flat(t, rows[i])
	}
	if *doc != "" && !t.Failed() {
		document(t, *doc, boxes, rows, time.Since(began))
	}
}

// midnight begins a day.
func midnight(c *clock, day int) {
	if day%weekLong == 0 {
		c.step(7 * 24 * time.Hour)
		return
	}
	c.step(24 * time.Hour)
}

// jump sets the clock in the middle of some days.
func jump(ctx context.Context, c *clock, day int) {
	if day%hourBack != 0 {
		return
	}
	for _, d := range []time.Duration{-time.Hour, time.Hour} {
		select {
		case <-time.After(400 * time.Millisecond): // the middle of a day
		case <-ctx.Done():
		}
		c.step(d)
	}
}

// day is a day of a box: yesterday's sandboxes are gone; load, with a kill -9; a backup; an upgrade;
// and all is as it must be.
func (b *box) day(ctx context.Context, day int) (row, error) {
	dawn := b.clock.now().Add(-2 * time.Hour) // the clock may go back
	if err := eventually(ctx, func() error { return b.list(ctx, b.survivors(day)) }); err != nil {
		return nil, fmt.Errorf("%s: in the morning: %w", b.name, err)
	}
	killed := make(chan error, 1)
	if b.hands {
		after := time.Duration(b.random.Float64() * float64(max(b.took, time.Second)))
		go func() {
			time.Sleep(after)
			killed <- b.kill()
		}()
	} else {
		killed <- nil
	}
	began := time.Now()
	for _, s := range b.steps() {
		if err := b.do(ctx, s.name, func(ctx context.Context) error { return s.run(ctx, day) }); err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w; the daemon said:\n%s", b.name, err, b.tail()), <-killed)
		}
	}
	b.took = time.Since(began)
	if err := <-killed; err != nil {
		return nil, err
	}
	if err := eventually(ctx, func() error { return b.backedUp(ctx, dawn) }); err != nil {
		return nil, fmt.Errorf("%s: %w", b.name, err)
	}
	if b.hands {
		if err := b.upgrade(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", b.name, err)
		}
	}
	if err := b.count(ctx, day); err != nil {
		return nil, fmt.Errorf("%s: in the evening: %w", b.name, err)
	}
	held, err := b.agrees(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", b.name, err)
	}
	return b.measure(ctx, held)
}

// survivors are the names of the sandboxes that are there on the morning of a day.
func (b *box) survivors(day int) (names []string) {
	for _, c := range b.lives {
		names = append(names, c.name)
	}
	for d := max(day-2, 1); d < day; d++ {
		// A day that is a week is longer than all timeouts.
		if day%weekLong != 0 && !(d == day-2 && (day-1)%weekLong == 0) {
			names = append(names, fmt.Sprintf("stopped-%d", d))
		}
	}
	slices.Sort(names)
	return names
}

// list fails unless there are these sandboxes, and those that live all year do.
func (b *box) list(ctx context.Context, want []string) error {
	all, err := b.api.List(ctx, client.Filter{})
	if err != nil {
		return err
	}
	var got []string
	for _, sb := range all {
		got = append(got, sb.Sandboxd.Name)
		i := slices.IndexFunc(b.lives, func(c *counter) bool { return c.id == sb.ID })
		if i >= 0 && sb.Status.State != wire.Running && !(b.lives[i].asleep && sb.Status.State == wire.Paused) {
			return fmt.Errorf("%s is %+v", sb.Sandboxd.Name, sb.Status)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		return fmt.Errorf("the sandboxes are %q, want %q", got, want)
	}
	return nil
}

// backedUp fails unless the timer has taken a backup since, and nothing failed.
func (b *box) backedUp(ctx context.Context, since time.Time) error {
	s, err := b.api.System().BackupStatus(ctx)
	switch {
	case err != nil:
		return err
	case s.Backup.Error != "" || s.Drill.Error != "":
		return fmt.Errorf("a backup or a drill failed: %+v", s)
	case s.Backup.LastGood == nil || s.Backup.LastGood.Before(since):
		return fmt.Errorf("no backup since %s: %+v", since, s.Backup)
	case s.Drill.LastGood == nil || s.Drill.LastGood.Before(since.Add(-cycle*24*time.Hour)):
		return fmt.Errorf("no drill for %d days: %+v", cycle, s.Drill)
	}
	all, err := b.api.System().Backups(ctx)
	if err == nil && len(all) > cycle {
		err = fmt.Errorf("%d backups are kept, want %d", len(all), cycle)
	}
	return err
}

// agrees waits until the host holds something of just those sandboxes that records are of, and
// returns what it holds.
func (b *box) agrees(ctx context.Context) (held []string, err error) {
	resp, err := b.admin().Post("http://sandboxd/sweep", "", nil)
	if err != nil {
		return nil, err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		return nil, fmt.Errorf("the sweep answers %s", resp.Status)
	}
	err = eventually(ctx, func() error {
		all, err := b.api.List(ctx, client.Filter{})
		if err != nil {
			return err
		}
		snapshots, err := b.api.Snapshots().List(ctx, "")
		if err != nil {
			return err
		}
		held = hosttest.Held(b.Instance)
		known := map[string]bool{}
		for _, s := range snapshots {
			known[s.ID] = true
		}
		for _, sb := range all {
			known[sb.ID] = true
			link := slices.Contains(held, "link sb-"+sb.ID)
			if up := sb.Status.State == wire.Running; link != up {
				return fmt.Errorf("sandbox %s (%s) is %s; it has a link: %v", sb.ID, sb.Sandboxd.Name, sb.Status.State, link)
			}
		}
		for _, line := range held {
			for _, id := range ids.FindAllString(line, -1) {
				if strings.HasPrefix(id, b.Instance.String()) && !known[id] {
					return fmt.Errorf("nobody knows of %s: %s", id, line)
				}
			}
		}
		return nil
	})
	return held, err
}

// flat fails the test for each measure that grows, and logs all.
func (b *box) flat(t *testing.T, rows []row) {
	for what, n := range b.complaints {
		t.Logf("%-10s logged %d times: %s", b.name, n, what)
	}
	for _, m := range measures {
		values := column(rows, m)
		fit := m.Fit(values)
		t.Logf("%-10s %-14s first %-12s last %-12s slope %s a day", b.name, m.Name, m.Text(values[0]),
			m.Text(values[len(values)-1]), m.Text(fit.Slope))
		if err := m.Flat(values); err != nil {
			t.Errorf("the daemon that is %s: %v", b.name, err)
		}
	}
}

func column(rows []row, m Measure) (all []float64) {
	for _, r := range rows {
		all = append(all, r[m.Name])
	}
	return all
}

// brief is the last row of each box in a line.
func brief(rows [][]row) string {
	var words []string
	for _, of := range rows {
		r := of[len(of)-1]
		for _, m := range measures {
			words = append(words, m.Name+"="+strings.ReplaceAll(m.Text(r[m.Name]), " ", ""))
		}
		words = append(words, "|")
	}
	return strings.Join(words, " ")
}

// ids finds the ids of sandboxes and snapshots.
var ids = regexp.MustCompile(`\b[a-z2-7]{12}\b`)
