package e2e_test

import (
	"cmp"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// An authority signs certificates for 127.0.0.1 and the names below a domain.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	made int
	ends time.Duration // from now on, of the certificates that it signs; an hour if zero
}

// domain is where sandboxes have names of their own; no resolver knows it.
const domain = "sandboxes.test"

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.cert, a.key = a.issue("an authority of a test", nil)
	a.write("ca.pem", a.cert, nil)
	return a
}

func (a *authority) issue(name string, parent *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	a.made++
	c := &x509.Certificate{
		SerialNumber: big.NewInt(int64(a.made)), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(cmp.Or(a.ends, time.Hour)),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{domain, "*." + domain},
		IsCA: parent == nil, BasicConstraintsValid: true,
	}
	signer := a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	if c, err = x509.ParseCertificate(der); err != nil {
		a.t.Fatal(err)
	}
	return c, key
}

// write puts a certificate, or a key, into a file of the authority's directory at once.
func (a *authority) write(name string, c *x509.Certificate, key *ecdsa.PrivateKey) {
	a.t.Helper()
	block := &pem.Block{Type: "CERTIFICATE"}
	if c != nil {
		block.Bytes = c.Raw
	} else {
		b, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			a.t.Fatal(err)
		}
		block = &pem.Block{Type: "PRIVATE KEY", Bytes: b}
	}
	tmp := filepath.Join(a.dir, name+".tmp")
	if err := os.WriteFile(tmp, pem.EncodeToMemory(block), 0o600); err != nil {
		a.t.Fatal(err)
	}
	if err := os.Rename(tmp, filepath.Join(a.dir, name)); err != nil {
		a.t.Fatal(err)
	}
}

// serve writes another certificate called name into the files of the daemon.
func (a *authority) serve(name string) {
	a.t.Helper()
	c, key := a.issue(name, a.cert)
	a.write("tls.crt", c, nil)
	a.write("tls.key", nil, key)
}

func (a *authority) config() []string {
	return []string{
		fmt.Sprintf("tls_cert = %q", filepath.Join(a.dir, "tls.crt")),
		fmt.Sprintf("tls_key = %q", filepath.Join(a.dir, "tls.key")),
	}
}

// client trusts the authority and connects to addr whatever the URL says.
func (a *authority) client(addr string) *http.Client {
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	c := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true, DialContext: dialAlways(addr),
	}}
	a.t.Cleanup(c.CloseIdleConnections)
	return c
}

// TestTLS serves the API and the metrics by TLS, and renews the certificate while
// the daemon runs: well, half way, and not at all.
func TestTLS(t *testing.T) {
	ca := newAuthority(t)
	ca.serve("one")
	metrics := hosttest.FreePort(t).String()
	h := newHost(t, daemontest.Options{Listen: append(ca.config(), fmt.Sprintf("metrics = %q", metrics))})
	https := ca.client(h.TCP)
	health := func() (name, warning string) {
		t.Helper()
		resp, err := https.Get("https://" + h.TCP + "/health")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var a struct{ Status, Warning string }
		if err := json.NewDecoder(resp.Body).Decode(&a); err != nil || resp.StatusCode != 200 || a.Status != "healthy" {
			t.Fatalf("%s %+v, %v", resp.Status, a, err)
		}
		return resp.TLS.PeerCertificates[0].Subject.CommonName, a.Warning
	}
	if name, warning := health(); name != "one" || warning != "" {
		t.Errorf("serves %s, warns %q", name, warning)
	}
	resp, err := ca.client(metrics).Get("https://" + metrics + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, resp.Body) //nolint:errcheck // the status counts
	if resp.Body.Close(); resp.StatusCode != 200 {
		t.Errorf("metrics: %s", resp.Status)
	}

	ca.serve("two")
	if name, warning := health(); name != "two" || warning != "" {
		t.Errorf("after renewal: serves %s, warns %q", name, warning)
	}
	c, _ := ca.issue("three", ca.cert)
	ca.write("tls.crt", c, nil) // without its key
	if name, warning := health(); name != "two" || !strings.Contains(warning, "certificate") || strings.Contains(warning, ca.dir) {
		t.Errorf("with a bad one: serves %s, warns %q", name, warning)
	}
	h.logged(t, time.Time{}, "a new certificate cannot be used")

	ctl := func(host, roots string, args ...string) (string, error) {
		cmd := exec.Command(daemontest.Bin("sandboxctl"), append([]string{"--host", host}, args...)...)
		cmd.Env = append(os.Environ(), "OPEN_SANDBOX_API_KEY="+daemontest.Key, "SSL_CERT_FILE="+roots)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	pem := filepath.Join(ca.dir, "ca.pem")
	for _, runtime := range runtimes { // output and a terminal's WebSocket, too
		out, err := ctl("https://"+h.TCP, pem, "run", "--rm", "--runtime", runtime, "base", "--", "echo", "by TLS")
		if err != nil || out != "by TLS\n" {
			t.Errorf("run on %s: %q, %v", runtime, out, err)
		}
	}
	for host, want := range map[string]string{"https://" + h.TCP: "SSL_CERT_FILE", "tcp://" + h.TCP: "https://"} {
		if out, err := ctl(host, "/dev/null", "ps"); err == nil || !strings.Contains(out, want) {
			t.Errorf("%s without trust: %q, %v", host, out, err)
		}
	}
}
