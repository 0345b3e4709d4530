package internet

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// prepared is an Internet without a network.
func prepared(t *testing.T) *Internet {
	t.Helper()
	in := &Internet{}
	var err error
	if err = in.prepare(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	return in
}

// ask is the answer to one question.
func (in *Internet) ask(t *testing.T, name string, of dnsmessage.Type, tcp bool) (m dnsmessage.Message) {
	t.Helper()
	q := dnsmessage.Message{Questions: []dnsmessage.Question{{Name: dnsName(name), Type: of, Class: dnsmessage.ClassINET}}}
	b, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	b, _ = in.answer(b, tcp)
	if err := m.Unpack(b); err != nil {
		t.Fatal(err)
	}
	return m
}

func TestZone(t *testing.T) {
	in := prepared(t)
	in.Set("*.wild.example", Record{A: []netip.Addr{Other}, HTTPS: true})
	var many []netip.Addr
	for i := range 100 {
		many = append(many, netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}))
	}
	in.Set("big.example", Record{A: many})
	m := in.ask(t, "FILES.example", dnsmessage.TypeA, false)
	if len(m.Answers) != 3 || m.Questions[0].Name.String() != "FILES.example." ||
		m.Answers[2].Body.(*dnsmessage.AResource).A != Shared.As4() {
		t.Errorf("two aliases and an address: %+v", m)
	}
	if m := in.ask(t, "a.b.wild.example", dnsmessage.TypeA, false); len(m.Answers) != 1 || m.RCode != 0 {
		t.Errorf("below a wildcard: %+v", m)
	}
	if m := in.ask(t, "wild.example", dnsmessage.TypeA, false); m.RCode != dnsmessage.RCodeNameError {
		t.Errorf("no name: %+v", m)
	}
	if m := in.ask(t, "x.wild.example", dnsmessage.TypeHTTPS, false); len(m.Answers) != 1 {
		t.Errorf("HTTPS: %+v", m)
	}
	if m := in.ask(t, "big.example", dnsmessage.TypeA, false); !m.Truncated || len(m.Answers) != 0 {
		t.Errorf("too big for UDP: %+v", m.Header)
	}
	if m := in.ask(t, "big.example", dnsmessage.TypeA, true); m.Truncated || len(m.Answers) != 100 {
		t.Errorf("by TCP: %+v", m.Header)
	}
	if got := in.Queries("wild.example"); len(got) != 3 || got[0].Name != "a.b.wild.example" {
		t.Errorf("queries: %+v", got)
	}
}

// TestShared: one address serves all names, each with a certificate of its own.
func TestShared(t *testing.T) {
	in := prepared(t)
	s := httptest.NewUnstartedServer(&in.web)
	s.TLS = &tls.Config{GetCertificate: in.web.certificate}
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(in.CA)
	c := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool},
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", s.Listener.Addr().String())
		},
	}}
	for _, name := range []string{"a.example", "b.example"} {
		resp, err := c.Get("https://" + name + "/")
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(b) != "this is "+name+"\n" {
			t.Errorf("%s: %q", name, b)
		}
	}
	if got := in.Requests("b.example"); len(got) != 1 || got[0].SNI != "b.example" {
		t.Errorf("requests: %+v", got)
	}
}

// TestPackages has the programs that packages are for read them.
func TestPackages(t *testing.T) {
	in := prepared(t)
	dir := t.TempDir()
	deb := filepath.Join(dir, "x.deb")
	b := in.web.hosts[DebianHost].(pages)["/debian/pool/"+Package+"_1.0.0_all.deb"]
	if err := os.WriteFile(deb, b, 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("dpkg-deb", "--contents", deb).CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("./usr/bin/"+Package)) {
		t.Errorf("dpkg-deb: %v: %s", err, out)
	}
	git := httptest.NewServer(in.web.hosts[GitHost])
	defer git.Close()
	if out, err := exec.Command("git", "clone", "-q", git.URL+"/"+Package+".git", filepath.Join(dir, "work")).CombinedOutput(); err != nil {
		t.Errorf("git clone: %v: %s", err, out)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "work", "word")); strings.TrimSpace(string(b)) != Word {
		t.Errorf("the clone has %q, %v", b, err)
	}
	modules := httptest.NewServer(in.web.hosts[GoHost])
	defer modules.Close()
	get := exec.Command("go", "mod", "download", GoModule+"@latest")
	get.Dir = dir
	get.Env = append(os.Environ(), "GOPROXY="+modules.URL, "GONOSUMDB=*", "GOFLAGS=-modcacherw", "GOMODCACHE="+filepath.Join(dir, "cache"))
	if out, err := get.CombinedOutput(); err != nil {
		t.Errorf("go mod download: %v: %s", err, out)
	}
}
