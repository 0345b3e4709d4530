package quic

import (
	"bytes"
	"encoding/hex"
	"testing"
)

func TestInitial(t *testing.T) {
	p, err := Initial("denied.example")
	if err != nil || len(p) != size || bytes.Contains(p, []byte("denied")) {
		t.Fatalf("%d bytes, %v", len(p), err)
	}
	if name, err := Name(p); err != nil || name != "denied.example" {
		t.Errorf("%q, %v", name, err)
	}
	p[600]++
	if name, err := Name(p); err == nil {
		t.Errorf("a changed packet is read: %q", name)
	}
}

// TestKeys compares with RFC 9001, appendix A: the keys, and what they make of the header of
// the first packet there.
func TestKeys(t *testing.T) {
	unhex := func(s string) []byte {
		b, err := hex.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	_, iv, mask, err := keys(unhex("8394c8f03e515708"))
	if err != nil || !bytes.Equal(iv, unhex("fa044b2f42a3fd3b46fb255c")) {
		t.Errorf("iv %x, %v", iv, err)
	}
	m := make([]byte, 16)
	mask.Encrypt(m, unhex("d1b1c98dd7689fb8ec11d242b123dc9b"))
	if !bytes.Equal(m[:5], unhex("437b9aec36")) {
		t.Errorf("mask %x", m)
	}
}
