package schedule

import (
	"context"
	"fmt"
	"slices"

	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Removed is what Remove has removed.
type Removed struct {
	Backups []target.Backup
	Packs   int
	Bytes   int64  // of both
	Kept    string // why packs that nothing may need are still there; empty: none is
}

// Remove removes backups that count as this state's, and the packs that no other backup needs. If one of
// names may not be removed, nothing is. It waits for a backup that is being taken. One that is cut off leaves
// backups that count for nothing; the next backup, or the same call, removes the rest of them.
func (k *Keeper) Remove(ctx context.Context, names []string) (r Removed, err error) {
	if k.AppendOnly() {
		return r, errs.New(errs.WrongState, "no backup was removed from %s: %v", k.Target, target.ErrAppendOnly)
	}
	if err := k.enter(ctx); err != nil {
		return r, err
	}
	defer func() { <-k.turn }()
	ctx = context.WithoutCancel(ctx) // a client that leaves has still asked for it
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s has not removed it within %s", k.Target, limit))
	defer cancel()
	mine, all, err := k.own(ctx)
	if err != nil {
		return r, err
	}
	gone, err := k.removable(names, mine, all)
	if err != nil {
		return r, err
	}
	for _, b := range gone {
		if err := target.Drop(ctx, k.Target, b.Name); err != nil {
			return r, fmt.Errorf("%s is not removed, or not all of it; the same command goes on: %w", b.Name, err)
		}
		k.Log.Info("backup removed, as was asked", "name", b.Name, "whole", b.Whole)
		r.Backups = append(r.Backups, b)
		r.Bytes += max(0, b.Bytes)
		all = slices.DeleteFunc(all, func(one target.Backup) bool { return one.Name == b.Name })
	}
	p, err := k.prune(ctx, all, nil)
	r.Packs, r.Bytes, r.Kept = p.packs, r.Bytes+p.bytes, p.kept
	if err != nil {
		k.Log.Warn("packs that no backup needs are not removed; the next run tries again", "err", err)
		r.Kept = err.Error()
	}
	return r, nil
}

// removable finds the backups of names, or says why one of them may not be removed.
func (k *Keeper) removable(names []string, mine, all []target.Backup) (gone []target.Backup, err error) {
	w := k.Whose()
	for _, name := range names {
		i := slices.IndexFunc(all, func(b target.Backup) bool { return b.Name == name })
		if i < 0 {
			return nil, errs.New(errs.NotFound, "%s has no backup %q; `sandboxctl system backups ls` lists them", k.Target, name)
		}
		b := all[i]
		switch w.Of(b) {
		case target.Unknown:
			return nil, errs.New(errs.WrongState, "%s is not removed: it has the name of this host, and another state has written it; if "+
				"no other host writes such backups, `sandboxctl system backups adopt %s` makes it this state's, and then it can be removed",
				b.Name, b.Name)
		case target.Other:
			return nil, errs.New(errs.WrongState, "%s is not removed: it is of another host or instance, %s, which may need it: remove it "+
				"there; if that is gone for good, `sandboxctl system backups adopt %s` makes it this state's, and then it can be removed",
				b.Name, b.Owner, b.Name)
		}
		if !slices.Contains(gone, b) {
			gone = append(gone, b)
		}
	}
	whole := func(b target.Backup) bool { return b.Whole }
	wrote := func(b target.Backup) bool { return b.Whole && w.Of(b) == target.Own }
	if takesLast(mine, gone, whole) || takesLast(mine, gone, wrote) { // an adopted one may have the data of a host that is gone
		return nil, errs.New(errs.WrongState, "this state would be left without a whole backup that it has written, so none was removed: "+
			"take another before, by `sandboxctl system backups now`")
	}
	return gone, nil
}

// takesLast reports whether those that go are the last ones of a kind.
func takesLast(mine, gone []target.Backup, kind func(target.Backup) bool) bool {
	return slices.ContainsFunc(gone, kind) &&
		!slices.ContainsFunc(mine, func(b target.Backup) bool { return kind(b) && !slices.Contains(gone, b) })
}
