package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/internal/systemd"
	"github.com/sandboxd/sandboxd/pkg/expiry"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// sweepEvery is how often the recovery runs while nothing is wrong.
const sweepEvery = time.Minute

// A background is what the daemon does without a caller: expiry, probes and
// restarts, the sweep, the watchdog.
type background struct{ *Daemon }

// run works until ctx ends.
func (d background) run(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := expiry.Run(ctx, d.manager, d.log); err != nil && ctx.Err() == nil {
			d.log.Error("timeouts are no longer watched; the sweep still ends what expired, up to a minute late", "err", err)
		}
	}()
	go d.watcher.Run(ctx) //nolint:errcheck // it ends with ctx only
	go d.forgetClients(ctx)
	go d.watchLinks(ctx)
	go func() {
		if err := systemd.Watch(ctx, d.healthy, func(err error) {
			d.log.Error("the daemon is not well; systemd starts it anew if that lasts", "err", err)
		}); err != nil {
			d.log.Error("watchdog", "err", err)
		}
	}()
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			<-done
			return
		case <-tick.C:
			d.impaired() // so that the log tells, though nobody connects
			if err := d.measuredSweep(ctx); err != nil && ctx.Err() == nil {
				d.log.Error("sweep", "err", err)
			}
		}
	}
}

// sweep puts right what nobody reported: uplinks that came late, sandboxes that
// are not as their records say, what deleted disks and layers left.
func (d background) sweep(ctx context.Context) error {
	var held error // a scope that nobody holds is no reason to leave the rest as it is
	if d.scope != nil {
		held = d.scope.Keep(ctx)
	}
	return errors.Join(held, d.ns.Setup(ctx), d.ns.OpenUplinks(ctx), d.manager.Recover(ctx), d.files.Pool.Sweep(ctx, d.noSweep()),
		d.images.Sweep(ctx), d.store.ForgetRequests(ctx, time.Now().Add(-record.RequestsKept)))
}

// forgetClients drops the connections to agents of sandboxes that are gone.
func (d background) forgetClients(ctx context.Context) {
	for e := range d.manager.Subscribe(ctx) {
		switch e.Type {
		case sandbox.EventDeleted, string(record.Ended):
			d.agents.forget(e.ID)
		case sandbox.EventLost:
			d.agents.forgetAllBut(func(id string) bool {
				_, err := d.manager.Get(ctx, id)
				return err == nil
			})
		}
	}
}

// measuredSweep is sweep, counted.
func (d background) measuredSweep(ctx context.Context) error {
	start := time.Now()
	err := d.sweep(ctx)
	if ctx.Err() == nil {
		d.metrics.Sweep(err != nil, time.Since(start))
	}
	return err
}

// watchLinks recovers a sandbox as soon as its link is gone. While a sandbox lives
// nobody but an operator removes its link.
func (d background) watchLinks(ctx context.Context) {
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

// healthy asks the API for its health, through the daemon's own socket, and the egress
// engine whether it still decides on flows. The watchdog of systemd restarts the daemon
// if healthy fails, so it fails only for what a restart mends. A disk that is full or
// hangs is nothing of that kind: its requests fail, and say why, in the next daemon too.
func (d background) healthy(ctx context.Context) error {
	if err := d.egress.Err(); err != nil {
		return fmt.Errorf("decide on the flows of sandboxes: %w", err)
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", d.cfg.Listen.Socket)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sandboxd/health", nil)
	if err != nil {
		return err
	}
	res, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("ask the API on %s: %w", d.cfg.Listen.Socket, err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("ask the API on %s: /health answers %s", d.cfg.Listen.Socket, res.Status)
	}
	return nil
}
