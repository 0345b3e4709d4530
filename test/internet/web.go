package internet

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha1" //nolint:gosec // the handshake of WebSocket
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Request is one that came to a web server.
type Request struct {
	Host, SNI, Method, Path, Proto string
	Authorization                  string
}

// web serves every name on every address: by HTTP on port 80, by HTTPS on 443, on 8443 and,
// for DNS over TLS, on 853.
type web struct {
	mu       sync.Mutex
	requests []Request

	hosts map[string]http.Handler // those that have something to serve; set before it serves
	ca    *x509.Certificate
	key   *ecdsa.PrivateKey
	certs map[string]*tls.Certificate // by name; under mu
}

// Requests are those for a name, by its Host header, so far.
func (in *Internet) Requests(name string) (all []Request) {
	in.web.mu.Lock()
	defer in.web.mu.Unlock()
	for _, r := range in.web.requests {
		if r.Host == name {
			all = append(all, r)
		}
	}
	return all
}

// serveWeb opens the ports.
func (in *Internet) serveWeb() error {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true) // with prior knowledge
	for _, port := range []int{80, 443, 853, 8443} {
		l, err := net.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", port))
		if err != nil {
			return err
		}
		s := &http.Server{
			Handler: &in.web, Protocols: protocols, ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Minute,
			TLSConfig: &tls.Config{GetCertificate: in.web.certificate, GetConfigForClient: in.web.forClient},
		}
		in.open = append(in.open, s)
		go func() {
			if port == 80 {
				s.Serve(l) //nolint:errcheck // it ends with the test
			} else {
				s.ServeTLS(l, "", "") //nolint:errcheck // the same
			}
		}()
	}
	return nil
}

// ServeHTTP serves a name. A name with nothing to serve says who was asked, on one line.
func (w *web) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	name, _, _ := strings.Cut(r.Host, ":")
	seen := Request{
		Host: name, Method: r.Method, Path: r.URL.Path, Proto: r.Proto, Authorization: r.Header.Get("Authorization"),
	}
	if r.TLS != nil {
		seen.SNI = r.TLS.ServerName
	}
	w.mu.Lock()
	w.requests = append(w.requests, seen)
	w.mu.Unlock()
	if h := w.hosts[name]; h != nil {
		h.ServeHTTP(rw, r)
		return
	}
	switch {
	case strings.EqualFold(r.Header.Get("Upgrade"), "websocket"):
		upgrade(rw, r)
	case strings.HasPrefix(r.URL.Path, "/to/"): // a redirect
		http.Redirect(rw, r, "http://"+strings.TrimPrefix(r.URL.Path, "/to/"), http.StatusFound)
	default:
		fmt.Fprintf(rw, "this is %s\n", name) //nolint:errcheck // the client sees what is missing
	}
}

// upgrade makes a WebSocket (RFC 6455) of a request, and returns what comes as it is.
func upgrade(rw http.ResponseWriter, r *http.Request) {
	c, buffered, err := http.NewResponseController(rw).Hijack()
	if err != nil {
		return
	}
	defer c.Close()
	io.WriteString(c, switched(r)) //nolint:errcheck // the client sees what is missing
	io.Copy(c, buffered)           //nolint:errcheck // the same
}

// switched is the answer that makes a WebSocket of a request.
func switched(r *http.Request) string {
	sum := sha1.Sum([]byte(r.Header.Get("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11")) //nolint:gosec // as above
	return "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " +
		base64.StdEncoding.EncodeToString(sum[:]) + "\r\n\r\n"
}

// authority makes the certificate that all others are signed by.
func (w *web) authority() ([]byte, error) {
	var err error
	if w.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, err
	}
	w.certs = map[string]*tls.Certificate{}
	w.ca = template(1, "the authority of a test")
	w.ca.IsCA, w.ca.BasicConstraintsValid, w.ca.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, w.ca, w.ca, w.key.Public(), w.key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

func template(serial int64, name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
}

// certificate is that of the name which a client asks for.
func (w *web) certificate(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	name := h.ServerName
	switch at, ok := h.Conn.LocalAddr().(*net.TCPAddr); {
	case ok && at.AddrPort().Addr().Unmap() == Thief:
		name = ThiefHost
	case name == "":
		name = "nobody.example"
	}
	if c := w.certs[name]; c != nil {
		return c, nil
	}
	of := template(int64(len(w.certs)+2), name)
	of.DNSNames, of.KeyUsage = []string{name}, x509.KeyUsageDigitalSignature
	of.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	by := w.ca
	if name == StrangerHost {
		by = of
	}
	der, err := x509.CreateCertificate(rand.Reader, of, by, w.key.Public(), w.key)
	if err != nil {
		return nil, err
	}
	c := &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: w.key}
	w.certs[name] = c
	return c, nil
}

// Names are the hosts that have something to serve, sorted.
func (in *Internet) Names() (all []string) {
	for name := range in.web.hosts {
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}
