package terminate

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/sandboxd/sandboxd/pkg/egress/child"
	"github.com/sandboxd/sandboxd/pkg/egress/heads"
)

// A record keeps what a server saw.
type record struct {
	mu   sync.Mutex
	seen []string
}

func (k *record) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(r.Body)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.seen = append(k.seen, fmt.Sprintf("%s %s %s len=%d te=%v x=%q body=%s %v", r.Method, r.RequestURI, r.Host, r.ContentLength,
		r.TransferEncoding, r.Header["X"], b, err))
	io.WriteString(rw, "served") //nolint:errcheck // the client says
}

func (k *record) saw() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.seen
	k.seen = nil
	return s
}

// TestSmuggling: whatever the guest's framing is, the server gets requests that were judged,
// in a framing of net/http.
func TestSmuggling(t *testing.T) {
	k, seen := &clerk{}, &record{}
	d := newDesk(t, k.maker, newSite(t, seen, false, nil).dial)
	const head, last = "Host: " + host + "\r\n", "GET /last HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n"
	for what, c := range map[string]struct {
		send string
		want []string // parts of the answers
		seen []string // beginnings of what the server saw; of /last nothing
	}{
		"length and chunks": {
			"POST /1 HTTP/1.1\r\n" + head + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
			[]string{"200 OK"},
			[]string{"POST /1 " + host + " len=-1 te=[chunked] x=[] body=abc <nil>"},
		},
		"two lengths": {"POST /1 HTTP/1.1\r\n" + head + "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", []string{"400"}, nil},
		"twice the length": {
			"POST /1 HTTP/1.1\r\n" + head + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
			[]string{"200 OK"},
			[]string{"POST /1 " + host + " len=3 te=[] x=[] body=abc"},
		},
		"a sign":            {"POST /1 HTTP/1.1\r\n" + head + "Content-Length: +3\r\n\r\nabc", []string{"400"}, nil},
		"a list of lengths": {"POST /1 HTTP/1.1\r\n" + head + "Content-Length: 3, 3\r\n\r\nabc", []string{"400"}, nil},
		"another coding":    {"POST /1 HTTP/1.1\r\n" + head + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", []string{"501"}, nil},
		"two codings":       {"POST /1 HTTP/1.1\r\n" + head + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", []string{"501"}, nil},
		"chunks of HTTP/1.0": {
			"POST /1 HTTP/1.0\r\n" + head + "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
			[]string{"200 OK"},
			[]string{"POST /1 " + host + " len=0 te=[] x=[] body= <nil>"}, // and the connection ends
		},
		"a space before :":    {"POST /1 HTTP/1.1\r\n" + head + "Content-Length : 3\r\n\r\nabc", []string{"400"}, nil},
		"a name with a space": {"GET /1 HTTP/1.1\r\n" + head + "X Y: 3\r\n\r\n", []string{"400"}, nil},
		"a zero byte":         {"GET /1 HTTP/1.1\r\n" + head + "X: a\x00b\r\n\r\n", []string{"400"}, nil},
		"CR in a value":       {"GET /1 HTTP/1.1\r\n" + head + "X: a\rY: b\r\n\r\n", []string{"400"}, nil},
		"folded":              {"GET /1 HTTP/1.1\r\n" + head + "X: a\r\n b\r\n\r\n", []string{"200 OK"}, []string{"GET /1 " + host + ` len=0 te=[] x=["a b"]`}},
		"a folded coding": {
			"POST /1 HTTP/1.1\r\n" + head + "Content-Length: 3\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
			[]string{"200 OK"},
			[]string{"POST /1 " + host + " len=-1 te=[chunked] x=[] body= <nil>"},
		},
		"bare line feeds": {"GET /1 HTTP/1.1\nHost: " + host + "\nX: a\n\n", []string{"200 OK"}, []string{"GET /1 " + host + ` len=0 te=[] x=["a"]`}},
		"no Host":         {"GET /1 HTTP/1.1\r\n\r\n", []string{"400"}, nil},
		"HTTP/1.0":        {"GET /1 HTTP/1.0\r\n\r\n", []string{"421"}, nil},
		"two Hosts":       {"GET /1 HTTP/1.1\r\n" + head + "Host: other.example.com\r\n\r\n", []string{"400"}, nil},
		"another host": {
			"GET /1 HTTP/1.1\r\nHost: other.example.com\r\n\r\n" + last, []string{"421", "MISDIRECTED", "200 OK"}, nil,
		},
		"another port": {"GET /1 HTTP/1.1\r\nHost: " + host + ":444\r\n\r\n" + last, []string{"421", "200 OK"}, nil},
		"its port": {
			"GET /1 HTTP/1.1\r\nHost: " + host + ":443\r\n\r\n", []string{"200 OK"}, []string{"GET /1 " + host + " "},
		},
		"capitals, and a dot": {
			"GET /1 HTTP/1.1\r\nHost: API.example.COM.\r\n\r\n", []string{"200 OK"}, []string{"GET /1 " + host + " "},
		},
		"a user": {"GET /1 HTTP/1.1\r\nHost: other.example.com@" + host + "\r\n\r\n", []string{"4"}, nil},
		"its URL": {
			"GET https://" + host + "/1 HTTP/1.1\r\nHost: other.example.com\r\n\r\n", []string{"200 OK"}, []string{"GET /1 " + host},
		},
		"another URL":      {"GET https://other.example.com/1 HTTP/1.1\r\n" + head + "\r\n", []string{"421"}, nil},
		"a URL of http":    {"GET http://" + host + "/1 HTTP/1.1\r\n" + head + "\r\n", []string{"400", "target"}, nil},
		"a URL without //": {"GET https:https://other.example.com/1 HTTP/1.1\r\n" + head + "\r\n", []string{"400", "target"}, nil},
		"OPTIONS *":        {"OPTIONS * HTTP/1.1\r\n" + head + "\r\n", []string{"200 OK", "served"}, []string{"OPTIONS * " + host}},
		"OPTIONS * of another": {
			"OPTIONS * HTTP/1.1\r\nHost: other.example.com\r\n\r\n", []string{"421"}, nil,
		},
		"a fragment": {"GET /1?a#b HTTP/1.1\r\n" + head + "\r\n", []string{"400", "target"}, nil},
		"CONNECT":    {"CONNECT " + host + ":443 HTTP/1.1\r\n" + head + "\r\n", []string{"405"}, nil},
		"TRACE":      {"TRACE /1 HTTP/1.1\r\n" + head + "\r\n", []string{"405"}, nil},
		"many lines": {
			"GET /1 HTTP/1.1\r\n" + head + strings.Repeat("a:\r\n", 129) + "\r\n", []string{"431", "128 headers at most"}, nil,
		},
		"a large head": {"GET /1 HTTP/1.1\r\n" + head + "X: " + strings.Repeat("x", 17<<10) + "\r\n\r\n", []string{"431"}, nil},
		"a body like a request": {
			"POST /1 HTTP/1.1\r\n" + head + "Content-Length: 36\r\n\r\nGET /hidden HTTP/1.1\r\nHost: other\r\n\r\n" + last,
			[]string{"200 OK", "200 OK"},
			[]string{"POST /1 " + host + " len=36 te=[] x=[] body=GET /hidden"},
		},
		"pipelined": {
			"GET /1 HTTP/1.1\r\n" + head + "\r\nGET /refused HTTP/1.1\r\n" + head + "\r\n" + last,
			[]string{"200 OK", "403", "200 OK"},
			[]string{"GET /1"},
		},
		"hop by hop": {
			"GET /1 HTTP/1.1\r\n" + head + "Connection: x, host\r\nX: a\r\nTE: gzip\r\n\r\n",
			[]string{"200 OK"},
			[]string{"GET /1 " + host + " len=0 te=[] x=[]"},
		},
	} {
		t.Run(what, func(t *testing.T) {
			d.raw(c.send, c.want...)
			judged, got := k.judged(), slices.DeleteFunc(seen.saw(), func(s string) bool { return strings.HasPrefix(s, "GET /last") })
			if len(got) != len(c.seen) || len(judged) < len(got) {
				t.Fatalf("the server saw %q, want %q; judged %q", got, c.seen, judged)
			}
			for i, s := range got {
				if !strings.HasPrefix(s, c.seen[i]) {
					t.Errorf("the server saw %q, want %q", s, c.seen[i])
				}
			}
		})
	}
}

// An h2 is a guest that writes frames of its own. Those of one step go out in one write: the
// other side may close when it has read the first.
type h2 struct {
	*http2.Framer
	c   *tls.Conn
	out *bufio.Writer
	hp  bytes.Buffer
	enc *hpack.Encoder
}

func (d *desk) h2() *h2 {
	d.t.Helper()
	c := d.tls("h2")
	out := bufio.NewWriter(c)
	out.WriteString(http2.ClientPreface) //nolint:errcheck // Flush says
	g := &h2{Framer: http2.NewFramer(out, c), c: c, out: out}
	g.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	g.enc = hpack.NewEncoder(&g.hp)
	if err := errors.Join(g.WriteSettings(), g.WriteSettingsAck(), out.Flush()); err != nil {
		d.t.Fatal(err)
	}
	return g
}

// ask sends a request of "name value" fields, and body in one frame. It is said to have more
// if open.
func (g *h2) ask(stream uint32, body string, open bool, fields ...string) error {
	g.hp.Reset()
	for _, f := range fields {
		name, value, _ := strings.Cut(f, " ")
		g.enc.WriteField(hpack.HeaderField{Name: name, Value: value}) //nolint:errcheck // to memory
	}
	err := g.WriteHeaders(http2.HeadersFrameParam{
		StreamID: stream, BlockFragment: g.hp.Bytes(), EndHeaders: true, EndStream: body == "" && !open,
	})
	if err == nil && body != "" {
		err = g.WriteData(stream, !open, []byte(body))
	}
	return errors.Join(err, g.out.Flush())
}

// answer is the status of a stream, or how it, or all, was ended.
func (g *h2) answer(stream uint32) string {
	for {
		f, err := g.ReadFrame()
		if err != nil {
			return err.Error()
		}
		switch f := f.(type) {
		case *http2.MetaHeadersFrame:
			if f.StreamID == stream {
				return f.PseudoValue("status")
			}
		case *http2.RSTStreamFrame:
			if f.StreamID == stream {
				return "reset " + f.ErrCode.String()
			}
		case *http2.GoAwayFrame:
			return "away " + f.ErrCode.String()
		}
	}
}

// TestFrames: the tricks of HTTP/2 that become requests of HTTP/1.1.
func TestFrames(t *testing.T) {
	const served = "POST /1 " + host
	start := []string{":method POST", ":scheme https", ":path /1", ":authority " + host}
	with := func(fields ...string) []string { return append(slices.Clone(start), fields...) }
	instead := func(i int, f string) []string { s := slices.Clone(start); s[i] = f; return s }
	for what, c := range map[string]struct {
		fields []string
		body   string
		want   string // begins the answer
		seen   string // begins what the server saw
		part   bool   // or it saw nothing of it yet
	}{
		"plain":                 {start, "words", "200", served + " len=-1 te=[chunked] x=[] body=words <nil>", false},
		"a length":              {with("content-length 5"), "words", "200", served + " len=5 te=[] x=[] body=words <nil>", false},
		"two lengths":           {with("content-length 5", "content-length 4"), "words", "400", "", false},
		"a length that is none": {with("content-length 5x"), "", "400", "", false},
		"a short body":          {with("content-length 9"), "words", "", served + " len=9 te=[] x=[] body=", true},
		"a long body":           {with("content-length 2"), "words", "", served + " len=2 te=[] x=[] body=", true},
		"chunks":                {with("transfer-encoding chunked"), "0\r\n\r\nGET /hidden HTTP/1.1\r\n\r\n", "400", "", false},
		"a connection":          {with("connection close"), "", "400", "", false},
		"an upgrade":            {with("upgrade websocket", "connection upgrade"), "", "400", "", false},
		"another te":            {with("te gzip"), "", "400", "", false},
		"LF in a value":         {with("x a\nhost: other.example.com"), "", "reset PROTOCOL_ERROR", "", false},
		"CR LF in a value":      {with("x a\r\n\r\nGET /hidden HTTP/1.1"), "", "reset PROTOCOL_ERROR", "", false},
		"a zero byte":           {with("x a\x00b"), "", "reset PROTOCOL_ERROR", "", false},
		"CR LF in a name":       {with("x\r\ny a"), "", "reset PROTOCOL_ERROR", "", false},
		"a colon in a name":     {with("x:y a"), "", "reset PROTOCOL_ERROR", "", false},
		"capitals in a name":    {with("Xy a"), "", "reset PROTOCOL_ERROR", "", false},
		"CR LF in the path":     {instead(2, ":path /1 HTTP/1.1\r\nHost: other.example.com\r\n\r\n"), "", "", "", false},
		"a space in the path":   {instead(2, ":path /1 HTTP/1.1 x"), "", "400", "", false},
		"a space in the query":  {instead(2, ":path /1?b HTTP/1.0"), "", "400", "", false},
		"OPTIONS * of another": {
			[]string{":method OPTIONS", ":scheme https", ":path *", ":authority other.example.com"}, "", "421", "", false,
		},
		"OPTIONS *": {
			[]string{":method OPTIONS", ":scheme https", ":path *", ":authority " + host}, "", "200", "OPTIONS * " + host, false,
		},
		"CR LF in the method":    {instead(0, ":method GET / HTTP/1.1\r\n\r\n"), "", "", "", false},
		"another host":           {instead(3, ":authority other.example.com"), "", "421", "", false},
		"a user":                 {instead(3, ":authority x@"+host), "", "", "", false},
		"CR LF in the authority": {instead(3, ":authority "+host+"\r\nx: y"), "", "", "", false},
		"Host beside":            {with("host other.example.com"), "", "400", "", false},
		"the same Host beside":   {with("host " + host), "", "200", served, false},
		"Host instead":           {with("host " + host)[:3:3], "", "421", "", false},
		"a URL as path":          {instead(2, ":path https://other.example.com/1"), "", "400", "", false},
		"no path":                {instead(2, ":path "), "", "reset PROTOCOL_ERROR", "", false},
		"a path without /":       {instead(2, ":path 1"), "", "reset PROTOCOL_ERROR", "", false},
		"two paths":              {with(":path /2"), "", "reset PROTOCOL_ERROR", "", false},
		"another scheme":         {instead(1, ":scheme ftp"), "", "reset PROTOCOL_ERROR", "", false},
		"CONNECT":                {[]string{":method CONNECT", ":authority " + host + ":443"}, "", "405", "", false},
		"extended CONNECT":       {append([]string{":method CONNECT", ":protocol websocket"}, start[1:]...), "", "reset", "", false},
		"TRACE":                  {instead(0, ":method TRACE"), "", "405", "", false},
		"refused":                {instead(2, ":path /refused"), "words", "403", "", false},
		"many lines":             {with(slices.Repeat([]string{"a "}, 129)...), "", "431", "", false},
		"a large head":           {with("x " + strings.Repeat("x", 20<<10)), "", "", "", false},
	} {
		t.Run(what, func(t *testing.T) {
			k, seen := &clerk{}, &record{}
			d := newDesk(t, k.maker, newSite(t, seen, false, nil).dial)
			g := d.h2()
			defer g.c.Close()
			if err := g.ask(1, c.body, false, c.fields...); err != nil {
				t.Fatal(err)
			}
			if got := g.answer(1); !strings.HasPrefix(got, c.want) || c.want == "" && got == "200" {
				t.Errorf("got %q, want %q", got, c.want)
			}
			g.c.Close()
			<-d.ended
			switch got := seen.saw(); {
			case len(got) == 0 && (c.seen == "" || c.part):
			case len(got) != 1 || c.seen == "" || !strings.HasPrefix(got[0], c.seen):
				t.Errorf("the server saw %q, want %q", got, c.seen)
			}
		})
	}
}

// TestMisdirected: a client that uses a connection for another host is told, and the connection
// goes on.
func TestMisdirected(t *testing.T) {
	d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(echo), true, nil).dial)
	g := d.h2()
	defer g.c.Close()
	for i, c := range []struct{ authority, want string }{
		{host, "200"}, {"other.example.com", "421"}, {host + ":443", "200"}, {host + ":80", "421"},
	} {
		if err := g.ask(uint32(2*i+1), "", false, ":method GET", ":scheme https", ":path /", ":authority "+c.authority); err != nil {
			t.Fatal(err)
		}
		if got := g.answer(uint32(2*i + 1)); got != c.want {
			t.Errorf("%s: %s, want %s", c.authority, got, c.want)
		}
	}
}

// TestSecondHello: a certificate is for the name that the daemon has marked, whatever name a
// second ClientHello has.
func TestSecondHello(t *testing.T) {
	i := newInspector((&clerk{}).maker)
	_, err := i.certificate(&tls.ClientHelloInfo{ServerName: "other.example.com", Conn: &session{Guest: &heads.Guest{Name: host}}})
	if !errors.Is(err, errName) {
		t.Error(err)
	}
}

// TestLimit: of more requests than there may be, the others are told so at once.
func TestLimit(t *testing.T) {
	here, end := make(chan bool, 1000), make(chan struct{})
	h := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { here <- true; <-end })
	d := newDesk(t, (&clerk{}).maker, newSite(t, h, true, nil).dial)
	ask := func(g *h2, n int) {
		for i := range n {
			if err := g.ask(uint32(2*i+1), "", false, ":method GET", ":scheme https", ":path /", ":authority "+host); err != nil {
				t.Error(err)
			}
		}
	}
	for range 4 {
		g := d.h2()
		defer g.c.Close()
		ask(g, maxRequests/4)
	}
	for range maxRequests {
		<-here
	}
	g := d.h2()
	defer g.c.Close()
	ask(g, 1)
	if got := g.answer(1); got != "503" {
		t.Error(got)
	}
	close(end)
	for stream := uint32(3); ; stream += 2 { // until one of the others has ended
		if err := g.ask(stream, "", false, ":method GET", ":scheme https", ":path /", ":authority "+host); err != nil {
			t.Fatal(err)
		}
		switch got := g.answer(stream); got {
		case "200":
			return
		case "503":
		default:
			t.Fatal(got)
		}
	}
}

// TestUnread: a request counts until the guest has let its answer be written, so that one which
// reads none has a bounded number of them.
func TestUnread(t *testing.T) {
	ours, theirs, err := child.Pair()
	if err != nil {
		t.Fatal(err)
	}
	line, far := must(child.NewConn(ours, MaxBody, false)), must(child.NewConn(theirs, maxToChild, true))
	d, i := deskOf(t, line, newSite(t, http.HandlerFunc(echo), true, nil).dial), newInspector((&clerk{}).maker)
	go heads.ServeLine(i, far) //nolint:errcheck // ends with the test
	go line.Run(d.handle)      //nolint:errcheck // likewise
	defer line.Close()
	d.configure(line)
	i.busy.Store(maxRequests) // by others
	g := d.h2()
	defer g.c.Close()
	if err := errors.Join(g.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}), g.out.Flush()); err != nil {
		t.Fatal(err)
	}
	get := func(stream uint32) string {
		if err := g.ask(stream, "", false, ":method GET", ":scheme https", ":path /", ":authority "+host); err != nil {
			t.Fatal(err)
		}
		return g.answer(stream)
	}
	for stream := uint32(1); stream < 20; stream += 2 {
		if got := get(stream); got != "503" {
			t.Fatal(got)
		}
	}
	if n := i.busy.Load(); n != maxRequests+10 {
		t.Errorf("%d count, and nobody has read the answers", n-maxRequests)
	}
	i.busy.Add(maxRequests)
	if got := get(21); !strings.HasPrefix(got, "reset") {
		t.Error(got)
	}
}

// A resetter is a server of HTTP/2 that resets each stream, and goes on or not.
type resetter struct {
	code  http2.ErrCode
	conns atomic.Int64
	heads atomic.Int64
}

func (s *resetter) dial() (net.Conn, error) {
	s.conns.Add(1)
	near, far := pair()
	go func() {
		c := tls.Server(far, &tls.Config{Certificates: []tls.Certificate{certOf()}, NextProtos: []string{"h2"}})
		defer c.Close()
		if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil {
			return
		}
		f := http2.NewFramer(c, c)
		f.WriteSettings() //nolint:errcheck // the reads say
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			if h, ok := frame.(*http2.HeadersFrame); ok {
				s.heads.Add(1)
				f.WriteRSTStream(h.StreamID, s.code) //nolint:errcheck // likewise
			}
		}
	}()
	return near, nil
}

// TestSentOnce: a request that may have had an effect is sent once, whatever the server says, on
// the only connection that is opened for it. One that may be repeated is sent a few times, and each
// time but the first may open two: see spent.
func TestSentOnce(t *testing.T) {
	for _, code := range []http2.ErrCode{http2.ErrCodeProtocol, http2.ErrCodeRefusedStream, http2.ErrCodeInternal} {
		for method, most := range map[string]int64{"POST": 1, "DELETE": 1, "PATCH": 1, "GET": maxSends} {
			for _, body := range []string{"", "words"} {
				s, k := &resetter{code: code}, &clerk{again: true}
				d := newDesk(t, k.maker, s.dial)
				resp, answer := get(t, d.client(true), request(t, method, "https://"+host+"/", strings.NewReader(body)))
				if resp.StatusCode != 502 || !strings.Contains(answer, "UNREACHABLE") {
					t.Errorf("%d %s", resp.StatusCode, answer)
				}
				if n := s.heads.Load(); n == 0 || n > most || s.conns.Load() > 2*most-1 || len(k.judged()) != 1 {
					t.Errorf("%s %q, %v: judged %d times, sent %d times, on %d connections",
						method, body, code, len(k.judged()), n, s.conns.Load())
				}
			}
		}
	}
}

// TestConfig: a child that is told nonsense says so, and keeps what it had.
func TestConfig(t *testing.T) {
	d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(echo), true, nil).dial)
	for want, c := range map[string]Config{
		"no certificate is among the roots": {nil, []byte(secret)},
		"this is not a configuration":       {public().PEM(), []byte("another")},
		"more than the":                     {make([]byte, maxConfig), nil},
	} {
		if err := c.Send(t.Context(), d.line); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if resp, _ := get(t, d.client(true), request(t, "GET", "https://"+host+"/", nil)); resp.StatusCode != 200 {
		t.Error(resp.Status)
	}
	d.configure(d.line)
	d.line.Close()
	if err := (Config{}).Send(t.Context(), d.line); !errors.Is(err, child.ErrGone) {
		t.Error(err)
	}
	if _, err := readConfig(strings.NewReader("\xff\xff\xff\xff1234")); !errors.Is(err, errForm) {
		t.Error(err)
	}
}
