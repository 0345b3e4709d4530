package api

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestProxyUpgrade carries a protocol other than HTTP, both ways.
func TestProxyUpgrade(t *testing.T) {
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		c, buf, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		fmt.Fprintf(buf, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\nSec-WebSocket-Protocol: %s\r\n\r\n",
			r.Header.Get("Upgrade"), r.Header.Get("Sec-WebSocket-Protocol"))
		buf.Flush()
		io.Copy(c, buf) //nolint:errcheck // echo until the end
	}))
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	sb := w.create()
	c, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "GET /sandboxes/%s/proxy/8000/ws HTTP/1.1\r\nHost: x\r\n%s: %s\r\nConnection: Upgrade\r\nUpgrade: "+
		"websocket\r\nSec-WebSocket-Protocol: chat\r\n\r\n",
		sb.ID, wire.HeaderAPIKey, testKey)
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != 101 || resp.Header.Get("Sec-WebSocket-Protocol") != "chat" {
		t.Fatalf("%v %v", resp, err)
	}
	for _, msg := range []string{"hello\n", "again\n"} {
		io.WriteString(c, msg) //nolint:errcheck // read back below
		if got, err := br.ReadString('\n'); got != msg {
			t.Fatalf("echo %q, %v", got, err)
		}
	}
}

// TestProxySlowBody: of an answer whose length is known what is there is passed on
// before the rest is: its head, and each piece of its body.
func TestProxySlowBody(t *testing.T) {
	next := make(chan struct{})
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Length", "4")
		for _, piece := range []string{"", "ab", "cd"} {
			io.WriteString(rw, piece)              //nolint:errcheck // the client says what it got
			http.NewResponseController(rw).Flush() //nolint:errcheck // as above
			<-next
		}
	}))
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	sb := w.create()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url+"/sandboxes/"+sb.ID+"/proxy/8000/", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(wire.HeaderAPIKey, testKey)
	resp, err := http.DefaultClient.Do(r) // the head alone
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for _, want := range []string{"ab", "cd"} {
		next <- struct{}{}
		got := make([]byte, 2)
		if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != want {
			t.Fatalf("%q, %v", got, err)
		}
	}
	close(next)
}

// TestPerPeer: one address holds so many connections, upgraded ones among them.
func TestPerPeer(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "tls": true} {
		t.Run(name, func(t *testing.T) { testPerPeer(t, secure) })
	}
}

// maxPerPeer is how many connections one TCP address may hold.
const maxPerPeer = 512

func testPerPeer(t *testing.T, secure bool) {
	bye := make(chan struct{})
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		c, buf, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		buf.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
		buf.Flush()
		<-bye
	}))
	t.Cleanup(app.Close)
	w := newWorld(t)
	w.app = app.Listener
	path := fmt.Sprintf("/sandboxes/%s/proxy/8000/x", w.create().ID)
	http.DefaultClient.CloseIdleConnections()
	dial := func() (net.Conn, error) { return net.Dial("tcp", strings.TrimPrefix(w.url, "http://")) }
	if secure {
		dial = w.secure()
	}
	ask := func(path, headers string) (net.Conn, int) {
		t.Helper()
		c, err := dial()
		if err != nil && secure { // closed before it shook hands
			return nil, 0
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n%s: %s\r\n%s\r\n", path, wire.HeaderAPIKey, testKey, headers)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return c, 0
		}
		return c, resp.StatusCode
	}
	var held []net.Conn
	for i := range maxPerPeer {
		c, code := ask(path, "Connection: Upgrade\r\nUpgrade: x\r\n")
		if code != 101 {
			t.Fatalf("connection %d: %d", i, code)
		}
		held = append(held, c)
	}
	if _, code := ask("/health", ""); code != 0 {
		t.Errorf("one too many: %d", code)
	}
	close(bye)
	for _, c := range held {
		c.Close()
	}
	deadline := time.Now().Add(5 * time.Second)
	for {
		_, code := ask("/health", "")
		if code == 200 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("afterwards: %d", code)
		}
	}
}

// TestProxyStreams: what the app flushes arrives at once, and its death is seen.
func TestProxyStreams(t *testing.T) {
	next := make(chan struct{})
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		for range next {
			io.WriteString(rw, "tick\n")           //nolint:errcheck // read below
			http.NewResponseController(rw).Flush() //nolint:errcheck // it can
		}
		panic(http.ErrAbortHandler)
	}))
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	sb := w.create()
	req, err := http.NewRequest("GET", w.url+"/sandboxes/"+sb.ID+"/proxy/8000/", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(wire.HeaderAPIKey, testKey)
	go func() { next <- struct{}{} }()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	br := bufio.NewReader(resp.Body)
	for range 3 {
		if l, err := br.ReadString('\n'); l != "tick\n" {
			t.Fatalf("%q %v", l, err)
		}
		select {
		case next <- struct{}{}:
		case <-time.After(5 * time.Second):
			t.Fatal("stuck")
		}
	}
	close(next)
	if _, err := io.ReadAll(br); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a stream cut short ends with %v", err)
	}
}

func TestProxyEndsWithSandbox(t *testing.T) {
	left := make(chan struct{})
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		io.WriteString(rw, "tick\n")           //nolint:errcheck // read below
		http.NewResponseController(rw).Flush() //nolint:errcheck // it can
		<-r.Context().Done()                   // as a peer behind a link that is gone
		close(left)
	}))
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	end := w.mortal()
	sb := w.create()
	req, err := http.NewRequest("GET", w.url+"/sandboxes/"+sb.ID+"/proxy/8000/", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(wire.HeaderAPIKey, testKey)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	w.set(sb.ID, func(r *record.Record) { r.State, r.Reason = record.Ended, record.OOM })
	end()
	if b, err := io.ReadAll(resp.Body); string(b) != "tick\n" || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%q, %v", b, err)
	}
	<-left
}

// TestProxyEndsWithItsLife: who talks to a sandbox that was stopped and started
// since is told, and connections of the old life serve nobody in the new one.
func TestProxyEndsWithItsLife(t *testing.T) {
	var conns atomic.Int32
	asked := make(chan struct{}, 1)
	app := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			asked <- struct{}{}
			<-r.Context().Done() // as a peer behind a link that is gone
		}
	}))
	app.Config.ConnState = func(_ net.Conn, st http.ConnState) {
		if st == http.StateNew {
			conns.Add(1)
		}
	}
	app.Start()
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	end := w.mortal()
	sb := w.create()
	at := "/sandboxes/" + sb.ID + "/proxy/8000/"
	again := func(r *record.Record) { r.Started = time.Now() }
	w.set(sb.ID, again)
	// net/http drops a connection whose writer reports 50 ms late
	// (maxWriteWaitBeforeConnReuse), as on a busy host some do.
	n := conns.Load()
	for range 10 {
		if w.do("GET", at, ""); conns.Load() == n {
			break
		}
		if n++; conns.Load() != n || n == 10 {
			t.Fatalf("%d connections for %d requests", conns.Load(), n)
		}
	}
	w.set(sb.ID, again)
	w.do("GET", at, "")
	if conns.Load() != n+1 {
		t.Errorf("%d connections of two lives, %d of the first", conns.Load(), n)
	}
	go func() {
		<-asked
		w.set(sb.ID, again)
		end()
	}()
	if a := w.do("GET", at+"wait", ""); a.StatusCode != http.StatusConflict || !strings.Contains(a.error(t).Message, "started again") {
		t.Errorf("%s %s", a.Status, a.body)
	}
}

// TestProxyEndsBeforeAnswer: who still waits for an answer is told why none comes.
func TestProxyEndsBeforeAnswer(t *testing.T) {
	for want, how := range map[string]func(*record.Record){
		"ended (oom)":     func(r *record.Record) { r.State, r.Reason = record.Stopping, record.OOM },
		"ended (deleted)": func(r *record.Record) { r.State = record.Deleting },
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			end := w.mortal()
			sb := w.create()
			app := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				w.set(sb.ID, how)
				end()
				<-r.Context().Done()
			}))
			defer app.Close()
			w.app = app.Listener
			a := w.do("GET", "/sandboxes/"+sb.ID+"/proxy/8000/", "")
			if e := a.error(t); a.StatusCode/100 != 4 || !strings.Contains(e.Message, want) {
				t.Errorf("%s %s, want %s", a.Status, a.body, want)
			}
		})
	}
}

// drainTime is how long the gateway waits for the last bytes of a sandbox that has ended.
const drainTime = time.Second

// TestProxyUnwatched: a sandbox that runs and that nobody watches keeps its streams.
func TestProxyUnwatched(t *testing.T) {
	w := newWorld(t)
	w.mortal()()
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		time.Sleep(drainTime + 100*time.Millisecond) // nothing happens: there is no event for that
		io.WriteString(rw, "late")                   //nolint:errcheck // read below
	}))
	defer app.Close()
	w.app = app.Listener
	sb := w.create()
	if a := w.do("GET", "/sandboxes/"+sb.ID+"/proxy/8000/", ""); string(a.body) != "late" {
		t.Errorf("%s %s", a.Status, a.body)
	}
}

// mortal returns what ends every sandbox.
func (w *world) mortal() (end func()) {
	w.life, end = context.WithCancel(context.Background())
	return end
}

// TestCutStreams: a daemon that is about to end cuts what would go on, so that clients come back: a
// stream, whatever it is of, is broken and not complete. Other answers come to their end.
func TestCutStreams(t *testing.T) {
	more := make(chan struct{})
	app := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", r.URL.Query().Get("kind"))
		io.WriteString(rw, "begun ")           //nolint:errcheck // the client says what it got
		http.NewResponseController(rw).Flush() //nolint:errcheck // as above
		select {
		case <-more:
			io.WriteString(rw, "ended") //nolint:errcheck // as above
		case <-r.Context().Done():
		}
	}))
	defer app.Close()
	w := newWorld(t)
	w.app = app.Listener
	sb := w.create()
	ask := func(path string) *http.Response {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set(wire.HeaderAPIKey, testKey)
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		return resp
	}
	app8000 := "/sandboxes/" + sb.ID + "/proxy/8000/"
	streams := map[string]*http.Response{
		"events":          ask("/events"),
		"an event stream": ask(app8000 + "?kind=text/event-stream"),
		"frames":          ask(app8000 + "?kind=application/vnd.sandboxd.frames"),
		"follow":          ask(app8000 + "?kind=text/plain&follow=true"),
	}
	page := ask(app8000 + "?kind=text/html")
	w.s.CutStreams()
	for name, resp := range streams {
		if b, err := io.ReadAll(resp.Body); err == nil {
			t.Errorf("%s seems complete: %q", name, b)
		}
	}
	close(more)
	if b, err := io.ReadAll(page.Body); string(b) != "begun ended" {
		t.Errorf("a page: %q, %v", b, err)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(wire.HeaderAPIKey, testKey)
	if resp, err := http.DefaultClient.Do(r); err == nil {
		defer resp.Body.Close()
		if b, err := io.ReadAll(resp.Body); err == nil {
			t.Errorf("a stream began after the cut: %q", b)
		}
	}
}
