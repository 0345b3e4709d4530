package schedule

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/sandboxd/sandboxd/internal/durable"
)

// Status is how the last runs went. A Keeper remembers it in a file, so that a restart of the
// daemon moves no timer.
type Status struct {
	ID     string  `json:"id,omitempty"` // of the state (store.BackupIdentity); empty: an earlier release wrote it
	Backup History `json:"backup"`
	Drill  History `json:"drill"`
	// Check compares packs with their names; the last that was is After.
	Check History `json:"check,omitzero"`
	After string  `json:"checkedUpTo,omitempty"`
	// Tried are the backups since the last good one that may be on the target.
	Tried   []string `json:"tried,omitempty"`
	Unknown Unknown  `json:"unknown,omitzero"` // at the last look
	// Refused is why the target did not let old backups be removed after the last one; empty: it did.
	Refused string `json:"removalRefused,omitempty"`
	// Kept is why packs that nothing may need stayed after the last one; empty: none did.
	Kept string `json:"packsKept,omitempty"`
}

// History is how a task has gone. Its zero value is that of one that never ran.
type History struct {
	Good Run `json:"good,omitzero"` // the last that succeeded
	Last Run `json:"last,omitzero"` // the last
	// Since is when it failed first after Good; zero: the last succeeded, or none ran.
	Since time.Time `json:"failsSince,omitzero"`
}

// A Run is one run of a task.
type Run struct {
	Time  time.Time `json:"time"` // when it began
	Name  string    `json:"name,omitempty"`
	Bytes int64     `json:"bytes,omitempty"`
	Error string    `json:"error,omitempty"` // empty: it succeeded

	Data   *DataRun `json:"data,omitempty"`   // of a backup with data
	Full   bool     `json:"full,omitempty"`   // it failed because the target is full
	Unread bool     `json:"unread,omitempty"` // a check that failed without a damage: the target did not send all
	Freed  *Freed   `json:"freed,omitempty"`  // it has made room
}

func (h *History) note(r Run) {
	h.Last = r
	switch {
	case r.Error == "":
		h.Good, h.Since = r, time.Time{}
	case h.Since.IsZero():
		h.Since = r.Time
	}
}

// Bounds of the time after which a run that failed is tried again: long enough not to flood the
// log for a week, and short enough for a disk that somebody has just mounted.
const (
	retryMin = time.Minute
	retryMax = time.Hour
)

// retry is when a task of every so often is tried again after a failure.
func retry(every time.Duration) time.Duration {
	return min(every, max(retryMin, min(retryMax, every/24)))
}

// due reports whether the task is to run now. A last run in the future says that the clock was
// set back: then nobody knows how old it is.
func (h *History) due(every time.Duration, now time.Time) bool {
	if every == 0 {
		return false
	}
	if h.Last.Error != "" {
		every = retry(every)
	}
	return now.Sub(h.Last.Time) >= every || h.Last.Time.Sub(now) > time.Minute
}

// Late reports whether the last success is older than twice the interval.
func (h *History) Late(every time.Duration, now time.Time) bool {
	return every > 0 && now.Sub(h.Good.Time) > 2*every
}

// statusFile is in the directory of the state.
const statusFile = "backups.json"

// ReadStatus reads what the Keeper of a daemon remembers. It is empty if none has run.
func ReadStatus(dir string) (s Status, err error) {
	b, err := os.ReadFile(filepath.Join(dir, statusFile))
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return Status{}, fmt.Errorf("read %s: %w", filepath.Join(dir, statusFile), err)
	}
	return s, nil
}

// note remembers a run, of the task that of says. The caller has the turn.
func (k *Keeper) note(of func(*Status) *History, r Run) (h History) {
	k.remember(func(s *Status) {
		of(s).note(r)
		h = *of(s)
	})
	return h
}

// remember changes the status, and writes it down. The caller has the turn. What cannot be written down
// is known to this daemon only.
func (k *Keeper) remember(change func(*Status)) {
	id := k.State.Backups().ID
	k.mu.Lock()
	change(&k.status)
	k.status.ID = id
	s := k.status
	k.mu.Unlock()
	b, err := json.Marshal(s)
	if err == nil {
		err = durable.Write(filepath.Join(k.Dir, statusFile), b, 0o600)
	}
	if err != nil {
		k.Log.Warn("how the run went is not written down", "err", err)
	}
}
