package schedule

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Freed is what was removed from a full target, so that a new backup has room.
type Freed struct {
	Backups int   `json:"backups"`
	Packs   int   `json:"packs"`
	Bytes   int64 `json:"bytes"`
}

func (f *Freed) text() string {
	if f == nil {
		return ""
	}
	return fmt.Sprintf("; the target was full, and %s and %s were removed before, %d bytes",
		errs.Count(f.Backups, "old backup", "old backups"), errs.Count(f.Packs, "pack", "packs"), f.Bytes)
}

// roomAdvice ends the error of a target that stays full.
const roomAdvice = "give the target more room, or lower backup.keep or backup.max_age"

// again tries once more after a target was full, if something could be removed from it.
func (k *Keeper) again(ctx context.Context, full error) (b target.Backup, data *DataRun, f *Freed, err error) {
	if k.AppendOnly() {
		return b, nil, nil, fmt.Errorf("%w; this daemon removes nothing from it (backup.append_only): make room there", full)
	}
	f, err = k.free(ctx)
	switch {
	case err != nil:
		return b, nil, f, fmt.Errorf("%w; not all that may go could be removed: %w", full, err)
	case *f == Freed{}:
		return b, nil, nil, fmt.Errorf("%w; it has nothing that backup.keep and backup.max_age let go, and the last good backup stays: %s",
			full, roomAdvice)
	}
	k.Log.Warn("the target is full: what the limits let go was removed, and the backup is tried once more", "target", k.Target.String(),
		"backups", f.Backups, "packs", f.Packs, "bytes", f.Bytes)
	b, data, err = k.backup(ctx)
	if errors.Is(err, target.ErrFull) {
		err = fmt.Errorf("%w%s, which was not enough: %s", err, f.text(), roomAdvice)
	}
	return b, data, f, err
}

// free removes what a new backup would let go, and packs that nothing needs, neither a backup nor what was just sent.
func (k *Keeper) free(ctx context.Context) (f *Freed, err error) {
	f = &Freed{}
	mine, all, err := k.own(ctx)
	if err != nil {
		return f, err
	}
	s := k.Status()
	gone := Room(mine, k.Keep, k.Now())
	if s.Drill.Last.Error != "" || s.Check.Last.Error != "" { // an older one may be the last that is good
		gone = slices.DeleteFunc(gone, func(b target.Backup) bool { return b.Whole })
	}
	for _, b := range gone {
		if err := target.Drop(ctx, k.Target, b.Name); err != nil {
			return f, err
		}
		k.Log.Info("backup removed from a full target", "name", b.Name, "whole", b.Whole)
		all = slices.DeleteFunc(all, func(one target.Backup) bool { return one.Name == b.Name })
		f.Backups++
		f.Bytes += max(0, b.Bytes)
	}
	p, err := k.prune(ctx, all, k.sent)
	f.Packs, f.Bytes = p.packs, f.Bytes+p.bytes
	return f, err
}

// Room says which backups of one state go from a full target before a new one is stored: those that go after it.
// The newest whole one stays: until there is another it is the last good one.
func Room(all []target.Backup, keep Limits, now time.Time) []target.Backup {
	newest := ""
	for _, b := range all {
		if b.Whole {
			newest = b.Name
		}
	}
	gone := Plan(append(slices.Clone(all), target.Backup{Whole: true, Taken: now}), keep, now)
	return slices.DeleteFunc(gone, func(b target.Backup) bool { return b.Name == newest })
}
