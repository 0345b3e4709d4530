package server

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/interpreter"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

func TestMain(m *testing.M) {
	interpreter.Drive(os.Args)                             // of contexts of go, the test binary is the driver
	unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)    //nolint:errcheck // TestReaper fails then
	unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC) //nolint:errcheck // as tune: what the test was started with
	handleIgnored()                                        // as tune
	os.Exit(m.Run())
}

// env is a server with a client and a directory to play in.
type env struct {
	*testing.T
	s    *Server
	http *httptest.Server
	dir  string
}

func newEnv(t *testing.T) *env { return newEnvWith(t, agent.Bootstrap{}) }

func newEnvWith(t *testing.T, b agent.Bootstrap) *env {
	t.Helper()
	b.Token = "tok"
	if b.User == "" {
		b.User = "" + itoa(os.Getuid()) + ":" + itoa(os.Getgid())
	}
	dir := t.TempDir()
	b.Workdir = cmp.Or(b.Workdir, dir)
	image := map[string]string{"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
	maps.Copy(image, b.Env)
	b.Env = image
	s, err := New(Config{Bootstrap: b, StateDir: filepath.Join(t.TempDir(), "state")})
	if err != nil {
		t.Fatal(err)
	}
	s.ready.Store(true)
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	return &env{t, s, h, dir}
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

// request makes a request with the token.
func (e *env) request(method, path string, body io.Reader) *http.Request {
	e.Helper()
	r, err := http.NewRequestWithContext(e.Context(), method, e.http.URL+path, body)
	if err != nil {
		e.Fatal(err)
	}
	r.Header.Set(agent.TokenHeader, "tok")
	r.Header.Set("User-Agent", "OpenSandbox-Python-SDK/1.1.0") // lines without endings: see TestLineEndings
	return r
}

func (e *env) send(r *http.Request) (*http.Response, string) {
	e.Helper()
	resp, err := e.http.Client().Do(r)
	if err != nil {
		e.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		e.Fatal(err)
	}
	return resp, string(b)
}

// call sends v as JSON, or v itself if it is a string, and wants a status.
func (e *env) call(want int, method, path string, v any) string {
	e.Helper()
	var body io.Reader
	switch v := v.(type) {
	case nil:
	case string:
		body = strings.NewReader(v)
	default:
		b, err := json.Marshal(v)
		if err != nil {
			e.Fatal(err)
		}
		body = bytes.NewReader(b)
	}
	resp, got := e.send(e.request(method, path, body))
	if resp.StatusCode != want {
		e.Errorf("%s %.80s %.80v: status %d, want %d: %.200s", method, path, v, resp.StatusCode, want, got)
	}
	if want >= 400 {
		var x agent.Error
		if err := json.Unmarshal([]byte(got), &x); err != nil || x.Code == "" || x.Message == "" {
			e.Errorf("%s %.80s: the error %.200q has no code and message", method, path, got)
		}
	} else if got == "" && resp.ContentLength != 0 {
		e.Errorf("%s %.80s: an empty reply without Content-Length: 0", method, path)
	}
	return got
}

// events runs a command and returns what its stream says, without times and
// pings, one event a line.
func (e *env) events(req agent.CommandRequest) string {
	e.Helper()
	out := e.call(http.StatusOK, "POST", "/command", req)
	return e.plain(out)
}

func (e *env) plain(out string) string {
	e.Helper()
	if !strings.HasSuffix(out, "}\n\n") {
		e.Errorf("the stream does not end with a blank line: %q", out)
	}
	var lines []string
	for i, chunk := range strings.Split(strings.TrimSuffix(out, "\n\n"), "\n\n") {
		var ev agent.Event
		if err := json.Unmarshal([]byte(chunk), &ev); err != nil || strings.Contains(chunk, "\n") {
			e.Errorf("event %q: %v", chunk, err)
		}
		if ev.Timestamp == 0 {
			e.Errorf("event %q has no timestamp", chunk)
		}
		switch {
		case (i == 0) != (ev.Type == "init"), (i == 1) && ev.Type != "ping":
			e.Errorf("event %d is %s", i, ev.Type)
		case ev.Type == "init" && !agent.IsCommandID(ev.Text):
			e.Errorf("init: %q is no id", ev.Text)
		case ev.Type == "error":
			lines = append(lines, "error "+ev.Error.Name+" "+ev.Error.Value+" "+strings.Join(ev.Error.Traceback, "|"))
		case ev.Type == "stdout", ev.Type == "stderr":
			b, _ := json.Marshal(ev.Text)
			lines = append(lines, ev.Type+" "+string(b))
		case ev.Type == "execution_complete":
			lines = append(lines, "complete")
		}
	}
	return strings.Join(lines, "\n")
}

// id returns the command id of a stream.
func (e *env) id(stream string) string {
	e.Helper()
	var ev agent.Event
	line, _, _ := strings.Cut(stream, "\n")
	if err := json.Unmarshal([]byte(line), &ev); err != nil || ev.Type != "init" {
		e.Fatalf("%q is no stream", stream)
	}
	return ev.Text
}

func TestTokenGuardsEverything(t *testing.T) {
	e := newEnv(t)
	for _, path := range []string{"/ping", "/command", "/files/info?path=/", "/proxy/80/", "/nope", "//", "/proxy/44772/ping"} {
		for _, token := range []string{"", "wrong", "to", "tokk", "TOK", "tok,tok"} {
			r := e.request("GET", path, nil)
			r.Header.Set(agent.TokenHeader, token)
			if resp, body := e.send(r); resp.StatusCode != 401 || !strings.Contains(body, `"code"`) {
				t.Errorf("%s with token %q: %d %s", path, token, resp.StatusCode, body)
			}
		}
	}
}

func TestPing(t *testing.T) {
	e := newEnv(t)
	resp, body := e.send(e.request("GET", "/ping", nil))
	if resp.StatusCode != 200 || body != "" || resp.ContentLength != 0 || resp.Header.Get(agent.ProtocolHeader) != "1" {
		t.Errorf("%v %q", resp, body)
	}
	e.s.ready.Store(false)
	e.call(http.StatusServiceUnavailable, "GET", "/ping", nil)
}

func TestIsolatedIsUnavailable(t *testing.T) {
	e := newEnv(t)
	var c map[string]any
	if err := json.Unmarshal([]byte(e.call(200, "GET", "/v1/isolated/capabilities", nil)), &c); err != nil {
		t.Fatal(err)
	}
	for _, k := range []string{"available", "setpriv_available", "userns_available", "commit_supported", "diff_supported"} {
		if c[k] != false {
			t.Errorf("%s: %v", k, c[k])
		}
	}
	if c["message"] != noIsolation {
		t.Error(c["message"])
	}
	for _, r := range []string{
		"POST session", "GET sessions", "GET session/x", "DELETE session/x", "POST session/x/run", "GET session/x/runs/y/logs",
		"GET session/x/diff", "POST session/x/commit", "GET session/x/files/info", "DELETE session/x/directories",
	} {
		method, path, _ := strings.Cut(r, " ")
		if got := e.call(503, method, "/v1/isolated/"+path, nil); !strings.Contains(got, `"SERVICE_UNAVAILABLE"`) {
			t.Errorf("%s: %s", r, got)
		}
	}
	e.call(404, "GET", "/v1/isolated/", nil)
	e.call(405, "POST", "/v1/isolated/capabilities", nil)
}

func TestRoutes(t *testing.T) {
	e := newEnv(t)
	e.call(404, "GET", "/", nil)
	e.call(400, "POST", "/code", "{}")
	e.call(404, "GET", "/command/", nil)
	e.call(404, "GET", "/command/x/y/z", nil)
	e.call(405, "PUT", "/command", "{}")
	e.call(405, "POST", "/ping", nil)
	e.call(404, "GET", "/command/status/nope", nil)
	e.call(404, "GET", "/command/nope/logs", nil)
	e.call(404, "POST", "/command/nope/signal?signal=INT", nil)
	e.call(400, "DELETE", "/command", nil)
	e.call(500, "DELETE", "/command?id=nope", nil)
	e.call(500, "DELETE", "/command?id=entrypoint", nil)
}

func TestHugeBody(t *testing.T) {
	e := newEnv(t)
	body := `{"command":"` + strings.Repeat("a", agent.MaxJSON) + `"}`
	for _, path := range []string{"/command", "/files/mv", "/directories", "/files/replace", "/files/permissions"} {
		resp, err := e.http.Client().Do(e.request("POST", path, strings.NewReader(body)))
		if err != nil {
			continue // the server may hang up on it before all was sent
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusRequestEntityTooLarge {
			t.Errorf("%s: status %d", path, resp.StatusCode)
		}
	}
}

// Files in memory are memory that is used.
func TestMetricsTmpfs(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{Limits: agent.Limits{MemoryBytes: 1 << 40}})
	used := func() (m agent.Metrics) {
		if err := json.Unmarshal([]byte(e.call(200, "GET", "/metrics", nil)), &m); err != nil {
			t.Fatal(err)
		}
		return m
	}
	grown := func() float64 {
		f, err := os.CreateTemp("/dev/shm", "sandboxd-test-")
		if err != nil {
			t.Fatal(err)
		}
		defer os.Remove(f.Name())
		defer f.Close()
		before := used()
		// Not written: what the race detector notes of that is memory of this process.
		if err := unix.Fallocate(int(f.Fd()), 0, 0, 256<<20); err != nil {
			t.Fatal(err)
		}
		return used().MemUsed - before.MemUsed
	}
	// As a test the agent sees the whole host, where others give memory back meanwhile.
	var all []float64
	for len(all) < 10 && (len(all) == 0 || all[len(all)-1] < 200) {
		all = append(all, grown())
	}
	if all[len(all)-1] < 200 {
		t.Errorf("with 256 MiB more in /dev/shm, %.0f MiB more are used", all)
	}
}

func TestMetrics(t *testing.T) {
	e := newEnvWith(t, agent.Bootstrap{Limits: agent.Limits{MemoryBytes: 64 << 20, CPUMillis: 100}})
	for range 2 {
		var m agent.Metrics
		if err := json.Unmarshal([]byte(e.call(200, "GET", "/metrics", nil)), &m); err != nil {
			t.Fatal(err)
		}
		if m.CPUCount != 0.1 || m.MemTotal != 64 || m.MemUsed <= 0 || m.MemUsed > m.MemTotal || m.CPUPct < 0 || m.CPUPct > 100 ||
			m.Timestamp == 0 {
			t.Errorf("%+v", m)
		}
	}
	resp, err := e.http.Client().Do(e.request("GET", "/metrics/watch", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var m agent.Metrics
	if err := json.NewDecoder(resp.Body).Decode(&m); err != nil || m.MemTotal != 64 {
		t.Errorf("%+v, %v", m, err)
	}
}

// What the guest runs is counted, its threads too, and not the agent.
func TestTasks(t *testing.T) {
	e := newEnv(t)
	count := func() (n int64) {
		var got agent.Tasks
		if err := json.Unmarshal([]byte(e.call(http.StatusOK, "GET", "/tasks", nil)), &got); err != nil {
			t.Fatal(err)
		}
		return got.Tasks
	}
	// As a test the agent is not PID 1, and sees the whole host: others come and go.
	if s, ok := proc.StatOf(os.Getpid()); !ok || s.PID != os.Getpid() || s.Tasks < 2 {
		t.Errorf("this process, which has threads, is %+v", s)
	}
	more := func() int64 {
		before := count()
		for range 64 {
			cmd := exec.Command("sleep", "1000")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { cmd.Process.Kill(); cmd.Wait() }() //nolint:errcheck // it is killed
		}
		return count() - before
	}
	for end := time.Now().Add(20 * time.Second); ; {
		n := more()
		if n >= 32 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("64 more processes are %d tasks", n)
		}
	}
}

func TestProxy(t *testing.T) {
	e := newEnv(t)
	var seen *http.Request
	var body string
	back := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		seen, body = r, string(b)
		if r.Header.Get("Upgrade") == "chat" {
			c, rw, _ := w.(http.Hijacker).Hijack()
			defer c.Close()
			fmt.Fprint(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: chat\r\n\r\n")
			line, _ := rw.ReadString('\n')
			io.WriteString(c, "you said "+line) //nolint:errcheck // a test
			return
		}
		w.WriteHeader(418)
		io.WriteString(w, "tea") //nolint:errcheck // a test
	}))
	defer back.Close()
	port := back.URL[strings.LastIndex(back.URL, ":")+1:]
	resp, got := e.send(e.request("DELETE", "/proxy/"+port+"/a//b%2Fc?q=1&q=2", strings.NewReader("[1]")))
	if resp.StatusCode != 418 || got != "tea" || body != "[1]" || seen.URL.EscapedPath() != "/a//b%2Fc" || seen.URL.RawQuery != "q=1&q=2" ||
		seen.Header.Get(agent.TokenHeader) != "" {
		t.Errorf("%d %q %q %v", resp.StatusCode, got, body, seen.URL)
	}
	if e.send(e.request("GET", "/proxy/"+port, nil)); seen.URL.Path != "/" {
		t.Errorf("path %q", seen.URL.Path)
	}
	r := e.request("GET", "/proxy/"+port+"/ws", nil)
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", "chat")
	up, err := e.http.Client().Do(r)
	if err != nil || up.StatusCode != 101 {
		t.Fatal(up, err)
	}
	rw := up.Body.(io.ReadWriteCloser)
	defer rw.Close()
	io.WriteString(rw, "hello\n") //nolint:errcheck // a test
	if b, _ := io.ReadAll(rw); string(b) != "you said hello\n" {
		t.Errorf("%q", b)
	}
	e.call(400, "GET", "/proxy/0/", nil)
	e.call(400, "GET", "/proxy/65536/", nil)
	e.call(400, "GET", "/proxy/+80/", nil)
	e.call(400, "GET", "/proxy/44772/ping", nil)
	back.Close()
	e.call(502, "GET", "/proxy/"+port+"/", nil)
}
