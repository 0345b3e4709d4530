package systemd

import (
	"context"
	"fmt"
	"os"
	"strconv"

	"github.com/coreos/go-systemd/v22/dbus"
	"golang.org/x/sys/unix"
)

// firstPassed is the first descriptor that systemd passes (sd_listen_fds(3)).
const firstPassed = 3

// Claim makes the kernel name this process, and no longer systemd, as the one that listens on the sockets that
// systemd passes (listen(2) sets what SO_PEERCRED returns). Connections that wait go on to. By that clients see
// whether a daemon is there (pkg/client).
func Claim() error {
	if pid, err := strconv.Atoi(os.Getenv("LISTEN_PID")); err != nil || pid != os.Getpid() {
		return nil
	}
	n, err := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	if err != nil {
		return nil
	}
	for fd := firstPassed; fd < firstPassed+n; fd++ {
		if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
			return fmt.Errorf("listen on socket %d that systemd passes: %w; see ListenStream= in sandboxd.socket", fd, err)
		}
	}
	return nil
}

// Settled says that the service of this process is well: systemd forgets how often it has restarted it, by which
// it makes restarts slow (RestartSteps=, and ExecStopPost= of the unit). Nothing happens if systemd did not
// start this process.
func Settled(ctx context.Context) error {
	if os.Getenv("NOTIFY_SOCKET") == "" || !Booted() {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, jobLimit, fmt.Errorf("systemd did not answer within %s", jobLimit))
	defer cancel()
	c, err := dbus.NewWithContext(ctx)
	if err != nil {
		return fmt.Errorf("connect to systemd: %w", err)
	}
	defer c.Close()
	unit, err := c.GetUnitNameByPID(ctx, uint32(os.Getpid()))
	if err == nil {
		err = c.ResetFailedUnitContext(ctx, unit)
	}
	if err != nil {
		return fmt.Errorf("have systemd forget the restarts of the service: %w", err)
	}
	return nil
}
