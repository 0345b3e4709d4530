package contents

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/files"
	"github.com/sandboxd/sandboxd/internal/backup/target"
)

// A Verifier reads all that backups need, and each pack once.
type Verifier struct {
	Target target.Target
	IDs    backup.Identities
	// Packs are those that were read, and what is wrong with them; nil: nothing.
	Packs map[string]error
	// Read is called after each pack.
	Read func(bytes int64)
	// Damage is called for each thing that is wrong. tree and file are empty if it is none of them alone.
	Damage func(tree, file string, err error)
}

// Backup reads the index of a backup, every byte of its packs, and the list of files of each tree. It says
// which files have a piece in a pack that is bad. listed are the packs that its list on the target names. The
// error is that of ctx.
func (v *Verifier) Backup(ctx context.Context, d *backup.Data, listed []string) error {
	r, err := chunks.NewReader(ctx, v.Target, d.Catalog, v.IDs.Opener())
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		v.Damage("", "", fmt.Errorf("the index of its data cannot be read, so none of it can be restored: %w", err))
	} else {
		defer r.Close()
	}
	listed = slices.Sorted(slices.Values(listed))
	for i, p := range d.Catalog.Packs {
		if _, ok := slices.BinarySearch(listed, p.Name); !ok {
			v.Damage("", "", fmt.Errorf("its list of packs does not name %s, which it needs", p.Name))
		}
		if r == nil {
			err = v.pack(ctx, p.Name, nil, i)
		} else {
			err = v.pack(ctx, p.Name, r, i)
		}
		if err != nil {
			return err
		}
	}
	if r == nil {
		return nil
	}
	for i := range d.Trees {
		v.tree(ctx, r, &d.Trees[i])
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// Listed compares packs with their names. It is for a backup that nobody here can open.
func (v *Verifier) Listed(ctx context.Context, names []string) error {
	for _, name := range names {
		if err := v.pack(ctx, name, nil, 0); err != nil {
			return err
		}
	}
	return nil
}

// pack reads a pack, unless it was read, and says what is wrong with it. With a reader all chunks in it are
// compared with their names, too.
func (v *Verifier) pack(ctx context.Context, name string, r *chunks.Reader, i int) (err error) {
	if err, known := v.Packs[name]; known {
		if err != nil {
			v.Damage("", "", err)
		}
		return nil
	}
	var bytes int64
	if r != nil {
		bytes = r.Packs()[i].Bytes
		_, err = r.CheckPack(ctx, i)
	} else {
		bytes, err = chunks.Verify(ctx, v.Target, name)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	v.Packs[name] = err
	if err != nil {
		v.Damage("", "", err)
	}
	v.Read(bytes)
	return nil
}

// tree reads the list of files of a tree, and those pieces of them that are in bad packs.
func (v *Verifier) tree(ctx context.Context, r *chunks.Reader, t *backup.Tree) {
	lost, last := 0, ""
	bad := func(path string, err error) {
		if path == last { // a file once
			return
		}
		last = path
		if lost++; lost <= shownLost {
			v.Damage(t.String(), path, err)
		}
	}
	_, size, err := files.Check(r.Stream(ctx, t.Stream), func(path string, id chunks.ID) {
		name, ok := r.Pack(id)
		switch {
		case !ok:
			bad(path, errors.New("a piece of it is in no pack of the backup"))
		case v.Packs[name] != nil:
			if _, err := r.Get(ctx, id); err != nil {
				bad(path, err)
			}
		}
	})
	if err == nil && size != t.Bytes {
		err = fmt.Errorf("it has %d bytes of files, and not %d", size, t.Bytes)
	}
	if ctx.Err() != nil {
		return
	}
	if lost > shownLost {
		v.Damage(t.String(), "", fmt.Errorf("%d other files are damaged, too", lost-shownLost))
	}
	if err != nil {
		v.Damage(t.String(), "", fmt.Errorf("its list of files cannot be read to the end: %w", err))
	}
}
