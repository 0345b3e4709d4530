// Package daemon wires sandboxd together: it opens every mechanism in the one
// order that is safe, hands them to the Manager and the API, and closes them.
//
//	host check ─▶ lock ─▶ pool ─▶ store ─▶ network ─▶ egress ─▶ Recover ─▶ sockets
//
// What surprises: closing ends no sandbox. Processes, mounts, links, rules and
// the pool stay, for the next daemon to find; Teardown is what takes them away.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/expiry"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/oci/runc"
	"github.com/sandboxd/sandboxd/pkg/oci/runsc"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/store"
)

// sweepEvery is how often the recovery runs in peace.
const sweepEvery = time.Minute

// runscHostPids is how many host tasks one gVisor sandbox may have: threads of
// the sentry, and a stub for each address space. 20,000 forks inside stopped at
// it and took the sandbox with them, not the host (hardening.md §3).
const runscHostPids = 4096

// shutdownLimit is how long requests in flight may take to end after SIGTERM.
const shutdownLimit = 10 * time.Second

// Daemon is an open daemon. The fields are in the order they are opened.
type Daemon struct {
	cfg     *config.Config
	log     *slog.Logger
	disks   *snapshot.Store
	store   *store.DB
	ns      *netns.Manager
	cgroups *cgroups.Tree
	egress  *egress.Engine
	runc    *runc.Driver
	agents  *agents
	images  *image.Store
	manager *sandbox.Manager

	close []func() error // in order; undone backward
}

// Run opens the daemon, serves until ctx ends, and closes it. ready is called
// when the API answers.
func Run(ctx context.Context, cfg *config.Config, version string, ready func() error) error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(cfg.Log.Level)); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	start := time.Now()
	d, err := open(ctx, cfg, log)
	if err != nil {
		return err
	}
	err = d.manager.Recover(ctx)
	if err != nil {
		// What could not be brought into agreement is named and tried again by
		// the sweep; it must not keep everybody else's sandboxes from the API.
		log.Error("recovery is incomplete; it runs again in a minute", "err", err)
	}
	err = d.serve(ctx, version, func() error {
		log.Info("sandboxd serves", "version", version, "instance", cfg.Instance.String(), "pool", d.disks.Describe(), "cgroups", d.cgroups.Mode(), "dur", time.Since(start).Round(time.Millisecond))
		return ready()
	})
	return errors.Join(err, d.Close())
}

// open opens everything below the API.
func open(ctx context.Context, cfg *config.Config, log *slog.Logger) (_ *Daemon, err error) {
	d := &Daemon{cfg: cfg, log: log}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if err := checkHost(cfg); err != nil {
		return nil, err
	}
	if err := d.claim(); err != nil {
		return nil, err
	}
	d.ns = netns.New(cfg.Instance, cfg.RunDir)
	d.ns.Pool, d.ns.Log = cfg.Network.Pool, log
	if err := d.openStorage(ctx); err != nil {
		return nil, err
	}
	if d.cgroups, err = cgroups.Open(cgroups.Config{Instance: cfg.Instance}); err != nil {
		return nil, err
	}
	d.onClose(d.cgroups.Close)
	if err := d.openNetwork(ctx); err != nil {
		return nil, err
	}
	return d, d.openManager()
}

func (d *Daemon) onClose(f func() error) { d.close = append(d.close, f) }

// Close lets go of everything in reverse order. Sandboxes go on.
func (d *Daemon) Close() error {
	var errs []error
	for i := len(d.close) - 1; i >= 0; i-- {
		errs = append(errs, d.close[i]())
	}
	d.close = nil
	return errors.Join(errs...)
}

// claim takes locks and directories.
func (d *Daemon) claim() error {
	locks, err := claim(d.cfg)
	if err != nil {
		return err
	}
	d.onClose(func() error {
		var errs []error
		for _, f := range locks {
			errs = append(errs, f.Close())
		}
		return errors.Join(errs...)
	})
	return nil
}

// openStorage mounts the pool and opens the store, and ties one to the other.
func (d *Daemon) openStorage(ctx context.Context) error {
	identity, err := netns.UserNS(0, 65536)
	if err != nil {
		return err
	}
	d.onClose(identity.Close)
	d.disks, err = snapshot.Open(ctx, snapshot.Config{
		Instance:       d.cfg.Instance,
		StateDir:       d.cfg.StateDir,
		RunDir:         d.cfg.RunDir,
		Pool:           d.cfg.Storage.Pool,
		PoolBytes:      int64(d.cfg.Storage.PoolSize),
		UserNS:         func(id string) (*os.File, error) { return os.Open(d.ns.UserPath(id)) },
		IdentityUserNS: identity,
	})
	if err != nil {
		return err
	}
	d.onClose(d.disks.Close)
	d.store, err = store.Open(filepath.Join(d.cfg.StateDir, "sandboxd.db"), store.Options{Log: d.log})
	if err != nil {
		return err
	}
	d.onClose(d.store.Close)
	if err := d.keepAddresses(ctx); err != nil {
		return err
	}
	if err := d.tiePool(ctx); err != nil {
		return err
	}
	d.images, err = image.Open(image.Config{
		Layers:     d.disks,
		DB:         d.store,
		RecipesDir: d.cfg.RecipesDir,
		TempDir:    filepath.Join(d.cfg.StateDir, "build"),
		InUse:      d.layerInUse,
	})
	return err
}

// keepAddresses refuses another address pool while sandboxes have addresses of
// the old one: an address follows from pool and slot, and is stored nowhere else.
func (d *Daemon) keepAddresses(ctx context.Context) error {
	path, now := filepath.Join(d.cfg.StateDir, "address-pool"), d.cfg.Network.Pool.String()
	was, err := os.ReadFile(path)
	if err == nil && string(was) == now {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the address pool of the last start: %w", err)
	}
	all, err := d.store.List(ctx)
	if err != nil {
		return err
	}
	if len(was) > 0 && len(all) > 0 {
		return fmt.Errorf("network.address_pool was %s and is now %s, but %d sandboxes have addresses of the first: set it back, delete them, and then change it", was, now, len(all))
	}
	if err := os.WriteFile(path+".new", []byte(now), 0o600); err != nil {
		return fmt.Errorf("remember the address pool: %w", err)
	}
	return os.Rename(path+".new", path)
}

// tiePool makes a new store belong to the pool, if nothing in the pool can
// belong to another one.
func (d *Daemon) tiePool(ctx context.Context) error {
	if d.store.PoolID() != "" {
		return nil
	}
	disks, err := d.disks.ListDisks(ctx)
	if err != nil || len(disks) > 0 {
		return err
	}
	return d.store.SetPoolID(ctx, d.disks.PoolID())
}

// layerInUse is also true of every layer while a record can not be read: it
// may name any of them.
func (d *Daemon) layerInUse(layer string) bool {
	if bad, err := d.store.Unreadable(context.Background()); err != nil || len(bad) > 0 {
		return true
	}
	all, err := d.store.List(context.Background())
	return err != nil || slices.ContainsFunc(all, func(r record.Record) bool {
		return slices.Contains(r.Spec.Image.Layers, layer)
	})
}

// noSweep says why nothing may be erased that nobody asked to, or is empty.
func (d *Daemon) noSweep() string {
	if d.disks.PoolID() == d.store.PoolID() {
		return ""
	}
	return fmt.Sprintf("the disks in the storage pool belong to another store (pool %.8s, store %.8s): bring back the sandboxd.db of that pool, or, to give its disks up, delete what lies in %s",
		d.disks.PoolID(), d.store.PoolID(), filepath.Join(d.cfg.StateDir, "pool"))
}

func (d *Daemon) openNetwork(ctx context.Context) (err error) {
	if err := d.ns.Setup(ctx); err != nil {
		return err
	}
	d.egress, err = egress.Open(ctx, egress.Config{
		Instance:  d.cfg.Instance,
		Pool:      d.cfg.Network.Pool,
		Upstreams: d.cfg.Network.Resolvers,
		Uplinks:   d.ns.SwitchedOn,
		Logger:    d.log,
		OnDeny: func(n egress.Denial) {
			d.log.Info("denied", "sandbox", n.ID, "proto", n.Proto, "dst", n.Dst.String(), "rule", n.Rule)
		},
	})
	if err != nil {
		return err
	}
	d.onClose(d.egress.Close)
	return nil
}

func (d *Daemon) openManager() error {
	bundles, err := newBundles(d.cfg, d.disks, d.ns, d.cgroups)
	if err != nil {
		return err
	}
	gvisor, err := runsc.New(runsc.Config{
		Binary:        filepath.Join(d.cfg.LibexecDir, "runsc"),
		Root:          filepath.Join(d.cfg.RunDir, "runsc"),
		Bundle:        bundles.dir,
		StartInCgroup: d.cgroups.Start,
	})
	if err != nil {
		return err
	}
	d.onClose(gvisor.Close)
	d.runc, err = runc.New(runc.Config{
		Binary: filepath.Join(d.cfg.LibexecDir, "sandboxd-runc"),
		Root:   filepath.Join(d.cfg.RunDir, "runc"),
		Bundle: bundles.dir,
	})
	if err != nil {
		return err
	}
	d.onClose(d.runc.Close)
	d.agents = newAgents(d.cfg, d.disks)
	d.manager, err = sandbox.New(sandbox.Deps{
		Namespaces: d.ns,
		Disks:      d.disks,
		Rootfs:     rootfs{d.disks},
		Cgroups:    cgroupTree{d.cgroups},
		Network:    links{d.ns, d.egress},
		Egress:     d.egress,
		Bundles:    bundles,
		Agents:     d.agents,
		Store:      d.store,
		Runtimes: map[string]sandbox.RuntimeKind{
			oci.Runsc: {
				Runtime:       gvisor,
				OOMGroup:      true,
				HeadroomBytes: int64(d.cfg.Runtime.RunscHeadroom),
				HostPids:      runscHostPids,
			},
			oci.Runc: {Runtime: d.runc, OwnUsers: true},
		},
	}, sandbox.Config{
		Instance:   d.cfg.Instance,
		Addr:       d.cfg.Addr,
		Retain:     time.Duration(d.cfg.Limits.RetainEnded),
		StartLimit: time.Duration(d.cfg.Runtime.StartTimeout),
		NoSweep:    d.noSweep(),
		Log:        d.log,
	})
	if err != nil {
		return err
	}
	d.onClose(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), shutdownLimit)
		defer cancel()
		return d.manager.Close(ctx)
	})
	return nil
}

// serve opens the sockets and answers until ctx ends or a listener fails.
func (d *Daemon) serve(ctx context.Context, version string, ready func() error) error {
	srv, err := d.newServer(version)
	if err != nil {
		return err
	}
	defer srv.Close()
	unixListener, err := listenUnix(d.cfg, d.log)
	if err != nil {
		return err
	}
	servers := []*http.Server{srv.HTTPServer(api.Listener{PublicPorts: true})}
	failed := make(chan error, 2)
	go func() { failed <- servers[0].Serve(unixListener) }()
	if d.cfg.Listen.TCP != "" {
		l, loopback, err := listenTCP(d.cfg)
		if err != nil {
			return errors.Join(err, servers[0].Close())
		}
		tcp := srv.HTTPServer(api.Listener{PublicPorts: loopback})
		servers = append(servers, tcp)
		go func() { failed <- tcp.Serve(l) }()
	}
	background, stop := context.WithCancel(ctx)
	defer stop()
	timers := make(chan struct{})
	go func() { defer close(timers); d.background(background) }()
	if err := ready(); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	stop()
	<-timers
	// Streams of hours do not hold up a restart: their agents keep the output.
	limit, cancel := context.WithTimeout(context.Background(), shutdownLimit/10)
	defer cancel()
	for _, s := range servers {
		if s.Shutdown(limit) != nil {
			s.Close()
		}
	}
	return err
}

// background runs what has no caller: expiry, and the sweep.
func (d *Daemon) background(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := expiry.Run(ctx, d.manager, d.log); err != nil && ctx.Err() == nil {
			d.log.Error("timeouts are no longer watched; the sweep still ends what expired, up to a minute late", "err", err)
		}
	}()
	go d.forgetClients(ctx)
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			<-done
			return
		case <-tick.C:
			if err := d.sweep(ctx); err != nil && ctx.Err() == nil {
				d.log.Error("sweep", "err", err)
			}
		}
	}
}

// sweep is what heals a host in peace: uplinks that came late, sandboxes that
// are not as their records say, what deleted disks and layers left.
func (d *Daemon) sweep(ctx context.Context) error {
	return errors.Join(d.ns.Setup(ctx), d.manager.Recover(ctx), d.disks.Sweep(ctx), d.images.Sweep(ctx))
}

// forgetClients drops the connections to agents of sandboxes that are gone.
func (d *Daemon) forgetClients(ctx context.Context) {
	for e := range d.manager.Subscribe(ctx) {
		switch e.Type {
		case sandbox.EventDeleted, string(record.Ended):
			d.agents.forget(e.ID)
		case sandbox.EventLost:
			d.agents.forgetAllBut(func(id string) bool {
				_, err := d.manager.Get(ctx, id)
				return err == nil
			})
		}
	}
}

// checkHost finds what is missing before anything is touched, and says what to do.
func checkHost(cfg *config.Config) error {
	var errs []error
	if os.Geteuid() != 0 {
		errs = append(errs, errors.New("sandboxd makes namespaces, cgroups and firewall rules: run it as root"))
	}
	for _, f := range []string{"runsc", "sandboxd-runc", "agent/sandbox-agent"} {
		p := filepath.Join(cfg.LibexecDir, f)
		if err := unix.Access(p, unix.X_OK); err != nil {
			errs = append(errs, fmt.Errorf("%s can not be executed (%w): set libexec_dir to where sandboxd's programs are", p, err))
		}
	}
	programs := map[string]string{"iptables": "iptables"}
	if cfg.Storage.Pool != snapshot.PoolPlain {
		programs["mkfs.btrfs"] = "btrfs-progs"
	}
	for program, pkg := range programs {
		if _, err := exec.LookPath(program); err != nil {
			errs = append(errs, fmt.Errorf("%s is missing: apt-get install %s", program, pkg))
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("this host can not run sandboxd:\n%w", errors.Join(errs...))
	}
	return nil
}
