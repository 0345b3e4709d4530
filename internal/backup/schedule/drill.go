package schedule

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/contents"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// Trial is what a drill needs to restore as `sandboxd restore` does.
type Trial struct {
	Every time.Duration // 0: on request only
	Here  backup.Place
	// Identities returns the private keys for encrypted backups; none if this host has none.
	Identities func() (backup.Identities, error)
	// Key returns the key of this host's secrets.
	Key func() (*sealed.Key, error)
}

// The kinds of what a drill tells.
const (
	DrillDone   = "drill"
	DrillFailed = "drill_failed"
)

// drillDir begins the names of the directories in which drills restore. They are in the
// directory of the state, which is root's alone: a copy has all that the state has.
const drillDir = "drill-"

// A Drilled is a backup that was restored.
type Drilled struct {
	Backup target.Backup
	State  store.Facts
	Took   time.Duration
}

// Drill restores the newest backup into a directory of its own, opens it, checks what
// `sandboxd restore` checks and that its secrets open with the key of this host, and removes the
// copy. The state of the daemon is not touched. The error says why the backup is of no use.
func (k *Keeper) Drill(ctx context.Context) (d Drilled, err error) {
	if err := k.enter(ctx); err != nil {
		return d, err
	}
	defer func() { <-k.turn }()
	began := k.Now()
	bounded, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s has not sent it within %s", k.Target, limit))
	defer cancel()
	d, err = k.drill(bounded)
	d.Took = k.Now().Sub(began)
	if err != nil && ctx.Err() != nil { // the daemon ends
		return d, err
	}
	run := Run{Time: began, Name: d.Backup.Name, Bytes: d.Backup.Bytes}
	if err != nil {
		run.Error = err.Error()
	}
	h := k.note(func(s *Status) *History { return &s.Drill }, run)
	if err != nil {
		k.Log.Error("the restore drill failed: this backup could not be restored now", "name", d.Backup.Name, "target", k.Target.String(),
			"since", h.Since, "err", err)
		k.Tell(DrillFailed, strings.TrimPrefix(d.Backup.Name+": "+run.Error, ": "))
		return d, fmt.Errorf("restore drill: %w", err)
	}
	k.Log.Info("restore drill", "name", d.Backup.Name, "sandboxes", d.State.Sandboxes, "images", d.State.Images, "secrets",
		d.State.Secrets, "dur", d.Took.Round(time.Millisecond))
	k.Tell(DrillDone, d.Backup.Name+" can be restored")
	return d, nil
}

func (k *Keeper) drill(ctx context.Context) (d Drilled, err error) {
	if _, _, err := k.own(ctx); err != nil {
		return d, err
	}
	if d.Backup, err = target.Find(ctx, k.Target, k.Whose(), target.Latest); err != nil {
		return d, err
	}
	if err := RemoveDrills(k.Dir); err != nil {
		return d, err
	}
	ids, err := k.Trial.Identities()
	if err != nil {
		return d, err
	}
	r, err := target.Open(ctx, k.Target, d.Backup.Name)
	if err != nil {
		return d, err
	}
	defer r.Close() //nolint:errcheck // read only
	m, problems, err := k.Trial.Try(ctx, k.Dir, r, ids)
	d.State = m.State
	if err == nil && m.Data != nil {
		err = contents.Check(ctx, k.Target, m.Data, ids, rand.IntN)
	}
	if len(problems) > 0 {
		err = errors.Join(err, errors.New(strings.Join(problems, "; ")))
	}
	return d, err
}

// Try restores a backup into a directory of its own below dir, opens it, and removes it again.
// problems says which secrets in it this host could not use.
func (t *Trial) Try(ctx context.Context, dir string, r io.Reader, ids backup.Identities) (m backup.Manifest, problems []string, err error) {
	if dir, err = os.MkdirTemp(dir, drillDir); err != nil {
		return m, nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	path := filepath.Join(dir, "sandboxd.db")
	if m, err = backup.Unpack(r, ids, path, t.Here); err != nil {
		return m, nil, err
	}
	if err := store.MarkRestored(path, "a drill"); err != nil {
		return m, nil, err
	}
	db, err := store.Open(path, store.Options{Reserve: -1})
	if err != nil {
		return m, nil, err
	}
	problems, err = t.secrets(ctx, db, m.State)
	return m, problems, errors.Join(err, db.Close())
}

// secrets says which secrets of a restored store this host could not use.
func (t *Trial) secrets(ctx context.Context, db *store.DB, f store.Facts) ([]string, error) {
	key, err := t.Key()
	if err != nil && f.Secrets > 0 {
		return []string{backup.NeedsKeys(f, nil), err.Error()}, nil
	}
	if needs := backup.NeedsKeys(f, key); needs != "" {
		return []string{needs}, nil
	}
	s, err := backup.CheckSecrets(ctx, db, key)
	if err != nil {
		return nil, err
	}
	return s.Problems(key), nil
}

// RemoveDrills removes the copies of a daemon that was killed in a drill from the directory of its state.
// No drill may run.
func RemoveDrills(dir string) error {
	all, err := os.ReadDir(dir)
	for _, e := range all {
		if strings.HasPrefix(e.Name(), drillDir) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return err
}
