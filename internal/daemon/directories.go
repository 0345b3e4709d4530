package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup/schedule"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/upgrade"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// marker is a file in every directory of sandboxd. The marker in the state directory is
// also its lock.
const marker = "lock"

// claim takes the locks of the instance and of the state directory, and makes
// both directories. The locks last until the process ends or they are closed.
func claim(cfg *config.Config) (locks []*os.File, err error) {
	defer func() {
		if err != nil {
			for _, f := range locks {
				err = errors.Join(err, f.Close())
			}
			locks = nil
		}
	}()
	// Links, chains, sets and cgroups of an instance belong to the host. So the
	// instance's lock cannot be in a directory that a configuration may change.
	take := func(path, what string) error {
		f, err := lockFile(path, what)
		if err == nil {
			locks = append(locks, f)
		}
		return err
	}
	if err := take(instanceLock(cfg)); err != nil {
		return locks, err
	}
	if err := ownDirectory("state_dir", cfg.StateDir, 0o700); err != nil {
		return locks, err
	}
	if err := take(filepath.Join(cfg.StateDir, marker), "keeps its state in "+cfg.StateDir); err != nil {
		return locks, err
	}
	// Guests' mapped roots must pass through it to reach their root file systems.
	if err := ownDirectory("run_dir", cfg.RunDir, 0o711); err != nil {
		return locks, err
	}
	return locks, os.WriteFile(filepath.Join(cfg.RunDir, marker), nil, 0o600)
}

// Alone claims the directories of an instance as a daemon does: until release no daemon of it starts.
// It fails while one runs.
func Alone(cfg *config.Config) (release func(), err error) {
	locks, err := claim(cfg)
	if err != nil {
		return nil, stopped(err)
	}
	return func() { closeAll(locks) }, nil
}

// settle undoes a change of the version that nobody will finish, before the state is opened. If this
// program is the version that must not run, it becomes the other one.
func settle(ctx context.Context, d *Daemon) error {
	root, own, ok := versions.Own()
	if !ok {
		return nil // it is a program of a checkout, or of scripts/install.sh
	}
	run, err := upgrade.Settle(ctx, root, stateFile(d.cfg), d.cfg.File, d.log)
	if err != nil || run == "" || run == own {
		return err
	}
	// The locks end here, and the other program takes them.
	return os.NewSyscallError("exec", syscall.Exec(root.Program(run, "sandboxd"), os.Args, os.Environ()))
}

// begin settles, and marks that a daemon of this version runs if the version is on trial or in its soak. The mark goes
// when the daemon closes: it was asked to end, or a start has failed and says why. The version of before fails like
// this one if a disk is late or a port is taken, and one that never starts does not pass the gate.
func begin(ctx context.Context, d *Daemon) error {
	if err := settle(ctx, d); err != nil {
		return err
	}
	root, own, ok := versions.Own()
	if !ok {
		return nil
	}
	j, err := root.Journal()
	if err != nil || j == nil || j.To != own || j.Step != versions.Trial && !j.Soaks(time.Now()) {
		return err
	}
	if d.mark, err = root.Mark(); err != nil {
		d.log.Warn("a crash of this version, which is new, will not be undone", "err", err)
	}
	d.onClose(d.mark.Remove)
	return nil
}

// Settle undoes a change of the version that nobody will finish. No daemon of the instance runs.
func Settle(ctx context.Context, cfg *config.Config) error {
	locks, err := claim(cfg)
	if err != nil {
		return fmt.Errorf("undo an interrupted upgrade: %w", err)
	}
	defer closeAll(locks)
	root, _, ok := versions.Own()
	if !ok {
		return errs.New(errs.Unsupported, "this program lies in no directory of versions, so it has no upgrade to undo")
	}
	_, err = upgrade.Settle(ctx, root, stateFile(cfg), cfg.File, slog.Default())
	return err
}

// pruneVersions removes the versions of sandboxd that nothing needs. What keeps one, beside what
// versions.Root.Prune finds itself: memory that only its programs can bring back.
func pruneVersions(ctx context.Context, d *Daemon) error {
	root, own, ok := versions.Own()
	if !ok || d.noSweep() != "" {
		return nil
	}
	select {
	case <-d.hold.Over():
	default:
		return nil // somebody changes the version
	}
	removed, err := root.Prune(own, func(candidates []string) ([]string, error) {
		needs, err := memoryNeeds(ctx, d.store)
		if err != nil || len(needs) == 0 {
			return candidates, err
		}
		return withoutPrograms(root, candidates, needs, d.gvisor.Programs)
	})
	for _, version := range removed {
		d.log.Info("version removed: nothing needs it any more", "version", version, "directory", root.Dir(version))
		sandbox.Tell(d.manager, events.Pruned, version, "sandboxd "+version+" was removed from this host: nothing needed it any more")
	}
	return err
}

// memoryNeeds lists what the memory of hibernated sandboxes and of snapshots needs.
func memoryNeeds(ctx context.Context, db *store.DB) (all []record.MemoryNeeds, err error) {
	sandboxes, err := db.List(ctx)
	if err != nil {
		return nil, err
	}
	snapshots, _, err := db.SnapshotRecords(ctx)
	if err != nil {
		return nil, err
	}
	for _, r := range sandboxes {
		if r.Hibernation != nil {
			all = append(all, r.Hibernation.Needs)
		}
	}
	for _, s := range snapshots {
		if s.Memory != nil {
			all = append(all, s.Memory.Needs)
		}
	}
	return all, nil
}

// withoutPrograms drops the candidates, the newest first, that have a runsc or an agent that memory needs
// and that no version has which stays.
func withoutPrograms(
	root versions.Root, candidates []string, needs []record.MemoryNeeds, programs func(dir string) (build, agent string, err error),
) (rest []string, err error) {
	wanted := map[string]bool{}
	for _, n := range needs {
		wanted[n.Build], wanted[n.Agent] = true, true
	}
	delete(wanted, "")
	all, err := root.List()
	if err != nil {
		return nil, err
	}
	has := func(version string) (digests []string, err error) {
		build, agent, err := programs(filepath.Join(root.Dir(version), "libexec/sandboxd"))
		return []string{build, agent}, err
	}
	for _, v := range all {
		if slices.Contains(candidates, v.Name) {
			continue
		}
		digests, err := has(v.Name)
		if err != nil {
			return nil, err
		}
		for _, digest := range digests {
			delete(wanted, digest)
		}
	}
	for _, version := range candidates {
		digests, err := has(version)
		if err != nil {
			return nil, err
		}
		stays := false
		for _, digest := range digests {
			stays = stays || wanted[digest]
		}
		if !stays {
			rest = append(rest, version)
			continue
		}
		for _, digest := range digests {
			delete(wanted, digest)
		}
	}
	return rest, nil
}

// removeDrills removes copies of the state that a daemon left which was killed in a drill: with drills
// switched off there is no next one, which would remove them.
func removeDrills(d *Daemon) {
	if err := schedule.RemoveDrills(d.cfg.StateDir); err != nil {
		d.log.Warn("not all copies of a restore drill are removed; the next start tries again", "err", err)
	}
}

// instanceLock is the file that a daemon of an instance locks, and what another one is told.
func instanceLock(cfg *config.Config) (path, what string) {
	return fmt.Sprintf("/run/sandboxd-%s.lock", cfg.Instance), fmt.Sprintf("runs as instance %q on this host", cfg.Instance)
}

// ownDirectory makes dir. It refuses a non-empty directory that is not sandboxd's: the
// daemon would change its mode, and a teardown would remove files from it.
func ownDirectory(key, dir string, mode os.FileMode) error {
	if err := os.MkdirAll(dir, mode); err != nil {
		return fmt.Errorf("make %s: %w", key, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read %s: %w", key, err)
	}
	ours, foreign := false, ""
	for _, e := range entries {
		switch e.Name() {
		case marker, "sandboxd.db":
			ours = true
		case "sandboxd.sock": // systemd makes it: it listens before the first start
		case "lost+found": // of a new file system
		case "sandboxd.key": // an operator brings it before a backup from another host is restored
		case "pool":
			if kind, err := pool.Kind(dir, pool.Auto); err == nil && kind == pool.BtrfsLoop {
				foreign = e.Name()
			} // otherwise an operator mounted a pool
		default:
			foreign = e.Name()
		}
	}
	if !ours && foreign != "" {
		return fmt.Errorf("%s = %s is not empty (%s) and does not belong to sandboxd: choose an empty directory", key, dir, foreign)
	}
	if err := os.Chmod(dir, mode); err != nil {
		if errors.Is(err, unix.EROFS) || errors.Is(err, unix.EIO) {
			return fmt.Errorf("make %s: %w; file systems become read-only after an I/O error, which dmesg shows: check the disk, and "+
				"reboot to have it checked and mounted again", key, err)
		}
		return fmt.Errorf("make %s: %w", key, err)
	}
	return nil
}

// lockFile takes an fcntl(2) lock on path. Unlike a flock(2) lock, a child does not
// hold it between fork and exec, so it ends with the process at once.
func lockFile(path, what string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_SETLK, &lock); err != nil {
		holder := unix.Flock_t{Type: unix.F_WRLCK}
		_ = unix.FcntlFlock(f.Fd(), unix.F_GETLK, &holder)
		f.Close()
		return nil, fmt.Errorf("another sandboxd (pid %d) %s: stop it, or give this one another instance and directories in its "+
			"configuration", holder.Pid, what)
	}
	return f, nil
}

// runEntries are the entries that a daemon makes in its run directory, sockets apart.
var runEntries = []string{"bundles", "leases", "ns", "runsc", "runc", flowDir, marker}

// flowDir is where the egress has what the next daemon needs of open flows.
const flowDir = "egress"

// removeRunDir removes the run directory of a daemon without sandboxes. If it finds
// unknown entries, it names them and does not remove them.
func removeRunDir(dir string) error {
	for _, e := range slices.Concat(runEntries, []string{"sandboxd.sock", "admin.sock"}) {
		if err := os.RemoveAll(filepath.Join(dir, e)); err != nil {
			return fmt.Errorf("remove run_dir: %w", err)
		}
	}
	// Only if it is empty: entries in it would be users' files, still mounted there.
	if err := os.Remove(filepath.Join(dir, snapshot.VolumesDir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove run_dir: %w", err)
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove run_dir: %w", err)
	}
	return nil
}

// leaveRunDir removes the run directory after a start that failed, unless it has entries
// of others, such as the socket that systemd or another program listens on.
func leaveRunDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove run_dir: %w", err)
	}
	for _, e := range entries {
		if !slices.Contains(runEntries, e.Name()) && e.Name() != snapshot.VolumesDir {
			return nil
		}
	}
	return removeRunDir(dir)
}
