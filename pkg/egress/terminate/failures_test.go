package terminate

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
)

// TestServerCertificates: of a server that is not verified, the guest reads why, and the server
// no request.
func TestServerCertificates(t *testing.T) {
	later := time.Now().Add(time.Hour)
	for what, c := range map[string]struct {
		cert tls.Certificate
		want string
	}{
		"another name":      {public().Issue("other.example.com", later), "is valid for other.example.com, not " + host},
		"expired":           {public().Issue(host, time.Now().Add(-time.Hour)), "expired"},
		"another authority": {authority().Issue(host, later), "unknown authority"},
	} {
		t.Run(what, func(t *testing.T) {
			seen := &record{}
			d := newDesk(t, (&clerk{}).maker, newSite(t, seen, true, &tls.Config{Certificates: []tls.Certificate{c.cert}}).dial)
			for _, h2 := range []bool{false, true} {
				resp, body := get(t, d.client(h2), request(t, "GET", "https://"+host+"/", nil))
				if resp.StatusCode != 502 || !strings.Contains(body, "SERVER_CERTIFICATE") || !strings.Contains(body, c.want) {
					t.Fatalf("%d %s", resp.StatusCode, body)
				}
				if n := <-d.notes; n.Kind != ServerUnverified || n.Name != host || !strings.Contains(n.Text, c.want) {
					t.Errorf("%v", n)
				}
			}
			if s := seen.saw(); len(s) > 0 {
				t.Errorf("the server saw %q", s)
			}
		})
	}
}

// TestClientCertificates: a server that wants a certificate of its client cannot be inspected;
// one that takes requests without goes on.
func TestClientCertificates(t *testing.T) {
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		for _, wants := range []tls.ClientAuthType{tls.RequestClientCert, tls.RequireAnyClientCert} {
			d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(echo), true, &tls.Config{
				Certificates: []tls.Certificate{certOf()}, ClientAuth: wants, MaxVersion: version,
			}).dial)
			for _, h2 := range []bool{false, true} {
				resp, body := get(t, d.client(h2), request(t, "GET", "https://"+host+"/", nil))
				if wants == tls.RequestClientCert {
					if resp.StatusCode != 200 {
						t.Errorf("%d %s", resp.StatusCode, body)
					}
					continue
				}
				if resp.StatusCode != 502 || !strings.Contains(body, "asked for a certificate of its client") {
					t.Fatalf("%d %s", resp.StatusCode, body)
				}
				if n := <-d.notes; n.Kind != ServerWants || n.Name != host {
					t.Errorf("%v", n)
				}
			}
		}
	}
}

// TestGuestRefuses: the daemon hears of a program that does not trust the authority.
func TestGuestRefuses(t *testing.T) {
	d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(echo), true, nil).dial)
	pin := func(tls.ConnectionState) error { return errors.New("another certificate is expected") }
	for _, c := range []struct {
		conf *tls.Config
		want NoteKind
	}{
		{&tls.Config{RootCAs: public().Pool(), MaxVersion: tls.VersionTLS12}, GuestRefuses},
		{&tls.Config{RootCAs: public().Pool(), MinVersion: tls.VersionTLS13}, GuestRefuses},
		{&tls.Config{RootCAs: authority().Pool(), VerifyConnection: pin}, GuestRefuses},
		{&tls.Config{RootCAs: authority().Pool(), NextProtos: []string{"mqtt"}}, GuestHandshake},
		{&tls.Config{RootCAs: authority().Pool(), MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}, GuestHandshake},
	} {
		c.conf.ServerName = host
		g := tls.Client(d.connect(), c.conf)
		if err := g.Handshake(); err == nil {
			t.Fatal("it has shaken hands")
		}
		g.Close()
		if n := <-d.notes; n.Kind != c.want || n.Name != host {
			t.Errorf("%v, want %d", n, c.want)
		}
		<-d.ended
	}
}

// TestGuestLeaves: the daemon hears of a program that looks at the certificate after the
// handshake, as those do that pin one, and not of one that is silent or sends something, or whose
// flow the daemon resets.
func TestGuestLeaves(t *testing.T) {
	t.Parallel()
	d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(echo), true, nil).dial)
	protocols := []string{"http/1.1", "h2"}
	for _, protocol := range protocols { // they say nothing until their time is up
		defer d.tls(protocol).Close()
	}
	for _, protocol := range protocols {
		d.leaving(protocol)
		d.mu.Lock()
		rc, err := d.guests[d.flows].(syscall.Conn).SyscallConn()
		d.mu.Unlock()
		if err == nil {
			err = rc.Control(func(fd uintptr) { child.Socket(fd).Reset() })
		}
		if err != nil {
			t.Fatal(err)
		}
		<-d.ended
	}
	for _, protocol := range protocols {
		for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
			if version == tls.VersionTLS12 { // without a word of TLS
				d.leaving(protocol).CloseWrite() //nolint:errcheck // the note says
			} else {
				d.tls(protocol).Close()
			}
			if n := <-d.notes; n.Kind != GuestLeft || n.Name != host {
				t.Errorf("%s: %v", protocol, n)
			}
			<-d.ended
		}
		c := d.client(protocol == "h2")
		get(t, c, request(t, "GET", "https://"+host+"/", nil))
		c.CloseIdleConnections()
		<-d.ended
	}
	half := d.tls("http/1.1")
	io.WriteString(half, "GET / HT") //nolint:errcheck // it is closed
	half.Close()
	for range 1 + len(protocols) {
		<-d.ended
	}
	if len(d.notes) > 0 {
		t.Error(<-d.notes)
	}
}

// leaving is the connection of a guest that has shaken hands, as the child knows: of TLS 1.2 it has
// the last word.
func (d *desk) leaving(protocol string) *net.TCPConn {
	d.t.Helper()
	c := d.connect()
	g := tls.Client(c, &tls.Config{
		RootCAs: authority().Pool(), ServerName: host, NextProtos: []string{protocol}, MaxVersion: tls.VersionTLS12,
	})
	if err := g.Handshake(); err != nil {
		d.t.Fatal(err)
	}
	return c
}

// TestLeftApart: guests that only look at the certificate do not hide one that refuses it.
func TestLeftApart(t *testing.T) {
	d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(echo), true, nil).dial)
	for range 4 * noteBurst {
		d.leaving("http/1.1").CloseWrite() //nolint:errcheck // its end says
		<-d.ended
	}
	g := tls.Client(d.connect(), &tls.Config{RootCAs: public().Pool(), ServerName: host})
	if err := g.Handshake(); err == nil {
		t.Fatal("it has shaken hands")
	}
	g.Close()
	<-d.ended // what the child tells comes in order
	for len(d.notes) > 0 {
		if n := <-d.notes; n.Kind == GuestRefuses {
			return
		}
	}
	t.Error("the daemon does not hear of it")
}

// TestCurves: a guest has the fast exchange of keys, or one that is safe from quantum computers if
// it offers no other.
func TestCurves(t *testing.T) {
	d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(echo), true, nil).dial)
	far := []tls.CurveID{tls.X25519MLKEM768, tls.SecP256r1MLKEM768, tls.SecP384r1MLKEM1024}
	for i, offers := range [][]tls.CurveID{nil, {tls.X25519MLKEM768, tls.X25519}, far[:1], far[1:2], far[2:]} {
		c := tls.Client(d.connect(), &tls.Config{RootCAs: authority().Pool(), ServerName: host, CurvePreferences: offers})
		err := c.Handshake()
		want := tls.X25519
		if i > 1 {
			want = offers[0]
		}
		if got := c.ConnectionState().CurveID; err != nil || got != want {
			t.Errorf("%v: %v, %v", offers, got, err)
		}
		c.Close()
	}
}

// TestEnds: a guest that goes away at any moment leaves nothing.
func TestEnds(t *testing.T) {
	d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(echo), true, nil).dial)
	hello := make([]byte, 64<<10)
	g := d.connect()
	io.WriteString(g, "\x16\x03\x01") //nolint:errcheck // it is closed
	g.Close()
	<-d.ended
	// In the handshake: the hello of another client, and no more.
	near, far := net.Pipe()
	go tls.Client(far, &tls.Config{ServerName: host}).Handshake() //nolint:errcheck // nobody answers
	n, err := near.Read(hello)
	if err != nil {
		t.Fatal(err)
	}
	near.Close()
	g = d.connect()
	g.Write(hello[:n]) //nolint:errcheck // it is closed
	if _, err := g.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	g.Close()
	<-d.ended
	for _, send := range []string{
		"", "GET / HT", "POST / HTTP/1.1\r\nHost: " + host + "\r\nContent-Length: 10\r\n\r\nwords",
		"POST / HTTP/1.1\r\nHost: " + host + "\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nwords\r\n",
	} {
		c := d.tls("http/1.1")
		io.WriteString(c, send) //nolint:errcheck // it is closed
		c.NetConn().Close()
		<-d.ended
	}
	d.closed()
}

// TestNoLeaf: that the daemon gives no certificate is no fault of the program, and no note.
func TestNoLeaf(t *testing.T) {
	d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(echo), true, nil).dial)
	d.refuses = true
	if err := tls.Client(d.connect(), &tls.Config{RootCAs: authority().Pool(), ServerName: host}).Handshake(); err == nil {
		t.Fatal("it has shaken hands")
	}
	<-d.ended // what the child tells comes in order
	if len(d.notes) > 0 {
		t.Error(<-d.notes)
	}
}

// TestReplacedHeader: an Answerer may give an answer 1xx another header.
func TestReplacedHeader(t *testing.T) {
	s := sending{r: request(t, "GET", "https://"+host+"/", nil), a: replacing{}, conf: &settings{}}
	out := s.request()
	h := textproto.MIMEHeader{"Link": {secret}}
	if err := httptrace.ContextClientTrace(out.Context()).Got1xxResponse(103, h); err != nil || fmt.Sprint(h) != "map[Link:[***]]" {
		t.Errorf("%v, %v", h, err)
	}
}

type replacing struct{}

// Response answers with one header.
func (replacing) Response(r *http.Response) error {
	r.Header = http.Header{"Link": {"***"}}
	return nil
}

// TestSlow: a head that does not come ends its connection, and nobody else waits for it.
func TestSlow(t *testing.T) {
	t.Parallel()
	d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(echo), true, nil).dial)
	for range 3 {
		io.WriteString(d.tls("http/1.1"), "GET / HTTP/1.1\r\nHo") //nolint:errcheck // its end says
	}
	slow := d.tls("http/1.1")
	fmt.Fprintf(slow, "POST / HTTP/1.1\r\nHost: %s\r\nContent-Length: 10\r\n\r\nword", host)
	if resp, _ := get(t, d.client(false), request(t, "GET", "https://"+host+"/", nil)); resp.StatusCode != 200 {
		t.Error(resp.Status)
	}
	for range 3 {
		<-d.ended
	}
	io.WriteString(slow, "s, all") //nolint:errcheck // the answer says
	resp, err := http.ReadResponse(bufio.NewReader(slow), nil)
	if err != nil || resp.StatusCode != 200 {
		t.Errorf("a body may be slow: %v, %v", resp, err)
	}
}

// TestNoDaemon: connections go on when the daemon is gone, and what needs it fails in words.
func TestNoDaemon(t *testing.T) {
	d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(echo), true, nil).dial)
	c := d.client(true)
	if resp, _ := get(t, c, request(t, "GET", "https://"+host+"/", nil)); resp.StatusCode != 200 {
		t.Error(resp.Status)
	}
	idle := d.tls("http/1.1")
	d.line.Close()
	if resp, _ := get(t, c, request(t, "GET", "https://"+host+"/", nil)); resp.StatusCode != 200 {
		t.Error(resp.Status)
	}
	fmt.Fprintf(idle, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", host)
	if b, err := io.ReadAll(idle); err != nil || !strings.Contains(string(b), "sandboxd does not run at the moment") {
		t.Errorf("%s, %v", b, err)
	}
}

// TestUnreachable: of a server that does not answer, or not as HTTP, the guest is told, and not
// what it sent: that may be a credential, which no Answerer has seen.
func TestUnreachable(t *testing.T) {
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{certOf()}})
			go func() {
				defer s.Close()
				s.Read(make([]byte, 100))                    //nolint:errcheck // the guest says
				io.WriteString(s, "what is "+secret+"?\r\n") //nolint:errcheck // likewise
			}()
		}
	}()
	for want, dial := range map[string]func() (net.Conn, error){
		"there is no route":       func() (net.Conn, error) { return nil, errors.New("there is no route") },
		"did not answer as HTTP.": func() (net.Conn, error) { return net.Dial("tcp", l.Addr().String()) },
	} {
		d := newDesk(t, (&clerk{}).maker, dial)
		for _, h2 := range []bool{false, true} {
			resp, body := get(t, d.client(h2), request(t, "GET", "https://"+host+"/", nil))
			if resp.StatusCode != 502 || !strings.Contains(body, "SANDBOX::UNREACHABLE") || !strings.Contains(body, want) ||
				strings.Contains(body, secret) {
				t.Errorf("%d %s, want %s", resp.StatusCode, body, want)
			}
		}
	}
}

// TestLeaves: a certificate is asked for once, and again when it ends or was refused.
func TestLeaves(t *testing.T) {
	ours, theirs, err := child.Pair()
	if err != nil {
		t.Fatal(err)
	}
	daemon, line := must(child.NewConn(ours, MaxBody, false)), must(child.NewConn(theirs, maxToChild, true))
	defer daemon.Close()
	go line.Run(func(child.Message) {}) //nolint:errcheck // ends with the test
	var mu sync.Mutex
	asked := map[string]int{}
	go daemon.Run(func(m child.Message) { //nolint:errcheck // likewise
		mu.Lock()
		defer mu.Unlock()
		name := must(ParseLeafRequest(m.Body))
		asked[name]++
		if name == "unanswered.example.com" {
			return
		}
		l := leafFor(name, time.Now().Add(time.Hour))
		switch {
		case name == "never.example.com", name == "later.example.com" && asked[name] == 1:
			l = Leaf{Text: "no rule marks " + name}
		case name == "soon.example.com":
			l = leafFor(name, time.Now().Add(time.Minute))
		}
		daemon.Answer(m, l.Append(nil), nil) //nolint:errcheck // the call says
	})
	var l leaves
	for _, c := range []struct {
		name, err string
		asked     int // how often by then
	}{
		{host, "", 1},
		{host, "", 1},
		{"never.example.com", "no rule marks never", 1},
		{"never.example.com", "no rule marks never", 2},
		{"later.example.com", "no rule", 1},
		{"later.example.com", "", 2},
		{"later.example.com", "", 2},
		{"soon.example.com", "", 1},
		{"soon.example.com", "", 2},
	} {
		cert, err := l.of(t.Context(), line, c.name)
		mu.Lock()
		n := asked[c.name]
		mu.Unlock()
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) || n != c.asked {
			t.Errorf("%s: %v, asked %d times, want %q, %d", c.name, err, n, c.err, c.asked)
		}
		if err == nil && cert.Leaf.VerifyHostname(c.name) != nil {
			t.Errorf("%s: a certificate for %v", c.name, cert.Leaf.DNSNames)
		}
	}
	kept := l.byName[host]
	if begin := kept.cert.Leaf.NotBefore; kept.old(begin) || !kept.old(begin.Add(-time.Second)) {
		t.Error("a clock that was set back")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.of(ctx, line, "unanswered.example.com"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	for i := range 2 * maxLeaves {
		if _, err := l.of(t.Context(), line, fmt.Sprintf("n%d.example.com", i)); err != nil {
			t.Fatal(err)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.byName) > maxLeaves {
		t.Errorf("%d are kept", len(l.byName))
	}
}

// TestNotes: of many notes, some are sent at once and then one each second.
func TestNotes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n Notes
		count := func() (may int) {
			for range 100 {
				if n.May(time.Now()) {
					may++
				}
			}
			return may
		}
		for i, want := range []int{noteBurst, 0, 1, 3, noteBurst} {
			time.Sleep([]time.Duration{0, 900 * time.Millisecond, 200 * time.Millisecond, 3 * time.Second, time.Hour}[i])
			if got := count(); got != want {
				t.Errorf("%d: %d, want %d", i, got, want)
			}
		}
	})
}

// FuzzMessages: what a child sends is refused, or is written again as it came.
func FuzzMessages(f *testing.F) {
	f.Add(Note{GuestRefuses, host, "a text"}.Append(nil))
	f.Add([]byte("\x01\x05a.b\x1b[31m"))
	f.Add([]byte(host))
	f.Add(Leaf{[][]byte{{1, 2}, {3}}, []byte{4}, "x"}.Append(nil))
	f.Add(Event{RuleDenied, host, "GET", "a binding", "a credential", "body", "allow " + host + " POST"}.Append(nil))
	f.Add(Event{Kind: Echo}.Append(nil))
	f.Add(Value{Bytes: []byte(secret)}.Append(nil))
	f.Add(Value{Text: "why"}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, err := ParseNote(b); err == nil {
			same := string(n.Append(nil)) == string(b) && heads.PlainName(n.Name) == n.Name
			if !same || len(n.Text) > maxNote || strings.ContainsAny(n.Text, "\x1b\n\x00") {
				t.Fatalf("%q", n)
			}
		}
		if name, err := ParseLeafRequest(b); err == nil && (name != string(b) || name == "" || heads.PlainName(name) != name) {
			t.Fatalf("%q", name)
		}
		if l, err := ParseLeaf(b); err == nil && string(l.Append(nil)) != string(b) {
			t.Fatalf("%q", l)
		}
		if e, err := ParseEvent(b); err == nil {
			if same := string(e.Append(nil)) == string(b) && e.cut() == e; !same || len(b) > MaxBody {
				t.Fatalf("%q", e)
			}
		}
		if e := (Event{Echo, "", string(b), string(b), string(b), string(b), string(b)}).cut(); len(e.Append(nil)) > MaxBody {
			t.Fatalf("%d bytes", len(e.Append(nil)))
		} else if again, err := ParseEvent(e.Append(nil)); err != nil || again != e {
			t.Fatalf("%q, %v", again, err)
		}
		if name, err := ParseValueRequest(b); err == nil && (name != string(b) || name == "" || !isPlain(name, maxName)) {
			t.Fatalf("%q", name)
		}
		if v, err := ParseValue(b); err == nil && (string(v.Append(nil)) != string(b) || len(v.Bytes) > MaxValue) {
			t.Fatalf("%q", b)
		}
		if p := plain(string(b), 40); len(p) > 40 || plain(p, 40) != p {
			t.Fatalf("%q", p)
		}
	})
}
