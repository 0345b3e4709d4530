package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// sweepers bounds how many sandboxes are reconciled at once. There are several so that
// a stuck sandbox delays no other, and hundreds of them after a reboot do not delay the
// API.
const sweepers = 8

// Recover brings host and store into agreement: it finishes what a dead daemon began,
// ends sandboxes that died without a daemon, adopts those that live, and releases what
// no record names. It runs before the API opens, and every minute while sandboxes come
// and go. It leaves alone a sandbox that another operation holds.
//
// The host is listed before the store. A record is written before the first resource it
// names, so a resource without a record was left behind. In the other order a sandbox
// born between the two lists would look like a stray.
//
// With ids it does so for these alone, which were reported to have lost something on
// the host.
//
// If a list fails, Recover stops before it has touched anything. Errors with single
// sandboxes are joined; the next run tries again.
func (m *Manager) Recover(ctx context.Context, ids ...string) error {
	if !m.tracker.begin() {
		return errClosing
	}
	defer m.tracker.end()
	return recovery{m}.run(ctx, ids)
}

// A recovery is a Manager while it recovers.
type recovery struct{ *Manager }

// run is Recover.
func (m recovery) run(ctx context.Context, ids []string) error {
	if len(ids) > 0 {
		var errz []error
		for _, id := range ids {
			errz = append(errz, m.reconcileOne(ctx, id))
		}
		return errors.Join(errz...)
	}
	m.sweeps.Add(1)
	defer m.stock.Look()
	policies := PoliciesOf(m.Manager).configure(ctx) // first: sandboxes move to what it changes
	snapshots := m.snapshots.recover(ctx)            // first: a snapshot that was cut short leaves its sandbox frozen
	held, err := m.held(ctx)
	if err != nil {
		return fmt.Errorf("recover: %w", err)
	}
	records, err := m.life.Store.List(ctx)
	if err != nil {
		return fmt.Errorf("recover: list the store: %w", err)
	}
	unreadable, err := m.life.Store.Unreadable(ctx)
	if err != nil {
		return fmt.Errorf("recover: list the store: %w", err)
	}
	for _, id := range unreadable {
		delete(held, id)
	}
	var todo []func() error
	for _, r := range records {
		kinds := held[r.ID]
		delete(held, r.ID)
		todo = append(todo, func() error { return m.reconcile(ctx, r.ID, kinds) })
	}
	if m.life.cfg.NoSweep == "" {
		for id := range held {
			todo = append(todo, func() error { return m.releaseStray(ctx, id) })
		}
	} else if len(held) > 0 {
		m.life.cfg.Log.Warn("host resources without a record are left alone", "count", len(held), "reason", m.life.cfg.NoSweep)
	}
	var volumes error
	if m.life.cfg.NoSweep == "" {
		volumes = m.life.dropVolumes(ctx)
	}
	return errors.Join(policies, snapshots, inParallel(todo), volumes)
}

// held lists by ID which rows of the table are held on the host. It skips names that
// are no ID of this instance.
func (m recovery) held(ctx context.Context) (map[string][]string, error) {
	rows := m.life.rows
	lists := make([][]string, len(rows))
	var todo []func() error
	for i, row := range rows {
		if row.Held == nil {
			continue
		}
		todo = append(todo, func() (err error) {
			if lists[i], err = m.list(ctx, row); err != nil {
				return fmt.Errorf("list %s: %w", row.Name, err)
			}
			return nil
		})
	}
	if err := inParallel(todo); err != nil {
		return nil, err
	}
	held := map[string][]string{}
	for i, ids := range lists {
		for _, id := range ids {
			if record.IsID(id) && strings.HasPrefix(id, m.life.cfg.Instance.String()) {
				held[id] = append(held[id], rows[i].Name)
			}
		}
	}
	return held, nil
}

func (m recovery) list(ctx context.Context, row table.Row) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, row.Limit)
	defer cancel()
	return row.Held(ctx)
}

func inParallel(todo []func() error) error {
	var (
		wg   sync.WaitGroup
		errs = make([]error, len(todo))
		sem  = make(chan struct{}, sweepers)
	)
	for i, f := range todo {
		sem <- struct{}{}
		wg.Go(func() {
			defer func() { <-sem }()
			errs[i] = f()
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// reconcile brings one record and its part of the host into agreement. kinds
// are the rows that were held a moment ago.
func (m recovery) reconcile(ctx context.Context, id string, kinds []string) error {
	unlock, ok := m.locks.TryLock(id)
	if !ok {
		return nil // the holder of the lock takes care of it
	}
	if m.halfAsleep(ctx, id) && m.tracker.begin() {
		go func() {
			defer m.tracker.end()
			defer unlock()
			m.finishSleep(id, kinds)
		}()
		return nil
	}
	defer unlock()
	return m.reconcileLocked(ctx, id, kinds)
}

func (m recovery) reconcileLocked(ctx context.Context, id string, kinds []string) error {
	if m.tracker.queued(id) {
		return nil // it waits for its turn
	}
	r, ok, err := m.life.Store.Get(ctx, id)
	if err != nil || !ok {
		return err
	}
	err = errors.Join(m.catchUp(ctx, &r), m.heal(ctx, &r, kinds))
	if err != nil && !errors.Is(err, ErrLingering) { // the log and the metric know it
		return fmt.Errorf("recover %s, which is %s: %w", id, r.State, err)
	}
	return nil
}

// heal is the table of recovery (docs/design/lifecycle.md).
func (m recovery) heal(ctx context.Context, r *record.Record, kinds []string) error {
	if r.State == record.Prepared {
		return m.stock.heal(ctx, r, kinds)
	}
	start := time.Now()
	may := m.life.cfg.NoSweep == ""
	if err := m.trustHost(ctx, r); err != nil {
		return err
	}
	switch {
	case r.State == record.Deleting && !may:
		return nil
	case r.State == record.Deleting, may && isDue(m.life.due(r)):
		return m.eraseAgain(ctx, r)
	case r.State == record.Ended:
		return m.tidy(ctx, r, m.life.fleeting(), kinds)
	}
	if done, err := m.recoverAsleep(ctx, r, kinds); done || err != nil {
		return err
	}
	d, dead, err := m.examine(ctx, r)
	if err != nil {
		return err
	}
	if dead && live(r.State) {
		if withHost(ctx, &m.life, r, d) {
			return nil
		}
		if h := m.tracker.get(r.ID); h != nil { // its observer waits for the lock that is held here
			m.life.explainCrash(r, &d, m.tracker.ends(h))
		}
	}
	if !dead {
		err = m.adopt(ctx, r)
		var merr error
		if d, dead, merr = m.mend(ctx, r, kinds); !dead {
			return errors.Join(err, merr)
		}
		if withHost(ctx, &m.life, r, d) {
			return err
		}
	}
	m.tracker.remove(r.ID, errEnded)
	err = m.life.end(ctx, r, d)
	m.logDone(ctx, opRecoverEnd, r, start, nil, err)
	return err
}

// eraseAgain erases a sandbox whose deletion did not come to its end, or whose time is
// up.
func (m recovery) eraseAgain(ctx context.Context, r *record.Record) error {
	start := time.Now()
	steps, err := m.erase(ctx, r, func() {})
	m.logDone(ctx, opErase, r, start, steps, err)
	return err
}

// logDone is life.log for what is not logged until it is done: the sweep comes back to a
// sandbox that lingers every minute.
func (m recovery) logDone(ctx context.Context, op string, r *record.Record, start time.Time, steps []table.Step, err error) {
	if !errors.Is(err, ErrLingering) {
		m.life.log(ctx, op, r, start, steps, err)
	}
}

// trustHost makes the record of a running sandbox Running. It matters only while
// Config.NoSweep is set, after a restored backup: a record may then be older than the
// life of its sandbox. At the time of the backup the sandbox had ended, or was about
// to, or ran before the last reboot, and it was started since. A record that this
// daemon wrote is never older.
func (m recovery) trustHost(ctx context.Context, r *record.Record) error {
	if m.life.cfg.NoSweep == "" || r.State == record.Deleting || r.Changed.After(m.began) {
		return nil
	}
	known := m.tracker.get(r.ID) != nil
	same := live(r.State) && r.State != record.Hibernating && r.BootID == m.life.cfg.BootID
	if known && same || same && r.State != record.Running {
		return nil
	}
	if alive, err := m.life.Cgroups.Populated(r.ID); err != nil || !alive {
		return err
	}
	// It may have been paused since the backup, or be the source of a snapshot that was
	// cut short.
	if err := bounded(ctx, freezeLimit, "thaw", func(ctx context.Context) error { return m.life.Cgroups.Thaw(ctx, r.ID) }); err != nil ||
		same {
		return err
	}
	if r.State == record.Hibernating { // also if its record has an image: it may have woken since the backup
		if err := hibernator(m).resumeUntilAnswered(ctx, r); err != nil {
			return err
		}
	}
	n := *r
	death{}.write(&n)
	m.life.cfg.upIn(&n)
	n.State, n.Changed = record.Running, now()
	n.Started, n.Hibernation = n.Changed, nil
	if err := m.life.put(ctx, n); err != nil {
		return err
	}
	m.life.cfg.Log.Warn("a sandbox runs although its record says otherwise; it keeps running", "sandbox", r.ID, "state", string(r.State),
		"reason", m.life.cfg.NoSweep)
	*r = n
	m.life.bus.Publish(string(record.Running), r)
	return nil
}

// examine says whether a sandbox is dead or has to die, and why.
func (m recovery) examine(ctx context.Context, r *record.Record) (d death, dead bool, err error) {
	switch {
	case r.State == record.Stopping && r.Reason != "":
		return death{reason: r.Reason, message: r.Message, code: r.ExitCode, output: r.LastOutput}, true, nil
	case r.State.Beginning():
		why := ": sandboxd stopped in the middle; try again"
		if r.BootID != m.life.cfg.BootID {
			why = ": the host went down in the middle; try again"
		}
		return failure(r.State, why), true, nil
	case r.BootID != m.life.cfg.BootID:
		return m.ofBackup(r, hostDown(r.State)), true, nil
	}
	alive, err := m.life.Cgroups.Populated(r.ID)
	if err != nil || alive && r.State != record.Stopping {
		return death{}, false, err
	}
	if d = m.life.diagnose(ctx, r); live(r.State) && !d.well() && !m.life.cfg.sameUserspace(r) {
		d = hostDown(r.State)
	}
	return m.ofBackup(r, d), true, nil
}

// adopt takes over a live sandbox: it finishes the intent, restores what the sandbox
// may reach, and watches it. A sandbox that this Manager already watches needs only the
// first. Limits are written again: a daemon may have died after it made new ones durable
// and before they held. One that cannot be registered, because the key of the secrets is
// missing, say, is taken over all the same: it opens no connection, and each sweep tries again.
func (m recovery) adopt(ctx context.Context, r *record.Record) error {
	known := m.tracker.get(r.ID) != nil
	var err error
	if !known || m.tracker.unregistered(r.ID) { // a new daemon's egress does not know what the old one's knew
		err = m.life.register(ctx, r)
	}
	if !known {
		h := m.tracker.add(m.ctx, r.ID)
		close(h.settled)
		m.watch(h, r.Spec.Runtime)
	}
	m.tracker.setUnregistered(r.ID, err != nil)
	m.life.past.note(r, m.life.counted(r), !known)
	err = errors.Join(err, m.keepLimits(ctx, r))
	if !known { // the old daemon's ports ended with it; a port that is taken by now ends no sandbox
		err = errors.Join(err, m.life.Ports.Open(ctx, r.ID, m.life.cfg.Addr(r.Slot), r.Spec.Publish))
	}
	switch r.State {
	case record.Pausing:
		return errors.Join(err, m.life.pause(ctx, r))
	case record.Resuming:
		return errors.Join(err, m.life.resume(ctx, r))
	}
	return err
}

// limitTurns is in how many sweeps every sandbox has its limits written again although
// nobody has changed them here: another program may have. To compare the dozen files of
// each of 1000 sandboxes in every sweep would take half a second of CPU.
const limitTurns = 32

// keepLimits writes the limits of r again if they are new to this Manager, or could not be
// written last time, or if it is their turn.
func (m recovery) keepLimits(ctx context.Context, r *record.Record) error {
	turn := uint32(strings.IndexByte(instance.Alphabet, r.ID[len(r.ID)-1]))
	if m.tracker.limited(r.ID) && (turn+m.sweeps.Load())%limitTurns != 0 {
		return nil
	}
	err := m.life.limitAgain(ctx, r)
	m.tracker.setLimited(r.ID, err == nil)
	return err
}

// tidy releases those rows of kinds that a sandbox without processes should not hold.
func (m recovery) tidy(ctx context.Context, r *record.Record, rows []table.Row, kinds []string) error {
	rows = slices.DeleteFunc(rows, func(row table.Row) bool { return !slices.Contains(kinds, row.Name) })
	if len(rows) == 0 {
		return nil
	}
	err := m.life.kill(ctx, r.ID, killLimit)
	if err == nil {
		_, err = table.Release(context.WithoutCancel(ctx), rows, r)
	}
	m.life.settle(r.ID, err)
	return err
}

// releaseStray releases resources that have no record. A disk is moved aside, not
// deleted: it may be all that is left of a lost store.
func (m recovery) releaseStray(ctx context.Context, id string) error {
	unlock, ok := m.locks.TryLock(id)
	if !ok {
		return nil
	}
	defer unlock()
	start := time.Now()
	r := &record.Record{ID: id}
	err := m.life.kill(ctx, id, killLimit)
	m.life.settle(id, err)
	if errors.Is(err, ErrLingering) {
		return nil // the next sweep goes on
	}
	if err != nil {
		return fmt.Errorf("release stray %s: %w", id, err)
	}
	steps, err := table.Release(context.WithoutCancel(ctx), m.life.fleeting(), r)
	if err == nil {
		err = bounded(ctx, stepLimit, "down:disk", func(ctx context.Context) error { return m.life.Disks.MoveStray(ctx, id) })
	}
	m.life.log(ctx, opRelease, r, start, steps, err)
	if err != nil {
		return fmt.Errorf("release stray %s: %w", id, err)
	}
	return nil
}

// lostLink is the loss of r if its link is gone.
func lostLink(d Deps, r *record.Record) table.Loss {
	if d.Runtimes[r.Spec.Runtime].HoldsLink {
		return table.Fatal
	}
	return table.Mendable
}

// reconcileOne compares one sandbox, which was reported to have lost something, with
// its record. Unlike reconcile it waits for the lock.
func (m recovery) reconcileOne(ctx context.Context, id string) error {
	if r, ok, err := m.life.Store.Get(ctx, id); err != nil || !ok || !live(r.State) && r.State != record.Prepared {
		return err // a sandbox that ends loses everything
	}
	unlock, err := m.locks.Lock(ctx, id)
	if err != nil {
		return busy("inspect", id, err)
	}
	defer unlock()
	return m.reconcileLocked(ctx, id, nil)
}

// mend finds the rows that r, which lives, no longer holds, and brings back those it
// can. If the sandbox cannot go on without the others, dead is true and d says why.
// kinds are the rows that were held a moment ago.
func (m recovery) mend(ctx context.Context, r *record.Record, kinds []string) (d death, dead bool, err error) {
	for _, row := range m.life.rows {
		if row.Held == nil || !row.Wants(r) || row.Name == "egress" && m.tracker.unregistered(r.ID) { // adopt has just tried
			continue
		}
		held, whole, err := m.has(ctx, row, r, slices.Contains(kinds, row.Name))
		if err != nil {
			return death{}, false, fmt.Errorf("check its %s: %w", row.Name, err)
		}
		if whole || !m.tracker.setLost(r.ID, row.Name) {
			continue
		}
		what, up := table.Harmless, row.Up
		switch {
		case held && row.Rejoin != nil:
			what, up = table.Mendable, row.Rejoin
		case row.Lost != nil:
			what = row.Lost(r)
		}
		log := m.life.cfg.Log.With("sandbox", r.ID, "lost", row.Name)
		switch {
		case what == table.Mendable:
			start := time.Now()
			_, err := table.Do(context.WithoutCancel(ctx), "up:", row, up, r)
			m.tracker.setFound(r.ID, row.Name)
			if err != nil {
				return death{}, false, fmt.Errorf("restore a resource that was removed on the host: %w", err)
			}
			log.Warn("something on the host removed a resource of a sandbox; it was restored", "dur", time.Since(start))
		case what == table.Fatal && m.life.cfg.NoSweep == "":
			log.Error("something on the host removed a resource of a sandbox; it cannot be restored, so the sandbox is ended")
			return death{
				reason: record.RuntimeCrash,
				message: fmt.Sprintf("something on the host other than sandboxd removed its %s, and it cannot run without it; "+
					"create it again", row.Name),
			}, true, nil
		default:
			log.Warn("something on the host removed a resource of a sandbox; the sandbox keeps running without it")
		}
	}
	return death{}, false, nil
}

// has reports whether r, which is locked, holds anything of a row, and all of it. had
// says whether the row was listed; a row that was being made then may be missing from
// the list.
func (m recovery) has(ctx context.Context, row table.Row, r *record.Record, had bool) (held, whole bool, err error) {
	if !had {
		ids, err := m.list(ctx, row)
		if err != nil || !slices.Contains(ids, r.ID) {
			return false, false, err
		}
	}
	if row.Whole == nil {
		return true, true, nil
	}
	ctx, cancel := context.WithTimeout(ctx, row.Limit)
	defer cancel()
	whole, err = row.Whole(ctx, r)
	return true, whole, err
}
