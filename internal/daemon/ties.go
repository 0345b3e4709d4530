package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/netns"
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

// AcceptPool ties the state to the pool that is there: its own is lost. Sandboxes whose disks are gone
// are ended as such, snapshots without files are failed. It writes to out what is lost. No daemon of the
// instance may run. A kill in between leaves a state that another AcceptPool finishes.
func AcceptPool(ctx context.Context, cfg *config.Config, out io.Writer) (err error) {
	locks, err := claim(cfg)
	if err != nil {
		return fmt.Errorf("accept the storage pool: %w", stopped(err))
	}
	defer closeAll(locks)
	unix.Umask(0o022)
	d := &Daemon{cfg: cfg, log: slog.New(slog.DiscardHandler), ns: netns.New(cfg.Instance, cfg.RunDir)}
	defer func() { err = errors.Join(err, d.Close()) }()
	if err := openFiles(ctx, d); err != nil {
		return fmt.Errorf("accept the storage pool: %w", err)
	}
	if d.store, err = store.Open(stateFile(cfg), store.Options{Log: d.log}); err != nil {
		return fmt.Errorf("accept the storage pool: %w", err)
	}
	d.onClose(d.store.Close)
	if d.store.PoolID() == d.files.Pool.ID() { // one without an ID is new, beside the pool of a state that is lost
		fmt.Fprintln(out, "nothing to accept: the storage pool is that of the state")
		return nil
	}
	for _, lose := range []func(context.Context, *Daemon, io.Writer) error{loseDisks, loseSnapshots, loseVolumes} {
		if err := lose(ctx, d, out); err != nil {
			return fmt.Errorf("accept the storage pool: %w; the same command goes on", err)
		}
	}
	if err := d.store.SetPoolID(ctx, d.files.Pool.ID()); err != nil { // last
		return fmt.Errorf("accept the storage pool: %w; the same command goes on", err)
	}
	fmt.Fprintf(out, "accepted: storage pool %.8s. Start sandboxd. What is on the pool without a record goes to lost+found for a day\n",
		d.files.Pool.ID())
	return nil
}

// loseDisks ends sandboxes whose disks are gone. Those that are being made or deleted are their recovery's.
func loseDisks(ctx context.Context, d *Daemon, out io.Writer) error {
	disks, err := d.files.Disks.ListDisks(ctx)
	if err != nil {
		return err
	}
	all, err := d.store.List(ctx)
	if err != nil {
		return err
	}
	for _, r := range all {
		switch {
		case r.State == record.Creating, r.State == record.Deleting, r.State == record.Prepared,
			r.State == record.Ended && r.Diskless(), slices.Contains(disks, r.ID):
			continue
		}
		lost := *r
		lost.LoseDisk(time.Now().Round(0).UTC())
		if err := d.store.Put(ctx, lost); err != nil {
			return err
		}
		fmt.Fprintf(out, "lost: the disk of sandbox %s %s\n", r.ID, r.Spec.Name)
	}
	return nil
}

// loseSnapshots fails snapshots whose files are gone.
func loseSnapshots(ctx context.Context, d *Daemon, out io.Writer) error {
	held, err := d.files.Snapshots.ListSnapshots(ctx)
	if err != nil {
		return err
	}
	all, _, err := d.store.SnapshotRecords(ctx)
	if err != nil {
		return err
	}
	for _, s := range all {
		if s.State != record.SnapshotReady || slices.Contains(held, s.ID) {
			continue
		}
		s.State, s.Changed, s.Message = record.SnapshotFailed, time.Now().Round(0).UTC(), "its files were lost with the storage pool"
		if err := d.store.PutSnapshot(ctx, s); err != nil {
			return err
		}
		fmt.Fprintf(out, "lost: the files of snapshot %s %s\n", s.ID, s.Name)
	}
	return nil
}

// loseVolumes names the volumes whose files are gone. Their records stay: a sandbox that mounts one fails
// and does not begin with an empty volume that looks like the old one.
func loseVolumes(ctx context.Context, d *Daemon, out io.Writer) error {
	held, err := d.files.Volumes.ListVolumes(ctx)
	if err != nil {
		return err
	}
	all, _, err := d.store.Volumes(ctx)
	if err != nil {
		return err
	}
	for _, v := range all {
		if v.Made && !slices.Contains(held, v.ID) {
			fmt.Fprintf(out, "lost: the files of volume %s; remove it, and the sandboxes that have it: sandboxctl volume rm %s\n",
				v.Name, v.Name)
		}
	}
	return nil
}

// The states that last until an operator ends them, as the metric has them; docs/operations.md has a
// table of them.
const (
	stateDraining   = "draining"
	stateRestored   = "restored"
	stateLostPool   = "lost_pool"
	stateUnreadable = "unreadable"
)

// lasting says of each such state what it means and what ends it; "" of one in which the host is not.
func lasting(ctx context.Context, d *Daemon) (map[string]string, error) {
	all := map[string]string{stateDraining: "", stateRestored: "", stateLostPool: "", stateUnreadable: ""}
	if since := d.drain.Since(); !since.IsZero() {
		all[stateDraining] = fmt.Sprintf("since %s no sandbox is created or started: `sandboxctl system drain --off` ends that",
			since.Format(time.RFC3339))
	}
	switch why := d.noSweep(); {
	case why == "":
	case d.files.Pool.ID() != d.store.PoolID():
		all[stateLostPool] = why
	default:
		all[stateRestored] = why
	}
	bad, err := (&system{Daemon: d}).unreadable(ctx)
	if len(bad) > 0 {
		all[stateUnreadable] = fmt.Sprintf("%s cannot be read, the first is %s: `sandboxctl rm`, `snapshot rm` or `image rm` deletes it",
			errs.Count(len(bad), "record", "records"), bad[0])
	}
	return all, err
}

// sayLasting writes to the log in which of these states the host is.
func sayLasting(ctx context.Context, d *Daemon) error {
	all, err := lasting(ctx, d)
	for _, state := range slices.Sorted(maps.Keys(all)) {
		if all[state] != "" {
			d.log.Warn("a state that lasts until somebody ends it", "state", state, "what", all[state])
		}
	}
	return err
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
