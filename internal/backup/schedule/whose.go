package schedule

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// Whose backups are whose. The store has the identity of its state; names of hosts are for people.
//
// Two states can have one identity: a disk was copied, and both copies run. Bind notices it if the
// machines differ, and another writer shows itself on the target (intruder). Either way the state draws
// a new identity, and the backups before it are unknown until they are adopted: nobody removes them.

// Bind draws a new identity if the state has come to another machine: it is a copy, and the other one
// may run. machine tells machines apart; empty: this one cannot be told from others.
func Bind(ctx context.Context, db *store.DB, machine string, log *slog.Logger) error {
	id := db.Backups()
	switch {
	case machine == "" || id.Machine == machine:
		return nil
	case id.Machine == "":
		id.Machine = machine
	default:
		was := id.ID
		id = store.NewBackupIdentity(machine)
		log.Warn("this state comes from another machine, which may still run: it gets an identity of its own, and the backups under the "+
			"one before count as another state's; if that machine is gone: sandboxctl system backups adopt", "was", was, "is", id.ID)
	}
	return db.SetBackups(ctx, id)
}

// Unknown is what a target has under the name of this host that this state has not written.
type Unknown struct {
	Count  int    `json:"count"`
	Newest string `json:"newest"` // one of them
}

// Whose says which backups are this state's now.
func (k *Keeper) Whose() target.Whose {
	return target.Whose{Label: k.Label, BackupIdentity: k.State.Backups()}
}

// own lists the backups that count, the oldest first, and all that the target has. The caller has the
// turn.
func (k *Keeper) own(ctx context.Context) (mine, all []target.Backup, err error) {
	if all, err = k.List(ctx); err != nil {
		return nil, nil, err
	}
	if err := k.settle(ctx, all); err != nil {
		return nil, nil, err
	}
	w := k.Whose()
	k.sayUnknown(w, all)
	return w.Select(all), all, nil
}

// settle finds out which backups this state has written.
func (k *Keeper) settle(ctx context.Context, all []target.Backup) error {
	id := k.State.Backups()
	if id.Earlier {
		if err := k.adoptEarlier(ctx, id, all); err != nil {
			return fmt.Errorf("find the backups that this state has written: %w", err)
		}
		id = k.State.Backups()
	}
	s := k.Status()
	name := intruder(id.ID, s, all)
	if name == "" {
		return nil
	}
	next := store.NewBackupIdentity(id.Machine)
	for _, b := range all {
		if b.Name == s.Backup.Good.Name || slices.Contains(s.Tried, b.Name) {
			next.Adopted = append(next.Adopted, b.Name)
		}
	}
	next.Packs = append(id.Packs, target.Owner(k.Label, id.ID))
	k.Log.Error("another daemon writes backups with the identity of this one: the disk of one host is a copy of the other's; this state "+
		"gets a new identity, and those that it is not known to have written stay until they are adopted", "name", name, "was", id.ID,
		"is", next.ID)
	if err := k.State.SetBackups(ctx, next); err != nil {
		return err
	}
	k.remember(func(s *Status) { s.ID = next.ID })
	return nil
}

// intruder names a backup that has the ID of this state and is not known to be from it: this state
// remembers the last that it has stored, and those that it has tried to store since.
func intruder(id string, s Status, all []target.Backup) string {
	last, ok := target.ParseName(s.Backup.Good.Name)
	if !ok || last.ID != id { // nothing is remembered: the state was restored on a new disk
		return ""
	}
	for _, b := range all {
		if b.ID == id && b.Number >= last.Number && b.Name != s.Backup.Good.Name && !slices.Contains(s.Tried, b.Name) {
			return b.Name
		}
	}
	return ""
}

// sayUnknown logs and remembers what is on the target of a state that is not known.
func (k *Keeper) sayUnknown(w target.Whose, all []target.Backup) {
	var u Unknown
	for _, b := range all {
		if w.Of(b) == target.Unknown {
			u.Count++
			if newest, _ := target.ParseName(u.Newest); b.Whole && b.Number >= newest.Number {
				u.Newest = b.Name
			}
		}
	}
	if k.Status().Unknown == u && k.said {
		return
	}
	k.said = true
	k.remember(func(s *Status) { s.Unknown = u })
	if u.Count > 0 {
		k.Log.Warn("the target has backups under the name of this host that this state has not written: they are not counted and never "+
			"removed; if no other host writes them: sandboxctl system backups adopt", "target", k.Target.String(), "host", w.Label,
			"backups", u.Count, "newest", u.Newest)
	}
}

// adoptEarlier adopts the backups without an ID that this state has written with an earlier release:
// the last that it remembers, and older ones of its pool or with packs that it remembers. If another
// state has written there, too, the last one alone.
func (k *Keeper) adoptEarlier(ctx context.Context, id store.BackupIdentity, all []target.Backup) error {
	good, ok := target.ParseName(k.Status().Backup.Good.Name)
	id.Earlier = false
	if !ok || good.ID != "" {
		return k.State.SetBackups(ctx, id)
	}
	all = slices.DeleteFunc(slices.Clone(all), func(b target.Backup) bool { return b.Owner != good.Owner || b.ID != "" })
	shared := slices.ContainsFunc(all, func(b target.Backup) bool {
		return b.Whole && b.Number >= good.Number && b.Name != good.Name
	})
	ids, err := k.Trial.Identities()
	if err != nil {
		k.Log.Warn("encrypted backups of the release before cannot be opened", "err", err)
	}
	for _, b := range all {
		wrote := b.Name == good.Name
		switch {
		case wrote || shared:
		case !b.Whole: // cut short, by this state
			wrote = b.Number <= good.Number+1
		default:
			if wrote, err = k.wrote(ctx, b, ids); err != nil {
				return err
			}
		}
		if wrote {
			id.Adopted = append(id.Adopted, b.Name)
		}
	}
	id.Packs = append(id.Packs, good.Owner)
	k.remember(func(s *Status) { s.ID = id.ID })
	k.Log.Info("this state's backups of the release before are adopted", "owner", good.Owner, "adopted", len(id.Adopted), "of", len(all))
	return k.State.SetBackups(ctx, id)
}

// wrote reports whether this state has written a whole backup that has no ID. One that nobody here can
// read, it has not.
func (k *Keeper) wrote(ctx context.Context, b target.Backup, ids backup.Identities) (bool, error) {
	m, err := peek(ctx, k.Target, b, ids)
	switch {
	case errors.Is(err, errUnreachable):
		return false, err
	case err == nil:
		return m.State.PoolID != "" && m.State.PoolID == k.State.PoolID(), nil
	case k.Data == nil:
		return false, nil
	}
	packs, err := target.Packs(ctx, k.Target, b.Name)
	if err != nil {
		return false, nil //nolint:nilerr // the list is damaged: it says nothing
	}
	known, err := k.Data.Known()
	if err != nil {
		return false, nil //nolint:nilerr // the journal is damaged: it says nothing
	}
	return slices.ContainsFunc(packs, func(p string) bool { return known[p] }), nil
}

var errUnreachable = errors.New("the target does not send it")

// peek reads the manifest of a backup. It fails with errUnreachable if the target does not send it.
func peek(ctx context.Context, t target.Target, b target.Backup, ids backup.Identities) (m backup.Manifest, err error) {
	r, err := t.Get(ctx, b.Name)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %w", errUnreachable, err)
		}
		return m, err
	}
	defer r.Close() //nolint:errcheck // read only
	return backup.Peek(r, ids)
}

// Adopt makes backups of other states count as this one's, from the next run on: they are rotated with
// its own. names are those of backups or of their owners; without any, all that are unknown are
// adopted. No other host may write backups of an owner that is adopted.
func (k *Keeper) Adopt(ctx context.Context, names []string) (adopted []target.Backup, err error) {
	if err := k.enter(ctx); err != nil {
		return nil, err
	}
	defer func() { <-k.turn }()
	_, all, err := k.own(ctx)
	if err != nil {
		return nil, err
	}
	w := k.Whose()
	if len(names) == 0 {
		adopted = slices.DeleteFunc(slices.Clone(all), func(b target.Backup) bool { return w.Of(b) != target.Unknown })
	}
	for _, name := range names {
		found := slices.DeleteFunc(slices.Clone(all), func(b target.Backup) bool { return b.Name != name && b.Owner != name })
		if len(found) == 0 {
			return nil, unnamed(k.Target, name)
		}
		for _, b := range found {
			if !w.Mine(b) && !slices.Contains(adopted, b) {
				adopted = append(adopted, b)
			}
		}
	}
	id := w.BackupIdentity
	// Names that the target has no more are forgotten.
	id.Adopted = slices.DeleteFunc(id.Adopted, func(name string) bool {
		return !slices.ContainsFunc(all, func(b target.Backup) bool { return b.Name == name })
	})
	for _, b := range adopted {
		id.Adopted = append(id.Adopted, b.Name)
		if !slices.Contains(id.Packs, b.Owner) {
			id.Packs = append(id.Packs, b.Owner)
		}
	}
	if err := k.State.SetBackups(ctx, id); err != nil {
		return nil, err
	}
	k.Log.Info("backups adopted: they count as this state's", "backups", len(adopted))
	k.sayUnknown(k.Whose(), all)
	return adopted, nil
}

// Pick finds the backup that target.Latest means for a restore, or the one of that name. It refuses to
// choose between the backups of several states: the newest may be an empty one of a host that was
// installed again.
func Pick(ctx context.Context, t target.Target, w target.Whose, ids backup.Identities, name string) (b target.Backup, err error) {
	if name != target.Latest {
		return target.Find(ctx, t, w, name)
	}
	all, err := target.Backups(ctx, t)
	if err != nil {
		return b, err
	}
	lives := map[string][]target.Backup{}
	for _, b := range all {
		switch s := w.Of(b); {
		case !b.Whole || s == target.Other:
		case s == target.Unknown:
			life := b.Owner
			if b.ID == "" { // an earlier release wrote it: only the pool tells states apart
				if m, err := peek(ctx, t, b, ids); err == nil && m.State.PoolID != "" {
					life += ", pool " + m.State.PoolID
				}
			}
			lives[life] = append(lives[life], b)
		default:
			lives["this state"] = append(lives["this state"], b)
		}
	}
	newest := func(life string) target.Backup {
		if life == "this state" {
			mine := w.Select(lives[life])
			return mine[len(mine)-1]
		}
		return slices.MaxFunc(lives[life], func(a, b target.Backup) int { return cmp.Compare(a.Number, b.Number) })
	}
	names := slices.Sorted(maps.Keys(lives))
	switch len(names) {
	case 0:
		return target.Find(ctx, t, w, name)
	case 1:
		return newest(names[0]), nil
	}
	var text strings.Builder
	for _, life := range names {
		b := newest(life)
		fmt.Fprintf(&text, "\n  %s: %s, the newest is %s of %d bytes", life, errs.Count(len(lives[life]), "backup", "backups"), b.Name,
			b.Bytes)
	}
	return b, errs.New(errs.WrongState, "%s has backups of several states under the name of this host, so which is meant by latest is not "+
		"clear: give the name of one with --from:%s", t, text.String())
}
