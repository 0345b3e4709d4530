package judge

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/egress/authority"
	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// asChild in the environment makes this program the child, without its walls.
const asChild = "JUDGE_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(asChild) != "" {
		if err := terminate.Serve(Make)(nil); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

var (
	source = netip.MustParseAddr("192.0.2.7")
	server = netip.MustParseAddr("203.0.113.1")
	// private is the authority of the sandbox, and public the one of the servers.
	private = sync.OnceValue(func() *authority.Authority { return must(authority.New("kaaaaaaaaaaa", time.Now())) })
	public  = sync.OnceValue(func() *authority.Authority { return must(authority.New("paaaaaaaaaaa", time.Now())) })
)

func pool(a *authority.Authority) *x509.CertPool {
	p := x509.NewCertPool()
	p.AppendCertsFromPEM(a.Certificate())
	return p
}

// A world is a child in a process of its own, the daemon that it speaks to, which marks all
// names, and a server that has them all.
type world struct {
	t      *testing.T
	line   *child.Conn
	events chan terminate.Event
	serve  atomic.Pointer[http.HandlerFunc]
	tls    string // addresses of the server
	plain  string
	// value answers for the values of credentials; the answer may wait.
	value func(credential string) terminate.Value

	mu     sync.Mutex
	flows  map[uint64]*flow
	socket uint32
	number uint64
}

// A flow is a guest's connection, and the sockets that were opened for it.
type flow struct {
	guest net.Conn
	port  uint16
	open  map[uint32]net.Conn
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, events: make(chan terminate.Event, 1000), flows: map[uint64]*flow{}}
	w.value = func(credential string) terminate.Value {
		t.Errorf("nobody has the credential %q", credential)
		return terminate.Value{Text: "none"}
	}
	w.site()
	ours, theirs, err := child.Pair()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), asChild+"=1")
	var said bytes.Buffer
	c.ExtraFiles, c.Stderr = []*os.File{theirs}, &said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	w.line = must(child.NewConn(ours, terminate.MaxBody, false))
	runs, ended := make(chan bool, 1), make(chan bool)
	go func() {
		defer close(ended)
		if err := w.line.Run(func(m child.Message) {
			if m.Kind > child.MaxKind { // it runs
				runs <- true
				return
			}
			w.handle(m)
		}); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() {
		w.line.Close()
		<-ended
		if err := c.Wait(); err != nil || said.Len() > 0 {
			t.Errorf("the child: %v, %s", err, said.String())
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, f := range w.flows {
			f.close()
		}
	})
	select {
	case <-runs:
	case <-ended:
		t.Fatal("the child does not run")
	}
	return w
}

// site serves what serve says, over TLS and without.
func (w *world) site() {
	h := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { (*w.serve.Load())(rw, r) })
	// Two servers: one that has begun with Serve would offer HTTP/2 in ServeTLS, and not speak it.
	s := &http.Server{Handler: h, Protocols: new(http.Protocols), TLSConfig: &tls.Config{GetCertificate: serverLeaf}}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetHTTP2(true)
	secure, plain := must(net.Listen("tcp", "127.0.0.1:0")), must(net.Listen("tcp", "127.0.0.1:0"))
	w.tls, w.plain = secure.Addr().String(), plain.Addr().String()
	hosttest.ServeHTTP(w.t, secure, s)
	hosttest.ServeHTTP(w.t, plain, &http.Server{Handler: h})
}

func serverLeaf(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
	cert, key, err := public().Leaf(h.ServerName, time.Now())
	if err != nil {
		return nil, err
	}
	private, err := x509.ParsePKCS8PrivateKey(key)
	return &tls.Certificate{Certificate: [][]byte{cert}, PrivateKey: private}, err
}

// serves says what the server does.
func (w *world) serves(h http.HandlerFunc) { w.serve.Store(&h) }

// configure gives the child a Config.
func (w *world) configure(c Config) error {
	w.t.Helper()
	return terminate.Config{Roots: public().Certificate(), Judge: c.Encode()}.Send(w.t.Context(), w.line)
}

func (w *world) handle(m child.Message) {
	switch m.Kind {
	case heads.KindOpen, heads.KindDial:
		go w.answer(m)
	case terminate.KindLeaf:
		name, err := terminate.ParseLeafRequest(m.Body)
		cert, key, lerr := private().Leaf(name, time.Now())
		if err = errors.Join(err, lerr); err != nil {
			w.t.Error(err)
		}
		l := terminate.Leaf{Chain: [][]byte{cert}, Key: key}
		go w.line.Answer(m, l.Append(nil), nil) //nolint:errcheck // the guest waits
	case terminate.KindValue:
		name, err := terminate.ParseValueRequest(m.Body)
		if err != nil {
			w.t.Error(err)
		}
		go func() {
			w.line.Answer(m, w.value(name).Append(nil), nil) //nolint:errcheck // likewise
		}()
	case terminate.KindEvent:
		e, err := terminate.ParseEvent(m.Body)
		if err != nil {
			w.t.Error(err)
		}
		w.events <- e
	case heads.KindClosed:
		c, err := heads.ParseClosed(m.Body)
		if err != nil {
			w.t.Error(err)
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		f := w.flows[c.Flow]
		switch {
		case f == nil:
		case c.Socket == 0:
			f.close()
			delete(w.flows, c.Flow)
		case f.open[c.Socket] != nil:
			f.open[c.Socket].Close()
			delete(f.open, c.Socket)
		}
	default:
		w.t.Errorf("a message of kind %d: %q", m.Kind, m.Body)
	}
}

func (f *flow) close() {
	f.guest.Close()
	for _, c := range f.open {
		c.Close()
	}
}

// answer marks each name, and dials.
func (w *world) answer(m child.Message) {
	o, err := heads.ParseOpen(m.Body)
	if err != nil {
		w.t.Error(err)
		return
	}
	if m.Kind == heads.KindOpen {
		w.line.Answer(m, heads.Opened{Result: heads.Inspect}.Append(nil), nil) //nolint:errcheck // the guest waits
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	f := w.flows[o.Flow]
	if f == nil {
		return // it has ended
	}
	to := w.tls
	if f.port == 80 {
		to = w.plain
	}
	c, err := net.Dial("tcp", to)
	if err != nil {
		w.t.Error(err)
		return
	}
	w.socket++
	f.open[w.socket] = c
	granted := heads.Opened{Result: heads.Granted, Socket: w.socket}
	w.line.Answer(m, granted.Append(nil), c.(syscall.Conn)) //nolint:errcheck // the guest waits
}

// connect is a guest's connection, through the child.
func (w *world) connect(port uint16) net.Conn {
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	c := must(net.Dial("tcp", l.Addr().String()))
	far := must(l.Accept())
	w.mu.Lock()
	w.number++
	f := heads.Flow{Number: w.number, Dst: netip.AddrPortFrom(server, port)}
	w.flows[f.Number] = &flow{far, port, map[uint32]net.Conn{}}
	w.mu.Unlock()
	if err := w.line.Tell(heads.KindServe, f.Append(nil), far.(syscall.Conn)); err != nil {
		w.t.Error(err)
	}
	return c
}

// client is a guest that speaks HTTP/1.1, or over TLS HTTP/2.
func (w *world) client(h2 bool) *http.Client {
	p := new(http.Protocols)
	p.SetHTTP1(!h2)
	p.SetHTTP2(h2)
	t := &http.Transport{
		DialContext: func(_ context.Context, _, to string) (net.Conn, error) {
			_, port, err := net.SplitHostPort(to)
			if err != nil {
				return nil, err
			}
			return w.connect(map[string]uint16{"80": 80, "443": 443}[port]), nil
		},
		TLSClientConfig: &tls.Config{RootCAs: pool(private())}, Protocols: p, DisableCompression: true,
	}
	w.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t}
}

// An answer is one that a guest has got.
type answer struct {
	*http.Response
	body string
}

// do sends a request.
func (w *world) do(c *http.Client, r *http.Request) answer {
	w.t.Helper()
	resp, err := c.Do(r)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return answer{resp, string(b)}
}

func request(t testing.TB, method, url, body string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// event is the next event that the child tells.
func (w *world) event() terminate.Event {
	w.t.Helper()
	select {
	case e := <-w.events:
		return e
	case <-time.After(time.Minute):
		w.t.Fatal("no event")
	}
	return terminate.Event{}
}

// none holds that the child has told no event. It tells them before the answers that they are
// about end, and what is asked of it now comes behind them.
func (w *world) none(c Config) {
	w.t.Helper()
	if err := w.configure(c); err != nil {
		w.t.Fatal(err)
	}
	select {
	case e := <-w.events:
		w.t.Errorf("event %+v", e)
	default:
	}
}

// open is a network policy that denies nothing.
var open = record.Network{Mode: record.NetworkOpen}

// vaultOf is a vault in the form of the store. v is what was made of it.
func vaultOf(t testing.TB, credentials, bindings string) (v *vault.Vault) {
	t.Helper()
	v, err := vault.CreateTrusted([]byte(`{"credentials":[` + credentials + `],"bindings":[` + bindings + `]}`))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// inline is a credential with its value, in JSON.
func inline(name, value string) string {
	return fmt.Sprintf(`{"name":%q,"source":{"value":%q}}`, name, value)
}
