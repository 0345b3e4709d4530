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
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/certs"
	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/systemd"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
)

// listenUnix returns the API's Unix socket, mode 0660 root:group: the socket that
// systemd holds, which stays open across restarts, or one of our own.
func listenUnix(cfg *config.Config, log *slog.Logger) (net.Listener, error) {
	l, err := systemd.Listener("api")
	if err != nil {
		return nil, err
	}
	if l == nil {
		return openUnix(cfg, log)
	}
	if at := l.Addr().String(); at != cfg.Listen.Socket {
		l.Close()
		return nil, fmt.Errorf("systemd listens on %s, but listen.socket is %s: set ListenStream= of sandboxd.socket to the same path", at,
			cfg.Listen.Socket)
	}
	return l, nil
}

// A lastCall is a listener on a socket that others may go on to serve. If it were closed while a
// connection is accepted, that might get no answer.
type lastCall struct {
	net.Listener
	over chan struct{} // closed when nothing more is accepted
	once sync.Once
}

func newLastCall(l net.Listener) *lastCall { return &lastCall{Listener: l, over: make(chan struct{})} }

// Accept ends with the first error; http.Server knows of each connection before it asks for the next.
func (l *lastCall) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
		l.once.Do(func() { close(l.over) })
		return nil, net.ErrClosed
	}
	return c, err
}

// stop accepts nothing more: who connects from now on waits for the next daemon, if the socket is
// systemd's. served is closed when the server of l has ended.
func (l *lastCall) stop(served <-chan struct{}) {
	d, ok := l.Listener.(interface{ SetDeadline(t time.Time) error })
	if !ok || d.SetDeadline(time.Unix(1, 0)) != nil {
		return
	}
	select {
	case <-l.over:
	case <-served:
	}
}

// openUnix opens the socket. A socket at its path is a leftover: the lock on the state
// directory shows that no other daemon of this instance runs.
func openUnix(cfg *config.Config, log *slog.Logger) (net.Listener, error) {
	path := cfg.Listen.Socket
	l, err := bindUnix("listen.socket", path, 0o660)
	if err != nil {
		return nil, err
	}
	g, err := user.LookupGroup(cfg.Listen.SocketGroup)
	if err != nil {
		log.Warn("only root may use the socket: its group does not exist", "group", cfg.Listen.SocketGroup, "hint",
			"groupadd --system "+cfg.Listen.SocketGroup)
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

// bindUnix opens a Unix socket with mode mode at the path of configuration key key.
func bindUnix(key, path string, mode os.FileMode) (net.Listener, error) {
	if err := removeSocket(key, path); err != nil {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w; its directory must exist, and the path must be shorter than 108 bytes", path, err)
	}
	if err := os.Chmod(path, mode); err != nil {
		l.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return l, nil
}

// removeSocket removes a stale socket, and nothing but a socket.
func removeSocket(key, path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("inspect the socket's path: %w", err)
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("listen on %s: the file there is not a socket; move it away or set %s to another path", path, key)
	}
	// A daemon with another state directory may serve there.
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return fmt.Errorf("listen on %s: another program answers there; set %s to another path", path, key)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("remove the stale socket: %w", err)
	}
	return nil
}

// A tcpListener is a TCP listener and what its connections are allowed to do.
type tcpListener struct {
	net.Listener
	may auth.Listener
}

// listeners opens the TCP listeners of the configuration: the API's and the gateway's.
func (d *Daemon) listeners() (all []tcpListener, err error) {
	l, g := d.cfg.Listen, d.cfg.Gateway
	for _, t := range []struct {
		key, address string
		cert         *certs.Pair
		may          func(loopback bool) auth.Listener
	}{
		{"listen.tcp", l.TCP, d.cert, func(loopback bool) auth.Listener { return auth.Listener{PublicPorts: loopback} }},
		{"gateway.listen", g.Listen, d.gatewayCert, func(loopback bool) auth.Listener {
			return auth.Listener{Gateway: true, PublicPorts: g.Public == "yes" || g.Public == "auto" && loopback}
		}},
	} {
		if t.address == "" {
			continue
		}
		ln, loopback, err := listenTCP(t.key, t.address)
		if err != nil {
			for _, o := range all {
				o.Close()
			}
			return nil, err
		}
		all = append(all, tcpListener{secured(ln, t.cert), t.may(loopback)})
	}
	return all, nil
}

// listenTCP opens a TCP listener and reports whether it is on loopback only.
func listenTCP(key, address string) (l net.Listener, loopback bool, err error) {
	addr, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", key, err)
	}
	l, err = net.Listen(family(addr), address)
	if err != nil {
		return nil, false, fmt.Errorf("%s: listen on %s: %w; find the program that uses it with: ss -ltnp 'sport = :%d'", key, address, err,
			addr.Port())
	}
	return l, addr.Addr().IsLoopback(), nil
}

// family is the network for listening on an address: with "tcp", 0.0.0.0 would also
// mean all of IPv6. [::] means both, as everywhere.
func family(addr netip.AddrPort) string {
	if addr.Addr().Is4() {
		return "tcp4"
	}
	return "tcp"
}

// announcedGateway is the address by which clients reach the gateway.
func (d *Daemon) announcedGateway() gateway.Names {
	g := d.cfg.Gateway
	out := gateway.Names{Domain: g.Domain, Address: g.Address}
	if g.Listen == "" {
		return out
	}
	host, _, _ := strings.Cut(g.Address, "/")
	_, port, err := net.SplitHostPort(host)
	if err != nil && g.Address == "" { // otherwise clients use the scheme's default port
		_, port, _ = net.SplitHostPort(g.Listen)
	}
	if own := map[bool]string{false: "80", true: "443"}[d.gatewayCert != nil]; port != "" && port != own {
		out.Port = ":" + port
	}
	return out
}
