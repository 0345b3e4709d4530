// Package daemon wires sandboxd together: it opens every mechanism in the only safe
// order, passes them to the Manager and the API, and closes them.
//
//	host check ─▶ lock ─▶ pool ─▶ store ─▶ network ─▶ egress ─▶ Recover ─▶ sockets
//
// What surprises: closing ends no sandbox. Processes, mounts, links, rules and the pool
// stay, and the next daemon finds them; Teardown removes them. Only a start that fails
// removes them itself, if no sandbox lives.
package daemon

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup/schedule"
	"github.com/sandboxd/sandboxd/internal/certs"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/doctor"
	"github.com/sandboxd/sandboxd/internal/history"
	"github.com/sandboxd/sandboxd/internal/journal"
	"github.com/sandboxd/sandboxd/internal/metrics"
	"github.com/sandboxd/sandboxd/internal/systemd"
	"github.com/sandboxd/sandboxd/internal/uptime"
	"github.com/sandboxd/sandboxd/internal/versions"
	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/fork"
	"github.com/sandboxd/sandboxd/pkg/health"
	"github.com/sandboxd/sandboxd/pkg/idle"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/oci/runc"
	"github.com/sandboxd/sandboxd/pkg/oci/runsc"
	"github.com/sandboxd/sandboxd/pkg/pools"
	"github.com/sandboxd/sandboxd/pkg/pressure"
	"github.com/sandboxd/sandboxd/pkg/publish"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/secrets"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/store"
	"github.com/sandboxd/sandboxd/pkg/validity"
)

// runscHostPids is how many host tasks one gVisor sandbox may have: threads of
// the sentry, and a stub for each address space. See docs/design/hardening.md,
// "What is limited?".
const runscHostPids = 4096

// How long what has begun may go on after SIGTERM.
const (
	quietLimit    = 5 * time.Second        // operations, while the API is served as ever
	shutdownLimit = 10 * time.Second       // those that go on then
	answerLimit   = 300 * time.Millisecond // answers, while new requests are not served any more
)

// Daemon is an open daemon. The fields are in the order they are opened.
type Daemon struct {
	cfg     *config.Config
	log     *slog.Logger
	files   *snapshot.Store
	store   *store.DB
	ns      *netns.Manager
	scope   *systemd.Scope // nil where systemd is not init
	cgroups *cgroups.Tree
	egress  *egress.Engine
	secrets *secrets.Keeper
	ports   *publish.Ports
	runc    *runc.Driver
	gvisor  *runsc.Driver
	agents  *agents
	images  *image.Store
	queue   *admission.Queue
	drain   *admission.Drain
	manager *sandbox.Manager
	gate    *admission.Gate
	forks   *fork.Forks
	pools   *pools.Keeper
	watcher *health.Watcher
	idle    *idle.Watcher
	metrics *metrics.Metrics
	backups *schedule.Keeper // nil: no target is configured
	history *history.Book
	denials *denials
	pulls   pulls
	asked   chan chan<- error // for a sweep at once; the answer goes into it
	claimed bool              // egress.Recovered has succeeded
	ends    *validity.Watch   // of certificates and keys
	ladder  *pressure.Ladder
	hold    *versions.Hold // nil: this version is not on trial
	mark    *versions.Mark // nil: neither that, nor in its soak
	up      *uptime.Book
	// Certificates of TCP listeners; nil: no TLS.
	cert, gatewayCert *certs.Pair

	close []func() error // in order of opening; closed in reverse
}

// Run opens the daemon, serves until ctx ends, and closes it. ready is called
// when the API answers.
func Run(ctx context.Context, cfg *config.Config, version string, ready func() error) error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(cfg.Log.Level)); err != nil {
		return err
	}
	log, served := journal.Starting(os.Stderr, level)
	journal.Capture(log)
	for _, w := range cfg.Warnings {
		log.Warn("the configuration has a key of an older release", "key", w)
	}
	start := time.Now()
	if err := dropPrivileges(); err != nil {
		return err
	}
	boundHeap(log)
	d, err := open(ctx, cfg, log, begin)
	if err != nil {
		return err
	}
	if err := errors.Join(onTrial(d), d.openCerts()); err != nil { // not in open: Teardown must work without certificates
		return errors.Join(err, d.abandon(ctx))
	}
	err = errors.Join(d.pools.Configure(ctx, cfg.FixedPools()), d.openHistory(ctx), d.manager.Recover(ctx), endLeftovers(ctx, d),
		sayLasting(ctx, d))
	if err != nil {
		// Recover's error names what does not match the records, and the sweep tries
		// again. That must not keep other sandboxes from the API.
		log.Error("recovery is incomplete; it runs again in a minute", "err", err)
	}
	started := false
	err = d.serve(ctx, version, func() error {
		started = true
		served()
		log.Info("sandboxd serves", "version", version, "instance", cfg.Instance.String(), "pool", d.files.Describe(),
			"cgroups", d.cgroups.Mode(), "dur", time.Since(start).Round(time.Millisecond))
		return errors.Join(systemd.Ready("serving "+cfg.Listen.Socket), ready())
	})
	systemd.Stopping()
	if !started {
		return errors.Join(err, d.abandon(ctx))
	}
	return errors.Join(err, d.Close())
}

// open opens everything below the API.
func open(ctx context.Context, cfg *config.Config, log *slog.Logger, settle func(context.Context, *Daemon) error) (_ *Daemon, err error) {
	// Files get the modes that the code names, whatever umask a unit sets: a root
	// directory that only its owner may enter shuts out every other user of a guest.
	unix.Umask(0o022)
	d := &Daemon{cfg: cfg, log: log, history: history.New(), denials: newDenials(log), asked: make(chan chan<- error)}
	d.metrics = d.newMetrics()
	defer func() {
		if err != nil {
			err = errors.Join(err, d.abandon(ctx))
		}
	}()
	if err := doctor.Start(cfg); err != nil {
		return nil, err
	}
	if err := d.claim(); err != nil {
		return nil, err
	}
	if err := settle(ctx, d); err != nil {
		return nil, err
	}
	d.ns = netns.New(cfg.Instance, cfg.RunDir)
	d.ns.Pool, d.ns.Log = cfg.Network.Pool, log
	if err := errors.Join(openUptime(d), d.openStorage(ctx)); err != nil {
		return nil, err
	}
	if err := d.openCgroups(ctx, d.disksToLimit()); err != nil {
		return nil, err
	}
	if err := d.openNetwork(ctx); err != nil {
		return nil, err
	}
	if err := openSecrets(ctx, d); err != nil {
		return nil, err
	}
	return d, d.openManager(ctx)
}

// disksToLimit are the disks on which I/O is limited: sandboxes write to the pool, and
// read from the pool and the layers.
func (d *Daemon) disksToLimit() (all []cgroups.Disk) {
	pool, layers, err := d.files.Devices()
	if err != nil || pool == "" {
		d.log.Warn("I/O cannot be limited: the storage pool is not on a block device", "err", err)
		return nil
	}
	all = append(all, cgroups.Disk{Dev: pool})
	if layers != "" && layers != pool {
		all = append(all, cgroups.Disk{Dev: layers, ReadsOnly: true})
	}
	return all
}

func (d *Daemon) onClose(f func() error) { d.close = append(d.close, f) }

// Close closes everything in reverse order. Sandboxes go on.
func (d *Daemon) Close() error {
	var errs []error
	for i := len(d.close) - 1; i >= 0; i-- {
		errs = append(errs, d.close[i]())
	}
	d.close = nil
	return errors.Join(errs...)
}

// claim takes the locks and makes the directories.
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

// openCgroups finds the cgroup below which sandboxes live: a systemd scope if systemd
// is init, because it owns the tree then; otherwise a cgroup of our own.
func (d *Daemon) openCgroups(ctx context.Context, disks []cgroups.Disk) (err error) {
	c := cgroups.Config{Instance: d.cfg.Instance, Disks: disks}
	if systemd.Booted() {
		d.scope = systemd.NewScope(d.cfg.Instance.String())
		if err := d.scope.Keep(ctx); err != nil && !d.scope.Stands() {
			return err
		} else if err != nil {
			d.log.Error("cannot keep the scope of sandboxes; they keep running in it, and the sweep tries again", "err", err)
		}
		c.Root = d.scope.Cgroup()
	}
	if d.cgroups, err = cgroups.Open(c); err != nil {
		return err
	}
	d.onClose(d.cgroups.Close)
	return nil
}

// openFiles mounts the pool.
func openFiles(ctx context.Context, d *Daemon) error {
	identity, err := netns.UserNS(0, 65536)
	if err != nil {
		return err
	}
	d.onClose(identity.Close)
	d.files, err = snapshot.Open(ctx, snapshot.Config{
		Instance:       d.cfg.Instance,
		StateDir:       d.cfg.StateDir,
		RunDir:         d.cfg.RunDir,
		Pool:           d.cfg.Storage.Pool,
		PoolBytes:      int64(d.cfg.Storage.PoolSize),
		PoolDevice:     d.cfg.Storage.Device,
		UserNS:         func(id string) (*os.File, error) { return os.Open(d.ns.UserPath(id)) },
		IdentityUserNS: identity,
		Down:           d.up.Down,
		HostPaths:      d.cfg.Storage.AllowedHostPaths,
	})
	if err == nil {
		d.onClose(d.files.Close)
	}
	return err
}

// openStorage also opens the store, and ties it to the pool.
func (d *Daemon) openStorage(ctx context.Context) (err error) {
	if err := openFiles(ctx, d); err != nil {
		return err
	}
	d.store, err = store.Open(stateFile(d.cfg), store.Options{Log: d.log})
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
		Layers:     d.files.Layers,
		DB:         d.store,
		RecipesDir: d.cfg.RecipesDir,
		TempDir:    filepath.Join(d.cfg.StateDir, "build"),
		Users:      d.layerUsers,
		Aliases:    d.cfg.Images.Names,
		Pools:      d.cfg.PoolImages(),
		Registries: d.cfg.Images.Registries,
		BlobsDir:   filepath.Join(d.cfg.StateDir, "blobs"),

		SameVersions: d.cfg.Images.OtherVersions == config.RefuseVersions,
	})
	return err
}

func (d *Daemon) openNetwork(ctx context.Context) (err error) {
	if err := d.ns.Setup(ctx); err != nil {
		return err
	}
	total, err := memory("MemTotal")
	if err != nil {
		return err
	}
	d.egress, err = egress.Open(ctx, egress.Config{
		Instance:     d.cfg.Instance,
		Host:         d.cfg.Egress.Host,
		Pool:         d.cfg.Network.Pool,
		MaxOpenFlows: d.cfg.Network.MaxOpenFlows,
		MaxFlows:     d.cfg.Network.MaxFlows,
		Upstreams:    d.cfg.Network.Resolvers,
		Uplinks:      d.ns.SwitchedOn,
		FlowLogs:     filepath.Join(d.cfg.StateDir, "flows"),
		FlowDir:      filepath.Join(d.cfg.RunDir, flowDir),
		Outliving:    d.cgroups.Outliving(),
		Leases:       filepath.Join(d.cfg.RunDir, "leases"),
		Logger:       d.log,
		OnDeny:       d.onDeny,
		OnInspect:    func(e egress.InspectEvent) { noteInspected(d, e) },
		Inspecting:   func(_ string, pid int) error { return d.cgroups.Inspecting(total / inspectShare).Add(pid) },
		Roots:        rootsOf(d.cfg),
	})
	if err != nil {
		return err
	}
	d.onClose(d.egress.Close)
	// Not earlier: without the rules the host would forward for all its networks.
	d.ns.BeforeForward = d.egress.CloseUplinks
	if err := d.ns.OpenUplinks(ctx); err != nil {
		d.log.Error("sandboxes may get no replies; the sweep tries again every minute", "err", err)
	}
	return nil
}

func (d *Daemon) openManager(ctx context.Context) error {
	bundles, err := newBundles(d.cfg, d.files, d.ns, d.cgroups, d.log)
	if err != nil {
		return err
	}
	runtimes, err := openRuntimes(d, bundles)
	if err != nil {
		return err
	}
	bundles.authority = authorityOf(d.secrets)
	d.agents = newAgents(d.cfg, d.files.Disks, bundles.trusted, d.secrets.Environment)
	d.ports = publish.New(d.log)
	d.onClose(func() error { d.ports.CloseAll(); return nil })
	d.queue = admission.NewQueue(d.cfg.Limits.MaxCreating)
	if d.drain, err = admission.OpenDrain(filepath.Join(d.cfg.StateDir, "draining")); err != nil {
		return err
	}
	member, err := memberOf(d)
	if err != nil {
		return err
	}
	d.manager, err = sandbox.New(sandbox.Deps{
		Namespaces: d.ns,
		Disks:      d.files.Disks,
		Frozen:     d.files.Snapshots,
		Rootfs:     rootfs{d.files.Mounts, d.files.Disks},
		Volumes:    volumes{d.files.Volumes},
		Cgroups:    cgroupTree{d.cgroups},
		Network:    links{d.ns, d.egress},
		Egress:     firewall{d.egress, d.secrets},
		Ports:      d.ports,
		Bundles:    bundles,
		Agents:     d.agents,
		Vaults:     d.secrets,
		Store:      d.store,
		Runtimes:   runtimes,
	}, sandbox.Config{
		Instance:   d.cfg.Instance,
		Addr:       d.cfg.Addr,
		Retain:     time.Duration(d.cfg.Limits.RetainEnded),
		StartLimit: time.Duration(d.cfg.Runtime.StartTimeout),
		NoSweep:    d.noSweep(),
		Restored:   d.store.Restored() != "",
		Userspace:  userspace(ctx, d.log),
		HostEnds:   hostEnds(d.log),
		Down:       d.up.Down,
		Policies:   d.cfg.Networks(),

		CheckPolicy: d.secrets.CheckPolicy,
		Member:      member,
		Log:         d.log,
		Prepared:    slots(d.cfg, d.log),
		Room:        func(ctx context.Context, runtime string) error { return d.gate.Room(ctx, runtime) },
		ImageRoom:   imageRoom(d.files.Pool.Space, int64(d.cfg.Storage.Reserve)),
		Fetch:       d.fetch,
		Admit:       func(asker context.Context, id string) sandbox.Turn { return d.queue.Enter(asker, id) },

		OnEvent:     d.onEvent,
		OnOperation: d.onOperation,
	})
	if err != nil {
		return err
	}
	d.onClose(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), shutdownLimit)
		defer cancel()
		return d.manager.Close(ctx)
	})
	d.pools = newPools(d, member)
	d.denials.toReaders(func(id, text string) { sandbox.Denied(d.manager, id, text) })
	d.gate = d.newGate()
	openLadder(d)
	openForks(d)
	openEnds(d)
	k := keeper{sandbox.Keeper{Manager: d.manager}, d.gate, d.cgroups}
	d.watcher = health.New(k, d.agents, d.log)
	d.idle = idle.New(k, d.log)
	d.ports.Use = useByID(d)
	return nil
}

// serve opens the sockets and answers until ctx ends or a listener fails.
func (d *Daemon) serve(ctx context.Context, version string, ready func() error) error {
	if err := openBackups(d, version); err != nil {
		return err
	}
	srv, err := d.newServer(version)
	if err != nil {
		return err
	}
	defer srv.Close()
	l, err := listenUnix(d.cfg, d.log)
	if err != nil {
		return err
	}
	unixListener := newLastCall(l)
	defer unixListener.Close() // also if its server does not run yet when another listener fails
	servers := []*auth.Server{srv.HTTPServer(auth.Listener{PublicPorts: true})}
	defer func() {
		for _, s := range servers {
			s.Close()
		}
	}()
	failed := make(chan error, 3)
	ended := make(chan struct{})
	go func() { defer close(ended); failed <- servers[0].Serve(unixListener) }()
	tcp, err := d.listeners()
	if err != nil {
		return err
	}
	for _, l := range tcp {
		s := srv.HTTPServer(l.may)
		servers = append(servers, s)
		go func() { failed <- s.Serve(l) }()
	}
	closeAdmin, err := d.serveAdmin(version)
	if err != nil {
		return err
	}
	defer closeAdmin()
	inBackground, stop := context.WithCancel(ctx)
	defer stop()
	timers := make(chan struct{})
	go func() { defer close(timers); background{d}.run(inBackground) }()
	if err := ready(); err != nil {
		return err
	}
	err = served(ctx, d, failed)
	stop()
	<-timers
	if err == nil {
		awaitQuiet(d)
	}
	unixListener.stop(ended)
	// Streams do not hold up a restart: their agents keep the output, and clients come back for it.
	srv.CutStreams()
	limit, cancel := context.WithTimeout(context.Background(), answerLimit)
	defer cancel()
	for _, s := range servers {
		s.Drain(limit) // those that need longer are closed next
	}
	return err
}

// awaitQuiet serves on while operations come to their end: clients have no API while Close waits for them.
func awaitQuiet(d *Daemon) {
	ctx, cancel := context.WithTimeout(context.Background(), quietLimit)
	defer cancel()
	sandbox.Quiet(ctx, d.manager)
}
