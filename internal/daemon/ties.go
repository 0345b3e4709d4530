package daemon

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// What the store, the pool and the layers of images have to do with one another.

// tiePool makes a new store belong to the pool, if nothing in the pool can
// belong to another one.
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

// layerUsers names the sandboxes and snapshots that stand on a layer. While a
// record cannot be read, that stands on every layer: it may name any of them;
// and while nothing may be swept, so may a sandbox that is in no record. What is
// being deleted needs its layers no more: its processes are killed first.
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
		return []string{fmt.Sprintf("%d sandboxes or snapshots whose records cannot be read", n)}
	}
	all, err := d.store.List(ctx)
	if err != nil {
		return []string{"sandboxes that cannot be listed"}
	}
	for _, r := range all {
		if r.State != record.Deleting && slices.Contains(r.Spec.Image.Layers, layer) {
			users = append(users, cmp.Or(r.Spec.Name, r.ID))
		}
	}
	return users
}
