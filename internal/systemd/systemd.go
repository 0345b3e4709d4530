// Package systemd talks to the service manager, if there is one: readiness and
// watchdog, sockets that systemd passes, and the scope in which sandboxes live.
//
//	system.slice/sandboxd.service        the daemon; restarts as often as it likes
//	sandboxd.slice/sandboxd-a.scope      Delegate=yes: ours below here
//	├── holder/                          one sleeping process keeps the scope
//	├── heads/                           children of the daemon with open flows by name
//	└── <id>/run/                        sandboxes, which no restart meets
//
// What surprises: the scope is beside the service and not in it. systemd kills a
// service's own cgroup with the service, its limits would apply to the guests, and
// systemd 252 cannot start a service whose delegated cgroup is populated.
package systemd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
)

// Booted reports whether systemd is this host's init: sd_booted(3).
func Booted() bool {
	fi, err := os.Lstat("/run/systemd/system")
	return err == nil && fi.IsDir()
}

// Ready reports that the service is ready (sd_notify(3)). It does nothing if no service
// manager waits for that.
func Ready(status string) error {
	if err := notify(daemon.SdNotifyReady + "\nSTATUS=" + status); err != nil {
		return fmt.Errorf("tell systemd that the daemon is ready: %w", err)
	}
	return nil
}

// Stopping reports that the service ends (sd_notify(3)).
func Stopping() { _ = notify(daemon.SdNotifyStopping) }

// Listener returns the stream socket that systemd holds for this service under
// a name (FileDescriptorName=, sd_listen_fds(3)), and nil if it holds none. It
// may be called once in a process.
func Listener(name string) (net.Listener, error) {
	all, err := activation.ListenersWithNames()
	if err != nil {
		return nil, fmt.Errorf("take the sockets that systemd passes: %w", err)
	}
	var found net.Listener
	for n, ls := range all {
		for _, l := range ls {
			if n == name && found == nil {
				found = l
				continue
			}
			err = errors.Join(err, fmt.Errorf("systemd passes an unexpected socket %q at %s: sandboxd takes one socket, with "+
				"FileDescriptorName=%s in its socket unit", n, l.Addr(), name))
		}
	}
	return found, err
}

// Watch keeps the service's watchdog quiet while healthy returns nil, until ctx ends
// (WatchdogSec= of systemd.service(5)). If the daemon hangs, systemd kills it and
// starts it anew; its sandboxes go on. Without a watchdog it returns at once. healthy
// has until the watchdog's limit; Watch calls unwell with its error.
func Watch(ctx context.Context, healthy func(context.Context) error, unwell func(error)) error {
	limit, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return fmt.Errorf("read systemd's watchdog limit: %w", err)
	}
	if limit == 0 {
		return nil
	}
	tick := time.NewTicker(limit / 3)
	defer tick.Stop()
	for {
		check, cancel := context.WithTimeout(ctx, limit/3)
		err := healthy(check)
		cancel()
		if err == nil {
			err = notify(daemon.SdNotifyWatchdog)
		}
		if err != nil && ctx.Err() == nil {
			unwell(err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// notifyLimit is how long systemd may take to receive a message. Its socket holds some hundred messages of
// all services together, and a write to a full one waits: for as long as systemd hangs.
const notifyLimit = 2 * time.Second

// notify is daemon.SdNotify with a limit. Without NOTIFY_SOCKET it does nothing.
func notify(state string) error {
	name := os.Getenv("NOTIFY_SOCKET")
	if name == "" {
		return nil
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // nothing is left in it
	if err := c.SetWriteDeadline(time.Now().Add(notifyLimit)); err != nil {
		return err
	}
	if _, err = c.Write([]byte(state)); errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("systemd did not receive a message within %s", notifyLimit)
	}
	return err
}
