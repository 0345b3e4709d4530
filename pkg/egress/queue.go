package egress

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/nla"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

// The constants of linux/netfilter/nfnetlink_queue.h used here.
const (
	nfqPacket, nfqVerdict, nfqConfig = unix.NFNL_SUBSYS_QUEUE << 8, unix.NFNL_SUBSYS_QUEUE<<8 | 1, unix.NFNL_SUBSYS_QUEUE<<8 | 2

	nfqaPacketHdr, nfqaVerdictHdr, nfqaMark, nfqaPayload = 1, 2, 3, 10

	nfqaCfgCmd, nfqaCfgParams, nfqaCfgMaxLen, nfqaCfgMask, nfqaCfgFlags = 1, 2, 3, 4, 5
	nfqCmdBind                                                          = 1
	nfqCopyPacket                                                       = 2
	nfqFlagGSO                                                          = 1 << 2 // the kernel need not split packets

	nfAccept = 1
)

const (
	// queueCopy is how much of a packet is read: the longest IPv4 header, and ports.
	queueCopy = 64
	// queueLen is how many first packets may wait for an answer; more are dropped.
	queueLen = 4096
	// queueBuffer holds the packets of a burst, at some 500 bytes each.
	queueBuffer = 8 << 20
	// queueWait is how long to wait for a daemon that is still exiting: the kernel
	// frees its queue some 0.5 s late.
	queueWait = 5 * time.Second
)

// A queue is the receiving end of an NFQUEUE.
type queue struct {
	f   *os.File
	raw syscall.RawConn
	num uint16
	out [40]byte // the verdict message; only id and mark change
}

// openQueue binds to queue num.
func openQueue(ctx context.Context, num uint16) (*queue, error) {
	ctx, cancel := context.WithTimeout(ctx, queueWait)
	defer cancel()
	retry := time.NewTicker(50 * time.Millisecond) // the kernel sends no event when it is free
	defer retry.Stop()
	for {
		q, err := bindQueue(num)
		if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EBUSY) {
			return q, err
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("NFQUEUE %d: %w: another process holds it (see /proc/net/netfilter/nfnetlink_queue, second column); "+
				"is another daemon of this instance running?", num, err)
		}
	}
}

func bindQueue(num uint16) (*queue, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open a netfilter netlink socket: %w: the kernel needs the module nfnetlink", err)
	}
	if err := configure(fd, num); err != nil {
		unix.Close(fd)
		return nil, err
	}
	q := &queue{num: num, f: os.NewFile(uintptr(fd), "nfqueue")}
	if q.raw, err = q.f.SyscallConn(); err != nil {
		return nil, errors.Join(err, q.f.Close())
	}
	binary.NativeEndian.PutUint32(q.out[0:], uint32(len(q.out)))
	binary.NativeEndian.PutUint16(q.out[4:], nfqVerdict)
	binary.NativeEndian.PutUint16(q.out[6:], unix.NLM_F_REQUEST)
	q.out[16] = unix.AF_UNSPEC
	binary.BigEndian.PutUint16(q.out[18:], num)
	nla.Put(q.out[20:], nfqaVerdictHdr, 8)
	binary.BigEndian.PutUint32(q.out[24:], nfAccept)
	nla.Put(q.out[32:], nfqaMark, 4)
	return q, nil
}

// configure binds the queue, and makes the socket non-blocking.
func configure(fd int, num uint16) error {
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, queueBuffer); err != nil {
		return fmt.Errorf("set the receive buffer of the netfilter socket: %w", err)
	}
	// An overrun drops packets, which guests send again; it needs no error of its own.
	if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_NO_ENOBUFS, 1); err != nil {
		return fmt.Errorf("set NETLINK_NO_ENOBUFS: %w", err)
	}
	params := binary.BigEndian.AppendUint32(nil, queueCopy)
	params = append(params, nfqCopyPacket)
	for _, c := range []struct {
		what string
		typ  uint16
		data []byte
	}{
		{"bind", nfqaCfgCmd, []byte{nfqCmdBind, 0, 0, unix.AF_INET}},
		{"copy mode", nfqaCfgParams, params},
		{"length", nfqaCfgMaxLen, binary.BigEndian.AppendUint32(nil, queueLen)},
		{"flags", nfqaCfgFlags, binary.BigEndian.AppendUint32(nil, nfqFlagGSO)},
	} {
		attrs := nla.Append(nil, c.typ, c.data)
		if c.typ == nfqaCfgFlags {
			attrs = nla.Append(attrs, nfqaCfgMask, c.data)
		}
		err := configRequest(fd, num, attrs)
		if errors.Is(err, unix.EINVAL) && c.typ == nfqaCfgCmd {
			return fmt.Errorf("NFQUEUE %d: %w: the kernel needs the module nfnetlink_queue (modprobe nfnetlink_queue; Debian has it in "+
				"linux-image-amd64)", num, err)
		}
		if err != nil {
			return fmt.Errorf("configure NFQUEUE %d: %s: %w", num, c.what, err)
		}
	}
	return unix.SetNonblock(fd, true)
}

// configRequest sends one configuration message and waits for its answer. The socket
// still blocks. Packets that arrive before the answer get no verdict: they are those of
// the first microseconds, and guests send them again.
func configRequest(fd int, num uint16, attrs []byte) error {
	msg := make([]byte, 20, 20+len(attrs))
	binary.NativeEndian.PutUint16(msg[4:], nfqConfig)
	binary.NativeEndian.PutUint16(msg[6:], unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	msg[16] = unix.AF_UNSPEC
	binary.BigEndian.PutUint16(msg[18:], num)
	msg = append(msg, attrs...)
	binary.NativeEndian.PutUint32(msg, uint32(len(msg)))
	if err := unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, 64<<10)
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if n < 20 || binary.NativeEndian.Uint16(buf[4:]) != unix.NLMSG_ERROR {
			continue
		}
		if e := int32(binary.NativeEndian.Uint32(buf[16:])); e != 0 {
			return syscall.Errno(-e)
		}
		return nil
	}
}

func (q *queue) close() error {
	if err := q.f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// queued is a packet that waits for its verdict.
type queued struct {
	id      uint32
	mark    uint32
	payload []byte
}

// receive reads pending messages into buf and returns them; it waits for the first. It
// returns os.ErrClosed after close.
func (q *queue) receive(buf []byte) ([]byte, error) {
	var n int
	var err error
	rerr := q.raw.Read(func(fd uintptr) bool {
		n, _, err = unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
		return err != unix.EAGAIN
	})
	if rerr != nil {
		return nil, rerr
	}
	return buf[:max(n, 0)], err
}

// nextPacket takes the first packet off msgs. ok is false at the end.
func nextPacket(msgs []byte) (p queued, rest []byte, ok bool) {
	for len(msgs) >= 20 {
		size := int(binary.NativeEndian.Uint32(msgs))
		if size < 20 || size > len(msgs) {
			return p, nil, false
		}
		msg := msgs[:size]
		msgs = msgs[min((size+3)&^3, len(msgs)):]
		if binary.NativeEndian.Uint16(msg[4:]) == nfqPacket {
			if p, ok := parseQueued(msg[20:]); ok {
				return p, msgs, true
			}
		}
	}
	return p, nil, false
}

func parseQueued(attrs []byte) (p queued, ok bool) {
	for {
		typ, data, rest, more := nla.Next(attrs)
		if !more {
			return p, ok && len(attrs) < 4
		}
		switch typ {
		case nfqaPacketHdr:
			if len(data) < 4 {
				return p, false
			}
			p.id, ok = binary.BigEndian.Uint32(data), true
		case nfqaMark:
			if len(data) >= 4 {
				p.mark = binary.BigEndian.Uint32(data)
			}
		case nfqaPayload:
			p.payload = data
		}
		attrs = rest
	}
}

// answer lets the packet go on, with mark in place of the bits of markMask.
// If the packet is gone by now, that is no error.
func (q *queue) answer(p queued, mark uint32) error {
	binary.BigEndian.PutUint32(q.out[28:], p.id)
	binary.BigEndian.PutUint32(q.out[36:], p.mark&^markMask|mark)
	var err error
	werr := q.raw.Write(func(fd uintptr) bool {
		err = unix.Sendto(int(fd), q.out[:], unix.MSG_DONTWAIT, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		return err != unix.EAGAIN
	})
	return errors.Join(werr, err)
}

// serveQueue answers until the queue is closed. One reader is enough: it handles 28,000
// flows a second.
func (e *Engine) serveQueue(ctx context.Context, q *queue) {
	buf := make([]byte, 64<<10)
	for {
		msgs, err := q.receive(buf)
		if ctx.Err() != nil || errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ENOBUFS) {
			// Nothing opens from here on; only a new daemon helps.
			e.health.fail(fmt.Errorf("read the queue of new flows: %w", err))
			e.log.Error("reading the queue of new flows failed: no new flow opens until the daemon is restarted", "err", err)
			return
		}
		for {
			p, rest, ok := nextPacket(msgs)
			if !ok {
				break
			}
			// The kernel sends the packet on while it takes the answer: when answer
			// returns, the flow has its entry in the table of conntrack.
			e.ledger.mu.Lock()
			err := q.answer(p, e.verdict(p.payload))
			e.ledger.mu.Unlock()
			if err != nil && ctx.Err() == nil {
				e.log.Debug("cannot send verdict", "err", err)
			}
			msgs = rest
		}
	}
}

// verdict decides for the first packet of a flow and returns its mark.
//
// Preconditions: e.ledger.mu is held.
func (e *Engine) verdict(packet []byte) uint32 {
	f, ok := parseFlow(packet)
	if !ok {
		e.flowCounts.add(refused, policy.ByFault)
		return markDeny
	}
	s := e.lookup(f.Src)
	if s == nil {
		// This daemon just started, and the sandbox is not registered yet: drop the
		// packet without an answer, so that the guest tries again.
		e.flowCounts.add(dropped, policy.ByFault)
		return 0
	}
	action, why := policy.Allow, policy.Reason{}
	isQuery := f.IsDNS() // the policy has no say in that: the resolver gets it
	if !isQuery {
		action, why = e.decide(s, f)
	}
	if action != policy.Deny {
		if over := e.ledger.admit(f.Src); over != "" {
			action, why = policy.Deny, policy.Reason{Cause: policy.ByLimit, Text: over}
		}
	}
	switch {
	case action == policy.Deny:
		e.count(s, f, "", false)
		e.flowCounts.add(refused, why.Cause)
		e.tell(s, f, why)
		return markDeny
	case isQuery:
		return markResolve
	case action == policy.Proxy:
		return markProxy // the proxy counts it, when it knows the name
	default:
		e.count(s, f, "", true)
		e.flowCounts.add(passed, why.Cause)
		return markAllow
	}
}

// parseFlow reads the flow of an IPv4 packet, of which at least header and ports must
// be there. conntrack has reassembled fragments before. For a later fragment or a
// truncated packet ok is false.
func parseFlow(p []byte) (f policy.Flow, ok bool) {
	if len(p) < 20 || p[0]>>4 != 4 {
		return f, false
	}
	header := int(p[0]&0xf) * 4
	if header < 20 || len(p) < header {
		return f, false
	}
	if binary.BigEndian.Uint16(p[6:])&0x1fff != 0 { // fragment offset
		return f, false
	}
	f.Proto = p[9]
	f.Src = netip.AddrFrom4([4]byte(p[12:16]))
	f.Dst = netip.AddrFrom4([4]byte(p[16:20]))
	if policy.HasPorts(f.Proto) {
		if len(p) < header+4 {
			return f, false
		}
		f.Port = binary.BigEndian.Uint16(p[header+2:])
	}
	return f, true
}
