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

// synTimeout is the least time that Linux waits for an answer to a SYN before it sends the next
// (RFC 6298, section 2.1). It waits longer later, at the latest after tcp_syn_linear_timeouts of
// them (ip-sysctl.rst). A timer that counts jiffies may be a few milliseconds early.
const synTimeout = time.Second - 20*time.Millisecond

// refusals is how often Dial asks before it takes it that each first SYN gets no refusal.
const refusals = 3

// Dial connects from the network namespace of this thread. If the answer, yes or no, is not
// one to the first SYN, Dial returns an error that says so. It knows that from the kernel
// and not from a clock, so that a slow host does not look like a lost packet: the
// timestamp in an answer says which SYN it answers (RFC 7323, section 3.2), however late it
// comes. A refusal has no timestamp: if it came after a second SYN, Dial tries again, and a
// rule that drops the first SYN does so each time.
func Dial(network, to string, timeout time.Duration) (c net.Conn, err error) {
	for range refusals {
		var late error
		if c, late, err = dial(network, to, timeout); late == nil || c != nil {
			if c != nil && late != nil {
				c.Close()
			}
			return c, cmp.Or(late, err)
		}
		err = late
	}
	return nil, err
}

// dial returns as late why it is not the first SYN that was answered.
func dial(network, to string, timeout time.Duration) (c net.Conn, late, err error) {
	kept := -1 // the socket, duplicated, because net.Dialer closes its own without an answer
	d := net.Dialer{Timeout: timeout, Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if e := raw.Control(func(fd uintptr) { kept, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); e != nil {
			return e
		}
		return err
	}}
	c, err = d.Dial(network, to)
	if kept < 0 {
		return c, nil, err
	}
	defer unix.Close(kept)
	if ne, ok := errors.AsType[net.Error](err); !strings.HasPrefix(network, "tcp") || ok && ne.Timeout() {
		return c, nil, err
	}
	info, late := unix.GetsockoptTCPInfo(kept, unix.IPPROTO_TCP, unix.TCP_INFO)
	if late != nil || info.Total_retrans == 0 {
		return c, late, err
	}
	// An older connection of the same ports whose client went away without a word answers the first
	// SYN, too: with an acknowledgment, after which Linux sends the SYN anew at once (RFC 9293,
	// section 3.5.1; tcp_rcv_synsent_state_process).
	if err == nil && info.Segs_in-info.Data_segs_in > 1 {
		return c, nil, nil
	}
	// A connection's first round trip is from the SYN that was answered to its answer. If that
	// is the first SYN, all others were sent meanwhile.
	trip, last := time.Duration(info.Rtt)*time.Microsecond, time.Duration(info.Total_retrans)*synTimeout
	if err != nil || trip < last {
		late = fmt.Errorf("no answer to the first SYN: %d more were sent, over at least %v, and what was answered is %v old: %v",
			info.Total_retrans, last, trip, err)
	}
	return c, late, err
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

// Soonest runs try until one run takes no longer than limit, ten times and for a second
// at least, and returns the time of the shortest run. It ends at the first error. A busy host
// may delay several runs in a row; code that is slow by itself is slow each time.
func Soonest(limit time.Duration, try func() error) (least time.Duration, err error) {
	least = math.MaxInt64
	began := time.Now()
	for i := 0; (i < 10 || time.Since(began) < time.Second) && least > limit && err == nil; i++ {
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
