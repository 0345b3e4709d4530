package main

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// reap waits for a child in the background. The agent reports how the child died.
//
// It waits for a pidfd in Go's poller: os.Process.Wait would keep one thread for each
// living sandbox, and with a hundred sandboxes a start takes a quarter longer.
func reap(pid int) error {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("reap %d: pidfd_open: %w", pid, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	c, err := f.SyscallConn()
	if err != nil {
		return errors.Join(fmt.Errorf("reap %d: %w", pid, err), f.Close())
	}
	go func() {
		defer f.Close()                //nolint:errcheck // only waited for
		c.Read(func(fd uintptr) bool { //nolint:errcheck // it ends when the child is reaped
			for {
				// EAGAIN: the child lives (pidfd_open(2), PIDFD_NONBLOCK).
				if err := unix.Waitid(unix.P_PIDFD, int(fd), nil, unix.WEXITED, nil); !errors.Is(err, unix.EINTR) {
					return !errors.Is(err, unix.EAGAIN)
				}
			}
		})
	}()
	return nil
}
