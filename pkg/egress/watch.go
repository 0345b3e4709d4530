package egress

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// A watch reports every change of nf_tables, ours included, but not what changed.
type watch struct {
	f   *os.File
	raw syscall.RawConn
}

func watchRules() (*watch, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("join the netlink group of nf_tables: %w", err)
	}
	w := &watch{f: os.NewFile(uintptr(fd), "nftables")}
	if w.raw, err = w.f.SyscallConn(); err != nil {
		return nil, errors.Join(err, w.f.Close())
	}
	return w, nil
}

// run sends to changes until close. If the kernel had no room for messages (ENOBUFS),
// that counts as a change, too.
func (w *watch) run(changes chan<- struct{}) {
	buf := make([]byte, 64<<10)
	for {
		err := w.raw.Read(func(fd uintptr) bool {
			_, _, err := unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
			return err != unix.EAGAIN
		})
		if err != nil {
			return // closed
		}
		select {
		case changes <- struct{}{}:
		default:
		}
	}
}

func (w *watch) close() error { return w.f.Close() }
