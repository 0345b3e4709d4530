package chunks

import (
	"bytes"
	"container/list"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/sandboxd/sandboxd/internal/backup/target"
)

// cached is how many packs a Reader has in memory.
const cached = 8

// A Reader reads the chunks of one backup. It is not for concurrent use.
type Reader struct {
	t     target.Target
	c     Catalog
	open  Opener
	name  namer
	zstd  *zstd.Decoder
	index map[ID]where

	packs map[int]*list.Element // of order
	order *list.List            // *opened, the one used last at the front
	bad   map[int]error         // packs that are missing or were changed, of those that were read
}

// opened is a pack in memory. With both b and err, it was changed: chunks in it may still be right, and
// their names say which.
type opened struct {
	pack int
	b    []byte
	err  error
}

// NewReader reads the index of a catalog. Its errors name the file of the target that is bad.
func NewReader(ctx context.Context, t target.Target, c Catalog, open Opener) (*Reader, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	r := &Reader{t: t, c: c, open: open, name: c.Key.namer(), packs: map[int]*list.Element{}, order: list.New(), bad: map[int]error{}}
	var err error
	if r.zstd, err = decoder(); err != nil {
		return nil, err
	}
	next := 0
	r.index, err = readIndex(readerFunc(func() ([]byte, error) {
		if next == len(c.Index) {
			return nil, io.EOF
		}
		p := c.Index[next]
		next++
		return r.read(ctx, p.ID, where{uint32(p.Pack), p.Offset, p.Stored, p.Raw})
	}).reader(), c.Tables)
	if err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// Close frees what the reader holds.
func (r *Reader) Close() { r.zstd.Close() }

// Get returns the content of a chunk, which is valid until the next call.
func (r *Reader) Get(ctx context.Context, id ID) ([]byte, error) {
	w, ok := r.index[id]
	if !ok {
		return nil, fmt.Errorf("chunk %x is in no pack of the backup", id[:4])
	}
	return r.read(ctx, id, w)
}

// Stream reads the content of chunks, one after the other.
func (r *Reader) Stream(ctx context.Context, ids []ID) io.Reader {
	return readerFunc(func() ([]byte, error) {
		if len(ids) == 0 {
			return nil, io.EOF
		}
		id := ids[0]
		ids = ids[1:]
		return r.Get(ctx, id)
	}).reader()
}

// Bad says which of the packs that were read are missing or were changed, also if all that was asked for
// was right.
func (r *Reader) Bad() (err error) {
	for _, pack := range slices.Sorted(maps.Keys(r.bad)) {
		err = errors.Join(err, r.bad[pack])
	}
	return err
}

// Packs returns the packs of the backup.
func (r *Reader) Packs() []Pack { return r.c.Packs }

// Pack returns the name of the pack that has a chunk; false: none has.
func (r *Reader) Pack(id ID) (name string, ok bool) {
	w, ok := r.index[id]
	if !ok {
		return "", false
	}
	return r.c.Packs[w.pack].Name, true
}

// CheckPack reads all chunks of a pack. It returns how many there are.
func (r *Reader) CheckPack(ctx context.Context, pack int) (n int, err error) {
	b, err := r.pack(ctx, pack)
	if err != nil { // also if some of its chunks are right
		return 0, err
	}
	all, err := readTable(b)
	if err != nil {
		return 0, r.wrong(pack, err)
	}
	for _, p := range all {
		at := where{uint32(pack), p.Offset, p.Stored, p.Raw}
		if w, ok := r.index[p.ID]; ok && int(w.pack) == pack && w != at {
			return n, r.wrong(pack, fmt.Errorf("chunk %x is elsewhere in it than the index of the backup says", p.ID[:4]))
		}
		if _, err := r.read(ctx, p.ID, at); err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

func (r *Reader) read(ctx context.Context, id ID, w where) ([]byte, error) {
	b, changed := r.pack(ctx, int(w.pack))
	if changed != nil && b == nil {
		return nil, changed
	}
	wrong := func(err error) ([]byte, error) {
		if changed != nil {
			return nil, fmt.Errorf("%w; %w", changed, err)
		}
		return nil, r.wrong(int(w.pack), err)
	}
	if uint64(w.offset)+uint64(w.stored) > uint64(len(b)) {
		return wrong(errPlace)
	}
	data := b[w.offset : w.offset+w.stored]
	if w.stored != w.raw {
		var err error
		if data, err = r.zstd.DecodeAll(data, nil); err != nil {
			return wrong(fmt.Errorf("decompress a chunk: %w", err))
		}
	}
	if len(data) != int(w.raw) || r.name.name(data) != id {
		return wrong(fmt.Errorf("chunk %x has other content", id[:4]))
	}
	return data, nil
}

func (r *Reader) wrong(pack int, err error) error {
	return fmt.Errorf("%w: %s on %s: %w", ErrBad, r.c.Packs[pack].Name, r.t, err)
}

// pack returns a pack, decrypted. One that is bad stays bad: it is read once. Of one that was changed it
// returns both the rest and an error.
func (r *Reader) pack(ctx context.Context, pack int) ([]byte, error) {
	if e, ok := r.packs[pack]; ok {
		r.order.MoveToFront(e)
		o := e.Value.(*opened)
		return o.b, o.err
	}
	if err := done(ctx); err != nil {
		return nil, err
	}
	if r.order.Len() == cached {
		last := r.order.Back()
		delete(r.packs, last.Value.(*opened).pack)
		r.order.Remove(last)
	}
	b, err := r.fetch(ctx, r.c.Packs[pack])
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if errors.Is(err, ErrBad) {
		r.bad[pack] = err
	}
	r.packs[pack] = r.order.PushFront(&opened{pack, b, err})
	return b, err
}

func (r *Reader) fetch(ctx context.Context, p Pack) ([]byte, error) {
	b, err := fetch(ctx, r.t, p.Name)
	if err != nil {
		if b == nil {
			return nil, err
		}
		plain, perr := r.open(Changed{bytes.NewReader(b)})
		if perr != nil {
			return nil, err
		}
		rest, perr := io.ReadAll(io.LimitReader(plain, maxPack))
		if perr != nil {
			return nil, err
		}
		return rest, err
	}
	plain, err := r.open(bytes.NewReader(b))
	if err == nil {
		b, err = io.ReadAll(io.LimitReader(plain, maxPack))
	}
	if err != nil {
		return nil, fmt.Errorf("decrypt %s on %s: %w", p.Name, r.t, err)
	}
	return b, nil
}

// ErrBad says that a pack is missing, or is not what was stored.
var ErrBad = errors.New("the pack is bad")

// Changed is the content of a pack that is not what was stored. What opens it gives zeros for what
// cannot be decrypted.
type Changed struct{ *bytes.Reader }

// fetch reads a pack as it is stored, and compares it with its name. One that was changed is returned
// beside the error.
func fetch(ctx context.Context, t target.Target, name string) ([]byte, error) {
	p, _ := target.ParsePack(name)
	f, err := t.Get(ctx, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s is not on %s any more", ErrBad, name, t)
	}
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxPack+1))
	if err = errors.Join(err, f.Close()); err != nil {
		if errors.Is(err, fs.ErrNotExist) { // S3 says so with the first byte
			return nil, fmt.Errorf("%w: %s is not on %s any more", ErrBad, name, t)
		}
		return nil, fmt.Errorf("read %s from %s: %w", name, t, err)
	}
	sum := sha256.Sum256(b)
	if got := hex.EncodeToString(sum[:]); got != p.Sum {
		return b, fmt.Errorf("%w: %s on %s: %w: %d bytes with sha256 %.12s…", ErrBad, name, t, target.ErrLied, len(b), got)
	}
	return b, nil
}

// Verify reads a pack, and compares it with its name. It needs no key. It fails with ErrBad.
func Verify(ctx context.Context, t target.Target, name string) (bytes int64, err error) {
	b, err := fetch(ctx, t, name)
	return int64(len(b)), err
}

// readerFunc makes a reader of what returns one piece after the other.
type readerFunc func() ([]byte, error)

func (f readerFunc) reader() io.Reader { return &pieces{next: f} }

type pieces struct {
	next readerFunc
	left []byte
	err  error
}

func (p *pieces) Read(b []byte) (int, error) {
	for len(p.left) == 0 && p.err == nil {
		p.left, p.err = p.next()
	}
	if len(p.left) == 0 {
		return 0, p.err
	}
	n := copy(b, p.left)
	p.left = p.left[n:]
	return n, nil
}
