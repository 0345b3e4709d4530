package server

import (
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
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

// A sandbox whose guest left FIFOs or links in the way must still end.
func TestBuryOverHostileFiles(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{agent.OutputFile, agent.ObituaryFile, agent.ObituaryFile + ".new"} {
		path := filepath.Join(dir, filepath.Base(name))
		for what, put := range map[string]func() error{
			"fifo": func() error { return unix.Mkfifo(path, 0o600) },
			"link": func() error { return os.Symlink("/dev/null", path) },
		} {
			os.Remove(path) //nolint:errcheck // put fails then
			if err := put(); err != nil {
				t.Fatal(err)
			}
			if err := stateDir(dir).writeObituary(agent.Obituary{ExitCode: 7}, []byte("bye")); err != nil {
				t.Errorf("%s over a %s: %v", name, what, err)
			}
			b, err := os.ReadFile(filepath.Join(dir, filepath.Base(agent.ObituaryFile)))
			if o, perr := agent.ParseObituary(b); err != nil || perr != nil || o.ExitCode != 7 {
				t.Errorf("%s over a %s: %q, %v", name, what, b, err)
			}
		}
	}
}
