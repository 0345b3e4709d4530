package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/pidfd"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/sandbox/table"
)

// watch starts an observer that notices when the last process of a running sandbox
// dies.
func (m *Manager) watch(h *handle, runtime string) {
	gone, err := m.life.Cgroups.Watch(h.ctx, h.id)
	if err != nil {
		m.life.cfg.Log.Error("cannot watch a sandbox; the sweep will notice its end up to a minute late", "sandbox", h.id, "err", err)
		return
	}
	ends := m.life.endsWith(h.id, runtime)
	m.tracker.setEnds(h, ends)
	m.observers.Go(func() {
		<-gone
		m.died(h)
		ends.close()
	})
}

// errDied is why nobody waits any longer for the agent of a dead sandbox.
var errDied = errors.New("its processes ended before its agent answered")

// awaitAgent asks the agent, and waits until it answers, the sandbox is dead, or ctx ends.
func awaitAgent(ctx context.Context, d Deps, r *record.Record, ask func(context.Context, *record.Record) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	gone, err := d.Cgroups.Watch(ctx, r.ID)
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	go func() {
		<-gone // also when ctx ends; then this cancels nothing
		cancel(errDied)
	}()
	if err := ask(ctx, r); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return errors.Join(cause, err)
		}
		return err
	}
	return nil
}

// ends are the processes of this host by whose ends that of a sandbox is explained. Each is nil if there is none, or
// none any more: then how it ended will not be known.
type ends struct {
	main   *pidfd.Process // with which the sandbox ends
	helper *pidfd.Process // without which main ends the sandbox
}

// endsWith opens the processes by whose ends that of a sandbox is explained.
func (l *life) endsWith(id, runtime string) ends {
	r := l.Runtimes[runtime].Runtime
	open := func(pid int, err error) *pidfd.Process {
		if err != nil {
			return nil
		}
		p, err := pidfd.Open(pid)
		if err != nil {
			return nil
		}
		return p
	}
	return ends{main: open(r.MainPID(id)), helper: open(r.HelperPID(id))}
}

func (e ends) close() {
	for _, p := range []*pidfd.Process{e.main, e.helper} {
		if p != nil {
			p.Close()
		}
	}
}

// exits returns how they ended; ok and helped say which are known.
func (e ends) exits() (main, helper pidfd.Exit, ok, helped bool) {
	if e.main != nil {
		main, ok = e.main.Ended(mainExitLimit)
	}
	if e.helper != nil && ok {
		helper, helped = e.helper.Ended(mainExitLimit)
	}
	return main, helper, ok, helped
}

// mainExitLimit is how long the main process of a sandbox may take to end once its
// cgroup is empty. PID 1 leaves the cgroup first and ends last: it waits in the kernel
// until all others of its namespace are reaped. Only a process that was moved out of
// the cgroup alive takes so long.
const mainExitLimit = 5 * time.Second

// explainCrash adds to d how the runtime of a sandbox ended, if d has no other reason.
func (l *life) explainCrash(r *record.Record, d *death, e ends) {
	if d.reason != record.RuntimeCrash {
		return
	}
	how := ""
	if main, helper, ok, helped := e.exits(); ok {
		how = main.String()
		switch {
		case main.Signal == 0 && helper.Signal != 0:
			how = "its gofer was " + helper.String()
		case helped && l.Runtimes[r.Spec.Runtime].ExitsLikeInit && killedInside(d, main):
			return
		}
		d.message += " (" + how + ")"
	}
	l.cfg.Log.Warn("the runtime of a sandbox died", "sandbox", r.ID, "runtime", r.Spec.Runtime, "exit", cmp.Or(how, "unknown"))
}

// killedInside makes d the end of a sandbox whose guest killed PID 1, if e shows that, which is how the main
// process of a runtime ended that exits like init. Linux ignores such a signal. gVisor's kernel does not, and exits
// as a shell would, with 128+n after signal n (runsc/cli). A sentry that crashes exits with another code, and one
// that the host kills has a signal. One whose gofer is gone kills its guest, and exits with this code, too: so the
// end of the gofer is looked at first.
func killedInside(d *death, e pidfd.Exit) bool {
	const code = 128 + int(syscall.SIGKILL)
	if d.code != nil || e.Signal != 0 || e.Code != code {
		return false
	}
	n := code
	d.reason, d.code = record.Killed, &n
	d.message = "its PID 1 was killed by SIGKILL from inside the sandbox"
	return true
}

// died ends a sandbox whose processes are gone.
func (m *Manager) died(h *handle) {
	if h.ctx.Err() != nil {
		return // an operation ended it
	}
	id, start := h.id, time.Now()
	unlock, err := m.locks.Lock(m.ctx, id)
	if err != nil {
		return // the next daemon will notice
	}
	defer unlock()
	if h.ctx.Err() != nil {
		return // it was ended meanwhile; any process now is of another life
	}
	ctx := context.WithoutCancel(m.ctx)
	r, err := m.find(ctx, id)
	if err != nil {
		if !errs.Is(err, errs.NotFound) {
			m.life.cfg.Log.Error("cannot end a dead sandbox", "sandbox", id, "err", err)
		}
		return
	}
	if !live(r.State) {
		return
	}
	if alive, err := m.life.Cgroups.Populated(id); err != nil || alive {
		m.tracker.remove(id, errEnded)
		m.life.cfg.Log.Error("the watch of a sandbox failed; the sweep takes over", "sandbox", id, "err", err)
		return
	}
	d := m.life.diagnose(ctx, &r)
	if withHost(ctx, &m.life, &r, d) {
		m.tracker.remove(id, errEnded)
		return
	}
	m.life.explainCrash(&r, &d, m.tracker.ends(h))
	err = m.life.set(ctx, &r, record.Stopping, d.write)
	m.tracker.remove(id, errEnded) // now, so that those who wait for it can read why
	if err == nil {
		err = m.life.end(ctx, &r, d)
	}
	m.life.log(ctx, opEnd, &r, start, nil, err)
}

// A sandbox that has been killed runs nothing of its guest any more, but the kernel may
// take minutes to take it apart: a guest opens by the thousand what is slow to close
// (docs/design/hardening.md, "What is slow to close?"). Such a sandbox lingers. Its
// record says Deleting or Stopping, so it survives the daemon and keeps its slot. When
// its cgroup is empty, its recovery finishes it.

// ErrLingering is the error of an unmaking call that did all it can do and was given up
// while the kernel still worked on it.
var ErrLingering = errs.New(errs.Unavailable, "it is ended, but the kernel is still taking it apart; sandboxd finishes it when the "+
	"kernel is done")

// How long the Manager waits for the kernel.
const (
	// eraseLimit is for a deletion, which a client waits for: its end is durable and its
	// processes are killed. Nearly all are dead within 10 ms.
	eraseLimit = 2 * time.Second
	// againLimit is for what lingers already: the sweep must not wait for each of them.
	againLimit = 100 * time.Millisecond
)

// lingering is the set of sandboxes that linger, as far as this daemon knows.
type lingering struct {
	mu  sync.Mutex
	ids map[string]bool // guarded by mu
}

func (s *lingering) has(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ids[id]
}

// add reports whether id is new.
func (s *lingering) add(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ids[id] {
		return false
	}
	if s.ids == nil {
		s.ids = map[string]bool{}
	}
	s.ids[id] = true
	return true
}

func (s *lingering) remove(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.ids, id)
}

// patience is limit for the first wait for the kernel with a sandbox, and less for
// later ones.
func (l *life) patience(id string, limit time.Duration) time.Duration {
	if l.lingers.has(id) {
		return min(limit, againLimit)
	}
	return limit
}

// kill kills all processes of a sandbox and returns when they are dead. If the kernel
// has not ended them when limit is over, the error is ErrLingering.
func (l *life) kill(ctx context.Context, id string, limit time.Duration) error {
	err := bounded(ctx, l.patience(id, limit), "kill", func(ctx context.Context) error { return l.Cgroups.Kill(ctx, id) })
	if errors.Is(err, ErrLingering) && l.note(id, err) {
		l.onLinger(id)
	}
	return err
}

// gone waits until no link of a sandbox is left. If there is one when the time is up, the
// error is ErrLingering: the kernel removes links late.
func (l *life) gone(ctx context.Context, id string) error {
	err := bounded(ctx, l.patience(id, goneLimit), "gone", func(ctx context.Context) error { return l.Network.Gone(ctx, id) })
	if errors.Is(err, table.ErrTooLong) {
		err = fmt.Errorf("%w: %w", ErrLingering, err)
		l.note(id, err)
	}
	return err
}

// note adds a sandbox to those that linger. It logs and reports whether that is news.
func (l *life) note(id string, err error) bool {
	if !l.lingers.add(id) {
		return false
	}
	l.cfg.Log.Warn("the kernel is still taking a killed sandbox apart; until it is done, the sandbox keeps its address and user ids",
		"sandbox", id, "err", err)
	return true
}

// settle forgets that a sandbox lingers, unless err says that it still does.
func (l *life) settle(id string, err error) {
	if !errors.Is(err, ErrLingering) {
		l.lingers.remove(id)
	}
}

// awaitKernel has the recovery finish a lingering sandbox as soon as its last process is
// dead. If that fails, the sweep tries again.
func (m *Manager) awaitKernel(id string) {
	gone, err := m.life.Cgroups.Watch(m.ctx, id)
	if err != nil {
		m.life.cfg.Log.Error("cannot watch a killed sandbox; the sweep will notice its end up to a minute late", "sandbox", id, "err", err)
		return
	}
	m.observers.Go(func() {
		<-gone
		if err := m.finish(id); err != nil && !errors.Is(err, ErrLingering) && m.ctx.Err() == nil {
			m.life.cfg.Log.Error("cannot finish a sandbox that the kernel has ended; the sweep tries again", "sandbox", id, "err", err)
		}
	})
}

// finish recovers a sandbox that no longer has processes. One without a record is left to
// the sweep.
func (m *Manager) finish(id string) error {
	if !m.tracker.begin() {
		return nil // the next daemon does it
	}
	defer m.tracker.end()
	unlock, err := m.locks.Lock(m.ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	rec := recovery{m}
	if r, err := m.find(m.ctx, id); err == nil && r.State == record.Deleting { // also where nothing is swept: a client named it
		return rec.eraseAgain(m.ctx, &r)
	}
	return rec.reconcileLocked(m.ctx, id, nil)
}
