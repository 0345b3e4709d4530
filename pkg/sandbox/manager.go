// Package sandbox is the heart of sandboxd: it owns the life of every sandbox
// on the host and is the only package that knows in which order the resources
// of one come and go.
//
//	Create ─▶ creating ─▶ running ─▶ pausing ─▶ paused
//	              │          ▲  │                 │
//	              │          └──│──── resuming ◀──┘
//	              │ failed      │ died
//	              ▼             ▼
//	            ended ◀──── stopping         record and disk are kept
//
//	Delete and expiry, from anywhere ─▶ deleting ─▶ (no record)
//
// What a sandbox is made of is one table (resources.go). A transition writes
// its intent, walks the table, and writes its result (life.go); Manager adds
// locks, background work and what is in memory only; Recover (recover.go)
// brings host and store into agreement again, at start and every minute.
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
	"time"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/internal/keylock"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Config is what a Manager is told.
type Config struct {
	Instance instance.Instance
	Addr     func(slot int) netip.Addr // the address of a slot; a pure function
	Retain   time.Duration             // how long an ended sandbox is kept; 1 h if zero
	// StartLimit is how long the runtime may take to start, and after it the
	// agent to answer: a cold page cache, a busy host. 30 s if zero. A whole
	// creation may take a minute more.
	StartLimit time.Duration
	NewToken   func() string // draws the token of an agent; 128 random bits if nil
	BootID     string        // tells a reboot from a restart; the kernel's if empty
	// NoSweep, if not empty, is why nothing may be erased that was not asked
	// for by name: the storage pool belongs to another store, say.
	NoSweep string
	Log     *slog.Logger // slog.Default if nil
}

// Manager runs sandboxes. Its methods may be called concurrently.
//
// Where idOrName stands, a name is as good as an ID. What does not exist is
// errs.NotFound, and so, but for Delete, is what is being deleted.
type Manager struct {
	life  life
	newID func() string
	locks keylock.Set // one per sandbox, around every mutation; reads take none

	ctx    context.Context // ends with the Manager: observers, waits
	cancel context.CancelCauseFunc
	work   sync.WaitGroup // what Close waits for
	eyes   sync.WaitGroup // observers: they end when ctx does

	mu     sync.Mutex
	closed bool             // guarded by mu, as all below
	lives  map[string]*vita // sandboxes with processes, or about to have them
}

// A vita is what is known of a sandbox in memory only.
type vita struct {
	id     string
	ctx    context.Context // until the sandbox has ended; for streams
	cancel context.CancelCauseFunc
	// Its creation, and what ends one that nobody wants any more.
	creation context.Context
	abort    context.CancelCauseFunc
	ready    chan struct{} // closed when the creation has ended, either way
	steps    []Step        // of the creation; written before ready is closed
}

var (
	errDeleted = errors.New("the sandbox was deleted")
	errEnded   = errors.New("the sandbox ended")
	errClosing = errs.New(errs.Unavailable, "sandboxd is shutting down; sandboxes go on, try again in a moment")
	validName  = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}$`)
	bootIDFile = "/proc/sys/kernel/random/boot_id"
)

// New returns a Manager. Recover must run before anything else is asked of it.
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
		life:  life{Deps: d, cfg: c, rows: resources(d, c)},
		newID: func() string { return record.NewID(c.Instance) },
		lives: map[string]*vita{},
	}
	m.ctx, m.cancel = context.WithCancelCause(context.Background())
	return m, nil
}

// Close lets what is in flight finish, at most until ctx ends, and stops
// watching. Sandboxes go on.
func (m *Manager) Close(ctx context.Context) error {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	idle := make(chan struct{})
	go func() {
		m.work.Wait()
		close(idle)
	}()
	var err error
	select {
	case <-idle:
	case <-ctx.Done():
		err = fmt.Errorf("close: some operations were cut short, the next start finishes them: %w", context.Cause(ctx))
	}
	m.cancel(errClosing)
	if err == nil {
		m.eyes.Wait()
	}
	return err
}

// Create starts the life of a sandbox and returns as soon as that is durable;
// what follows goes on in the background, whatever becomes of ctx. See Await.
func (m *Manager) Create(ctx context.Context, s record.Spec) (record.Record, error) {
	if err := m.check(s); err != nil {
		return record.Record{}, err
	}
	start := now()
	r := record.Record{
		ID:      m.newID(),
		State:   record.Creating,
		Spec:    s,
		Token:   m.life.cfg.NewToken(),
		BootID:  m.life.cfg.BootID,
		Created: start,
		Changed: start,
	}
	if s.Timeout > 0 {
		r.Expires = start.Add(s.Timeout)
	}
	if !m.enter() {
		return record.Record{}, errClosing
	}
	unlock, err := m.locks.Lock(ctx, r.ID)
	if err == nil {
		if err = m.insert(ctx, &r); err != nil {
			unlock()
		}
	}
	if err != nil {
		m.work.Done()
		return record.Record{}, fmt.Errorf("create: %w", err)
	}
	m.life.bus.publish(string(record.Creating), &r)
	v := m.bear(r.ID)
	go func(r record.Record) {
		defer m.work.Done()
		defer unlock()
		defer close(v.ready)
		m.provision(v, &r)
	}(r)
	return r, nil
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
	if s.Name != "" && (!validName.MatchString(s.Name) || record.IsID(s.Name)) {
		return errs.New(errs.Invalid, "name %q: want up to 63 of a-z A-Z 0-9 _ . -, the first a letter or digit, and not the form of an id (12 of a-z 2-7)", s.Name)
	}
	return nil
}

// insert makes the intent durable. A record that was written although the
// store said no would come back as a sandbox that nobody asked for.
func (m *Manager) insert(ctx context.Context, r *record.Record) error {
	err := pass("store:insert", func() error {
		ctx, cancel := context.WithTimeout(ctx, storeLimit)
		defer cancel()
		return m.life.Store.Insert(ctx, r)
	})
	if err == nil || errs.Is(err, errs.Exists) || errs.Is(err, errs.Exhausted) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLimit)
	defer cancel()
	return errors.Join(err, m.life.Store.Delete(ctx, r.ID))
}

// provision brings a sandbox from Creating to Running, or to its end.
func (m *Manager) provision(v *vita, r *record.Record) {
	ctx, cancel := context.WithTimeoutCause(v.creation, m.life.cfg.StartLimit+createSlack, errTooLong)
	defer cancel()
	start := time.Now()
	var err error
	v.steps, err = m.life.start(ctx, r)
	cause := context.Cause(ctx)
	switch {
	case err == nil:
		m.watch(v)
	case errors.Is(cause, errDeleted), errors.Is(cause, errClosing):
		err = cause // whoever cancelled erases it, or the next daemon ends it
	default:
		err = errors.Join(err, m.life.fail(ctx, r, err))
		m.bury(v.id, errEnded)
	}
	m.life.log(ctx, "create", r, start, v.steps, err)
}

// Await returns a sandbox once it is no longer Creating. When ctx ends first,
// it returns the record as it is, and the cause.
func (m *Manager) Await(ctx context.Context, idOrName string) (record.Record, error) {
	r, err := m.Get(ctx, idOrName)
	if err != nil || r.State != record.Creating {
		return r, err
	}
	m.mu.Lock()
	v := m.lives[r.ID]
	m.mu.Unlock()
	if v == nil { // it ended meanwhile
		return m.Get(ctx, r.ID)
	}
	select {
	case <-v.ready:
		if context.Cause(v.creation) == errDeleted { // about to be
			return record.Record{}, notFound(idOrName)
		}
		return m.Get(ctx, r.ID)
	case <-ctx.Done():
		return r, context.Cause(ctx)
	}
}

// Steps says how long each step of a creation took, in the order of the table;
// nothing while it goes on, and nothing of one that another daemon did.
func (m *Manager) Steps(id string) []Step {
	m.mu.Lock()
	v := m.lives[id]
	m.mu.Unlock()
	if v == nil {
		return nil
	}
	select {
	case <-v.ready:
		return v.steps
	default:
		return nil
	}
}

// Done returns a channel that is closed when the sandbox has ended: streams
// into it have no more to say. It is closed already if there are no processes.
func (m *Manager) Done(id string) <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if v := m.lives[id]; v != nil {
		return v.ctx.Done()
	}
	return closedChan
}

var closedChan = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// Get returns a sandbox.
func (m *Manager) Get(ctx context.Context, idOrName string) (record.Record, error) {
	r, err := m.find(ctx, idOrName)
	if err == nil && r.State == record.Deleting {
		return record.Record{}, notFound(idOrName)
	}
	return r, err
}

// find is Get for those who also see what is being deleted.
func (m *Manager) find(ctx context.Context, idOrName string) (record.Record, error) {
	r, ok, err := m.life.Store.Get(ctx, idOrName)
	if err != nil {
		return record.Record{}, fmt.Errorf("get sandbox %q: %w", idOrName, err)
	}
	if !ok {
		return record.Record{}, notFound(idOrName)
	}
	return r, nil
}

// List returns all sandboxes, the newest first.
func (m *Manager) List(ctx context.Context) ([]record.Record, error) {
	all, err := m.life.Store.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	all = slices.DeleteFunc(all, func(r record.Record) bool { return r.State == record.Deleting })
	slices.SortFunc(all, func(a, b record.Record) int {
		if c := b.Created.Compare(a.Created); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return all, nil
}

// Subscribe sends what happens from now on until ctx ends, and then closes the
// channel. A slow reader loses events and gets EventLost instead.
func (m *Manager) Subscribe(ctx context.Context) <-chan Event { return m.life.bus.subscribe(ctx) }

// Deadline is when a sandbox will be erased: when it expires or, if it has
// ended, when it was kept for long enough. Zero is never.
func (m *Manager) Deadline(r record.Record) time.Time { return m.life.due(&r) }
