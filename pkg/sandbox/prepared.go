package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// A Stock keeps prepared slots: records in state Prepared, with the rows of the table
// that need neither image nor request (those with fit). A create takes such a record,
// with its ID and its slot, and makes it Creating in the transaction that makes its
// intent durable. Its acquire then fits these rows and brings up the others.
//
//	make: insert Prepared ─▶ prepare rows ─▶ ready ──take──▶ Creating ─▶ fit rows, up others
//	                                           │
//	                    lost a row, no room, Close ─▶ erase rows and record
//
// A slot is ready only in the memory of the daemon that made it. A slot that its daemon
// did not live to release is released by the recovery of the next one, so no slot is
// older than the program that uses it.
//
// Who holds the lock of a slot's ID owns it. A ready slot whose lock is free is Prepared
// and has all its rows, as far as the last sweep knows.
type Stock struct {
	m    *Manager
	rows []table.Row   // what a prepared slot has
	wake chan struct{} // has room for one: Keep looks again

	making sync.Mutex // held while slots are made, or released to make room

	mu     sync.Mutex
	coming int                 // creations and starts under way; guarded by mu, as all below
	last   time.Time           // when the last of them ended
	ready  map[string][]string // IDs by runtime, the oldest first
	work   work                // what is being made; the zero work: nothing
	members
}

// work is a slot, or a member of a pool, that is being made.
type work struct {
	id, pool string
	giveUp   context.CancelFunc // ends that; nil: it does not take long
}

// done says that what has this ID is no longer being made.
func (w *work) done(id string) {
	if w.id == id {
		*w = work{}
	}
}

// begin has s make w until that is ready, or end is called.
func begin(s *Stock, w work) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.work = w
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.work.done(w.id)
	}
}

// Making reports whether id is that of a slot, or of a member of a pool, that is being made.
func (s *Stock) Making(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.work.id == id
}

// calm is how long no sandbox must have come up before Keep makes a slot: the first
// command of a sandbox, which usually follows at once, has the CPUs for itself.
const calm = 20 * time.Millisecond

func newStock(m *Manager) *Stock {
	s := &Stock{m: m, wake: make(chan struct{}, 1), ready: map[string][]string{}, members: newMembers()}
	for _, row := range m.life.rows {
		if row.Fit != nil {
			s.rows = append(s.rows, row)
		}
	}
	s.Look()
	return s
}

// StockOf returns the prepared slots of m.
func StockOf(m *Manager) *Stock { return m.stock }

// Look has Keep look again whether slots are missing, or there is no room for those that
// there are.
func (s *Stock) Look() {
	select {
	case s.wake <- struct{}{}:
	default: // it is about to look
	}
}

// Keep makes the slots that Config.Prepared wants, one at a time, while no sandbox comes
// up, and releases them when the host has no room (Config.Room). When ctx ends it
// releases all.
func (s *Stock) Keep(ctx context.Context) {
	defer s.empty(context.WithoutCancel(ctx))
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
		for ctx.Err() == nil && s.calm(ctx) && s.fill(ctx) {
		}
	}
}

// calm waits until no sandbox has come up for a moment. It reports false if one comes up,
// or ctx ends: whoever brings it up wakes Keep in the end.
func (s *Stock) calm(ctx context.Context) bool {
	for {
		s.mu.Lock()
		coming, wait := s.coming, time.Until(s.last.Add(calm))
		s.mu.Unlock()
		if coming > 0 || wait <= 0 {
			return coming == 0
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(wait):
		}
	}
}

// fill makes one slot or member of a pool that is missing, and reports whether another may be missing.
func (s *Stock) fill(ctx context.Context) bool {
	c := &s.m.life.cfg
	for runtime, want := range c.Prepared {
		if c.NoSweep != "" || want == 0 {
			continue
		}
		if c.Room != nil && c.Room(ctx, runtime) != nil {
			s.drop(ctx, runtime)
			continue
		}
		s.mu.Lock()
		missing := len(s.ready[runtime]) < want
		s.mu.Unlock()
		if missing {
			return s.make(ctx, runtime) == nil
		}
	}
	return s.fillPools(ctx)
}

// make makes a slot. After an error, which it logs, nothing of it is left, or the sweep
// goes on.
func (s *Stock) make(ctx context.Context, runtime string) error {
	if !s.m.tracker.begin() {
		return errClosing
	}
	defer s.m.tracker.end()
	s.making.Lock()
	defer s.making.Unlock()
	m, start, at := s.m, time.Now(), now()
	r := record.Record{ID: m.newID(), State: record.Prepared, Spec: record.Spec{Runtime: runtime}, Created: at, Changed: at}
	m.life.cfg.upIn(&r)
	unlock, err := m.locks.Lock(ctx, r.ID)
	if err != nil {
		return err
	}
	unlock = sync.OnceFunc(unlock)
	defer unlock()
	defer begin(s, work{id: r.ID})()
	var steps []table.Step
	err = table.Within(ctx, storeLimit, "store:prepare", func(ctx context.Context) error { return m.life.Store.Insert(ctx, &r) })
	if errs.Is(err, errs.Exhausted) {
		return err // sandboxes have all slots
	}
	if err == nil {
		steps, err = table.Acquire(ctx, s.rows, &r)
	}
	switch {
	case err == nil:
		s.add(&r, unlock)
	case ctx.Err() != nil:
		err = errors.Join(errClosing, err)
	}
	m.life.log(ctx, opPrepare, &r, start, steps, err)
	if err != nil {
		s.release(ctx, &r)
	}
	return err
}

// add makes a slot ready, and calls unlock before anybody sees that it is: a creation passes over a slot
// whose lock is held. Preconditions: it is. Whoever has only looked at the slot unlocks it later.
func (s *Stock) add(r *record.Record, unlock func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	unlock()
	s.work.done(r.ID)
	s.ready[r.Spec.Runtime] = append(s.ready[r.Spec.Runtime], r.ID)
}

// remove makes a slot no longer ready, and reports whether it was.
func (s *Stock) remove(r *record.Record) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := s.ready[r.Spec.Runtime]
	at := slices.Index(ids, r.ID)
	if at >= 0 {
		s.ready[r.Spec.Runtime] = slices.Delete(ids, at, at+1)
	}
	return at >= 0
}

// enter notes that a sandbox is about to come up; leave that it has, or that it failed.
func (s *Stock) enter() (leave func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.coming++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.coming--
		s.last = time.Now()
		if s.coming == 0 {
			s.Look()
		}
	}
}

// take makes r the record of a ready slot, and locks it. A sandbox that begins as a
// snapshot takes none, because its disk is not an empty one; nor does one that first
// waits for its image, because it holds nothing while it waits. The caller holds s.mu.
func (s *Stock) take(r *record.Record) (unlock func()) {
	if r.Spec.Snapshot != "" || r.Spec.Away() {
		return nil
	}
	ids := s.ready[r.Spec.Runtime]
	for i, id := range ids {
		if unlock, ok := s.m.locks.TryLock(id); ok { // else the sweep looks at it
			s.ready[r.Spec.Runtime] = slices.Delete(ids, i, i+1)
			r.ID, r.Prepared = id, true
			return unlock
		}
	}
	return nil
}

// insert makes the intent to create r durable, with the ID of a member of a pool, of a
// prepared slot or a new one, which it locks. The configuration leaves as many slots as there may be sandboxes
// (config.Prepared). If sandboxes that are being deleted have those, insert releases the
// prepared slots, which takes up to half a second, and tries again.
func (s *Stock) insert(ctx context.Context, r *record.Record) (unlock func(), err error) {
	c, unlock, leave, err := s.place(ctx, r)
	if err != nil {
		return nil, err
	}
	defer leave()
	if unlock != nil {
		if err := s.m.insert(ctx, r); err != nil {
			s.giveBack(ctx, r, c)
			unlock()
			return nil, err
		}
		if c != nil {
			s.counted(c.Pool.Name, record.PoolHit, 0)
		}
		return unlock, nil
	}
	for {
		unlock, err := s.m.locks.Lock(ctx, r.ID)
		if err != nil {
			return nil, err
		}
		if err = s.m.insert(ctx, r); err == nil {
			return unlock, nil
		}
		unlock()
		if !errs.Is(err, errs.Exhausted) || !s.MakeRoom(ctx) {
			return nil, err
		}
	}
}

// giveBack makes a slot or a member c ready again that a creation took in vain. If the store wrote the
// creation despite its error, no client knows of it, and giveBack erases it.
// Preconditions: its lock is held.
func (s *Stock) giveBack(ctx context.Context, r *record.Record, c *member) {
	ctx = context.WithoutCancel(ctx)
	was, ok, err := s.m.life.Store.Get(ctx, r.ID)
	switch {
	case err == nil && ok && was.State == record.Prepared && c != nil:
		err = s.keepMember(ctx, c)
	case err == nil && ok && was.State == record.Prepared:
		s.add(&was, func() {}) // the caller unlocks
	case err == nil && ok:
		_, err = s.m.erase(ctx, &was, func() {})
	}
	if err != nil {
		s.m.life.cfg.Log.Error("cannot undo a creation that failed; the sweep does it", "sandbox", r.ID, "err", err)
	}
}

// MakeRoom releases all ready slots and members, because a sandbox needs what they hold. It
// reports whether there were any.
func (s *Stock) MakeRoom(ctx context.Context) (released bool) {
	for runtime := range s.m.life.Runtimes {
		released = s.drop(ctx, runtime) || released
	}
	return released
}

// drop releases the ready slots and members of a runtime, and reports whether there were
// any.
func (s *Stock) drop(ctx context.Context, runtime string) bool {
	s.mu.Lock()
	if s.work.giveUp != nil {
		s.work.giveUp()
	}
	s.mu.Unlock()
	dropped := s.dropMembers(ctx, func(c *member, _ int) bool { return c.Spec.Runtime == runtime })
	s.making.Lock()
	defer s.making.Unlock()
	s.mu.Lock()
	ids := s.ready[runtime]
	delete(s.ready, runtime)
	s.mu.Unlock()
	s.releaseAll(ctx, ids) //nolint:errcheck // logged; the sweep goes on
	return dropped || len(ids) > 0
}

// empty releases the slots and members of this daemon, when it ends.
func (s *Stock) empty(ctx context.Context) { s.MakeRoom(ctx) }

// Purge releases all prepared slots that the store knows, also those that another daemon
// has left.
func (s *Stock) Purge(ctx context.Context) error {
	s.empty(ctx)
	all, err := s.m.life.Store.List(ctx)
	if err != nil {
		return fmt.Errorf("release prepared slots: %w", err)
	}
	var ids []string
	for _, r := range all {
		if r.State == record.Prepared {
			ids = append(ids, r.ID)
		}
	}
	return s.releaseAll(ctx, ids)
}

// releaseAll releases slots that are not ready, at the same time: each waits for the
// kernel to remove its link.
func (s *Stock) releaseAll(ctx context.Context, ids []string) error {
	var todo []func() error
	for _, id := range ids {
		todo = append(todo, func() error {
			unlock, err := s.m.locks.Lock(ctx, id)
			if err != nil {
				return fmt.Errorf("release prepared slot %s: %w", id, err)
			}
			defer unlock()
			r, ok, err := s.m.life.Store.Get(ctx, id)
			if err != nil || !ok || r.State != record.Prepared {
				return err
			}
			return s.release(ctx, &r)
		})
	}
	return inParallel(todo)
}

// release removes what a slot holds, and then its record.
// Preconditions: its lock is held, and it is not ready.
func (s *Stock) release(ctx context.Context, r *record.Record) error {
	start := time.Now()
	steps, err := s.m.life.erase(ctx, r, func() {})
	s.m.life.log(ctx, opDiscard, r, start, steps, err)
	if err != nil {
		return fmt.Errorf("release prepared slot %s: %w", r.ID, err)
	}
	return nil
}

// heal releases a slot that is not ready, because its daemon is dead or could not release
// it, or that has lost a row. kinds are the rows that were held a moment ago. While
// Config.NoSweep is set it does nothing.
// Preconditions: its lock is held.
func (s *Stock) heal(ctx context.Context, r *record.Record, kinds []string) error {
	if s.m.life.cfg.NoSweep != "" {
		return nil
	}
	if r.Pool.Name != "" {
		return s.healMember(ctx, r, kinds)
	}
	if s.remove(r) {
		lost, err := s.lost(ctx, s.rows, r, kinds)
		if lost == "" {
			s.add(r, func() {}) // also after an error: what it holds is not known, and a create fits it
			return err
		}
		s.m.life.cfg.Log.Warn("something on the host removed a resource of a prepared slot; the slot is released", "sandbox", r.ID,
			"lost", lost)
	}
	s.Look()
	return s.release(ctx, r)
}

// lost names one of rows that a slot or member no longer holds, or not all of.
func (s *Stock) lost(ctx context.Context, rows []table.Row, r *record.Record, kinds []string) (string, error) {
	for _, row := range rows {
		if row.Held == nil || !row.Wants(r) {
			continue
		}
		if _, whole, err := (recovery{s.m}).has(ctx, row, r, slices.Contains(kinds, row.Name)); err != nil || !whole {
			if err != nil {
				return "", fmt.Errorf("check its %s: %w", row.Name, err)
			}
			return row.Name, nil
		}
	}
	return "", nil
}
