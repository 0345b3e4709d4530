package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/user"
	"strconv"

	"github.com/sandboxd/sandboxd/internal/config"
)

// listenUnix opens the API's Unix socket, mode 0660 root:group. What lies at
// its path is a leftover: the lock on the state directory says that no other
// daemon of this instance lives.
func listenUnix(cfg *config.Config, log *slog.Logger) (net.Listener, error) {
	path := cfg.Listen.Socket
	if err := removeSocket(path); err != nil {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w; its directory must exist, and the path be shorter than 108 bytes", path, err)
	}
	if err := os.Chmod(path, 0o660); err != nil {
		l.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	g, err := user.LookupGroup(cfg.Listen.SocketGroup)
	if err != nil {
		log.Warn("only root may use the socket: its group does not exist", "group", cfg.Listen.SocketGroup, "hint", "groupadd --system "+cfg.Listen.SocketGroup)
		return l, nil
	}
	gid, err := strconv.Atoi(g.Gid)
	if err == nil {
		err = os.Chown(path, 0, gid)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("give %s to group %s: %w", path, cfg.Listen.SocketGroup, err)
	}
	return l, nil
}

// removeSocket removes a stale socket, and nothing that is not a socket.
func removeSocket(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at the socket's path: %w", err)
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("listen on %s: something that is no socket lies there; move it away or set listen.socket", path)
	}
	// A daemon that does not share our state directory may serve there.
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return fmt.Errorf("listen on %s: another program answers there; set listen.socket to another path", path)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove the stale socket: %w", err)
	}
	return nil
}

// listenTCP opens the TCP listener and reports whether it is on loopback only.
func listenTCP(cfg *config.Config) (l net.Listener, loopback bool, err error) {
	addr, err := netip.ParseAddrPort(cfg.Listen.TCP)
	if err != nil {
		return nil, false, fmt.Errorf("listen.tcp: %w", err)
	}
	l, err = net.Listen("tcp", cfg.Listen.TCP)
	if err != nil {
		return nil, false, fmt.Errorf("listen on %s: %w; see who does with: ss -ltnp 'sport = :%d'", cfg.Listen.TCP, err, addr.Port())
	}
	return l, addr.Addr().IsLoopback(), nil
}
