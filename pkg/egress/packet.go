package egress

import (
	"encoding/binary"
	"net/netip"
)

// parseFlow reads the flow of an IPv4 packet, of which at least header and ports must
// be there. conntrack has reassembled fragments before. For a later fragment or a
// truncated packet ok is false.
func parseFlow(p []byte) (f flow, ok bool) {
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
	f.proto = p[9]
	f.src = netip.AddrFrom4([4]byte(p[12:16]))
	f.dst = netip.AddrFrom4([4]byte(p[16:20]))
	if hasPorts(f.proto) {
		if len(p) < header+4 {
			return f, false
		}
		f.port = binary.BigEndian.Uint16(p[header+2:])
	}
	return f, true
}
