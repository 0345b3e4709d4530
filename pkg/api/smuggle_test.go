package api

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestSmuggling: on no listener is a request served that says in two ways where it ends,
// nor what follows it; the connection is closed.
func TestSmuggling(t *testing.T) {
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		io.Copy(rw, r.Body) //nolint:errcheck // compared below
	}))
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	id := w.create().ID
	path := "/sandboxes/" + id + "/proxy/8000/"
	socket := filepath.Join(t.TempDir(), "s")
	w.serve("unix", socket, auth.Listener{})
	tcp := strings.TrimPrefix(w.url, "http://")
	gateway := strings.TrimPrefix(w.serve("tcp", "127.0.0.1:0", auth.Listener{Gateway: true, PublicPorts: true}), "http://")
	for name, l := range map[string]struct {
		dial  func() (net.Conn, error)
		path  string
		alive string // a request that is served
	}{
		"unix":            {func() (net.Conn, error) { return net.Dial("unix", socket) }, "/v1/sandboxes", "/health"},
		"unix, a port":    {func() (net.Conn, error) { return net.Dial("unix", socket) }, path, path},
		"tcp":             {func() (net.Conn, error) { return net.Dial("tcp", tcp) }, "/v1/sandboxes", "/health"},
		"tcp, a port":     {func() (net.Conn, error) { return net.Dial("tcp", tcp) }, path, path},
		"tls":             {w.secure(), "/v1/sandboxes", "/health"},
		"tls, a port":     {w.secure(), path, path},
		"gateway, a port": {func() (net.Conn, error) { return net.Dial("tcp", gateway) }, "/" + id + "/8000/", "/" + id + "/8000/"},
		"gateway, itself": {func() (net.Conn, error) { return net.Dial("tcp", gateway) }, "/health", "/health"},
	} {
		head := "Host: 127.0.0.1\r\n" + wire.HeaderAPIKey + ": " + testKey + "\r\n"
		alive := "GET " + l.alive + " HTTP/1.1\r\n" + head + "\r\n"
		length := "POST " + l.alive + " HTTP/1.1\r\n" + head + "Content-Length: 5\r\n\r\nhello"
		chunks := "POST " + l.alive + " HTTP/1.1\r\n" + head + "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
		both := "POST " + l.path + " HTTP/1.1\r\n" + head + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
		for what, c := range map[string]struct {
			text   string
			served int // before the refusal
		}{
			"first, whole":      {both + "0\r\n\r\n" + alive, 0},
			"first, unfinished": {both + "5c\r\nx", 0},
			"the other way round": {strings.Replace(both, "Content-Length: 4\r\nTransfer-Encoding: chunked",
				"TRANSFER-ENCODING: chunked\r\ncontent-length: 4", 1), 0},
			"kept alive":             {alive + both + "0\r\n\r\n" + alive, 1},
			"after a body":           {length + both + "0\r\n\r\n" + alive, 1},
			"after chunks":           {chunks + both + "0\r\n\r\n" + alive, 1},
			"encoded, in HTTP/1.0":   {strings.Replace(both, "HTTP/1.1\r\n", "HTTP/1.0\r\nConnection: keep-alive\r\n", 1), 0},
			"clear, again and again": {alive + length + chunks + alive + both, 4},
		} {
			conn, err := l.dial()
			if err != nil {
				t.Fatal(err)
			}
			conn.SetDeadline(time.Now().Add(20 * time.Second)) //nolint:errcheck // a read fails then
			fmt.Fprint(conn, c.text)
			r := bufio.NewReader(conn)
			for n := 0; ; n++ {
				resp, err := http.ReadResponse(r, nil)
				if err != nil {
					t.Errorf("%s, %s: answer %d: %v", name, what, n, err)
					break
				}
				body, _ := io.ReadAll(resp.Body)
				if n < c.served {
					if resp.StatusCode == http.StatusBadRequest && strings.Contains(string(body), "where it ends") {
						t.Errorf("%s, %s: answer %d: %s %s", name, what, n, resp.Status, body)
					}
					continue
				}
				if resp.StatusCode != http.StatusBadRequest || !resp.Close || !strings.Contains(string(body), "where it ends") ||
					resp.Header.Get(wire.HeaderRequestID) == "" {
					t.Errorf("%s, %s: answer %d: %s %v %s", name, what, n, resp.Status, resp.Header, body)
				}
				break
			}
			if _, err := r.ReadByte(); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s, %s: the connection is not closed: %v", name, what, err)
			}
			conn.Close()
		}
	}
}

// TestAnsweredEarly: what is left of a body when an app has answered is no request.
func TestAnsweredEarly(t *testing.T) {
	w := newWorld(t)
	w.agent = http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		http.NewResponseController(rw).EnableFullDuplex() //nolint:errcheck // the test then waits for an answer in vain
		http.Error(rw, "no", http.StatusTeapot)
	})
	sb := w.create()
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second)) //nolint:errcheck // a read fails then
	fmt.Fprintf(conn, "PUT /v1/sandboxes/%s/proxy/44772/files/archive HTTP/1.1\r\nHost: x\r\n%s: %s\r\n"+
		"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", sb.ID, wire.HeaderAPIKey, testKey)
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != http.StatusTeapot {
		t.Fatalf("%+v, %v", resp, err)
	}
	io.Copy(io.Discard, resp.Body) //nolint:errcheck // its end is all that matters
	fmt.Fprint(conn, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
	if resp, err := http.ReadResponse(r, nil); err == nil {
		t.Errorf("the rest of the body was answered: %s", resp.Status)
	}
}

// TestIdleConnections: who holds as many idle connections as one address may loses the
// one that has been idle longest, and not the next request.
func TestIdleConnections(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "tls": true} {
		w := newWorld(t)
		dial := func() (net.Conn, error) { return net.Dial("tcp", strings.TrimPrefix(w.url, "http://")) }
		if secure {
			dial = w.secure()
		}
		ask := func(c net.Conn) int {
			c.SetDeadline(time.Now().Add(20 * time.Second)) //nolint:errcheck // a read fails then
			fmt.Fprint(c, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				return 0
			}
			io.Copy(io.Discard, resp.Body) //nolint:errcheck // its end is all that matters
			return resp.StatusCode
		}
		var held []net.Conn
		for i := range maxPerPeer + 3 {
			c, err := dial()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			if code := ask(c); code != http.StatusOK {
				t.Fatalf("%s: connection %d: %d", name, i, code)
			}
			if held = append(held, c); i == maxPerPeer-1 && ask(held[0]) != http.StatusOK { // now the second is the oldest
				t.Fatalf("%s: the first connection is gone too soon", name)
			}
		}
		// A connection is idle a moment after its answer, so neighbours may swap places.
		var gone []int
		for i, c := range held {
			if ask(c) != http.StatusOK {
				gone = append(gone, i)
			}
		}
		if len(gone) != 3 || gone[0] == 0 || gone[2] > 20 {
			t.Errorf("%s: the connections %d are gone, want three of the oldest without the first", name, gone)
		}
	}
}

// TestSilentConnections: connections that have sent nothing are idle too.
func TestSilentConnections(t *testing.T) {
	w := newWorld(t)
	var held []net.Conn
	for range maxPerPeer + 1 {
		c, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		held = append(held, c)
	}
	if a := w.do("GET", "/health", ""); a.StatusCode != http.StatusOK {
		t.Error(a.Status)
	}
	held[0].SetReadDeadline(time.Now().Add(20 * time.Second)) //nolint:errcheck // the read fails then
	_, err := held[0].Read(make([]byte, 1))
	if !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the oldest connection: %v", err)
	}
}
