package sandbox

import (
	"cmp"
	"context"
	"time"

	"github.com/sandboxd/sandboxd/internal/pidfd"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// watch starts an observer that notices when the last process of a running sandbox
// dies.
func (m *Manager) watch(h *handle, runtime string) {
	gone, err := m.life.Cgroups.Watch(h.ctx, h.id)
	if err != nil {
		m.life.cfg.Log.Error("cannot watch a sandbox; the sweep will notice its end up to a minute late", "sandbox", h.id, "err", err)
		return
	}
	main := m.life.mainProcess(h.id, runtime)
	m.tracker.setMain(h, main)
	m.observers.Go(func() {
		<-gone
		m.died(h)
		if main != nil {
			main.Close()
		}
	})
}

// mainProcess opens the process with which a sandbox ends. It returns nil if there is
// none any more.
func (l *life) mainProcess(id, runtime string) *pidfd.Process {
	pid, err := l.Runtimes[runtime].Runtime.MainPID(id)
	var p *pidfd.Process
	if err == nil {
		p, err = pidfd.Open(pid)
	}
	if err != nil {
		return nil // it is dead already, or how it ends will not be known
	}
	return p
}

// mainExitLimit is how long the main process of a sandbox may take to end once its
// cgroup is empty. PID 1 leaves the cgroup first and ends last: it waits in the kernel
// until all others of its namespace are reaped. Only a process that was moved out of
// the cgroup alive takes so long.
const mainExitLimit = 5 * time.Second

// explainCrash adds to d how the runtime of a sandbox ended, if d has no other reason.
func (l *life) explainCrash(r *record.Record, d *death, main *pidfd.Process) {
	if d.reason != record.RuntimeCrash {
		return
	}
	how := ""
	if main != nil {
		how = main.Ended(mainExitLimit)
	}
	if how != "" {
		d.message += " (" + how + ")"
	}
	l.cfg.Log.Warn("the runtime of a sandbox died", "sandbox", r.ID, "runtime", r.Spec.Runtime, "exit", cmp.Or(how, "unknown"))
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
	m.life.explainCrash(&r, &d, m.tracker.main(h))
	err = m.life.set(ctx, &r, record.Stopping, d.write)
	m.tracker.remove(id, errEnded) // now, so that those who wait for it can read why
	if err == nil {
		err = m.life.end(ctx, &r, d)
	}
	m.life.log(ctx, opEnd, &r, start, nil, err)
}
