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
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// A witness is a Judge that numbers the requests, and the server that gets them: it reads what
// arrives strictly, and compares it with what was judged.
type witness struct {
	mu     sync.Mutex
	judged []string // the number is the index
	served map[string]bool
	faults []string
	open   int // connections
	none   sync.Cond
}

const numbered = "X-Judged"

// Request lets all pass but /refused.
func (w *witness) Request(r *http.Request, to Destination) (Answerer, error) {
	if r.URL.Path == "/refused" {
		return nil, &Refusal{http.StatusForbidden, "SANDBOX::FORBIDDEN", "no rule allows it"}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	r.Header.Set(numbered, fmt.Sprint(len(w.judged)))
	w.judged = append(w.judged, r.Method+" "+r.URL.RequestURI()+" "+to.Name)
	return nil, nil
}

func (w *witness) fault(form string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = append(w.faults, fmt.Sprintf(form, args...))
}

// dial is a socket to the witness, without a network.
func (w *witness) dial() (net.Conn, error) {
	near, far := pair()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open++
	go w.serve(tls.Server(far, &tls.Config{Certificates: []tls.Certificate{certOf()}, NextProtos: []string{"http/1.1"}}))
	return near, nil
}

// serve reads requests until there are no more. What net/http reads as heads must stand there
// as a strict server wants it.
func (w *witness) serve(c *tls.Conn) {
	defer func() {
		c.Close()
		w.mu.Lock()
		defer w.mu.Unlock()
		w.open--
		w.none.Broadcast()
	}()
	var head bytes.Buffer
	b := bufio.NewReader(c)
	for {
		head.Reset()
		for !bytes.HasSuffix(head.Bytes(), []byte("\r\n\r\n")) {
			line, err := b.ReadBytes('\n')
			if head.Write(line); err != nil {
				return
			}
		}
		r, err := http.ReadRequest(bufio.NewReader(io.MultiReader(bytes.NewReader(head.Bytes()), onlyReader{b})))
		if err != nil {
			w.fault("no request: %q: %v", head.Bytes(), err)
			return
		}
		w.look(head.String(), r)
		names := http.Header{}
		for name := range r.Trailer {
			names[name] = []string{}
		}
		r.Trailer = names
		if err := skipBody(r, b); err != nil {
			if errors.Is(err, errTrailer) {
				w.fault("%v", err)
			}
			return // or the guest did not send all
		}
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") //nolint:errcheck // the guest says
	}
}

// onlyReader gives nothing: the body is read by skipBody.
type onlyReader struct{ io.Reader }

// Read ends.
func (onlyReader) Read([]byte) (int, error) { return 0, io.EOF }

var errTrailer = errors.New("a trailer that was not announced, or is none")

// skipBody reads a body as strictly as it can be.
func skipBody(r *http.Request, b *bufio.Reader) error {
	if len(r.TransferEncoding) == 0 {
		_, err := io.CopyN(io.Discard, b, max(r.ContentLength, 0))
		return err
	}
	for {
		line, err := b.ReadString('\n')
		if err != nil {
			return err
		}
		var n int64
		if _, err := fmt.Sscanf(line, "%x\r\n", &n); err != nil || fmt.Sprintf("%x\r\n", n) != line {
			return fmt.Errorf("a chunk begins as %q", line)
		}
		if n == 0 { // and trailers
			for {
				line, err := b.ReadString('\n')
				if err != nil || line == "\r\n" {
					return err
				}
				if name, _, ok := strings.Cut(line, ": "); !ok || !httpguts.ValidTrailerHeader(name) || r.Trailer[name] == nil {
					return fmt.Errorf("%w: %q", errTrailer, line)
				}
			}
		}
		if _, err := io.CopyN(io.Discard, b, n+2); err != nil {
			return err
		}
	}
}

func (w *witness) look(head string, r *http.Request) {
	lines := strings.Split(strings.TrimSuffix(head, "\r\n\r\n"), "\r\n")
	for _, l := range lines {
		if strings.ContainsAny(l, "\r\n\x00") || l != strings.TrimLeft(l, " \t") {
			w.fault("a line is not one: %q", head)
		}
	}
	framings := 0
	for _, l := range lines[1:] {
		name, _, ok := strings.Cut(l, ": ")
		if !ok || strings.ContainsAny(name, " \t") {
			w.fault("a field is none: %q", l)
		}
		switch strings.ToLower(name) {
		case "content-length", "transfer-encoding":
			framings++
		case "connection", "upgrade", "http2-settings", "proxy-connection", "keep-alive":
			if strings.ToLower(name) == "connection" || strings.ToLower(name) == "upgrade" {
				break // of a WebSocket, or close
			}
			w.fault("a field of one connection: %q", l)
		}
	}
	if framings > 1 {
		w.fault("two framings: %q", head)
	}
	if !at(r.Host, Destination{Scheme: "https", Name: host, Port: 443}) || strings.Count(strings.ToLower(head), "\r\nhost:") != 1 {
		w.fault("the Host is %q in %q", r.Host, head)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	numbers := r.Header[numbered]
	var n int
	if len(numbers) == 1 {
		if _, err := fmt.Sscan(numbers[0], &n); err != nil || n >= len(w.judged) {
			n = -1
		}
	}
	switch {
	case len(numbers) != 1 || n < 0:
		w.faults = append(w.faults, fmt.Sprintf("it was not judged: %q", head))
	case w.served[numbers[0]] && r.Method != "GET" && r.Method != "HEAD" && r.Method != "OPTIONS" && r.Method != "TRACE":
		w.faults = append(w.faults, fmt.Sprintf("it came twice: %q", head))
	case w.judged[n] != r.Method+" "+r.RequestURI+" "+host:
		w.faults = append(w.faults, fmt.Sprintf("%q was judged, and came as %q", w.judged[n], head))
	}
	if len(numbers) == 1 {
		w.served[numbers[0]] = true
	}
}

func (w *witness) check(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.open > 0 { // the child has closed them
		w.none.Wait()
	}
	for _, f := range w.faults {
		t.Error(f)
	}
	w.judged, w.faults = nil, nil
	clear(w.served)
}

func newWitness(f *testing.F) (*witness, *desk) {
	w := &witness{served: map[string]bool{}}
	w.none.L = &w.mu
	d := newDesk(f, func([]byte, Daemon, Judge) (Judge, error) { return w, nil }, w.dial)
	return w, d
}

// guest is a connection without a network.
func (w *witness) guest(t *testing.T, d *desk, protocol string) *tls.Conn {
	t.Helper()
	near, far := pair()
	d.serve(far.(*net.UnixConn))
	c := tls.Client(near, &tls.Config{RootCAs: authority().Pool(), ServerName: host, NextProtos: []string{protocol}})
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	return c
}

// FuzzHTTP1: whatever a guest sends over TLS, the server gets requests only that were judged,
// for this host, in lines and a framing that any server reads in the same way.
func FuzzHTTP1(f *testing.F) {
	const head = " HTTP/1.1\r\nHost: " + host + "\r\n"
	const last = "\r\nGET /last" + head + "Connection: close\r\n\r\n"
	for _, s := range []string{
		"GET /a?b" + head + "\r\n",
		"GET /a HTTP/1.1\r\nHost: other.example.com\r\n\r\n",
		"POST /a" + head + "Content-Length: 3\r\n\r\nabcGET /refused" + head + "\r\n",
		"POST /a" + head + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nX-Judged: 7\r\n\r\n",
		"POST /a" + head + "Transfer-Encoding: chunked\r\nTrailer: X-Judged, Host\r\n\r\n0\r\nX-Judged: 7\r\nHost: b\r\n\r\n",
		"GET /a" + head + "X: a\r\n b\nY: c\r\nX-Judged: 9\r\n\r\n",
		"GET /a" + head + "Connection: x-judged, host, upgrade\r\nUpgrade: websocket\r\n\r\nGET /hidden" + head + "\r\n",
		"GET https://" + host + "/%0d%0aX:%20y HTTP/1.1\r\nHost: other.example.com\r\n\r\n",
		"POST /a" + head + "Expect: 100-continue\r\nContent-Length: 1\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	w, d := newWitness(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		c := w.guest(t, d, "http/1.1")
		defer c.Close()
		go func() { // each may be refused
			c.Write(b)              //nolint:errcheck
			io.WriteString(c, last) //nolint:errcheck
			c.CloseWrite()          //nolint:errcheck
		}()
		io.Copy(io.Discard, c) //nolint:errcheck // it ends
		<-d.ended
		w.check(t)
	})
}

// FuzzHTTP2 is FuzzHTTP1 for fields of HTTP/2, a body and frames behind it.
func FuzzHTTP2(f *testing.F) {
	const start = ":method\x00POST\x01:scheme\x00https\x01:path\x00/a\x01:authority\x00" + host
	for _, s := range []string{
		"", "\x01x\x00a\r\nHost: b", "\x01content-length\x003", "\x01content-length\x003\x01content-length\x002",
		"\x01transfer-encoding\x00chunked",
		"\x01host\x00other.example.com", "\x01x-judged\x007\x01te\x00trailers", "\x01trailer\x00x-judged", "\x01:path\x00/b",
		"\x01cookie\x00a=b\x01cookie\x00c=d", "\x01expect\x00100-continue",
	} {
		f.Add([]byte(start+s), []byte("abc"), []byte{})
	}
	f.Add([]byte(strings.Replace(start, "/a", "/a?b HTTP/1.0", 1)), []byte("abc"), []byte{})
	f.Add([]byte(start+"\x01:path\x00/a b\r\n"), []byte{}, []byte("\x00\x00\x01\x00\x01\x00\x00\x00\x01a"))
	f.Add([]byte(strings.Replace(start, "POST", "CONNECT\x01:protocol\x00websocket", 1)), []byte{}, []byte{})
	f.Add([]byte(strings.Replace(start, host, "other.example.com", 1)), []byte{}, []byte{})
	w, d := newWitness(f)
	f.Fuzz(func(t *testing.T, fields, body, frames []byte) {
		c := w.guest(t, d, "h2")
		defer c.Close()
		var hp, out bytes.Buffer
		enc := hpack.NewEncoder(&hp)
		for field := range bytes.SplitSeq(fields, []byte{1}) {
			name, value, _ := bytes.Cut(field, []byte{0})
			enc.WriteField(hpack.HeaderField{Name: string(name), Value: string(value)}) //nolint:errcheck // to memory
		}
		if hp.Len() > 16<<10 || len(body) > 16<<10 || len(frames) > 64<<10 {
			return
		}
		fr := http2.NewFramer(&out, c)
		out.WriteString(http2.ClientPreface)
		err := errors.Join(fr.WriteSettings(), fr.WriteHeaders(http2.HeadersFrameParam{
			StreamID: 1, BlockFragment: hp.Bytes(), EndHeaders: true, EndStream: len(body) == 0,
		}))
		if len(body) > 0 {
			err = errors.Join(err, fr.WriteData(1, true, body))
		}
		if err != nil {
			t.Fatal(err)
		}
		out.Write(frames)
		go c.Write(out.Bytes()) //nolint:errcheck // it may be refused
		for ended := false; !ended; {
			g, err := fr.ReadFrame()
			if err != nil {
				break
			}
			_, away := g.(*http2.GoAwayFrame)
			_, reset := g.(*http2.RSTStreamFrame)
			ended = away || reset || g.Header().StreamID == 1 && g.Header().Flags.Has(http2.FlagDataEndStream)
		}
		c.Close()
		<-d.ended
		w.check(t)
	})
}
