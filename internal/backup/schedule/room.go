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

// advice says why a full target has no room, and what to do.
func (k *Keeper) advice(held int) string {
	if held == 0 {
		return "give the target more room, or lower backup.keep or backup.max_age"
	}
	failed, repeat := "check", "`sandboxctl system backups check --all`"
	switch s := k.Status(); {
	case s.Check.Last.Error == "":
		failed, repeat = "drill", "`sandboxctl system backups drill`"
	case s.Drill.Last.Error != "":
		failed, repeat = "check and the last drill", repeat+" and `sandboxctl system backups drill`"
	}
	return fmt.Sprintf("%s that the limits let go stay all the same: the last %s failed, so an older one may be the last that is good. "+
		"`sandboxctl system backups check --all` says what is damaged, `sandboxctl system backups rm` removes it, and once %s "+
		"succeeds they go by themselves; or give the target more room", errs.Count(held, "old backup", "old backups"), failed, repeat)
}

// twice adds to the error of a full target that it has packs which new backups do not use (target.Whose, UsesPacks). It
// looks at the target: the journal has them no more after the first try.
func twice(ctx context.Context, t target.Target, w target.Whose, full error) error {
	all, err := t.List(ctx)
	if err != nil {
		return full
	}
	packs, bytes := 0, int64(0)
	for _, o := range all {
		if p, ok := target.ParsePack(o.Name); ok && w.OwnsPacks(p.Owner) && !w.UsesPacks(p.Owner) {
			packs++
			bytes += o.Bytes
		}
	}
	if packs == 0 {
		return full
	}
	return fmt.Errorf("%w; it has %s of older backups, %d bytes, that were sent without the id of this state: new backups do not use "+
		"them and send all data once more, so the target needs room for it twice until those backups are gone", full,
		errs.Count(packs, "pack", "packs"), bytes)
}

// again tries once more after a target was full, if something could be removed from it.
func (k *Keeper) again(ctx context.Context, full error) (b target.Backup, data *DataRun, f *Freed, err error) {
	full = twice(ctx, k.Target, k.Whose(), full)
	if k.AppendOnly() {
		return b, nil, nil, fmt.Errorf("%w; this daemon removes nothing from it (backup.append_only): make room there", full)
	}
	f, held, err := k.free(ctx)
	switch {
	case err != nil:
		return b, nil, f, fmt.Errorf("%w; not all that may go could be removed: %w", full, err)
	case *f == Freed{} && held > 0:
		return b, nil, nil, fmt.Errorf("%w; %s", full, k.advice(held))
	case *f == Freed{}:
		return b, nil, nil, fmt.Errorf("%w; it has nothing that backup.keep and backup.max_age let go, and the last good backup stays: %s",
			full, k.advice(0))
	}
	k.Log.Warn("the target is full: what the limits let go was removed, and the backup is tried once more", "target", k.Target.String(),
		"backups", f.Backups, "packs", f.Packs, "bytes", f.Bytes)
	b, data, err = k.backup(ctx)
	if errors.Is(err, target.ErrFull) {
		err = fmt.Errorf("%w%s, which was not enough: %s", twice(ctx, k.Target, k.Whose(), err), f.text(), k.advice(held))
	}
	return b, data, f, err
}

// free removes what a new backup would let go, and packs that nothing needs, neither a backup nor what was just sent.
// held is how many whole backups would go, and stay since an older one may be the last that is good.
func (k *Keeper) free(ctx context.Context) (f *Freed, held int, err error) {
	f = &Freed{}
	mine, all, err := k.own(ctx)
	if err != nil {
		return f, 0, err
	}
	s := k.Status()
	gone := Room(mine, k.Keep, k.Now())
	if s.Drill.Last.Error != "" || s.Check.Last.Error != "" {
		would := len(gone)
		gone = slices.DeleteFunc(gone, func(b target.Backup) bool { return b.Whole })
		held = would - len(gone)
	}
	for _, b := range gone {
		if err := target.Drop(ctx, k.Target, b.Name); err != nil {
			return f, held, err
		}
		k.Log.Info("backup removed from a full target", "name", b.Name, "whole", b.Whole)
		all = slices.DeleteFunc(all, func(one target.Backup) bool { return one.Name == b.Name })
		f.Backups++
		f.Bytes += max(0, b.Bytes)
	}
	p, err := k.prune(ctx, all, k.sent)
	f.Packs, f.Bytes = p.packs, f.Bytes+p.bytes
	return f, held, err
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
