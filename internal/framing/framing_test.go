package framing

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

const (
	get     = "GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
	post    = "POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
	chunks  = "POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0a\r\n0123456789\r\n0\r\n\r\n"
	smuggle = "POST /d HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n5c\r\n"
)

// streams are what clients send, and how many heads of it are clear.
var streams = map[string]struct {
	text  string
	clear int64
}{
	"nothing":                  {"", 0},
	"one":                      {get, 1},
	"pipelined":                {get + post + chunks + get, 4},
	"empty lines between":      {post + "\r\n" + get + "\r\n\r\n" + get, 3},
	"bare line feeds":          {"GET /a HTTP/1.1\nHost: x\n\n" + get, 2},
	"no body after all":        {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" + get, 2},
	"the same length twice":    {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\ncontent-length:5\r\n\r\nhello" + get, 2},
	"a fold elsewhere":         {"GET / HTTP/1.1\r\nHost: x\r\nX-A: a\r\n Content-Length: 7\r\n\r\n" + get, 2},
	"HTTP/1.0":                 {"POST / HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello" + get, 2},
	"a head in a body":         {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 65\r\n\r\n" + smuggle[:65] + get, 2},
	"both":                     {smuggle, 0},
	"both, the other way":      {"POST / HTTP/1.1\r\nHost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n", 0},
	"both, the second request": {get + smuggle + get, 1},
	"both, after a body":       {post + smuggle, 1},
	"both, after chunks":       {chunks + smuggle, 1},
	"both in HTTP/1.0":         {"POST / HTTP/1.0\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello", 0},
	"encoded in HTTP/1.0":      {"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0},
	"two lengths":              {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", 0},
	"a length with a sign":     {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n\r\nhello", 0},
	"a folded length":          {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length:\r\n 5\r\n\r\nhello", 0},
	"a folded encoding":        {"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding:\r\n\tchunked\r\n\r\n0\r\n\r\n", 0},
	"an extension":             {strings.Replace(chunks, "5\r\n", "5;a=b\r\n", 1) + get, 1},
	"a trailer":                {strings.TrimSuffix(chunks, "\r\n") + "A: b\r\n\r\n" + get, 1},
	"a chunk that is longer":   {strings.Replace(chunks, "5\r\n", "4\r\n", 1) + get, 1},
	"a chunk of -1":            {strings.Replace(chunks, "5\r\n", "-1\r\n", 1) + get, 1},
	"a huge chunk":             {strings.Replace(chunks, "5\r\n", "ffffffffffffffff\r\n", 1) + get, 1},
	"a line without an end":    {strings.Replace(chunks, "5\r\n", strings.Repeat("0", 100), 1) + get, 1},
	"a bare line feed":         {strings.Replace(chunks, "5\r\n", "5\n", 1) + get, 1},
	"a head without an end":    {"GET / HTTP/1.1\r\nX: " + strings.Repeat("x", maxHead+4096) + "\r\n\r\n" + get, 0},
}

func TestScanner(t *testing.T) {
	for name, c := range streams {
		for _, step := range []int{1, 2, 3, 7, 4096, 1 << 20} {
			var s scanner
			var clear int64
			for rest := []byte(c.text); len(rest) > 0; {
				n := min(step, len(rest))
				clear += s.see(rest[:n])
				rest = rest[n:]
			}
			if clear != c.clear {
				t.Errorf("%s, by %d: %d clear heads, want %d", name, step, clear, c.clear)
			}
		}
	}
}

// FuzzScanner: as far as the scanner follows a connection, it finds the heads where
// net/http does, and none of them has both lengths.
func FuzzScanner(f *testing.F) {
	for _, c := range streams {
		if len(c.text) < 1000 {
			f.Add([]byte(c.text))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var ends []int // of the clear heads
		var s scanner
		for i := range b {
			if s.see(b[i:i+1]) == 1 {
				ends = append(ends, i+1)
			}
		}
		in := bytes.NewReader(b)
		r := bufio.NewReaderSize(in, 4096)
		at := func() int { return len(b) - in.Len() - r.Buffered() }
		for i := 0; ; i++ {
			for i > 0 { // net/http does so after a POST; otherwise it fails
				if c, err := r.ReadByte(); err != nil {
					return
				} else if c != '\r' && c != '\n' {
					r.UnreadByte() //nolint:errcheck // it was read just now
					break
				}
			}
			from := at()
			req, err := http.ReadRequest(r)
			if err != nil || i >= len(ends) {
				return // it serves nothing more, or refuses it
			}
			if at() != ends[i] {
				t.Fatalf("head %d ends at %d, not at %d", i, at(), ends[i])
			}
			raw := strings.ToLower("\n" + string(b[from:at()]))
			if strings.Contains(raw, "\ncontent-length:") && strings.Contains(raw, "\ntransfer-encoding:") {
				t.Fatalf("head %d has both: %q", i, raw)
			}
			if _, err := io.Copy(io.Discard, req.Body); err != nil && i+1 < len(ends) {
				t.Fatalf("head %d: its body is broken (%v), and yet the next head is clear", i, err)
			}
		}
	})
}

type connKey struct{}

// TestConn: the handler of each request learns whether that one is clear, by net/http's
// own count, also of requests that net/http answers itself.
func TestConn(t *testing.T) {
	const star = "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n" // never reaches a handler
	for name, c := range map[string]struct {
		text string
		want string // paths, with ! where the request is not clear
	}{
		"alone":           {smuggle, "/d!"},
		"kept alive":      {get + smuggle, "/a /d!"},
		"after net/http":  {star + get + star + smuggle, "/a /d!"},
		"all that follow": {post + chunks + get + smuggle, "/b /c /a /d!"},
	} {
		var got []string
		done := make(chan struct{})
		srv := &http.Server{
			ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, Of(c)) },
			ConnState: func(c net.Conn, s http.ConnState) {
				Of(c).State(s)
				if s == http.StateClosed {
					close(done)
				}
			},
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				at := r.URL.Path
				if !r.Context().Value(connKey{}).(*Conn).Clear() {
					at += "!"
					w.Header().Set("Connection", "close")
					http.NewResponseController(w).SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // of no use then
				}
				got = append(got, at)
			}),
		}
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go srv.Serve(Listener(ln, nil)) //nolint:errcheck // ends with Close
		cl, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(cl, c.text)
		io.Copy(io.Discard, cl) //nolint:errcheck // until the server closes it
		<-done
		cl.Close()
		srv.Close()
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%s: %s, want %s", name, s, c.want)
		}
	}
}

// TestPlainToTLS: a client that speaks no TLS is told so, as by net/http.
func TestPlainToTLS(t *testing.T) {
	lent := httptest.NewTLSServer(nil) // for its certificate
	defer lent.Close()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	srv := &http.Server{}
	ended := make(chan struct{})
	srv.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			close(ended)
		}
	}
	go srv.Serve(Listener(tls.NewListener(ln, lent.TLS), log.New(&said, "", 0))) //nolint:errcheck // ends with Close
	defer srv.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprint(c, get)
	b, _ := io.ReadAll(c) // it may end with a reset
	<-ended
	if !strings.Contains(string(b), "400 Bad Request") || !strings.Contains(string(b), "HTTPS server") ||
		!strings.Contains(said.String(), "TLS handshake with 127.0.0.1") {
		t.Errorf("answered %q, logged %q", b, said.String())
	}
}
