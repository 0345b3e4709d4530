package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup"
	"github.com/sandboxd/sandboxd/internal/backup/contents"
	"github.com/sandboxd/sandboxd/internal/backup/schedule"
	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/store"
)

func stateFile(cfg *config.Config) string { return filepath.Join(cfg.StateDir, "sandboxd.db") }

func placeOf(cfg *config.Config) backup.Place {
	return backup.Place{Instance: cfg.Instance.String(), AddressPool: cfg.Network.Pool.String()}
}

// Restore replaces the state by that of a backup, and keeps the present state beside
// it. No daemon of the instance may run. It writes to out what it did. One of ids opens an
// encrypted backup.
//
// The daemon that then starts sweeps nothing until AcceptRestored: the host may have
// sandboxes and disks that were made after the backup.
//
// Then it restores the data of the backup, unless skip. A part of that which fails is said in the
// error; the records are restored, and another Restore goes on.
func Restore(ctx context.Context, cfg *config.Config, r io.Reader, ids backup.Identities, skip bool, out io.Writer) (err error) {
	locks, err := claim(cfg)
	if err != nil {
		return fmt.Errorf("restore: %w", stopped(err))
	}
	defer closeAll(locks)
	path := stateFile(cfg)
	tmp := path + ".restoring"
	defer func() {
		if rerr := os.Remove(tmp); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}()
	m, err := backup.Unpack(r, ids, tmp, placeOf(cfg))
	if err != nil {
		return fmt.Errorf("restore: %w; the present state is unchanged", noRoom(err))
	}
	var to target.Target
	if m.Data != nil && !skip {
		if to, err = dataTarget(ctx, cfg, m.Data); err != nil {
			return fmt.Errorf("restore: %w; the present state is unchanged", err)
		}
	}
	what := fmt.Sprintf("the backup that host %q made at %s", m.Host, m.Taken.Format(time.RFC3339))
	if err := store.MarkRestored(tmp, what); err != nil {
		return fmt.Errorf("restore: %w; the present state is unchanged", noRoom(err))
	}
	kept, err := exchange(tmp, path)
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	fmt.Fprintf(out, "restored %s: %s, %s\n", what,
		errs.Count(m.State.Sandboxes, "sandbox", "sandboxes"), errs.Count(m.State.Images, "image", "images"))
	if kept != "" {
		fmt.Fprintf(out, "the previous state is kept as %s\n", kept)
	}
	key, _ := openKey(cfg, false) // without it, all keys are named that are needed
	if needs := backup.NeedsKeys(m.State, key); needs != "" {
		fmt.Fprintln(out, needs)
	}
	if to != nil {
		if err := restoreData(ctx, cfg, to, m.Data, ids, out); err != nil {
			return err
		}
	} else if m.Data != nil {
		fmt.Fprintf(out, "its data, %d bytes of volumes, snapshots and layers, is not restored\n", m.Data.Bytes())
	}
	fmt.Fprintln(out, `Start sandboxd. It removes nothing that the backup does not know, and while the host has such
sandboxes, it creates and starts no others: see sandboxctl system info. To accept the restored state, stop
sandboxd, run "sandboxd restore --accept", and start it: it then ends processes without a record,
and keeps disks without a record in lost+found for a day.`)
	return nil
}

// dataTarget is the target that has the packs of a backup. It fails if one is not there.
func dataTarget(ctx context.Context, cfg *config.Config, d *backup.Data) (target.Target, error) {
	const records = "with --no-data the records alone are restored"
	to, err := cfg.Backup.Open()
	if err == nil && to == nil {
		err = errors.New("the backup has data, and the configuration names no target that has it: set backup.target")
	}
	if err != nil {
		return nil, fmt.Errorf("%w; %s", err, records)
	}
	if lost, err := d.Catalog.Lost(ctx, to); err != nil || len(lost) > 0 {
		if err == nil {
			err = fmt.Errorf("%s of its data not on %s, or of another size: the first is %s", errs.Count(len(lost), "pack is", "packs are"),
				to, lost[0])
		}
		return nil, fmt.Errorf("%w; %s", err, records)
	}
	return to, nil
}

// restoreData brings volumes, snapshots and layers back, in this network namespace, with the pool of
// the configuration. The caller has the locks.
func restoreData(ctx context.Context, cfg *config.Config, to target.Target, data *backup.Data, ids backup.Identities, out io.Writer) (
	err error,
) {
	unix.Umask(0o022)
	d := &Daemon{cfg: cfg, log: slog.New(slog.DiscardHandler), ns: netns.New(cfg.Instance, cfg.RunDir)}
	defer func() { err = errors.Join(err, d.Close()) }()
	if err := openFiles(ctx, d); err != nil {
		return fmt.Errorf("restore the data: %w", err)
	}
	if err := adoptPool(ctx, d, data); err != nil {
		return fmt.Errorf("restore the data: %w", err)
	}
	if err := contents.Restore(ctx, d.files, to, data, ids, out); err != nil {
		return fmt.Errorf("the records are restored, but not all of the data: %w", err)
	}
	return nil
}

// OpenBackup opens a backup on the target of the configuration: the newest of this host
// (target.Latest), or the one of that name. Reading it to its end fails if it was changed. It refuses to
// choose between those of several states; ids open those of which only their content says whose they are.
func OpenBackup(ctx context.Context, cfg *config.Config, ids backup.Identities, name string) (r io.ReadCloser, found string, err error) {
	to, err := cfg.Backup.Open()
	if err == nil && to == nil {
		err = schedule.Unconfigured()
	}
	if err != nil {
		return nil, "", err
	}
	b, err := schedule.Pick(ctx, to, whoseOf(cfg), ids, name)
	if err != nil {
		return nil, "", err
	}
	r, err = target.Open(ctx, to, b.Name)
	return r, b.Name, err
}

// CheckBackup does what Restore does in a directory that it then removes, and says what it found.
// A daemon may run. It needs no state on this host.
func CheckBackup(ctx context.Context, cfg *config.Config, r io.Reader, ids backup.Identities, out io.Writer) error {
	trial := trialOf(cfg)
	m, problems, err := trial.Try(ctx, "", r, ids)
	if err != nil {
		return fmt.Errorf("check the backup: %w", noRoom(err))
	}
	fmt.Fprintf(out, "ok: the backup that host %q made at %s can be restored: %s, %s\n", m.Host, m.Taken.Format(time.RFC3339),
		errs.Count(m.State.Sandboxes, "sandbox", "sandboxes"), errs.Count(m.State.Images, "image", "images"))
	for _, p := range problems {
		fmt.Fprintln(out, p)
	}
	if m.Data == nil {
		return nil
	}
	if cfg.Backup.Target == "" {
		fmt.Fprintln(out, "its data is not checked: the configuration names no target that has it")
		return nil
	}
	to, err := dataTarget(ctx, cfg, m.Data)
	if err == nil {
		err = contents.Check(ctx, to, m.Data, ids, rand.IntN)
	}
	if err != nil {
		return fmt.Errorf("check the data of the backup: %w", err)
	}
	fmt.Fprintf(out, "ok: its data, %d bytes, has all of its %s; the index, the lists of files and a sample were read\n", m.Data.Bytes(),
		errs.Count(len(m.Data.Catalog.Packs), "pack", "packs"))
	return nil
}

// AcceptRestored lets the next daemon sweep what is not in a restored state.
func AcceptRestored(ctx context.Context, cfg *config.Config, out io.Writer) error {
	locks, err := claim(cfg)
	if err != nil {
		return fmt.Errorf("accept the restored state: %w", stopped(err))
	}
	defer closeAll(locks)
	db, err := store.Open(stateFile(cfg), store.Options{})
	if err != nil {
		return fmt.Errorf("accept the restored state: %w", err)
	}
	what := db.Restored()
	if what == "" {
		fmt.Fprintln(out, "nothing to accept: the state was not restored, or it was accepted before")
		return db.Close()
	}
	if err = errors.Join(db.AcceptRestored(ctx), db.Close()); err == nil {
		fmt.Fprintf(out, "accepted: %s\n", what)
	}
	return err
}

// beforeRestore is between the name of the state file and a time in the name of one that was kept.
const beforeRestore = ".before-restore-"

// exchange renames tmp to path. It keeps the previous file under the name returned. At
// every moment path is a complete state.
func exchange(tmp, path string) (kept string, err error) {
	if _, err := os.Stat(path); err == nil {
		kept = path + beforeRestore + time.Now().UTC().Format("20060102T150405.000Z")
		if err := os.Link(path, kept); err != nil {
			return "", fmt.Errorf("keep the present state: %w", err)
		}
	}
	if err := forgetKept(path); err != nil {
		return kept, fmt.Errorf("remove the oldest states that were kept: %w", err)
	}
	return kept, durable.Rename(tmp, path)
}

// keptStates is how many states from before a restore are kept.
const keptStates = 5

// forgetKept removes the oldest states that exchange has kept, beyond keptStates.
func forgetKept(path string) error {
	entries, err := os.ReadDir(filepath.Dir(path)) // in order of their names, which have the time
	var kept []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), filepath.Base(path)+beforeRestore) {
			kept = append(kept, filepath.Join(filepath.Dir(path), e.Name()))
		}
	}
	for ; err == nil && len(kept) > keptStates; kept = kept[1:] {
		err = os.Remove(kept[0])
	}
	return err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// stopped adds to err how to stop a running daemon.
func stopped(err error) error {
	return fmt.Errorf("%w (stop it first: systemctl stop sandboxd.socket sandboxd; its sandboxes keep running)", err)
}

// noRoom gives a full disk's error the code and text for a client.
func noRoom(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || err != nil && strings.Contains(err.Error(), unix.ENOSPC.Error()) {
		return errs.Wrap(err, errs.Unavailable, "no space is left in the state directory of sandboxd for a copy of the state; free some "+
			"space there and try again")
	}
	return err
}

// noSweep says why the sweep may erase nothing; empty: it may.
func (d *Daemon) noSweep() string {
	switch {
	case d.files.Pool.ID() != d.store.PoolID():
		return fmt.Sprintf("the storage pool %.8s is not that of the state, %.8s: stop sandboxd, and bring that pool back, or restore "+
			"the sandboxd.db of this one. If it is lost, run `sandboxd restore --accept-pool`, and start sandboxd",
			d.files.Pool.ID(), d.store.PoolID())
	case d.store.Restored() != "":
		return fmt.Sprintf("the state was restored from %s, and the host may have newer sandboxes: to remove them, stop sandboxd, "+
			"run `sandboxd restore --accept` and start it", d.store.Restored())
	}
	return ""
}

// knownTo are the ids that a store has.
func knownTo(ctx context.Context, records *store.DB) (map[string]bool, error) {
	known := map[string]bool{}
	all, err := records.List(ctx)
	if err != nil {
		return nil, err
	}
	bad, err := records.Unreadable(ctx)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		known[r.ID] = true
	}
	for _, id := range bad {
		known[id] = true
	}
	return known, nil
}

// strays lists the ids that the host has and the store does not.
func (d *Daemon) strays(ctx context.Context) ([]string, error) {
	known, err := knownTo(ctx, d.store)
	if err != nil {
		return nil, err
	}
	var strays []string
	for _, list := range []func(context.Context) ([]string, error){
		d.files.Disks.ListDisks, d.cgroups.List, d.ns.ListNamespaces, d.ns.ListLinks,
	} {
		ids, err := list(ctx)
		if err != nil {
			return nil, err
		}
		for _, id := range ids {
			if !known[id] && strings.HasPrefix(id, d.cfg.Instance.String()) {
				known[id] = true
				strays = append(strays, id)
			}
		}
	}
	slices.Sort(strays)
	return strays, nil
}

// mayCreate refuses new sandboxes while the host has sandboxes that the store does not
// know: their slots, with address and user ids, look free to the store.
func (d *Daemon) mayCreate(ctx context.Context) error {
	reason := d.noSweep()
	if reason == "" {
		return nil
	}
	strays, err := d.strays(ctx)
	if err != nil || len(strays) == 0 {
		return err
	}
	return errs.New(errs.Unavailable, "this host creates and starts no sandboxes: %s not in the state (the first is "+
		"%s), and a new one could get the address and user ids of one of them; `sandboxctl system info` says why and what to do",
		errs.Count(len(strays), "sandbox on it is", "sandboxes on it are"), strays[0])
}
