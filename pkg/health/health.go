// Package health watches sandboxes whose specs ask for it, and acts: it probes whether
// they are ready, ends those that have become unhealthy, and restarts ended ones after
// a back-off if their policy says so.
//
//	running ── probe ──▶ starting ──▶ healthy ◀──▶ unhealthy
//	   ▲                                               │ recycle, if there is a policy
//	   └──── back-off, restart ◀──── ended ◀───────────┘
//
// It calls the Manager like any other caller and stores nothing itself: policy, counts
// and the time of the next start follow from the record, so they survive if the daemon
// is killed. The health of a sandbox is in memory; the next daemon probes again.
//
// What surprises: each sandbox with a probe has one goroutine and at most one try at a
// time, but there is no limit across sandboxes: with a shared limit, sandboxes whose
// probes hang would hold up the others.
package health

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Manager is what health needs of sandbox.Keeper.
type Manager interface {
	Get(ctx context.Context, idOrName string) (record.Record, error)
	List(ctx context.Context) ([]*record.Record, error)
	Subscribe(ctx context.Context) <-chan events.Event
	// Life returns a context that ends when the sandbox ends.
	Life(id string) context.Context
	// Restart starts a sandbox if its policy wants that, and only then.
	Restart(ctx context.Context, id string) error
	// Recycle ends an unhealthy sandbox if its policy restarts it and no other
	// operation on it is under way.
	Recycle(ctx context.Context, was record.Record, why string) error
	// StandsStill reports whether a running sandbox may not answer for a while because
	// a snapshot of it is being taken.
	StandsStill(id string) bool
	// Announce sends a health event to subscribers.
	Announce(r record.Record, health, message string)
}

// Prober runs probes in sandboxes, until ctx ends.
type Prober interface {
	// ProbePort returns nil if a port accepts connections.
	ProbePort(ctx context.Context, r record.Record, port uint16) error
	// ProbeCommand returns nil if a command exits with 0. In either case it returns the
	// end of the command's output, which is hostile and at most 1 KiB.
	ProbeCommand(ctx context.Context, r record.Record, command string, limit time.Duration) (output string, err error)
}

// State is the health of a sandbox with a probe.
type State string

// The states.
const (
	Starting  State = "starting" // it has not been ready yet
	Healthy   State = "healthy"
	Unhealthy State = "unhealthy" // as many failures in a row as its probe sets
)

// Health is the result of a sandbox's probe.
type Health struct {
	State    State
	Failures int       // in a row
	Output   string    // of the last try, with the error if it failed
	Checked  time.Time // zero: not tried yet
}

const (
	// retry is the wait after an error here. After each further refusal of the same
	// restart the wait doubles, up to RestartLast: a host that drains or is full stays
	// so for long, and hundreds of restarts may wait.
	retry = 10 * time.Second
	// restarters bounds how many sandboxes restart by their policies at once: after a
	// reboot there may be hundreds, and a client may want to create one meanwhile.
	restarters = 4
)

// Watcher watches sandboxes. Its methods may be called concurrently.
type Watcher struct {
	m     Manager
	try   Prober
	log   *slog.Logger
	slots chan struct{} // slots for restarts
	again chan refusal  // restarts that were refused

	mu      sync.Mutex
	wards   map[string]*ward // guarded by mu, as all below
	changed chan struct{}    // closed and replaced when the health of any sandbox changes
}

// A refusal is a sandbox whose restart was refused, and how long it waits.
type refusal struct {
	id   string
	wait time.Duration
}

// A ward is a sandbox that the Watcher watches.
type ward struct {
	started time.Time   // identifies the life that health is about
	health  Health      // while it lives
	probe   func()      // ends its probe; nil: there is none, or the sandbox is paused
	restart *time.Timer // nil: none is due
}

// New returns a Watcher. It does nothing before Run.
func New(m Manager, p Prober, log *slog.Logger) *Watcher {
	return &Watcher{
		m: m, try: p, log: log,
		slots: make(chan struct{}, restarters), again: make(chan refusal),
		wards: map[string]*ward{}, changed: make(chan struct{}),
	}
}

// Run watches until ctx ends, and returns the cause.
func (w *Watcher) Run(ctx context.Context) error {
	news := w.m.Subscribe(ctx) // before the list, so that no change is missed
	var anew <-chan time.Time
	lookAtAll := func() {
		anew = nil
		if err := w.lookAtAll(ctx); err != nil {
			w.log.Error("cannot list sandboxes; their restarts and probes wait", "err", err)
			anew = time.After(retry)
		}
	}
	lookAtAll()
	for {
		select {
		case <-ctx.Done():
			w.stop()
			return context.Cause(ctx)
		case e, ok := <-news:
			switch {
			case !ok: // ctx has ended
				news = nil
			case e.Type == events.Lost:
				lookAtAll()
			case e.Type == events.Health, e.Type == events.Restart, e.ID == "": // our own, or the host's
			default:
				w.lookAt(ctx, e.ID, 0)
			}
		case r := <-w.again:
			w.lookAt(ctx, r.id, r.wait)
		case <-anew:
			lookAtAll()
		}
	}
}

// lookAtAll calls look for every sandbox, and drops wards that no longer exist.
func (w *Watcher) lookAtAll(ctx context.Context) error {
	all, err := w.m.List(ctx)
	if err != nil {
		return err
	}
	there := map[string]bool{}
	for _, r := range all {
		there[r.ID] = true
		w.look(ctx, *r, 0)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, d := range w.wards {
		if !there[id] {
			w.drop(id, d)
		}
	}
	return nil
}

// lookAt calls look for one sandbox after an event.
func (w *Watcher) lookAt(ctx context.Context, id string, notBefore time.Duration) {
	r, err := w.m.Get(ctx, id)
	if err == nil {
		w.look(ctx, r, notBefore)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if d := w.wards[id]; d != nil { // it is being deleted, or cannot be read
		w.drop(id, d)
	}
}

// look does what r's record asks for: a probe while it runs, none while it is paused, a
// restart when it has ended. Only Run's goroutine calls it.
func (w *Watcher) look(ctx context.Context, r record.Record, notBefore time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	d := w.wards[r.ID]
	if d != nil && !d.started.Equal(r.Started) {
		w.drop(r.ID, d)
		d = nil
	}
	ward := func() *ward {
		if d == nil {
			d = &ward{started: r.Started, health: Health{State: Starting}}
			w.wards[r.ID] = d
		}
		return d
	}
	switch {
	case r.State == record.Running && r.Spec.Ready.Given():
		if ward().probe == nil {
			ctx, cancel := context.WithCancel(ctx)
			d.probe = cancel
			go w.watch(ctx, r, d.health)
		}
	case r.State.Still():
		if d != nil && d.probe != nil {
			d.probe()
			d.probe = nil
		}
	case r.Restarting():
		if d != nil { // the ward of the life that ended
			w.drop(r.ID, d)
			d = nil
		}
		// If the clock was set, the sandbox must not wait for hours.
		wait := min(max(time.Until(r.NextStart()), notBefore), record.RestartLast)
		ward().restart = time.AfterFunc(wait, func() { w.restart(ctx, r.ID, notBefore) })
	case d != nil:
		w.drop(r.ID, d)
	}
}

// drop stops the probe and the restart of a sandbox. The caller holds w.mu.
func (w *Watcher) drop(id string, d *ward) {
	if d.probe != nil {
		d.probe()
	}
	if d.restart != nil {
		d.restart.Stop()
	}
	delete(w.wards, id)
	w.tell()
}

func (w *Watcher) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, d := range w.wards {
		w.drop(id, d)
	}
}

// restart starts a sandbox whose time has come. A sandbox that does not come up does
// not hold up others. waited is how long it waited after the last refusal, or 0.
func (w *Watcher) restart(ctx context.Context, id string, waited time.Duration) {
	select {
	case w.slots <- struct{}{}:
	case <-ctx.Done():
		return
	}
	err := w.m.Restart(ctx, id)
	<-w.slots
	if err == nil || ctx.Err() != nil {
		return // events report the outcome
	}
	level := slog.LevelWarn
	if waited > 0 { // logged already
		level = slog.LevelDebug
	}
	next := refusal{id, min(max(2*waited, retry), record.RestartLast)}
	w.log.Log(ctx, level, "a restart is delayed", "sandbox", id, "for", next.wait, "err", err)
	select {
	case w.again <- next:
	case <-ctx.Done():
	}
}

// tell wakes all that wait for a change of health. The caller holds w.mu.
func (w *Watcher) tell() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// Of returns the health of r; ok is false if r has no probe or does not live.
func (w *Watcher) Of(r record.Record) (h Health, ok bool) {
	h, _ = w.of(r)
	return h, h.State != ""
}

func (w *Watcher) of(r record.Record) (Health, <-chan struct{}) {
	switch {
	case !r.Spec.Ready.Given():
		return Health{}, nil
	case r.State != record.Running && !r.State.Still():
		return Health{}, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch d := w.wards[r.ID]; {
	case d != nil && d.started.Equal(r.Started):
		return d.health, w.changed
	case d != nil && d.started.After(r.Started): // r is of an earlier life
		return Health{}, nil
	}
	return Health{State: Starting}, w.changed // no event has arrived yet
}

// Await returns when a running sandbox is ready, is unhealthy, or has ended. When ctx
// ends first it returns the cause.
func (w *Watcher) Await(ctx context.Context, r record.Record) error {
	ended := w.m.Life(r.ID).Done()
	for {
		h, changed := w.of(r)
		if h.State != Starting {
			return nil
		}
		select {
		case <-changed:
		case <-ended:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
