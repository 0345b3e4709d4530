package terminate

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// ways are all pairs of what the guest and the server speak.
var ways = map[string]struct{ guest, server bool }{
	"1 to 1": {false, false}, "1 to 2": {false, true}, "2 to 1": {true, false}, "2 to 2": {true, true},
}

func eachWay(t *testing.T, h http.HandlerFunc, f func(t *testing.T, d *desk, c *http.Client, clerk *clerk)) {
	for what, way := range ways {
		t.Run(what, func(t *testing.T) {
			k := &clerk{}
			d := newDesk(t, k.maker, newSite(t, h, way.server, nil).dial)
			f(t, d, d.client(way.guest), k)
		})
	}
}

// TestRequests: a request arrives as it was, with what the Judge put in, and is judged once;
// the answer does not have it any more.
func TestRequests(t *testing.T) {
	eachWay(t, echo, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		for _, method := range []string{"GET", "POST", "PUT", "DELETE", "OPTIONS"} {
			r := request(t, method, "https://"+host+"/a%2fb//c?d=%zz;e", strings.NewReader("words"))
			r.Header.Set("X-Forwarded-For", "203.0.113.9")
			r.Header.Set("X-Secret", "the guest's own")
			resp, body := get(t, c, r)
			if resp.ProtoMajor == 1 != strings.HasPrefix(t.Name(), "TestRequests/1") ||
				strings.HasPrefix(body, "HTTP/2") != strings.HasSuffix(t.Name(), "2_to_2") {
				t.Errorf("it is %s here, and there %s", resp.Proto, body)
			}
			for _, w := range []string{
				method + " /a%2fb//c?d=%zz;e " + host, "len=5", "body=words <nil>", `X-Secret=["` + secret + `"]`, `X-Forwarded-For=["203.0.113.9"]`,
			} {
				if !strings.Contains(body, w) {
					t.Errorf("%s: no %q in %q", method, w, body)
				}
			}
			if resp.Header.Get("X-Echo") != "***" {
				t.Errorf("the answer has %v", resp.Header)
			}
			if got, want := fmt.Sprint(k.judged()), "["+method+" https://"+host+":443/a/b//c]"; got != want {
				t.Errorf("judged %s, want %s", got, want)
			}
		}
		if n := d.certificates(); n != 1 {
			t.Errorf("the daemon made %d certificates", n)
		}
	})
}

// TestRefused: the guest reads why, and the server gets nothing.
func TestRefused(t *testing.T) {
	eachWay(t, echo, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		for path, want := range map[string]string{
			"/refused":   `403 {"code":"SANDBOX::FORBIDDEN","message":"no rule allows it"}`,
			"/broken":    `502 {"code":"SANDBOX::UNAVAILABLE","message":"sandboxd could not decide on this request`,
			"/unlooked":  `502 {"code":"SANDBOX::UNAVAILABLE","message":"sandboxd has sent this request`,
			"/elsewhere": "200 HTTP/",
		} {
			resp, body := get(t, c, request(t, "GET", "https://"+host+path, nil))
			if got := fmt.Sprint(resp.StatusCode, " ", body); !strings.HasPrefix(got, want) || strings.Contains(got, "a text with") {
				t.Errorf("%s: %s", path, got)
			}
			if path == "/elsewhere" && !strings.Contains(body, " "+host+" ") {
				t.Errorf("it went to another host: %s", body)
			}
		}
	})
}

// TestBodyRefused: a Judge may read a body before it decides, and nothing is left that reads on.
func TestBodyRefused(t *testing.T) {
	eachWay(t, echo, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		// In HTTP/1.1 the guest may be cut off while it writes.
		resp, err := c.Do(request(t, "POST", "https://"+host+"/read", io.LimitReader(zeros{}, 4<<20)))
		if err == nil {
			b, _ := io.ReadAll(resp.Body)
			if resp.Body.Close(); resp.StatusCode != 403 || !strings.Contains(string(b), "its body is not allowed") {
				t.Errorf("%d %s", resp.StatusCode, b)
			}
		} else if strings.HasPrefix(t.Name(), "TestBodyRefused/2") {
			t.Error(err)
		}
		d.end(c)
		for end := time.Now().Add(time.Minute); ; runtime.Gosched() {
			var stacks bytes.Buffer
			pprof.Lookup("goroutine").WriteTo(&stacks, 2) //nolint:errcheck // to memory
			if !bytes.Contains(stacks.Bytes(), []byte("(*ahead).fill")) {
				return
			}
			if time.Now().After(end) {
				t.Fatal("the body is read on")
			}
		}
	})
}

// slowly is a Judge that tells when it has put a value in, and then waits.
type slowly struct {
	clerk
	loaded  chan bool
	release chan bool
}

func (s *slowly) Request(r *http.Request, to Destination) (Answerer, error) {
	a, err := s.clerk.Request(r, to)
	s.loaded <- true
	<-s.release
	return a, err
}

// TestChangedMeanwhile: a request does not leave with what a Config has put in that is replaced
// before it is sent.
func TestChangedMeanwhile(t *testing.T) {
	s := &slowly{loaded: make(chan bool), release: make(chan bool)}
	came := make(chan bool, 10)
	at := newSite(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { came <- true }), false, nil)
	d := newDesk(t, func([]byte, Daemon, Judge) (Judge, error) { return s, nil }, at.dial)
	c := d.client(false)
	for _, changes := range []bool{true, false} {
		go func() {
			<-s.loaded
			if changes {
				if err := (Config{Roots: public().PEM()}).Send(t.Context(), d.line); err != nil {
					t.Error(err)
				}
			}
			s.release <- true
		}()
		resp, body := get(t, c, request(t, "GET", "https://"+host+"/", nil))
		want := 200
		if changes {
			want = 503
		}
		if resp.StatusCode != want || changes != strings.Contains(body, "have just changed: send the request again") ||
			changes == (len(came) > 0) {
			t.Errorf("changed %v: %d %s, %d came", changes, resp.StatusCode, body, len(came))
		}
	}
}

// TestRevoked: a request that was let pass, and waits for a connection or for its turn on one, does
// not leave when its Config is replaced meanwhile.
func TestRevoked(t *testing.T) {
	wantRevoked := func(t *testing.T, c *http.Client, path string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		resp, err := c.Do(request(t, "POST", "https://"+host+path, nil).WithContext(ctx))
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != 503 || !strings.Contains(string(body), "have just changed: send the request again") {
			t.Errorf("%d %s, %v", resp.StatusCode, body, err)
		}
	}
	revoke := func(d *desk) {
		if err := (Config{Roots: public().PEM(), Judge: []byte(secret)}).Send(t.Context(), d.line); err != nil {
			t.Error(err)
		}
	}
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("dial/h2=%t", h2), func(t *testing.T) {
			came := make(chan string, 10)
			at := newSite(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { came <- r.URL.Path }), h2, nil)
			dialing, release := make(chan bool, 10), make(chan bool)
			d := newDesk(t, (&clerk{}).maker, func() (net.Conn, error) {
				dialing <- true
				<-release
				return at.dial()
			})
			go func() {
				<-dialing
				revoke(d)
				close(release)
			}()
			c := d.client(h2)
			wantRevoked(t, c, "/revoked")
			resp, _ := get(t, c, request(t, "POST", "https://"+host+"/again", nil))
			if first := <-came; resp.StatusCode != 200 || first != "/again" {
				t.Errorf("%s; the server got %s first", resp.Status, first)
			}
		})
	}
	t.Run("turn", func(t *testing.T) {
		came, hold := make(chan string, 10), make(chan bool)
		at := newSiteOf(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if came <- r.URL.Path; r.URL.Path == "/first" {
				<-hold
			}
		}), true, nil, 1)
		j := &slowly{loaded: make(chan bool), release: make(chan bool)}
		d := newDesk(t, func([]byte, Daemon, Judge) (Judge, error) { return j, nil }, at.dial)
		c := d.client(true)
		var others sync.WaitGroup
		defer others.Wait()
		pass := func() {
			<-j.loaded
			j.release <- true
		}
		others.Go(pass)
		get(t, c, request(t, "POST", "https://"+host+"/zeroth", nil)) // its answer comes behind how many streams there may be
		<-came
		first := make(chan int)
		go func() {
			resp, err := c.Do(request(t, "POST", "https://"+host+"/first", nil))
			if err != nil {
				t.Error(err)
				close(first)
				return
			}
			resp.Body.Close()
			first <- resp.StatusCode
		}()
		pass()
		if got := <-came; got != "/first" {
			t.Error(got)
		}
		others.Go(func() {
			pass()
			revoke(d) // when it waits for a stream, or a moment earlier
		})
		wantRevoked(t, c, "/second") // while the first is under way
		close(hold)
		if status := <-first; status != 200 || len(came) != 0 {
			t.Errorf("one that has left gets %d; the server got %d more", status, len(came))
		}
	})
}

// TestMethods: TRACE and CONNECT are refused.
func TestMethods(t *testing.T) {
	eachWay(t, echo, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		resp, body := get(t, c, request(t, "TRACE", "https://"+host+"/", nil))
		if resp.StatusCode != 405 || !strings.Contains(body, "METHOD_NOT_ALLOWED") {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
		if j := k.judged(); len(j) > 0 {
			t.Errorf("judged %v", j)
		}
	})
}

// TestAnswers: an answer arrives as the server sent it.
func TestAnswers(t *testing.T) {
	h := func(rw http.ResponseWriter, r *http.Request) {
		rw.Header()["Date"] = nil
		switch r.URL.Path {
		case "/head":
			rw.Header().Set("Content-Length", "12345")
		case "/204":
			rw.WriteHeader(204)
		case "/304":
			rw.Header().Set("ETag", `"x"`)
			rw.WriteHeader(304)
		case "/range":
			http.ServeContent(rw, r, "x.bin", time.Unix(1e9, 0), strings.NewReader("0123456789"))
		case "/untyped":
			rw.Header()["Content-Type"] = nil
			io.WriteString(rw, "<html>") //nolint:errcheck // the client says
		case "/redirect":
			http.Redirect(rw, r, "https://other.example.com/", http.StatusFound)
		case "/early-untyped":
			rw.WriteHeader(103)
			rw.Header()["Content-Type"] = nil
			io.WriteString(rw, "<html>") //nolint:errcheck // the client says
		case "/early":
			rw.Header().Set("Link", "</style.css>; rel=preload; secret="+secret)
			rw.WriteHeader(103)
			rw.Header().Del("Link")
			rw.WriteHeader(200)
		}
	}
	eachWay(t, h, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		for path, check := range map[string]func(*http.Response, string) bool{
			"/head":  func(r *http.Response, b string) bool { return r.ContentLength == 12345 && b == "" },
			"/204":   func(r *http.Response, b string) bool { return r.StatusCode == 204 && b == "" },
			"/304":   func(r *http.Response, b string) bool { return r.StatusCode == 304 && r.Header.Get("ETag") == `"x"` },
			"/range": func(r *http.Response, b string) bool { return r.StatusCode == 206 && b == "234" },
			"/untyped": func(r *http.Response, b string) bool {
				return r.Header["Content-Type"] == nil && r.Header["Date"] == nil
			},
			"/early-untyped": func(r *http.Response, b string) bool {
				return r.Header["Content-Type"] == nil && r.Header["Date"] == nil
			},
			"/redirect": func(r *http.Response, b string) bool { return r.Header.Get("Location") == "https://other.example.com/" },
		} {
			method := "GET"
			if path == "/head" {
				method = "HEAD"
			}
			r := request(t, method, "https://"+host+path, nil)
			if path == "/range" {
				r.Header.Set("Range", "bytes=2-4")
			}
			if resp, body := get(t, c, r); !check(resp, body) {
				t.Errorf("%s: %d %v %q", path, resp.StatusCode, resp.Header, body)
			}
		}
		links := ""
		r := request(t, "GET", "https://"+host+"/early", nil)
		r = r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
			Got1xxResponse: func(code int, h textproto.MIMEHeader) error { links += fmt.Sprint(code, " ", h["Link"]); return nil },
		}))
		if get(t, c, r); links != "103 [</style.css>; rel=preload; secret=***]" {
			t.Errorf("early: %s", links)
		}
	})
}

// TestTrailers: trailers pass both ways, those of an answer announced or not.
func TestTrailers(t *testing.T) {
	h := func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Trailer", "X-Announced")
		b, _ := io.ReadAll(r.Body)
		rw.Write(b) //nolint:errcheck // the client says
		rw.Header().Set("X-Announced", r.Trailer.Get("X-Sum"))
		rw.Header().Set(http.TrailerPrefix+"Grpc-Status", r.Header.Get("Te"))
	}
	eachWay(t, h, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		r := request(t, "POST", "https://"+host+"/", io.MultiReader(strings.NewReader("words")))
		r.Trailer = http.Header{"X-Sum": {"5"}}
		r.Header.Set("Te", "trailers")
		resp, body := get(t, c, r)
		if body != "words" || resp.Trailer.Get("X-Announced") != "5" || resp.Trailer.Get("Grpc-Status") != "trailers" {
			t.Errorf("%q, %v", body, resp.Trailer)
		}
	})
}

// TestForbiddenTrailers: of a request, what was not announced, or what a server may take for a
// header that was judged, goes nowhere.
func TestForbiddenTrailers(t *testing.T) {
	s := newSite(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) //nolint:errcheck // the trailers say
		fmt.Fprint(rw, r.Trailer)
	}), false, nil)
	d := newDesk(t, (&clerk{}).maker, s.dial)
	const end = "0\r\nX-Sum: 5\r\nHost: other.example.com\r\nAuthorization: x\r\nX-Late: 1\r\n\r\n"
	for announced, want := range map[string]string{
		"X-Sum, Host, Authorization": "map[X-Sum:[5]]",
		"X-Other":                    "map[X-Other:[]]", "": "map[]",
	} {
		if announced != "" {
			announced = "Trailer: " + announced + "\r\n"
		}
		got := d.raw("POST / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n" +
			announced + "\r\n" + end)
		if !strings.HasSuffix(got, "\r\n"+want) {
			t.Errorf("%q: %s, want %s", announced, got, want)
		}
	}
}

// TestExpect: the server decides whether the guest sends its body.
func TestExpect(t *testing.T) {
	h := func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/no" {
			http.Error(rw, "no", http.StatusExpectationFailed)
			return
		}
		echo(rw, r)
	}
	eachWay(t, h, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		for path, want := range map[string]int{"/yes": 200, "/no": 417} {
			read := false
			r := request(t, "POST", "https://"+host+path, readerFunc(func(p []byte) (int, error) {
				if read {
					return 0, io.EOF
				}
				read = true
				return copy(p, "words"), nil
			}))
			r.ContentLength = 5
			r.Header.Set("Expect", "100-continue")
			resp, body := get(t, c, r)
			if resp.StatusCode != want || want == 200 && !strings.Contains(body, "body=words") {
				t.Errorf("%s: %d %s, body read: %t", path, resp.StatusCode, body, read)
			}
		}
	})
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// TestStreams: each side reads what the other has sent, while both go on: server-sent events,
// and calls of gRPC in both directions.
func TestStreams(t *testing.T) {
	h := func(rw http.ResponseWriter, r *http.Request) {
		c := http.NewResponseController(rw)
		c.EnableFullDuplex() //nolint:errcheck // HTTP/2 is always
		rw.Header().Set("Content-Type", "application/grpc")
		c.Flush() //nolint:errcheck // the client says
		s := bufio.NewScanner(r.Body)
		for s.Scan() {
			fmt.Fprintf(rw, "heard %s\n", s.Text())
			c.Flush() //nolint:errcheck // likewise
		}
		rw.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
	}
	eachWay(t, h, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		out, in := io.Pipe()
		resp, err := c.Do(request(t, "POST", "https://"+host+"/", out))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		r := bufio.NewReader(resp.Body)
		for i := range 20 {
			fmt.Fprintf(in, "%d\n", i)
			if line, err := r.ReadString('\n'); err != nil || line != fmt.Sprintf("heard %d\n", i) {
				t.Fatalf("%q, %v", line, err)
			}
		}
		in.Close()
		if _, err := r.ReadByte(); err != io.EOF || resp.Trailer.Get("Grpc-Status") != "0" {
			t.Errorf("%v, %v", err, resp.Trailer)
		}
	})
}

// TestParts: no part of an answer waits for the next one, also if its length is known.
func TestParts(t *testing.T) {
	next := make(chan struct{})
	h := func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Length", "5")
		for i := range 6 {
			io.CopyN(rw, zeros{}, int64(min(i, 1))) //nolint:errcheck // the client says
			http.NewResponseController(rw).Flush()  //nolint:errcheck // likewise
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	}
	eachWay(t, h, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		resp, err := c.Do(request(t, "GET", "https://"+host+"/", nil))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		for i := range 6 {
			if _, err := io.ReadFull(resp.Body, make([]byte, min(i, 1))); err != nil {
				t.Fatal(err)
			}
			next <- struct{}{}
		}
	})
}

// TestCancelled: a guest that gives up ends the request at the server, and nothing is left.
func TestCancelled(t *testing.T) {
	gone := make(chan struct{}, 1)
	h := func(rw http.ResponseWriter, r *http.Request) {
		http.NewResponseController(rw).Flush() //nolint:errcheck // the client says
		<-r.Context().Done()
		gone <- struct{}{}
	}
	eachWay(t, h, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		ctx, cancel := context.WithCancel(t.Context())
		resp, err := c.Do(request(t, "GET", "https://"+host+"/", nil).WithContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		resp.Body.Close()
		<-gone
		d.end(c)
		d.closed()
	})
}

// TestCutAnswer: an answer that the server breaks off is an error, not a shorter answer.
func TestCutAnswer(t *testing.T) {
	h := func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/length" {
			rw.Header().Set("Content-Length", "100")
		}
		io.WriteString(rw, "some words")       //nolint:errcheck // the client says
		http.NewResponseController(rw).Flush() //nolint:errcheck // likewise
		panic(http.ErrAbortHandler)
	}
	eachWay(t, h, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		for _, path := range []string{"/length", "/chunks"} {
			resp, err := c.Do(request(t, "GET", "https://"+host+path, nil))
			if err != nil {
				continue // it was reset before the head was read
			}
			if b, err := io.ReadAll(resp.Body); err == nil {
				t.Errorf("%s: %q is taken for all", path, b)
			}
			resp.Body.Close()
		}
	})
	// The guest of an answer without a length knows its end by the end of TLS.
	d := newDesk(t, (&clerk{}).maker, newSite(t, http.HandlerFunc(h), false, nil).dial)
	c := d.tls("http/1.1")
	defer c.Close()
	io.WriteString(c, "GET /chunks HTTP/1.0\r\nHost: "+host+"\r\n\r\n") //nolint:errcheck // the read says
	if b, err := io.ReadAll(c); err == nil {
		t.Errorf("%q is taken for all", b)
	}
}

// TestEarlyAnswer: an answer before the end of the request is one, and the connection may be
// used again or not, but nothing hangs.
func TestEarlyAnswer(t *testing.T) {
	h := func(rw http.ResponseWriter, r *http.Request) {
		http.Error(rw, "too large", http.StatusRequestEntityTooLarge)
	}
	eachWay(t, h, func(t *testing.T, d *desk, c *http.Client, k *clerk) {
		for range 3 {
			resp, err := c.Do(request(t, "POST", "https://"+host+"/", io.LimitReader(zeros{}, 4<<20)))
			late := strings.HasSuffix(t.Name(), "to_1") // a server of HTTP/1.1 may be gone before its answer is read
			if err == nil && resp.StatusCode != 413 && (!late || resp.StatusCode != 502) {
				t.Error(resp.Status)
			}
			if err == nil {
				resp.Body.Close()
			} else if strings.HasPrefix(t.Name(), "TestEarlyAnswer/2") { // of HTTP/1.1 it may be cut off while it writes
				t.Error(err)
			}
		}
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestManyStreams: 200 requests of one connection are under way at the same time: all of them
// at a server of HTTP/2, and at one of HTTP/1.1 as many as a flow may have sockets.
func TestManyStreams(t *testing.T) {
	const n = 200
	for server, most := range map[bool]int64{false: maxServerConns, true: n} {
		var here atomic.Int64
		full := make(chan struct{})
		h := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/first" {
				if here.Add(1) == most {
					close(full)
				}
				<-full
			}
			echo(rw, r)
		})
		d := newDesk(t, (&clerk{}).maker, newSite(t, h, server, nil).dial)
		c := d.client(true)
		get(t, c, request(t, "GET", "https://"+host+"/first", nil)) // one connection for all
		var done sync.WaitGroup
		for i := range n {
			done.Go(func() {
				_, body := get(t, c, request(t, "POST", fmt.Sprintf("https://%s/%d", host, i), strings.NewReader("x")))
				if !strings.Contains(body, fmt.Sprintf("/%d %s", i, host)) {
					t.Errorf("%d: %s", i, body)
				}
			})
		}
		done.Wait()
		if n := d.connections(); n != 1 {
			t.Errorf("%d connections", n)
		}
	}
}

// TestWebSocket: after 101, bytes pass both ways, and the end of one side is that of the other.
func TestWebSocket(t *testing.T) {
	h := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		c, b, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n") //nolint:errcheck // likewise
		fmt.Fprintf(c, "X-Echo: %s\r\n\r\n", r.Header.Get("X-Secret"))
		io.Copy(c, b) //nolint:errcheck // the client says
	})
	for _, h2 := range []bool{false, true} { // a server of both gets a connection of HTTP/1.1
		d := newDesk(t, (&clerk{}).maker, newSite(t, h, h2, nil).dial)
		c := d.tls("h2", "http/1.1")
		c.Close()
		c = d.tls("http/1.1")
		fmt.Fprintf(c, "GET /ws HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", host)
		r := bufio.NewReader(c)
		resp, err := http.ReadResponse(r, nil)
		if err != nil || resp.StatusCode != 101 || resp.Header.Get("X-Echo") != "***" {
			t.Fatal(resp, err)
		}
		for i := range 10 {
			fmt.Fprintf(c, "%d\n", i)
			if line, err := r.ReadString('\n'); err != nil || line != fmt.Sprintf("%d\n", i) {
				t.Fatalf("%q, %v", line, err)
			}
		}
		c.Close()
		<-d.ended
		<-d.ended
	}
}

// TestOtherUpgrade: a server that changes to another protocol than a WebSocket, or unasked, is
// not followed.
func TestOtherUpgrade(t *testing.T) {
	h := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		c, _, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		if r.Header.Get("Upgrade") != "" {
			t.Errorf("the server is asked for %q", r.Header.Get("Upgrade"))
		}
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\n\r\n") //nolint:errcheck // the client says
	})
	d := newDesk(t, (&clerk{}).maker, newSite(t, h, false, nil).dial)
	for _, up := range []string{"", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"} {
		d.raw("GET / HTTP/1.1\r\nHost: "+host+"\r\n"+up+"\r\n", "502 Bad Gateway", "without being asked")
	}
}

// TestOtherNames: what is not marked passes undecrypted, or not at all.
func TestOtherNames(t *testing.T) {
	conf := &tls.Config{Certificates: []tls.Certificate{public().Issue("plain.example.com", time.Now().Add(time.Hour))}}
	k := &clerk{}
	d := newDesk(t, k.maker, newSite(t, http.HandlerFunc(echo), false, conf).dial)
	c := tls.Client(d.connect(), &tls.Config{RootCAs: public().Pool(), ServerName: "plain.example.com"})
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	c.Close()
	c = tls.Client(d.connect(), &tls.Config{RootCAs: public().Pool(), ServerName: "other.example.com"})
	if err := c.Handshake(); err == nil || !strings.Contains(err.Error(), "access denied") {
		t.Error(err)
	}
	d.want("2 2 plain.example.com", "2 2 other.example.com")
	if j := k.judged(); len(j) > 0 || d.certificates() > 0 {
		t.Errorf("judged %v", j)
	}
}

// TestOtherPorts: where the server may speak first, a guest that begins with a ClientHello is
// served like others, whether a rule allows the address or not.
func TestOtherPorts(t *testing.T) {
	for _, grant := range []bool{false, true} {
		k := &clerk{}
		d := newDesk(t, k.maker, newSite(t, http.HandlerFunc(echo), true, nil).dial)
		d.port, d.first, d.grant = 8443, true, grant
		for _, h2 := range []bool{false, true} {
			resp, body := get(t, d.client(h2), request(t, "GET", "https://"+host+":8443/", nil))
			if resp.StatusCode != 200 || !strings.Contains(body, " "+host+":8443 ") {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		}
		if j := k.judged(); fmt.Sprint(j) != fmt.Sprintf("[GET https://%s:8443/ GET https://%[1]s:8443/]", host) {
			t.Errorf("judged %v", j)
		}
		kind := map[bool]string{false: "2 2 ", true: "2 4 "}[grant] + host
		d.want("2 1 ", kind, "4 2 "+host, "2 1 ", kind, "4 2 "+host)
	}
}

// TestPlainHTTP: requests without TLS to a marked name are judged, the others are not.
func TestPlainHTTP(t *testing.T) {
	s := newSite(t, http.HandlerFunc(echo), false, nil)
	l := must(net.Listen("tcp", "127.0.0.1:0"))
	go s.Serve(l) //nolint:errcheck // ends with the test
	s.addr = l.Addr().String()
	k := &clerk{}
	d := newDesk(t, k.maker, s.dial)
	d.port = 80
	c := &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return d.connect(), nil
	}}}
	for url, want := range map[string]string{
		"http://" + host + "/x":       `X-Secret=["s3cret"]`,
		"http://" + host + "/refused": "no rule allows it",
		"http://plain.example.com/x":  "GET /x plain.example.com",
		"http://other.example.com/x":  "no rule allows other.example.com",
	} {
		for range 2 {
			_, body := get(t, c, request(t, "GET", url, nil))
			if !strings.Contains(body, want) || strings.Contains(body, secret) != strings.Contains(url, host+"/x") {
				t.Errorf("%s: %s", url, body)
			}
		}
	}
	got := k.judged()
	slices.Sort(got)
	want := []string{
		"GET http://api.example.com:80/refused", "GET http://api.example.com:80/refused",
		"GET http://api.example.com:80/x", "GET http://api.example.com:80/x",
	}
	if !slices.Equal(got, want) {
		t.Errorf("judged %v, want %v", got, want)
	}
	// On one connection.
	g := d.connect()
	defer g.Close()
	r := bufio.NewReader(g)
	for i, c := range []struct{ host, has string }{
		{"plain.example.com", "GET /0 plain"},
		{host, secret},
		{"plain.example.com", "GET /2 plain"},
		{host + ":81", "MISDIRECTED"},
		{host, secret},
	} {
		fmt.Fprintf(g, "GET /%d HTTP/1.1\r\nHost: %s\r\n\r\n", i, c.host)
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(b), c.has) {
			t.Errorf("%d: %s, %v", i, b, err)
		}
	}
}
