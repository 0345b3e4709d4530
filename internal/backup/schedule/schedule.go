// Package schedule takes backups on a timer, removes old ones, and tries to restore the newest.
//
//	Tick ─▶ due? ─▶ [packs of data] ─▶ take ─▶ encrypt ─▶ put, read back, compare, mark ─▶ remove old ones
//
// Which backups are counted and removed is a matter of the state's own identity, not of the host's name
// (whose.go).
//
// What surprises: nothing is removed before a new backup was read back, except from a full target: it loses
// what the new one would let go (room.go). The newest whole backup is never removed. So a target that is
// gone or lies costs no backup; the keeper tries again (retry), and Status tells since when it fails. A
// drill (drill.go) shows that the newest backup can be restored.
package schedule

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// Limits are the backups that are kept; 0: no limit. The newest whole one stays whatever they
// say.
type Limits struct {
	Count int
	Age   time.Duration
}

// Config is the configuration of a Keeper.
type Config struct {
	Target     target.Target
	Every      time.Duration // 0: on request only
	Keep       Limits
	Recipients backup.Recipients // nil: not encrypted
	Label      string            // of this instance and host (target.Label)
	State      *store.DB         // it says which backups are this state's
	Dir        string            // the daemon's state: copies and Status are there
	// Take returns a backup of now, at its beginning: a file without a name in Dir. It puts the data
	// into the session, and returns what of it is in the file; without a session both are nil.
	Take func(context.Context, *chunks.Session) (*os.File, *backup.Data, error)
	// Data is where the data goes; nil: backups are of the state alone.
	Data *chunks.Store
	// Low is whether the thread that reads and compresses data has a low priority.
	Low   bool
	Trial Trial
	Now   func() time.Time // nil: time.Now
	Log   *slog.Logger
	Tell  func(kind, message string) // of the end of each run; may be nil
}

// The kinds of what a Keeper tells.
const (
	Done   = "backup"        // a backup is stored, read back and compared
	Failed = "backup_failed" // none is; those before stay
)

// limit bounds one run: a target that hangs must not keep the next one from trying.
// With data it may take longer; what is sent by then is not sent again.
const (
	limit     = 2 * time.Hour
	dataLimit = 24 * time.Hour
)

// tick is how often Run looks at the clock. A clock that jumps is noticed at the next look.
const tick = time.Minute

// A Keeper keeps backups. Its methods may be called concurrently; runs are one after the other.
type Keeper struct {
	Config
	turn chan struct{} // full while something runs
	said bool          // what is unknown on the target, since the start; guarded by turn

	sent map[string]bool // packs that the backup of now uses so far; guarded by turn

	checking sync.Mutex // held while CheckAll runs

	mu     sync.Mutex
	status Status // guarded by mu
	failed uint64 // backups, since the daemon started; guarded by mu
}

// New returns a Keeper that knows what the one before it knew.
func New(c Config) *Keeper {
	if c.Now == nil {
		c.Now = func() time.Time { return time.Now().Round(0).UTC() }
	}
	if c.Tell == nil {
		c.Tell = func(string, string) {}
	}
	k := &Keeper{Config: c, turn: make(chan struct{}, 1)}
	var err error
	if k.status, err = ReadStatus(c.Dir); err != nil {
		c.Log.Warn("what is known of earlier backups cannot be read; the next one is taken at once", "err", err)
	}
	if id := c.State.Backups(); k.status.ID != id.ID && !(k.status.ID == "" && id.Earlier) {
		k.status = Status{} // it is of the state before this one
	}
	return k
}

// Look lists the target, and says what on it is unknown.
func (k *Keeper) Look(ctx context.Context) error {
	if err := k.enter(ctx); err != nil {
		return err
	}
	defer func() { <-k.turn }()
	_, _, err := k.own(ctx)
	return err
}

// Run does what is due, until ctx ends. A target that hangs may keep it from returning.
func (k *Keeper) Run(ctx context.Context) {
	if err := k.Look(ctx); err != nil && ctx.Err() == nil {
		k.Log.Warn("the target of backups cannot be listed", "target", k.Target.String(), "err", err)
	}
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C: // not at once: other work of a start comes first
			k.Tick(ctx)
		}
	}
}

// Tick does what is due now.
func (k *Keeper) Tick(ctx context.Context) {
	if s := k.Status(); s.Backup.due(k.Every, k.Now()) {
		k.Backup(ctx) //nolint:errcheck // Backup has logged it
	}
	if s := k.Status(); s.Backup.Good.Name != "" && s.Drill.due(k.Trial.Every, k.Now()) {
		k.Drill(ctx) //nolint:errcheck // likewise
	}
	if s := k.Status(); k.Data != nil && s.Backup.Good.Name != "" && s.checkDue(k.Now()) {
		k.Check(ctx) //nolint:errcheck // likewise
	}
}

// Status is how the last runs went.
func (k *Keeper) Status() Status {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.status
}

// Failures is how many backups failed since the daemon started.
func (k *Keeper) Failures() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.failed
}

// List lists the backups of all owners on the target.
func (k *Keeper) List(ctx context.Context) ([]target.Backup, error) {
	return target.Backups(ctx, k.Target)
}

// enter waits for other runs.
func (k *Keeper) enter(ctx context.Context) error {
	select {
	case k.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Backup takes a backup now. It returns when the target has it, and old ones are removed.
func (k *Keeper) Backup(ctx context.Context) (b target.Backup, err error) {
	if err := k.enter(ctx); err != nil {
		return b, err
	}
	defer func() { <-k.turn }()
	began := k.Now()
	bound := limit
	if k.Data != nil {
		bound = dataLimit
	}
	bounded, cancel := context.WithTimeoutCause(ctx, bound, fmt.Errorf("%s has not taken it within %s", k.Target, bound))
	defer cancel()
	k.sent = nil
	b, data, err := k.backup(bounded)
	var freed *Freed
	if errors.Is(err, target.ErrFull) {
		b, data, freed, err = k.again(bounded, err)
	}
	if err != nil && ctx.Err() != nil { // the daemon ends: it is nobody's fault
		return b, err
	}
	run := Run{Time: began, Name: b.Name, Bytes: b.Bytes, Data: data, Freed: freed}
	if err != nil {
		run.Error, run.Full = err.Error(), errors.Is(err, target.ErrFull)
	}
	h := k.note(func(s *Status) *History {
		if err == nil {
			s.Tried = nil
		}
		return &s.Backup
	}, run)
	if err != nil {
		k.mu.Lock()
		k.failed++
		k.mu.Unlock()
		k.Log.Error("the backup failed; those before it stay, and the timer tries again", "target", k.Target.String(), "since", h.Since,
			"err", err)
		k.Tell(Failed, run.Error)
		return b, fmt.Errorf("back up to %s: %w", k.Target, err)
	}
	k.Log.Info("backup", "name", b.Name, "target", k.Target.String(), "bytes", b.Bytes, "encrypted", b.Encrypted,
		"dur", k.Now().Sub(began).Round(time.Millisecond))
	k.Tell(Done, fmt.Sprintf("%s, %d bytes", b.Name, b.Bytes)+data.text()+freed.text())
	return b, nil
}

func (k *Keeper) backup(ctx context.Context) (b target.Backup, data *DataRun, err error) {
	mine, all, err := k.own(ctx) // first: a target that is gone costs no copy of the state
	if err != nil {
		return b, nil, err
	}
	good := k.Status().Backup.Good
	if good.Name != "" && !slices.ContainsFunc(mine, func(b target.Backup) bool { return b.Name == good.Name && b.Whole }) {
		k.Log.Warn("the last backup is not on the target any more: somebody has removed it, or another disk is mounted there",
			"name", good.Name, "target", k.Target.String())
	}
	f, packs, data, err := k.take(ctx)
	if err != nil {
		return b, nil, err
	}
	defer f.Close() //nolint:errcheck // it is on the target by then, or not
	fi, err := f.Stat()
	if err != nil {
		return b, nil, err
	}
	w, now := k.Whose(), k.Now().UTC().Truncate(time.Second)
	b = target.Backup{
		Owner: w.Owner(), Label: w.Label, ID: w.ID, Number: w.Next(all), Taken: now, Encrypted: k.Recipients != nil, Bytes: fi.Size(),
		Whole: true,
	}
	b.Name = target.Name(b.Owner, b.Number, now, b.Encrypted)
	k.remember(func(s *Status) { // before it is there: a daemon that finds it must know that it is its own
		s.Tried = slices.DeleteFunc(s.Tried, func(name string) bool {
			return !slices.ContainsFunc(all, func(b target.Backup) bool { return b.Name == name })
		})
		s.Tried = append(slices.Clone(s.Tried), b.Name)
	})
	if _, err := target.Save(ctx, k.Target, b.Name, f, b.Bytes, packs); err != nil {
		return b, nil, err
	}
	k.removeOld(ctx, now)
	return b, data, nil
}

// AppendOnly reports whether nothing is removed from the target.
func (k *Keeper) AppendOnly() bool {
	_, ok := k.Target.(target.AppendOnly)
	return ok
}

// removeOld removes what the limits say, after a backup was stored.
func (k *Keeper) removeOld(ctx context.Context, now time.Time) {
	if k.AppendOnly() {
		k.remember(func(s *Status) { s.Refused, s.Kept = "", "" })
		return
	}
	mine, all, err := k.own(ctx) // again: another daemon may have written meanwhile
	if err != nil {
		k.Log.Warn("old backups are not removed; the next run tries again", "err", err)
		return
	}
	var refused error
	for _, old := range Plan(mine, k.Keep, now) {
		if err := target.Drop(ctx, k.Target, old.Name); err != nil {
			k.Log.Warn("an old backup is not removed; the next run tries again", "name", old.Name, "err", err)
			refused = cmp.Or(refused, err)
			continue
		}
		all = slices.DeleteFunc(all, func(b target.Backup) bool { return b.Name == old.Name })
		k.Log.Info("backup removed", "name", old.Name, "whole", old.Whole)
	}
	p, err := k.prune(ctx, all, nil)
	if err != nil {
		k.Log.Warn("packs that no backup needs are not removed; the next run tries again", "err", err)
		refused = cmp.Or(refused, err)
	}
	k.remember(func(s *Status) {
		s.Refused, s.Kept = "", p.kept
		if refused != nil {
			s.Refused = refused.Error()
		}
	})
}

// take sends the data, and makes the file that the target gets.
func (k *Keeper) take(ctx context.Context) (f *os.File, packs []string, data *DataRun, err error) {
	if k.Data == nil {
		f, _, err = k.Take(ctx, nil)
	} else {
		f, packs, data, err = k.takeData(ctx)
	}
	if err == nil && k.Recipients != nil {
		f, err = k.encrypt(f)
	}
	return f, packs, data, err
}

// encrypt encrypts a file for the recipients, and closes it.
func (k *Keeper) encrypt(f *os.File) (*os.File, error) {
	defer f.Close() //nolint:errcheck // read only
	out, err := os.OpenFile(k.Dir, unix.O_TMPFILE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a file for the encrypted backup: %w", err)
	}
	err = k.Recipients.Encrypt(out, f)
	if err == nil {
		_, err = out.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return out, nil
}

// Plan says which backups of one state go, the oldest first, after the last of them was stored. It
// is whole, and never goes. Those that were cut short go, and the mark of one that is gone.
func Plan(all []target.Backup, keep Limits, now time.Time) (gone []target.Backup) {
	whole := 0
	for i, b := range slices.Backward(all) {
		if b.Whole {
			whole++
		}
		switch {
		case i == len(all)-1:
		case !b.Whole, keep.Count > 0 && whole > keep.Count, keep.Age > 0 && now.Sub(b.Taken) > keep.Age:
			gone = append(gone, b)
		}
	}
	slices.Reverse(gone)
	return gone
}

// Unconfigured is what a daemon without a target answers.
func Unconfigured() error {
	return errs.New(errs.WrongState, "this daemon keeps no backups: name a directory or a bucket in backup.target of its configuration, "+
		"and restart it; `sandboxctl system backup` writes one to a file without that")
}
