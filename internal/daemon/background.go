package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/history"
	"github.com/sandboxd/sandboxd/internal/systemd"
	"github.com/sandboxd/sandboxd/internal/uptime"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/expiry"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/retention"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// sweepEvery is the interval of the sweep.
const sweepEvery = time.Minute

// fillAfter is how long after its start the daemon fills the pool. The work of the first
// minute comes first.
const fillAfter = time.Minute

// A background is the daemon's own work: expiry, probes and restarts, idle policies, the
// sweep, snapshots beyond their limits, prepared slots, filling the pool, backups, the watchdog.
type background struct{ *Daemon }

// run works until ctx ends. What changes the state rests while an upgrade is on trial.
func (d background) run(ctx context.Context) {
	go d.forgetClients(ctx)
	go d.watchLinks(ctx)
	go d.settled(ctx)
	go d.soaked(ctx)
	go func() {
		if err := systemd.Watch(ctx, d.healthy, func(err error) {
			d.log.Error("the daemon is not healthy; systemd restarts it if this persists", "err", err)
		}); err != nil {
			d.log.Error("the watchdog of systemd failed", "err", err)
		}
	}()
	select {
	case <-d.hold.Free():
		d.keep(ctx)
	case <-ctx.Done():
	}
}

// wellAfter is how long the daemon serves before its restarts are forgotten.
const wellAfter = time.Minute

// settled lets the next restarts be quick again when this daemon has served for a while.
func (d background) settled(ctx context.Context) {
	wait := time.NewTimer(wellAfter)
	defer wait.Stop()
	select {
	case <-ctx.Done():
		return
	case <-wait.C:
	}
	if err := systemd.Settled(ctx); err != nil && ctx.Err() == nil {
		d.log.Warn("restarts of the service stay slow", "err", err)
	}
}

// soaked ends the soak of this version in time.
func (d background) soaked(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-d.hold.Over():
	}
	root, own, ok := versions.Own()
	if !ok {
		return
	}
	j, err := root.Journal()
	if err != nil || !j.Soaks(time.Now()) || j.To != own {
		return // a journal that cannot be read has kept the daemon from starting
	}
	d.log.Info("a crash of this version is undone: the one before runs again then", "until", j.SoakUntil, "before", j.From)
	wait := time.NewTimer(time.Until(j.SoakUntil))
	defer wait.Stop()
	select {
	case <-ctx.Done():
	case <-wait.C:
		if err := root.EndSoak(j.Nonce); err != nil {
			d.log.Warn("what an undoing of the last upgrade needed is not removed; the next start tries again", "err", err)
		}
	}
}

// keep does what changes the state, until ctx ends.
func (d background) keep(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := expiry.Run(ctx, d.manager, d.log); err != nil && ctx.Err() == nil {
			d.log.Error("timeouts are no longer watched; the sweep still ends expired sandboxes, up to a minute late", "err", err)
		}
	}()
	go d.watcher.Run(ctx) //nolint:errcheck // it ends with ctx only
	go d.idle.Run(ctx)    //nolint:errcheck // likewise
	go sandbox.StockOf(d.manager).Keep(ctx)
	go d.ladder.Run(ctx)
	go kernelWatch(d.Daemon).Run(ctx)
	go d.fillPool(ctx)
	if d.backups != nil {
		go d.backups.Run(ctx) // not waited for: a target may hang
	}
	d.ends.Look(ctx)
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			<-done
			return
		case <-tick.C:
			d.impaired() // this logs the fault, even if nobody connects
			if err := d.measuredSweep(ctx); err != nil && ctx.Err() == nil {
				d.log.Error("the sweep failed; it runs again in a minute", "err", err)
			}
		case <-d.manager.Snapshots().Taken():
			if err := d.retain(ctx); err != nil && ctx.Err() == nil {
				d.log.Error("not all snapshots beyond their limits are removed; the sweep tries again", "err", err)
			}
		case answer := <-d.asked:
			answer <- d.measuredSweep(ctx)
		}
	}
}

// onTrial finds out whether an upgrade to this version is on trial.
func onTrial(d *Daemon) error {
	root, version, ok := versions.Own()
	if !ok {
		return nil // it is a program of a checkout, or of scripts/install.sh
	}
	var err error
	if d.hold, err = root.OnTrial(version); err == nil && d.hold != nil {
		d.log.Info("this version is on trial", "version", version, "root", string(root))
	}
	return err
}

// served waits until ctx ends, a listener has failed, or an upgrade to this version is not to be.
func served(ctx context.Context, d *Daemon, failed <-chan error) error {
	defer d.hold.Stop()
	trial := d.hold.Over()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return err
		case <-trial:
			if err := d.hold.Err(); err != nil {
				return err
			}
			trial = nil
		}
	}
}

// useHeld is idle.Watcher.Use. To wake a sandbox changes the state, so that waits for the end of a trial.
func useHeld(d *Daemon) func(ctx context.Context, r *record.Record) (leave func(), err error) {
	return func(ctx context.Context, r *record.Record) (leave func(), err error) {
		if r.Asleep() {
			if err := d.hold.Await(ctx, ""); err != nil {
				return func() {}, err
			}
		}
		return d.idle.Use(ctx, r)
	}
}

// fillPool makes the pool fast.
func (d background) fillPool(ctx context.Context) {
	wait := time.NewTimer(fillAfter)
	defer wait.Stop()
	select {
	case <-ctx.Done():
		return
	case <-wait.C:
	}
	if err := d.files.Pool.Fill(ctx); err != nil && ctx.Err() == nil {
		d.log.Error("the pool is not ready: first writes stay slow; the next start tries again", "err", err)
	}
}

// sweep repairs what no event reports: new uplinks, sandboxes that are not as their
// records say, remains of deleted disks and layers.
func (d background) sweep(ctx context.Context) error {
	d.ends.Look(ctx)
	var held error // an error of the scope must not stop the rest of the sweep
	if d.scope != nil {
		held = d.scope.Keep(ctx)
	}
	return errors.Join(held, d.ns.Setup(ctx), d.ns.OpenUplinks(ctx), d.manager.Recover(ctx), endLeftovers(ctx, d.Daemon),
		d.files.Pool.Sweep(ctx, d.noSweep()), d.sweepEgress(ctx), d.secrets.Reapply(ctx), d.images.Sweep(ctx),
		d.store.ForgetRequests(ctx, time.Now().Add(-record.RequestsKept)), d.retain(ctx), d.ladder.Act(ctx, true),
		pruneVersions(ctx, d.Daemon), d.up.Beat())
}

// openUptime opens what is known of the times for which the host was up. The daemon starts without it, too.
func openUptime(d *Daemon) error {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("read the boot id: %w", err)
	}
	if d.up, err = uptime.Open(filepath.Join(d.cfg.StateDir, "up.json"), strings.TrimSpace(string(boot))); err != nil {
		d.log.Error("cannot note when the host is up; the sweep tries again", "err", err)
	}
	d.onClose(d.up.Beat)
	return nil
}

// userspace names the present user space of the host; "" if that is not known.
func userspace(ctx context.Context, log *slog.Logger) string {
	name, err := systemd.Userspace(ctx)
	if err != nil {
		log.Warn("a soft reboot since the last start is not noticed: sandboxes that it ended count as crashed", "err", err)
	}
	return name
}

// hostEnds is sandbox.Config.HostEnds.
func hostEnds(log *slog.Logger) func(ctx context.Context) bool {
	ending := systemd.NewShared(systemd.Ending)
	return func(ctx context.Context) bool {
		ends, err := ending.Ask(ctx)
		if err != nil {
			log.Warn("a sandbox ended, and whether the host does is not known", "err", err)
		}
		return ends
	}
}

// retain removes the snapshots that exceed the limits of the configuration.
func (d background) retain(ctx context.Context) error {
	if d.noSweep() != "" {
		return nil
	}
	c := d.cfg.Snapshots
	limits := retention.Limits{
		Max: c.Max, MaxPerSandbox: c.MaxPerSandbox, Bytes: int64(c.Bytes), BytesPerSandbox: int64(c.BytesPerSandbox),
		Age: time.Duration(c.Age),
	}
	return retention.Apply(ctx, d.manager.Snapshots(), limits, time.Now(), func(r retention.Removal) {
		s, limit := &r.Snapshot, "snapshots."+r.Limit
		d.log.Info("snapshot removed", "snapshot", s.ID, "name", s.Name, "sandbox", s.Source, "state", string(s.State), "limit", limit,
			"bytes", s.HeldBytes(), "created", s.Created)
		d.history.Note(s.Source, history.Operation, time.Now(), "snapshot "+s.ID+" removed: it was beyond "+limit)
		d.metrics.SnapshotRemoved(r.Limit)
	})
}

// endLeftovers ends flows of an earlier daemon that no sandbox has claimed, after a recovery
// that was not cut short: only that has registered every sandbox. It succeeds once.
func endLeftovers(ctx context.Context, d *Daemon) error {
	if d.claimed || ctx.Err() != nil {
		return nil
	}
	err := egress.Recovered(d.egress)
	d.claimed = err == nil
	return err
}

// sweepEgress removes the flow logs and the DNS leases of sandboxes that have no record.
func (d background) sweepEgress(ctx context.Context) error {
	if d.noSweep() != "" {
		return nil
	}
	logs, err := d.egress.FlowLog.List() // first: the record of a sandbox is older than its log
	if err != nil {
		return err
	}
	leases, err := d.egress.Leases.List() // likewise
	if err != nil {
		return err
	}
	known, err := knownTo(ctx, d.store)
	if err != nil {
		return err
	}
	var errs []error
	forget := func(ids []string, f func(id string) error) {
		for _, id := range ids {
			if !known[id] {
				errs = append(errs, f(id))
			}
		}
	}
	forget(logs, d.egress.FlowLog.Forget)
	forget(leases, d.egress.Leases.Forget)
	return errors.Join(errs...)
}

// forgetClients drops the connections to agents of sandboxes that are gone.
func (d background) forgetClients(ctx context.Context) {
	for e := range d.manager.Subscribe(ctx) {
		switch e.Type {
		case events.Deleted, string(record.Ended):
			d.agents.forget(e.ID)
		case events.Lost:
			d.agents.forgetAllBut(func(id string) bool {
				_, err := d.manager.Get(ctx, id)
				return err == nil
			})
		}
	}
}

// measuredSweep runs sweep and counts it.
func (d background) measuredSweep(ctx context.Context) error {
	start := time.Now()
	err := d.sweep(ctx)
	if ctx.Err() == nil {
		d.metrics.Sweep(err != nil, time.Since(start))
	}
	return err
}

// sweepNow is POST /sweep of the admin socket: a sweep that does not wait for its
// minute. It answers when that sweep has ended.
func (d background) sweepNow(w http.ResponseWriter, r *http.Request) {
	answer := make(chan error, 1) // nobody may read it any more
	select {
	case d.asked <- answer:
	case <-r.Context().Done():
		return
	}
	select {
	case err := <-answer:
		if err != nil {
			http.Error(w, "the sweep failed: "+err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	case <-r.Context().Done():
	}
}

// watchLinks recovers a sandbox as soon as its link is gone. While a sandbox lives,
// only an operator removes its link.
func (d background) watchLinks(ctx context.Context) {
	err := d.ns.WatchLost(ctx, func(id string) {
		go func() { // one busy sandbox must not hold up others
			if err := d.manager.Recover(ctx, id); err != nil && ctx.Err() == nil {
				d.log.Error("cannot recover a sandbox whose link is gone; the sweep tries again", "sandbox", id, "err", err)
			}
		}()
	})
	if err != nil && ctx.Err() == nil {
		d.log.Error("links are no longer watched; the sweep still finds lost links, up to a minute late", "err", err)
	}
}

// healthy asks the API for its health, through the daemon's own socket, and the egress
// engine whether it still decides on flows. systemd's watchdog restarts the daemon if
// healthy fails, so it fails only for faults that a restart repairs. A disk that is
// full or hangs is not such a fault: requests that need it fail in the next daemon too,
// and their errors say why.
func (d background) healthy(ctx context.Context) error {
	if err := d.egress.Err(); err != nil {
		return fmt.Errorf("decide on the flows of sandboxes: %w", err)
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", d.cfg.Listen.Socket)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sandboxd/health", nil)
	if err != nil {
		return err
	}
	res, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("ask the API on %s: %w", d.cfg.Listen.Socket, err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("ask the API on %s: /health answered %s", d.cfg.Listen.Socket, res.Status)
	}
	return nil
}

// slots is how many prepared slots to keep of each runtime. It is called once, for its
// warning.
func slots(cfg *config.Config, log *slog.Logger) map[string]int {
	kept, want := cfg.Slots(), cfg.Prepared
	if kept != want {
		log.Warn("fewer slots are kept prepared than configured, because limits.max_sandboxes leaves no addresses for the others; "+
			"lower one of the two", "runsc", kept.Runsc, "runc", kept.Runc, "prepared.runsc", want.Runsc, "prepared.runc", want.Runc,
			"limits.max_sandboxes", cfg.Limits.MaxSandboxes)
	}
	return map[string]int{oci.Runsc: kept.Runsc, oci.Runc: kept.Runc}
}
