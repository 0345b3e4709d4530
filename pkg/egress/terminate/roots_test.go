package terminate

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// TestHostRoots: the first file and all directories count, each certificate once; what is no
// certificate does not; and a host without any says what to install.
func TestHostRoots(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, parts ...[]byte) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, bytes.Join(parts, []byte("words between\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	a, b, c := hosttest.NewAuthority("a"), hosttest.NewAuthority("b"), hosttest.NewAuthority("c")
	key := []byte("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
	files, dirs := rootFiles, rootDirs
	t.Cleanup(func() { rootFiles, rootDirs = files, dirs })
	t.Setenv("SSL_CERT_FILE", "")
	t.Setenv("SSL_CERT_DIR", "")
	rootFiles = []string{filepath.Join(dir, "absent"), write("bundle.pem", a.PEM(), key, b.PEM()), write("second.pem", c.PEM())}
	rootDirs = []string{filepath.Join(dir, "none"), filepath.Dir(write("certs/b.pem", b.PEM()))}
	if err := os.Mkdir(filepath.Join(dir, "certs", "directory"), 0o700); err != nil {
		t.Fatal(err)
	}
	want := func(all ...*hosttest.Authority) {
		t.Helper()
		got, err := HostRoots()
		if err != nil {
			t.Fatal(err)
		}
		pool := x509.NewCertPool()
		for _, i := range all {
			pool.AddCert(i.Cert)
		}
		read := x509.NewCertPool()
		if n := strings.Count(string(got), "BEGIN"); !read.AppendCertsFromPEM(got) || !read.Equal(pool) || n != len(all) {
			t.Errorf("%d blocks, want the %d certificates:\n%s", n, len(all), got)
		}
	}
	want(a, b)
	t.Setenv("SSL_CERT_FILE", filepath.Join(dir, "second.pem"))
	want(c, b)
	t.Setenv("SSL_CERT_DIR", filepath.Join(dir, "none"))
	want(c)
	t.Setenv("SSL_CERT_FILE", write("empty.pem", key))
	if got, err := HostRoots(); err == nil || !strings.Contains(err.Error(), "ca-certificates") {
		t.Errorf("without a certificate: %q, %v", got, err)
	}
	many := make([][]byte, 0, maxRoots/500)
	for len(many) < cap(many) {
		one := a.Cert.Raw
		der := append(one[:len(one):len(one)], byte(len(many)), byte(len(many)>>8))
		many = append(many, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	}
	t.Setenv("SSL_CERT_FILE", write("1.pem", many[:len(many)/2]...))
	t.Setenv("SSL_CERT_DIR", filepath.Dir(write("more/2.pem", many[len(many)/2:]...)))
	if got, err := HostRoots(); err == nil || !strings.Contains(err.Error(), "do not belong there") {
		t.Errorf("with %d bytes: %d bytes, %v", len(bytes.Join(many, nil)), len(got), err)
	}
}
