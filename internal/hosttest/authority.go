package hosttest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"time"
)

// An Authority signs certificates for a test.
type Authority struct {
	Cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority makes an Authority whose own certificate has that name, and holds for an hour.
func NewAuthority(name string) *Authority {
	a := &Authority{key: must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a.Cert = must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, c, c, &a.key.PublicKey, a.key))))
	return a
}

// Issue makes a certificate, with a key of its own, for servers and clients of that name, which
// may begin with "*.". It holds until end, which may be past.
func (a *Authority) Issue(name string, end time.Time) tls.Certificate {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	c := &x509.Certificate{
		SerialNumber: big.NewInt(2), DNSNames: []string{name}, NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: end,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der := must(x509.CreateCertificate(rand.Reader, c, a.Cert, &key.PublicKey, a.key))
	return tls.Certificate{Certificate: [][]byte{der, a.Cert.Raw}, PrivateKey: key}
}

// Pool trusts the Authority alone.
func (a *Authority) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.Cert)
	return p
}

// PEM is the Authority's own certificate.
func (a *Authority) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Cert.Raw})
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
