package server

import (
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// On gVisor a listener with SO_REUSEADDR can be undercut by any user of the
// sandbox, who then reads the token: see listen.
func TestListenDoesNotShareItsPort(t *testing.T) {
	ln, err := listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := ln.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	reuse := -1
	if err := c.Control(func(fd uintptr) {
		reuse, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR)
	}); err != nil {
		t.Fatal(err)
	}
	if err != nil || reuse != 0 {
		t.Errorf("SO_REUSEADDR is %d, %v", reuse, err)
	}
	conn, err := net.Dial("tcp4", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}
