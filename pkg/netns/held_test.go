package netns

import (
	"encoding/binary"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inside runs f on a thread in the network namespace of id.
func inside(t *testing.T, m *Manager, id string, f func() error) {
	t.Helper()
	done := make(chan error)
	go func() { // the thread ends with this goroutine
		runtime.LockOSThread()
		ns, err := os.Open(m.NetPath(id))
		if err == nil {
			defer ns.Close()
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		}
		if err == nil { // a group that may send echoes: one of the namespace's owner
			_, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, 700_000, 700_000, 700_000)
			if err = f(); errno != 0 {
				err = errno
			}
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// What sockets hold is found in the namespace where they are, for each kind that nobody is
// charged with, and is gone when they are closed.
func TestHeld(t *testing.T) {
	m := newManager(t)
	for i := range 2 {
		if err := m.CreateNamespaces(t.Context(), id(i), true, 700_000+65536*uint32(i)); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Attach(t.Context(), id(0), addr(0)); err != nil { // its loopback is up then
		t.Fatal(err)
	}
	const least = 1 << 20
	ids := []string{id(0), id(1), id(2)} // the last one has no namespaces
	for _, c := range []struct {
		name                  string
		family, kind, ofThese int
		fill                  func(fd int) error
	}{
		{"netlink", unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE, askForLink},
		{"ICMP", unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP, func(fd int) error { return echo(fd, 8, 0) }},
		{"UDP", unix.AF_INET, unix.SOCK_DGRAM, 0, func(fd int) error {
			const when = unix.SOF_TIMESTAMPING_TX_SOFTWARE | unix.SOF_TIMESTAMPING_SOFTWARE
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPING, when); err != nil {
				return err
			}
			return echo(fd, 0, 9)
		}},
	} {
		if held, err := HeldBy(m, ids, least); err != nil || len(held) != 0 {
			t.Fatalf("before %s: %v, %v", c.name, held, err)
		}
		var fds []int
		inside(t, m, id(0), func() error {
			for range 20 {
				fd, err := unix.Socket(c.family, c.kind|unix.SOCK_CLOEXEC, c.ofThese)
				if err != nil {
					return err
				}
				fds = append(fds, fd)
				for range 150 {
					if err := c.fill(fd); err != nil {
						return err
					}
				}
			}
			return nil
		})
		held, err := HeldBy(m, ids, least)
		if h := held[id(0)]; err != nil || len(held) != 1 || h.Most != c.name || h.Bytes < 2<<20 || h.Bytes > 32<<20 {
			t.Errorf("%s: %v, %v; want some MiB of it in the first one", c.name, held, err)
		}
		if held, err := HeldBy(m, ids, 64<<20); err != nil || len(held) != 0 {
			t.Errorf("%s: more than 64 MiB are held: %v, %v", c.name, held, err)
		}
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
}

func askForLink(fd int) error {
	ask := binary.NativeEndian.AppendUint32(nil, unix.SizeofNlMsghdr+unix.SizeofIfInfomsg)
	ask = binary.NativeEndian.AppendUint16(ask, unix.RTM_GETLINK)
	ask = binary.NativeEndian.AppendUint16(ask, unix.NLM_F_REQUEST)
	ask = append(ask, make([]byte, 12)...)
	ask = binary.NativeEndian.AppendUint32(ask, 1)
	ask = append(ask, make([]byte, 8)...)
	return unix.Sendto(fd, ask, unix.MSG_DONTWAIT, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// echo sends itself a large message, whose first byte is kind.
func echo(fd int, kind byte, port int) error {
	message := make([]byte, 60_000)
	message[0] = kind
	err := unix.Sendto(fd, message, unix.MSG_DONTWAIT, &unix.SockaddrInet4{Port: port, Addr: [4]byte(net.IPv4(127, 0, 0, 1).To4())})
	if err == unix.ECONNREFUSED { //nolint:errorlint // an error of the kernel: nobody listens there
		return nil
	}
	return err
}

// A look at idle sandboxes is cheap: it reads how many sockets they have, and no more.
func BenchmarkHeld(b *testing.B) {
	m := newManager(b)
	var ids []string
	for i := range 20 {
		ids = append(ids, id(i))
		if err := m.CreateNamespaces(b.Context(), id(i), true, 700_000+65536*uint32(i)); err != nil {
			b.Fatal(err)
		}
	}
	b.ResetTimer()
	for b.Loop() {
		if _, err := HeldBy(m, ids, 32<<20); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed())/float64(time.Microsecond)/float64(b.N)/float64(len(ids)), "µs/sandbox")
}
