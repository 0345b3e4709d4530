package chunks

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/sandboxd/sandboxd/internal/backup/target"
)

// usage is what the last backup uses: the bytes of each pack, and trees that never change.
type usage struct {
	Packs map[string]int64 `json:"packs"`
	Trees []string         `json:"trees"`
}

// Begin reads the journal, and looks which packs the target still has.
func (s *Store) Begin(ctx context.Context) (_ *Session, err error) {
	there, err := packsOf(ctx, s.Target, s.Whose.UsesPacks)
	if err != nil {
		return nil, err
	}
	n := &Session{s: s, tree: 1, at: map[ID]loc{}, trees: map[string]Tree{}, named: map[string]bool{}, uses: map[uint32]int64{}}
	if n.zstd, err = encoder(); err != nil {
		return nil, err
	}
	if err := n.load(there); err != nil {
		n.Close() //nolint:errcheck // it has failed already
		return nil, err
	}
	n.name = n.key.namer()
	if n.files, err = n.key.splitter(); err != nil {
		n.Close() //nolint:errcheck // likewise
		return nil, err
	}
	if n.stats.Lost+n.stats.Damaged > 0 {
		s.Log.Warn("packs of backups are missing on the target, or bad: what was in them is sent again; backups that need them cannot "+
			"be restored whole", "target", s.Target.String(), "missing", n.stats.Lost, "bad", n.stats.Damaged)
	}
	if n.stats.Foreign > 0 {
		s.Log.Info("packs that were sent without the id of this state are not used again: what is in them is sent once more", "packs",
			n.stats.Foreign)
	}
	return n, nil
}

// packsOf lists the packs of some owners, with their bytes.
func packsOf(ctx context.Context, t target.Target, owner func(string) bool) (map[string]int64, error) {
	all, err := t.List(ctx)
	if err != nil {
		return nil, err
	}
	there := map[string]int64{}
	for _, o := range all {
		if p, ok := target.ParsePack(o.Name); ok && owner(p.Owner) {
			there[o.Name] = o.Bytes
		}
	}
	return there, nil
}

// load reads the journal, without the packs that are of no use.
func (n *Session) load(there map[string]int64) (err error) {
	var (
		first  *head
		bad    = map[string]bool{}
		used   usage
		packs  []Pack
		shed   bool // the journal has something that is not needed
		others int
	)
	n.j, err = openJournal(n.s.Journal, func(k kind, b []byte) error {
		if first == nil && k != headRecord {
			return errors.New("it does not begin with its head")
		}
		switch k {
		case headRecord:
			first = &head{}
			return json.Unmarshal(b, first)
		case packRecord:
			p, err := decodePacked(b)
			packs = append(packs, p.Pack)
			return err
		case badRecord:
			bad[string(b)] = true
		case treeRecord:
			var t Tree
			if err := json.Unmarshal(b, &t); err != nil {
				return err
			}
			shed = shed || n.trees[t.Name].Name != ""
			n.trees[t.Name] = t
		case usedRecord:
			others++
			used = usage{} // Unmarshal adds to a map
			err := json.Unmarshal(b, &used)
			before := len(n.trees)
			maps.DeleteFunc(n.trees, func(name string, _ Tree) bool { return !slices.Contains(used.Trees, name) })
			shed = shed || len(n.trees) != before
			return err
		}
		return nil
	})
	if err != nil || first == nil || first.For != n.s.Sealer.For {
		if err != nil {
			n.s.Log.Warn("the journal of backups cannot be read: the next backup is a full one", "err", err)
		}
		return n.anew()
	}
	n.key = first.Key
	keep := n.sort(packs, there, bad, used.Packs)
	if err := n.remember(keep); err != nil {
		return err
	}
	if shed || others > 1 || len(keep) != len(packs) || len(bad) > 0 {
		return n.compact(keep, used)
	}
	return nil
}

// anew begins an empty journal.
func (n *Session) anew() (err error) {
	if n.j != nil {
		n.j.close() //nolint:errcheck // it is replaced
	}
	n.key, n.trees = newKey(), map[string]Tree{}
	n.j, err = rewrite(n.s.Journal, func(j *journal) error { return j.appendJSON(headRecord, head{n.key, n.s.Sealer.For}) })
	return err
}

// worn is the part of a pack below which its chunks are sent again, so that the pack can go once no
// older backup needs it; rewritten bounds the bytes of that: a part of all, but at least four packs.
const (
	worn      = 0.5
	rewritten = 50
)

// sort says which packs are of use.
func (n *Session) sort(packs []Pack, there map[string]int64, bad map[string]bool, used map[string]int64) map[string]bool {
	keep := map[string]bool{}
	var all int64
	var low []Pack
	for _, p := range packs {
		bytes, ok := there[p.Name]
		one, _ := target.ParsePack(p.Name)
		switch {
		case !n.s.Whose.UsesPacks(one.Owner):
			n.stats.Foreign++
			continue
		case !ok, bytes != p.Bytes:
			n.stats.Lost++
			continue
		case bad[p.Name]:
			n.stats.Damaged++
			continue
		}
		keep[p.Name] = true
		all += p.Bytes
		if u := used[p.Name]; u > 0 && float64(u) < worn*float64(p.Bytes) && p.Bytes > int64(n.s.packBytes()/2) {
			low = append(low, p)
		}
	}
	part := func(p Pack) float64 { return float64(used[p.Name]) / float64(p.Bytes) }
	slices.SortFunc(low, func(a, b Pack) int { return cmp.Compare(part(a), part(b)) })
	left := max(all/rewritten, int64(4*n.s.packBytes()))
	for _, p := range low {
		if left -= used[p.Name]; left < 0 {
			break
		}
		delete(keep, p.Name)
		n.stats.Worn++
	}
	return keep
}

// remember takes the chunks of packs into memory.
func (n *Session) remember(keep map[string]bool) error {
	return n.j.scan(func(p packed) error {
		if !keep[p.Name] {
			return nil
		}
		if most := mostChunks(); len(n.at)+len(p.table)/entryBytes > most {
			return tooMany(most)
		}
		return n.know(p)
	})
}

func (n *Session) know(p packed) error {
	k := &known{Pack: p.Pack}
	number := uint32(len(n.packs))
	n.packs = append(n.packs, k)
	return p.entries(func(one place) {
		n.at[one.ID] = loc{pack: number, stored: one.Stored}
		k.bytes += int64(one.Stored)
	})
}

func tooMany(most int) error {
	return fmt.Errorf("the data has more than %d pieces, and their names would not fit into the memory of the daemon: give the host or "+
		"the daemon more (docs/operations.md), set backup.data to false, or delete volumes and snapshots with very many small files", most)
}

// compact writes the journal without what is not needed.
func (n *Session) compact(keep map[string]bool, used usage) error {
	old := n.j
	for name, t := range n.trees {
		for pack := range t.Packs {
			if !keep[pack] {
				delete(n.trees, name)
			}
		}
	}
	j, err := rewrite(n.s.Journal, func(j *journal) error {
		if err := j.appendJSON(headRecord, head{n.key, n.s.Sealer.For}); err != nil {
			return err
		}
		if err := old.scan(func(p packed) error {
			if !keep[p.Name] {
				return nil
			}
			return j.append(packRecord, p.encode())
		}); err != nil {
			return err
		}
		for _, t := range n.trees {
			if err := j.appendJSON(treeRecord, t); err != nil {
				return err
			}
		}
		used.Trees = slices.Sorted(maps.Keys(n.trees))
		return j.appendJSON(usedRecord, used)
	})
	if err != nil {
		return err
	}
	n.j = j
	return old.close()
}
