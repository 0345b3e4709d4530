// Package retention removes snapshots that exceed the limits of the configuration.
//
// It calls the Manager's Snapshots like any other caller and stores nothing itself: what
// is to go follows from the records, so a daemon that is killed forgets none of it. Plan
// says what goes, without I/O; Apply removes it.
//
// What surprises: no limit refuses a snapshot. One that was asked for is taken, and then
// the oldest go. So the newest stays, even one that is larger than a limit of bytes.
package retention

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Limits are what snapshots may be, each with the key of the configuration that sets it;
// 0: no limit.
type Limits struct {
	Max, MaxPerSandbox     int
	Bytes, BytesPerSandbox int64
	Age                    time.Duration
}

// The limits as a removal names them: keys of the table [snapshots] of the configuration.
const (
	maxAll         = "max"
	maxPerSandbox  = "max_per_sandbox"
	maxBytes       = "max_bytes"
	bytesPerSource = "max_bytes_per_sandbox"
	maxAge         = "max_age"
)

// LimitNames are the limits that a Removal may name.
func LimitNames() []string { return []string{maxAll, maxPerSandbox, maxBytes, bytesPerSource, maxAge} }

// A Removal is a snapshot that goes, and the limit that it exceeds.
type Removal struct {
	Snapshot record.Snapshot
	Limit    string
}

// failedKept is how long a snapshot that failed stays and does not count, so that a client
// that polls reads why.
const failedKept = time.Minute

// atOnce is how many snapshots one Apply removes at most: each takes milliseconds, and the
// sweep has more to do. The next one goes on.
const atOnce = 500

// Plan says which snapshots go, in that order: failed ones first, and then the oldest. A
// snapshot that is being taken or deleted, or that its maker deletes, does not count and
// stays.
func Plan(all []record.Snapshot, l Limits, now time.Time) (gone []Removal) {
	var left []record.Snapshot
	for _, s := range all {
		if s.Temporary || s.State != record.SnapshotReady && (s.State != record.SnapshotFailed || now.Sub(s.Changed) < failedKept) {
			continue
		}
		left = append(left, s)
	}
	slices.SortFunc(left, inOrder)
	if l.Age > 0 {
		left = slices.DeleteFunc(left, func(s record.Snapshot) bool {
			old := now.Sub(s.Created) > l.Age
			if old {
				gone = append(gone, Removal{s, maxAge})
			}
			return old
		})
	}
	bySource := map[string][]record.Snapshot{}
	for _, s := range left {
		bySource[s.Source] = append(bySource[s.Source], s)
	}
	out := map[string]bool{}
	for _, of := range bySource {
		for _, r := range beyond(of, l.MaxPerSandbox, l.BytesPerSandbox, maxPerSandbox, bytesPerSource) {
			out[r.Snapshot.ID] = true
			gone = append(gone, r)
		}
	}
	left = slices.DeleteFunc(left, func(s record.Snapshot) bool { return out[s.ID] })
	gone = append(gone, beyond(left, l.Max, l.Bytes, maxAll, maxBytes)...)
	slices.SortFunc(gone, func(a, b Removal) int { return inOrder(a.Snapshot, b.Snapshot) })
	return gone
}

// inOrder compares which of two snapshots goes first.
func inOrder(a, b record.Snapshot) int {
	failed := func(s record.Snapshot) int {
		if s.State == record.SnapshotFailed {
			return 0
		}
		return 1
	}
	return cmp.Or(failed(a)-failed(b), a.Created.Compare(b.Created), cmp.Compare(a.ID, b.ID))
}

// beyond says which of these, which are in order, are too many or hold too much. The newest
// that is ready stays, and for the sake of bytes so does what holds none.
func beyond(list []record.Snapshot, count int, bytes int64, countName, bytesName string) (gone []Removal) {
	n, sum := len(list), int64(0)
	for i := range list {
		sum += list[i].HeldBytes()
	}
	for i, s := range list {
		limit := ""
		switch {
		case i == len(list)-1 && s.State == record.SnapshotReady:
		case count > 0 && n > count:
			limit = countName
		case bytes > 0 && sum > bytes && s.HeldBytes() > 0:
			limit = bytesName
		}
		if limit != "" {
			gone = append(gone, Removal{s, limit})
			n, sum = n-1, sum-s.HeldBytes()
		}
	}
	return gone
}

// Snapshots is what retention needs of sandbox.Snapshots.
type Snapshots interface {
	List(ctx context.Context) ([]record.Snapshot, error)
	// Delete fails with errs.WrongState while a snapshot is in use.
	Delete(ctx context.Context, id string) error
}

// Apply removes what Plan names, and calls removed for each that went. A snapshot that is in
// use stays until it no longer is, and nothing goes in its place. The error names what could
// not be removed; the next Apply tries again.
func Apply(ctx context.Context, s Snapshots, l Limits, now time.Time, removed func(Removal)) error {
	if l == (Limits{}) {
		return nil
	}
	all, err := s.List(ctx)
	if err != nil {
		return fmt.Errorf("remove snapshots beyond their limits: %w", err)
	}
	var failed []error
	for i, r := range Plan(all, l, now) {
		if i == atOnce || ctx.Err() != nil {
			break
		}
		switch err := s.Delete(ctx, r.Snapshot.ID); {
		case err == nil:
			removed(r)
		case errs.Is(err, errs.NotFound), errs.Is(err, errs.WrongState): // another was faster, or it is in use
		default:
			failed = append(failed, fmt.Errorf("remove snapshot %s, which exceeds snapshots.%s: %w", r.Snapshot.ID, r.Limit, err))
		}
	}
	return errors.Join(failed...)
}
