package hosttest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Dial connects from the network namespace of this thread. If the answer, yes or no, did
// not come to the first SYN, Dial returns an error that says so. It reads the kernel's
// count of retransmissions, so that a slow host does not look like a lost packet.
func Dial(network, to string, timeout time.Duration) (net.Conn, error) {
	kept := -1 // the socket, duplicated, because net.Dialer closes its own without an answer
	d := net.Dialer{Timeout: timeout, Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if e := raw.Control(func(fd uintptr) { kept, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); e != nil {
			return e
		}
		return err
	}}
	c, err := d.Dial(network, to)
	if kept < 0 {
		return c, err
	}
	defer unix.Close(kept)
	if ne, ok := errors.AsType[net.Error](err); !strings.HasPrefix(network, "tcp") || ok && ne.Timeout() {
		return c, err
	}
	info, unread := unix.GetsockoptTCPInfo(kept, unix.IPPROTO_TCP, unix.TCP_INFO)
	if unread == nil && info.Total_retrans > 0 {
		unread = fmt.Errorf("no answer to the first SYN: %d more were sent, and then: %v", info.Total_retrans, err)
	}
	if unread != nil && c != nil {
		c.Close()
	}
	return c, cmp.Or(unread, err)
}

// Resent is how many segments of c the kernel has retransmitted; 0 if c is not TCP.
func Resent(c net.Conn) (n int, err error) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return 0, nil
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return 0, err
	}
	ctlErr := raw.Control(func(fd uintptr) {
		var info *unix.TCPInfo
		if info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n = int(info.Total_retrans)
		}
	})
	return n, cmp.Or(ctlErr, err)
}

// Soonest runs try until one run takes no longer than limit, at most ten times, and
// returns the time of the shortest run. It ends at the first error. A busy host delays
// some runs; code that is slow by itself is slow each time.
func Soonest(limit time.Duration, try func() error) (least time.Duration, err error) {
	least = math.MaxInt64
	for i := 0; i < 10 && least > limit && err == nil; i++ {
		start := time.Now()
		err = try()
		least = min(least, time.Since(start))
	}
	return least, err
}

// Pipes is a listener whose connections, made by Dial, do not pass the kernel, so that
// they work with the clock of testing/synctest.
type Pipes struct {
	conns  chan net.Conn
	closed context.Context
	close  context.CancelFunc
}

// NewPipes returns a listener that queues up to backlog connections before Accept.
func NewPipes(backlog int) *Pipes {
	closed, stop := context.WithCancel(context.Background())
	return &Pipes{make(chan net.Conn, backlog), closed, stop}
}

// Dial makes a connection, which Accept returns.
func (p *Pipes) Dial(ctx context.Context) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case p.conns <- theirs:
		return ours, nil
	case <-p.closed.Done():
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Accept implements net.Listener.
func (p *Pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed.Done():
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (p *Pipes) Close() error { p.close(); return nil }

// Addr implements net.Listener.
func (p *Pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipes", Net: "unix"} }
