package terminate

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
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
)

// An issuer makes certificates: it is the sandbox's authority, or that of the servers.
type issuer struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newIssuer(name string) *issuer {
	i := &issuer{key: must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	i.cert = must(x509.ParseCertificate(must(x509.CreateCertificate(rand.Reader, c, c, &i.key.PublicKey, i.key))))
	return i
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func (i *issuer) leaf(name string, end time.Time) Leaf {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	c := &x509.Certificate{
		SerialNumber: big.NewInt(2), DNSNames: []string{name}, NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: end,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der := must(x509.CreateCertificate(rand.Reader, c, i.cert, &key.PublicKey, i.key))
	return Leaf{Chain: [][]byte{der, i.cert.Raw}, Key: must(x509.MarshalPKCS8PrivateKey(key))}
}

func (i *issuer) serves(name string, end time.Time) tls.Certificate {
	l := i.leaf(name, end)
	return tls.Certificate{Certificate: l.Chain, PrivateKey: must(x509.ParsePKCS8PrivateKey(l.Key))}
}

func (i *issuer) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(i.cert)
	return p
}

func (i *issuer) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: i.cert.Raw})
}

var (
	authority = sync.OnceValue(func() *issuer { return newIssuer("the sandbox's authority") })
	public    = sync.OnceValue(func() *issuer { return newIssuer("an authority of servers") })
	certOf    = sync.OnceValues(func() (tls.Certificate, error) { return public().serves(host, time.Now().Add(time.Hour)), nil })
)

// host is the name that is inspected.
const host = "api.example.com"

// server is the address to which guests open connections.
var server = netip.MustParseAddr("203.0.113.1")

// secret is what the clerk puts into requests.
const secret = "s3cret"

// A clerk is a Judge. It puts a header in, and takes its value out of the headers of answers.
type clerk struct {
	mu    sync.Mutex
	seen  []string
	again bool // it says how a body is sent again
}

func (c *clerk) maker(config []byte, _ Daemon, _ Judge) (Judge, error) {
	if string(config) != secret {
		return nil, errors.New("this is not a configuration")
	}
	return c, nil
}

// Request refuses /refused, and /read after a look at the body, and fails for /broken.
func (c *clerk) Request(r *http.Request, to Destination) (Answerer, error) {
	c.mu.Lock()
	c.seen = append(c.seen, fmt.Sprintf("%s %s://%s:%d%s", r.Method, to.Scheme, to.Name, to.Port, r.URL.Path))
	c.mu.Unlock()
	if to.Addr != server {
		return nil, errors.New("it was to go to another address")
	}
	switch r.URL.Path {
	case "/refused":
		return nil, &Refusal{http.StatusForbidden, "SANDBOX::FORBIDDEN", "no rule allows it"}
	case "/read":
		_, err := io.CopyN(io.Discard, r.Body, 2*aheadFrom)
		return nil, errors.Join(&Refusal{http.StatusForbidden, "SANDBOX::FORBIDDEN", "its body is not allowed"}, err)
	case "/broken":
		return nil, errors.New("a text with the " + secret)
	case "/elsewhere": // its Destination stays what it is
		r.Host, r.URL.Host, r.URL.Scheme = "other.example.com", "other.example.com", "http"
	}
	r.Header.Set("X-Secret", secret)
	if c.again {
		r.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("words")), nil }
	}
	return c, nil
}

func (c *clerk) Response(r *http.Response) error {
	if r.Request != nil && r.Request.URL.Path == "/unlooked" {
		return errors.New("a text with the " + secret)
	}
	for _, values := range r.Header {
		for i := range values {
			values[i] = strings.ReplaceAll(values[i], secret, "***")
		}
	}
	return nil
}

func (c *clerk) judged() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.seen
	c.seen = nil
	return s
}

// A desk stands for the daemon: it marks host, allows plain.example.com, and dials.
type desk struct {
	t    testing.TB
	line *child.Conn
	dial func() (net.Conn, error) // to the server
	port uint16
	// first: the server may speak first. grant: and may be reached then.
	first, grant bool
	refuses      bool // to make certificates

	mu     sync.Mutex
	asked  []string
	leaves int
	open   map[uint32]net.Conn
	fewer  sync.Cond // of open or guests
	guests map[uint64]net.Conn
	socket uint32
	flows  uint64
	notes  chan Note
	ended  chan uint64
}

// newDesk serves a child in this process.
func newDesk(t testing.TB, judges JudgeMaker, dial func() (net.Conn, error)) *desk {
	t.Helper()
	ours, theirs, err := child.Pair()
	if err != nil {
		t.Fatal(err)
	}
	line, err := child.NewConn(ours, MaxBody, false)
	if err != nil {
		t.Fatal(err)
	}
	far, err := child.NewConn(theirs, maxToChild, true)
	if err != nil {
		t.Fatal(err)
	}
	d := deskOf(t, line, dial)
	go heads.ServeLine(newInspector(judges), far) //nolint:errcheck // ends with the test
	go line.Run(d.handle)                         //nolint:errcheck // likewise
	t.Cleanup(func() { line.Close() })
	d.configure(line)
	return d
}

func deskOf(t testing.TB, line *child.Conn, dial func() (net.Conn, error)) *desk {
	d := &desk{
		t: t, line: line, dial: dial, port: 443, open: map[uint32]net.Conn{}, guests: map[uint64]net.Conn{},
		notes: make(chan Note, 1000), ended: make(chan uint64, 10000),
	}
	d.fewer.L = &d.mu
	return d
}

// end waits until the one flow of a client ends, which it closes when it is idle.
func (d *desk) end(c *http.Client) {
	for {
		c.CloseIdleConnections()
		select {
		case <-d.ended:
			return
		default:
			runtime.Gosched()
		}
	}
}

// closed waits until the child has closed all flows, and all sockets to servers: one that
// Transport closes may be told after its flow.
func (d *desk) closed() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.open)+len(d.guests) > 0 {
		d.fewer.Wait()
	}
}

func (d *desk) configure(line *child.Conn) {
	d.t.Helper()
	c := Config{Roots: public().pem(), Judge: []byte(secret)}
	if err := c.Send(context.Background(), line); err != nil {
		d.t.Fatal(err)
	}
}

func (d *desk) handle(m child.Message) {
	switch m.Kind {
	case heads.KindOpen, heads.KindDial:
		go d.answer(m)
	case KindLeaf:
		name, err := ParseLeafRequest(m.Body)
		if err != nil {
			d.t.Error(err)
			return
		}
		d.mu.Lock()
		d.leaves++
		d.mu.Unlock()
		l := Leaf{Text: "no rule marks " + name}
		if !d.refuses {
			l = authority().leaf(name, time.Now().Add(time.Hour))
		}
		go d.line.Answer(m, l.Append(nil), nil) //nolint:errcheck // the guest waits
	case KindNote:
		n, err := ParseNote(m.Body)
		if err != nil {
			d.t.Error(err)
		}
		d.notes <- n
	case heads.KindClosed:
		c, err := heads.ParseClosed(m.Body)
		if err != nil {
			d.t.Error(err)
			return
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if c.Socket != 0 {
			if s := d.open[c.Socket]; s != nil {
				s.Close()
			}
			delete(d.open, c.Socket)
			d.fewer.Broadcast()
			return
		}
		if g := d.guests[c.Flow]; g != nil {
			g.Close()
		}
		delete(d.guests, c.Flow)
		d.fewer.Broadcast()
		d.ended <- c.Flow
	default:
		d.t.Errorf("a message of kind %d", m.Kind)
	}
}

func (d *desk) answer(m child.Message) {
	o, err := heads.ParseOpen(m.Body)
	if err != nil {
		d.t.Error(err)
		return
	}
	d.mu.Lock()
	d.asked = append(d.asked, fmt.Sprint(m.Kind, " ", o.Kind, " ", o.Name))
	d.mu.Unlock()
	a := heads.Opened{Result: heads.Denied, Text: "no rule allows " + o.Name}
	switch {
	case m.Kind == heads.KindOpen && o.Name == host:
		a = heads.Opened{Result: heads.Inspect}
	case o.Kind == heads.First && d.grant, m.Kind == heads.KindDial && o.Name == host,
		m.Kind == heads.KindOpen && o.Name == "plain.example.com":
		c, err := d.dial()
		if err != nil {
			a = heads.Opened{Result: heads.Failed, Text: err.Error()}
			break
		}
		d.mu.Lock()
		d.socket++
		number := d.socket
		d.open[number] = c
		d.mu.Unlock()
		a = heads.Opened{Result: heads.Granted, Socket: number}
		d.line.Answer(m, a.Append(nil), c.(syscall.Conn)) //nolint:errcheck // the guest waits
		return
	}
	d.line.Answer(m, a.Append(nil), nil) //nolint:errcheck // the guest waits
}

// pair is both ends of a connection without a network.
func pair() (near, far net.Conn) {
	fds := must(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0))
	return must(fileConn(fds[0])), must(fileConn(fds[1]))
}

// connect is a guest's connection, through the child.
func (d *desk) connect() *net.TCPConn {
	d.t.Helper()
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	c := must(net.Dial("tcp", l.Addr().String()))
	d.t.Cleanup(func() { c.Close() })
	d.serve(must(l.Accept()).(*net.TCPConn))
	return c.(*net.TCPConn)
}

func (d *desk) serve(far interface {
	net.Conn
	SyscallConn() (syscall.RawConn, error)
},
) {
	d.mu.Lock()
	d.flows++
	number := d.flows
	d.guests[number] = far
	d.mu.Unlock()
	f := heads.Flow{Number: number, Dst: netip.AddrPortFrom(server, d.port), First: d.first}
	if err := d.line.Tell(heads.KindServe, f.Append(nil), far); err != nil {
		panic(err)
	}
}

// fileConn makes a connection of a descriptor, which it closes.
func fileConn(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	c, err := net.FileConn(f)
	if err == nil {
		err = c.SetDeadline(time.Now().Add(time.Minute))
	}
	return c, err
}

// client is a guest that speaks HTTP/1.1, or HTTP/2.
func (d *desk) client(h2 bool) *http.Client {
	p := new(http.Protocols)
	p.SetHTTP1(!h2)
	p.SetHTTP2(h2)
	t := &http.Transport{
		DialContext:     func(context.Context, string, string) (net.Conn, error) { return d.connect(), nil },
		TLSClientConfig: &tls.Config{RootCAs: authority().pool()}, Protocols: p, DisableCompression: true,
		ExpectContinueTimeout: time.Minute,
	}
	d.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// tls is a guest's connection, with the handshake done.
func (d *desk) tls(protocols ...string) *tls.Conn {
	d.t.Helper()
	c := tls.Client(d.connect(), &tls.Config{RootCAs: authority().pool(), ServerName: host, NextProtos: protocols})
	c.SetDeadline(time.Now().Add(time.Minute)) //nolint:errcheck // shows in reads
	if err := c.Handshake(); err != nil {
		d.t.Fatal(err)
	}
	return c
}

// certificates is how many were made.
func (d *desk) certificates() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.leaves
}

func (d *desk) connections() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.flows
}

// want holds what the child has asked since the last call.
func (d *desk) want(asked ...string) {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if fmt.Sprint(d.asked) != fmt.Sprint(asked) {
		d.t.Errorf("the child asked %q, want %q", d.asked, asked)
	}
	d.asked = nil
}

// A site is a server of host.
type site struct {
	http.Server
	addr string
}

// newSite serves what h answers, with HTTP/2 if h2.
func newSite(t testing.TB, h http.Handler, h2 bool, conf *tls.Config) *site {
	t.Helper()
	return newSiteOf(t, h, h2, conf, 0)
}

// newSiteOf is newSite with so many streams at a time; 0: as many as net/http allows.
func newSiteOf(t testing.TB, h http.Handler, h2 bool, conf *tls.Config, streams int) *site {
	t.Helper()
	s := &site{}
	if conf == nil {
		conf = &tls.Config{Certificates: []tls.Certificate{must(certOf())}}
	}
	s.Handler, s.TLSConfig, s.ErrorLog = h, conf, log.New(io.Discard, "", 0)
	s.Protocols, s.DisableGeneralOptionsHandler = protocols(h2), true
	s.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: streams}
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	s.addr = l.Addr().String()
	go s.ServeTLS(l, "", "") //nolint:errcheck // ends with the test
	t.Cleanup(func() { s.Close() })
	return s
}

func (s *site) dial() (net.Conn, error) { return net.Dial("tcp", s.addr) }

// echo answers with the request as it came, and its body.
func echo(rw http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	rw.Header().Set("X-Echo", r.Header.Get("X-Secret"))
	fmt.Fprintf(rw, "%s %s %s %s len=%d te=%v ", r.Proto, r.Method, r.RequestURI, r.Host, r.ContentLength, r.TransferEncoding)
	fmt.Fprintf(rw, "body=%s %v\n", b, err)
	for k, v := range r.Header {
		fmt.Fprintf(rw, "%s=%q\n", k, v)
	}
}

// get returns the answer to a request.
func get(t testing.TB, c *http.Client, r *http.Request) (*http.Response, string) {
	t.Helper()
	resp, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

func request(t testing.TB, method, url string, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// raw sends bytes over TLS, and returns what comes back until the end or until all of want
// is there.
func (d *desk) raw(send string, want ...string) string {
	d.t.Helper()
	c := d.tls("http/1.1")
	defer c.Close()
	if _, err := io.WriteString(c, send); err != nil {
		d.t.Fatal(err)
	}
	var got bytes.Buffer
	buf := make([]byte, 64<<10)
	for {
		n, err := c.Read(buf)
		got.Write(buf[:n])
		rest, all := got.String(), true
		for _, w := range want {
			_, after, ok := strings.Cut(rest, w)
			if all = all && ok; ok {
				rest = after
			}
		}
		if all && len(want) > 0 || err != nil {
			if !all {
				d.t.Errorf("got %q, %v; want %q", got.String(), err, want)
			}
			return got.String()
		}
	}
}
