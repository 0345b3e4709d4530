// Package registrytest has registries for tests: a real one, Debian's docker-registry
// with TLS and a password, and a front that stands before one. The front counts, cuts
// off and falsifies answers.
package registrytest

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/sandboxd/sandboxd/internal/hosttest"
)

// User and Password open a Real registry.
const (
	User     = "robot"
	Password = "open-sesame-4711"
	// from htpasswd -Bbn; 5 rounds, because the registry checks it for each request
	htpasswd = "robot:$2y$05$VsgElmU8lNBE.sy72vvYXOCfXLSvWoW6iXlxQBMVta0AWM..KSLTG\n"
)

// Authority signs certificates for 127.0.0.1.
type Authority struct {
	File string // PEM, as a client wants it
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority makes an Authority.
func NewAuthority(t testing.TB) *Authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority of a test"}, NotAfter: time.Now().AddDate(5, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	must(t, err)
	a := &Authority{File: filepath.Join(t.TempDir(), "ca.pem"), key: key}
	a.cert, err = x509.ParseCertificate(der)
	must(t, err)
	must(t, os.WriteFile(a.File, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644))
	return a
}

// sign returns a certificate for 127.0.0.1 and its key, in PEM.
func (a *Authority) sign(t testing.TB) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "registry of a test"}, NotAfter: time.Now().AddDate(5, 0, 0),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &k.PublicKey, a.key)
	must(t, err)
	kb, err := x509.MarshalPKCS8PrivateKey(k)
	must(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kb})
}

// transport trusts the Authority.
func (a *Authority) transport() *http.Transport {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}
}

// Serve serves h by TLS on loopback and returns host:port.
func (a *Authority) Serve(t testing.TB, h http.Handler) string {
	t.Helper()
	cert, key := a.sign(t)
	pair, err := tls.X509KeyPair(cert, key)
	must(t, err)
	srv := httptest.NewUnstartedServer(h)
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	srv.Config.ErrorLog = nil
	srv.StartTLS()
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	return srv.Listener.Addr().String()
}

// Real is Debian's docker-registry.
type Real struct {
	*Authority
	Addr string // host:port
}

// NewReal starts one, with an empty store. It needs the package docker-registry.
func NewReal(t testing.TB) *Real {
	t.Helper()
	r := &Real{Authority: NewAuthority(t)}
	dir := t.TempDir()
	cert, key := r.sign(t)
	file := func(name string, b []byte) string {
		p := filepath.Join(dir, name)
		must(t, os.WriteFile(p, b, 0o600))
		return p
	}
	r.Addr = hosttest.FreePort(t).String()
	config := fmt.Sprintf(`version: 0.1
log: {accesslog: {disabled: true}, level: error}
storage: {filesystem: {rootdirectory: %s}}
http: {addr: %q, tls: {certificate: %s, key: %s}}
auth: {htpasswd: {realm: test, path: %s}}
`, filepath.Join(dir, "store"), r.Addr, file("cert.pem", cert), file("key.pem", key), file("htpasswd", []byte(htpasswd)))
	cmd := exec.Command("docker-registry", "serve", file("config.yml", []byte(config)))
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(t, cmd.Start())
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-done
		if t.Failed() {
			t.Logf("the registry said:\n%s", said.String())
		}
	})
	client := &http.Client{Transport: r.transport()}
	for range 500 {
		if resp, err := client.Get("https://" + r.Addr + "/v2/"); err == nil {
			resp.Body.Close()
			return r
		}
		select {
		case <-done:
			t.Fatalf("docker-registry ended: %s", said.String())
		case <-time.After(20 * time.Millisecond): // the server can only be polled
		}
	}
	t.Fatalf("docker-registry does not answer: %s", said.String())
	return nil
}

// Push pushes an image or an index as repo:tag.
func (a *Authority) Push(t testing.TB, addr, ref string, what remote.Taggable) {
	t.Helper()
	tag, err := name.NewTag(addr + "/" + ref)
	must(t, err)
	must(t, remote.Push(tag, what, remote.WithTransport(a.transport()),
		remote.WithAuth(authn.FromConfig(authn.AuthConfig{Username: User, Password: Password}))))
}

// Front stands before a registry.
type Front struct {
	*Authority
	Addr string

	mu    sync.Mutex
	asked []string // "GET /v2/… bytes=…"; guarded by mu
	sent  int64    // bytes of answers; guarded by mu
	// Meddle, if not nil, may answer instead of the registry: then it returns true.
	meddle func(w http.ResponseWriter, r *http.Request) bool
	cut    func(r *http.Request) int64
}

// NewFront stands before h.
func NewFront(t testing.TB, a *Authority, h http.Handler) *Front {
	t.Helper()
	f := &Front{Authority: a}
	f.Addr = a.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		meddle, cut := f.meddle, f.cut
		f.asked = append(f.asked, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+r.Header.Get("Range")))
		f.mu.Unlock()
		if meddle != nil && meddle(w, r) {
			return
		}
		left := int64(-1)
		if cut != nil {
			left = cut(r)
		}
		h.ServeHTTP(&counted{ResponseWriter: w, f: f, left: left}, r)
	}))
	return f
}

// Before stands before a Real registry.
func (r *Real) Before(t testing.TB) *Front {
	t.Helper()
	p := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "https", Host: r.Addr})
	p.Transport = r.transport()
	p.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { panic(http.ErrAbortHandler) }
	return NewFront(t, r.Authority, p)
}

// Meddle makes f answer instead of the registry; f returns true if it did.
func (f *Front) Meddle(m func(w http.ResponseWriter, r *http.Request) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.meddle = m
}

// Cut makes the connection end after so many bytes of an answer; below 0: never.
func (f *Front) Cut(after func(r *http.Request) int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut = after
}

// Asked returns how many requests there were whose method and path hold part. It does
// not reset the list.
func (f *Front) Asked(part string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.asked {
		if strings.Contains(a, part) {
			n++
		}
	}
	return n
}

// First returns the first request since Forget whose method, path and range hold part.
func (f *Front) First(part string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.asked {
		if strings.Contains(a, part) {
			return a
		}
	}
	return ""
}

// Sent is how many bytes of answers went through.
func (f *Front) Sent() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sent
}

// Forget resets Asked and Sent.
func (f *Front) Forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked, f.sent = nil, 0
}

// counted counts what is sent, and cuts it off.
type counted struct {
	http.ResponseWriter
	f    *Front
	left int64
}

func (c *counted) Write(p []byte) (int, error) {
	cut := c.left >= 0 && int64(len(p)) >= c.left
	if cut {
		p = p[:c.left]
	}
	n, err := c.ResponseWriter.Write(p)
	c.f.mu.Lock()
	c.f.sent += int64(n)
	c.f.mu.Unlock()
	if cut {
		_ = http.NewResponseController(c.ResponseWriter).Flush()
		panic(http.ErrAbortHandler)
	}
	if c.left >= 0 {
		c.left -= int64(n)
	}
	return n, err
}

// Unwrap is for http.ResponseController.
func (c *counted) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// Endless writes until the reader stops, at most limit bytes.
func Endless(ctx context.Context, w io.Writer, limit int64) (n int64) {
	b := bytes.Repeat([]byte("endless "), 8<<10)
	for n < limit && ctx.Err() == nil {
		m, err := w.Write(b)
		if n += int64(m); err != nil {
			break
		}
	}
	return n
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
