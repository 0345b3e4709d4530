package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/pkg/egress"
)

// Teardown ends every sandbox of the instance, with its disk, and takes away
// what the instance holds on the host: rules, sets, gateway, cgroup root, run
// directory, the mount of the pool. The state directory stays, images in it.
// It refuses while a daemon of the instance runs.
func Teardown(ctx context.Context, cfg *config.Config) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	d, err := open(ctx, cfg, log)
	if err != nil {
		return fmt.Errorf("teardown: %w", err)
	}
	if err := errors.Join(d.deleteAll(ctx), d.manager.Recover(ctx)); err != nil {
		// Rules and pool stay while something may need them.
		return errors.Join(fmt.Errorf("teardown: %w", err), d.Close())
	}
	lock := d.lock
	d.close = d.close[1:] // the lock is let go of last
	defer lock.Close()
	if err := d.Close(); err != nil {
		return fmt.Errorf("teardown: %w", err)
	}
	err = errors.Join(
		egress.Purge(ctx, cfg.Instance),
		d.ns.Purge(ctx),
		d.cgroups.RemoveRoot(),
		d.disks.UnmountPool(),
	)
	if err != nil {
		return fmt.Errorf("teardown: %w", err)
	}
	// A mount that is still there would be emptied, not removed.
	mounts, err := d.disks.ListMounts(ctx)
	if err == nil && len(mounts) > 0 {
		err = fmt.Errorf("%s still holds the mounts of %v", cfg.RunDir, mounts)
	}
	if err == nil {
		err = os.RemoveAll(cfg.RunDir)
	}
	if err != nil {
		return fmt.Errorf("teardown: %w", err)
	}
	return nil
}

func (d *Daemon) deleteAll(ctx context.Context) error {
	all, err := d.manager.List(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range all {
		errs = append(errs, d.manager.Delete(ctx, r.ID))
	}
	return errors.Join(errs...)
}
