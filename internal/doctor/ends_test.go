package doctor

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/image/registry"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestCertificates: a certificate that is good for long is fine, one that ends within 30 days a
// warning, one that has ended or cannot be read a failure.
func TestCertificates(t *testing.T) {
	const day = 24 * time.Hour
	began := time.Date(2027, 3, 1, 0, 0, 0, 0, time.UTC)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(life time.Duration) string {
		t.Helper()
		c := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: began, NotAfter: began.Add(life)}
		der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "cert.pem")
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	h := newTree(t, nil)
	h.cfg.Listen.TLSCert = issue(365 * day)
	h.cfg.Registries = []registry.Registry{{CA: issue(400 * day)}}
	keys := []record.Key{{Name: "ci", Created: began, Expires: began.Add(380 * day)}}
	for after, want := range map[time.Duration]struct {
		status Status
		words  string
	}{
		100 * day:              {OK, "of 3, the first ends at 2028-02-29"},
		335*day - time.Second:  {OK, "of 3"},
		335 * day:              {Warn, "(listen.tls_cert) ends in 30 days"},
		355 * day:              {Warn, "API key ci ends in 25 days"},
		365*day + 47*time.Hour: {Fail, "(listen.tls_cert) ended 47 h ago"},
		390 * day:              {Fail, "(registries.ca) ends in 10 days"},
	} {
		h.now = func() time.Time { return began.Add(after) }
		f := h.certificates(keys, "")
		if f.Status != want.status || !strings.Contains(f.Detail, want.words) || (f.Mend == "") != (f.Status == OK) {
			t.Errorf("after %v: %+v; want %v", after, f, want)
		}
	}
	h.now = func() time.Time { return began }
	h.cfg.Gateway.TLSCert = filepath.Join(t.TempDir(), "none.pem")
	if f := h.certificates(nil, ""); f.Status != Fail || !strings.Contains(f.Detail, "gateway.tls_cert") {
		t.Errorf("a file that is missing: %+v", f)
	}
	f := newTree(t, nil).certificates(nil, "; API keys are unknown")
	if f.Status != OK || !strings.Contains(f.Detail, "API keys are unknown") {
		t.Errorf("without any: %+v", f)
	}
}
