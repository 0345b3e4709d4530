package api

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// speak is a guest that reads the head of a request and then does what it likes
// with the connection, which is closed after it. ended is told the bytes it wrote.
func (w *world) speak(say func(c net.Conn)) (ended chan int64) {
	w.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { ln.Close() })
	w.app, ended = ln, make(chan int64, 16)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				n := &counted{Conn: c}
				if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
					say(n)
				}
				c.Close()
				ended <- n.n.Load()
			}()
		}
	}()
	return ended
}

type counted struct {
	net.Conn
	n atomic.Int64
}

func (c *counted) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.n.Add(int64(n))
	return n, err
}

// TestGuestAnswersBadly: what is no answer is a 502, soon, and costs no memory.
func TestGuestAnswersBadly(t *testing.T) {
	forever := func(c net.Conn, begin, line string) {
		io.WriteString(c, begin) //nolint:errcheck // see below
		b := []byte(strings.Repeat(line, 1000))
		for sent := 0; sent < 2<<30; sent += len(b) {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}
	for what, say := range map[string]func(net.Conn){
		"closes":             func(net.Conn) {},
		"half a status":      func(c net.Conn) { io.WriteString(c, "HTTP/1.1 2") },
		"no HTTP":            func(c net.Conn) { io.WriteString(c, "SSH-2.0-OpenSSH_9.2\r\n") },
		"half of its header": func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nA: b\r\n") },
		"2 GB of headers": func(c net.Conn) {
			forever(c, "HTTP/1.1 200 OK\r\n", "A: bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\r\n")
		},
		"one endless header": func(c net.Conn) { forever(c, "HTTP/1.1 200 OK\r\nA: ", "bbbbbbbbbbbbbbbbbbbbbbbb") },
		"an endless status":  func(c net.Conn) { forever(c, "HTTP/1.1 200 ", "OK") },
		"endless hints": func(c net.Conn) {
			forever(c, "", "HTTP/1.1 103 Early Hints\r\nLink: <"+strings.Repeat("x", 60)+">\r\n\r\n")
		},
		"two lengths": func(c net.Conn) {
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab")
		},
		"a negative length": func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nab") },
		"another coding":    func(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nab") },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			sb := w.create()
			ended := w.speak(say)
			start := time.Now()
			a := w.do("POST", "/sandboxes/"+sb.ID+"/proxy/8000/", "body")
			if e := a.error(t); a.StatusCode != 502 || !strings.Contains(e.Message, "port 8000 of sandbox") {
				t.Errorf("%s %s", a.Status, a.body)
			}
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("it took %s", took)
			}
			if n := <-ended; n > 16<<20 {
				t.Errorf("the guest got rid of %d bytes", n)
			}
		})
	}
}

// TestGuestNeverAnswers: a client waits for as long as it likes, and when it goes
// the guest is not kept.
func TestGuestNeverAnswers(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	asked := make(chan struct{})
	ended := w.speak(func(c net.Conn) {
		close(asked)
		io.Copy(io.Discard, c) //nolint:errcheck // until the proxy hangs up
	})
	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "GET", w.url+"/sandboxes/"+sb.ID+"/proxy/8000/", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(wire.HeaderAPIKey, testKey)
	left := make(chan error, 1)
	go func() {
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			resp.Body.Close()
		}
		left <- err
	}()
	<-asked
	leave()
	if err := <-left; err == nil {
		t.Error("it was answered")
	}
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the guest is still asked, for nobody")
	}
}

// TestSlowReader: who does not read holds up the guest that talks to it, in
// bounded memory, and no other stream.
func TestSlowReader(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	ended := w.speak(func(c net.Conn) {
		io.WriteString(c, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n") //nolint:errcheck // what follows counts
		c.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))        //nolint:errcheck // then it writes for ever
		b := make([]byte, 64<<10)
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	})
	c, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "GET /sandboxes/%s/proxy/8000/ HTTP/1.1\r\nHost: x\r\n%s: %s\r\n\r\n", sb.ID, wire.HeaderAPIKey, testKey)
	for range 20 {
		if a := w.do("GET", "/sandboxes/"+sb.ID+"/proxy/44772/ping", ""); a.StatusCode != 200 {
			t.Errorf("beside it: %s", a.Status)
		}
	}
	if n := <-ended; n > 64<<20 {
		t.Errorf("%d bytes went to who reads none", n)
	}
}

// TestProxyMethods: bodies and ranges go through as they are, for any method.
func TestProxyMethods(t *testing.T) {
	file := bytes.Repeat([]byte("0123456789"), 1000)
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			http.ServeContent(rw, r, "x.bin", time.Unix(1, 0), bytes.NewReader(file))
			return
		}
		b, _ := io.ReadAll(r.Body)
		fmt.Fprintf(rw, "%s %d %v %s", r.Method, r.ContentLength, r.TransferEncoding, b)
	}))
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	at := "/sandboxes/" + w.create().ID + "/proxy/8000/"
	for _, m := range []string{"DELETE", "PATCH", "PUT", "PROPFIND", "QUERY"} {
		if a := w.do(m, at, "a body"); a.StatusCode != 200 || string(a.body) != m+" 6 [] a body" {
			t.Errorf("%s: %s %q", m, a.Status, a.body)
		}
	}
	for ranges, want := range map[string]string{"bytes=3-5": "345", "bytes=-2": "89", "bytes=9998-": "89"} {
		a := w.do("GET", at, "", "Range", ranges)
		if a.StatusCode != 206 || string(a.body) != want || a.Header.Get("Content-Range") == "" ||
			a.Header.Get("Accept-Ranges") != "bytes" {
			t.Errorf("%s: %s %q %v", ranges, a.Status, a.body, a.Header)
		}
	}
	if a := w.do("GET", at, "", "Range", "bytes=20000-"); a.StatusCode != 416 {
		t.Errorf("beyond the end: %s", a.Status)
	}
	if a := w.do("HEAD", at, ""); a.StatusCode != 405 && a.StatusCode != 200 || len(a.body) > 0 {
		t.Errorf("HEAD: %s %q", a.Status, a.body)
	}
}

// TestProxyForHours: a stream on which something comes now and then is not cut,
// and one byte of a head is no reason to hold a connection.
func TestProxyForHours(t *testing.T) {
	w := newWorld(t)
	id := w.create().ID
	synctest.Test(t, func(t *testing.T) {
		w.pipe = func() net.Conn {
			ours, guests := net.Pipe()
			go func() {
				defer guests.Close()
				if _, err := http.ReadRequest(bufio.NewReader(guests)); err != nil {
					return
				}
				// read below
				io.WriteString(guests, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n") //nolint:errcheck
				for range 36 {
					time.Sleep(10 * time.Minute)
					io.WriteString(guests, "data: tick\n\n") //nolint:errcheck // read below
				}
			}()
			return ours
		}
		ln := &pipes{conns: make(chan net.Conn), done: make(chan struct{})}
		hs := w.s.HTTPServer(auth.Listener{})
		go hs.Serve(ln) //nolint:errcheck // ends with Close
		c := ln.dial()
		go fmt.Fprintf(c, "GET /sandboxes/%s/proxy/8000/ HTTP/1.1\r\nHost: x\r\n%s: %s\r\nConnection: close\r\n\r\n", id, wire.HeaderAPIKey,
			testKey)
		start := time.Now()
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		if n := strings.Count(string(b), "data: tick\n\n"); n != 36 || err != nil || time.Since(start) < 6*time.Hour {
			t.Errorf("%d events in %s, %v", n, time.Since(start), err)
		}
		c.Close()

		half := ln.dial()
		start = time.Now()
		go io.WriteString(half, "GET / HT")
		io.ReadAll(half) //nolint:errcheck // a refusal, perhaps
		if took := time.Since(start); took > 15*time.Second {
			t.Errorf("half a head holds a connection for %s", took)
		}
		half.Close()
		hs.Close()
		w.s.Close()
	})
}

// pipes is a listener of connections in memory.
type pipes struct {
	conns chan net.Conn
	done  chan struct{}
}

func (p *pipes) dial() net.Conn {
	ours, theirs := net.Pipe()
	p.conns <- theirs
	return ours
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.done:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	close(p.done)
	return nil
}
func (p *pipes) Addr() net.Addr { return &net.UnixAddr{} }

// TestRenewRarely: a busy endpoint does not write the store for each request, by
// whatever way it is reached.
func TestRenewRarely(t *testing.T) {
	g := newGate(t, auth.Listener{PublicPorts: true})
	busy := g.do("POST", "/v1/sandboxes",
		`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"timeout":60,`+
			`"extensions":{"access.renew.extend.seconds":"300"}}`).sandbox(t)
	host := busy.ID + "-8000." + gateDomain
	if a := g.get("/", host, "OpenSandbox-Access-Renew: skip"); a.StatusCode != 200 || g.renews.Load() != 0 {
		t.Errorf("asked not to: %s, %d renewals", a.Status, g.renews.Load())
	}
	if a := g.get("/", busy.ID+"-44772."+gateDomain); a.StatusCode != 401 || g.renews.Load() != 0 {
		t.Errorf("refused: %s, %d renewals", a.Status, g.renews.Load())
	}
	for range 50 {
		g.get("/", host)
		g.do("GET", "/sandboxes/"+busy.ID+"/proxy/8000/", "")
	}
	deadline := time.Now().Add(5 * time.Second)
	for g.renews.Load() == 0 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond) // it goes on behind the answer, and there is no event
	}
	if n := g.renews.Load(); n != 1 {
		t.Errorf("a hundred requests renewed it %d times", n)
	}
	// What would not live longer by it is left alone, and so is what never expires.
	for _, until := range []time.Time{time.Now().Add(time.Hour), {}} {
		other := g.do("POST", "/v1/sandboxes",
			`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"timeout":60,`+
				`"extensions":{"access.renew.extend.seconds":"300"}}`).sandbox(t)
		g.set(other.ID, func(r *record.Record) { r.Expires = until })
		g.get("/", other.ID+"-8000."+gateDomain)
	}
	if n := g.renews.Load(); n != 1 {
		t.Errorf("then %d", n)
	}
}

// TestSlowBody: a client that announces a body and does not send it is answered and let
// go, whether somebody reads the body or not.
func TestSlowBody(t *testing.T) {
	w := newWorld(t)
	id := w.create().ID
	for name, c := range map[string]struct {
		request, body string
		status        int
		sent          string
	}{
		"read":          {"POST /v1/sandboxes", "Content-Length: 100", http.StatusBadRequest, "{"},
		"read, chunked": {"POST /v1/sandboxes", "Transfer-Encoding: chunked", http.StatusBadRequest, "5\r\n{"},
		"not read":      {"GET /v1/sandboxes", "Content-Length: 100", http.StatusOK, ""},
		"no key":        {"POST /v1/sandboxes", "Content-Length: 100", http.StatusUnauthorized, ""},
		"no route":      {"POST /v1/nothing", "Content-Length: 100", http.StatusNotFound, ""},
		"the agent":     {"POST /sandboxes/" + id + "/proxy/44772/command", "Content-Length: 100", http.StatusBadRequest, "{"},
		"a port":        {"POST /sandboxes/" + id + "/proxy/8000/", "Content-Length: 100", http.StatusTeapot, "x"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w.pipe = func() net.Conn {
					ours, guests := net.Pipe()
					go func() {
						if q, err := http.ReadRequest(bufio.NewReader(guests)); err == nil {
							// If the connection ends with a byte that nobody read, net/http may tell of that,
							// and not the answer.
							io.ReadFull(q.Body, make([]byte, 1)) //nolint:errcheck // shows in the answer
							// read below
							io.WriteString(guests, "HTTP/1.1 418 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n") //nolint:errcheck
						}
						guests.Close()
					}()
					return ours
				}
				ln := &pipes{conns: make(chan net.Conn), done: make(chan struct{})}
				hs := w.s.HTTPServer(auth.Listener{})
				go hs.Serve(ln) //nolint:errcheck // ends with Close
				defer hs.Close()
				conn := ln.dial()
				defer conn.Close()
				key := testKey
				if name == "no key" {
					key = "wrong"
				}
				start := time.Now()
				go fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: x\r\n%s: %s\r\n%s\r\n\r\n%s", c.request, wire.HeaderAPIKey, key, c.body, c.sent)
				in := bufio.NewReader(conn)
				resp, err := http.ReadResponse(in, nil)
				if err != nil || resp.StatusCode != c.status {
					t.Fatalf("%v, %v; want %d", resp, err, c.status)
				}
				io.Copy(io.Discard, resp.Body) //nolint:errcheck // only its end counts
				io.Copy(io.Discard, in)        //nolint:errcheck // that is what is waited for
				if took := time.Since(start); took > 3*bodyTime {
					t.Errorf("the connection was held for %v", took)
				}
			})
		})
	}
}
