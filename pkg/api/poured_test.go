package api

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

const large = 3 << 20

// largeBody is a body that no shift of it equals.
func largeBody() []byte {
	b := make([]byte, large)
	rand.NewChaCha8([32]byte{}).Read(b) //nolint:errcheck // never fails
	return b
}

// scripted is an app that answers each request of a connection with the bytes for its path,
// and "end" for another path. It closes the connection after a path that begins with /close.
func scripted(t *testing.T, answers map[string]string) (ln net.Listener, conns *atomic.Int32) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	conns = &atomic.Int32{}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			conns.Add(1)
			go func() {
				defer c.Close()
				for br := bufio.NewReader(c); ; {
					r, err := http.ReadRequest(br)
					if err != nil {
						return
					}
					a, ok := answers[r.URL.Path]
					if !ok {
						a = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nend"
					}
					if _, err := io.WriteString(c, a); err != nil || strings.HasPrefix(r.URL.Path, "/close") {
						return
					}
				}
			}()
		}
	}()
	return ln, conns
}

// A large answer of any form ends where it says, however its client is connected: what the
// next request on the connection gets is its own answer.
func TestPouredAnswers(t *testing.T) {
	body := string(largeBody())
	head := "HTTP/1.1 200 OK\r\nContent-Length: " + strconv.Itoa(large) + "\r\n"
	const smuggled = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nsmuggled"
	ln, conns := scripted(t, map[string]string{
		"/plain":    head + "\r\n" + body,
		"/close":    head + "Connection: close\r\n\r\n" + body,
		"/close1.0": strings.Replace(head, "1.1", "1.0", 1) + "\r\n" + body,
		"/close-2":  head + "\r\n" + body[:large-1],
		"/close-3":  head + "\r\n",
		"/longer":   head + "\r\n" + body + smuggled,
		"/hinted":   "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + head + "\r\n" + body,
		"/both":     head + "Transfer-Encoding: chunked\r\n\r\n3\r\nend\r\n0\r\n\r\n",
		"/chunked": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: Sum\r\n\r\n" +
			fmt.Sprintf("%x\r\n%s\r\n0\r\nSum: 7\r\n\r\n", large, body),
		"/head":    head + "\r\n",
		"/304":     strings.Replace(head, "200 OK", "304 Not Modified", 1) + "\r\n",
		"/204":     "HTTP/1.1 204 No Content\r\n\r\n",
		"/events":  head + "Content-Type: text/event-stream; x\r\n\r\n" + body,
		"/events2": head + "Content-Type: text/event-stream\r\n\r\n" + body,
	})
	w := newWorld(t)
	w.app = ln
	path := "/v1/sandboxes/" + w.create().ID + "/proxy/8000"
	socket := filepath.Join(t.TempDir(), "s")
	w.serve("unix", socket, auth.Listener{})
	plain := w.url
	tcp := strings.TrimPrefix(plain, "http://")
	secure := w.secure()
	w.url = plain
	for name, dial := range map[string]func() (net.Conn, error){
		"tcp":  func() (net.Conn, error) { return net.Dial("tcp", tcp) },
		"unix": func() (net.Conn, error) { return net.Dial("unix", socket) },
		"tls":  func() (net.Conn, error) { return secure() },
	} {
		for _, c := range []struct {
			ask, body string
			cut       bool // the answer ends early, and with it the connection
		}{
			{"GET /plain", body, false},
			{"GET /plain", body, false},
			{"GET /close", body, false},
			{"GET /close1.0", body, false},
			{"GET /close-2", body[:large-1], true},
			{"GET /close-3", "", true},
			{"GET /longer", body, false},
			{"GET /hinted", body, false},
			{"GET /both", "end", false},
			{"GET /chunked", body, false},
			{"HEAD /head", "", false},
			{"GET /304", "", false},
			{"GET /204", "", false},
			{"GET /events", body, false},
			{"GET /events2", body, false},
		} {
			conn, err := dial()
			if err != nil {
				t.Fatal(err)
			}
			br := bufio.NewReader(conn)
			ask := func(line string) (string, error) {
				method, rest, _ := strings.Cut(line, " ")
				fmt.Fprintf(conn, "%s %s%s HTTP/1.1\r\nHost: x\r\n%s: %s\r\n\r\n", method, path, rest, wire.HeaderAPIKey, testKey)
				for {
					resp, err := http.ReadResponse(br, &http.Request{Method: method})
					if err != nil {
						return "", err
					}
					if resp.StatusCode != http.StatusEarlyHints {
						b, err := io.ReadAll(resp.Body)
						return string(b), err
					}
				}
			}
			got, err := ask(c.ask)
			if got != c.body || c.cut != errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("%s: %s: %d bytes, %v", name, c.ask, len(got), err)
			}
			if got, err := ask("GET /"); !c.cut && (err != nil || got != "end") || c.cut && err == nil {
				t.Errorf("%s: after %s: %d bytes (%.30q), %v", name, c.ask, len(got), got, err)
			}
			conn.Close()
		}
	}
	before := conns.Load()
	for range 5 {
		if a := w.do("GET", path+"/plain", ""); string(a.body) != body {
			t.Errorf("%d bytes", len(a.body))
		}
	}
	if n := conns.Load() - before; n > 1 {
		t.Errorf("5 answers take %d connections to the app", n)
	}
	if !strings.Contains(w.log.String(), fmt.Sprintf(`"bytes":%d`, large)) {
		t.Error("the log does not count what was poured")
	}
}

// openPipes are the names of the pipes that this process has open.
func openPipes(t *testing.T) (is map[string]bool) {
	t.Helper()
	is = map[string]bool{}
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range all {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(to, "pipe:") {
			is[to] = true
		}
	}
	return is
}

// What is there of a large answer is passed on before the rest is. While much of it comes,
// it passes through a pipe, which is gone afterwards, also if the client or the app leaves.
func TestPouredSlowly(t *testing.T) {
	body := largeBody()
	step := make(chan int)
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Length", strconv.Itoa(large))
		at := 0
		for n := range step {
			if n < 0 {
				panic(http.ErrAbortHandler)
			}
			rw.Write(body[at : at+n])              //nolint:errcheck // the client sees it
			http.NewResponseController(rw).Flush() //nolint:errcheck // see above
			if at += n; at == large {
				return
			}
		}
	}))
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	url := w.url + "/sandboxes/" + w.create().ID + "/proxy/8000/"
	ends := map[string]int{"whole": large - 2<<20 - 11, "app leaves": -1, "client leaves": 0}
	for name, last := range ends {
		before := openPipes(t) // what others of this process leave is none of this answer
		added := func() int {
			now := openPipes(t)
			maps.DeleteFunc(now, func(name string, _ bool) bool { return before[name] })
			return len(now)
		}
		r, err := http.NewRequest("GET", url, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set(wire.HeaderAPIKey, testKey)
		client := &http.Client{Transport: &http.Transport{}}
		got := make([]byte, large)
		at := 0
		go func() { step <- 0 }() // the app sends its head
		resp, err := client.Do(r)
		if err != nil {
			t.Fatal(name, err)
		}
		during := 0
		for _, n := range []int{1, 10, 512 << 10, 512 << 10, 512 << 10, 512 << 10} {
			step <- n
			if _, err := io.ReadFull(resp.Body, got[at:at+n]); err != nil {
				t.Fatal(name, n, err)
			}
			at += n
			during = max(during, added()) // a piece that ends with few bytes ends without a pipe
		}
		if during == 0 {
			t.Errorf("%s: no pipe during the answer", name)
		}
		if last == 0 {
			client.CloseIdleConnections()
			resp.Body.Close()
			step <- -1
		} else {
			step <- last
			n, err := io.ReadFull(resp.Body, got[at:])
			if at += n; (err == nil) != (last > 0) || !bytes.Equal(got[:at], body[:at]) {
				t.Errorf("%s: %d bytes, %v", name, at, err)
			}
		}
		resp.Body.Close()
		client.CloseIdleConnections()
		for deadline := time.Now().Add(10 * time.Second); added() > 0; { // there is no event when a handler has ended
			if w.do("GET", "/health", ""); time.Now().After(deadline) {
				t.Fatalf("%s: %d pipes are left", name, added())
			}
		}
	}
}

// A large request arrives whole, or is seen to be cut. What follows it on the connection is
// the next request.
func TestPouredRequests(t *testing.T) {
	body := largeBody()
	cut := make(chan error, 1)
	answered := make(chan struct{}, 1)
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/early" {
			rw.Header().Set("Content-Length", "0")
			rw.WriteHeader(http.StatusRequestEntityTooLarge)
			http.NewResponseController(rw).Flush() //nolint:errcheck // the client sees it
			<-answered                             // half a second later the server resets the connection, whoever has read the answer
			return
		}
		got, err := io.ReadAll(r.Body)
		if r.URL.Path == "/cut" {
			cut <- err
		}
		fmt.Fprint(rw, len(got) == 0 || bytes.Equal(got, body), err, r.ContentLength)
	}))
	defer app.Close()
	defer close(answered)
	w := newWorld(t)
	w.app = app.Listener
	path, tcp := "/sandboxes/"+w.create().ID+"/proxy/8000", strings.TrimPrefix(w.url, "http://")
	secure := w.secure()
	whole := []byte(fmt.Sprintf("Content-Length: %d\r\n\r\n%s", large, body))
	chunked := []byte(fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", large, body))
	for name, dial := range map[string]func() (net.Conn, error){
		"tcp": func() (net.Conn, error) { return net.Dial("tcp", tcp) },
		"tls": func() (net.Conn, error) { return secure() },
	} {
		c, err := dial()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		br := bufio.NewReader(c)
		for _, ask := range []struct {
			path string
			rest []byte
			want string
		}{
			{"/", whole, fmt.Sprint(true, nil, large)},
			{"/", []byte("\r\n"), fmt.Sprint(true, nil, 0)},
			{"/", append([]byte("Expect: 100-continue\r\n"), whole...), fmt.Sprint(true, nil, large)},
			{"/", chunked, fmt.Sprint(true, nil, -1)},
			{"/", whole, fmt.Sprint(true, nil, large)},
			{"/early", whole, ""},
		} {
			go func() { // an answer may come before the end of the request
				fmt.Fprintf(c, "POST %s%s HTTP/1.1\r\nHost: x\r\n%s: %s\r\n%s", path, ask.path, wire.HeaderAPIKey, testKey, ask.rest)
			}()
			resp, err := http.ReadResponse(br, nil)
			for err == nil && resp.StatusCode == http.StatusContinue {
				resp, err = http.ReadResponse(br, nil)
			}
			if err != nil {
				t.Fatalf("%s: %s: %v", name, ask.path, err)
			}
			got, err := io.ReadAll(resp.Body)
			if ask.path == "/early" {
				answered <- struct{}{}
			}
			if err != nil || string(got) != ask.want || (ask.want == "") != (resp.StatusCode == http.StatusRequestEntityTooLarge) {
				t.Errorf("%s: %s: %d %q, %v; want %q", name, ask.path, resp.StatusCode, got, err, ask.want)
			}
		}
		if c, err = dial(); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "POST %s/cut HTTP/1.1\r\nHost: x\r\n%s: %s\r\n%s", path, wire.HeaderAPIKey, testKey, whole[:large/2])
		c.Close()
		if err := <-cut; err == nil {
			t.Errorf("%s: the app takes half a request for a whole one", name)
		}
	}
}

// Much on an upgraded connection arrives whole both ways. The end of one direction leaves
// the other open.
func TestPouredUpgrade(t *testing.T) {
	body := largeBody()
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		c, buf, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		buf.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\nfirst")
		buf.Flush()
		got, err := io.ReadAll(buf) // until the client closes its half
		c.Write(got)                //nolint:errcheck // the client sees it
		fmt.Fprint(c, err)
	}))
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	path, tcp := "/sandboxes/"+w.create().ID+"/proxy/8000", strings.TrimPrefix(w.url, "http://")
	secure := w.secure()
	for name, dial := range map[string]func() (net.Conn, error){
		"tcp": func() (net.Conn, error) { return net.Dial("tcp", tcp) },
		"tls": func() (net.Conn, error) { return secure() },
	} {
		c, err := dial()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n%s: %s\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n", path, wire.HeaderAPIKey,
			testKey)
		br := bufio.NewReader(c)
		if resp, err := http.ReadResponse(br, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
			t.Fatalf("%s: %v, %v", name, resp, err)
		}
		if _, err := c.Write(body); err != nil {
			t.Fatal(name, err)
		}
		c.(interface{ CloseWrite() error }).CloseWrite() //nolint:errcheck // then the answer does not end
		got, err := io.ReadAll(br)
		if want := "first" + string(body) + "<nil>"; err != nil || string(got) != want {
			t.Errorf("%s: %d bytes of %d, %v", name, len(got), len(want), err)
		}
	}
}
