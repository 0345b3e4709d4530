package nla

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// TestAttributes: another writer of attributes makes the same bytes, and each is found again;
// what is cut off, or says a wrong length, is the end.
func TestAttributes(t *testing.T) {
	inner := Append(Append(nil, 1, []byte{6}), 3, []byte("12345"))
	b := Append(Append(nil, 2|unix.NLA_F_NESTED, inner), 7, nil)
	other := nl.NewRtAttr(2|unix.NLA_F_NESTED, nil)
	other.AddRtAttr(1, []byte{6})
	other.AddRtAttr(3, []byte("12345"))
	if want := append(other.Serialize(), nl.NewRtAttr(7, nil).Serialize()...); !bytes.Equal(b, want) {
		t.Errorf("wrote %v, want %v", b, want)
	}
	if got := In(In(b, 2), 3); string(got) != "12345" {
		t.Errorf("found %q", got)
	}
	if got := In(b, 7); got == nil || len(got) != 0 {
		t.Errorf("an empty attribute is %v", got)
	}
	if got := In(b, 5); got != nil {
		t.Errorf("an absent attribute is %v", got)
	}
	for n := range len(b) {
		if got := In(In(b[:n], 2), 3); got != nil && string(got) != "12345" {
			t.Errorf("of %d bytes: %q", n, got)
		}
	}
	for _, size := range []uint16{0, 3, uint16(len(b)) + 1, 1<<16 - 1} {
		wrong := bytes.Clone(b)
		binary.NativeEndian.PutUint16(wrong, size)
		if _, _, _, ok := Next(wrong); ok {
			t.Errorf("an attribute of %d bytes in %d", size, len(b))
		}
	}
}
