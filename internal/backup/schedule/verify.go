package schedule

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/contents"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A Damage is something that is wrong with a backup on the target.
type Damage struct {
	Backup  target.Backup
	Tree    string // a volume, snapshot or layer; empty: not of one alone
	File    string // in it; empty: not of one alone
	Problem string
}

// Checked counts what was read.
type Checked struct {
	Backup        string // at which it is
	Backups, Of   int    // that were read to their end, of how many
	Packs         int
	Bytes         int64
	Damaged       int // backups with a damage
	Partial       int // that were cut short, or are being stored now; they count for nothing
	Sealed        int // that nobody here can open: their bytes were compared with checksums alone
	RemovedBefore int // that were removed before they were read to their end
}

// A Listener hears how a check goes on, of one call at a time.
type Listener struct {
	Progress func(Checked)
	Damage   func(Damage)
}

// CheckAll reads every byte of backups on the target: of those of names, which may be owners, or without any
// of all. It compares them with their checksums, opens those for which this host has the key, and looks for
// each piece of each file. Backups go on meanwhile: one that is removed does not count. What was in bad packs
// of this state is sent again by the next backup.
func (k *Keeper) CheckAll(ctx context.Context, names []string, l Listener) (c Checked, err error) {
	if !k.checking.TryLock() {
		return c, errs.New(errs.WrongState, "a check of backups is running: wait for its end")
	}
	defer k.checking.Unlock()
	began := k.Now()
	all, err := k.List(ctx)
	if err != nil {
		return c, err
	}
	if all, err = named(k.Target, all, names); err != nil {
		return c, err
	}
	ids, err := k.Trial.Identities()
	if err != nil {
		return c, err
	}
	v := &verifier{k: k, ids: ids, l: l, c: Checked{Of: len(all)}, bad: map[string]bool{}, good: map[string]bool{}}
	for _, b := range all {
		if err := v.backup(ctx, b, len(names) > 0); err != nil {
			return v.c, err
		}
	}
	return v.c, k.found(ctx, began, v)
}

// named selects the backups of names, which may be owners; without names it is all.
func named(t target.Target, all []target.Backup, names []string) ([]target.Backup, error) {
	if len(names) == 0 {
		return all, nil
	}
	wanted := map[string]bool{}
	for _, name := range names {
		found := false
		for _, b := range all {
			if b.Name == name || b.Owner == name {
				wanted[b.Name], found = true, true
			}
		}
		if !found {
			return nil, unnamed(t, name)
		}
	}
	return slices.DeleteFunc(slices.Clone(all), func(b target.Backup) bool { return !wanted[b.Name] }), nil
}

func unnamed(t target.Target, name string) error {
	return errs.New(errs.NotFound, "%s has no backup, and no owner of backups, %q; `sandboxctl system backups ls` lists them", t, name)
}

// A verifier reads one backup after the other.
type verifier struct {
	k   *Keeper
	ids backup.Identities
	l   Listener
	c   Checked

	owner string
	packs map[string]error // of this owner that were read
	bad   map[string]bool  // packs of this state
	mine  []string         // damages of backups that count
	good  map[string]bool  // backups without a damage
	found []Damage         // of this backup
}

func (v *verifier) damage(b target.Backup, tree, file string, err error) {
	v.found = append(v.found, Damage{b, tree, file, err.Error()})
}

// backup reads one. The error is that of ctx, or of a target that cannot be reached any more.
func (v *verifier) backup(ctx context.Context, b target.Backup, asked bool) error {
	if v.packs == nil || b.Owner != v.owner { // bounds the memory of it; states share packs seldom
		v.owner, v.packs = b.Owner, map[string]error{}
	}
	v.c.Backup, v.found = b.Name, nil
	v.l.Progress(v.c)
	switch {
	case b.Whole:
		if err := v.whole(ctx, b); err != nil {
			return err
		}
	case asked:
		v.damage(b, "", "", errors.New("it was cut short, or is being stored now: it has no checksum, and counts for nothing"))
	default:
		v.c.Partial++
		return nil
	}
	if len(v.found) > 0 {
		// A target that is gone has damaged nothing, and a backup that was removed meanwhile needs nothing.
		now, err := v.k.List(ctx)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(now, func(one target.Backup) bool { return one.Name == b.Name && (one.Whole || !b.Whole) }) {
			v.c.RemovedBefore++
			return nil
		}
		v.c.Damaged++
	}
	w := v.k.Whose()
	for _, d := range v.found {
		v.l.Damage(d)
		if w.Mine(b) {
			v.mine = append(v.mine, b.Name+": "+d.Problem)
		}
	}
	for name, err := range v.packs {
		if p, _ := target.ParsePack(name); errors.Is(err, chunks.ErrBad) && w.OwnsPacks(p.Owner) {
			v.bad[name] = true
		}
	}
	v.good[b.Name] = len(v.found) == 0
	v.c.Backups++
	v.l.Progress(v.c)
	return nil
}

// whole reads a backup that was stored whole, and all that it needs.
func (v *verifier) whole(ctx context.Context, b target.Backup) error {
	m, opened, err := v.file(ctx, b)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		v.damage(b, "", "", err)
	} else if !opened {
		v.c.Sealed++
	}
	listed, lerr := target.Packs(ctx, v.k.Target, b.Name)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if lerr != nil {
		v.damage(b, "", "", fmt.Errorf("the list of its packs cannot be read: %w", lerr))
	}
	check := contents.Verifier{
		Target: v.k.Target, IDs: v.ids, Packs: v.packs,
		Read: func(bytes int64) {
			v.c.Packs++
			v.c.Bytes += bytes
			v.l.Progress(v.c)
		},
		Damage: func(tree, file string, err error) { v.damage(b, tree, file, err) },
	}
	if m.Data != nil && err == nil {
		if lerr != nil { // it is said already
			for _, p := range m.Data.Catalog.Packs {
				listed = append(listed, p.Name)
			}
		}
		return check.Backup(ctx, m.Data, listed)
	}
	return check.Listed(ctx, listed)
}

// file reads the file of a backup to its end, and opens it if this host has the key.
func (v *verifier) file(ctx context.Context, b target.Backup) (m backup.Manifest, opened bool, err error) {
	f, err := target.Open(ctx, v.k.Target, b.Name)
	if err != nil {
		return m, false, err
	}
	defer f.Close() //nolint:errcheck // read only
	content, err := v.ids.Open(f)
	sealed := errors.Is(err, backup.ErrEncrypted)
	if err == nil {
		m, err = backup.Read(content, io.Discard)
	}
	n, rest := io.Copy(io.Discard, f) // to its end: there the checksum is compared
	v.c.Bytes += max(n, b.Bytes)
	switch {
	case rest != nil: // it says more than what could not be read for that reason
		return m, false, rest
	case sealed:
		return m, false, nil
	}
	return m, err == nil, err
}

// saidDamages is how many damages an event has.
const saidDamages = 5

// found notes what was found in the backups of this state.
func (k *Keeper) found(ctx context.Context, began time.Time, v *verifier) error {
	if len(v.mine) == 0 {
		return k.clean(ctx, began, v)
	}
	if err := k.enter(ctx); err != nil {
		return err
	}
	defer func() { <-k.turn }()
	text := strings.Join(v.mine[:min(saidDamages, len(v.mine))], "; ")
	if more := len(v.mine) - saidDamages; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	var err error
	if k.Data != nil {
		for _, name := range slices.Sorted(maps.Keys(v.bad)) {
			err = errors.Join(err, k.Data.Forget(name))
		}
		k.note(func(s *Status) *History { return &s.Check }, Run{Time: began, Error: text})
	}
	k.Log.Error("backups are damaged on the target; the next one sends what was in bad packs again", "target", k.Target.String(),
		"damaged", v.c.Damaged, "err", text)
	k.Tell(CheckFailed, text)
	return err
}

// clean notes a check that has read all whole backups of this state, and found nothing: a damage that was noted
// before is gone, and keeps no older backups on a full target any more.
func (k *Keeper) clean(ctx context.Context, began time.Time, v *verifier) error {
	if k.Data == nil || k.Status().Check.Last.Error == "" {
		return nil
	}
	if err := k.enter(ctx); err != nil {
		return err
	}
	defer func() { <-k.turn }()
	mine, _, err := k.own(ctx)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(mine, func(b target.Backup) bool { return b.Whole && !v.good[b.Name] }) ||
		k.Status().Check.Last.Time.After(began) { // it says nothing of what was found meanwhile
		return nil
	}
	k.note(func(s *Status) *History { return &s.Check }, Run{Time: began})
	k.Log.Info("all backups of this state were read: what the last check has found is gone", "target", k.Target.String())
	return nil
}
