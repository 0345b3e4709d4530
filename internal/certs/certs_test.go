package certs

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// issue makes a certificate called name, as PEM.
func issue(t *testing.T, name string, life time.Duration) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(life),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	kb, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kb})
}

func write(t *testing.T, dir string, cert, key []byte) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"tls.crt": cert, "tls.key": key} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// swap has link point to target at once, as certbot and Kubernetes do it.
func swap(t *testing.T, target, link string) {
	t.Helper()
	if err := os.Symlink(target, link+".new"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(link+".new", link); err != nil {
		t.Fatal(err)
	}
}

// served is the name of the certificate that a client is shown.
func served(t *testing.T, p *Pair) string {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", p.Config())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			c.(*tls.Conn).Handshake() //nolint:errcheck // the client's side says it
			c.Close()
		}
	}()
	c, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if p := c.ConnectionState().NegotiatedProtocol; p != "" {
		t.Errorf("speaks %q unasked", p)
	}
	return c.ConnectionState().PeerCertificates[0].Subject.CommonName
}

// TestReload changes the files in the ways that there are.
func TestReload(t *testing.T) {
	dir := t.TempDir()
	// Kubernetes: tls.crt → ..data/tls.crt, ..data → a directory that is swapped.
	c1, k1 := issue(t, "one", time.Hour)
	write(t, filepath.Join(dir, "..2026_1"), c1, k1)
	swap(t, "..2026_1", filepath.Join(dir, "..data"))
	for _, n := range []string{"tls.crt", "tls.key"} {
		swap(t, "..data/"+n, filepath.Join(dir, n))
	}
	var log bytes.Buffer
	p, err := Load(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"), slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	if got := served(t, p); got != "one" || log.Len() > 0 || p.Err() != nil {
		t.Errorf("at first: %s, %v, log %q", got, p.Err(), &log)
	}

	c2, k2 := issue(t, "two", time.Hour)
	write(t, filepath.Join(dir, "..2026_2"), c2, k2)
	swap(t, "..2026_2", filepath.Join(dir, "..data"))
	if got := served(t, p); got != "two" || p.Err() != nil {
		t.Errorf("after the directory was swapped: %s, %v", got, p.Err())
	}

	// One file after the other, by rename, as many scripts do: half way they do
	// not belong together.
	c3, k3 := issue(t, "three", time.Hour)
	rename := func(name string, b []byte) {
		tmp := filepath.Join(dir, name+".tmp")
		if err := os.WriteFile(tmp, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	rename("tls.crt", c3)
	if got := served(t, p); got != "two" || p.Err() == nil || !strings.Contains(p.Err().Error(), "tls.crt") {
		t.Errorf("half way: %s, %v", got, p.Err())
	}
	rename("tls.key", k3)
	if got := served(t, p); got != "three" || p.Err() != nil {
		t.Errorf("after both were renamed: %s, %v", got, p.Err())
	}

	// Bad ones change nothing, and are told once each.
	old, oldKey := issue(t, "expired", -time.Minute)
	for what, bad := range map[string][2][]byte{
		"no PEM": {[]byte("hello"), k3}, "empty": {nil, nil}, "half": {c3[:len(c3)/2], k3},
		"expired": {old, oldKey},
	} {
		log.Reset()
		rename("tls.key", bad[1])
		rename("tls.crt", bad[0])
		for range 3 {
			if got := served(t, p); got != "three" || p.Err() == nil {
				t.Errorf("%s: %s, %v", what, got, p.Err())
			}
		}
		if n := strings.Count(log.String(), "level=ERROR"); n != 1 {
			t.Errorf("%s was told %d times: %s", what, n, &log)
		}
	}
	log.Reset()
	if err := os.Remove(filepath.Join(dir, "tls.crt")); err != nil {
		t.Fatal(err)
	}
	if got := served(t, p); got != "three" || p.Err() == nil {
		t.Errorf("removed: %s, %v", got, p.Err())
	}
	rename("tls.key", k1)
	rename("tls.crt", c1)
	if got := served(t, p); got != "one" || p.Err() != nil {
		t.Errorf("good again: %s, %v", got, p.Err())
	}
	// In place, with the same length and within one tick of the clock: seen at
	// the latest when it is tried again.
	if err := os.WriteFile(filepath.Join(dir, "tls.crt"), bytes.Repeat([]byte("x"), len(c1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if p.Err() == nil {
		t.Error("what was written in place was not seen")
	}
}

// TestReloadWithinTick: a file that is written again in place, with the same length and before the clock of
// its file system goes on, looks as it did when it was read.
func TestReloadWithinTick(t *testing.T) {
	dir := t.TempDir()
	old, key := issue(t, "one", time.Hour)
	write(t, dir, old, key)
	cert := filepath.Join(dir, "tls.crt")
	var log bytes.Buffer
	p, err := Load(cert, filepath.Join(dir, "tls.key"), slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(cert, bytes.Repeat([]byte("x"), len(old)), 0o600); err != nil {
		t.Fatal(err)
	}
	// As a coarse clock has it: the change that was read and the later one have one time.
	p.seen[0] = look(cert)
	p.read = time.Unix(p.seen[0].ctime.Unix()).Add(time.Millisecond)
	for range 3 {
		if got := served(t, p); got != "one" || p.Err() == nil {
			t.Errorf("what was written in place was not seen: %s, %v", got, p.Err())
		}
	}
	if err := os.WriteFile(cert, old, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if got := served(t, p); got != "one" || p.Err() != nil {
			t.Errorf("then: %s, %v", got, p.Err())
		}
	}
	if text := log.String(); strings.Count(text, "level=ERROR") != 1 || strings.Count(text, "level=INFO") != 1 {
		t.Errorf("one error and its end are not told once each: %s", text)
	}
}

func first(a, _ []byte) []byte  { return a }
func second(_, b []byte) []byte { return b }

// TestLoad: a daemon does not start with what it cannot serve.
func TestLoad(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, first(issue(t, "a", time.Hour)), second(issue(t, "b", time.Hour)))
	for _, cert := range []string{filepath.Join(dir, "tls.crt"), filepath.Join(dir, "none.crt")} {
		if _, err := Load(cert, filepath.Join(dir, "tls.key"), slog.Default()); err == nil || !strings.Contains(err.Error(), cert) {
			t.Errorf("%s: %v", cert, err)
		}
	}
	c, k := issue(t, "old", -time.Minute)
	write(t, dir, c, k)
	p, err := Load(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"), slog.Default())
	if err != nil {
		t.Fatal(err) // a clock that is not set yet must not keep a daemon from starting
	}
	if err := p.Err(); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Errorf("an expired one: %v", err)
	}
}
