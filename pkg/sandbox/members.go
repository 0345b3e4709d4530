package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// A member of a pool is a prepared slot with more rows up: all but the published ports,
// for the template of its pool, with an agent that idles. What surrounds the slots of a
// Stock, this file does for members.
//
//	make: insert Prepared ─▶ member rows ─▶ warm ─▶ ready ──take──▶ Creating ─▶ claim rows, up ports
//	                                                  │
//	        died, lost a row, too old, another revision, no room, Close ─▶ erase rows and record
//
// A member that turns out to be dead when its rows are claimed is released, and the
// sandbox comes up cold: see life.claim.
type members struct {
	ready   map[string][]*member                  // by pool, the oldest first
	filling map[string]bool                       // pools that had fewer than bufferMin, and not bufferMax since
	pending map[string]map[string]bool            // creations by pool that the store may not list yet
	trouble map[string]trouble                    // why the last member could not be made
	counts  map[string]map[string]record.PoolWork // by pool and result
	today   map[string]string                     // the revision of each pool, as of the last look
}

// member is one that is ready.
type member struct {
	record.Record
	open   bool   // its template adds nothing to a plain creation, so that any that fits may take it
	forget func() // ends the watch over its processes
}

// trouble is why no member of a pool can be made.
type trouble struct {
	text  string
	until time.Time // no other is made before
}

// troubled is how long no member is made after one could not be made.
const troubled = time.Minute

// Limits of what a member runs before it is ready: the command that warms it, all tries of the
// check, one try, and the pause between two.
const (
	warmLimit  = 5 * time.Minute
	readyLimit = time.Minute
	readyTry   = 10 * time.Second
	readyPause = 100 * time.Millisecond
)

// retryPool is when it is worth asking again after a pool had no room.
const retryPool = time.Second

func newMembers() members {
	return members{
		ready: map[string][]*member{}, filling: map[string]bool{}, pending: map[string]map[string]bool{},
		trouble: map[string]trouble{}, counts: map[string]map[string]record.PoolWork{}, today: map[string]string{},
	}
}

// Changed has Keep look at a pool that was changed, at once also if no member of it could
// be made.
func (s *Stock) Changed(pool string) {
	s.mu.Lock()
	delete(s.trouble, pool)
	s.mu.Unlock()
	s.Look()
}

// allocated counts the sandboxes of a pool. The caller holds s.mu.
func (s *Stock) allocated(records []*record.Record, pool string) int {
	n := len(s.pending[pool])
	for _, r := range records {
		if r.Pool.Name == pool && r.State != record.Prepared && r.State != record.Deleting && r.State != record.Ended &&
			!s.pending[pool][r.ID] {
			n++
		}
	}
	return n
}

// fillPools makes one member that is missing, and reports whether another may be missing.
func (s *Stock) fillPools(ctx context.Context) bool {
	c := &s.m.life.cfg
	if c.Member == nil || c.NoSweep != "" {
		return false
	}
	pools, err := s.m.life.Store.Pools(ctx)
	if err != nil {
		return false
	}
	s.dismiss(ctx, pools)
	for _, p := range pools {
		spec, err := c.Member(ctx, p)
		if err != nil {
			s.retire(ctx, p, "") // what they were made from is gone
			s.blame(p.Name, err)
			continue
		}
		s.retire(ctx, p, p.Revision(&spec))
		if c.Room != nil && c.Room(ctx, spec.Runtime) != nil {
			s.drop(ctx, spec.Runtime)
			continue
		}
		if !s.wants(ctx, &p) {
			continue
		}
		if err := s.makeMember(ctx, &p, spec); err != nil {
			s.blame(p.Name, err)
			continue
		}
		return true
	}
	return false
}

// blame notes that no member of a pool can be made for now.
func (s *Stock) blame(pool string, err error) {
	if errors.Is(err, errClosing) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trouble[pool] = trouble{text: "no member can be made" + clientText(err), until: time.Now().Add(troubled)}
}

// wants reports whether a pool is to have another member: once it has fewer than bufferMin
// that are ready, or fewer than poolMin with its sandboxes, members are made until
// bufferMax are ready, and never more than poolMax with its sandboxes.
func (s *Stock) wants(ctx context.Context, p *record.Pool) bool {
	records, err := s.m.life.Store.List(ctx)
	if err != nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	ready, all := len(s.members.ready[p.Name]), s.allocated(records, p.Name)+len(s.members.ready[p.Name])
	if ready < p.Capacity.BufferMin || all < p.Capacity.PoolMin {
		s.filling[p.Name] = true
	}
	if ready >= p.Capacity.BufferMax {
		s.filling[p.Name] = false
	}
	return s.filling[p.Name] && all < p.Capacity.PoolMax && time.Now().After(s.trouble[p.Name].until)
}

// makeMember makes a member. After an error, which it logs, nothing of it is left, or the
// sweep goes on.
func (s *Stock) makeMember(ctx context.Context, p *record.Pool, spec record.Spec) error {
	if !s.m.tracker.begin() {
		return errClosing
	}
	defer s.m.tracker.end()
	s.making.Lock()
	defer s.making.Unlock()
	ctx, giveUp := context.WithCancel(ctx)
	defer giveUp()
	m, start, at := s.m, time.Now(), now()
	r := record.Record{
		ID: m.newID(), State: record.Prepared, Spec: spec, Token: m.life.cfg.NewToken(),
		Created: at, Changed: at,
		Pool: record.PoolUse{Name: p.Name, Revision: p.Revision(&spec)},
	}
	m.life.cfg.upIn(&r)
	unlock, err := m.locks.Lock(ctx, r.ID)
	if err != nil {
		return err
	}
	unlock = sync.OnceFunc(unlock)
	defer unlock()
	defer begin(s, work{r.ID, p.Name, giveUp})() // the command that warms it may take minutes
	err = table.Within(ctx, storeLimit, "store:member", func(ctx context.Context) error { return m.life.Store.Insert(ctx, &r) })
	if errs.Is(err, errs.Exhausted) {
		return err
	}
	var steps []table.Step
	if err == nil {
		steps, err = table.Acquire(ctx, memberRows(m.life.rows), &r)
	}
	if err == nil {
		err = warm(ctx, m.life.Deps, p, &r)
	}
	if err == nil {
		err = s.addMember(&r, p.Warm == "" && p.Ready == "" && len(spec.Prestart) == 0, unlock)
	}
	if err != nil && ctx.Err() != nil {
		err = errors.Join(errClosing, err)
	}
	m.life.log(ctx, opPrepare, &r, start, steps, err)
	if err != nil {
		s.release(ctx, &r)
		return err
	}
	s.counted(p.Name, record.PoolMade, time.Since(start))
	return nil
}

// warm runs the command of p in a member, and then its check until that succeeds.
func warm(ctx context.Context, d Deps, p *record.Pool, r *record.Record) error {
	if p.Warm != "" {
		err := table.Pass("warm", func() error { return runIn(ctx, d, r, "the command that warms it failed", p.Warm, warmLimit) })
		if err != nil {
			return err
		}
	}
	if p.Ready == "" {
		return nil
	}
	return table.Pass("ready", func() error {
		for late := time.Now().Add(readyLimit); ; {
			err := runIn(ctx, d, r, "it was not ready after "+readyLimit.String(), p.Ready, readyTry)
			if err == nil || errors.Is(err, errDied) || ctx.Err() != nil || time.Now().After(late) {
				return err
			}
			select {
			case <-ctx.Done():
			case <-time.After(readyPause):
			}
		}
	})
}

// runIn runs a line with the shell of a member for limit at most. If the line fails, the error says
// bad.
func runIn(ctx context.Context, d Deps, r *record.Record, bad, line string, limit time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit+stepLimit, table.ErrTooLong) // its agent may be wedged
	defer cancel()
	err := awaitAgent(ctx, d, r, func(ctx context.Context, r *record.Record) error {
		return d.Agents.Run(ctx, r, line, limit)
	})
	if err == nil {
		return nil
	}
	if alive, perr := d.Cgroups.Populated(r.ID); perr == nil && !alive {
		return errs.Wrap(errors.Join(errDied, err), errs.WrongState, "it died before it was ready")
	}
	return errs.Wrap(err, errs.WrongState, "%s: %.800s", bad, err.Error())
}

// addMember is add for a member, and watches over its processes. After an error the member is still locked.
func (s *Stock) addMember(r *record.Record, open bool, unlock func()) error {
	ctx, forget := context.WithCancel(s.m.ctx)
	gone, err := s.m.life.Cgroups.Watch(ctx, r.ID)
	if err != nil {
		forget()
		return fmt.Errorf("watch: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	unlock()
	s.work.done(r.ID)
	s.members.ready[r.Pool.Name] = append(s.members.ready[r.Pool.Name], &member{*r, open, forget})
	delete(s.trouble, r.Pool.Name)
	id := r.ID
	s.m.observers.Go(func() {
		<-gone
		if ctx.Err() == nil {
			if err := s.m.Recover(s.m.ctx, id); err != nil && !errors.Is(err, errClosing) {
				s.m.life.cfg.Log.Error("cannot release a member of a pool that died; the sweep tries again", "sandbox", id, "err", err)
			}
		}
	})
	return nil
}

// removeMember makes a member no longer ready, and returns it, or nil if it was not.
func (s *Stock) removeMember(r *record.Record) *member {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range s.members.ready[r.Pool.Name] {
		if c.ID == r.ID {
			return s.pick(r.Pool.Name, i)
		}
	}
	return nil
}

// pick takes a member out of those that are ready. The caller holds s.mu.
func (s *Stock) pick(pool string, i int) *member {
	c := s.members.ready[pool][i]
	s.members.ready[pool] = slices.Delete(s.members.ready[pool], i, i+1)
	c.forget()
	return c
}

// keepMember makes a member ready again that was taken in vain, or was looked at.
// Preconditions: its lock is held.
func (s *Stock) keepMember(ctx context.Context, c *member) error {
	if err := s.addMember(&c.Record, c.open, func() {}); err != nil {
		return errors.Join(err, s.release(ctx, &c.Record))
	}
	return nil
}

// takeMember makes r the record of a ready member, and locks it. A creation that names a
// pool takes one of that; any other one of a pool whose template adds nothing to it. If
// there is none, r.Pool.Miss says why, for a creation that names a pool. The caller holds
// s.mu.
func (s *Stock) takeMember(r *record.Record) (c *member, unlock func()) {
	pools := []string{r.Spec.Pool}
	if r.Spec.Pool == "" {
		pools = slices.Sorted(maps.Keys(s.members.ready))
	}
	r.Pool = record.PoolUse{Name: r.Spec.Pool, Miss: "no member is ready"}
	for _, pool := range pools {
		for i, c := range s.members.ready[pool] {
			if r.Spec.Pool == "" && (!c.open || len(r.Spec.Prestart) > 0) {
				break
			}
			if r.Pool.Miss = c.Spec.Unfit(&r.Spec); r.Pool.Miss != "" {
				break // all of them are alike, except while a new revision comes
			}
			unlock, ok := s.m.locks.TryLock(c.ID)
			if !ok {
				continue
			}
			s.pick(pool, i)
			r.ID, r.Prepared, r.MemberToken, r.Pool = c.ID, true, c.Token, c.Pool
			return c, unlock
		}
	}
	if r.Spec.Pool == "" {
		r.Pool = record.PoolUse{}
	}
	return nil, nil
}

// place gives r an ID: that of a member (c) or of a prepared slot, which it locks, or a new
// one. It refuses r if the pool that r names has no place for it. The place is left when
// the store knows r.
func (s *Stock) place(ctx context.Context, r *record.Record) (c *member, unlock, leave func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c, unlock = s.takeMember(r); c == nil {
		if r.Spec.Pool != "" {
			if err := s.roomIn(ctx, r.Spec.Pool); err != nil {
				return nil, nil, nil, err
			}
		}
		if unlock = s.take(r); unlock == nil {
			r.ID = s.m.newID()
		}
	}
	pool, id := r.Pool.Name, r.ID
	if pool == "" {
		return c, unlock, func() {}, nil
	}
	if s.pending[pool] == nil {
		s.pending[pool] = map[string]bool{}
	}
	s.pending[pool][id] = true
	return c, unlock, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.pending[pool], id)
	}, nil
}

// roomIn refuses a creation without a member in a pool that has poolMax, or that there is
// not. The caller holds s.mu.
func (s *Stock) roomIn(ctx context.Context, name string) error {
	pools, err := s.m.life.Store.Pools(ctx)
	if err != nil {
		return fmt.Errorf("find pool %s: %w", name, err)
	}
	at := slices.IndexFunc(pools, func(p record.Pool) bool { return p.Name == name })
	if at < 0 {
		return record.NoPool(name)
	}
	records, err := s.m.life.Store.List(ctx)
	if err != nil {
		return fmt.Errorf("count the sandboxes of pool %s: %w", name, err)
	}
	sandboxes := s.allocated(records, name)
	all := sandboxes + len(s.members.ready[name])
	if s.work.pool == name {
		all++
	}
	if limit := pools[at].Capacity.PoolMax; all >= limit {
		s.count(name, record.PoolRefused, 0)
		return errs.Retry(errs.Wire(errs.New(errs.Exhausted, "pool %s has no ready member that this sandbox can take, and no room for "+
			"another: it has %s of at most %d; delete some, try again, or leave out poolRef", name,
			errs.Count(sandboxes, "sandbox", "sandboxes"), limit), record.CodePoolFull), retryPool)
	}
	s.count(name, record.PoolMiss, 0)
	return nil
}

// retire releases the ready members of a pool that are of another revision, too old, or
// more than bufferMax.
func (s *Stock) retire(ctx context.Context, p record.Pool, revision string) {
	s.mu.Lock()
	s.today[p.Name] = revision
	s.mu.Unlock()
	s.dropMembers(ctx, func(c *member, left int) bool {
		return c.Pool.Name == p.Name && (left > p.Capacity.BufferMax || c.Pool.Revision != revision ||
			p.MaxAge > 0 && now().Sub(c.Created) >= p.MaxAge)
	})
}

// dismiss releases the ready members of pools that are no longer there.
func (s *Stock) dismiss(ctx context.Context, pools []record.Pool) {
	there := map[string]bool{}
	for _, p := range pools {
		there[p.Name] = true
	}
	s.dropMembers(ctx, func(c *member, _ int) bool { return !there[c.Pool.Name] })
}

// dropMembers releases the ready members for which which is true, the oldest first, and
// reports whether there were any. left is how many of its pool are ready, with it.
func (s *Stock) dropMembers(ctx context.Context, which func(c *member, left int) bool) bool {
	s.making.Lock()
	defer s.making.Unlock()
	var ids []string
	s.mu.Lock()
	for pool := range s.members.ready {
		for i := 0; i < len(s.members.ready[pool]); {
			if !which(s.members.ready[pool][i], len(s.members.ready[pool])) {
				i++
				continue
			}
			ids = append(ids, s.pick(pool, i).ID)
			s.count(pool, record.PoolDropped, 0)
		}
	}
	s.mu.Unlock()
	slices.Sort(ids)
	s.releaseAll(ctx, ids) //nolint:errcheck // logged; the sweep goes on
	return len(ids) > 0
}

// healMember is heal for a member.
// Preconditions: its lock is held.
func (s *Stock) healMember(ctx context.Context, r *record.Record, kinds []string) error {
	if c := s.removeMember(r); c != nil {
		lost, err := s.lost(ctx, memberRows(s.m.life.rows), r, kinds)
		if lost == "" {
			alive, perr := s.m.life.Cgroups.Populated(r.ID)
			if alive || perr != nil {
				return errors.Join(err, perr, s.keepMember(ctx, c))
			}
			lost = "processes"
		}
		s.m.life.cfg.Log.Warn("a member of a pool cannot be used any more; it is released", "sandbox", r.ID, "pool", r.Pool.Name,
			"lost", lost)
		s.counted(r.Pool.Name, record.PoolDropped, 0)
	}
	s.Look()
	return s.release(ctx, r)
}

// memberRows are the rows that a member has.
func memberRows(rows []table.Row) (all []table.Row) {
	for _, row := range rows {
		if row.Claim != nil {
			all = append(all, row)
		}
	}
	return all
}
