// Package authority is the certificate authority of one sandbox. Its leafs let the child
// terminate answer TLS in the place of the hosts that a policy inspects.
//
//	New ──▶ Authority ── Certificate ──▶ the guest's stores (pkg/oci/trust)
//	         │   ▲  └──── Leaf(name) ──▶ certificate and key ──▶ the child, which keeps them
//	  Encode ▼   │ Decode
//	      sealed storage
//
// Nobody but that one guest trusts it, and its key never enters the guest. So a stolen key
// lets its thief read the connections of one sandbox, and no others.
//
// The surprise: it has no name constraints, although the hosts are known. A policy changes
// while the guest runs, and the certificate would have to change with it, in stores that
// running programs have read already. Nor would they hold everywhere: Go and OpenSSL apply
// the constraints of a root, and Java does not, because a trust anchor is only a name and a
// key (RFC 5280, section 6.1.1 (d)). A wildcard of a policy has no form among them either: a
// constraint on a name includes the name itself (section 4.2.1.10).
package authority

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const (
	// life is how long an authority is good. A guest learns of a new one only at a start,
	// and sandboxes run for months.
	life = 365 * 24 * time.Hour
	// lag is how far the clock may be behind. A guest has the clock of its host, and a host
	// may set that back when it first reaches a time server.
	lag = time.Hour
)

// An Authority signs leafs for one sandbox. Its methods may be called concurrently.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	// leafKey is the key of all leafs. Keys of their own would keep nothing apart: all of
	// them are in one child. It is not stored: each New and each Decode draws one.
	leafKey *ecdsa.PublicKey
	leafDER []byte // the private key, as PKCS #8
	leafKID []byte
}

// New makes the authority of a sandbox. It is valid for a year from now.
func New(id string, now time.Time) (*Authority, error) {
	if !record.IsID(id) {
		return nil, fmt.Errorf("make a certificate authority for %q: not the ID of a sandbox", id)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the certificate authority of %s: %w", id, err)
	}
	// Without a serial number of ours, x509 draws one of 20 bytes. It also adds the subject
	// key identifier, which strict verifiers want in a CA.
	c := &x509.Certificate{
		Subject:   pkix.Name{CommonName: "sandboxd " + id},
		NotBefore: now.Add(-lag), NotAfter: now.Add(life),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("make the certificate authority of %s: %w", id, err)
	}
	return load(der, key)
}

// load makes an Authority of a certificate and its key, and draws the key of its leafs.
func load(der []byte, key *ecdsa.PrivateKey) (*Authority, error) {
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read the certificate of an authority: %w", err)
	}
	if !cert.IsCA || cert.KeyUsage&x509.KeyUsageCertSign == 0 || !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("the certificate of %s is not that of an authority, or not of its key", cert.Subject)
	}
	a := &Authority{cert: cert, key: key}
	leafKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err == nil {
		a.leafKey = &leafKey.PublicKey
		a.leafDER, err = x509.MarshalPKCS8PrivateKey(leafKey)
	}
	if err == nil {
		a.leafKID, err = keyID(a.leafKey)
	}
	if err != nil {
		return nil, fmt.Errorf("make a key for leafs of %s: %w", cert.Subject, err)
	}
	return a, nil
}

// Certificate is the certificate as the guest gets it: one block of PEM.
func (a *Authority) Certificate() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: certificateBlock, Bytes: a.cert.Raw})
}

// NotAfter is when it ends. No leaf is valid for longer.
func (a *Authority) NotAfter() time.Time { return a.cert.NotAfter }

// Due reports whether a start of the sandbox should make a new one: less than half of its
// life is left, or the clock was set back to before its life began. A guest learns of a new
// one only at a start.
func (a *Authority) Due(now time.Time) bool {
	return now.Before(a.cert.NotBefore) || a.cert.NotAfter.Sub(now) < life/2
}

// Blocks of PEM.
const (
	certificateBlock = "CERTIFICATE"
	keyBlock         = "PRIVATE KEY" // PKCS #8
)

// Encode returns the certificate and the key as PEM, for a place where nobody else reads
// them. Whoever has them can sign for any name that this sandbox asks for.
func (a *Authority) Encode() ([]byte, error) {
	k, err := x509.MarshalPKCS8PrivateKey(a.key)
	if err != nil {
		return nil, fmt.Errorf("encode the key of the authority %s: %w", a.cert.Subject, err)
	}
	return append(a.Certificate(), pem.EncodeToMemory(&pem.Block{Type: keyBlock, Bytes: k})...), nil
}

// Decode reads what Encode has written. No error has any of the bytes in it: they may be a
// key.
func Decode(b []byte) (*Authority, error) {
	errForm := errors.New("read a certificate authority: not a certificate and its key, as PEM")
	c, rest := pem.Decode(b)
	if c == nil || c.Type != certificateBlock {
		return nil, errForm
	}
	k, rest := pem.Decode(rest)
	if k == nil || k.Type != keyBlock || len(rest) > 0 {
		return nil, errForm
	}
	parsed, err := x509.ParsePKCS8PrivateKey(k.Bytes)
	if err != nil {
		return nil, errForm
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, errForm
	}
	return load(c.Bytes, key)
}
