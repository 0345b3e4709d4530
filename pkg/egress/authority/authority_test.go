package authority

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

const id = "rabcdefghijk"

func newAuthority(t testing.TB) *Authority {
	t.Helper()
	a, err := New(id, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// leaf is a leaf of a for name, as a server has it.
func (a *Authority) leaf(t testing.TB, name string, now time.Time) *tls.Certificate {
	t.Helper()
	cert, key, err := a.Leaf(name, now)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.ParsePKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(cert)
	if err != nil {
		t.Fatal(err)
	}
	if !k.(*ecdsa.PrivateKey).PublicKey.Equal(c.PublicKey) {
		t.Fatalf("the leaf of %s and the key are not a pair", name)
	}
	return &tls.Certificate{Certificate: [][]byte{cert}, PrivateKey: k, Leaf: c}
}

func TestNew(t *testing.T) {
	now := time.Date(2026, 11, 26, 9, 0, 0, 0, time.UTC)
	a, err := New(id, now)
	if err != nil {
		t.Fatal(err)
	}
	c := a.cert
	if err := c.CheckSignature(c.SignatureAlgorithm, c.RawTBSCertificate, c.Signature); err != nil {
		t.Errorf("not signed by itself: %v", err)
	}
	pub, ok := c.PublicKey.(*ecdsa.PublicKey)
	if !ok || pub.Curve != elliptic.P256() || c.SignatureAlgorithm != x509.ECDSAWithSHA256 {
		t.Errorf("the key is a %T, the signature %v", c.PublicKey, c.SignatureAlgorithm)
	}
	if !c.IsCA || c.MaxPathLen != 0 || !c.MaxPathLenZero || c.KeyUsage != x509.KeyUsageCertSign || len(c.SubjectKeyId) == 0 {
		t.Errorf("CA %v, path length %d, key usage %b, key id %x", c.IsCA, c.MaxPathLen, c.KeyUsage, c.SubjectKeyId)
	}
	if c.Subject.String() != "CN=sandboxd "+id || c.Issuer.String() != c.Subject.String() {
		t.Errorf("subject %s, issuer %s", c.Subject, c.Issuer)
	}
	if from, to := now.Add(-time.Hour), now.AddDate(1, 0, 0); !c.NotBefore.Equal(from) || !a.NotAfter().Equal(to) {
		t.Errorf("valid from %s to %s", c.NotBefore, a.NotAfter())
	}
	if n := c.SerialNumber; n.Sign() <= 0 || n.BitLen() < 64 {
		t.Errorf("serial number %x", n)
	}
	for after, due := range map[time.Duration]bool{
		0: false, 180 * 24 * time.Hour: false, 190 * 24 * time.Hour: true, 2 * life: true,
		-time.Hour: false, -time.Hour - time.Second: true, // the clock was set back
	} {
		if got := a.Due(now.Add(after)); got != due {
			t.Errorf("due after %s: %v", after, got)
		}
	}
	other, err := New(id, now)
	if err != nil {
		t.Fatal(err)
	}
	if other.cert.SerialNumber.Cmp(c.SerialNumber) == 0 || other.key.Equal(a.key) {
		t.Error("two authorities share their serial number or key")
	}
	for _, bad := range []string{"", "lab", id + "x", "rABCDEFGHIJK", "r/../defghijk"} {
		if _, err := New(bad, now); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", bad)) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestLeaf: Go's verifier takes a leaf for its name, and for nothing else.
func TestLeaf(t *testing.T) {
	a, other := newAuthority(t), newAuthority(t)
	long := strings.Repeat(strings.Repeat("a", 60)+".", 4) + "example" // 251 characters
	for _, name := range []string{"api.example.com", "a.b.c.d.example.com", "_service.example.com", "xn--bcher-kva.example", long} {
		c := a.leaf(t, name, time.Now())
		roots, wrong := x509.NewCertPool(), x509.NewCertPool()
		if !roots.AppendCertsFromPEM(a.Certificate()) || !wrong.AppendCertsFromPEM(other.Certificate()) {
			t.Fatal("Certificate is no certificate as PEM")
		}
		if _, err := c.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: name}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := c.Leaf.Verify(x509.VerifyOptions{Roots: wrong, DNSName: name}); err == nil {
			t.Errorf("%s: the authority of another sandbox vouches for it", name)
		}
		for _, bad := range []string{"example.com", "x." + name, "example.net", "192.0.2.1"} {
			if _, err := c.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: bad}); err == nil {
				t.Errorf("the leaf of %s is valid for %s", name, bad)
			}
		}
		client := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		if _, err := c.Leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: client}); err == nil {
			t.Errorf("%s: it can be used by a client", name)
		}
		// A leaf signs no other certificate.
		if c.Leaf.IsCA || c.Leaf.KeyUsage != x509.KeyUsageDigitalSignature || len(c.Leaf.SubjectKeyId) == 0 ||
			!bytes.Equal(c.Leaf.AuthorityKeyId, a.cert.SubjectKeyId) || bytes.Equal(c.Leaf.SubjectKeyId, c.Leaf.AuthorityKeyId) {
			t.Errorf("%s: CA %v, key usage %b, key id %x, of its issuer %x", name, c.Leaf.IsCA, c.Leaf.KeyUsage, c.Leaf.SubjectKeyId,
				c.Leaf.AuthorityKeyId)
		}
		if got := c.Leaf.Subject.CommonName; got != name && (name != long || got != "") {
			t.Errorf("%s: the common name is %q", name, got)
		}
	}
}

// TestStrangeNames: what is no name gets no leaf.
func TestStrangeNames(t *testing.T) {
	a := newAuthority(t)
	for _, bad := range []string{
		"", ".", "example.com.", "Example.com", "*.example.com", "*", "a..example.com", "-a.example.com", "bücher.example", "192.0.2.1",
		"127.1", "0x7f.0.0.0x1", "::1", "[::1]", "2001:db8::1", "example.com:443", "localhost", "a b.example", "a\x00.example.com",
		"example.com\n", strings.Repeat("a.", 130) + "com", strings.Repeat("a", 64) + ".com", strings.Repeat("x", 1<<20),
	} {
		cert, key, err := a.Leaf(bad, time.Now())
		if err == nil || cert != nil || key != nil || !strings.Contains(err.Error(), "not a domain name") || len(err.Error()) > 500 {
			t.Errorf("%.100q: %v", bad, err)
		}
	}
}

// TestTimes: a leaf is valid when it is made, and never outside of the life of its authority.
// Where there is none, a restart helps, as the error says: the authority is due for a new one.
func TestTimes(t *testing.T) {
	start := time.Date(2026, 11, 26, 9, 0, 0, 0, time.UTC)
	a, err := New(id, start)
	if err != nil {
		t.Fatal(err)
	}
	const day = 24 * time.Hour
	for after, want := range map[time.Duration][2]time.Duration{ // from when to when, after start
		0:                  {-time.Hour, 7 * day},
		-30 * time.Minute:  {-time.Hour, 7*day - 30*time.Minute},
		100 * day:          {100*day - time.Hour, 107 * day},
		life - day:         {life - day - time.Hour, life},
		life - time.Second: {life - time.Hour - time.Second, life},
	} {
		c := a.leaf(t, "example.com", start.Add(after)).Leaf
		if got := [2]time.Duration{c.NotBefore.Sub(start), c.NotAfter.Sub(start)}; got != want {
			t.Errorf("after %s: valid from %s to %s, want %s", after, got[0], got[1], want)
		}
	}
	for _, after := range []time.Duration{life, life + day, -2 * time.Hour, -3 * life} {
		now := start.Add(after)
		if _, _, err := a.Leaf("example.com", now); err == nil || !strings.Contains(err.Error(), "restart the sandbox") {
			t.Errorf("after %s: %v", after, err)
		}
		if !a.Due(now) {
			t.Errorf("after %s there are no leafs, and a restart makes no new authority", after)
			continue
		}
		next, err := New(id, now)
		if err != nil {
			t.Fatal(err)
		}
		next.leaf(t, "example.com", now)
	}
}

// TestEncode: what was stored vouches for what it signs later.
func TestEncode(t *testing.T) {
	a := newAuthority(t)
	b, err := a.Encode()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(again.Certificate(), a.Certificate()) {
		t.Error("another certificate")
	}
	if b2, err := again.Encode(); err != nil || !bytes.Equal(b, b2) {
		t.Errorf("encoded again it is another (%v)", err)
	}
	if err := handshake(t, again.leaf(t, "example.com", time.Now()), a, "example.com"); err != nil {
		t.Error(err)
	}
}

// TestDecodeBad: what cannot be used is refused, and no error has a key in it.
func TestDecodeBad(t *testing.T) {
	a := newAuthority(t)
	b, err := a.Encode()
	if err != nil {
		t.Fatal(err)
	}
	other, err := newAuthority(t).Encode()
	if err != nil {
		t.Fatal(err)
	}
	leaf, leafKey, err := a.Leaf("example.com", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	block := func(kind string, der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}) }
	cert, key := a.Certificate(), b[len(a.Certificate()):]
	otherKey := other[bytes.Index(other, []byte("-----BEGIN PRIVATE")):]
	for what, bad := range map[string][]byte{
		"nothing": nil, "no PEM": []byte("hello"), "a certificate only": cert, "a key only": key,
		"the other way around": slices.Concat(key, cert),
		"half":                 b[:len(b)-40], "more behind it": append(bytes.Clone(b), 'x'), "two": append(bytes.Clone(b), b...),
		"the key of another": append(bytes.Clone(cert), otherKey...),
		"no certificate":     append(block(certificateBlock, []byte("x")), key...),
		"no key":             append(bytes.Clone(cert), block(keyBlock, []byte("x"))...),
		"a leaf":             append(block(certificateBlock, leaf), block(keyBlock, leafKey)...),
	} {
		if a, err := Decode(bad); err == nil || a != nil || strings.Contains(err.Error(), "BEGIN") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// handshake serves c to a client that trusts a and asks for name.
func handshake(t *testing.T, c *tls.Certificate, a *Authority, name string) error {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(a.Certificate())
	conn, err := tls.Dial("tcp", net.JoinHostPort(hosttest.ServeTLS(t, *c)), &tls.Config{RootCAs: roots, ServerName: name})
	if err != nil {
		return err
	}
	return conn.Close()
}

// A judge is a program that verifies a leaf. It exits with 0 if the leaf is good.
type judge struct {
	name string
	argv func(ca, leaf, host, port, name string) []string
	env  func(ca string) []string
	// A part of what it prints when it finds no authority, and when the name is another: so
	// a judge that fails for a reason of its own is noticed.
	noCA, noName string
}

// judged asks j about good leafs and bad ones.
func judged(t *testing.T, j judge) {
	t.Helper()
	a, other := newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	file := func(name string, b []byte) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	ours, others := file("ca.pem", a.Certificate()), file("other.pem", other.Certificate())
	long := strings.Repeat("a", 60) + "." + strings.Repeat("b", 60) + ".example.com"
	for _, name := range []string{"api.example.com", long} {
		c := a.leaf(t, name, time.Now())
		leaf := file("leaf.pem", pem.EncodeToMemory(&pem.Block{Type: certificateBlock, Bytes: c.Leaf.Raw}))
		host, port := hosttest.ServeTLS(t, *c)
		ask := func(ca, name string) (string, error) {
			argv := j.argv(ca, leaf, host, port, name)
			cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
			if j.env != nil {
				cmd.Env = append(os.Environ(), j.env(ca)...)
			}
			out, err := cmd.CombinedOutput()
			return string(out), err
		}
		if out, err := ask(ours, name); err != nil {
			t.Errorf("%s refuses the leaf of %s: %v\n%s", j.name, name, err, out)
		}
		if out, err := ask(others, name); err == nil || !strings.Contains(out, j.noCA) {
			t.Errorf("%s, with another authority: %v\n%s", j.name, err, out)
		}
		if out, err := ask(ours, "www.example.com"); err == nil || !strings.Contains(out, j.noName) {
			t.Errorf("%s, for another name than %s: %v\n%s", j.name, name, err, out)
		}
	}
}

// TestStrictOpenSSL: openssl finds nothing against RFC 5280.
func TestStrictOpenSSL(t *testing.T) {
	judged(t, judge{
		"openssl", func(ca, leaf, _, _, name string) []string {
			return []string{
				"openssl", "verify", "-x509_strict", "-no-CApath", "-no-CAstore", "-CAfile", ca, "-purpose", "sslserver",
				"-verify_hostname", name, leaf,
			}
		}, nil, "unable to get local issuer", "hostname mismatch",
	})
}

// TestStrictPython: so do clients in Python, which is strict by default since 3.13.
func TestStrictPython(t *testing.T) {
	const client = `
import socket, ssl, sys
ca, host, port, name = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
context.verify_flags |= ssl.VERIFY_X509_STRICT
with socket.create_connection((host, int(port))) as s, context.wrap_socket(s, server_hostname=name):
    pass
`
	judged(t, judge{
		"python3", func(ca, _, host, port, name string) []string {
			return []string{"python3", "-c", client, ca, host, port, name}
		}, nil, "unable to get local issuer", "Hostname mismatch",
	})
}

func BenchmarkNew(b *testing.B) {
	for b.Loop() {
		if _, err := New(id, time.Now()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLeaf(b *testing.B) {
	a := newAuthority(b)
	for b.Loop() {
		if _, _, err := a.Leaf("example.com", time.Now()); err != nil {
			b.Fatal(err)
		}
	}
}
