package hosttest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestDial: a first SYN that is answered late is one that is answered; a lost one is not.
func TestDial(t *testing.T) {
	Root(t)
	if !Private(t, func() {}) {
		return
	}
	packets := mirror(t)
	l, err := net.Listen("tcp4", "192.0.2.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const lost = "no answer to the first SYN"
	for _, c := range []struct {
		name, port string
		keep       func(first, second []byte) [][]byte // what arrives when the second SYN has been sent
		text       string                              // of the error
	}{
		{"late", "80", func(first, second []byte) [][]byte { return [][]byte{first, second} }, ""},
		{"lost", "80", func(_, second []byte) [][]byte { return [][]byte{second} }, lost},
		{"refused", "81", nil, "connection refused"},
		{"refused, late", "81", func(first, second []byte) [][]byte { return [][]byte{first, second} }, "connection refused"},
		{"refused, lost each time", "81", func(_, second []byte) [][]byte { return [][]byte{second} }, lost},
	} {
		t.Run(c.name, func(t *testing.T) {
			stop := make(chan struct{})
			done := make(chan struct{})
			go func() {
				defer close(done)
				packets.pass(stop, c.keep, c.name == "refused, late")
			}()
			var err error
			for i := 0; i < 5; i++ { // a second SYN that a busy host answers a second late looks like the first
				var conn net.Conn
				if conn, err = Dial("tcp", "192.0.2.2:"+c.port, time.Minute); conn != nil {
					conn.Close()
				}
				if c.text != lost || err != nil {
					break
				}
			}
			if c.text == "" && err != nil || c.text != "" && (err == nil || !strings.Contains(err.Error(), c.text)) {
				t.Errorf("%v, want %q", err, c.text)
			}
			close(stop)
			packets.tun.SetReadDeadline(time.Now()) //nolint:errcheck // ends pass
			<-done
			packets.tun.SetReadDeadline(time.Time{}) //nolint:errcheck // it was set before
		})
	}
}

// TestDialHalfOpen: a SYN that meets an older connection of the same ports is answered, and sent anew.
func TestDialHalfOpen(t *testing.T) {
	Root(t)
	if !Private(t, func() {}) {
		return
	}
	const port = 40000 // the only one that clients have
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", fmt.Appendf(nil, "%d %[1]d", port), 0); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp4", "127.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for range 2 {
		c, err := Dial("tcp4", l.Addr().String(), time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		accepted, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer accepted.Close()
		if from := accepted.RemoteAddr().(*net.TCPAddr).Port; from != port {
			t.Fatalf("a connection from port %d", from)
		}
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var failed error
		if err := raw.Control(func(fd uintptr) { failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_REPAIR, 1) }); err != nil {
			t.Fatal(err)
		}
		if failed != nil {
			t.Fatal(failed)
		}
		c.Close() // without a word
	}
}

// A reflector is the far side of a link: what is sent to 192.0.2.2 comes back as from there.
type reflector struct {
	t   *testing.T
	tun *os.File
}

func mirror(t *testing.T) *reflector {
	t.Helper()
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	q, err := unix.NewIfreq("mirror")
	if err == nil {
		q.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, q)
	}
	if err != nil {
		unix.Close(fd)
		t.Fatalf("make a TUN device: %v", err)
	}
	r := &reflector{t, os.NewFile(uintptr(fd), "tun")}
	t.Cleanup(func() { r.tun.Close() })
	for _, argv := range [][]string{
		{"ip", "addr", "add", "192.0.2.1/24", "dev", "mirror"}, {"ip", "link", "set", "mirror", "up"},
	} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", argv, err, out)
		}
	}
	return r
}

// pass returns packets until stop is closed. keep decides about the first two SYNs of a
// connection, and of the first connection only if once is set.
func (r *reflector) pass(stop <-chan struct{}, keep func(first, second []byte) [][]byte, once bool) {
	firsts := map[string][]byte{} // by their ports
	for {
		p := make([]byte, 2048)
		n, err := r.tun.Read(p)
		select {
		case <-stop:
			return
		default:
		}
		if err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				r.t.Error(err)
			}
			return
		}
		if p = p[:n]; p[0]>>4 != 4 || p[9] != unix.IPPROTO_TCP {
			continue
		}
		// The checksums are sums, so they stay right when the addresses change places.
		for i := range 4 {
			p[12+i], p[16+i] = p[16+i], p[12+i]
		}
		out, ports := [][]byte{p}, string(p[20:24])
		const flags, syn, ack = 33, 0x02, 0x10
		if keep != nil && p[flags]&(syn|ack) == syn {
			switch first, known := firsts[ports]; {
			case !known && once && len(firsts) > 0:
			case !known:
				firsts[ports], out = p, nil
			case first != nil:
				firsts[ports], out = nil, keep(first, p)
			}
		}
		for _, p := range out {
			if _, err := r.tun.Write(p); err != nil {
				r.t.Error(err)
			}
		}
	}
}
