package daemon

import (
	"context"
	"fmt"
	"net"
	"net/http"
)

// healthy asks the daemon what a client would, through its own socket, and what
// decides on flows whether it still does. It is what the watchdog of systemd goes
// by, so it says only what another daemon mends: a disk that is full or hangs
// fails requests, which say so, and would fail those of the next one, too.
func (d *Daemon) healthy(ctx context.Context) error {
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
