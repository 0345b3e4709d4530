package daemon

import "context"

// watchLinks has a sandbox looked at as soon as its link is gone: while it lives
// nobody but an operator takes that away.
func (d *Daemon) watchLinks(ctx context.Context) {
	err := d.ns.WatchLost(ctx, func(id string) {
		go func() { // one that is busy holds up no other
			if err := d.manager.Recover(ctx, id); err != nil && ctx.Err() == nil {
				d.log.Error("a sandbox whose link is gone; the sweep looks again", "sandbox", id, "err", err)
			}
		}()
	})
	if err != nil && ctx.Err() == nil {
		d.log.Error("links that somebody deletes are noticed by the sweep only, up to a minute late", "err", err)
	}
}
