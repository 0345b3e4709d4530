// Package table brings up, and takes away, what a sandbox is made of. That is a table: each row says
// how one kind of thing comes up and goes away, and on which others it stands. Rows that do not stand
// on one another go at the same time.
//
//	Acquire ─▶ namespaces ─┬▶ rootfs ─┬▶ runtime ─▶ agent     Up, each under its limit, between two failpoints
//	           disk ───────┘  cgroup ─┘                       the first error ends it
//	Release ◀─ the other way round                            Down, all of them, whatever fails
//
// Package sandbox has the rows.
package table

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Row is one kind of thing a sandbox holds on the host.
//
// Up may fail half way. Down must succeed when Up never ran, ran half way or
// ran twice, and must need nothing but the ID. Held lists who holds one. Down
// and Held may be nil.
type Row struct {
	Name string
	// After names the rows that this one stands on: Up waits for them, and
	// their Down waits for this one's. Rows that do not stand on one another
	// come up at the same time.
	After []string
	// Keep marks what an ended sandbox still holds.
	Keep bool
	// Wanted, if not nil, says whether a record needs one at all: else there is
	// nothing to bring up.
	Wanted func(*record.Record) bool
	Limit  time.Duration // of Up, and of Down
	// Recall, if not 0, is that of Up for a record that comes up with memory: to read a large
	// image from a slow disk takes long.
	Recall time.Duration
	Up     func(context.Context, *record.Record) error
	Down   func(context.Context, *record.Record) error
	// Fit, if not nil, makes what Up has made for a prepared slot as the sandbox that took
	// it needs it. Such a row comes up with the slot: its Up needs only what a slot has. If
	// Fit fails with fs.ErrNotExist the row is lost, and comes up anew.
	Fit func(context.Context, *record.Record) error
	// Claim, if not nil, does the same for a member of a pool, whose rows Up has made for the
	// template of the pool. If Claim fails before the agent's, the sandbox comes up cold.
	Claim func(context.Context, *record.Record) error
	Held  func(context.Context) ([]string, error)
	// Whole, if not nil, reports whether all of what a record holds is there: Held also
	// names those that hold a part.
	Whole func(context.Context, *record.Record) (bool, error)
	// Lost says how bad it is if a living sandbox no longer holds one; nil: Harmless.
	Lost func(*record.Record) Loss
	// Rejoin, if not nil, repairs a row that is held in part, while the sandbox runs.
	// If nil, such a row is lost.
	Rejoin func(context.Context, *record.Record) error
}

// Wants reports whether r needs one.
func (row *Row) Wants(r *record.Record) bool { return row.Wanted == nil || row.Wanted(r) }

// bring returns how the row comes up for r, and the name of that in failpoints.
func (row *Row) bring(r *record.Record) (verb string, f func(context.Context, *record.Record) error) {
	switch {
	case r.Claims() && row.Claim != nil:
		return "claim:", row.Claim
	case r.State == record.Prepared && r.Pool.Name != "":
		return "member:", row.Up
	case row.Fit == nil:
		return "up:", row.Up
	case r.State == record.Prepared:
		return "prepare:", row.Up
	case r.State == record.Creating && r.Prepared:
		return "fit:", func(ctx context.Context, r *record.Record) error {
			err := row.Fit(ctx, r)
			if errors.Is(err, fs.ErrNotExist) {
				return row.Up(ctx, r)
			}
			return err
		}
	}
	return "up:", row.Up
}

// A Loss says what happens to a live sandbox that no longer holds a row, because
// somebody removed it on the host.
type Loss int

const (
	Harmless Loss = iota // the running processes have a hold of their own on it
	Mendable             // Up brings it back
	Fatal                // nothing brings it back while the processes run
)
