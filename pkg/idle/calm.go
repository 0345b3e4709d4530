package idle

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// calmAfter is for how long nobody has used a sandbox that Calm pauses.
const calmAfter = 30 * time.Second

// A calmLook is what Calm saw of a sandbox.
type calmLook struct {
	at  time.Time
	cpu time.Duration
}

// Calm pauses sandboxes with an idle policy that nobody uses, before the time of their policy, so that
// they write nothing more. why is for people. Nobody has used them, and they have used no more CPU than
// an idle one does, for half a minute: so the first calls pause nothing.
//
// It only pauses, whatever a policy says: hibernating would write to the disk that is full, and a stop
// or a deletion would take from somebody, before its time, what may still be wanted. One whose policy
// deletes it is left to that: its disk is free then, and a paused sandbox never becomes idle.
//
// It has one caller at a time.
func (w *Watcher) Calm(ctx context.Context, why string) {
	w.wards.Range(func(_, v any) bool {
		w.calmDown(ctx, v.(*ward), why)
		return ctx.Err() == nil
	})
}

func (w *Watcher) calmDown(ctx context.Context, d *ward, why string) {
	r, err := w.m.Get(ctx, d.id)
	if err != nil || r.State != record.Running || r.Started.UnixNano() != d.started || r.Spec.Idle.Action == record.IdleKill {
		return
	}
	cpu, err := w.m.CPU(d.id)
	if err != nil {
		w.log.Debug("cannot read the CPU time of a sandbox; it counts as busy", "sandbox", d.id, "err", err)
		return
	}
	since := time.Since(d.calm.at)
	if since < calmAfter {
		return
	}
	used := cpu - d.calm.cpu
	d.calm = calmLook{time.Now(), cpu}
	// A look that is long ago tells of a host that had room in between.
	if since > 3*calmAfter || used > floor(r.Spec.Runtime, since) || d.quiet() < calmAfter {
		return
	}
	err = w.m.Calm(ctx, r, "nobody used it, and "+why, func() bool {
		d.shut.Store(true)
		still := d.quiet() >= calmAfter
		if !still {
			d.shut.Store(false)
		}
		return still
	})
	if err != nil && ctx.Err() == nil {
		w.log.Warn("a sandbox that nobody uses could not be paused for want of disk; it is tried again", "sandbox", d.id, "err", err)
	}
}
