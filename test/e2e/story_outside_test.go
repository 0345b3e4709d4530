package e2e_test

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// Addresses of the world outside, which is a network namespace with a link to
// the host. TEST-NET-3 counts as public, since it is in no private range.
const (
	outsideNetns   = "sandboxd-story"
	outsideLink    = "story0"
	outsideAddr    = "203.0.113.241"
	outsideOther   = "203.0.113.242"
	outsideHost    = "203.0.113.254" // the host's end; of a /28, because the mirrors of some hosts are in the rest
	outsidePrivate = "192.168.213.1"
	// What its DNS server answers for every name.
	outsideAnswer = outsideOther
)

// An outside is a piece of Internet: every address echoes on TCP 80 and 443
// and on UDP 7; outsideAddr answers DNS.
type outside struct{}

func newOutside(t *testing.T) *outside {
	t.Helper()
	prefix := netip.MustParsePrefix
	hosttest.Outside{
		Name: outsideNetns, Link: outsideLink,
		Host:      []netip.Prefix{prefix(outsideHost + "/28"), prefix("192.168.213.254/24")},
		Addresses: []netip.Prefix{prefix(outsideAddr + "/28"), prefix(outsideOther + "/28"), prefix(outsidePrivate + "/24")},
	}.Start(t, serveOutside)
	return &outside{}
}

func serveOutside() (all []io.Closer, err error) {
	for _, port := range []string{"80", "443"} {
		l, err := hosttest.Echo(port)
		if err != nil {
			return all, err
		}
		all = append(all, l)
	}
	packets := func(addr string, answer func([]byte) []byte) error {
		c, err := net.ListenPacket("udp4", addr)
		if err != nil {
			return err
		}
		all = append(all, c)
		go func() {
			b := make([]byte, 2048)
			for {
				n, from, err := c.ReadFrom(b)
				if err != nil {
					return
				}
				c.WriteTo(answer(b[:n]), from) //nolint:errcheck // the guest sees what is missing
			}
		}()
		return nil
	}
	if err := packets(outsideAddr+":7", func(b []byte) []byte { return b }); err != nil {
		return all, err
	}
	return all, packets(outsideAddr+":53", answerDNS)
}

// answerDNS answers every question for an IPv4 address with outsideAnswer, and
// others with nothing.
func answerDNS(q []byte) []byte {
	const header = 12
	end := header
	for end < len(q) && q[end] != 0 {
		end += int(q[end]) + 1
	}
	end += 5 // the root label, type and class
	if end > len(q) {
		return nil
	}
	a := append([]byte(nil), q[:end]...)
	binary.BigEndian.PutUint16(a[2:], 0x8180) // a response, recursion desired and available
	for _, count := range []int{6, 8, 10} {
		binary.BigEndian.PutUint16(a[count:], 0)
	}
	if binary.BigEndian.Uint16(q[end-4:]) == 1 {
		binary.BigEndian.PutUint16(a[6:], 1)
		a = append(a, 0xc0, header, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4)
		a = append(a, net.ParseIP(outsideAnswer).To4()...)
	}
	return a
}
