package trust

import (
	"bytes"
	"crypto/sha1"
	"encoding/asn1"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// A store of Java keeps its form, JKS or PKCS #12: what a JVM of the image could read, it can
// read afterwards. So there is no form to choose that both old and new JVMs read, and no
// certificate of the guest is parsed or lost. The store is copied with one entry added, for
// which a JKS has to be read up to its number of entries, and a PKCS #12 down to the list of
// its parts.

// alias is the name of the entry.
const alias = "sandboxd"

// password is that of all stores that JDKs and distributions ship.
const password = "changeit"

// withStore adds the authority to a store of Java.
func (p *planner) withStore(b []byte) ([]byte, error) {
	switch {
	case len(b) >= len(jksHead) && [8]byte(b) == jksHead:
		return p.withJKS(b)
	case len(b) > 0 && b[0] == 0x30: // a SEQUENCE
		return p.withPKCS12(b)
	}
	return nil, errors.New("neither a JKS nor a PKCS #12")
}

// jksHead is the magic number and version 2 (sun/security/provider/JavaKeyStore.java in
// OpenJDK). The number of entries follows, the entries, and a SHA-1.
var jksHead = [8]byte{0xfe, 0xed, 0xfe, 0xed, 0, 0, 0, 2}

// withJKS adds an entry at the end of a JKS.
//
// The SHA-1 at the end is checked only by who gives a password. A store with another one than
// password stays as it is: its new SHA-1 would be wrong for that, and all would be refused.
func (p *planner) withJKS(b []byte) ([]byte, error) {
	const counted = len(jksHead) + 4
	if len(b) < counted+sha1.Size {
		return nil, errors.New("half a JKS")
	}
	body, sum := b[:len(b)-sha1.Size], b[len(b)-sha1.Size:]
	if got := jksSum(body); !bytes.Equal(got[:], sum) {
		return nil, fmt.Errorf("its password is not %q, or it is damaged", password)
	}
	n := binary.BigEndian.Uint32(b[len(jksHead):])
	if n >= maxFile { // no entry has less than one byte
		return nil, errors.New("a JKS with an impossible number of entries")
	}
	text := func(b []byte, s string) []byte {
		return append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
	}
	out := binary.BigEndian.AppendUint32(bytes.Clone(jksHead[:]), n+1)
	out = append(out, body[counted:]...)
	out = text(binary.BigEndian.AppendUint32(out, 2), alias) // 2: a trusted certificate
	out = binary.BigEndian.AppendUint64(out, uint64(p.cert.NotBefore.UnixMilli()))
	out = binary.BigEndian.AppendUint32(text(out, "X.509"), uint32(len(p.cert.Raw)))
	out = append(out, p.cert.Raw...)
	s := jksSum(out)
	return append(out, s[:]...), nil
}

// jksSum is the SHA-1 at the end of a JKS with the usual password.
func jksSum(body []byte) [sha1.Size]byte {
	h := sha1.New()
	for _, c := range []byte(password) {
		h.Write([]byte{0, c}) // UTF-16
	}
	h.Write([]byte("Mighty Aphrodite"))
	h.Write(body)
	return [sha1.Size]byte(h.Sum(nil))
}

// Identifiers of a PKCS #12 (RFC 7292, section 4 and appendix D), and the attribute that
// makes a certificate a trusted one for Java.
var (
	oidData         = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 1}
	oidCertBag      = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 12, 10, 1, 3}
	oidX509         = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 22, 1}
	oidFriendlyName = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 20}
	oidTrusted      = asn1.ObjectIdentifier{2, 16, 840, 1, 113894, 746875, 1, 1}
	oidAnyUsage     = asn1.ObjectIdentifier{2, 5, 29, 37, 0}
)

// A pfx is the outermost structure of a PKCS #12.
type pfx struct {
	Version int
	Safe    contentInfo
	Mac     asn1.RawValue `asn1:"optional"`
}

type contentInfo struct {
	Type    asn1.ObjectIdentifier
	Content asn1.RawValue `asn1:"tag:0"`
}

// withPKCS12 adds a part to a PKCS #12 without a MAC, as JDK 18 and later ship it. Its parts
// are a list, and may differ in whether and how they are encrypted.
//
// A store with a MAC stays as it is. The MAC would be wrong, and a new one needs the password.
// Without one Java would read the store, but Bouncy Castle refuses a password for a store that
// needs none (issue 1865 of bcgit/bc-java): a program would lose all its roots.
func (p *planner) withPKCS12(b []byte) ([]byte, error) {
	var f pfx
	var octets, parts asn1.RawValue
	err := unmarshal(b, &f)
	if err == nil && (f.Version != 3 || !f.Safe.Type.Equal(oidData)) {
		err = errors.New("a PKCS #12 of another version, or signed")
	}
	if err == nil {
		err = unmarshal(f.Safe.Content.Bytes, &octets)
	}
	if err == nil {
		err = unmarshal(octets.Bytes, &parts)
	}
	if err == nil && (octets.Tag != asn1.TagOctetString || octets.IsCompound || parts.Tag != asn1.TagSequence) {
		err = errors.New("not the parts of a PKCS #12")
	}
	if err != nil {
		return nil, fmt.Errorf("read a PKCS #12: %w", err)
	}
	if len(f.Mac.FullBytes) > 0 {
		return nil, fmt.Errorf("a PKCS #12 with a MAC, which would be wrong: make it a JKS, with the password %q", password)
	}
	return tlv(0x30, tlv(2, []byte{3}), data(tlv(0x30, parts.Bytes, p.part()))), nil
}

// unmarshal reads one value of DER, and nothing behind it.
func unmarshal(b []byte, v any) error {
	rest, err := asn1.Unmarshal(b, v)
	if err == nil && len(rest) > 0 {
		err = errors.New("something stands behind it")
	}
	return err
}

// part is a part of a PKCS #12 that has the authority, not encrypted.
func (p *planner) part() []byte {
	var bmp []byte // UTF-16
	for _, c := range []byte(alias) {
		bmp = append(bmp, 0, c)
	}
	cert := tlv(0x30, oid(oidX509), tlv(0xa0, tlv(4, p.cert.Raw)))
	attributes := [][]byte{
		tlv(0x30, oid(oidFriendlyName), tlv(0x31, tlv(0x1e, bmp))),
		tlv(0x30, oid(oidTrusted), tlv(0x31, oid(oidAnyUsage))),
	}
	slices.SortFunc(attributes, bytes.Compare) // DER: a SET OF is sorted
	bag := tlv(0x30, oid(oidCertBag), tlv(0xa0, cert), tlv(0x31, attributes...))
	return data(tlv(0x30, bag))
}

// data is a ContentInfo that has b.
func data(b []byte) []byte { return tlv(0x30, oid(oidData), tlv(0xa0, tlv(4, b))) }

// tlv writes one value of DER.
func tlv(tag byte, parts ...[]byte) []byte {
	n := 0
	for _, b := range parts {
		n += len(b)
	}
	out := []byte{tag, byte(n)}
	if n >= 0x80 {
		size := bytes.TrimLeft(binary.BigEndian.AppendUint32(nil, uint32(n)), "\x00")
		out = append([]byte{tag, 0x80 | byte(len(size))}, size...)
	}
	for _, b := range parts {
		out = append(out, b...)
	}
	return out
}

func oid(id asn1.ObjectIdentifier) []byte {
	b, _ := asn1.Marshal(id) // the identifiers of this file are valid
	return b
}
