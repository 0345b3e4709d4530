package fork

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// host has the sandboxes and snapshots of a test. It is a host only as far as a fork can see: what
// it is asked becomes records. The real ones are tested in test/e2e.
type host struct {
	mu     sync.Mutex
	all    []*record.Record
	snaps  map[string]record.SnapshotState
	asked  []record.SnapshotRequest
	log    bytes.Buffer
	n      int
	refuse map[int]error  // of Create, by the copy
	fails  map[int]string // why a copy does not come up
	broken map[string]error
	hold   chan struct{} // if set, a copy comes up when it is closed
	taking chan struct{} // if set, a snapshot is ready when it is closed
	slow   time.Duration // how long it takes to begin a snapshot
	comes  time.Duration // how long a copy takes to come up
	unmade int           // deletions of snapshots that were asked for
}

func newHost() *host {
	return &host{snaps: map[string]record.SnapshotState{}, refuse: map[int]error{}, fails: map[int]string{}, broken: map[string]error{}}
}

func (h *host) Create(ctx context.Context, s record.Spec) (record.Record, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := errors.Join(context.Cause(ctx), h.refuse[s.Fork.Index]); err != nil {
		return record.Record{}, err
	}
	if h.snaps[s.Snapshot] != record.SnapshotReady {
		return record.Record{}, fmt.Errorf("snapshot %q is %q", s.Snapshot, h.snaps[s.Snapshot])
	}
	h.n++
	r := &record.Record{ID: fmt.Sprintf("copy%d", h.n), Spec: s, State: record.Creating, Created: time.Now()}
	h.all = append([]*record.Record{r}, h.all...) // the newest first
	return *r, nil
}

func (h *host) Await(ctx context.Context, id string) (record.Record, error) {
	time.Sleep(h.comes)
	if h.hold != nil {
		select {
		case <-ctx.Done():
			return record.Record{}, context.Cause(ctx)
		case <-h.hold:
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.all, func(r *record.Record) bool { return r.ID == id })
	if i < 0 {
		return record.Record{}, errs.New(errs.NotFound, "no sandbox %s", id)
	}
	r := *h.all[i]
	r.State = record.Running
	if why := h.fails[r.Spec.Fork.Index]; why != "" {
		r.State, r.Reason, r.Message = record.Ended, record.CreateFailed, why
	}
	h.all[i] = &r
	return r, nil
}

func (h *host) List(context.Context) ([]*record.Record, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.all), h.broken["list"]
}

// gone deletes a sandbox.
func (h *host) gone(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = slices.DeleteFunc(h.all, func(r *record.Record) bool { return r.ID == id })
}

// snapshots are those of a host.
type snapshots struct{ *host }

func (s snapshots) Create(_ context.Context, sandbox string, q record.SnapshotRequest) (record.Snapshot, error) {
	time.Sleep(s.slow)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.broken["create"]; err != nil {
		return record.Snapshot{}, err
	}
	s.n++
	id := fmt.Sprintf("snap-%d", s.n)
	s.asked, s.snaps[id] = append(s.asked, q), record.SnapshotCreating
	return record.Snapshot{ID: id, Source: sandbox, State: record.SnapshotCreating}, nil
}

func (s snapshots) Await(ctx context.Context, id string) (record.Snapshot, error) {
	if s.taking != nil {
		select {
		case <-ctx.Done():
			return record.Snapshot{}, context.Cause(ctx)
		case <-s.taking:
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	snap := record.Snapshot{ID: id, State: record.SnapshotReady, Image: record.Image{Name: "base"}}
	if err := s.broken["take"]; err != nil {
		snap.State, snap.Message = record.SnapshotFailed, err.Error()
	}
	s.snaps[id] = snap.State
	return snap, nil
}

// Delete refuses what the Manager refuses.
func (s snapshots) Delete(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unmade++
	if s.snaps[id] == record.SnapshotCreating {
		return errs.New(errs.WrongState, "snapshot %s is still being taken", id)
	}
	for _, r := range s.all {
		if r.Spec.Snapshot == id && r.State == record.Creating {
			return errs.New(errs.WrongState, "snapshot %s is in use by %s", id, r.ID)
		}
	}
	if err := s.broken["delete"]; err != nil {
		return err
	}
	delete(s.snaps, id)
	return nil
}

// forks are those of a daemon that works on h until the test ends.
func (h *host) forks(t *testing.T, change ...func(*Config)) *Forks {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	f := h.until(ctx, change...)
	t.Cleanup(func() { cancel(); f.Close() })
	return f
}

func (h *host) until(ctx context.Context, change ...func(*Config)) *Forks {
	c := Config{Instance: 't', Sandboxes: h, Snapshots: snapshots{h}, Log: slog.New(slog.NewTextHandler(&h.log, nil))}
	for _, ch := range change {
		ch(&c)
	}
	return New(ctx, c)
}

// request asks for so many copies of sandbox "origin".
func request(count int) Request {
	q := Request{Source: record.Record{ID: "origin", Spec: record.Spec{Runtime: "runsc"}}, Memory: true}
	for i := range count {
		q.Copies = append(q.Copies, record.Spec{Name: fmt.Sprintf("try-%d", i+1)})
	}
	return q
}

func keyed(key, body string, count int) Request {
	q := request(count)
	q.Once = record.Request{Key: key, Body: body}
	return q
}

// whole makes a fork and awaits it.
func whole(t *testing.T, f *Forks, q Request) State {
	t.Helper()
	s, err := f.Begin(t.Context(), q)
	if err != nil || s.Phase != Creating || len(s.Copies) != 0 {
		t.Fatalf("%+v, %v", s, err)
	}
	if s, err = f.Await(t.Context(), s.ID); err != nil || s.Phase == Creating {
		t.Fatalf("%+v, %v", s, err)
	}
	return s
}

// ids are the copies, in order; those that are gone have a "-" before them.
func ids(s State) string {
	var all []string
	for _, c := range s.Copies {
		id := c.ID
		if c.Now == nil {
			id = "-" + id
		}
		all = append(all, id)
	}
	return strings.Join(all, " ")
}

// TestFork: a whole fork leaves copies that know what they are, and no snapshot.
func TestFork(t *testing.T) {
	h := newHost()
	f := h.forks(t)
	q := keyed("key", "body", 3)
	s := whole(t, f, q)
	if s.Phase != Ready || s.Message != "" || s.Count != 3 || s.Source != "origin" || !s.Memory || ids(s) != "copy2 copy3 copy4" {
		t.Errorf("%+v", s)
	}
	for i, c := range s.Copies {
		want := record.Spec{
			Name: q.Copies[i].Name, Snapshot: "snap-1", Memory: true, Image: record.Image{Name: "base"},
			Fork: record.Fork{ID: s.ID, Source: "origin", Count: 3, Index: i + 1},
		}
		if i == 0 {
			want.Request = q.Once
		}
		if got := fmt.Sprintf("%+v", c.Now.Spec); got != fmt.Sprintf("%+v", want) || c.Name != want.Name || c.Now.State != record.Running {
			t.Errorf("copy %d is\n%s\nwant\n%+v", i+1, got, want)
		}
	}
	if want := []record.SnapshotRequest{{Temporary: true, Memory: true}}; !slices.Equal(h.asked, want) || len(h.snaps) != 0 {
		t.Errorf("snapshots %+v were taken, and %v are left", h.asked, h.snaps)
	}

	// A copy that is gone is shown as such, also one under another name.
	h.gone("copy3")
	h.mu.Lock()
	renamed := *h.all[0]
	renamed.Spec.Name = "other"
	h.all[0] = &renamed
	h.mu.Unlock()
	if s, err := f.Get(t.Context(), s.ID); err != nil || ids(s) != "copy2 -copy3 copy4" || s.Copies[1].Name != "try-2" ||
		s.Copies[2].Name != "other" || s.Phase != Ready {
		t.Errorf("%+v, %v", s, err)
	}
	for _, none := range []string{"", "fork-none", "origin", "copy2"} {
		if s, err := f.Get(t.Context(), none); !errs.Is(err, errs.NotFound) {
			t.Errorf("%q: %+v, %v", none, s, err)
		}
		if s, err := f.Await(t.Context(), none); !errs.Is(err, errs.NotFound) {
			t.Errorf("%q: %+v, %v", none, s, err)
		}
	}
	h.broken["list"] = errors.New("the store is closed")
	if s, err := f.Get(t.Context(), s.ID); err == nil || !strings.Contains(err.Error(), "the store is closed") {
		t.Errorf("%+v, %v", s, err)
	}
}

// TestForkFails: what fails is said with the copy that it is about, the other copies are made,
// and no snapshot is left.
func TestForkFails(t *testing.T) {
	for _, c := range []struct {
		name          string
		change        func(*host)
		message, made string
		logged        string
	}{
		{
			"no snapshot", func(h *host) { h.broken["take"] = errors.New("the disk is full") },
			"sandbox origin could not be copied: the disk is full", "", "",
		},
		{
			"one is refused", func(h *host) { h.refuse[2] = errs.New(errs.Exists, "the name try-2 is taken") },
			"1 of 3 copies could not be made; copy 2: the name try-2 is taken", "copy2 copy3", "",
		},
		{
			"one does not come up", func(h *host) { h.fails[3] = "no agent" },
			"1 of 3 copies could not be made; copy 3: no agent", "copy2 copy3 copy4", "",
		},
		{
			"two fail", func(h *host) { h.fails[3], h.refuse[1] = "no agent", errs.New(errs.Exhausted, "full") },
			"2 of 3 copies could not be made; copy 1: full", "copy2 copy3", "copy 1: full",
		},
		{
			"a fault of the daemon", func(h *host) { h.refuse[2] = errors.New("write /var/lib: I/O error") },
			"1 of 3 copies could not be made; copy 2: the daemon's log says why", "copy2 copy3", "write /var/lib: I/O error",
		},
		{
			"a snapshot that cannot be deleted", func(h *host) { h.broken["delete"] = errors.New("the pool is gone") },
			"", "copy2 copy3 copy4", "the pool is gone",
		},
	} {
		h := newHost()
		c.change(h)
		f := h.forks(t)
		s := whole(t, f, request(3))
		if want := map[bool]Phase{true: Ready, false: Failed}[c.message == ""]; s.Phase != want || s.Message != c.message ||
			ids(s) != c.made {
			t.Errorf("%s: %s %q, made %s", c.name, s.Phase, s.Message, ids(s))
		}
		f.going.Wait()
		if !strings.Contains(h.log.String(), c.logged) {
			t.Errorf("%s: logged\n%s", c.name, &h.log)
		}
		if h.broken["delete"] == nil && len(h.snaps) != 0 {
			t.Errorf("%s: snapshots %v are left", c.name, h.snaps)
		}
	}
}

// TestForkRefused: what is refused makes nothing, and its key is free again.
func TestForkRefused(t *testing.T) {
	h := newHost()
	var full, lost error
	var asked string
	f := h.forks(t, func(c *Config) {
		c.Fits = func(_ context.Context, runtime string, bytes int64, count int) error {
			asked = fmt.Sprint(runtime, " ", bytes, " ", count)
			return full
		}
		c.MemoryHeld = func(id string) (int64, error) { return int64(len(id)), lost }
	})
	refused := func(want error) {
		t.Helper()
		if s, err := f.Begin(t.Context(), keyed("key", "", 5)); !errors.Is(err, want) {
			t.Errorf("%+v, %v", s, err)
		}
		if s, ok, err := f.ByKey(t.Context(), "key"); ok || err != nil {
			t.Errorf("a refused fork is known: %+v, %v", s, err)
		}
		if len(h.asked)+len(h.all)+len(h.snaps) != 0 {
			t.Errorf("made: %v %v", h.asked, h.all)
		}
	}
	full = errs.New(errs.Exhausted, "2 would fit")
	refused(full)
	if asked != "runsc 6 5" {
		t.Errorf("asked for room for %s", asked)
	}
	full, lost = nil, errors.New("no cgroup")
	refused(lost)
	lost, h.broken["create"] = nil, errs.New(errs.WrongState, "it is paused")
	refused(h.broken["create"])
	h.broken["create"] = nil
	files := keyed("key", "", 5)
	files.Memory = false
	if s := whole(t, f, files); s.Phase != Ready || asked != "runsc 0 5" {
		t.Errorf("%+v; asked for room for %s", s, asked)
	}
}

// TestForkVault: the copies know whether they get a vault, which is asked for before anything is made.
func TestForkVault(t *testing.T) {
	h := newHost()
	var has bool
	var denied error
	f := h.forks(t, func(c *Config) {
		c.Vault = func(_ context.Context, source *record.Record, copies *record.Spec) (bool, error) {
			if source.ID != "origin" || copies.Name != "try-1" || len(h.asked) > 1 {
				t.Errorf("asked about %s and %s, after %v", source.ID, copies.Name, h.asked)
			}
			return has, denied
		}
		c.Fits = func(context.Context, string, int64, int) error { return errs.New(errs.Exhausted, "no room") }
	})
	denied = errs.New(errs.Invalid, "a bound host")
	if _, err := f.Begin(t.Context(), keyed("key", "", 2)); !errors.Is(err, denied) || len(h.asked)+len(h.all) != 0 {
		t.Errorf("%v, %v", err, h.asked)
	}
	denied, f.c.Fits = nil, nil
	for _, has = range []bool{false, true} {
		for _, c := range whole(t, f, request(2)).Copies {
			if c.Now.Spec.Fork.Vault != has {
				t.Errorf("%s: %+v; the source has a vault: %v", c.ID, c.Now.Spec.Fork, has)
			}
		}
	}
}

// TestForkRace: of requests at once with one key, one begins a fork.
func TestForkRace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.slow = time.Second // all of them are there before the first has begun
		f := h.forks(t)
		var wg sync.WaitGroup
		var mu sync.Mutex
		begun, raced := []string{}, 0
		for range 16 {
			wg.Go(func() {
				s, err := f.Begin(t.Context(), keyed("key", "body", 2))
				mu.Lock()
				defer mu.Unlock()
				if e, ok := errors.AsType[*errs.Error](err); ok && e.Wire == record.CodeRequestRace {
					raced++
				} else if err == nil {
					begun = append(begun, s.ID)
				}
			})
		}
		wg.Wait()
		if len(begun) != 1 || raced != 15 {
			t.Fatalf("%d forks, %d lost the race", len(begun), raced)
		}
		if s, err := f.Await(t.Context(), begun[0]); err != nil || len(s.Copies) != 2 || len(h.all) != 2 {
			t.Errorf("%+v, %v; %d copies are there", s, err, len(h.all))
		}
	})
}

// TestForkOnce: a key finds the fork that it has begun.
func TestForkOnce(t *testing.T) {
	h := newHost()
	f := h.forks(t)
	first := whole(t, f, keyed("key", "body", 2))
	if s, ok, err := f.ByKey(t.Context(), "key"); !ok || err != nil || s.ID != first.ID || s.Once.Body != "body" {
		t.Errorf("%+v, %v, %v", s, ok, err)
	}
	if s, ok, err := f.ByKey(t.Context(), "other"); ok || err != nil {
		t.Errorf("%+v, %v", s, err)
	}
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the client left"))
	unlock, err := f.keys.Lock(t.Context(), "busy")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Begin(ended, keyed("busy", "", 1)); err == nil || len(h.all) != 2 {
		t.Errorf("%v", err)
	}
	unlock()
	// The first copy that is made has the key, if it is not the first one.
	h.refuse[1] = errs.New(errs.Exists, "taken")
	if s := whole(t, f, keyed("late", "body", 3)); len(s.Copies) != 2 || s.Copies[0].Now.Spec.Request.Key != "late" ||
		s.Copies[1].Now.Spec.Request.Key != "" {
		t.Errorf("%+v", s)
	}
}

// TestDaemonEnds: when the daemon ends in the middle, nothing waits, and what was made stays: the
// next daemon deletes the snapshot and ends what was being created.
func TestDaemonEnds(t *testing.T) {
	for _, at := range []string{"the snapshot", "the copies"} {
		synctest.Test(t, func(t *testing.T) {
			h := newHost()
			if at == "the snapshot" {
				h.taking = make(chan struct{})
			} else {
				h.hold = make(chan struct{})
			}
			ctx, cancel := context.WithCancelCause(t.Context())
			f := h.until(ctx)
			s, err := f.Begin(t.Context(), request(2))
			if err != nil {
				t.Fatal(err)
			}
			awaited := make(chan State, 1)
			go func() {
				s, err := f.Await(t.Context(), s.ID)
				if err != nil {
					t.Error(err)
				}
				awaited <- s
			}()
			synctest.Wait() // it hangs where it should
			if now, err := f.Get(t.Context(), s.ID); err != nil || now.Phase != Creating || len(now.Copies) != len(h.all) {
				t.Errorf("%s: %+v, %v", at, now, err)
			}
			short, stop := context.WithTimeout(t.Context(), time.Second)
			if now, err := f.Await(short, s.ID); err != nil || now.Phase != Creating {
				t.Errorf("%s: a client that waits for a second: %+v, %v", at, now, err)
			}
			stop()
			cancel(errors.New("sandboxd ends"))
			f.Close()
			if end := <-awaited; end.Phase != Failed || end.Message == "" {
				t.Errorf("%s: %+v", at, end)
			}
			if len(h.snaps) != 1 || h.unmade != 0 {
				t.Errorf("%s: snapshots %v, %d were to be deleted", at, h.snaps, h.unmade)
			}
			if made := map[string]int{"the copies": 2}[at]; len(h.all) != made {
				t.Errorf("%s: %d copies were made", at, len(h.all))
			}
		})
	}
}

// TestHolderLeaves: when the last client leaves that holds a fork, no further copy is begun, and those that have a
// record come up. Clients that do not hold it, and one of two that do, change nothing.
func TestHolderLeaves(t *testing.T) {
	for _, c := range []struct {
		held    bool
		holders int // of whom one leaves
		made    int
	}{{true, 1, 2}, {true, 2, 5}, {false, 1, 5}} {
		synctest.Test(t, func(t *testing.T) {
			h := newHost()
			h.hold = make(chan struct{})
			f := h.forks(t, func(c *Config) { c.AtOnce = 2 })
			q := request(5)
			q.Held = c.held
			s, err := f.Begin(t.Context(), q)
			if err != nil {
				t.Fatal(err)
			}
			ctx, leave := context.WithCancel(t.Context())
			var holding sync.WaitGroup
			for i := range c.holders {
				holding.Go(func() {
					ctx := ctx
					if i > 0 {
						ctx = t.Context()
					}
					if s, err := f.Hold(ctx, s.ID); err != nil || (s.Phase == Creating) != (i == 0) {
						t.Errorf("holder %d: %+v, %v", i, s, err)
					}
				})
			}
			synctest.Wait()
			if s, err := f.Get(t.Context(), s.ID); err != nil || len(s.Copies) != 2 ||
				s.Message != "0 of 5 copies are made, 2 under way" {
				t.Errorf("2 at once: %+v, %v", s, err)
			}
			leave()
			synctest.Wait()
			close(h.hold)
			holding.Wait()
			s, err = f.Await(t.Context(), s.ID)
			if err != nil || len(s.Copies) != c.made || len(h.all) != c.made || (s.Phase == Ready) != (c.made == 5) {
				t.Errorf("%+v: %+v, %v; %d copies", c, s, err, len(h.all))
			}
			for _, r := range h.all {
				if r.State != record.Running {
					t.Errorf("copy %s is %s", r.ID, r.State)
				}
			}
			if c.made < 5 && !strings.HasPrefix(s.Message, "3 of 5 copies could not be made; copy 3: the client that asked for it left") {
				t.Errorf("%q", s.Message)
			}
			f.going.Wait()
			if len(h.snaps) != 0 {
				t.Errorf("snapshots %v are left", h.snaps)
			}
		})
	}
}

// TestHolderComesBack: a fork whose request has a key goes on for a grace when its last client has left. A repeat that
// holds it in that time has the whole fork, and a later one what was begun.
func TestHolderComesBack(t *testing.T) {
	const each = 8 * time.Second // how long a copy takes to come up
	for _, c := range []struct {
		back []time.Duration // when clients hold it again, after the first was cut; all but the last are cut after a second
		made int
	}{
		{nil, 3}, // at 0, 8 and 16 s
		{[]time.Duration{grace - time.Second}, 6},
		{[]time.Duration{grace - 5*time.Second, grace + 10*time.Second}, 6},
		{[]time.Duration{grace + time.Second}, 3},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := newHost()
			h.comes = each
			f := h.forks(t, func(c *Config) { c.AtOnce = 1 })
			q := keyed("key", "body", 6)
			q.Held = true
			s, err := f.Begin(t.Context(), q)
			if err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			cut := func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if s, err := f.Hold(ctx, s.ID); err != nil || s.Phase != Creating {
					t.Errorf("cut after %s: %+v, %v", time.Since(start), s, err)
				}
			}
			cut()
			for i, at := range c.back {
				time.Sleep(time.Second + at - time.Since(start))
				if i < len(c.back)-1 {
					cut()
				} else if again, ok, err := f.ByKey(t.Context(), "key"); !ok || err != nil || again.ID != s.ID {
					t.Errorf("%v: %+v, %v", c.back, again, err)
				} else if _, err := f.Hold(t.Context(), s.ID); err != nil {
					t.Error(err)
				}
			}
			s, err = f.Await(t.Context(), s.ID)
			if err != nil || len(s.Copies) != c.made || (s.Phase == Ready) != (c.made == 6) ||
				c.made < 6 && !strings.Contains(s.Message, "copy 4: the client that asked for it left") {
				t.Errorf("%v: %+v, %v", c.back, s, err)
			}
		})
	}
}

// TestBusy: on a host that stays busy, a fork makes one copy at a time, and all of them. When it is busy no more, a few
// come up at once again.
func TestBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const waits = 30 * time.Second
		h := newHost()
		h.comes = 45 * time.Second
		var busy atomic.Bool
		var begun []int // when, in seconds
		start := time.Now()
		f := h.forks(t, func(c *Config) {
			c.AtOnce = 3
			c.Await = func(context.Context) (bool, error) {
				if begun = append(begun, int(time.Since(start).Seconds())); busy.Load() {
					time.Sleep(waits)
				}
				return busy.Load(), nil
			}
		})
		time.AfterFunc(time.Second/2, func() { busy.Store(true) })
		time.AfterFunc(200*time.Second, func() { busy.Store(false) })
		if s := whole(t, f, request(1)); s.Phase != Ready || time.Since(start) != h.comes { // it was not yet busy
			t.Errorf("after %s: %+v", time.Since(start), s)
		}
		s, err := f.Begin(t.Context(), request(7))
		if err != nil {
			t.Fatal(err)
		}
		if s, err = f.Await(t.Context(), s.ID); err != nil || s.Phase != Ready || len(s.Copies) != 7 {
			t.Errorf("%+v, %v", s, err)
		}
		var at []int
		for _, c := range s.Copies {
			at = append(at, int(c.Now.Created.Sub(start).Seconds()))
		}
		// Each waits half a minute for the CPUs, and then for the one before it.
		if want := []int{75, 120, 165, 210, 210, 210, 255}; !slices.Equal(at, want) {
			t.Errorf("copies were begun at %v, want %v; asked at %v", at, want, begun)
		}
	})
}

// TestBusyLeft: what waits for a busy host ends with its client, and an error is one of the copies that it is about.
func TestBusyLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.hold = make(chan struct{})
		f := h.forks(t, func(c *Config) {
			c.AtOnce = 2
			c.Await = func(context.Context) (bool, error) { return true, nil }
		})
		q := request(5)
		q.Held = true
		s, err := f.Begin(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		ctx, leave := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, leave)
		if s, err = f.Hold(ctx, s.ID); err != nil || s.Message != "0 of 5 copies are made, 1 under way" {
			t.Errorf("%+v, %v", s, err)
		}
		synctest.Wait()
		close(h.hold)
		if s, err = f.Await(t.Context(), s.ID); err != nil || s.Phase != Failed || len(s.Copies) != 1 {
			t.Errorf("%+v, %v", s, err)
		}

		f.c.Await = func(context.Context) (bool, error) { return false, errs.New(errs.Internal, "no /proc") }
		if s := whole(t, f, request(2)); s.Phase != Failed || s.Message != "2 of 2 copies could not be made; copy 1: no /proc" {
			t.Errorf("%+v", s)
		}
	})
}

// TestClientLeaves: a fork that no client holds goes on without its client.
func TestClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.hold = make(chan struct{})
		f := h.forks(t)
		ctx, leave := context.WithCancel(t.Context())
		s, err := f.Begin(ctx, request(2))
		if err != nil {
			t.Fatal(err)
		}
		leave()
		synctest.Wait()
		close(h.hold)
		if s, err := f.Await(t.Context(), s.ID); err != nil || s.Phase != Ready || len(s.Copies) != 2 {
			t.Errorf("%+v, %v", s, err)
		}
	})
}

// TestEarlierDaemon: a fork of an earlier daemon is known by its copies.
func TestEarlierDaemon(t *testing.T) {
	h := newHost()
	s := whole(t, h.forks(t), keyed("key", "", 3))
	f := h.forks(t) // the next one
	again, err := f.Get(t.Context(), s.ID)
	if err != nil || again.Phase != Ready || again.Message != "" || again.Source != "origin" || !again.Memory || again.Count != 3 ||
		ids(again) != ids(s) || again.Created.IsZero() {
		t.Errorf("%+v, %v", again, err)
	}
	if now, err := f.Await(t.Context(), s.ID); err != nil || ids(now) != ids(s) {
		t.Errorf("%+v, %v", now, err)
	}
	if _, ok, err := f.ByKey(t.Context(), "key"); ok || err != nil {
		t.Errorf("it remembers a key: %v", err)
	}
	h.gone("copy2")
	if now, err := f.Get(t.Context(), s.ID); err != nil || now.Phase != Ready || ids(now) != "copy3 copy4" ||
		now.Message != "2 of 3 copies are left; sandboxd has been restarted since" {
		t.Errorf("%+v, %v", now, err)
	}
	half := *h.all[0]
	half.State, half.Reason, half.Message = record.Ended, record.CreateFailed, "sandboxd stopped in the middle"
	h.all[0] = &half
	if now, err := f.Get(t.Context(), s.ID); err != nil || now.Phase != Failed ||
		now.Message != "copy 3 could not be made; sandboxd stopped in the middle" {
		t.Errorf("%+v, %v", now, err)
	}
	h.gone("copy3")
	h.gone("copy4")
	if now, err := f.Get(t.Context(), s.ID); !errs.Is(err, errs.NotFound) {
		t.Errorf("%+v, %v", now, err)
	}
}

// TestForgotten: of many forks the newest are remembered, and the others are known as those of an
// earlier daemon are.
func TestForgotten(t *testing.T) {
	h := newHost()
	f := h.forks(t)
	first := whole(t, f, keyed("first", "", 1))
	h.refuse[1] = errs.New(errs.Exhausted, "full")
	empty := whole(t, f, keyed("empty", "", 1))
	for i := range keptForks - 2 {
		s, err := f.Begin(t.Context(), keyed(fmt.Sprint(i), "", 1))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Await(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
	}
	if s, ok, err := f.ByKey(t.Context(), "first"); !ok || err != nil || s.ID != first.ID {
		t.Errorf("%d are too many: %+v, %v", keptForks, s, err)
	}
	for range 2 {
		whole(t, f, request(1))
	}
	if len(f.known) != keptForks || len(f.order) != keptForks || len(f.byKey) != keptForks-2 {
		t.Errorf("%d forks are remembered, %d of them in order, %d by key", len(f.known), len(f.order), len(f.byKey))
	}
	for key, s := range map[string]State{"first": first, "empty": empty} {
		if _, ok, err := f.ByKey(t.Context(), key); ok || err != nil {
			t.Errorf("%s is remembered by its key, %v", key, err)
		}
		now, err := f.Get(t.Context(), s.ID)
		if key == "first" && (err != nil || ids(now) != ids(first)) || key == "empty" && !errs.Is(err, errs.NotFound) {
			t.Errorf("%s: %+v, %v", key, now, err)
		}
	}
}
