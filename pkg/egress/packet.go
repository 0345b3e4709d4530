package egress

import (
	"encoding/binary"
	"net/netip"

	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

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
