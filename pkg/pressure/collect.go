package pressure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const (
	// atOnce bounds what one round of a Collector removes of a kind. The next round looks first
	// whether that was enough.
	atOnce = 32
	// readable is how long what has ended or failed stays in any case, so that a client that polls
	// reads why.
	readable = time.Minute
)

// A Collector removes what would go anyway, the earliest first: remains of pulls that were cut
// short, snapshots that failed, and ended sandboxes that are kept for a while. It removes no
// snapshot that is ready, no image, no sandbox that a client has stopped, and nothing of
// lost+found, which may be all that is left of a lost store.
type Collector struct {
	Sandboxes interface {
		List(ctx context.Context) ([]*record.Record, error)
		// Deadline is when a sandbox goes by itself; zero is never.
		Deadline(r record.Record) time.Time
		// DeleteEnded deletes a sandbox that is still ended, and reports whether it did.
		DeleteEnded(ctx context.Context, id string) (bool, error)
	}
	Snapshots interface {
		List(ctx context.Context) ([]record.Snapshot, error)
		// Delete fails with errs.WrongState while a snapshot is in use.
		Delete(ctx context.Context, id string) error
	}
	Images interface {
		// Prune removes layers that nothing needs, and remains of pulls that were cut short.
		Prune(ctx context.Context, all bool, before time.Time) (image.Pruned, error)
	}
	// Prepared releases slots and members of pools that wait for a create. It is called where
	// nothing new is made, and so no create would take one.
	Prepared func(ctx context.Context) bool
	NoSweep  func() string // why nothing may be removed; empty: it may
	Log      *slog.Logger
}

// Collect removes from a space that is on rung r. The error names what could not be removed; the
// next round tries again.
func (c *Collector) Collect(ctx context.Context, s Space, r Rung) error {
	if c.NoSweep() != "" {
		return nil
	}
	if s.Name == State {
		p, err := c.Images.Prune(ctx, false, time.Time{})
		if p.Bytes > 0 {
			c.Log.Info("removed for want of disk", "what", "layers and remains of pulls", "bytes", p.Bytes)
		}
		if errs.Is(err, errs.WrongState) { // the record of an image cannot be read; the sweep says so
			err = nil
		}
		return err
	}
	if r >= Refuse && c.Prepared(ctx) {
		c.Log.Info("removed for want of disk", "what", "prepared slots and members of pools")
	}
	return errors.Join(c.failed(ctx), c.ended(ctx))
}

// failed removes snapshots that failed.
func (c *Collector) failed(ctx context.Context) error {
	all, err := c.Snapshots.List(ctx)
	if err != nil {
		return fmt.Errorf("remove snapshots that failed: %w", err)
	}
	all = slices.DeleteFunc(slices.Clone(all), func(s record.Snapshot) bool {
		return s.State != record.SnapshotFailed || s.Temporary || time.Since(s.Changed) < readable
	})
	slices.SortFunc(all, func(a, b record.Snapshot) int { return cmp.Or(a.Changed.Compare(b.Changed), cmp.Compare(a.ID, b.ID)) })
	var failed []error
	for _, s := range all[:min(len(all), atOnce)] {
		switch err := c.Snapshots.Delete(ctx, s.ID); {
		case err == nil:
			c.Log.Info("removed for want of disk", "what", "a snapshot that failed", "snapshot", s.ID)
		case !errs.Is(err, errs.NotFound) && !errs.Is(err, errs.WrongState):
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// ended removes ended sandboxes that are erased after a while, the one whose time comes first first.
func (c *Collector) ended(ctx context.Context) error {
	all, err := c.Sandboxes.List(ctx)
	if err != nil {
		return fmt.Errorf("remove ended sandboxes: %w", err)
	}
	// A stopped sandbox with a timeout has a deadline, too, but is somebody's until then.
	all = slices.DeleteFunc(slices.Clone(all), func(r *record.Record) bool {
		return r.State != record.Ended || r.Restarting() || r.Reason == record.Stopped || c.Sandboxes.Deadline(*r).IsZero() ||
			time.Since(r.Changed) < readable
	})
	slices.SortFunc(all, func(a, b *record.Record) int {
		return cmp.Or(c.Sandboxes.Deadline(*a).Compare(c.Sandboxes.Deadline(*b)), cmp.Compare(a.ID, b.ID))
	})
	var failed []error
	for _, r := range all[:min(len(all), atOnce)] {
		done, err := c.Sandboxes.DeleteEnded(ctx, r.ID)
		if done {
			c.Log.Info("removed for want of disk", "what", "an ended sandbox", "sandbox", r.ID, "name", r.Spec.Name,
				"reason", string(r.Reason))
		}
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}
