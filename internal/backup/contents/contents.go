// Package contents says which trees of a host are in a backup with data: the layers of images, the
// files of ready snapshots, and named volumes.
//
// What surprises: it has no disks of sandboxes, and no memory images. A sandbox is what can be made
// again from an image or a snapshot; a memory image belongs to the CPU and the runtime that wrote it.
// Each tree is of one moment by itself, not all of the same moment.
package contents

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"strings"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/files"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
)

// A Host is what Save reads.
type Host struct {
	Files     *snapshot.Store
	Layers    []string // digests
	Snapshots []record.Snapshot
	Volumes   []record.Volume
	Spool     string // a directory for files without names
	Log       *slog.Logger
}

// Save sends the trees of a host. One that cannot be read is left out, and said; a target or a host
// that fails ends it.
func Save(ctx context.Context, h Host, to *chunks.Session) (*backup.Data, error) {
	s := saver{ctx, h, to, &backup.Data{Trees: []backup.Tree{}}}
	for _, digest := range h.Layers {
		dir := func(f func(string) error) error {
			path, err := h.Files.Layers.Path(digest)
			if err == nil {
				err = f(path)
			}
			return err
		}
		if err := s.tree(backup.Tree{Kind: backup.Layer, ID: digest}, true, dir); err != nil {
			return nil, err
		}
	}
	for _, snap := range h.Snapshots {
		if snap.State != record.SnapshotReady || snap.Temporary {
			continue
		}
		dir := func(f func(string) error) error {
			path, err := h.Files.Snapshots.Upper(snap.ID)
			if err == nil {
				err = f(path)
			}
			return err
		}
		if err := s.tree(backup.Tree{Kind: backup.Snapshot, ID: snap.ID, Name: snap.Name}, true, dir); err != nil {
			return nil, err
		}
	}
	for _, vol := range h.Volumes {
		if vol.State != record.VolumeReady || !vol.Made || vol.Owner != "" {
			continue
		}
		dir := func(f func(string) error) error { return h.Files.Volumes.ReadVolume(ctx, vol.ID, f) }
		if err := s.tree(backup.Tree{Kind: backup.Volume, ID: vol.ID, Name: vol.Name, Limit: vol.Bytes}, false, dir); err != nil {
			return nil, err
		}
	}
	var err error
	s.d.Catalog, err = to.Finish(ctx, h.Spool)
	return s.d, err
}

type saver struct {
	ctx context.Context
	Host
	to *chunks.Session
	d  *backup.Data
}

// tree sends a tree. If it never changes, it is read once.
func (s *saver) tree(t backup.Tree, never bool, in func(func(dir string) error) error) error {
	if err := failpoint.Pass("backup:tree"); err != nil {
		return err
	}
	s.to.BeginTree()
	name := ""
	if never {
		name = t.Kind + " " + t.ID
		known, err := s.to.Known(name, &t.Tree)
		if err != nil {
			return err
		}
		if known {
			s.d.Trees = append(s.d.Trees, t)
			return nil
		}
	}
	err := in(func(dir string) (err error) {
		t.Tree, err = files.Save(s.ctx, s.to, dir, s.Spool)
		return err
	})
	if sink, ok := errors.AsType[chunks.SinkError](err); ok {
		return sink.Err
	}
	if s.ctx.Err() != nil {
		return context.Cause(s.ctx)
	}
	if err != nil {
		s.Log.Warn("not in the backup: it could not be read", "tree", t.String(), "err", err)
		s.d.Left = append(s.d.Left, backup.Left{Tree: t.String(), Why: err.Error()})
		return nil
	}
	s.d.Trees = append(s.d.Trees, t)
	if never {
		return s.to.EndTree(s.ctx, name, t.Tree)
	}
	return nil
}

// Restore brings the trees of a backup into the pool and the layers, beside a daemon that is stopped.
// What is there already stays as it is. A tree that cannot be restored is left out, with all of the
// reasons in the error, which names the file of the target that is bad. Of a volume or a snapshot the
// files alone are left out that a bad pack has; a layer is whole or not there, since its name is a
// digest. It writes to out what it did.
func Restore(ctx context.Context, host *snapshot.Store, t target.Target, d *backup.Data, ids backup.Identities, out io.Writer) error {
	r, err := chunks.NewReader(ctx, t, d.Catalog, ids.Opener())
	if err != nil {
		return fmt.Errorf("read the index of the data: %w", err)
	}
	defer r.Close()
	var failed []error
	done, there, bytes := 0, 0, int64(0)
	for i := range d.Trees {
		one := &d.Trees[i]
		var left lostFiles
		err := restore(ctx, host, r, one, &left)
		if err == nil && left.n > 0 {
			failed = append(failed, left.err(one))
		}
		switch {
		case err == nil:
			done++
			bytes += one.Bytes
		case errors.Is(err, fs.ErrExist):
			there++
			if one.Kind != backup.Layer {
				fmt.Fprintf(out, "%s is on the pool, and stays as it is\n", one)
			}
		case ctx.Err() != nil:
			return context.Cause(ctx)
		default:
			failed = append(failed, fmt.Errorf("%s is not restored: %w", one, err))
		}
	}
	fmt.Fprintf(out, "restored %s of volumes, snapshots and layers, %d bytes; %d were there\n", errs.Count(done, "tree", "trees"), bytes,
		there)
	if bad := r.Bad(); bad != nil && len(failed) == 0 {
		fmt.Fprintf(out, "the target has bad packs, but the damage is in none of these files: %v\n", bad)
	}
	for _, l := range d.Left {
		fmt.Fprintf(out, "%s is not in the backup: %s\n", l.Tree, l.Why)
	}
	return errors.Join(failed...)
}

// shownLost is how many files an error names.
const shownLost = 20

// lostFiles are the files of a tree that were left out.
type lostFiles struct {
	n    int
	text strings.Builder
}

func (l *lostFiles) add(path string, err error) {
	if l.n++; l.n <= shownLost {
		fmt.Fprintf(&l.text, "\n  %q: %v", path, err)
	}
}

func (l *lostFiles) err(t *backup.Tree) error {
	if l.n > shownLost {
		fmt.Fprintf(&l.text, "\n  and %d others", l.n-shownLost)
	}
	return fmt.Errorf("%s is restored without %s that the target has lost or changed (from another backup they come back after the %s "+
		"is deleted):%s", t, errs.Count(l.n, "file", "files"), t.Kind, l.text.String())
}

func restore(ctx context.Context, host *snapshot.Store, r *chunks.Reader, t *backup.Tree, left *lostFiles) error {
	add := left.add
	if t.Kind == backup.Layer {
		add = nil
	}
	fill := func(dir string) error { return files.Restore(ctx, r, t.Tree, dir, add) }
	switch t.Kind {
	case backup.Volume:
		return host.Volumes.RestoreVolume(t.ID, t.Limit, fill)
	case backup.Snapshot:
		return host.Snapshots.RestoreSnapshot(ctx, t.ID, fill)
	}
	if _, err := host.Layers.Path(t.ID); err == nil {
		return fs.ErrExist
	} else if !errs.Is(err, errs.NotFound) {
		return err
	}
	_, err := host.Layers.Make(strings.TrimPrefix(t.ID, "sha256:"), fill)
	return err
}

// sampled is how many packs Check reads in full, beside those with the lists of files.
const sampled = 4

// Check reads the index of a backup, the list of files of each tree, and every chunk of a few packs,
// of which pick chooses one of so many. Others are compared with their names only, by the keeper.
func Check(ctx context.Context, t target.Target, d *backup.Data, ids backup.Identities, pick func(of int) int) error {
	r, err := chunks.NewReader(ctx, t, d.Catalog, ids.Opener())
	if err != nil {
		return fmt.Errorf("read the index of the data: %w", err)
	}
	defer r.Close()
	for i := range d.Trees {
		one := &d.Trees[i]
		_, size, err := files.Check(r.Stream(ctx, one.Stream), nil)
		if err == nil && size != one.Bytes {
			err = fmt.Errorf("its list has %d bytes of files, and not %d", size, one.Bytes)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", one, err)
		}
	}
	for range min(sampled, len(r.Packs())) {
		if _, err := r.CheckPack(ctx, pick(len(r.Packs()))); err != nil {
			return err
		}
	}
	return r.Bad()
}
