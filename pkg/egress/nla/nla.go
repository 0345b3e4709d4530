// Package nla reads and writes the attributes of netlink messages (netlink(7); struct nlattr
// of linux/netlink.h).
//
//	length  2 bytes, of header and data    in the byte order of the host
//	type    2 bytes, with two flags
//	data    and padding to a multiple of 4
//
// It is beside github.com/vishvananda/netlink because one packet of a flow, and each entry of
// conntrack, is read by it: it allocates nothing.
//
// The surprise: numbers within data are in network byte order, in the messages of netfilter.
package nla

import "encoding/binary"

// Put writes the header of an attribute with n bytes of data to the first four bytes of b.
func Put(b []byte, typ uint16, n int) {
	binary.NativeEndian.PutUint16(b, uint16(4+n))
	binary.NativeEndian.PutUint16(b[2:], typ)
}

// Append appends an attribute, padded. A nested one has attributes as its data, and
// unix.NLA_F_NESTED in its type.
func Append(b []byte, typ uint16, data []byte) []byte {
	at := len(b)
	b = append(b, 0, 0, 0, 0)
	Put(b[at:], typ, len(data))
	b = append(b, data...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// Next takes the first attribute off b. ok is false at the end, and where b
// is no attribute.
func Next(b []byte) (typ uint16, data, rest []byte, ok bool) {
	if len(b) < 4 {
		return 0, nil, nil, false
	}
	size := int(binary.NativeEndian.Uint16(b))
	if size < 4 || size > len(b) {
		return 0, nil, nil, false
	}
	return binary.NativeEndian.Uint16(b[2:]) & 0x3fff, b[4:size], b[min((size+3)&^3, len(b)):], true
}

// In returns the data of the attribute typ of those in b, or nil.
func In(b []byte, typ uint16) []byte {
	for {
		t, data, rest, ok := Next(b)
		if !ok || t == typ {
			return data
		}
		b = rest
	}
}
