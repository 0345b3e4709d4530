// Package idle applies the idle policies of sandboxes: it has those paused, hibernated, stopped or
// deleted that nobody has used for a while, and wakes those that it has put to sleep.
//
//	in use ── the last use ends ──▶ due after Spec.Idle.After ── no use, CPU idle ──▶ Rest
//	   ▲                                                                               │ pause,
//	   └──────────────────────────── Wake ◀── Use ◀──────────────────────────── asleep ┘ hibernate
//
// A use is what the API and the published ports call Use for: it lasts until they call leave.
// docs/design/lifecycle.md, "When is a sandbox idle?", lists what is one.
//
// It calls the Manager like any other caller and stores nothing itself: whether a sandbox is asleep
// is in its record. When a sandbox was last used is in memory, on the monotonic clock: after a
// restart of the daemon the time begins anew, and a host that sleeps uses nothing up.
//
// What surprises: a use takes no lock, and yet none is lost to a pause that begins at the same time.
// The use first counts itself and then reads shut; the pause first sets shut and then reads the
// count. So at least one of the two notices the other: the pause gives way, or the use asks the
// Manager, which answers when the pause is over, and wakes the sandbox.
package idle

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/events"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Manager is what idle needs of sandbox.Keeper.
type Manager interface {
	Get(ctx context.Context, idOrName string) (record.Record, error)
	List(ctx context.Context) ([]*record.Record, error)
	Subscribe(ctx context.Context) <-chan events.Event
	// Life returns a context that ends when the sandbox ends.
	Life(id string) context.Context
	// Rest does to a sandbox what its idle policy says, if still agrees while the sandbox is locked.
	Rest(ctx context.Context, was record.Record, still func() bool) error
	// Calm is Rest before its time: it pauses the sandbox, whatever its policy says. why is for people.
	Calm(ctx context.Context, was record.Record, why string, still func() bool) error
	// Wake resumes a sandbox that is asleep, and returns its newest record.
	Wake(ctx context.Context, id string) (record.Record, error)
	// CPU is the CPU time that a sandbox has used.
	CPU(id string) (time.Duration, error)
}

const (
	// retry is the wait after a policy was not applied: another operation holds the sandbox, or it
	// failed.
	retry = 10 * time.Second
	// atOnce bounds how many policies are applied at once: after a restart of the daemon, hundreds
	// of sandboxes may be due at the same moment.
	atOnce = 8
	// wakeLimit is how long a use waits for a sandbox to wake.
	wakeLimit = 15 * time.Second
)

// Watcher watches sandboxes with an idle policy. Its methods may be called concurrently.
type Watcher struct {
	m     Manager
	log   *slog.Logger
	began time.Time
	turns chan struct{}
	wards sync.Map // of *ward, by life

	ctx    context.Context // ends with Run
	cancel context.CancelFunc
}

// A life is one life of a sandbox.
type life struct {
	id      string
	started int64
}

// A ward is a sandbox that the Watcher watches.
type ward struct {
	w *Watcher
	life

	open atomic.Int64 // uses that go on
	last atomic.Int64 // when it was last in use, in ns since the Watcher began
	shut atomic.Bool  // its policy has been applied, or is about to be: a use must ask the Manager

	mu    sync.Mutex
	timer *time.Timer   // rings when it may be idle; guarded by mu
	cpu   time.Duration // at the last look; guarded by mu

	calm calmLook // of Calm, which has one caller at a time
}

// New returns a Watcher. It applies no policy before Run.
func New(m Manager, log *slog.Logger) *Watcher {
	w := &Watcher{m: m, log: log, began: time.Now(), turns: make(chan struct{}, atOnce)}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	return w
}

// Run watches until ctx ends, and returns the cause.
func (w *Watcher) Run(ctx context.Context) error {
	defer w.cancel()
	news := w.m.Subscribe(ctx) // before the list, so that no change is missed
	var anew <-chan time.Time
	lookAtAll := func() {
		anew = nil
		all, err := w.m.List(ctx)
		if err != nil {
			w.log.Error("cannot list sandboxes; their idle policies wait", "err", err)
			anew = time.After(retry)
		}
		for _, r := range all {
			w.look(r)
		}
	}
	lookAtAll()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case e, ok := <-news:
			switch {
			case !ok: // ctx has ended
				news = nil
			case e.Type == events.Lost:
				lookAtAll()
			case e.Type == string(record.Running):
				if r, err := w.m.Get(ctx, e.ID); err == nil {
					w.look(&r)
				}
			}
		case <-anew:
			lookAtAll()
		}
	}
}

// look watches a sandbox that runs, from now on as if it was just used: it came up, or goes on after
// a pause.
func (w *Watcher) look(r *record.Record) {
	if r.State != record.Running || !r.Spec.Idle.Given() {
		return
	}
	d := w.ward(r)
	d.touch()
	d.mu.Lock()
	defer d.mu.Unlock()
	if cpu, err := w.m.CPU(d.id); err == nil {
		d.cpu = cpu
	}
	d.timer.Reset(r.Spec.Idle.After)
}

// ward returns the ward of a sandbox, which it makes if there is none. It goes when the sandbox ends.
func (w *Watcher) ward(r *record.Record) *ward {
	key := life{r.ID, r.Started.UnixNano()}
	if d, ok := w.wards.Load(key); ok {
		return d.(*ward)
	}
	d := &ward{w: w, life: key}
	d.touch()
	d.mu.Lock()
	defer d.mu.Unlock()
	if was, ok := w.wards.LoadOrStore(key, d); ok {
		return was.(*ward)
	}
	d.timer = time.AfterFunc(r.Spec.Idle.After, d.ring)
	context.AfterFunc(w.m.Life(r.ID), func() {
		w.wards.Delete(key)
		d.mu.Lock()
		defer d.mu.Unlock()
		d.timer.Stop()
	})
	return d
}

func none() {}

// Use begins a use of a sandbox, which lasts until leave is called. If the sandbox is asleep, Use
// wakes it. r becomes its newest record then. The caller judges the state of r: Use fails only if a
// sandbox that is asleep does not wake.
func (w *Watcher) Use(ctx context.Context, r *record.Record) (leave func(), err error) {
	for r.Spec.Idle.Given() && (r.State == record.Running || r.Asleep()) {
		d, started := w.ward(r), r.Started
		d.open.Add(1)
		if r.State == record.Running && !d.shut.Load() {
			return d.leave, nil
		}
		if err := w.wake(ctx, d, r); err != nil {
			d.leave()
			return none, err
		}
		if r.Started.Equal(started) {
			return d.leave, nil
		}
		d.leave() // one that hibernated runs in another life
	}
	return none, nil
}

func (w *Watcher) wake(ctx context.Context, d *ward, r *record.Record) error {
	ctx, cancel := context.WithTimeoutCause(ctx, wakeLimit, errTooLong)
	defer cancel()
	now, err := w.m.Wake(ctx, r.ID)
	if errors.Is(err, errTooLong) {
		return errs.New(errs.Unavailable, "sandbox %s is asleep because it was idle, and did not wake within %v: another operation, such "+
			"as a snapshot, holds it, or its memory is large; try again in a moment", r.ID, wakeLimit)
	}
	if err != nil {
		return err
	}
	*r = now
	if r.State == record.Running {
		d.shut.Store(false) // a pause that begins now sees this use
	}
	return nil
}

var errTooLong = errors.New("it did not wake in time")

// leave ends a use.
func (d *ward) leave() {
	d.touch()
	d.open.Add(-1)
}

func (d *ward) touch() { d.last.Store(int64(time.Since(d.w.began))) }

// quiet is how long the sandbox has not been in use.
func (d *ward) quiet() time.Duration {
	if d.open.Load() > 0 {
		return 0
	}
	return time.Since(d.w.began) - time.Duration(d.last.Load())
}

// ring looks whether the sandbox is idle, and applies its policy if it is.
func (d *ward) ring() {
	w := d.w
	r, err := w.m.Get(w.ctx, d.id)
	if err != nil || r.State != record.Running || w.ctx.Err() != nil {
		return // when it runs again, look sets the timer
	}
	if r.Started.UnixNano() != d.started {
		return // one that hibernated has woken, and its uses are another ward's
	}
	after := r.Spec.Idle.After
	if d.busy(&r) {
		d.touch()
	}
	if left := after - d.quiet(); left > 0 {
		d.again(left)
		return
	}
	select {
	case w.turns <- struct{}{}:
	case <-w.ctx.Done():
		return
	}
	err = w.m.Rest(w.ctx, r, func() bool {
		d.shut.Store(true)
		still := d.quiet() >= after
		if !still {
			d.shut.Store(false)
		}
		return still
	})
	<-w.turns
	if err != nil && w.ctx.Err() == nil {
		w.log.Warn("the idle policy of a sandbox could not be applied; it is tried again", "sandbox", d.id, "err", err)
	}
	d.again(min(after, retry))
}

// again sets the timer.
func (d *ward) again(after time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.timer.Reset(after)
}

// floor is the CPU time that an idle sandbox uses within d at most: a server in it that waits, and wakes
// for that a few times a second, uses less. gVisor takes several times the CPU for the same work.
// (docs/design/lifecycle.md, "When is a sandbox idle?", has the figures)
func floor(runtime string, d time.Duration) time.Duration {
	if runtime == "runsc" {
		return d * 3 / 100
	}
	return d / 100
}

// busy reports whether the sandbox has used more CPU time since the last look than an idle one
// does. Two looks are never further apart than its idle time.
func (d *ward) busy(r *record.Record) bool {
	cpu, err := d.w.m.CPU(d.id)
	if err != nil {
		d.w.log.Debug("cannot read the CPU time of a sandbox; it counts as busy", "sandbox", d.id, "err", err)
		return true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	used := cpu - d.cpu
	d.cpu = cpu
	return used > floor(r.Spec.Runtime, r.Spec.Idle.After)
}
