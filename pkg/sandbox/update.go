package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// tellLimit bounds how long the daemon tries to give an agent the new limits: they hold
// without it.
const tellLimit = 2 * time.Second

// Update changes the terms of a sandbox that runs or is paused: its limits and its
// network policy. The new terms are durable before the first of them holds; if the
// daemon dies in between, the next one makes them hold. A limit below present use is
// errs.WrongState, with the numbers. A limit that this runtime cannot change while the
// sandbox lives is errs.Unsupported. A network policy holds at once: open flows that it
// denies have ended when Update returns. A policy that the sandbox may not have is refused: see
// Record.Admits and Config.CheckPolicy. The sandbox then no longer uses the policy that it was
// given by name.
func (m *Manager) Update(ctx context.Context, idOrName string, change func(*record.Terms) error) (record.Record, error) {
	start := time.Now()
	return m.with(ctx, "update", idOrName, func(r *record.Record) error {
		if r.State != record.Running && r.State != record.Paused {
			return wrongState(r, record.Running)
		}
		t := r.Spec.Terms()
		if err := change(&t); err != nil {
			return err
		}
		limits, network := t.Limits != r.Spec.Limits, !t.SameNetwork(r.Spec.Terms()) || t.Policy != r.Spec.Policy
		if !limits && !network {
			return nil
		}
		if network {
			if err := m.life.admits(r, t.Network); err != nil {
				return err
			}
		}
		m.tracker.setLimited(r.ID, false) // the next sweep makes sure of them
		if network && t.Policy.Name != "" {
			t.Policy.Left = true
		}
		err := m.life.update(ctx, r, t, limits, network)
		m.life.log(ctx, "update", r, start, nil, err)
		return err
	})
}

// update makes t hold. limits and network say which part of it is new.
func (l *life) update(ctx context.Context, r *record.Record, t record.Terms, limits, network bool) error {
	if l.Runtimes[r.Spec.Runtime].HostPids > 0 && t.Limits.Pids != r.Spec.Pids {
		return errs.New(errs.Unsupported, "the process limit of sandbox %s is enforced by %s itself and cannot be changed; create another "+
			"sandbox with --pids %d", r.ID, r.Spec.Runtime, t.Limits.Pids)
	}
	old, next := *r, *r
	next.Spec.Limits, next.Spec.Network, next.Spec.NetworkPolicy, next.Spec.Policy = t.Limits, t.Network, t.NetworkPolicy, t.Policy
	if limits {
		next.Updated = now()
		if err := errors.Join(l.fitsMemory(&next), l.fitsDisk(&next)); err != nil {
			return err
		}
	}
	hold := func(r *record.Record) (err error) {
		if limits {
			err = l.limit(ctx, r)
		}
		if network {
			err = errors.Join(err, l.register(ctx, r))
		}
		return err
	}
	if err := l.put(ctx, next); err != nil {
		return errors.Join(err, l.put(ctx, old)) // the store may have written the record despite the error
	}
	if err := hold(&next); err != nil {
		return errors.Join(err, l.put(ctx, old), hold(&old))
	}
	*r = next
	l.bus.Publish(events.Updated, r)
	if limits && r.State == record.Running {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tellLimit)
		defer cancel()
		if err := l.Agents.Tell(ctx, r); err != nil {
			l.cfg.Log.Debug("cannot tell an agent its new limits", "sandbox", r.ID, "err", err)
		}
	}
	return nil
}

// Reregister gives the egress the policy of a sandbox again, because what belongs to it has
// changed: its secrets. It does nothing for a sandbox that the egress does not have.
func Reregister(ctx context.Context, m *Manager, id string) error {
	_, err := m.with(ctx, "apply the secrets of", id, func(r *record.Record) error { return m.life.registerAgain(ctx, r) })
	return err
}

// TryReregister is Reregister for the sweep: it waits for no other operation. done is false, and
// err nil, if one holds the sandbox.
func TryReregister(ctx context.Context, m *Manager, id string) (done bool, err error) {
	if !m.tracker.begin() {
		return false, errClosing
	}
	defer m.tracker.end()
	unlock, ok := m.locks.TryLock(id)
	if !ok {
		return false, nil
	}
	defer unlock()
	r, err := m.Get(ctx, id)
	if err == nil {
		err = m.life.registerAgain(ctx, &r)
	}
	if err != nil {
		return false, fmt.Errorf("apply the secrets of %s: %w", id, err)
	}
	return true, nil
}

// registerAgain is register for a sandbox that may be in any state. One whose start goes on is
// locked until that has ended, or waits for its turn and has nothing yet.
func (l *life) registerAgain(ctx context.Context, r *record.Record) error {
	if !live(r.State) {
		return nil // a start registers it
	}
	return l.register(ctx, r)
}

// register gives the egress the policy of the record.
func (l *life) register(ctx context.Context, r *record.Record) error {
	i := slices.IndexFunc(l.rows, func(row table.Row) bool { return row.Name == "egress" })
	_, err := table.Do(context.WithoutCancel(ctx), "up:", l.rows[i], l.rows[i].Up, r)
	return err
}

// limit makes the limits of the record hold.
func (l *life) limit(ctx context.Context, r *record.Record) error {
	return l.write(ctx, r, true, true)
}

// limitAgain is limit for the sweep. A limit that is below present use by now, because
// the daemon died before it held, waits until it fits; the others hold.
func (l *life) limitAgain(ctx context.Context, r *record.Record) error {
	memory, disk := l.fitsMemory(r), l.fitsDisk(r)
	return errors.Join(memory, disk, l.write(ctx, r, memory == nil, disk == nil))
}

func (l *life) write(ctx context.Context, r *record.Record, memory, disk bool) error {
	return bounded(ctx, stepLimit, "limit", func(ctx context.Context) error {
		c := cgroupLimits(l.Deps, r)
		c.KeepMemory = !memory
		err := errors.Join(
			l.Cgroups.Limit(ctx, r.ID, c),
			l.Cgroups.LimitCPU(ctx, r.ID, r.Spec.CPUMillis))
		if disk && r.Spec.DiskBytes > 0 {
			err = errors.Join(err, l.Disks.LimitDisk(ctx, r.ID, r.Spec.DiskBytes))
		}
		return err
	})
}

// fitsMemory refuses a limit below present use: the kernel would kill for it.
func (l *life) fitsMemory(r *record.Record) error {
	held, err := l.Cgroups.MemoryHeld(r.ID)
	if err != nil {
		return fmt.Errorf("read the memory in use: %w", err)
	}
	c := cgroupLimits(l.Deps, r)
	if c.MemoryBytes > 0 && held > c.MemoryBytes+c.HeadroomBytes {
		return errs.New(errs.WrongState, "sandbox %s uses %s of memory; with a limit of %s the kernel would kill it: free memory in it "+
			"first", r.ID, record.Mebibytes(held-c.HeadroomBytes), record.Mebibytes(c.MemoryBytes))
	}
	return nil
}

// fitsDisk refuses a limit below present use: not every pool lets files be deleted from
// a disk that is over its limit.
func (l *life) fitsDisk(r *record.Record) error {
	if r.Spec.DiskBytes == 0 {
		return nil
	}
	used, limit, err := l.Disks.Usage(r.ID)
	if err != nil {
		return fmt.Errorf("read the disk in use: %w", err)
	}
	if r.Spec.DiskBytes < limit && used > r.Spec.DiskBytes {
		return errs.New(errs.WrongState, "the disk of sandbox %s holds %s, more than %s: remove files first", r.ID, record.Mebibytes(used),
			record.Mebibytes(r.Spec.DiskBytes))
	}
	return nil
}
