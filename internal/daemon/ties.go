package daemon

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// The relations between the store, the pool and the layers of images.

// tiePool ties a new store to the pool, unless the pool has disks or snapshots, which
// may belong to another store.
func (d *Daemon) tiePool(ctx context.Context) error {
	if d.store.PoolID() != "" {
		return nil
	}
	disks, err := d.files.Disks.ListDisks(ctx)
	if err != nil || len(disks) > 0 {
		return err
	}
	snaps, err := d.files.Snapshots.ListSnapshots(ctx)
	if err != nil || len(snaps) > 0 {
		return err
	}
	return d.store.SetPoolID(ctx, d.files.Pool.ID())
}

// adoptPool ties a restored store to a pool that holds nothing but what an earlier try has restored:
// that of the backup is lost.
func adoptPool(ctx context.Context, d *Daemon, data *backup.Data) error {
	db, err := store.Open(stateFile(d.cfg), store.Options{})
	if err != nil {
		return err
	}
	d.store = db
	vols, err := d.files.Volumes.ListVolumes(ctx)
	disks, derr := d.files.Disks.ListDisks(ctx)
	snaps, serr := d.files.Snapshots.ListSnapshots(ctx)
	others := slices.DeleteFunc(slices.Concat(vols, disks, snaps), func(id string) bool {
		return slices.ContainsFunc(data.Trees, func(t backup.Tree) bool { return t.ID == id })
	})
	if err = errors.Join(err, derr, serr); err == nil && len(others) == 0 {
		err = db.SetPoolID(ctx, d.files.Pool.ID())
	}
	return errors.Join(err, db.Close())
}

// layerUsers names the sandboxes and snapshots that use a layer. An unreadable record
// counts as using every layer, because it may name any. While nothing may be swept,
// every layer is in use, because sandboxes without a record may use it. A sandbox being
// deleted no longer needs its layers: its processes are killed first.
func (d *Daemon) layerUsers(layer string) (users []string) {
	ctx := context.Background()
	if d.noSweep() != "" {
		return []string{"sandboxes that the store may not know (`sandboxctl system info` says why)"}
	}
	snaps, badSnaps, err := d.store.SnapshotRecords(ctx)
	if err != nil {
		return []string{"snapshots that cannot be listed"}
	}
	for _, s := range snaps {
		if s.State != record.SnapshotFailed && slices.Contains(s.Image.Layers, layer) {
			users = append(users, s.ID)
		}
	}
	bad, err := d.store.Unreadable(ctx)
	if n := len(bad) + len(badSnaps); err != nil || n > 0 {
		return []string{errs.Count(n, "sandbox or snapshot whose record", "sandboxes or snapshots whose records") + " cannot be read"}
	}
	all, err := d.store.List(ctx)
	if err != nil {
		return []string{"sandboxes that cannot be listed"}
	}
	for _, r := range all {
		if r.State != record.Deleting && slices.Contains(r.Spec.Image.Layers, layer) {
			user := cmp.Or(r.Spec.Name, r.ID)
			if r.State == record.Prepared {
				user = "pool " + r.Pool.Name
			}
			users = append(users, user)
		}
	}
	return users
}
