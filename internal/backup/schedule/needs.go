package schedule

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/durable"
)

// needs is which packs whole backups need.
type needs struct {
	packs  map[string]bool
	unread []unread
	// What was known of backups of others before, and what is now.
	was, known map[string][]string
}

// An unread is a backup of which nobody here can say what it needs.
type unread struct {
	target.Backup
	why error
}

// spares reports whether a backup that cannot be read may need a pack of the state.
func (n *needs) spares(w target.Whose, pack string) bool {
	p, _ := target.ParsePack(pack)
	return slices.ContainsFunc(n.unread, func(b unread) bool {
		switch {
		case b.ID == "": // the release that wrote it knows of no pack with an ID
			return p.ID() == ""
		case w.Of(b.Backup) == target.Other: // it can share a common past only
			return slices.Contains(w.Packs, p.Owner)
		}
		return true
	})
}

// pruned is what a prune has removed.
type pruned struct {
	packs int
	bytes int64
	kept  string // why packs that nothing may need are still there; empty: none is
}

// prune removes the packs that none of the backups on the target, and nothing of also, needs. Packs that a backup
// may need which cannot be read stay. The error is a removal that the target has refused.
func (k *Keeper) prune(ctx context.Context, all []target.Backup, also map[string]bool) (p pruned, err error) {
	w := k.Whose()
	if len(w.Packs) == 0 { // else others may have been sent with packs of a common past
		all = slices.DeleteFunc(slices.Clone(all), func(b target.Backup) bool { return w.Of(b) == target.Other })
	}
	var n needs
	var unknown error
	spared := 0
	p.packs, p.bytes, err = chunks.Prune(ctx, k.Target, w, func() (func(string) bool, error) {
		if n, unknown = k.needs(ctx, w, all); unknown == nil {
			k.writeKnown(w, n.was, n.known) // not at a check: it asks for its own backups only
		}
		return func(pack string) bool {
			if n.packs[pack] || also[pack] {
				return true
			}
			if n.spares(w, pack) {
				spared++
				return true
			}
			return false
		}, unknown
	})
	if p.packs > 0 {
		k.Log.Info("packs removed that no backup needs", "packs", p.packs, "bytes", p.bytes)
	}
	switch {
	case unknown != nil:
		p.kept, err = unknown.Error(), nil
	case spared > 0:
		p.kept = fmt.Sprintf("%d packs stay, since it cannot be found out which of them are needed by %s", spared, n.text(w))
	}
	if p.kept != "" {
		k.Log.Warn("packs that no backup may need are not removed; the next run tries again", "why", p.kept)
	}
	return p, err
}

// text names the backups that cannot be read, and says what to do.
func (n *needs) text(w target.Whose) (out string) {
	for i, b := range n.unread {
		if i == saidDamages {
			return out + fmt.Sprintf("; and %d more", len(n.unread)-i)
		}
		if i > 0 {
			out += "; "
		}
		out += fmt.Sprintf("%s (%v): ", b.Name, b.why)
		switch w.Of(b.Backup) {
		case target.Own, target.Adopted:
			out += "remove it, by `sandboxctl system backups rm`"
		default:
			out += "remove it on its host; if that is gone, adopt it, and remove it by `sandboxctl system backups rm`"
		}
	}
	return out
}

// needs finds out what whole backups need. The error is that of a target that cannot be reached.
func (k *Keeper) needs(ctx context.Context, w target.Whose, all []target.Backup) (n needs, err error) {
	n = needs{packs: map[string]bool{}, was: k.readKnown(w), known: map[string][]string{}}
	for _, b := range all {
		if !b.Whole { // it counts for nothing
			continue
		}
		packs, was := n.was[b.Name]
		foreign := !w.Mine(b)
		if !foreign || !was {
			if packs, err = k.packsOf(ctx, b); err != nil {
				there, lerr := k.List(ctx)
				if lerr != nil {
					return n, fmt.Errorf("find what %s needs: %w", b.Name, lerr)
				}
				if slices.ContainsFunc(there, func(one target.Backup) bool { return one.Name == b.Name && one.Whole }) {
					n.unread = append(n.unread, unread{b, err})
				} // else its owner has removed it just now
				continue
			}
		}
		if foreign { // those that are not this state's to remove do not matter
			packs = slices.DeleteFunc(packs, func(name string) bool {
				p, _ := target.ParsePack(name)
				return !w.OwnsPacks(p.Owner)
			})
			n.known[b.Name] = packs
		}
		for _, p := range packs {
			n.packs[p] = true
		}
	}
	return n, nil
}

// packsOf returns the packs that a whole backup needs: by its list, and if that is damaged by the backup itself, if
// this host has the key.
func (k *Keeper) packsOf(ctx context.Context, b target.Backup) ([]string, error) {
	packs, err := target.Packs(ctx, k.Target, b.Name)
	if err == nil || ctx.Err() != nil {
		return packs, err
	}
	ids, ierr := k.Trial.Identities()
	if ierr != nil {
		return nil, err
	}
	r, oerr := target.Open(ctx, k.Target, b.Name)
	if oerr != nil {
		return nil, err
	}
	defer r.Close() //nolint:errcheck // read only
	content, oerr := ids.Open(r)
	if oerr != nil {
		return nil, err
	}
	m, oerr := backup.Read(content, io.Discard)
	if oerr == nil {
		_, oerr = io.Copy(io.Discard, r) // to its end: there the checksum is compared
	}
	if oerr != nil {
		return nil, err
	}
	packs = []string{}
	if m.Data != nil {
		for _, p := range m.Data.Catalog.Packs {
			packs = append(packs, p.Name)
		}
	}
	return packs, nil
}

// knownFile is in the directory of the state. It has what backups of others need of this state's packs: a backup never
// changes, so its list is read once, and not at each run for a whole fleet.
const knownFile = "backups.needs.json"

type known struct {
	ID    string              `json:"id"`
	Packs []string            `json:"packs"` // whose packs count (store.BackupIdentity)
	Needs map[string][]string `json:"needs"` // by the name of a backup
}

// readKnown returns what was found out before. Without the file it is found out again.
func (k *Keeper) readKnown(w target.Whose) map[string][]string {
	var was known
	b, err := os.ReadFile(filepath.Join(k.Dir, knownFile))
	if err == nil {
		err = json.Unmarshal(b, &was)
	}
	if err != nil || was.ID != w.ID || !slices.Equal(was.Packs, w.Packs) {
		return nil
	}
	return was.Needs
}

// writeKnown remembers what was found out, of backups that are there.
func (k *Keeper) writeKnown(w target.Whose, was, next map[string][]string) {
	if len(was) == len(next) && maps.EqualFunc(was, next, slices.Equal) {
		return
	}
	b, err := json.Marshal(known{w.ID, w.Packs, next})
	if err == nil {
		err = durable.Write(filepath.Join(k.Dir, knownFile), b, 0o600)
	}
	if err != nil {
		k.Log.Warn("what backups of other hosts need is not written down, and read again by the next run", "err", err)
	}
}

// errUnread is of a check: it cannot be found out what a backup needs.
var errUnread = errors.New("the list of its packs cannot be read")

// damages is what is wrong with lists, for a check.
func (n *needs) damages() (err error) {
	for _, b := range n.unread {
		err = errors.Join(err, fmt.Errorf("%s: %w: %w", b.Name, errUnread, b.why))
	}
	return err
}
