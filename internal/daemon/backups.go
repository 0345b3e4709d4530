package daemon

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/chunks"
	"github.com/sandboxd/sandboxd/internal/backup/schedule"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/sealed"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// openBackups makes the keeper of backups, if the configuration names a target for them.
func openBackups(d *Daemon, version string) error {
	c := d.cfg.Backup
	removeDrills(d)
	// Also without a target: two copies of a state must not get one later with the identity of both.
	if err := schedule.Bind(context.Background(), d.store, machine(), d.log); err != nil {
		return err
	}
	to, err := c.Open()
	if err != nil || to == nil {
		return err
	}
	recipients, err := backup.ParseRecipients(c.Encrypt)
	if err != nil {
		return err
	}
	d.backups = schedule.New(schedule.Config{
		Target:     to,
		Every:      time.Duration(c.Every),
		Keep:       schedule.Limits{Count: c.Keep, Age: time.Duration(c.MaxAge)},
		Recipients: recipients,
		Label:      labelOf(d.cfg),
		State:      d.store,
		Dir:        d.cfg.StateDir,
		Take: func(ctx context.Context, to *chunks.Session) (*os.File, *backup.Data, error) {
			f, data, err := (&system{Daemon: d, version: version}).backup(ctx, to)
			return f, data, noRoom(err)
		},
		Data:  dataStore(d, to, recipients),
		Low:   true,
		Trial: trialOf(d.cfg),
		Log:   d.log,
		Tell:  func(kind, message string) { sandbox.Tell(d.manager, kind, "", message) },
	})
	return nil
}

// dataStore is where the data of backups goes; nil if they have none.
func dataStore(d *Daemon, to target.Target, recipients backup.Recipients) *chunks.Store {
	if !d.cfg.Backup.Data {
		return nil
	}
	return &chunks.Store{
		Target: to, Sealer: recipients.Sealer(d.cfg.Backup.Encrypt),
		Journal: filepath.Join(d.cfg.StateDir, "backups.journal"), Log: d.log,
	}
}

// trialOf is what it takes to try a backup on this host.
func trialOf(cfg *config.Config) schedule.Trial {
	return schedule.Trial{
		Every:      time.Duration(cfg.Backup.Drill),
		Here:       placeOf(cfg),
		Identities: cfg.Backup.Identities,
		Key:        func() (*sealed.Key, error) { return openKey(cfg, false) },
	}
}

// labelOf is what backups of this host are called on a target.
func labelOf(cfg *config.Config) string {
	host, _ := os.Hostname()
	return target.Label(cfg.Instance.String(), host)
}

// whoseOf says whose backups are this host's, beside a daemon or without one. If nobody can read the
// state, what a daemon has written down.
func whoseOf(cfg *config.Config) target.Whose {
	w := target.Whose{Label: labelOf(cfg)}
	if id, ok, err := store.BackupsOf(stateFile(cfg)); err == nil && ok {
		w.BackupIdentity = id
	} else if s, serr := schedule.ReadStatus(cfg.StateDir); err != nil && serr == nil {
		w.ID = s.ID
	}
	return w
}

// machine tells this machine from others that have a copy of its disk: a hash of machine-id(5), which
// many ways to copy a machine replace, and of the id that the firmware gives, which each virtual machine
// has of its own; empty: there is neither.
func machine() string {
	h, found := sha256.New(), false
	for _, file := range []string{"/etc/machine-id", "/sys/class/dmi/id/product_uuid"} {
		text, err := os.ReadFile(file)
		found = found || err == nil && len(bytes.TrimSpace(text)) > 0
		fmt.Fprintf(h, "%s\x00", bytes.TrimSpace(text))
	}
	if !found {
		return ""
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

var _ api.Backups = backups{}

// backups is a Keeper as the API has it; it may be nil.
type backups struct{ *schedule.Keeper }

// List lists the backups on the target.
func (b backups) List(ctx context.Context) (out []wire.Backup, err error) {
	if b.Keeper == nil {
		return nil, schedule.Unconfigured()
	}
	all, err := b.Keeper.List(ctx)
	if err != nil {
		return nil, unreached("list the backups", err)
	}
	for _, one := range all {
		out = append(out, b.wire(one))
	}
	return out, nil
}

// wire is a backup for clients.
func (b backups) wire(one target.Backup) wire.Backup {
	return wire.Backup{
		Name: one.Name, Owner: one.Owner, TakenAt: one.Taken, Bytes: max(0, one.Bytes), Encrypted: one.Encrypted, Verified: one.Whole,
		Whose: string(b.Whose().Of(one)),
	}
}

// Adopt makes backups of other states count as this one's.
func (b backups) Adopt(ctx context.Context, names []string) (out []wire.Backup, err error) {
	if b.Keeper == nil {
		return nil, schedule.Unconfigured()
	}
	all, err := b.Keeper.Adopt(ctx, names)
	if err != nil {
		return nil, unreached("adopt backups", err)
	}
	for _, one := range all {
		out = append(out, b.wire(one))
	}
	return out, nil
}

// Remove removes backups that count, and what only they need.
func (b backups) Remove(ctx context.Context, names []string) (wire.RemovedBackups, error) {
	if b.Keeper == nil {
		return wire.RemovedBackups{}, schedule.Unconfigured()
	}
	r, err := b.Keeper.Remove(ctx, names)
	if err != nil {
		return wire.RemovedBackups{}, unreached("remove backups", err)
	}
	out := wire.RemovedBackups{Items: []wire.Backup{}, Packs: r.Packs, Bytes: r.Bytes, PacksKept: r.Kept}
	for _, one := range r.Backups {
		out.Items = append(out.Items, b.wire(one))
	}
	return out, nil
}

// Check reads every byte of backups.
func (b backups) Check(ctx context.Context, names []string, line func(wire.BackupCheckLine)) (wire.BackupCheck, error) {
	if b.Keeper == nil {
		return wire.BackupCheck{}, schedule.Unconfigured()
	}
	c, err := b.CheckAll(ctx, names, schedule.Listener{
		Progress: func(c schedule.Checked) {
			now := wireCheck(c)
			line(wire.BackupCheckLine{Progress: &now})
		},
		Damage: func(d schedule.Damage) {
			line(wire.BackupCheckLine{Damage: &wire.BackupDamage{
				Backup: d.Backup.Name, Whose: string(b.Whose().Of(d.Backup)), Tree: d.Tree, File: d.File, Problem: d.Problem,
			}})
		},
	})
	if err != nil {
		return wire.BackupCheck{}, unreached("check the backups", err)
	}
	c.Backup = ""
	return wireCheck(c), nil
}

func wireCheck(c schedule.Checked) wire.BackupCheck {
	return wire.BackupCheck{
		Backup: c.Backup, Backups: c.Backups, Of: c.Of, Packs: c.Packs, Bytes: c.Bytes, Damaged: c.Damaged, Partial: c.Partial,
		Sealed: c.Sealed, Removed: c.RemovedBefore,
	}
}

// Now takes a backup.
func (b backups) Now(ctx context.Context) (wire.Backup, error) {
	if b.Keeper == nil {
		return wire.Backup{}, schedule.Unconfigured()
	}
	one, err := b.Backup(ctx)
	if err != nil {
		return wire.Backup{}, unreached("", err)
	}
	return b.wire(one), nil
}

// Drill restores the newest backup into a directory of its own.
func (b backups) Drill(ctx context.Context) (wire.BackupDrill, error) {
	if b.Keeper == nil {
		return wire.BackupDrill{}, schedule.Unconfigured()
	}
	d, err := b.Keeper.Drill(ctx)
	if err != nil {
		return wire.BackupDrill{}, unreached("", err)
	}
	return wire.BackupDrill{
		Backup: b.wire(d.Backup), Sandboxes: d.State.Sandboxes, Images: d.State.Images, Secrets: d.State.Secrets,
		TookMillis: d.Took.Milliseconds(),
	}, nil
}

// Status says how the last runs went.
func (b backups) Status() (wire.BackupStatus, error) {
	if b.Keeper == nil {
		return wire.BackupStatus{}, schedule.Unconfigured()
	}
	s := b.Keeper.Status()
	return wire.BackupStatus{
		Owner: b.Whose().Owner(), Unknown: s.Unknown.Count, UnknownNewest: s.Unknown.Newest,
		RemovalRefused: s.Refused, PacksKept: s.Kept, AppendOnly: b.AppendOnly(),
		Data: b.data(s), Target: b.Target.String(), EverySeconds: int64(b.Every.Seconds()), Keep: b.Keep.Count,
		MaxAgeSeconds: int64(b.Keep.Age.Seconds()), Encrypted: b.Recipients != nil, Backup: wireRun(s.Backup),
		DrillSeconds: int64(b.Trial.Every.Seconds()), Drill: wireRun(s.Drill),
	}, nil
}

// data is what is known of data; nil if backups have none.
func (b backups) data(s schedule.Status) *wire.BackupData {
	if b.Keeper.Data == nil {
		return nil
	}
	d := &wire.BackupData{Check: wireRun(s.Check)}
	if run := s.Backup.Good.Data; run != nil {
		d.Bytes, d.SentBytes, d.Packs, d.LeftOut = run.Bytes, run.Sent, run.Packs, run.Left
	}
	return d
}

// unreached is an error of the target, or of what is on it, for an admin. It may work later.
func unreached(what string, err error) error {
	if code := errs.CodeOf(err); code != errs.Internal {
		return errs.New(code, "%v", err)
	}
	if what != "" {
		err = fmt.Errorf("%s: %w", what, err)
	}
	return errs.New(errs.Unavailable, "%v", err)
}

func wireRun(h schedule.History) (r wire.BackupRun) {
	r.LastGood, r.Name, r.Bytes = spec.Moment(h.Good.Time), h.Good.Name, h.Good.Bytes
	if !h.Since.IsZero() {
		r.FailingSince, r.LastTried, r.Error = spec.Moment(h.Since), spec.Moment(h.Last.Time), h.Last.Error
	}
	return r
}
