package upgrade

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// unitNames are the files of a version that a service manager reads.
var unitNames = []string{"sandboxd.service", "sandboxd.socket"}

// Settle undoes a change that nobody will finish, or whose version has crashed in its soak. While a package manager
// replaces the version, it lets the one of before run. The caller has the locks of the instance, so no daemon has the
// state open. It returns the version that is to run; "": this change is none of this root, is on trial or in its soak,
// and whoever calls goes on. config is the file that the daemon reads; "": it has none.
func Settle(ctx context.Context, r versions.Root, state, config string, log *slog.Logger) (run string, err error) {
	before, err := r.Replaced()
	if err != nil {
		return "", err
	}
	if before != "" {
		if err := r.PutBack(before); err == nil {
			log.Warn("a package manager has not come to the trial of a new version yet, so the version of before runs", "version", before)
		} else { // better a version that nobody has tried than none
			log.Error("the current version runs untried, because the one of before is not whole", "err", err)
			before = ""
		}
	}
	if run, err = settle(ctx, r, state, config, log); run == "" {
		run = before
	}
	return run, err
}

// settle is Settle of what the journal says.
func settle(ctx context.Context, r versions.Root, state, config string, log *slog.Logger) (run string, err error) {
	j, err := r.Journal()
	if err != nil {
		return "", err
	}
	soaks, crashed, err := soak(r, j)
	if err != nil || soaks && !crashed {
		return "", err
	}
	if !j.UnderWay() && !crashed {
		return "", r.Disarm()
	}
	if j.Step == versions.Trial || crashed {
		held, err := r.Held()
		if held || err != nil {
			return "", err
		}
		if crashed {
			if stays, err := stay(ctx, r, j, config, log); stays || err != nil {
				return "", err
			}
		}
		if err := r.Release(); err != nil {
			return "", err
		}
		j.Reason = "the program that changed the version ended before it was done"
		if crashed {
			j.Reason = fmt.Sprintf("it ended without having been asked to, in the %s after it was found good (the service's log says more)",
				j.SoakUntil.Sub(j.Ended).Round(time.Second))
		}
		j.Step = versions.Undoing
		if err := failpoint.Pass("settle:journal"); err != nil {
			return "", err
		}
		if err := r.Note(j); err != nil {
			return "", err
		}
	}
	log.Warn("going back to the version of before", "from", j.To, "to", j.From, "reason", j.Reason)
	if err := undo(r, j, state); err != nil {
		return "", fmt.Errorf("go back from sandboxd %s to %s: %w", j.To, j.From, err)
	}
	return j.From, nil
}

// soak reports whether the change is done and still watched, and whether its version has crashed then.
func soak(r versions.Root, j *versions.Journal) (soaks, crashed bool, err error) {
	if !j.Soaks(time.Now()) {
		return false, false, nil
	}
	if current, err := r.Named(versions.Current); err != nil || current != j.To { // a package has put another one there
		return false, false, err
	}
	crashed, err = r.Crashed()
	return true, crashed, err
}

// checkLimit is how long a version may take to read a configuration: a program that hangs must not keep another
// from starting.
const checkLimit = time.Minute

// stay ends the soak, and reports that it has, if the version of before cannot read the present configuration: it
// would not start. The configuration may have got a key since the change that only the new version knows.
func stay(ctx context.Context, r versions.Root, j *versions.Journal, config string, log *slog.Logger) (stays bool, err error) {
	limited, cancel := context.WithTimeout(ctx, checkLimit)
	defer cancel()
	unread := tell(limited, nil, r.Program(j.From, "sandboxd"), withConfig(config, "config", "check")...)
	if unread == nil {
		return false, nil
	}
	if ctx.Err() != nil { // it was cut short
		return false, context.Cause(ctx)
	}
	log.Error("the new version crashed in its soak, and goes on all the same: the version of before cannot read the configuration. "+
		"To go back, remove from the configuration what err names, and run: sandboxd rollback", "version", j.To, "before", j.From,
		"err", unread)
	if err := r.Release(); err != nil { // first: the disk may be full
		return false, err
	}
	j.SoakUntil = time.Time{}
	return true, errors.Join(r.Note(j), r.Disarm())
}

// undo does what undoes a change, in an order that may be cut anywhere and begun again.
func undo(r versions.Root, j *versions.Journal, state string) error {
	for _, s := range []struct {
		name string
		do   func() error
	}{
		{"state", func() error { return putBack(state, j) }},
		{"links", func() error { return turnBack(r, j) }},
		{"done", func() error {
			j.Step, j.Ended = versions.Undone, time.Now().UTC()
			return r.Note(j)
		}},
		{"disarm", r.Disarm},
	} {
		if err := failpoint.Pass("settle:" + s.name); err != nil {
			return err
		}
		if err := s.do(); err != nil {
			return err
		}
	}
	return nil
}

// turnBack lets units and links be of the version of before.
func turnBack(r versions.Root, j *versions.Journal) error {
	return errors.Join(putUnits(r, j.From, j.Units), r.Point(versions.Current, j.From), r.Point(versions.Previous, j.Before),
		r.Instead(j.To, j.From))
}

// putBack puts the copy of the state in place that the new version kept when it brought the state
// forward. The state of the new version stays beside it, as <state>.undone.
func putBack(state string, j *versions.Journal) error {
	if j.FromSchema == j.ToSchema {
		return nil
	}
	have, err := store.SchemaOf(state)
	if errors.Is(err, fs.ErrNotExist) || err == nil && have <= j.FromSchema {
		return nil
	}
	if err != nil {
		return err
	}
	kept := store.KeptName(state, j.FromSchema)
	if _, err := os.Stat(kept); err != nil {
		return fmt.Errorf("put back the state of schema %d: %w; restore a backup with sandboxd restore", j.FromSchema, err)
	}
	aside := state + ".undone"
	if err := os.Remove(aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Link(state, aside); err != nil {
		return fmt.Errorf("keep the state of schema %d: %w", have, err)
	}
	return durable.Rename(kept, state)
}

// putUnits copies the unit files of a version to where the service manager reads them.
func putUnits(r versions.Root, version, dir string) error {
	if dir == "" {
		return nil
	}
	for _, name := range unitNames {
		b, err := os.ReadFile(filepath.Join(r.Dir(version), "systemd", name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("the unit files of %s: %w", version, err)
		}
		path := filepath.Join(dir, name)
		if now, err := os.ReadFile(path); err == nil && string(now) == string(b) {
			continue // a unit that changes needs systemctl daemon-reload
		}
		if err := durable.Write(path, b, 0o644); err != nil {
			return fmt.Errorf("the unit files of %s: %w", version, err)
		}
	}
	return nil
}
