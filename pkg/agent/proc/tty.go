package proc

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// MaxTerminals is how many terminals a sandbox has: max of its devpts
// (pkg/oci/mounts.go), which holds on runc; gVisor has no bound of its own.
const MaxTerminals = 1024

// OpenTTY makes a pseudo-terminal (pty(7)). Its end for the process belongs to
// cred, as login(1) would have it, because some programs open it by its name.
// The caller closes both.
func OpenTTY(cols, rows int, cred *syscall.Credential) (ours *os.File, theirs int, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch {
	case err == unix.ENOSPC:
		return nil, -1, fmt.Errorf("this sandbox has %d terminals, and all of them are in use: end some", MaxTerminals)
	case err != nil:
		return nil, -1, fmt.Errorf("open /dev/ptmx: %w", err)
	}
	ours = os.NewFile(uintptr(fd), "terminal")
	theirs, err = openPeer(fd)
	if err == nil {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(cols), Row: uint16(rows)})
	}
	if err != nil {
		if theirs >= 0 {
			unix.Close(theirs)
		}
		ours.Close()
		return nil, -1, fmt.Errorf("make a terminal: %w", err)
	}
	if cred != nil {
		unix.Fchown(theirs, int(cred.Uid), -1) //nolint:errcheck // as giveAway
	}
	return ours, theirs, nil
}

func openPeer(ptmx int) (int, error) {
	if err := unix.IoctlSetPointerInt(ptmx, unix.TIOCSPTLCK, 0); err != nil {
		return -1, err
	}
	n, err := unix.IoctlGetInt(ptmx, unix.TIOCGPTN)
	if err != nil {
		return -1, err
	}
	return unix.Open(fmt.Sprintf("/dev/pts/%d", n), unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
}

// Control runs f on the descriptor of a file that stays with the poller: a terminal, a pipe, a socket.
func Control(file *os.File, f func(fd int) error) error {
	rc, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if err := rc.Control(func(fd uintptr) { ferr = f(int(fd)) }); err != nil {
		return err
	}
	return ferr
}

// Resize sets the size of a terminal. The kernel sends the foreground a SIGWINCH.
func Resize(tty *os.File, cols, rows int) error {
	return Control(tty, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(cols), Row: uint16(rows)})
	})
}

// Foreground returns the process group in the foreground of a terminal. gVisor answers
// only processes of the terminal's own session, so the agent gets ENOTTY.
func Foreground(tty *os.File) (pgrp int, err error) {
	err = Control(tty, func(fd int) (err error) {
		pgrp, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP)
		return err
	})
	if err == nil && pgrp <= 1 {
		err = unix.ESRCH
	}
	return pgrp, err
}

// SignalKey returns the key that sends sig to the foreground, as the terminal is
// set now; false if there is none.
func SignalKey(tty *os.File, sig syscall.Signal) (key byte, ok bool) {
	index := map[syscall.Signal]int{unix.SIGINT: unix.VINTR, unix.SIGQUIT: unix.VQUIT}
	i, ok := index[sig]
	if !ok {
		return 0, false
	}
	err := Control(tty, func(fd int) error {
		t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err == nil {
			key, ok = t.Cc[i], t.Lflag&unix.ISIG != 0 && t.Cc[i] != 0
		}
		return err
	})
	return key, ok && err == nil
}
