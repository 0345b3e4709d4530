package egress

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	vns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A crafted packet is one that takes a raw socket, which guests do not get: what it runs
// into stands behind that.
type crafted struct {
	name    string
	src     netip.Addr // of whoever sends, if it is not valid
	dst     string     // address and port
	proto   byte
	flags   byte // of TCP
	pieces  int  // bytes in each fragment; 0: it is sent whole
	at      func(*world) vns.NsHandle
	allowed bool
}

// The flags of TCP (RFC 9293, section 3.1).
const (
	fin, syn, rst, ack = 1, 2, 4, 16
)

// TestPackets: what no program of a guest sends by itself goes nowhere, also while the
// daemon is away; and it would arrive if the walls were down.
func TestPackets(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	host := hostNS(t)
	outside := func(w *world) vns.NsHandle { return w.outside }
	here := func(*world) vns.NsHandle { return host }
	w.sandbox(e, 0, rules(t, "open"))
	id := w.sandbox(e, 1, rules(t, "rules", "203.0.113.1:80"))
	w.write("net/ipv4/conf/sb-"+id+"/rp_filter", "0") // the set alone must do
	const tcp, udp, gre, sctp = unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_GRE, unix.IPPROTO_SCTP
	all := []crafted{
		{name: "a SYN that a rule allows", dst: "203.0.113.1:80", proto: tcp, flags: syn, at: outside, allowed: true},
		{name: "a SYN in fragments, allowed", dst: "203.0.113.1:80", proto: tcp, flags: syn, pieces: 8, at: outside, allowed: true},
		{name: "a SYN in fragments", dst: "203.0.113.1:443", proto: tcp, flags: syn, pieces: 8, at: outside},
		{name: "an ACK of no connection", dst: "203.0.113.1:443", proto: tcp, flags: ack, at: outside},
		{name: "a FIN of no connection", dst: "203.0.113.1:443", proto: tcp, flags: fin | ack, at: outside},
		{name: "a reset of no connection", dst: "203.0.113.1:443", proto: tcp, flags: rst, at: outside},
		{name: "a SYN and ACK", dst: "203.0.113.1:80", proto: tcp, flags: syn | ack, at: outside},
		{name: "no flags", dst: "203.0.113.1:80", proto: tcp, at: outside},
		{name: "GRE", dst: "203.0.113.2:80", proto: gre, at: outside},
		{name: "SCTP", dst: "203.0.113.2:80", proto: sctp, at: outside},
		{name: "the address of another sandbox", src: addr(0), dst: "203.0.113.1:443", proto: udp, at: outside},
		{name: "an address that nobody has", src: addr(77), dst: "203.0.113.1:443", proto: udp, at: outside},
		{name: "a broadcast", dst: "255.255.255.255:8080", proto: udp, at: here},
		{name: "a broadcast of the uplink's network", dst: "198.51.100.255:8080", proto: udp, at: here},
		{name: "all hosts, by multicast", dst: "224.0.0.1:8080", proto: udp, at: here},
	}
	each := func(when string, arrives func(crafted) bool) {
		for i, c := range all {
			if got, want := w.arrives(id, c, byte(i), arrives(c)), arrives(c); got != want {
				t.Errorf("%s, %s: arrives is %v, want %v", when, c.name, got, want)
			}
		}
	}
	each("with all walls", func(c crafted) bool { return c.allowed })
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	each("without a daemon", func(c crafted) bool { return false })
	if err := Purge(t.Context(), inst); err != nil {
		t.Fatal(err)
	}
	each("without walls", func(crafted) bool { return true })
}

// arrives sends a packet from a guest, and reports whether it arrives.
func (w *world) arrives(id string, c crafted, number byte, expected bool) bool {
	w.t.Helper()
	word := []byte(fmt.Sprintf("packet %d of %s", number, w.t.Name()))
	to := netip.MustParseAddrPort(c.dst)
	var seen net.PacketConn
	var err error
	w.in(c.at(w), func() { seen, err = net.ListenPacket(fmt.Sprintf("ip4:%d", c.proto), "0.0.0.0") })
	if err != nil {
		w.t.Fatal(err)
	}
	defer seen.Close()
	src := c.src
	if !src.IsValid() {
		src = addr(1)
	}
	w.in(w.guests[id], func() { err = sendRaw(packets(c, src, to, word), to.Addr()) })
	if err != nil {
		w.t.Fatalf("%s: %v", c.name, err)
	}
	wait := 100 * time.Millisecond
	if expected {
		wait = patient
	}
	seen.SetReadDeadline(time.Now().Add(wait)) //nolint:errcheck // shows in the read
	for b := make([]byte, 2048); ; {
		n, _, err := seen.ReadFrom(b)
		if err != nil {
			return false
		}
		if bytes.Contains(b[:n], word) {
			return true
		}
	}
}

// sendRaw sends packets as they are.
func sendRaw(all [][]byte, to netip.Addr) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1); err != nil {
		return err
	}
	for _, p := range all {
		if err := unix.Sendto(fd, p, 0, &unix.SockaddrInet4{Addr: to.As4()}); err != nil {
			return err
		}
	}
	return nil
}

// packets are those of c.
func packets(c crafted, src netip.Addr, to netip.AddrPort, word []byte) (all [][]byte) {
	const from = 40000
	ports := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, from), to.Port())
	var body []byte
	switch c.proto {
	case unix.IPPROTO_TCP:
		body = append(ports, 0, 0, 0, 1, 0, 0, 0, 0, 5<<4, c.flags, 16, 0, 0, 0, 0, 0)
		if c.flags&ack != 0 {
			body[11] = 1
		}
		body = append(body, word...)
		binary.BigEndian.PutUint16(body[16:], checksum(src, to.Addr(), c.proto, body))
	case unix.IPPROTO_UDP:
		body = binary.BigEndian.AppendUint16(ports, uint16(8+len(word)))
		body = append(append(body, 0, 0), word...) // without a checksum
	case unix.IPPROTO_GRE:
		body = append([]byte{0, 0, 8, 0}, word...)
	default:
		body = append(ports, word...)
	}
	size := len(body)
	if c.pieces > 0 {
		size = c.pieces
	}
	offset := 0
	for part := range slices.Chunk(body, size) {
		place := uint16(offset / 8)
		if offset += len(part); offset < len(body) {
			place |= 1 << 13 // more fragments
		}
		h := make([]byte, 20, 20+len(part))
		h[0], h[8], h[9] = 0x45, 64, c.proto
		binary.BigEndian.PutUint16(h[2:], uint16(20+len(part)))
		binary.BigEndian.PutUint16(h[4:], 4711)
		binary.BigEndian.PutUint16(h[6:], place)
		copy(h[12:], src.AsSlice())
		copy(h[16:], to.Addr().AsSlice())
		all = append(all, append(h, part...)) // the kernel fills in the checksum
	}
	return all
}

// checksum is that of TCP (RFC 9293, section 3.1).
func checksum(src, dst netip.Addr, proto byte, body []byte) uint16 {
	b := slices.Concat(src.AsSlice(), dst.AsSlice(), []byte{0, proto, byte(len(body) >> 8), byte(len(body))}, body)
	if len(b)%2 == 1 {
		b = append(b, 0)
	}
	sum := uint32(0)
	for pair := range slices.Chunk(b, 2) {
		sum += uint32(binary.BigEndian.Uint16(pair))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// TestHelpers: a module of the kernel that reads FTP would let a server choose a port that no
// rule opens, since what it announces is RELATED. No rule of sandboxd attaches one. What
// happens if somebody else's does is shown as well.
func TestHelpers(t *testing.T) {
	w := newWorld(t)
	e := w.open()
	const server, elsewhere = "203.0.113.1:21", "203.0.113.1:8080"
	id := w.sandbox(e, 0, rules(t, "rules", server))
	w.in(w.outside, func() { w.ftp(server, elsewhere) })
	passive := func() error {
		c, err := w.connect(w.guests[id], "tcp", server, patient)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patient)) //nolint:errcheck // shows in the reads
		lines := bufio.NewReader(c)
		for _, say := range []string{"", "PASV\r\n"} {
			io.WriteString(c, say) //nolint:errcheck // the answer says
			if line, err := lines.ReadString('\n'); err != nil || line[0] != '2' {
				t.Fatalf("after %q the server said %q, %v", say, line, err)
			}
		}
		data, err := w.dial(id, "tcp", elsewhere, patient)
		if err == nil {
			data.Close()
		}
		return err
	}
	if err := passive(); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a port that an FTP server announced: %v, want connection refused", err)
	}
	rule := strings.Fields("PREROUTING -p tcp -m tcp --dport 21 -j CT --helper ftp")
	t.Cleanup(func() { w.try("iptables", append([]string{"-w", "5", "-t", "raw", "-D"}, rule...)...) })
	if out, err := exec.Command("iptables", append([]string{"-w", "5", "-t", "raw", "-A"}, rule...)...).CombinedOutput(); err != nil {
		t.Logf("this kernel has no module that reads FTP, so it is not shown what one does: %v: %s", err, out)
		return
	}
	if err := passive(); err != nil {
		t.Errorf("with a module that reads FTP: %v; the refusal above proves nothing", err)
	}
}

// ftp serves what little of FTP leads elsewhere. It is called outside.
func (w *world) ftp(at, elsewhere string) {
	l, err := net.Listen("tcp4", at)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { l.Close() })
	to := netip.MustParseAddrPort(elsewhere)
	place := fmt.Sprintf("%s,%d,%d", strings.ReplaceAll(to.Addr().String(), ".", ","), to.Port()>>8, to.Port()&255)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprint(c, "220 ready\r\n") //nolint:errcheck // the guest says
				for lines := bufio.NewScanner(c); lines.Scan(); {
					fmt.Fprintf(c, "227 Entering Passive Mode (%s).\r\n", place) //nolint:errcheck // likewise
				}
			}()
		}
	}()
}

// passedRules are the rules of the instance that packets match, with how many did.
func (w *world) passedRules() map[string]int {
	out := map[string]int{}
	for _, table := range tables {
		for line := range strings.Lines(w.run("iptables-save", "-c", "-t", table)) {
			if counts, rule, ok := strings.Cut(strings.TrimSpace(line), " "); ok && strings.HasPrefix(counts, "[") {
				n, err := strconv.Atoi(strings.TrimPrefix(strings.Split(counts, ":")[0], "["))
				if err != nil {
					w.t.Fatal(line, err)
				}
				out[table+" "+rule] += n
			}
		}
	}
	return out
}

// TestSamePath: a packet of an open flow matches the same rules, however many policies and
// rules there are.
func TestSamePath(t *testing.T) {
	const trips = 200
	w := newWorld(t)
	e := w.open()
	c, err := w.dial(w.sandbox(e, 0, rules(t, "rules", "203.0.113.1:443")), "tcp", "203.0.113.1:443", patient)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	path := func() (all []string) {
		before := w.passedRules()
		for range trips {
			if err := echo(c, patient); err != nil {
				t.Fatal(err)
			}
		}
		for rule, n := range w.passedRules() {
			if n-before[rule] >= trips { // others count what is not of this flow
				all = append(all, rule)
			}
		}
		slices.Sort(all)
		return all
	}
	alone := path()
	for i := range 200 {
		specs := []string{"one.test", "!two.test:443"}
		for j := range 10 {
			specs = append(specs, fmt.Sprintf("11.0.%d.%d:443", i, j))
		}
		if err := e.Register(t.Context(), id(i+1), addr(i+1), rules(t, "rules", specs...), nil); err != nil {
			t.Fatal(err)
		}
	}
	if many := path(); !slices.Equal(alone, many) || len(alone) == 0 {
		t.Errorf("alone a packet matches\n%s\nbeside 200 policies\n%s", strings.Join(alone, "\n"), strings.Join(many, "\n"))
	}
}
