package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/journal"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Teardown ends every sandbox of the instance, with its disk, and removes every
// snapshot. Then it removes what the instance has on the host: rules, sets, gateway,
// cgroup root, run directory, the mount of the pool. The state directory stays, with
// images and volumes in it. Teardown refuses while a daemon of the instance runs.
func Teardown(ctx context.Context, cfg *config.Config) error {
	if _, err := os.Stat(stateFile(cfg)); errors.Is(err, fs.ErrNotExist) {
		return nil // no daemon of this configuration ever ran: there is nothing to remove
	}
	log := journal.New(os.Stderr, slog.LevelWarn)
	d, err := open(ctx, cfg, log)
	if err != nil {
		return fmt.Errorf("teardown: %w", err)
	}
	err = errors.Join(d.deleteAll(ctx), d.manager.Recover(ctx), d.manager.Close(ctx)) // deletions go on until then
	if err = errors.Join(err, d.nothingLingers(ctx)); err != nil {
		// Rules and pool stay while something may need them.
		return errors.Join(fmt.Errorf("teardown: %w", err), d.Close())
	}
	locks := d.close[0] // closed last
	d.close = d.close[1:]
	defer locks() //nolint:errcheck // the process ends
	if err := d.Close(); err != nil {
		return fmt.Errorf("teardown: %w", err)
	}
	// RemoveAll would empty a mount that is still there.
	mounts, err := d.files.Mounts.ListMounts(ctx)
	if err == nil {
		var attached []string
		attached, err = d.files.Volumes.ListAttached(ctx)
		mounts = append(mounts, attached...)
	}
	if err == nil && len(mounts) > 0 {
		err = fmt.Errorf("%s still contains the mounts of %v", cfg.RunDir, mounts)
	}
	err = errors.Join(
		err,
		egress.Purge(ctx, cfg.Instance),
		d.ns.Purge(ctx),
		d.removeCgroups(ctx),
		d.files.UnmountPool(),
	)
	if err == nil {
		err = removeRunDir(cfg.RunDir)
	}
	if err != nil {
		return fmt.Errorf("teardown: %w", err)
	}
	return nil
}

func (d *Daemon) removeCgroups(ctx context.Context) error {
	if d.scope == nil {
		return d.cgroups.RemoveRoot()
	}
	return errors.Join(d.scope.Stop(ctx), d.cgroups.RemoveRoot())
}

func (d *Daemon) deleteAll(ctx context.Context) error {
	all, err := d.manager.List(ctx)
	if err != nil {
		return err
	}
	ids, err := d.store.Unreadable(ctx)
	if err != nil {
		return err
	}
	for _, r := range all {
		ids = append(ids, r.ID)
	}
	var errs []error
	for _, id := range ids {
		errs = append(errs, d.manager.Delete(ctx, id))
	}
	return errors.Join(append(errs, d.deleteSnapshots(ctx))...)
}

// nothingLingers fails while the kernel ends processes of deleted sandboxes: they still
// use cgroups, links and the pool.
func (d *Daemon) nothingLingers(ctx context.Context) error {
	all, err := d.store.List(ctx)
	if err != nil {
		return err
	}
	var ids []string
	for _, r := range all {
		alive, err := d.cgroups.Populated(r.ID)
		if err != nil {
			return err
		}
		if alive && r.State == record.Deleting {
			ids = append(ids, r.ID)
		}
	}
	if len(ids) > 0 {
		return fmt.Errorf("the kernel is still ending the killed processes of %s; tear down again in a few minutes",
			strings.Join(ids, ", "))
	}
	return nil
}

func (d *Daemon) deleteSnapshots(ctx context.Context) error {
	list, ids, err := d.store.SnapshotRecords(ctx)
	for _, snap := range list {
		ids = append(ids, snap.ID)
	}
	for _, id := range ids {
		err = errors.Join(err, d.manager.Snapshots().Delete(ctx, id))
	}
	return err
}
