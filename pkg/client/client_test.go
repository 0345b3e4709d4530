package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func serve(t testing.TB, h http.HandlerFunc) *Client {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	c, err := New(s.URL+"/v1/", "key")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// serveInPipes serves without a kernel in between, for synctest.
func serveInPipes(t *testing.T, h http.HandlerFunc) *Client {
	t.Helper()
	l := hosttest.NewPipes(0)
	s := &http.Server{Handler: h}
	go s.Serve(l)                   //nolint:errcheck // ends with the test
	t.Cleanup(func() { s.Close() }) //nolint:errcheck // as above
	c, err := New("tcp://sandboxd:1", "key")
	if err != nil {
		t.Fatal(err)
	}
	c.http.Transport.(*http.Transport).DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return l.Dial(ctx) }
	t.Cleanup(c.Close)
	return c
}

func TestNew(t *testing.T) {
	for host, base := range map[string]string{
		"unix:///run/s.sock": "http://sandboxd", "tcp://127.0.0.1:8080": "http://127.0.0.1:8080", "127.0.0.1:8080": "http://127.0.0.1:8080",
		"https://h/": "https://h", "http://h:1/v1": "http://h:1", "https://h/prefix/v1/": "https://h/prefix",
		"unix://": "", "ftp://h": "", "http://": "", "http://u:p@h": "", "http://h?x": "",
	} {
		c, err := New(host, "")
		if base == "" {
			if !errs.Is(err, errs.Invalid) {
				t.Errorf("%q: %v", host, err)
			}
		} else if err != nil || c.base != base {
			t.Errorf("%q: %v, %v", host, c, err)
		}
	}
}

func TestFromEnv(t *testing.T) {
	for _, c := range []struct{ host, domain, protocol, want string }{
		{"", "", "", DefaultHost},
		{"", "h:1", "", "http://h:1"},
		{"", "h:1", "https", "https://h:1"},
		{"", "http://h:1", "https", "http://h:1"},
		{"tcp://a:1", "h:1", "", "tcp://a:1"},
	} {
		t.Setenv("SANDBOXD_HOST", c.host)
		t.Setenv("OPEN_SANDBOX_DOMAIN", c.domain)
		t.Setenv("OPEN_SANDBOX_PROTOCOL", c.protocol)
		if got, err := FromEnv(); err != nil || got.host != c.want {
			t.Errorf("%+v: %v %v", c, got, err)
		}
	}
}

func TestErrors(t *testing.T) {
	status, body := 0, ""
	c := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		io.WriteString(w, body) //nolint:errcheck // read below
	})
	for _, x := range []struct {
		status int
		body   string
		code   errs.Code
		says   string
	}{
		{404, `{"code":"X","message":"no such thing"}`, errs.NotFound, "no such thing"},
		{409, `{"code":"SANDBOX::ALREADY_EXISTS","message":"taken"}`, errs.Exists, "taken"},
		{409, `{"code":"SNAPSHOT::ALREADY_EXISTS","message":"it has the name"}`, errs.Exists, "the name"},
		{409, `{"code":"POOL::EXISTS","message":"pool py exists"}`, errs.Exists, "exists"},
		{409, `{"code":"Y","message":"paused"}`, errs.WrongState, "paused"},
		{400, `{"code":"SANDBOX::API_NOT_SUPPORTED","message":"no"}`, errs.Unsupported, "no"},
		{502, `<html>bad gateway</html>`, errs.Unavailable, "502"},
		{503, ``, errs.Unavailable, "503"},
		{401, `unauthorized`, errs.Denied, "unauthorized"},
		{418, `{}`, errs.Internal, "{}"},
		{500, `{"code":"Z","message":"` + strings.Repeat("x", 1<<20), errs.Internal, "xxx"},
		{200, `not json`, errs.Internal, "not what this client expects"},
		{307, ``, errs.Internal, "307"},
	} {
		status, body = x.status, x.body
		_, err := c.Get(t.Context(), "lab")
		if !errs.Is(err, x.code) || !strings.Contains(err.Error(), x.says) {
			t.Errorf("%d: %s: %.200v", x.status, errs.CodeOf(err), err)
		}
	}
	gone, err := New("unix:///nonexistent/s", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gone.Version(t.Context()); !errs.Is(err, errs.Unavailable) || !strings.Contains(err.Error(), "make dev-up") {
		t.Errorf("no daemon: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Version(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// TestSilence: a daemon that hangs does not hang its clients.
func TestSilence(t *testing.T) { synctest.Test(t, silence) }

func silence(t *testing.T) {
	awake := make(chan struct{})
	c := serveInPipes(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/version") {
			io.WriteString(w, "{") //nolint:errcheck // read below
			http.NewResponseController(w).Flush()
		}
		io.Copy(io.Discard, r.Body) //nolint:errcheck // or the server would not see the client leave
		select {
		case <-awake:
			io.WriteString(w, "}") //nolint:errcheck // read below
		case <-r.Context().Done():
		}
	})
	c.answer = 50 * time.Millisecond
	for name, f := range map[string]func(context.Context) error{
		"get":    func(ctx context.Context) error { _, err := c.Get(ctx, "lab"); return err },
		"create": func(ctx context.Context) error { _, err := c.Create(ctx, wire.CreateRequest{}, true); return err },
		"delete": func(ctx context.Context) error { return c.Delete(ctx, "lab") },
		"start": func(ctx context.Context) error {
			_, err := c.Start(ctx, "lab", Command{Argv: []string{"x"}})
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		err := f(ctx)
		if !errs.Is(err, errs.Unavailable) || !strings.Contains(err.Error(), "did not answer within 50ms") {
			t.Errorf("%s: %v", name, err)
		}
		ctx2, cancel2 := context.WithCancel(ctx)
		c.answer = time.Minute
		time.AfterFunc(10*time.Millisecond, cancel2)
		if err := f(ctx2); !errors.Is(err, context.Canceled) {
			t.Errorf("%s, cancelled: %v", name, err)
		}
		c.answer = 50 * time.Millisecond
		cancel()
	}
	// What takes its time is no silence: output to follow, a body, an answer that has begun.
	time.AfterFunc(time.Hour, func() { close(awake) })
	follow := make(chan error, 1)
	go func() {
		follow <- c.FollowLogs(t.Context(), "lab", AllLines, LogTimes{}, Notices{}, io.Discard)
	}()
	put := make(chan error, 1)
	go func() {
		put <- c.Files("lab").Put(t.Context(),
			[]Upload{{"/a", 644, -1, func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader("a")), nil }}})
	}()
	_, err := c.Version(t.Context())
	if err := errors.Join(err, <-follow, <-put); err != nil {
		t.Error(err)
	}
}

const commandID = "0123456789abcdef0123456789abcdef"

func frames(parts ...any) []byte {
	b := agent.AppendFrame(nil, agent.FrameControl, []byte(`{"id":"`+commandID+`"}`))
	for i := 0; i < len(parts); i += 2 {
		b = agent.AppendFrame(b, byte(parts[i].(int)), []byte(parts[i+1].(string)))
	}
	return b
}

func TestExec(t *testing.T) {
	var got agent.CommandRequest
	stdin := make(chan string, 1)
	signals := make(chan string, 1)
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch strings.TrimPrefix(r.URL.Path, "/v1/sandboxes/lab/proxy/44772") {
		case "/command":
			if err := json.NewDecoder(r.Body).Decode(&got); err != nil || r.Header.Get(wire.HeaderAPIKey) != "key" ||
				r.Header.Get("Accept") != agent.FramesType {
				t.Errorf("%v %v", err, r.Header)
			}
			w.Header().Set("Content-Type", agent.FramesType)
			w.Write(frames()) //nolint:errcheck // read below
			http.NewResponseController(w).Flush()
			in := <-stdin
			//nolint:errcheck // without a second init
			w.Write(frames(1, "out:"+in, 0, "", 2, "err\x1b", 3, `{"exit_code":7,"signal":"SIG\u001bX"}`)[len(frames()):])
		case "/command/" + commandID + "/stdin":
			b, _ := io.ReadAll(r.Body)
			stdin <- string(b)
		case "/command/" + commandID + "/signal":
			signals <- r.URL.Query().Get("signal")
		default:
			http.NotFound(w, r)
		}
	})
	uid := int64(5)
	p, err := c.Start(t.Context(), "lab",
		Command{
			Argv: []string{"a", "b"}, Dir: "/d", Env: map[string]string{"E": "f"}, UID: &uid, Timeout: 1500 * time.Millisecond,
			Stdin: true,
		})
	if err != nil {
		t.Fatal(err)
	}
	if p.ID != commandID || got.Command != "" || strings.Join(got.Argv, " ") != "a b" || got.Cwd != "/d" || got.Envs["E"] != "f" ||
		*got.UID != 5 || got.Timeout != 1500 || !got.Stdin {
		t.Errorf("%s %+v", p.ID, got)
	}
	if err := p.Signal(t.Context(), "SIGINT"); err != nil || <-signals != "SIGINT" {
		t.Error(err)
	}
	if err := p.SendStdin(t.Context(), strings.NewReader("in")); err != nil {
		t.Error(err)
	}
	var out, errw bytes.Buffer
	exit, err := p.Wait(&out, &errw)
	if err != nil || exit.Code != 7 || out.String() != "out:in" || errw.String() != "err\x1b" || strings.Contains(exit.Signal, "\x1b") {
		t.Errorf("%+v %v %q %q", exit, err, &out, &errw)
	}
}

// TestHostileAgent: what answers in a sandbox may be anything.
func TestHostileAgent(t *testing.T) {
	typ, body := agent.FramesType, []byte(nil)
	c := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", typ)
		w.Write(body) //nolint:errcheck // read below
	})
	for name, b := range map[string][]byte{
		"nothing": nil, "noise": []byte("hello world"), "wrong id": agent.AppendFrame(nil, 0, []byte(`{"id":"../../x"}`)),
		"huge": {0, 0xff, 0xff, 0xff, 0xff, 1}, "output first": agent.AppendFrame(nil, 1, []byte("x")),
	} {
		body = b
		if _, err := c.Start(t.Context(), "lab", Command{Argv: []string{"x"}}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for name, b := range map[string][]byte{
		"cut off": frames(1, "x"), "bad exit": frames(3, `{"exit_code":99999}`), "no exit": frames(3, `[]`),
		"unknown stream": append(frames(), 9, 0, 0, 0, 0),
	} {
		body = b
		p, err := c.Start(t.Context(), "lab", Command{Argv: []string{"x"}})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := p.Wait(io.Discard, io.Discard); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	typ, body = "text/html", frames()
	if _, err := c.Start(t.Context(), "lab", Command{Argv: []string{"x"}}); err == nil {
		t.Error("text/html: no error")
	}
	if _, err := c.Commands("lab").Logs(t.Context(), "../x", 0, io.Discard); !errs.Is(err, errs.Invalid) {
		t.Errorf("a command id that is a path: %v", err)
	}
}

func TestFiles(t *testing.T) {
	got := map[string]string{}
	var modes []float64
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch strings.TrimPrefix(r.URL.Path, "/v1/sandboxes/lab/proxy/44772") {
		case "/files/upload":
			mr, err := r.MultipartReader()
			if err != nil {
				t.Error(err)
				return
			}
			for {
				meta, err := mr.NextPart()
				if err == io.EOF {
					return
				}
				var m struct {
					Path string
					Mode float64
				}
				if err != nil || json.NewDecoder(meta).Decode(&m) != nil || meta.FileName() == "" {
					return // the client broke off
				}
				part, err := mr.NextPart()
				if err != nil {
					return
				}
				b, err := io.ReadAll(part)
				if err != nil {
					return
				}
				got[m.Path] = string(b)
				modes = append(modes, m.Mode)
			}
		case "/files/download":
			switch r.URL.Query().Get("path") {
			case "/etc/passwd":
				fmt.Fprintln(w, "root:x:0:0::/root:/bin/sh\nbad:x\nweb:x:33:34::/:/bin/sh")
			case "/etc/group":
				fmt.Fprintln(w, "root:x:0:\nmail:x:8:")
			default:
				w.WriteHeader(404)
				io.WriteString(w, `{"code":"FILE_NOT_FOUND","message":"no such file"}`) //nolint:errcheck // read below
			}
		case "/files/info":
			fmt.Fprintf(w, `{"/a":{"path":"/a","type":"file","size":3,"mode":644}}`)
		default:
			http.NotFound(w, r)
		}
	})
	text := func(s string) func() (io.ReadCloser, error) {
		return func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(s)), nil }
	}
	big := strings.Repeat("0123456789", 200_000)
	if err := c.Files("lab").Put(t.Context(), []Upload{{"/a", 644, -1, text("one")}, {"/b c", 755, -1, text(big)}}); err != nil {
		t.Fatal(err)
	}
	if got["/a"] != "one" || got["/b c"] != big || fmt.Sprint(modes) != "[644 755]" {
		t.Errorf("%d files, modes %v", len(got), modes)
	}
	burning := func() (io.ReadCloser, error) { return nil, errors.New("disk on fire") }
	if err := c.Files("lab").Put(t.Context(), []Upload{{"/x", 644, -1, burning}}); err == nil ||
		!strings.Contains(err.Error(), "disk on fire") {
		t.Errorf("a source that fails: %v", err)
	}
	// Sizes known: those bytes and no more.
	if err := c.Files("lab").Put(t.Context(),
		[]Upload{{"/s", 644, 3, text("onesie")}, {"/none", 600, 0, text("")}, {"/b", 755, int64(len(big)), text(big)}}); err != nil {
		t.Fatal(err)
	}
	if s, ok := got["/none"]; got["/s"] != "one" || s != "" || !ok || got["/b"] != big {
		t.Errorf("with sizes: %q, %q, %d bytes", got["/s"], s, len(got["/b"]))
	}
	if err := c.Files("lab").Put(t.Context(), []Upload{{"/short", 644, 30, text("one")}}); !errs.Is(err, errs.Invalid) ||
		!strings.Contains(err.Error(), "/short") {
		t.Errorf("a file that shrinks: %v", err)
	}
	if fi, err := c.Files("lab").Stat(t.Context(), "/a"); err != nil || fi.Size != 3 {
		t.Errorf("%+v %v", fi, err)
	}
	if _, err := c.Files("lab").Stat(t.Context(), "/other"); err == nil {
		t.Error("an answer about another file was believed")
	}
	if _, err := c.Files("lab").Download(t.Context(), "/none"); !errs.Is(err, errs.NotFound) {
		t.Errorf("%v", err)
	}
	for spec, want := range map[string]string{
		"7": "7 -1", "7:8": "7 8", "web": "33 -1", "web:mail": "33 8", "web:9": "33 9", "bad": "err", "nobody": "err", "-1": "err",
		"web:none": "err", "99999999999": "err",
	} {
		u, g, err := c.Commands("lab").LookupUser(t.Context(), spec)
		s := "err"
		if err == nil {
			s = fmt.Sprint(*u, " ", -1)
			if g != nil {
				s = fmt.Sprint(*u, " ", *g)
			}
		}
		if s != want {
			t.Errorf("user %q: %s, want %s (%v)", spec, s, want, err)
		}
	}
}

func TestStreams(t *testing.T) {
	var seen []string
	const stream = ": alive\n\nevent: running\ndata: {\"type\":\"running\",\"id\":\"x\"}\n\ndata:{\"type\":\"ended\"}\n\n"
	for ev, err := range parseEvents(strings.NewReader(stream)) {
		seen = append(seen, ev.Type)
		if err != nil {
			seen = append(seen, err.Error())
		}
	}
	if fmt.Sprint(seen) != "[running ended  unexpected EOF]" {
		t.Errorf("%q", seen)
	}
	var lines []string
	im, err := parseBuild(strings.NewReader("{\"line\":\"a\"}\n{\"line\":\"b\"}\n{\"image\":{\"name\":\"python\"}}\n"),
		func(s string) { lines = append(lines, s) })
	if err != nil || im.Name != "python" || fmt.Sprint(lines) != "[a b]" {
		t.Errorf("%+v %v %v", im, err, lines)
	}
	if _, err := parseBuild(strings.NewReader("{\"line\":\"a\"}\n{\"error\":{\"code\":\"C\",\"message\":\"m\"}}\n"),
		func(string) {}); err == nil || err.Error() != "m" {
		t.Errorf("%v", err)
	}
	if _, err := parseBuild(strings.NewReader("{\"line\":\"a\"}\n"), func(string) {}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%v", err)
	}
}
