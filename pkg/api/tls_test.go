package api

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// secure opens a listener that speaks TLS and returns what connects to it.
func (w *world) secure(l ...auth.Listener) func() (net.Conn, error) {
	w.t.Helper()
	lent := httptest.NewTLSServer(nil) // for its certificate
	w.t.Cleanup(lent.Close)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	listener := tls.NewListener(ln, &tls.Config{Certificates: lent.TLS.Certificates})
	w.url = strings.Replace(w.serveOn(listener, append(l, auth.Listener{})[0]), "http", "https", 1)
	roots := x509.NewCertPool()
	roots.AddCert(lent.Certificate())
	cfg := &tls.Config{RootCAs: roots, ServerName: "example.com", NextProtos: []string{"h2", "http/1.1"}}
	return func() (net.Conn, error) { return tls.Dial("tcp", ln.Addr().String(), cfg) }
}

// TestTLS: what a guest is told of a connection, and what a browser keeps of it,
// say that it was safe.
func TestTLS(t *testing.T) {
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprint(rw, r.Header.Get("X-Forwarded-Proto"), r.Header.Get("X-Forwarded-For"))
	}))
	defer app.Close()
	w := newWorld(t, func(c *Config) { c.Gateway = gateway.Names{Domain: gateDomain} })
	w.app = app.Listener
	sb := w.create()
	token := w.s.gateway.Token(sb.ID, 8000)
	connect := w.secure(auth.Listener{Gateway: true})
	client := http.Client{Transport: &http.Transport{DialTLSContext: func(context.Context, string, string) (net.Conn,
		error,
	) {
		return connect()
	}}}
	defer client.CloseIdleConnections()
	resp, err := client.Get("https://" + sb.ID + "-8000." + gateDomain + "/?sandboxd_token=" + token)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if string(b) != "https127.0.0.1" || len(resp.Cookies()) != 1 || !resp.Cookies()[0].Secure || resp.ProtoMajor != 1 {
		t.Errorf("%s %q, cookies %v", resp.Status, b, resp.Cookies())
	}
	for text, want := range map[string]string{"": `{"status":"healthy"}`, "x": `{"status":"healthy","warning":"x"}`} {
		w := newWorld(t, func(c *Config) { c.Impaired = func() string { return text } })
		if a := w.do("GET", "/health", "", wire.HeaderAPIKey, ""); a.StatusCode != 200 || strings.TrimSpace(string(a.body)) != want {
			t.Errorf("%s %s", a.Status, a.body)
		}
	}
}
