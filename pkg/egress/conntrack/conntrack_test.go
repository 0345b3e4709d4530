package conntrack

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/nla"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

// TestParse reads an entry in the kernel's form.
func TestParse(t *testing.T) {
	from, to := netip.MustParseAddrPort("10.164.0.2:40000"), netip.MustParseAddrPort("8.8.8.8:53")
	request := AppendForget(nil, unix.IPPROTO_TCP, from, to)
	if size := binary.NativeEndian.Uint32(request); int(size) != len(request) {
		t.Errorf("a request of %d bytes says %d", len(request), size)
	}
	for state, closed := range map[byte]bool{3: false, 4: false, tcpTimeWait: true, tcpClose: true} {
		msg := nla.Append(request[16:], ctaTimeout, []byte{0, 0, 0, 119})
		msg = nla.Append(msg, ctaProtoinfo|unix.NLA_F_NESTED,
			nla.Append(nil, ctaProtoinfoTCP|unix.NLA_F_NESTED, nla.Append(nil, ctaTCPState, []byte{state})))
		got, ok := parse(msg)
		want := Entry{Flow: policy.Flow{Src: from.Addr(), Dst: to.Addr(), Proto: unix.IPPROTO_TCP, Port: 53}, Closed: closed, Left: 119}
		if !ok || got.Flow != want.Flow || got.Closed != want.Closed || got.Left != want.Left {
			t.Errorf("state %d: %+v, %v", state, got, ok)
		}
		for n := range len(msg) { // a message cut off is no entry, or the part that is there
			parse(msg[:n])
		}
		again, ok := parse(AppendExpiry(nil, got.Tuple, 3*time.Second)[16:])
		if !ok || again.Flow != got.Flow || again.Left != 3 {
			t.Errorf("a request to end it: %+v, %v", again, ok)
		}
	}
	six := AppendForget(nil, unix.IPPROTO_UDP, netip.MustParseAddrPort("[fd00::1]:40000"), netip.MustParseAddrPort("[fd00::2]:53"))
	if _, ok := parse(six[16:]); ok {
		t.Error("a flow of IPv6 is taken for one of IPv4")
	}
}
