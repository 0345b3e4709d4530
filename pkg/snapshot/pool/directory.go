package pool

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

// Directory is the half of a [Driver] that all pools in an ordinary directory
// share: snapshots are copies of directories. A driver embeds it.
type Directory struct {
	Dir   string // the pool
	Image string // where a pool of kind BtrfsLoop would be
}

// LoopPoolError says why a state directory with a pool of kind BtrfsLoop gets no pool
// of another kind.
func (d *Directory) LoopPoolError() error {
	return errs.New(errs.WrongState, "the state directory holds a pool of kind %q: set pool = %q, or remove %s and the sandboxes on it",
		BtrfsLoop, BtrfsLoop, d.Image)
}

// CheckLayers allows all: disks and layers may be on one file system.
func (d *Directory) CheckLayers(string) error { return nil }

// Flush does nothing: copying reads what is in memory.
func (d *Directory) Flush(context.Context) error { return nil }

// Freeze copies a disk.
func (d *Directory) Freeze(ctx context.Context, from, to string) error { return d.Copy(ctx, from, to) }

// Settle writes the file system out.
func (d *Directory) Settle(context.Context) error { return tree.WithDir(d.Dir, unix.Syncfs) }

// Sync writes the file system out. The writes of other disks may delay it for as long as ctx lets them.
func (d *Directory) Sync(ctx context.Context, _ string) error {
	done := make(chan error, 1)
	go func() { done <- d.Settle(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Unfreeze does nothing: a copy can be renamed.
func (d *Directory) Unfreeze(string) error { return nil }

// Sweep does nothing: a removed directory leaves nothing.
func (d *Directory) Sweep(context.Context) error { return nil }

// Close does nothing: the directory stays.
func (d *Directory) Close() error { return nil }

// reserved is what copies leave free of the file system, where records and layers
// are too: a 32nd part, at most 1 GiB. Imports of layers leave the same.
const reserved = 1 << 30

// Copy is [tree.Copy] as long as there is room, which it checks all the time.
func (d *Directory) Copy(ctx context.Context, from, to string) error {
	if err := d.room(); err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if err := d.room(); err != nil {
				stop(err)
				return
			}
		}
	}()
	return tree.Copy(ctx, from, to)
}

func (d *Directory) room() error {
	var st unix.Statfs_t
	if err := unix.Statfs(d.Dir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: d.Dir, Err: err}
	}
	free, keep := int64(st.Bavail)*st.Bsize, min(int64(st.Blocks)*st.Bsize/32, reserved)
	if free < keep {
		return fmt.Errorf("%d MiB are free, and copies must leave %d MiB free: %w", free>>20, keep>>20, unix.ENOSPC)
	}
	return nil
}
