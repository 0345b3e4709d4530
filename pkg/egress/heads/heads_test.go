package heads

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/egress/child"
)

// A desk stands for the daemon: it says who may reach the server at addr, and dials.
type desk struct {
	t     *testing.T
	s     *server
	line  *child.Conn
	addr  string
	allow map[string]bool // "": without a name
	marks string          // a name that is allowed, but to be inspected
	first bool            // the server may speak first

	mu     sync.Mutex
	asked  []Open
	open   map[uint32]net.Conn
	guests map[uint64]*net.TCPConn
	socket uint32
	flows  uint64
	ended  chan uint64
}

// newDesk serves what heads asks, as the daemon does it: it has a copy of each socket until
// the child has closed it.
func newDesk(t *testing.T, addr string, allow ...string) *desk {
	t.Helper()
	ours, theirs, err := child.Pair()
	if err != nil {
		t.Fatal(err)
	}
	d := &desk{
		t: t, addr: addr, allow: map[string]bool{}, open: map[uint32]net.Conn{}, guests: map[uint64]*net.TCPConn{},
		ended: make(chan uint64, 1000),
	}
	for _, a := range allow {
		d.allow[a] = true
	}
	if d.line, err = child.NewConn(ours, MaxBody, false); err != nil {
		t.Fatal(err)
	}
	c, err := child.NewConn(theirs, 1<<10, true)
	if err != nil {
		t.Fatal(err)
	}
	d.s = newServer(nil)
	go c.Run(d.s.begin(c))  //nolint:errcheck // ends with the test
	go d.line.Run(d.handle) //nolint:errcheck // likewise
	t.Cleanup(func() { d.line.Close() })
	return d
}

func (d *desk) handle(m child.Message) {
	switch m.Kind {
	case KindOpen:
		go d.answer(m)
	case KindClosed:
		c, err := ParseClosed(m.Body)
		if err != nil {
			d.t.Error(err)
			return
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if c.Socket != 0 {
			d.open[c.Socket].Close()
			delete(d.open, c.Socket)
			return
		}
		d.guests[c.Flow].Close()
		delete(d.guests, c.Flow)
		d.ended <- c.Flow
	}
}

func (d *desk) answer(m child.Message) {
	o, err := ParseOpen(m.Body)
	if err != nil {
		d.t.Error(err)
		return
	}
	d.mu.Lock()
	d.asked = append(d.asked, o)
	d.mu.Unlock()
	if d.marks != "" && o.Name == d.marks {
		d.line.Answer(m, Opened{Inspect, 0, ""}.Append(nil), nil) //nolint:errcheck // the guest waits
		return
	}
	if !d.allow[o.Name] {
		d.line.Answer(m, Opened{Denied, 0, "no rule allows " + o.Name}.Append(nil), nil) //nolint:errcheck // the guest waits
		return
	}
	if o.Kind == Check {
		d.line.Answer(m, Opened{Granted, 0, ""}.Append(nil), nil) //nolint:errcheck // likewise
		return
	}
	c, err := net.Dial("tcp", d.addr)
	if err != nil {
		d.line.Answer(m, Opened{Failed, 0, err.Error()}.Append(nil), nil) //nolint:errcheck // likewise
		return
	}
	d.mu.Lock()
	d.socket++
	number := d.socket
	d.open[number] = c
	d.mu.Unlock()
	d.line.Answer(m, Opened{Granted, number, ""}.Append(nil), c.(*net.TCPConn)) //nolint:errcheck // likewise
}

// connect is a guest's connection, through heads.
func (d *desk) connect() *net.TCPConn {
	d.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		d.t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { c.Close() })
	far, err := l.Accept()
	if err != nil {
		d.t.Fatal(err)
	}
	d.mu.Lock()
	d.flows++
	number := d.flows
	d.guests[number] = far.(*net.TCPConn)
	d.mu.Unlock()
	f := Flow{number, netip.MustParseAddrPort(d.addr), d.first}
	if err := d.line.Tell(KindServe, f.Append(nil), far.(*net.TCPConn)); err != nil {
		d.t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(30 * time.Second)) //nolint:errcheck // shows in reads
	return c.(*net.TCPConn)
}

func (d *desk) names() (names []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, o := range d.asked {
		names = append(names, fmt.Sprint(o.Kind, " ", o.Name))
	}
	d.asked = nil
	return names
}

// want holds what the child has asked since the last call.
func (d *desk) want(asked ...string) {
	d.t.Helper()
	if got := d.names(); fmt.Sprint(got) != fmt.Sprint(asked) {
		d.t.Errorf("the child asked %q, want %q", got, asked)
	}
}

// serve accepts until the test ends.
func serve(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go f(c)
		}
	}()
	return l.Addr().String()
}

var certificate = sync.OnceValue(func() tls.Certificate {
	return hosttest.NewAuthority("public").Issue("*.test", time.Now().Add(time.Hour))
})

// tlsServer answers with the name that it was asked for, and what it was sent.
func tlsServer(t *testing.T) string {
	return serve(t, func(c net.Conn) {
		s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{certificate()}, MinVersion: tls.VersionTLS10})
		defer s.Close()
		if s.Handshake() != nil {
			return
		}
		fmt.Fprintf(s, "%s:", s.ConnectionState().ServerName)
		io.Copy(s, s) //nolint:errcheck // the client says
	})
}

// pieces writes in pieces of n bytes.
type pieces struct {
	net.Conn
	n int
}

func (p *pieces) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) && p.n > 0 {
		n, err := p.Conn.Write(b[done:min(done+p.n, len(b))])
		if done += n; err != nil {
			return done, err
		}
	}
	if p.n == 0 {
		return p.Conn.Write(b)
	}
	return done, nil
}

// records writes the first record again as records of n bytes.
type records struct {
	net.Conn
	n int
}

func (r *records) Write(b []byte) (int, error) {
	if r.n == 0 {
		return r.Conn.Write(b)
	}
	var out []byte
	body := b[5:]
	for len(body) > 0 {
		n := min(r.n, len(body))
		out = append(append(out, b[0], b[1], b[2], byte(n>>8), byte(n)), body[:n]...)
		body = body[n:]
	}
	r.n = 0
	_, err := r.Conn.Write(out)
	return len(b), err
}

// TestTLS: the name is seen in every form that a ClientHello may have, and the bytes pass.
func TestTLS(t *testing.T) {
	d := newDesk(t, tlsServer(t), "allowed.test")
	for what, c := range map[string]struct {
		wrap func(net.Conn) net.Conn
		conf *tls.Config
	}{
		"plain":               {},
		"TLS 1.0":             {conf: &tls.Config{MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS10}},
		"TLS 1.1":             {conf: &tls.Config{MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}},
		"TLS 1.2":             {conf: &tls.Config{MaxVersion: tls.VersionTLS12}},
		"TLS 1.3":             {conf: &tls.Config{MinVersion: tls.VersionTLS13}},
		"a second hello":      {conf: &tls.Config{CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP521}}},
		"upper case":          {conf: &tls.Config{ServerName: "ALLOWED.Test"}},
		"segments of 1 byte":  {wrap: func(c net.Conn) net.Conn { return &pieces{c, 1} }},
		"records of 7 bytes":  {wrap: func(c net.Conn) net.Conn { return &records{c, 7} }},
		"records of 16 bytes": {wrap: func(c net.Conn) net.Conn { return &records{&pieces{c, 11}, 16} }},
	} {
		t.Run(what, func(t *testing.T) {
			raw := net.Conn(d.connect())
			if c.wrap != nil {
				raw = c.wrap(raw)
			}
			conf := &tls.Config{}
			if c.conf != nil {
				conf = c.conf
			}
			conf.InsecureSkipVerify = true
			if conf.ServerName == "" {
				conf.ServerName = "allowed.test"
			}
			s := tls.Client(raw, conf)
			want := conf.ServerName + ":" + strings.Repeat("word", 100<<10)
			go func() {
				io.WriteString(s, want[len(conf.ServerName)+1:]) //nolint:errcheck // the other side says
				s.CloseWrite()                                   //nolint:errcheck // likewise
			}()
			got, err := io.ReadAll(s)
			if err != nil || string(got) != want {
				t.Errorf("%d bytes, %v; want %d", len(got), err, len(want))
			}
			s.Close()
			<-d.ended
			d.want("2 allowed.test")
		})
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.open) > 0 || len(d.guests) > 0 {
		t.Errorf("%d and %d sockets are left", len(d.open), len(d.guests))
	}
}

// clientHello is what crypto/tls sends.
func clientHello(t testing.TB, conf *tls.Config) []byte {
	t.Helper()
	a, b := net.Pipe()
	defer a.Close()
	conf.InsecureSkipVerify = true
	go func() {
		tls.Client(b, conf).Handshake() //nolint:errcheck // nobody answers
		b.Close()
	}()
	buf := make([]byte, 64<<10)
	n, err := io.ReadAtLeast(a, buf, 5)
	if err != nil {
		t.Fatal(err)
	}
	for size := 5 + int(buf[3])<<8 + int(buf[4]); n < size; {
		m, err := a.Read(buf[n:])
		if n += m; err != nil {
			t.Fatal(err)
		}
	}
	return buf[:n]
}

// TestTLSDenied: the guest gets the alert, not a reset, and the server nothing.
func TestTLSDenied(t *testing.T) {
	var reached atomic.Int32
	addr := serve(t, func(c net.Conn) { reached.Add(1); c.Close() })
	d := newDesk(t, addr, "allowed.test")
	long := clientHello(t, &tls.Config{ServerName: "a.test", NextProtos: []string{strings.Repeat("a", 200)}})
	record := func(b []byte) []byte { return append([]byte{22, 3, 1, byte(len(b) >> 8), byte(len(b))}, b...) }
	for name, c := range map[string]struct {
		hello []byte
		alert byte
		asked string
	}{
		"another name":   {clientHello(t, &tls.Config{ServerName: "other.test"}), 49, "2 other.test"},
		"no name":        {clientHello(t, &tls.Config{}), 49, "2 "},
		"an address":     {withName(t, "203.0.113.1"), 49, "2 "},
		"a dot":          {withName(t, "other.test."), 49, "2 other.test"},
		"zero byte":      {withName(t, "allowed.test\x00"), 49, "2 "},
		"cut off":        {append([]byte{22, 3, 1, 0, 8, 1, 0, 0, 4}, 0, 0, 0, 0), 50, "7 "},
		"two hellos":     {record(append(bytes.Clone(long[5:]), long[5:]...)), 50, "7 "},
		"larger than 16": {append([]byte{22, 3, 1, 0x40, 0, 1, 0, 0x50, 0}, make([]byte, 0x4000-4)...), 50, "7 "},
	} {
		t.Run(name, func(t *testing.T) {
			g := d.connect()
			if _, err := g.Write(c.hello); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(g)
			if want := []byte{21, 3, 3, 0, 2, 2, c.alert}; err != nil || !bytes.Equal(got, want) {
				t.Errorf("got %x, %v; want %x", got, err, want)
			}
			g.Close()
			<-d.ended
			d.want(c.asked)
		})
	}
	if n := reached.Load(); n != 0 {
		t.Errorf("the server was reached %d times", n)
	}
}

// TestMarked: without an Inspector, nothing goes to a name that is to be inspected.
func TestMarked(t *testing.T) {
	var reached atomic.Int32
	addr := serve(t, func(c net.Conn) { reached.Add(1); c.Close() })
	d := newDesk(t, addr, "allowed.test")
	d.marks = "allowed.test"
	for _, c := range []struct{ send, want string }{
		{string(clientHello(t, &tls.Config{ServerName: "allowed.test"})), ""},
		{"GET / HTTP/1.1\r\nHost: allowed.test\r\nConnection: close\r\n\r\n", "HTTP/1.1 502 Bad Gateway"},
	} {
		g := d.connect()
		if _, err := io.WriteString(g, c.send); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(g); !strings.HasPrefix(string(got), c.want) || c.want == "" && err == nil {
			t.Errorf("got %q, %v", got, err)
		}
		<-d.ended
	}
	if n := reached.Load(); n != 0 {
		t.Errorf("the server was reached %d times", n)
	}
}

// withName is a ClientHello whose name crypto/tls would not send.
func withName(t testing.TB, name string) []byte {
	t.Helper()
	const place = "place.test"
	b := clientHello(t, &tls.Config{ServerName: place})
	i := bytes.Index(b, []byte(place))
	d := len(name) - len(place)
	b = append(append(bytes.Clone(b[:i]), name...), b[i+len(place):]...)
	add := func(at int) {
		n := int(b[at])<<8 + int(b[at+1]) + d
		b[at], b[at+1] = byte(n>>8), byte(n)
	}
	for _, at := range []int{3, 7, i - 2, i - 5, i - 7} {
		add(at)
	}
	session := int(b[43])
	suites := 44 + session
	compression := suites + 2 + int(b[suites])<<8 + int(b[suites+1])
	add(compression + 1 + int(b[compression]))
	if got, err := serverName(b); err != nil || got != name {
		t.Fatalf("%q, %v", got, err)
	}
	return b
}

// TestSecondHello: a server that asks again does not get a hello for another name.
func TestSecondHello(t *testing.T) {
	got := make(chan []byte, 1)
	addr := serve(t, func(c net.Conn) {
		defer c.Close()
		first := make([]byte, 64<<10)
		n, _ := c.Read(first)
		hello := append([]byte{22, 3, 3, 0, 44, 2, 0, 0, 40, 3, 3}, retry...)
		c.Write(append(hello, 0, 0x13, 1, 0, 0, 0)) //nolint:errcheck // the guest says
		rest, _ := io.ReadAll(c)
		got <- append(first[:n], rest...)
	})
	d := newDesk(t, addr, "allowed.test")
	one, same, two := withName(t, "allowed.test"), withName(t, "allowed.test"), withName(t, "hidden.test")
	change, early := []byte{20, 3, 3, 0, 1, 1}, append([]byte{23, 3, 3, 0, 200}, make([]byte, 200)...)
	for what, c := range map[string]struct {
		before, after []byte
		passes        bool
	}{
		"the same":             {nil, append(bytes.Clone(change), same...), true},
		"another":              {nil, append(bytes.Clone(change), two...), false},
		"another, in advance":  {two, nil, false},
		"behind early data":    {append(bytes.Clone(early), two...), nil, false},
		"the same, in advance": {append(bytes.Clone(early), same...), early, true},
	} {
		t.Run(what, func(t *testing.T) {
			g := d.connect()
			g.Write(append(bytes.Clone(one), c.before...)) //nolint:errcheck // the server says
			if _, err := io.ReadFull(g, make([]byte, 49)); err != nil && c.passes {
				t.Fatal(err)
			}
			g.Write(c.after) //nolint:errcheck // likewise
			g.CloseWrite()   //nolint:errcheck // likewise
			b := <-got
			want := append(append(bytes.Clone(one), c.before...), c.after...)
			if c.passes != bytes.Equal(b, want) || bytes.Contains(b, []byte("hidden.test")) {
				t.Errorf("the server got %d bytes of %d", len(b), len(want))
			}
			g.Close()
			<-d.ended
		})
	}
}

// echoServer answers a request with what it was asked.
func echoServer(t *testing.T) string {
	return serve(t, func(c net.Conn) {
		defer c.Close()
		r := bufio.NewReader(c)
		for {
			q, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			if q.Header.Get("Upgrade") == "websocket" {
				// The guest says what became of these.
				io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n") //nolint:errcheck
				io.Copy(c, r)                                                                                              //nolint:errcheck
				return
			}
			if q.Header.Get("Expect") != "" {
				io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n") //nolint:errcheck // likewise
			}
			body, err := io.ReadAll(q.Body)
			said := fmt.Sprintf("%s %s host=%s len=%d te=%v up=%q xff=%q body=%s %v", q.Method, q.RequestURI, q.Host, q.ContentLength,
				q.TransferEncoding, q.Header.Get("Upgrade"), q.Header.Get("X-Forwarded-For"), body, err)
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(said), said)
		}
	})
}

// TestHTTP: each request is checked by its own Host, and the server sees what was checked.
func TestHTTP(t *testing.T) {
	d := newDesk(t, echoServer(t), "allowed.test", "second.test")
	const denied = `{"code":"SANDBOX::FORBIDDEN","message":"no rule allows `
	for what, c := range map[string]struct {
		send  string
		want  []string // parts of the answers
		asked []string
	}{
		"plain": {
			"GET /a?b=%zz;c HTTP/1.1\r\nHost: allowed.test\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n",
			[]string{"200 OK", `GET /a?b=%zz;c host=allowed.test len=0 te=[] up="" xff="1.2.3.4"`},
			[]string{"3 allowed.test"},
		},
		"a port, capitals and a dot": {
			"GET / HTTP/1.1\r\nHost: Allowed.TEST.:80\r\n\r\n",
			[]string{"200 OK", "host=Allowed.TEST.:80"},
			[]string{"3 allowed.test"},
		},
		"denied": {"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n", []string{"403 Forbidden", denied + `other.test"}`}, []string{"3 other.test"}},
		"too many headers": {
			"GET / HTTP/1.1\r\nHost: allowed.test\r\n" + strings.Repeat("a:\r\n", MaxLines+1) + "\r\n",
			[]string{"431 Request Header Fields Too Large", "128 headers at most"},
			nil,
		},
		"no Host":    {"GET / HTTP/1.0\r\n\r\n", []string{"403 Forbidden", denied + `"}`}, []string{"3 "}},
		"an address": {"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", []string{"403 Forbidden", denied + `"}`}, []string{"3 "}},
		"two Hosts":  {"GET / HTTP/1.1\r\nHost: allowed.test\r\nHost: other.test\r\n\r\n", []string{"400 Bad Request"}, nil},
		"another authority": {
			"GET http://other.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
			[]string{"403 Forbidden"},
			[]string{"3 other.test"},
		},
		"an authority that may, a Host that may not": {
			"GET http://allowed.test/x HTTP/1.1\r\nHost: other.test\r\n\r\n",
			[]string{"200 OK", "GET /x host=allowed.test"},
			[]string{"3 allowed.test"},
		},
		"a URL without //, with another host in it": {
			"GET http:http://other.test/x HTTP/1.1\r\nHost: allowed.test\r\n\r\n", []string{"400 Bad Request", "target"}, nil,
		},
		"a URL of another scheme": {
			"GET https://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n", []string{"400 Bad Request", "target"}, nil,
		},
		"a path like an authority": {
			"GET //other.test/x HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
			[]string{"200 OK", "GET //other.test/x host=allowed.test"},
			[]string{"3 allowed.test"},
		},
		"CONNECT": {
			"CONNECT allowed.test:443 HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
			[]string{"405 Method Not Allowed", "refuses CONNECT"},
			nil,
		},
		"pipelined": {
			"GET /1 HTTP/1.1\r\nHost: allowed.test\r\n\r\nGET /2 HTTP/1.1\r\nHost: other.test\r\n\r\n" +
				"GET /3 HTTP/1.1\r\nHost: second.test\r\n\r\nGET /4 HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
			[]string{"GET /1 host=allowed.test", "403 Forbidden", "GET /3 host=second.test", "GET /4 host=allowed.test"},
			[]string{"3 allowed.test", "3 other.test", "3 second.test"},
		},
		"two lengths": {
			"POST / HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 50\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" +
				"GET /2 HTTP/1.1\r\nHost: other.test\r\n\r\n",
			[]string{"len=-1 te=[chunked]", "body=abc", "403 Forbidden"},
			[]string{"3 allowed.test", "3 other.test"},
		},
		"a body of another request": {
			"POST / HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 40\r\n\r\nGET / HTTP/1.1\r\nHost: hidden.test\r\n\r\n....",
			[]string{"len=40", "body=GET / HTTP/1.1"},
			[]string{"3 allowed.test"},
		},
		"expect": {
			"POST / HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\nabc",
			[]string{"100 Continue", "200 OK", "body=abc"},
			[]string{"3 allowed.test"},
		},
		"h2c by upgrade": {
			"GET / HTTP/1.1\r\nHost: allowed.test\r\nConnection: Upgrade, HTTP2-Settings\r\n" +
				"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
			[]string{"200 OK", `up=""`},
			[]string{"3 allowed.test"},
		},
		"a websocket": {
			"GET / HTTP/1.1\r\nHost: allowed.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
			[]string{"101 Switching Protocols", "Upgrade: websocket", "words of any kind"},
			[]string{"3 allowed.test"},
		},
		"a large head": {
			"GET / HTTP/1.1\r\nHost: allowed.test\r\nX: " + strings.Repeat("x", 17<<10) + "\r\n\r\n",
			[]string{"431 Request Header Fields Too Large"},
			nil,
		},
		"a large target": {
			"GET /" + strings.Repeat("x", 17<<10) + " HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
			[]string{"431 Request Header Fields Too Large"},
			nil,
		},
		"empty lines before": {"\r\n\r\nGET / HTTP/1.1\r\nHost: other.test\r\n\r\n", []string{"40"}, nil},
		"tabs":               {"GET\t/\tHTTP/1.1\r\nHost: allowed.test\r\n\r\n", []string{"400 Bad Request"}, nil},
		"h2c": {
			preface + "\r\nSM\r\n\r\n",
			[]string{"\x00\x00\x00\x04\x00\x00\x00\x00\x00", "\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x0dno rule allows "},
			[]string{"5 "},
		},
	} {
		t.Run(what, func(t *testing.T) {
			g := d.connect()
			if _, err := io.WriteString(g, c.send); err != nil {
				t.Fatal(err)
			}
			var got []byte
			rest := ""
			buf := make([]byte, 64<<10)
			for missing := true; missing; {
				n, err := g.Read(buf)
				got = append(got, buf[:n]...)
				if missing = false; bytes.HasSuffix(got, []byte("Upgrade: websocket\r\n\r\n")) {
					io.WriteString(g, "words of any kind") //nolint:errcheck // the answer says
				}
				rest = string(got)
				for _, w := range c.want {
					_, after, ok := strings.Cut(rest, w)
					if missing = missing || !ok; ok {
						rest = after
					}
				}
				if err != nil && missing {
					t.Fatalf("got %q, %v; want %q", got, err, c.want)
				}
			}
			g.Close()
			<-d.ended
			if c.asked != nil {
				d.want(c.asked...)
			}
			d.names()
		})
	}
}

// TestTrailers: the trailers that a request announces go on, but for what is no trailer; an
// OPTIONS * is the server's to answer; and what a server sends that is not HTTP is not quoted.
func TestTrailers(t *testing.T) {
	d := newDesk(t, serve(t, func(c net.Conn) {
		defer c.Close()
		q, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		io.Copy(io.Discard, q.Body) //nolint:errcheck // the answer says
		if q.URL.Path == "/other" {
			io.WriteString(c, "not of HTTP\r\n\r\n") //nolint:errcheck // likewise
			return
		}
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n%s %s %v.", q.Method, q.RequestURI, q.Trailer)
	}), "allowed.test")
	const head = " HTTP/1.1\r\nHost: allowed.test\r\nConnection: close\r\n"
	for send, want := range map[string]string{
		"POST /a" + head + "Transfer-Encoding: chunked\r\nTrailer: X-Sum, Host\r\n\r\n" +
			"0\r\nX-Sum: 5\r\nHost: b\r\nX-Late: c\r\n\r\n": "POST /a map[X-Sum:[5]].",
		"OPTIONS *" + head + "\r\n":  "OPTIONS * map[].",
		"GET /other" + head + "\r\n": "or did not answer as HTTP.\"}\n",
	} {
		g := d.connect()
		io.WriteString(g, send) //nolint:errcheck // the answer says
		if b, err := io.ReadAll(g); err != nil || !strings.Contains(string(b), want) {
			t.Errorf("%q, %v, want %q", b, err, want)
		}
		g.Close()
		<-d.ended
	}
}

// TestNoHost: a server gets no Host that the guest has not sent.
func TestNoHost(t *testing.T) {
	d := newDesk(t, serve(t, func(c net.Conn) {
		defer c.Close()
		var got bytes.Buffer
		r, err := http.ReadRequest(bufio.NewReader(io.TeeReader(c, &got)))
		if err == nil {
			_, err = io.Copy(io.Discard, r.Body)
		}
		if err == nil {
			fmt.Fprintf(c, "HTTP/1.0 200 OK\r\n\r\n%s", got.Bytes())
		}
	}), "")
	long := "/" + strings.Repeat("x", 9000)
	for what, c := range map[string]struct{ send, want string }{
		"none":        {"GET /a HTTP/1.0\r\nX: y\r\n\r\n", "GET /a HTTP/1.0\r\nConnection: close\r\n"},
		"a long line": {"GET " + long + " HTTP/1.0\r\n\r\n", "GET " + long + " HTTP/1.0\r\nConnection: close\r\n"},
		"a body that says what is taken out": {
			fmt.Sprintf("POST /a HTTP/1.0\r\nUser-Agent: u\r\nContent-Length: %d\r\n\r\n%s", len(withHost), withHost),
			fmt.Sprintf("POST /a HTTP/1.0\r\nUser-Agent: u\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(withHost), withHost),
		},
		"an empty one": {"GET /a HTTP/1.1\r\nHost:\r\n\r\n", "GET /a HTTP/1.1\r\nHost: \r\n"},
		"an address":   {"GET /a HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "GET /a HTTP/1.1\r\nHost: 127.0.0.1\r\n"},
	} {
		g := d.connect()
		io.WriteString(g, c.send) //nolint:errcheck // the answer says
		a, err := http.ReadResponse(bufio.NewReader(g), nil)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		got, err := io.ReadAll(a.Body)
		invented := strings.HasPrefix(c.send, "GET") && strings.Contains(string(got), "-.")
		if err != nil || invented || !strings.HasPrefix(string(got), c.want) {
			t.Errorf("%s: the server got %q, %v; want %q", what, got, err, c.want)
		}
		g.Close()
		<-d.ended
		d.want("3 ")
	}
}

// TestLargeResponse: a head of a response that would need much memory is not passed on.
func TestLargeResponse(t *testing.T) {
	for what, head := range map[string]string{
		"long": "X: " + strings.Repeat("x", MaxHead) + "\r\n", "many lines": strings.Repeat("a:\r\n", MaxLines+1),
	} {
		d := newDesk(t, serve(t, func(c net.Conn) {
			http.ReadRequest(bufio.NewReader(c)) //nolint:errcheck // the answer says
			io.WriteString(c, "HTTP/1.1 200 OK\r\n"+head+"\r\n")
			c.Close()
		}), "allowed.test")
		g := d.connect()
		io.WriteString(g, "GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n") //nolint:errcheck // the answer says
		a, err := http.ReadResponse(bufio.NewReader(g), nil)
		if err != nil || a.StatusCode != http.StatusBadGateway {
			t.Errorf("%s: %v, %v", what, a, err)
		}
		g.Close()
		<-d.ended
	}
}

// TestOtherProtocols: what is neither TLS nor HTTP has no name.
func TestOtherProtocols(t *testing.T) {
	d := newDesk(t, echoServer(t), "allowed.test")
	for what, send := range map[string]string{
		"SSH": "SSH-2.0-x\r\n", "zero": "\x00\x00\x00\x08", "SSL 2.0": "\x80\x2e\x01\x00\x02", "two words": "EHLO x\r\n",
	} {
		g := d.connect()
		io.WriteString(g, send) //nolint:errcheck // the answer says
		if b, err := io.ReadAll(g); len(b) > 0 || !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s: %q, %v", what, b, err)
		}
		<-d.ended
		d.want("6 ")
	}
}

// TestFirst: at a port where a server may speak first, whoever speaks decides.
func TestFirst(t *testing.T) {
	banner := serve(t, func(c net.Conn) { io.WriteString(c, "220 hello\r\n"); io.Copy(c, c); c.Close() }) //nolint:errcheck
	allowed, denied, zero := string(withName(t, "allowed.test")), string(withName(t, "other.test")), "\x00\x00\x00\x08"
	mute := serve(t, func(c net.Conn) { io.Copy(c, c); c.Close() }) //nolint:errcheck
	for what, c := range map[string]struct {
		addr  string
		allow []string
		send  string
		want  string // "": nothing
		asked []string
	}{
		"the server speaks":      {banner, []string{""}, "", "220 hello\r\n", []string{"1 "}},
		"a guest without a name": {mute, []string{""}, zero, zero, []string{"1 "}},
		"a name that may":        {mute, []string{"", "allowed.test"}, allowed, "\x16", []string{"1 ", "4 allowed.test"}},
		"a name that may not":    {mute, []string{""}, denied, string(alertDenied), []string{"1 ", "4 other.test"}},
		"no lease":               {mute, nil, zero, "", []string{"1 ", "6 "}},
		"no lease, but a name":   {mute, []string{"allowed.test"}, allowed, "\x16", []string{"1 ", "2 allowed.test"}},
		"HTTP with another name": {
			mute, []string{""}, "GET / HTTP/1.1\r\nHost: other.test\r\n\r\n", "HTTP/1.1 403", []string{"1 ", "3 other.test"},
		},
		// crypto/tls takes both for the beginning of a handshake.
		"a record of version 2.0": {mute, []string{""}, "\x16\x02\x00" + denied[3:], string(alertMalformed), []string{"1 ", "7 "}},
		"behind a warning": {
			mute, []string{""}, "\x15\x03\x03\x00\x02\x01\x5a" + denied, string(alertMalformed), []string{"1 ", "7 "},
		},
		"HTTP with odd spaces":    {mute, []string{""}, "GET\x1c/\xa0HTTP/1.1\r\nHost: other.test\r\n\r\n", "HTTP/1.1 40", nil},
		"HTTP/0.9, with headers":  {mute, []string{""}, "GET /\r\nHost: other.test\r\n\r\n", "HTTP/1.1 40", nil},
		"HTTP behind empty lines": {mute, []string{""}, "\r\n\r\nGET / HTTP/1.1\r\nHost: other.test\r\n\r\n", "HTTP/1.1 40", nil},
	} {
		t.Run(what, func(t *testing.T) {
			d := newDesk(t, c.addr, c.allow...)
			d.first = true
			g := d.connect()
			io.WriteString(g, c.send) //nolint:errcheck // the answer says
			got := make([]byte, max(len(c.want), 1))
			n, err := io.ReadFull(g, got)
			if string(got[:n]) != c.want || (err == nil) != (c.want != "") {
				t.Errorf("got %q, %v; want %q", got[:n], err, c.want)
			}
			g.Close()
			<-d.ended
			if c.asked != nil {
				d.want(c.asked...)
			}
		})
	}
}

// TestSlowHead: a guest that does not finish its head is let go after five seconds.
func TestSlowHead(t *testing.T) {
	t.Parallel()
	d := newDesk(t, tlsServer(t), "allowed.test")
	hello := withName(t, "allowed.test")
	for what, send := range map[string]string{
		"nothing": "", "half a hello": string(hello[:100]), "half a line": "GET / HT",
		"half a head": "GET / HTTP/1.1\r\nHost: allowed.test\r\n",
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			g := d.connect()
			start := time.Now()
			io.WriteString(g, send) //nolint:errcheck // the answer says
			b, err := io.ReadAll(g)
			if took := time.Since(start); took < HeadLimit-time.Second || len(b) > 0 {
				t.Errorf("%q, %v after %s", b, err, took)
			}
		})
	}
}

// TestEnds: the end of one way, and a reset, reach the other side.
func TestEnds(t *testing.T) {
	received := make(chan error, 1)
	addr := serve(t, func(c net.Conn) {
		defer c.Close()
		_, err := io.Copy(io.Discard, c)
		received <- err
		io.WriteString(c, "bye") //nolint:errcheck // the guest says
	})
	d := newDesk(t, addr, "allowed.test")
	g := d.connect()
	g.Write(withName(t, "allowed.test")) //nolint:errcheck // the server says
	g.CloseWrite()                       //nolint:errcheck // likewise
	if b, err := io.ReadAll(g); err != nil || string(b) != "bye" || <-received != nil {
		t.Errorf("half closed: %q, %v", b, err)
	}
	g.Close()
	<-d.ended
	g = d.connect()
	g.Write(withName(t, "allowed.test")) //nolint:errcheck // likewise
	for len(d.names()) < 2 {
		time.Sleep(time.Millisecond)
		d.mu.Lock()
		open := len(d.open)
		d.mu.Unlock()
		if open > 0 {
			break
		}
	}
	g.SetLinger(0) //nolint:errcheck // likewise
	g.Close()
	if err := <-received; err == nil {
		t.Error("a reset arrives as an orderly end")
	}
	<-d.ended
}
