package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/journal"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// Teardown ends every sandbox of the instance, with its disk, and removes every
// snapshot. Then it removes what the instance has on the host: rules, sets, gateway,
// cgroup root, run directory, the mount of the pool. The state directory stays, with
// images and volumes in it. Teardown refuses while a daemon of the instance runs.
func Teardown(ctx context.Context, cfg *config.Config) error {
	log := journal.New(os.Stderr, slog.LevelWarn)
	if _, err := os.Stat(stateFile(cfg)); errors.Is(err, fs.ErrNotExist) {
		if err := vacateLost(ctx, cfg, log); err != nil {
			return fmt.Errorf("teardown: %w", err)
		}
		return nil
	}
	d, err := open(ctx, cfg, log, settle)
	if err != nil {
		return fmt.Errorf("teardown: %w", err)
	}
	err = errors.Join(d.deleteAll(ctx), sandbox.StockOf(d.manager).Purge(ctx), d.manager.Recover(ctx),
		d.manager.Close(ctx)) // deletions go on until then
	if err := egress.Recovered(d.egress); err != nil {
		log.Warn("flows of ended sandboxes stay until they time out", "err", err)
	}
	if err = errors.Join(err, nothingLingers(ctx, d.store, d.cgroups)); err != nil {
		// Rules and pool stay while something may need them.
		return errors.Join(fmt.Errorf("teardown: %w", err), d.Close())
	}
	if err := d.vacate(ctx, removeRunDir); err != nil {
		return fmt.Errorf("teardown: %w", err)
	}
	return nil
}

// vacate closes the daemon and removes what the instance has on the host, its run
// directory as rmdir does. It holds the locks until the end: the next daemon of the
// instance must not lose what it makes.
//
// Preconditions: the instance has no sandboxes.
func (d *Daemon) vacate(ctx context.Context, rmdir func(dir string) error) error {
	locks := d.close[0] // closed last
	d.close = d.close[1:]
	defer locks() //nolint:errcheck // the process ends
	if err := d.Close(); err != nil {
		return err
	}
	// An unmounted pool or an emptied run_dir would take them away from users.
	mounts, err := d.files.Mounts.ListMounts(ctx)
	if err == nil {
		var attached []string
		attached, err = d.files.Volumes.ListAttached(ctx)
		mounts = append(mounts, attached...)
	}
	if err == nil && len(mounts) > 0 {
		err = fmt.Errorf("%s still contains the mounts of %v", d.cfg.RunDir, mounts)
	}
	if err != nil {
		return err
	}
	err = errors.Join(
		egress.Purge(ctx, d.cfg.Instance),
		d.ns.Purge(ctx),
		d.removeCgroups(ctx),
		d.files.UnmountPool(),
	)
	if err != nil {
		return err
	}
	return rmdir(d.cfg.RunDir)
}

// vacateLost removes what an instance without a state file has on the host: somebody
// removed its state directory, or no daemon of this configuration ever ran. It needs
// nothing but the instance's letter, and makes no state. It fails, and removes nothing,
// while there is anything of a sandbox: nobody knows what that sandbox was.
func vacateLost(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	ran, up, err := traces(cfg)
	if err != nil || !ran && !up { // also where sandboxd cannot run
		return err
	}
	lock, err := lockFile(instanceLock(cfg))
	if err != nil {
		return err
	}
	defer lock.Close()
	ns := netns.New(cfg.Instance, cfg.RunDir)
	ns.Pool = cfg.Network.Pool
	left, err := ofSandboxes(ctx, ns, cfg.RunDir)
	if err = errors.Join(err, noneLeft(cfg, left)); err != nil {
		return err
	}
	d := &Daemon{cfg: cfg, log: log}
	if err := d.openCgroups(ctx, nil); err != nil {
		return errors.Join(err, d.Close())
	}
	ids, err := d.cgroups.List(ctx)
	for _, id := range ids {
		left = append(left, "the cgroup of "+id)
	}
	if err = errors.Join(err, noneLeft(cfg, left), d.Close()); err != nil {
		return err
	}
	// Before the rules: it fails if a process is left that shows nowhere else.
	if err := d.removeCgroups(ctx); err != nil {
		return err
	}
	// Before the gateway, by which the next try sees that something is left.
	if err := snapshot.UnmountLost(cfg.StateDir, cfg.Storage.Device); err != nil {
		return err
	}
	if err = errors.Join(egress.Purge(ctx, cfg.Instance), ns.Purge(ctx)); err != nil || !ran {
		return err
	}
	return removeRunDir(cfg.RunDir)
}

// noneLeft fails if something is left of sandboxes that nobody knows.
func noneLeft(cfg *config.Config, left []string) error {
	if len(left) == 0 {
		return nil
	}
	if n := len(left) - 5; n > 0 {
		left = append(left[:5:5], fmt.Sprintf("%d more", n))
	}
	return fmt.Errorf("%s does not exist, and this host still has %s of sandboxes of instance %s: put the file back and tear down "+
		"again; if it is lost, start sandboxd, which ends sandboxes that it does not know, and tear down then", stateFile(cfg),
		strings.Join(left, ", "), cfg.Instance)
}

// traces reports what a daemon that ran since the boot leaves: its run directory (ran), and
// the gateway's address on the host (up).
func traces(cfg *config.Config) (ran, up bool, err error) {
	if _, err := os.Stat(filepath.Join(cfg.RunDir, marker)); err == nil {
		ran = true
	} else if !errors.Is(err, fs.ErrNotExist) {
		return false, false, fmt.Errorf("read run_dir: %w", err)
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false, false, fmt.Errorf("list the addresses of this host: %w", err)
	}
	up = slices.ContainsFunc(addrs, func(a net.Addr) bool {
		p, ok := a.(*net.IPNet)
		return ok && p.IP.String() == cfg.Instance.Gateway().String()
	})
	return ran, up, nil
}

// ofSandboxes lists links, namespaces and mounts of sandboxes.
func ofSandboxes(ctx context.Context, ns *netns.Manager, runDir string) (all []string, err error) {
	links, lerr := ns.ListLinks(ctx)
	ids, nerr := ns.ListNamespaces(ctx)
	mounts, merr := os.ReadFile("/proc/self/mountinfo")
	for _, id := range links {
		all = append(all, "the link "+netns.Link(id))
	}
	for _, id := range ids {
		all = append(all, "the namespaces of "+id)
	}
	if real, err := filepath.EvalSymlinks(runDir); err == nil {
		runDir = real
	}
	for line := range strings.Lines(string(mounts)) { // proc_pid_mountinfo(5): the fifth field is the mount point
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], runDir+"/") {
			all = append(all, "the mount "+f[4])
		}
	}
	return all, errors.Join(lerr, nerr, merr)
}

// abandonLimit is how long a start that failed may take to remove what it made.
const abandonLimit = 30 * time.Second

// abandon closes a daemon that could not start. If the instance has no sandbox that
// lives, it also removes from the host what the start made there; otherwise the rules
// confine that sandbox, and stay.
func (d *Daemon) abandon(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abandonLimit) // ctx may have ended the start
	defer cancel()
	if d.store == nil || d.files == nil { // they did not open
		return d.Close()
	}
	if d.manager != nil { // a listener may have served clients: nothing that they began goes on after this
		if err := d.manager.Close(ctx); err != nil {
			return errors.Join(err, d.Close())
		}
	}
	if !vacant(ctx, d.store, d.ns) {
		return d.Close()
	}
	if err := d.vacate(ctx, leaveRunDir); err != nil {
		return fmt.Errorf("remove what this start made on the host: %w; `sandboxd teardown` removes the rest", err)
	}
	return nil
}

// vacant reports whether an instance certainly has no sandbox that lives: every record
// can be read and has ended, and there are no namespaces and no links of a sandbox without
// a record. A sandbox made with another state_dir and run_dir shows only by its link.
func vacant(ctx context.Context, records *store.DB, ns *netns.Manager) bool {
	all, err := records.List(ctx)
	unreadable, uerr := records.Unreadable(ctx)
	ids, nerr := ns.ListNamespaces(ctx)
	links, lerr := ns.ListLinks(ctx)
	if errors.Join(err, uerr, nerr, lerr) != nil || len(unreadable)+len(ids)+len(links) > 0 {
		return false
	}
	return !slices.ContainsFunc(all, func(r *record.Record) bool { return r.State != record.Ended })
}

// removeCgroups removes what openCgroups made, which may be half of it.
func (d *Daemon) removeCgroups(ctx context.Context) error {
	var errs []error
	if d.cgroups != nil {
		errs = append(errs, d.cgroups.Outliving().Remove(ctx), d.cgroups.Inspecting(0).Remove(ctx))
	}
	if d.scope != nil {
		errs = append(errs, d.scope.Stop(ctx))
	}
	if d.cgroups != nil {
		errs = append(errs, d.cgroups.RemoveRoot())
	}
	return errors.Join(errs...)
}

func (d *Daemon) deleteAll(ctx context.Context) error {
	all, err := d.manager.List(ctx)
	if err != nil {
		return err
	}
	ids, err := d.store.Unreadable(ctx)
	if err != nil {
		return err
	}
	for _, r := range all {
		ids = append(ids, r.ID)
	}
	var errs []error
	for _, id := range ids {
		errs = append(errs, d.manager.Delete(ctx, id))
	}
	return errors.Join(append(errs, d.deleteSnapshots(ctx))...)
}

// nothingLingers fails while the kernel ends processes of deleted sandboxes: they still
// use cgroups, links and the pool.
func nothingLingers(ctx context.Context, records *store.DB, tree *cgroups.Tree) error {
	all, err := records.List(ctx)
	if err != nil {
		return err
	}
	var ids []string
	for _, r := range all {
		alive, err := tree.Populated(r.ID)
		if err != nil {
			return err
		}
		if alive && r.State == record.Deleting {
			ids = append(ids, r.ID)
		}
	}
	if len(ids) > 0 {
		return fmt.Errorf("the kernel is still ending the killed processes of %s; tear down again in a few minutes",
			strings.Join(ids, ", "))
	}
	return nil
}

func (d *Daemon) deleteSnapshots(ctx context.Context) error {
	list, ids, err := d.store.SnapshotRecords(ctx)
	for _, snap := range list {
		ids = append(ids, snap.ID)
	}
	for _, id := range ids {
		err = errors.Join(err, d.manager.Snapshots().Delete(ctx, id))
	}
	return err
}
