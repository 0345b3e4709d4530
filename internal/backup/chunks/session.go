package chunks

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/failpoint"
)

// A Store is where this host keeps its chunks.
type Store struct {
	Target  target.Target
	Whose   target.Whose // whose packs are used, and who writes them
	Sealer  Sealer
	Journal string // a file; it is secret
	Log     *slog.Logger

	full int // when a pack is; 0: packBytes
}

func (s *Store) packBytes() int { return cmp.Or(s.full, packBytes) }

// A Session adds the chunks of one backup to a Store. It has the journal in memory until it is
// closed. It is not for concurrent use, and of no use after an error of Put or Finish.
type Session struct {
	s     *Store
	key   Key
	j     *journal
	name  namer
	zstd  *zstd.Encoder
	files *Splitter
	buf   []byte // compressed

	packs []*known
	at    map[ID]loc
	now   *packer // the pack that is being filled, the last of packs; nil: none
	tree  uint32  // counts trees, from 1
	trees map[string]Tree
	named map[string]bool  // the trees of this backup
	uses  map[uint32]int64 // bytes of each pack that this tree uses

	stats Stats
}

// Stats count what a Session has done.
type Stats struct {
	Chunks, NewChunks   int   // all that were put, and those of them that the target did not have
	Bytes, NewBytes     int64 // of their content
	Packs               int   // that were sent
	Sent                int64 // bytes of packs
	Lost, Damaged, Worn int   // packs that are not used any more: missing, bad, hardly in use
	Foreign             int   // likewise: without the ID of the state
}

// known is a pack in memory.
type known struct {
	Pack
	bytes int64 // of its chunks, as stored
	used  int64 // of them by this backup
}

// loc is where a chunk is: 12 bytes, since there are millions.
type loc struct {
	pack   uint32
	stored uint32
	tree   uint32 // the last tree that has used it
}

// A Tree is something that never changes and is made of chunks: once it is sent, it need not be read
// again.
type Tree struct {
	Name  string           `json:"name"`
	Info  json.RawMessage  `json:"info"`
	Packs map[string]int64 `json:"packs"` // the bytes of it in each
}

// Stats says what was done so far.
func (n *Session) Stats() Stats { return n.stats }

// Used are the packs on the target that the backup uses so far.
func (n *Session) Used() map[string]bool {
	used := map[string]bool{}
	for _, p := range n.packs {
		if p.used > 0 && p.Name != "" {
			used[p.Name] = true
		}
	}
	return used
}

// Close frees what the session holds. What it has sent stays, and is not sent again.
func (n *Session) Close() error {
	n.zstd.Close() //nolint:errcheck // it has no writer
	n.at, n.now = nil, nil
	if n.j == nil {
		return nil
	}
	return n.j.close()
}

// Put adds a chunk, unless the target has it.
func (n *Session) Put(ctx context.Context, data []byte) (id ID, err error) {
	id = n.name.name(data)
	n.stats.Chunks++
	n.stats.Bytes += int64(len(data))
	if l, ok := n.at[id]; ok {
		n.use(id, l)
		return id, nil
	}
	if err := done(ctx); err != nil {
		return id, err
	}
	if most := mostChunks(); len(n.at) >= most {
		return id, tooMany(most)
	}
	if n.now == nil {
		if n.now, err = newPacker(n.s.Sealer); err != nil {
			return id, err
		}
		n.packs = append(n.packs, &known{})
	}
	stored := n.zstd.EncodeAll(data, n.buf[:0])
	n.buf = stored[:0]
	if len(stored) >= len(data) {
		stored = data
	}
	if err := n.now.add(id, stored, len(data)); err != nil {
		return id, err
	}
	n.stats.NewChunks++
	n.stats.NewBytes += int64(len(data))
	last := len(n.packs) - 1
	n.packs[last].bytes += int64(len(stored))
	n.use(id, loc{pack: uint32(last), stored: uint32(len(stored))})
	if int(n.now.n) >= n.s.packBytes() {
		return id, n.flush(ctx)
	}
	return id, nil
}

// use notes that the tree of now has a chunk.
func (n *Session) use(id ID, l loc) {
	if l.tree != n.tree {
		n.uses[l.pack] += int64(l.stored)
		n.packs[l.pack].used += int64(l.stored)
	}
	l.tree = n.tree
	n.at[id] = l
}

// Split puts the chunks of r, and calls f for each.
func (n *Session) Split(ctx context.Context, r io.Reader, f func(id ID, bytes int) error) error {
	return n.files.Split(r, func(data []byte) error {
		id, err := n.Put(ctx, data)
		if err != nil {
			return SinkError{err}
		}
		return f(id, len(data))
	})
}

// A SinkError is a failure of the target or of this host, and not of what is read.
type SinkError struct{ Err error }

func (e SinkError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e SinkError) Unwrap() error { return e.Err }

// flush sends the pack of now, and writes it down.
func (n *Session) flush(ctx context.Context) error {
	if n.now == nil {
		return nil
	}
	p := n.now
	n.now = nil
	b, sum, err := p.finish()
	if err != nil {
		return err
	}
	name := target.PackName(n.s.Whose.Owner(), sum, n.s.Sealer.on())
	if err := failpoint.Pass("backup:send"); err != nil {
		return err
	}
	if _, err := target.Store(ctx, n.s.Target, name, bytes.NewReader(b), int64(len(b))); err != nil {
		return errors.Join(err, target.Tidy(n.s.Target.Remove(context.WithoutCancel(ctx), name)))
	}
	if err := failpoint.Pass("backup:sent"); err != nil {
		return err
	}
	one := packed{Pack: Pack{name, int64(len(b))}}
	for _, e := range p.places {
		one.table = e.append(one.table)
	}
	if err := n.j.append(packRecord, one.encode()); err != nil {
		return err
	}
	n.packs[len(n.packs)-1].Pack = one.Pack
	n.stats.Packs++
	n.stats.Sent += int64(len(b))
	return failpoint.Pass("backup:noted")
}

// BeginTree says that the chunks that follow are of another tree.
func (n *Session) BeginTree() {
	n.tree++
	clear(n.uses)
}

// EndTree sends a tree that never changes to its end, so that Known returns info for its name from
// now on.
func (n *Session) EndTree(ctx context.Context, name string, info any) (err error) {
	if err := n.flush(ctx); err != nil { // the journal must have its packs before it
		return err
	}
	t := Tree{Name: name, Packs: map[string]int64{}}
	for pack, bytes := range n.uses {
		t.Packs[n.packs[pack].Name] = bytes
	}
	if t.Info, err = json.Marshal(info); err != nil {
		return err
	}
	n.trees[name], n.named[name] = t, true
	return n.j.appendJSON(treeRecord, t)
}

// Known looks for a tree that never changes, and counts it as used.
func (n *Session) Known(name string, info any) (ok bool, err error) {
	t, ok := n.trees[name]
	if !ok {
		return false, nil
	}
	byName := n.byName()
	for pack := range t.Packs {
		if byName[pack] == nil {
			return false, nil
		}
	}
	for pack, bytes := range t.Packs {
		byName[pack].used += bytes
	}
	n.named[name] = true
	return true, json.Unmarshal(t.Info, info)
}

func (n *Session) byName() map[string]*known {
	all := make(map[string]*known, len(n.packs))
	for _, p := range n.packs {
		all[p.Name] = p
	}
	return all
}

// Finish sends the rest, and returns what finds the chunks again. dir is for a file without a name.
func (n *Session) Finish(ctx context.Context, dir string) (c Catalog, err error) {
	if err := n.flush(ctx); err != nil {
		return c, err
	}
	c.Key = n.key
	number := map[string]int{}
	for _, p := range n.packs {
		if p.used > 0 {
			number[p.Name] = len(c.Packs)
			c.Packs = append(c.Packs, p.Pack)
		}
	}
	c.Tables = len(c.Packs)
	table, err := n.table(dir, number)
	if err != nil {
		return c, err
	}
	defer table.Close()
	var ids []ID
	n.BeginTree()
	err = n.Split(ctx, table, func(id ID, _ int) error {
		ids = append(ids, id)
		return nil
	})
	if err == nil {
		err = n.flush(ctx)
	}
	if err != nil {
		return c, err
	}
	if c.Index, err = n.find(ids, number, &c); err != nil {
		return c, err
	}
	used := usage{map[string]int64{}, slices.Sorted(maps.Keys(n.named))}
	for _, p := range n.packs {
		if p.used > 0 {
			used.Packs[p.Name] = min(p.used, p.bytes)
		}
	}
	return c, n.j.appendJSON(usedRecord, used)
}

// table writes the table of packs, in their order, to a file without a name.
func (n *Session) table(dir string, number map[string]int) (*os.File, error) {
	f, err := unnamed(dir)
	if err != nil {
		return nil, err
	}
	err = n.j.scan(func(p packed) error {
		if _, ok := number[p.Name]; !ok {
			return nil
		}
		b := binary.LittleEndian.AppendUint32(nil, uint32(len(p.table)/entryBytes))
		_, err := f.Write(append(b, p.table...))
		return err
	})
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("write the index of the backup: %w", err), f.Close())
	}
	return f, nil
}

// find returns where chunks are. It adds their packs to the catalog.
func (n *Session) find(ids []ID, number map[string]int, c *Catalog) ([]Place, error) {
	wanted := map[ID]Place{}
	for _, id := range ids {
		wanted[id] = Place{Pack: -1}
	}
	err := n.j.scan(func(p packed) error {
		return p.entries(func(one place) {
			if at, ok := wanted[one.ID]; !ok || at.Pack >= 0 {
				return
			}
			pack, ok := number[p.Name]
			if !ok {
				pack = len(c.Packs)
				number[p.Name] = pack
				c.Packs = append(c.Packs, p.Pack)
			}
			wanted[one.ID] = Place{one.ID, pack, one.Offset, one.Stored, one.Raw}
		})
	})
	all := make([]Place, len(ids))
	for i, id := range ids {
		all[i] = wanted[id]
	}
	return all, err
}
