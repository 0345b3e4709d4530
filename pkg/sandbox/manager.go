// Package sandbox is the core of sandboxd: it owns the life of every sandbox on the
// host. No other package knows in which order the resources of a sandbox come and go.
//
//	Create ─▶ creating ─▶ running ─▶ pausing ─▶ paused
//	              │          ▲  │                 │
//	              │          └──│──── resuming ◀──┘
//	              │ failed      │ died
//	              ▼             ▼
//	            ended ◀──── stopping         record and disk are kept
//	              │
//	              └──▶ starting ─▶ running, or ended again
//
//	Delete and expiry, from anywhere ─▶ deleting ─▶ (no record)
//	Prepared slot ─▶ prepared ─▶ creating, or (no record)
//
// One table lists the resources of a sandbox (resources.go). A transition writes its
// intent, walks the table, and writes its result (life.go). Manager adds locks,
// background work and the state that is in memory only. Recover (recover.go) brings
// host and store into agreement again, at start and every minute.
//
// What surprises: a sandbox whose creation fails, or whose processes end, does
// not go away. It is Ended, with a reason, a message and its last output, until
// somebody deletes it, it expires, or Config.Retain has passed.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/internal/keylock"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// Config is how a Manager is set up.
type Config struct {
	Instance instance.Instance
	Addr     func(slot int) netip.Addr // the address of a slot; a pure function
	Retain   time.Duration             // how long an ended sandbox is kept; 1 h if zero
	// StartLimit is how long the runtime may take to start, and after it the agent to
	// answer; a cold page cache or a busy host needs time. 30 s if zero. A whole
	// creation may take a minute more.
	StartLimit time.Duration
	NewToken   func() string // draws the token of an agent; 128 random bits if nil
	BootID     string        // tells a reboot from a restart; the kernel's if empty
	// Userspace tells a soft reboot, which leaves BootID as it is, from a restart; empty: not known.
	Userspace string
	// HostEnds, if not nil, reports whether the host ends now, and everything with it.
	HostEnds func(context.Context) bool
	// Down, if not nil, is for how long the host was down since a time. Retain does not run then.
	Down func(since time.Time) time.Duration
	// NoSweep, if not empty, is why the daemon erases only sandboxes that a client
	// names: the storage pool belongs to another store, say.
	NoSweep string
	// Restored reports that the state is that of a backup, which no operator has accepted yet.
	Restored bool
	Log      *slog.Logger // slog.Default if nil
	// Admit, if not nil, gives each sandbox that is to be brought up its turn. asker is
	// the context of the request.
	Admit func(asker context.Context, id string) Turn
	// Fetch, if not nil, brings the image of a sandbox whose record names no layers.
	Fetch Fetch
	// Policies are the named network policies of the configuration. Recover makes them those
	// of the store, and moves the sandboxes that follow them.
	Policies map[string]record.Network
	// CheckPolicy, if not nil, refuses a policy that a sandbox may not be given, because a binding
	// of its vault is for a host that the policy does not allow. It is called under the lock of
	// the sandbox.
	CheckPolicy func(r *record.Record, n record.Network) error
	// Prepared is how many prepared slots to keep, by runtime; none if nil. See Stock.
	Prepared map[string]int
	// Member, if not nil, is what the members of a pool are made from: its template as a
	// creation, with the image that the template names today. Nil: there are no pools.
	Member func(ctx context.Context, p record.Pool) (record.Spec, error)
	// Room, if not nil, fails while the host has no room for a sandbox on a runtime: then
	// no prepared slots are kept for it.
	Room func(ctx context.Context, runtime string) error
	// ImageRoom, if not nil, fails if the pool has no room for a memory image of so many bytes, while
	// it has promised some to images that are being written.
	ImageRoom func(bytes, promised int64) error
	// OnEvent and OnOperation, if not nil, are called for every event and operation,
	// before the caller that caused it gets its result. They must not block.
	OnEvent     func(events.Event)
	OnOperation func(Operation)
}

// Manager runs sandboxes. Its methods may be called concurrently.
//
// A parameter idOrName takes a name or an ID. A sandbox that does not exist is
// errs.NotFound. So is one that is being deleted, except for Delete.
type Manager struct {
	life      life
	snapshots *Snapshots
	stock     *Stock

	began time.Time // when this daemon began; records that changed later were changed by it
	newID func() string
	volID func() string // draws the ID of a volume
	locks keylock.Set   // one per sandbox, around every mutation; reads take none

	ctx       context.Context // ends with the Manager: observers, waits
	cancel    context.CancelCauseFunc
	observers sync.WaitGroup // they end when ctx does
	tracker   tracker
	sweeps    atomic.Uint32 // how often Recover compared all
}

var (
	errDeleted = errors.New("the sandbox was deleted")
	errEnded   = errors.New("the sandbox ended")
	errClosing = errs.New(errs.Unavailable, "sandboxd is shutting down; sandboxes keep running; try again in a moment")
	validName  = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}$`)
	bootIDFile = "/proc/sys/kernel/random/boot_id"
)

// New returns a Manager. Recover must run before any other method.
func New(d Deps, c Config) (*Manager, error) {
	if c.Retain == 0 {
		c.Retain = time.Hour
	}
	if c.StartLimit == 0 {
		c.StartLimit = 30 * time.Second
	}
	if c.NewToken == nil {
		c.NewToken = newToken
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.BootID == "" {
		b, err := os.ReadFile(bootIDFile)
		if err != nil {
			return nil, fmt.Errorf("read the boot id: %w", err)
		}
		c.BootID = strings.TrimSpace(string(b))
	}
	m := &Manager{
		life:    life{Deps: d, cfg: c, rows: resources(d, c), bus: events.Bus{OnEvent: c.OnEvent}},
		began:   now(),
		newID:   func() string { return record.NewID(c.Instance) },
		volID:   func() string { return record.NewVolumeID(c.Instance) },
		tracker: tracker{handles: map[string]*handle{}},
	}
	m.ctx, m.cancel = context.WithCancelCause(context.Background())
	m.snapshots = newSnapshots(m)
	m.stock = newStock(m)
	m.life.onLinger = m.awaitKernel
	m.life.onLeft = m.stock.Look
	m.life.onColdClaim = func(pool string) { m.stock.counted(pool, record.PoolLost, 0) }
	return m, nil
}

// Close waits for the operations in flight, at most until ctx ends, releases the prepared
// slots and stops watching. Sandboxes live on.
func (m *Manager) Close(ctx context.Context) error {
	m.tracker.close()
	idle := make(chan struct{})
	go func() {
		m.tracker.operations.Wait()
		close(idle)
	}()
	var err error
	select {
	case <-idle:
	case <-ctx.Done():
		err = fmt.Errorf("close: some operations were interrupted; the next start of sandboxd finishes them: %w", context.Cause(ctx))
	}
	m.stock.empty(ctx)
	m.cancel(errClosing)
	if err == nil {
		m.observers.Wait()
	}
	return err
}

// Quiet waits for a moment at which no operation of m goes on, or until ctx ends. Others may begin: a
// daemon that is to end serves while a long one, as a hibernation, comes to its end.
func Quiet(ctx context.Context, m *Manager) {
	select {
	case <-m.tracker.quieted():
	case <-ctx.Done():
	}
}

// Create begins a sandbox and returns as soon as the intent is durable. The rest
// happens in the background, even if ctx ends. See Await.
func (m *Manager) Create(ctx context.Context, s record.Spec) (record.Record, error) {
	err := m.check(s)
	if err == nil {
		err = m.checkVolumes(ctx, &s)
	}
	if err != nil {
		return record.Record{}, err
	}
	if early := m.life.Runtimes[s.Runtime].Early; early != nil {
		go early()
	}
	start := now()
	r := record.Record{
		State:   record.Creating,
		Spec:    s,
		Token:   m.life.cfg.NewToken(),
		Created: start,
		Changed: start,
	}
	m.life.cfg.upIn(&r)
	if s.Timeout > 0 {
		r.Expires = start.Add(s.Timeout)
	}
	if !m.tracker.begin() {
		return record.Record{}, errClosing
	}
	defer m.stock.enter()()
	unlock, err := m.stock.insert(ctx, &r)
	if err != nil {
		m.tracker.end()
		return record.Record{}, fmt.Errorf("create: %w", err)
	}
	m.life.bus.Publish(string(record.Creating), &r)
	launcher{m}.launch(ctx, r, unlock)
	return r, nil
}

// Start lets a sandbox that has ended, or was stopped, live again. It keeps its ID,
// name, address, files and entrypoint, and loses the content of its memory. Start
// returns as soon as the intent is durable. See Await.
func (m *Manager) Start(ctx context.Context, idOrName string) (record.Record, error) {
	return m.startAgain(ctx, idOrName, true)
}

// startAgain is Start; asked says whether a client requested it.
func (m *Manager) startAgain(ctx context.Context, idOrName string, asked bool) (record.Record, error) {
	r, err := m.Get(ctx, idOrName)
	if err == nil && r.State.Beginning() { // not waited for
		err = wrongState(&r, record.Ended)
	}
	if err != nil {
		return r, err
	}
	if !m.tracker.begin() {
		return r, errClosing
	}
	unlock, err := m.locks.Lock(ctx, r.ID)
	if err != nil {
		m.tracker.end()
		return r, busy("start", r.ID, err)
	}
	if r, err = m.Get(ctx, r.ID); err == nil {
		err = m.again(ctx, &r, asked)
	}
	if err != nil {
		unlock()
		m.tracker.end()
		return r, err
	}
	launcher{m}.launch(ctx, r, unlock)
	return r, nil
}

// again makes the intent to start a sandbox once more durable.
func (m *Manager) again(ctx context.Context, r *record.Record, asked bool) error {
	switch {
	case r.State != record.Ended, !asked && !r.Restarting():
		return wrongState(r, record.Ended)
	case r.Reason == record.DiskLost:
		return errs.New(errs.WrongState, "the disk of sandbox %s was lost with the storage pool, so there is nothing to start; create "+
			"another", r.ID)
	case r.NeverRan():
		return errs.New(errs.WrongState, "sandbox %s could not be created, so there is nothing to start; create another", r.ID)
	}
	next := *r
	next.Again(asked)
	err := m.life.set(ctx, r, record.Starting, death{}.write, func(r *record.Record) {
		m.life.cfg.upIn(r)
		r.Restarts, r.QuickRestarts, r.Started = next.Restarts, next.QuickRestarts, next.Started
	})
	if err != nil {
		return fmt.Errorf("start %s: %w", r.ID, err)
	}
	return nil
}

func (m *Manager) check(s record.Spec) error {
	if _, ok := m.life.Runtimes[s.Runtime]; !ok {
		names := make([]string, 0, len(m.life.Runtimes))
		for n := range m.life.Runtimes {
			names = append(names, n)
		}
		slices.Sort(names)
		return errs.New(errs.Invalid, "runtime %q is unknown; this host has %s", s.Runtime, strings.Join(names, " and "))
	}
	if s.Idle.Action == record.IdleHibernate && m.life.Runtimes[s.Runtime].Memory == nil {
		return errs.New(errs.Unsupported, "a sandbox hibernates on runtime runsc only, and this one is to run on %s; have it paused when "+
			"it is idle (--on-idle pause)", s.Runtime)
	}
	return checkName(s.Name)
}

// checkName checks the name of a sandbox; it may have none.
func checkName(name string) error {
	if name != "" && (!validName.MatchString(name) || record.IsID(name) || record.IsSnapshotID(name)) {
		return errs.New(errs.Invalid, "name %q: want 1 to 63 characters of A-Z a-z 0-9 _ . - that begin with a letter or digit, and not "+
			"the form of an id (12 characters of a-z and 2-7, also with the prefix snap-)", name)
	}
	return nil
}

// insert makes the intent durable. If the store fails, insert also deletes the record:
// one that was written despite the error would come back as a sandbox that no client
// requested. One that took a prepared slot is left to Stock.giveBack.
func (m *Manager) insert(ctx context.Context, r *record.Record) (err error) {
	release, err := m.snapshots.hold(ctx, &r.Spec)
	if err != nil {
		return err
	}
	defer release()
	if len(r.Spec.Publish) > 0 { // a port in use is refused while there is nothing to undo
		if err := m.life.Ports.Reserve(ctx, r.ID, r.Spec.Publish); err != nil {
			return err
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, m.life.Ports.Close(context.WithoutCancel(ctx), r.ID))
			}
		}()
	}
	step := "store:insert"
	switch {
	case r.MemberToken != "":
		step = "store:claim"
	case r.Prepared:
		step = "store:take"
	}
	err = table.Pass(step, func() error {
		ctx, cancel := context.WithTimeout(ctx, storeLimit)
		defer cancel()
		return m.life.Store.Insert(ctx, r)
	})
	if err == nil || r.Prepared || errs.Is(err, errs.Exists) || errs.Is(err, errs.Exhausted) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLimit)
	defer cancel()
	return errors.Join(err, m.life.Store.Delete(ctx, r.ID))
}

// Await returns a sandbox once it is no longer being brought up. When ctx ends first,
// it returns the record as it is, and the cause.
func (m *Manager) Await(ctx context.Context, idOrName string) (record.Record, error) {
	r, err := m.Get(ctx, idOrName)
	if err != nil || !r.State.Beginning() {
		return r, err
	}
	h := m.tracker.get(r.ID)
	if h == nil { // it ended meanwhile
		return m.Get(ctx, r.ID)
	}
	select {
	case <-h.settled:
		if context.Cause(h.creation) == errDeleted { // it is about to be deleted
			return record.Record{}, notFound(idOrName)
		}
		return m.Get(ctx, r.ID)
	case <-ctx.Done():
		return r, context.Cause(ctx)
	}
}

// Steps returns how long each step of a creation took, in the order of the table. It
// returns nothing while the creation goes on, or if another daemon did it.
func (m *Manager) Steps(id string) []table.Step {
	h := m.tracker.get(id)
	if h == nil {
		return nil
	}
	select {
	case <-h.settled:
		return h.steps
	default:
		return nil
	}
}

// Life returns a context that ends when the sandbox has ended, for streams into it. It
// has ended already if there are no processes.
func (m *Manager) Life(id string) context.Context {
	if h := m.tracker.get(id); h != nil {
		return h.ctx
	}
	return noLife
}

var noLife = func() context.Context { ctx, end := context.WithCancel(context.Background()); end(); return ctx }()

var closedChan = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// Get returns a sandbox.
func (m *Manager) Get(ctx context.Context, idOrName string) (record.Record, error) {
	r, err := m.find(ctx, idOrName)
	if err == nil && r.State == record.Deleting {
		return record.Record{}, notFound(idOrName)
	}
	return r, err
}

// find is Get, but also finds a sandbox that is being deleted. A prepared slot is none.
func (m *Manager) find(ctx context.Context, idOrName string) (record.Record, error) {
	r, ok, err := m.life.Store.Get(ctx, idOrName)
	if err != nil {
		return record.Record{}, fmt.Errorf("get sandbox %q: %w", idOrName, err)
	}
	if !ok || r.State == record.Prepared {
		return record.Record{}, notFound(idOrName)
	}
	return r, nil
}

// List returns all sandboxes, the newest first. The records are shared: copy
// one to change it.
func (m *Manager) List(ctx context.Context) ([]*record.Record, error) {
	all, err := m.life.Store.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	return slices.DeleteFunc(all, func(r *record.Record) bool {
		return r.State == record.Deleting || r.State == record.Prepared
	}), nil
}

// Subscribe sends all events from now on until ctx ends, and then closes the channel. A
// slow reader loses events and gets events.Lost instead.
func (m *Manager) Subscribe(ctx context.Context) <-chan events.Event {
	return m.life.bus.Subscribe(ctx)
}

// EventsSince is Subscribe for readers that come back; see events.Bus.Since.
func EventsSince(ctx context.Context, m *Manager, cursor string, at time.Time) <-chan events.Event {
	return m.life.bus.Since(ctx, cursor, at)
}

// Denied tells the readers of events that the network of a sandbox refused something. Guests
// cause that, so such an event is not kept, and only readers that keep up get it: it must
// displace no other event. The caller limits how many there are.
func Denied(m *Manager, id, what string) {
	b := &m.life.bus
	if !b.Read() {
		return
	}
	r, err := m.Get(context.Background(), id)
	if err != nil {
		return // it is gone, and nobody asks for it
	}
	b.Pass(events.Event{Time: now(), Type: events.Denied, ID: id, Name: r.Spec.Name, Message: what})
}

// Tell tells the readers of events what happened to the host.
func Tell(m *Manager, kind, reason, message string) { m.life.bus.Tell(kind, reason, message) }

// Deadline is when a sandbox will be erased: when it expires or, if it has ended, after
// Config.Retain. Zero means never.
func (m *Manager) Deadline(r record.Record) time.Time { return m.life.due(&r) }
