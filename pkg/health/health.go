// Package health watches sandboxes whose specs ask for it, and acts: it tries
// whether they are ready, ends those that have stopped being it, and starts
// again, after a while, what its policy does not let end.
//
//	running ── probe ──▶ starting ──▶ healthy ◀──▶ unhealthy
//	   ▲                                               │ recycle, if there is a policy
//	   └──── back-off, restart ◀──── ended ◀───────────┘
//
// It calls the Manager like anybody else and holds no truth of its own: policy,
// counts and the time of the next start follow from the record, so a daemon that
// is killed forgets none. How a sandbox feels is in memory; the next daemon asks.
//
// What surprises: there is one goroutine for each sandbox with a probe, and one
// try of each at a time, but no limit across them: a shared one would let those
// whose probes hang hold up the others'.
package health

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Manager is what health needs of sandbox.Keeper.
type Manager interface {
	Get(ctx context.Context, idOrName string) (record.Record, error)
	List(ctx context.Context) ([]*record.Record, error)
	Subscribe(ctx context.Context) <-chan sandbox.Event
	// Life ends when the sandbox has.
	Life(id string) context.Context
	// Restart starts a sandbox if its policy wants that, and only then.
	Restart(ctx context.Context, id string) error
	// Recycle ends a sandbox that is unhealthy if its policy wants it back, and
	// nobody is at it.
	Recycle(ctx context.Context, was record.Record, why string) error
	// StandsStill reports whether a sandbox that runs may answer nothing for a
	// while, since a snapshot of it is being taken.
	StandsStill(id string) bool
	// Announce tells who listens to events.
	Announce(r record.Record, health, message string)
}

// Prober tries things in sandboxes, until ctx ends.
type Prober interface {
	// ProbePort is nil if something accepts connections at a port.
	ProbePort(ctx context.Context, r record.Record, port uint16) error
	// ProbeCommand is nil if a command exits with 0; the end of what it printed
	// comes along in either case, hostile and at most 1 KiB.
	ProbeCommand(ctx context.Context, r record.Record, command string, limit time.Duration) (output string, err error)
}

// State is how a sandbox with a probe feels.
type State string

// The states.
const (
	Starting  State = "starting" // it was not ready yet
	Healthy   State = "healthy"
	Unhealthy State = "unhealthy" // it failed as often as its probe says, in a row
)

// Health is what the probe of a sandbox has found.
type Health struct {
	State    State
	Failures int       // in a row
	Output   string    // of the last try, and why it failed
	Checked  time.Time // zero: it was not tried yet
}

const (
	// retry is how long after what went wrong here it is tried again. What goes
	// on being refused waits for twice as long each time, up to RestartLast: a host
	// that is drained or full is that for long, and hundreds may wait.
	retry = 10 * time.Second
	// restarters bounds how many sandboxes come up at once by their policies: after
	// a reboot these may be hundreds, and somebody may want to create one.
	restarters = 4
)

// Watcher watches sandboxes. Its methods may be called concurrently.
type Watcher struct {
	m     Manager
	try   Prober
	log   *slog.Logger
	slots chan struct{} // of those that restart
	again chan refusal  // what could not be restarted

	mu      sync.Mutex
	wards   map[string]*ward // guarded by mu, as all below
	changed chan struct{}    // closed, and made anew, when anybody's health changes
}

// A refusal is a sandbox that could not be restarted, and for how long it waits.
type refusal struct {
	id   string
	wait time.Duration
}

// A ward is a sandbox that is looked after.
type ward struct {
	started time.Time   // which of its lives health is about
	health  Health      // while it lives
	probe   func()      // ends its probe; nil: there is none, or it is paused
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
	events := w.m.Subscribe(ctx) // before the list: nothing falls in between
	var anew <-chan time.Time
	lookAtAll := func() {
		anew = nil
		if err := w.lookAtAll(ctx); err != nil {
			w.log.Error("restarts and probes of sandboxes wait: the list cannot be read", "err", err)
			anew = time.After(retry)
		}
	}
	lookAtAll()
	for {
		select {
		case <-ctx.Done():
			w.stop()
			return context.Cause(ctx)
		case e, ok := <-events:
			switch {
			case !ok: // ctx has ended
				events = nil
			case e.Type == sandbox.EventLost:
				lookAtAll()
			case e.Type == sandbox.EventHealth, e.Type == sandbox.EventRestart: // our own
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

// lookAtAll takes up what there is, and lets go of what is not there any more.
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

// lookAt is look at one of which something was heard.
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

// look does for r what its record asks for: a probe while it runs, none while
// it is paused, a restart when it has ended. Only Run's goroutine calls it.
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
	case r.State == record.Pausing, r.State == record.Paused, r.State == record.Resuming:
		if d != nil && d.probe != nil {
			d.probe()
			d.probe = nil
		}
	case r.Restarting():
		if d != nil { // what it was while it lived
			w.drop(r.ID, d)
			d = nil
		}
		// A clock that was set must not make it wait for hours.
		wait := min(max(time.Until(r.NextStart()), notBefore), record.RestartLast)
		ward().restart = time.AfterFunc(wait, func() { w.restart(ctx, r.ID, notBefore) })
	case d != nil:
		w.drop(r.ID, d)
	}
}

// drop ends all that is done for a sandbox. The caller holds w.mu.
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

// restart starts a sandbox whose time has come. One that does not come up
// holds up no other. waited is how long it has since it was refused, or 0.
func (w *Watcher) restart(ctx context.Context, id string, waited time.Duration) {
	select {
	case w.slots <- struct{}{}:
	case <-ctx.Done():
		return
	}
	err := w.m.Restart(ctx, id)
	<-w.slots
	if err == nil || ctx.Err() != nil {
		return // what became of it, the events tell
	}
	level := slog.LevelWarn
	if waited > 0 { // it was said
		level = slog.LevelDebug
	}
	next := refusal{id, min(max(2*waited, retry), record.RestartLast)}
	w.log.Log(ctx, level, "a restart waits", "sandbox", id, "for", next.wait, "err", err)
	select {
	case w.again <- next:
	case <-ctx.Done():
	}
}

// tell wakes who waits for anybody's health. The caller holds w.mu.
func (w *Watcher) tell() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// Of says how r feels; ok is false if it has no probe or does not live.
func (w *Watcher) Of(r record.Record) (h Health, ok bool) {
	h, _ = w.of(r)
	return h, h.State != ""
}

func (w *Watcher) of(r record.Record) (Health, <-chan struct{}) {
	switch {
	case !r.Spec.Ready.Given():
		return Health{}, nil
	case r.State != record.Running && r.State != record.Pausing && r.State != record.Paused && r.State != record.Resuming:
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
	return Health{State: Starting}, w.changed // not heard of yet
}

// Await returns when a sandbox that runs is ready, has turned out not to
// become it, or has ended. When ctx ends first it returns the cause.
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
