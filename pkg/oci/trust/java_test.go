package trust

import (
	"bytes"
	"crypto/sha1"
	"encoding/asn1"
	"encoding/binary"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The stores of testdata have one entry each: "guest", a certificate of testdata/guest.pem.
// keytool of JDK 25 has made them: changeit.jks and secret.jks, with the password "another",
// by -storetype JKS; encrypted.p12 by -storetype PKCS12; open.p12 also with
// -J-Dkeystore.pkcs12.certProtectionAlgorithm=NONE and -J-Dkeystore.pkcs12.macAlgorithm=NONE,
// as the cacerts of JDK 18 and later is.
func stored(t testing.TB, name string) []byte {
	t.Helper()
	file, open := strings.CutSuffix(name, " without its MAC")
	b, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	if open { // as -J-Dkeystore.pkcs12.macAlgorithm=NONE alone makes it
		var f pfx
		if err := unmarshal(b, &f); err != nil || len(f.Mac.FullBytes) == 0 {
			t.Fatalf("%s has no MAC: %v", file, err)
		}
		b = tlv(0x30, tlv(2, []byte{3}), data(octetsOf(t, f.Safe)))
	}
	return b
}

// octetsOf is what a part of a PKCS #12 has.
func octetsOf(t testing.TB, c contentInfo) (b []byte) {
	t.Helper()
	if err := unmarshal(c.Content.Bytes, &b); err != nil {
		t.Fatal(err)
	}
	return b
}

// der is the certificate in a block of PEM.
func der(b []byte) []byte {
	block, _ := pem.Decode(b)
	return block.Bytes
}

func testPlanner(t testing.TB) *planner {
	t.Helper()
	p, err := newPlanner(openDir(t, t.TempDir()), ca)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// readJKS reads a JKS as JavaKeyStore.java has it: aliases and certificates of its entries.
func readJKS(b []byte) (entries map[string][]byte, err error) {
	defer func() { // a length that leads out of b
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	body := b[:len(b)-sha1.Size]
	password := []byte("\x00c\x00h\x00a\x00n\x00g\x00e\x00i\x00t")
	if sum := sha1.Sum(append(append(password, "Mighty Aphrodite"...), body...)); !bytes.Equal(sum[:], b[len(body):]) {
		return nil, fmt.Errorf("the sum is wrong")
	}
	next := func(n int) []byte { out := body[:n]; body = body[n:]; return out }
	number := func() int { return int(binary.BigEndian.Uint32(next(4))) }
	text := func() string { return string(next(int(binary.BigEndian.Uint16(next(2))))) }
	if magic, version := number(), number(); magic != 0xfeedfeed || version != 2 {
		return nil, fmt.Errorf("magic number %x, version %d", magic, version)
	}
	entries = map[string][]byte{}
	for n := number(); n > 0; n-- {
		if tag := number(); tag != 2 {
			return nil, fmt.Errorf("an entry of kind %d", tag)
		}
		alias := text()
		next(8) // time
		if kind := text(); kind != "X.509" {
			return nil, fmt.Errorf("a certificate of kind %q", kind)
		}
		entries[alias] = bytes.Clone(next(number()))
	}
	if len(body) > 0 {
		return nil, fmt.Errorf("%d bytes are left", len(body))
	}
	return entries, nil
}

func TestJKS(t *testing.T) {
	p := testPlanner(t)
	b, err := p.withStore(stored(t, "changeit.jks"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := readJKS(b)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || !bytes.Equal(got["guest"], der(stored(t, "guest.pem"))) || !bytes.Equal(got["sandboxd"], der(ca)) {
		t.Errorf("the entries are %x", got)
	}
}

// parts are the parts of a PKCS #12, and whether something follows them.
func parts(b []byte) (all []contentInfo, more bool, err error) {
	var outer struct {
		Version int
		Safe    struct {
			Type   asn1.ObjectIdentifier
			Octets []byte `asn1:"explicit,tag:0"`
		}
		More asn1.RawValue `asn1:"optional"`
	}
	if rest, err := asn1.Unmarshal(b, &outer); err != nil || len(rest) > 0 || outer.Version != 3 {
		return nil, false, fmt.Errorf("version %d, %d bytes are left, %w", outer.Version, len(rest), err)
	}
	rest, err := asn1.Unmarshal(outer.Safe.Octets, &all)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%d bytes are left", len(rest))
	}
	return all, len(outer.More.FullBytes) > 0, err
}

// encrypted is a store with an encrypted part.
const encrypted = "encrypted.p12 without its MAC"

func TestPKCS12(t *testing.T) {
	p := testPlanner(t)
	for _, name := range []string{"open.p12", encrypted} {
		before, _, err := parts(stored(t, name))
		if err != nil {
			t.Fatal(err)
		}
		b, err := p.withStore(stored(t, name))
		if err != nil {
			t.Fatal(err)
		}
		after, mac, err := parts(b)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(after) != len(before)+1 || mac {
			t.Fatalf("%s: %d parts, before %d, a MAC %v", name, len(after), len(before), mac)
		}
		for i := range before {
			if !bytes.Equal(after[i].Content.FullBytes, before[i].Content.FullBytes) || !after[i].Type.Equal(before[i].Type) {
				t.Errorf("%s: part %d has changed", name, i)
			}
		}
		last := after[len(before)]
		var bags []struct {
			Kind asn1.ObjectIdentifier
			Cert struct {
				Kind asn1.ObjectIdentifier
				DER  []byte `asn1:"explicit,tag:0"`
			} `asn1:"explicit,tag:0"`
			Attributes []struct {
				Kind   asn1.ObjectIdentifier
				Values []asn1.RawValue `asn1:"set"`
			} `asn1:"set"`
		}
		if rest, err := asn1.Unmarshal(octetsOf(t, last), &bags); err != nil || len(rest) > 0 || len(bags) != 1 {
			t.Fatalf("%s: %d bags, %d bytes are left, %v", name, len(bags), len(rest), err)
		}
		if !bytes.Equal(bags[0].Cert.DER, der(ca)) || len(bags[0].Attributes) != 2 {
			t.Errorf("%s: the bag is %+v", name, bags[0])
		}
	}
}

// TestStrangeStores: a store that cannot be extended is left, and the reason says why.
func TestStrangeStores(t *testing.T) {
	p := testPlanner(t)
	jks, p12 := stored(t, "changeit.jks"), stored(t, "open.p12")
	signed := asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 7, 2}
	sum := func(body []byte) []byte { s := jksSum(body); return append(bytes.Clone(body), s[:]...) }
	for what, c := range map[string]struct {
		store []byte
		why   string
	}{
		"empty":                     {nil, "neither"},
		"PEM":                       {ca, "neither"},
		"JCEKS":                     {append([]byte{0xce, 0xce, 0xce, 0xce}, jks[4:]...), "neither"},
		"version 1":                 {append([]byte{0xfe, 0xed, 0xfe, 0xed, 0, 0, 0, 1}, jks[8:]...), "neither"},
		"only the head":             {jks[:8], "half a JKS"},
		"another password":          {stored(t, "secret.jks"), `its password is not "changeit"`},
		"damaged":                   {append([]byte(nil), append(jks[:40:40], jks[41:]...)...), "damaged"},
		"cut off":                   {jks[:len(jks)-1], "damaged"},
		"no room to count":          {sum(append(bytes.Clone(jksHead[:]), 0xff, 0xff, 0xff, 0xff)), "impossible number"},
		"a PKCS #12 with a MAC":     {stored(t, "encrypted.p12"), "with a MAC"},
		"a PKCS #12, cut off":       {p12[:len(p12)-1], "read a PKCS #12"},
		"a PKCS #12 and more":       {append(bytes.Clone(p12), 0), "something stands behind it"},
		"a certificate":             {der(ca), "read a PKCS #12"},
		"a PKCS #12 without length": {[]byte{0x30, 0x80, 2, 1, 3, 0, 0}, "read a PKCS #12"},
		"a PKCS #12 that is signed": {bytes.Replace(p12, oid(oidData), oid(signed), 1), "signed"},
		"version 4":                 {bytes.Replace(p12, []byte{2, 1, 3}, []byte{2, 1, 4}, 1), "another version"},
		"lengths within lengths":    {bytes.Repeat([]byte{0x30, 0x84, 0x7f, 0xff, 0xff, 0xff}, 1000), "read a PKCS #12"},
		"no parts": {
			tlv(0x30, tlv(2, []byte{3}), tlv(0x30, oid(oidData), tlv(0xa0, tlv(4, tlv(0x31, p12[:0]))))), "not the parts",
		},
	} {
		if _, err := p.withStore(c.store); err == nil || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v, want %q", what, err, c.why)
		}
	}
}

// FuzzStore: a store that is extended has all that it had, and the authority behind it.
func FuzzStore(f *testing.F) {
	for _, name := range []string{"changeit.jks", "secret.jks", "open.p12", "encrypted.p12", encrypted, "guest.pem"} {
		f.Add(stored(f, name))
	}
	f.Add(bytes.Repeat([]byte{0x30, 0x84, 0x7f, 0xff, 0xff, 0xff}, 10))
	p := testPlanner(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > len(jksHead)+sha1.Size && bytes.HasPrefix(b, jksHead[:]) { // no fuzzer finds a SHA-1
			s := jksSum(b[:len(b)-sha1.Size])
			b = append(bytes.Clone(b[:len(b)-sha1.Size]), s[:]...)
		}
		out, err := p.withStore(b)
		if err != nil {
			return
		}
		if len(out) > len(b)+4096 {
			t.Fatalf("%d bytes have become %d", len(b), len(out))
		}
		if bytes.HasPrefix(b, jksHead[:]) {
			before, err := readJKS(b)
			if err != nil {
				return // no JVM reads it, before or after
			}
			after, err := readJKS(out)
			if err != nil || !bytes.Equal(after["sandboxd"], der(ca)) {
				t.Fatalf("%x: a JKS is read as %x, %v", b, after, err)
			}
			for alias, cert := range before {
				if alias != "sandboxd" && !bytes.Equal(after[alias], cert) {
					t.Fatalf("%x: entry %q was lost", b, alias)
				}
			}
			return
		}
		before, had, berr := parts(b)
		after, mac, err := parts(out)
		if had {
			t.Fatalf("%x: a store with a MAC has been changed", b)
		}
		if berr != nil {
			return // what it had was no list of parts, and is not one now
		}
		if err != nil || mac || len(after) != len(before)+1 {
			t.Fatalf("%x: %d parts have become %d, %v", b, len(before), len(after), err)
		}
		for i := range before {
			if !bytes.Equal(before[i].Content.FullBytes, after[i].Content.FullBytes) {
				t.Fatalf("%x: part %d has changed", b, i)
			}
		}
	})
}
