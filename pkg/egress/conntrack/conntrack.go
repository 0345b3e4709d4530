// Package conntrack lists and changes the kernel's table of flows, which is that of the whole
// network namespace: an entry for each flow that the firewall has seen, with its address before
// and after DNAT.
//
//	Each, EachOf ◀── entries ──── kernel (ctnetlink)
//	Append… ──▶ requests ── Table.Send ──▶ kernel: forget a flow, now or soon
//	a connection that DNAT brought here ── OriginalDst ──▶ where it was to go
//
// The surprise: an entry that is deleted does not end a connection. Its next packet is the first
// of a flow again, and is decided anew.
package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/dump"
	"github.com/sandboxd/sandboxd/pkg/egress/nla"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

// The constants of linux/netfilter/nfnetlink_conntrack.h and nf_conntrack_tcp.h used
// here.
const (
	ctNew, ctGet, ctDelete = unix.NFNL_SUBSYS_CTNETLINK << 8, unix.NFNL_SUBSYS_CTNETLINK<<8 | 1, unix.NFNL_SUBSYS_CTNETLINK<<8 | 2

	ctaTupleOrig, ctaTupleReply, ctaProtoinfo, ctaTimeout, ctaFilter = 1, 2, 4, 7, 25
	ctaTupleIP, ctaTupleProto                                        = 1, 2
	ctaIPSrc, ctaIPDst                                               = 1, 2 // of IPv4; those of IPv6 are ctaIPv6 higher
	ctaIPv6                                                          = 2
	ctaProtoNum, ctaSrcPort, ctaDstPort                              = 1, 2, 3
	ctaProtoinfoTCP, ctaTCPState                                     = 1, 1
	ctaFilterOrig                                                    = 1    // which parts of the tuple to compare
	ctaFilterSrc, ctaFilterDst                                       = 1, 2 // the addresses

	tcpTimeWait, tcpClose = 7, 8
)

// An Entry is a flow as conntrack keeps it. It is valid until the function that gets it returns.
type Entry struct {
	policy.Flow        // as its first packet had it
	Closed      bool   // both sides have closed it, or one has reset it; only TCP has an end
	Left        uint32 // seconds until the kernel forgets it, if no packet comes
	Tuple       []byte // the attribute CTA_TUPLE_ORIG as the kernel wrote it
	// Replier is who answers: another than Dst if the flow is redirected.
	Replier netip.Addr
}

// parse reads an entry that the kernel lists. ok is false if it is not IPv4.
func parse(msg []byte) (t Entry, ok bool) {
	for attrs := msg[min(nl.SizeofNfgenmsg, len(msg)):]; ; {
		typ, data, rest, more := nla.Next(attrs)
		if !more {
			return t, ok
		}
		switch typ {
		case ctaTupleOrig:
			t.Tuple = data
			t.Flow, ok = parseTuple(data)
		case ctaTupleReply:
			if src := nla.In(nla.In(data, ctaTupleIP), ctaIPSrc); len(src) == 4 {
				t.Replier = netip.AddrFrom4([4]byte(src))
			}
		case ctaTimeout:
			if len(data) == 4 {
				t.Left = binary.BigEndian.Uint32(data)
			}
		case ctaProtoinfo:
			if state := nla.In(nla.In(data, ctaProtoinfoTCP), ctaTCPState); len(state) == 1 {
				t.Closed = state[0] == tcpTimeWait || state[0] == tcpClose
			}
		}
		attrs = rest
	}
}

func parseTuple(tuple []byte) (f policy.Flow, ok bool) {
	ip, proto := nla.In(tuple, ctaTupleIP), nla.In(tuple, ctaTupleProto)
	src, dst, num := nla.In(ip, ctaIPSrc), nla.In(ip, ctaIPDst), nla.In(proto, ctaProtoNum)
	if len(src) != 4 || len(dst) != 4 || len(num) != 1 {
		return f, false
	}
	f.Src, f.Dst, f.Proto = netip.AddrFrom4([4]byte(src)), netip.AddrFrom4([4]byte(dst)), num[0]
	if port := nla.In(proto, ctaDstPort); len(port) == 2 {
		f.Port = binary.BigEndian.Uint16(port)
	}
	return f, true
}

// A Table changes the table of this network namespace.
type Table struct {
	mu  sync.Mutex // guards fd: one batch at a time
	fd  int
	buf []byte
}

// Open opens it.
func Open() (*Table, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open a netfilter netlink socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bind a netfilter netlink socket: %w", err)
	}
	return &Table{fd: fd, buf: make([]byte, 16<<10)}, nil
}

// Close closes it. It may be called twice.
func (t *Table) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.fd < 0 {
		return nil
	}
	err := unix.Close(t.fd)
	t.fd = -1
	return err
}

// Each calls f for every IPv4 flow of the table. The kernel lists no flow that is out of
// time, and removes those that it meets: it would do that by itself only every minute.
// begin is called before each attempt: a listing that was interrupted starts again.
func Each(begin func(), f func(Entry)) error {
	return list(nil, begin, f)
}

// EachOf is Each for the flows that src opened. The kernel compares the addresses; before
// Linux 5.8 it lists all, and they are compared here.
func EachOf(src netip.Addr, begin func(), f func(Entry)) error {
	ip := nla.Append(nil, ctaTupleIP|unix.NLA_F_NESTED, nla.Append(nil, ctaIPSrc, src.AsSlice()))
	parts := nla.Append(nil, ctaFilterOrig, binary.NativeEndian.AppendUint32(nil, ctaFilterSrc))
	attrs := nla.Append(nil, ctaTupleOrig|unix.NLA_F_NESTED, ip)
	attrs = nla.Append(attrs, ctaFilter|unix.NLA_F_NESTED, parts)
	return list(attrs, begin, func(t Entry) {
		if t.Src == src {
			f(t)
		}
	})
}

// filter is what each listing adds to its request.
type filter []byte

func (f filter) Len() int          { return len(f) }
func (f filter) Serialize() []byte { return f }

func list(only filter, begin func(), f func(Entry)) error {
	_, err := dump.Again(func() (struct{}, error) {
		begin()
		req := nl.NewNetlinkRequest(ctGet, unix.NLM_F_DUMP)
		req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
		if len(only) > 0 {
			req.AddData(only)
		}
		return struct{}{}, req.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(msg []byte) bool {
			if found, ok := parse(msg); ok {
				f(found)
			}
			return true
		})
	})
	if err != nil {
		return fmt.Errorf("list the flows that conntrack knows: %w (the kernel needs the module nf_conntrack_netlink)", err)
	}
	return nil
}

// AppendExpiry appends a request to forget the flow tuple after that time, unless a
// packet comes: a packet gives the flow its usual time again.
func AppendExpiry(b, tuple []byte, after time.Duration) []byte {
	attrs := nla.Append(nil, ctaTupleOrig|unix.NLA_F_NESTED, tuple)
	attrs = nla.Append(attrs, ctaTimeout, binary.BigEndian.AppendUint32(nil, uint32(after/time.Second)))
	return appendRequest(b, ctNew, unix.AF_INET, attrs)
}

// AppendForget appends a request to forget a flow now.
func AppendForget(b []byte, proto uint8, src, dst netip.AddrPort) []byte {
	family, shift := byte(unix.AF_INET), uint16(0)
	if src.Addr().Is6() {
		family, shift = unix.AF_INET6, ctaIPv6
	}
	ip := nla.Append(nil, ctaIPSrc+shift, src.Addr().AsSlice())
	ip = nla.Append(ip, ctaIPDst+shift, dst.Addr().AsSlice())
	ports := nla.Append(nil, ctaProtoNum, []byte{proto})
	ports = nla.Append(ports, ctaSrcPort, binary.BigEndian.AppendUint16(nil, src.Port()))
	ports = nla.Append(ports, ctaDstPort, binary.BigEndian.AppendUint16(nil, dst.Port()))
	tuple := nla.Append(nil, ctaTupleIP|unix.NLA_F_NESTED, ip)
	tuple = nla.Append(tuple, ctaTupleProto|unix.NLA_F_NESTED, ports)
	return appendRequest(b, ctDelete, family, nla.Append(nil, ctaTupleOrig|unix.NLA_F_NESTED, tuple))
}

// AppendForgetTuple appends a request to forget the flow tuple now.
func AppendForgetTuple(b, tuple []byte) []byte {
	return appendRequest(b, ctDelete, unix.AF_INET, nla.Append(nil, ctaTupleOrig|unix.NLA_F_NESTED, tuple))
}

// AppendForgetAll appends requests to forget all flows that addr opened, and those that
// were opened to it. The kernel compares the addresses, which takes 0.3 ms for each of
// the two in a table of 262,144 buckets; it locks only those that are not empty. Before
// Linux 6.11 it refuses such a request with EINVAL, because the tuple has no ports.
func AppendForgetAll(b []byte, addr netip.Addr) []byte {
	for _, end := range []struct {
		attr uint16
		part uint32
	}{{ctaIPSrc, ctaFilterSrc}, {ctaIPDst, ctaFilterDst}} {
		ip := nla.Append(nil, ctaTupleIP|unix.NLA_F_NESTED, nla.Append(nil, end.attr, addr.AsSlice()))
		parts := nla.Append(nil, ctaFilterOrig, binary.NativeEndian.AppendUint32(nil, end.part))
		attrs := nla.Append(nil, ctaTupleOrig|unix.NLA_F_NESTED, ip)
		attrs = nla.Append(attrs, ctaFilter|unix.NLA_F_NESTED, parts)
		b = appendRequest(b, ctDelete, unix.AF_INET, attrs)
	}
	return b
}

func appendRequest(b []byte, typ uint16, family byte, attrs []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(unix.SizeofNlMsghdr+nl.SizeofNfgenmsg+len(attrs)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0) // sequence, port id
	b = append(b, family, nl.NFNETLINK_V0, 0, 0)
	return append(b, attrs...)
}

// Send sends requests. A flow that is gone by now is no error. The kernel has served
// them when Send returns.
func (t *Table) Send(requests []byte) error {
	if len(requests) == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := unix.Sendto(t.fd, requests, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("change conntrack entries: %w", err)
	}
	var failed error
	for {
		n, _, err := unix.Recvfrom(t.fd, t.buf, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return failed
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOBUFS): // more refusals than the socket holds
			continue
		case err != nil:
			return fmt.Errorf("change conntrack entries: %w", err)
		}
		// An error message: the request failed with that number.
		if n >= 20 && binary.NativeEndian.Uint16(t.buf[4:]) == unix.NLMSG_ERROR {
			errno := unix.Errno(-int32(binary.NativeEndian.Uint32(t.buf[16:])))
			if errno != 0 && errno != unix.ENOENT {
				failed = fmt.Errorf("change conntrack entries: %w", errno)
			}
		}
	}
}

// OriginalDst is where a connection was to go before DNAT.
func OriginalDst(raw syscall.RawConn) (netip.AddrPort, error) {
	var b *unix.IPv6Mreq // large enough for a struct sockaddr_in
	var err error
	if cerr := raw.Control(func(fd uintptr) { b, err = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST) }); cerr != nil {
		return netip.AddrPort{}, cerr
	}
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("read where it was to go: %w", err)
	}
	a := b.Multiaddr
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(a[4:8])), binary.BigEndian.Uint16(a[2:])), nil
}
