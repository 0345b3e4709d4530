package authority

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/policy"
)

const (
	// leafLife is how long a leaf is valid. The child serves it until shortly before its end,
	// and asks for the next one then.
	leafLife = 7 * 24 * time.Hour
	// maxCommonName is the most that X.520 allows (RFC 5280, appendix A.1). Clients read the
	// name from the extension SAN.
	maxCommonName = 64
)

// Leaf makes the certificate by which name is answered to the guest: cert in DER, and its key
// as PKCS #8 in DER. It is valid at now, and never outside of the life of its authority. The
// guest has the authority's own certificate, so the leaf is the whole chain.
//
// name is a domain name as policy.NormalName returns it, without a "*": a leaf is for one
// name, and never for an address.
//
// Each call signs, in less than a millisecond (BenchmarkLeaf), and keeps nothing: the child
// keeps leafs. A child that a guest has taken over may ask without end, so the caller bounds
// how many are made at a time. All leafs of an Authority share key; do not change it.
func (a *Authority) Leaf(name string, now time.Time) (cert, key []byte, err error) {
	if cert, err = a.sign(name, now); err != nil {
		return nil, nil, fmt.Errorf("make a certificate for %.100q: %w", name, err)
	}
	return cert, a.leafDER, nil
}

// sign makes a leaf.
func (a *Authority) sign(name string, now time.Time) ([]byte, error) {
	if normal, err := policy.NormalName(name); err != nil || normal != name || strings.HasPrefix(name, "*") {
		return nil, errors.New("not a domain name in lower case and ASCII, without a * and without a dot at its end")
	}
	if now.Before(a.cert.NotBefore) || !now.Before(a.cert.NotAfter) {
		return nil, fmt.Errorf("the authority %s is valid from %s to %s, and it is %s: check the clock of the host, or restart "+
			"the sandbox, which gives it a new one", a.cert.Subject, stamp(a.cert.NotBefore), stamp(a.cert.NotAfter), stamp(now))
	}
	c := &x509.Certificate{
		Subject:   pkix.Name{Organization: []string{"sandboxd"}},
		NotBefore: now.Add(-lag), NotAfter: now.Add(leafLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{name},
		// x509 adds that of the issuer, and this one only to a CA.
		SubjectKeyId: a.leafKID,
	}
	if len(name) <= maxCommonName {
		c.Subject.CommonName = name
	}
	if c.NotBefore.Before(a.cert.NotBefore) {
		c.NotBefore = a.cert.NotBefore
	}
	if c.NotAfter.After(a.cert.NotAfter) {
		c.NotAfter = a.cert.NotAfter
	}
	return x509.CreateCertificate(rand.Reader, c, a.cert, a.leafKey, a.key)
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// keyID is the identifier of a public key: the first 160 bits of its SHA-256 (RFC 7093,
// section 2, method 1).
func keyID(pub *ecdsa.PublicKey) ([]byte, error) {
	b, err := pub.Bytes()
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(b)
	return sum[:20], nil
}
