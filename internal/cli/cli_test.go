package cli

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/foreground"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestMain lets the test binary be sandboxctl, so that exit codes, signals and
// the two outputs are the real ones.
func TestMain(m *testing.M) {
	if os.Getenv("BE_SANDBOXCTL") != "" {
		if limit, err := time.ParseDuration(os.Getenv("COMPLETION_LIMIT")); err == nil {
			command.CompletionLimit = limit
		}
		if os.Getenv("TELL_SIGNALS") != "" {
			told := os.NewFile(3, "told")
			foreground.Noticed = func() { told.WriteString("x") } //nolint:errcheck // the test waits for it
		}
		os.Exit(Run("unknown", os.Args[1:]))
	}
	os.Exit(m.Run())
}

const (
	testID    = "tabcdefghijk"
	commandID = "0123456789abcdef0123456789abcdef"
)

// daemon plays a daemon with one sandbox, as far as a command line can see.
type daemon struct {
	url string

	mu       sync.Mutex
	requests []string
	create   wire.CreateRequest
	command  agent.CommandRequest
	line     agent.SessionRun
	state    wire.Status
	code     *int                                     // of the entrypoint
	idle     bool                                     // the sandbox has no entrypoint
	image    wire.Info                                // what its image runs
	gone     bool                                     // there is no sandbox
	away     bool                                     // the daemon does not serve
	news     chan struct{}                            // each is an event
	past     []wire.Event                             // what GET /events answers, and ends
	query    string                                   // of GET /events
	exec     func(w io.Writer, signals <-chan string) // after the init frame
	init     string                                   // in the init frame, behind the id
	signals  chan string
	stdin    chan string
	oom      int64
	denied   int64         // while a command runs
	cpu      int64         // of lab, in GET /stats
	lease    time.Duration // of a sandbox; 0: none
	notes    []string      // of a sandbox
	renewed  chan struct{}
	uploads  []string              // archives: query, length, beginning
	before   func(r *http.Request) // each answer
	ofFiles  func(w http.ResponseWriter, r *http.Request, path string)
}

func newDaemon(t *testing.T) *daemon {
	d := &daemon{
		state: wire.Status{State: wire.Running},
		news:  make(chan struct{}, 9), signals: make(chan string, 4), renewed: make(chan struct{}, 100),
		stdin: make(chan string, 1),
		exec:  func(w io.Writer, _ <-chan string) { exit(w, 0) },
	}
	s := httptest.NewServer(d)
	t.Cleanup(s.Close)
	d.url = s.URL
	return d
}

func frame(w io.Writer, stream byte, text string) {
	w.Write(agent.AppendFrame(nil, stream, []byte(text))) //nolint:errcheck // the test sees what is missing
	http.NewResponseController(w.(http.ResponseWriter)).Flush()
}

func exit(w io.Writer, code int) { frame(w, agent.FrameEnd, fmt.Sprintf(`{"exit_code":%d}`, code)) }

// back says where a command goes on for a client that comes back: where that wants.
func (d *daemon) back(q url.Values) string {
	return fmt.Sprintf(`"stdout":%s,"stderr":%s`, q.Get("stdout"), q.Get("stderr"))
}

// asked returns the requests so far.
func (d *daemon) asked() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.requests)
}

func (d *daemon) sandbox() wire.Sandbox {
	var expires *time.Time
	if d.lease > 0 {
		expires = new(time.Now().Add(d.lease))
	}
	sb := wire.Sandbox{
		ExpiresAt: expires,
		ID:        testID, Status: d.state, Image: &wire.Image{URI: "python:latest"}, Entrypoint: []string{"a\x1b[2Jb"},
		CreatedAt: time.Now(),
		Sandboxd:  &wire.Info{Name: "lab", Runtime: "runsc", MemoryBytes: 64 << 20, Network: "rules", ExitCode: d.code, Notes: d.notes},
	}
	sb.Sandboxd.ImageEntrypoint, sb.Sandboxd.ImageCmd = d.image.ImageEntrypoint, d.image.ImageCmd
	if d.idle {
		sb.Entrypoint = nil
	}
	return sb
}

func (d *daemon) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	d.mu.Lock()
	d.requests = append(d.requests, r.Method+" "+strings.TrimPrefix(r.URL.Path, "/v1"))
	d.mu.Unlock()
	if d.before != nil {
		d.before(r)
	}
	defer d.asked() // what the handler wrote is seen by who asks later
	p, inside := strings.CutPrefix(r.URL.Path, "/v1/sandboxes/"+testID+"/proxy/44772")
	if !inside {
		p, inside = strings.CutPrefix(r.URL.Path, "/v1/sandboxes/lab/proxy/44772")
	}
	if inside {
		d.agent(w, r, p)
		return
	}
	reply := func(status int, v any) {
		w.WriteHeader(status)
		json.NewEncoder(w).Encode(v) //nolint:errcheck // the test sees what is missing
	}
	switch r.Method + " " + strings.Replace(strings.TrimPrefix(r.URL.Path, "/v1"), testID, "lab", 1) {
	case "POST /sandboxes":
		d.create = wire.CreateRequest{}
		if json.NewDecoder(r.Body).Decode(&d.create); d.create.Image.URI == "nope" {
			reply(404, wire.Error{Code: "IMAGE::NOT_FOUND", Message: "image \"nope\" is not here; see `sandboxctl image ls`"})
			return
		}
		reply(202, d.sandbox())
	case "GET /sandboxes":
		reply(200, wire.List{Items: []wire.Sandbox{d.sandbox()}, Pagination: wire.Pagination{Page: 1}})
	case "GET /sandboxes/lab":
		switch {
		case d.away:
			reply(503, wire.Error{Code: "SANDBOX::UNAVAILABLE", Message: "later"})
		case d.gone:
			reply(404, wire.Error{Code: "DOCKER::SANDBOX_NOT_FOUND", Message: "Sandbox not found"})
		default:
			reply(200, d.sandbox())
		}
	case "POST /sandboxes/lab/renew-expiration":
		d.renewed <- struct{}{}
		reply(200, wire.Renewal{})
	case "DELETE /sandboxes/lab", "POST /sandboxes/lab/pause":
		w.WriteHeader(204)
	case "GET /events":
		d.query = r.URL.RawQuery
		for _, ev := range d.past {
			b, _ := json.Marshal(ev)
			fmt.Fprintf(w, "data: %s\n\n", b)
		}
		if d.past != nil {
			return
		}
		for {
			select {
			case <-d.news:
				fmt.Fprintf(w, "data: {\"id\":%q}\n\n", testID)
				http.NewResponseController(w).Flush() //nolint:errcheck // the test sees what is missing
			case <-r.Context().Done():
				return
			}
		}
	case "POST /sandboxes/lab/rename":
		reply(200, d.sandbox())
	case "POST /sandboxes/lab/stop":
		if d.state.State != wire.Running {
			reply(409, wire.Error{Code: "DOCKER::SANDBOX_NOT_RUNNING", Message: "it does not run"})
			return
		}
		w.WriteHeader(204)
	case "POST /sandboxes/lab/start":
		d.state = wire.Status{State: wire.Running}
		reply(202, d.sandbox())
	case "DELETE /images/python":
		reply(200, wire.PruneReport{Images: []string{"python:latest"}, Layers: []string{"sha256:1", "sha256:2"}})
	case "POST /images/python/tag":
		var as wire.TagRequest
		json.NewDecoder(r.Body).Decode(&as) //nolint:errcheck // the test sees what is missing
		reply(200, wire.ImageInfo{Name: as.Name, Tag: "latest"})
	case "GET /sandboxes/lab/stats":
		reply(200, wire.Usage{Time: time.Now(), OOMKills: d.oom, MemoryLimitBytes: 64 << 20})
	case "GET /sandboxes/lab/network/denials":
		reply(200, wire.Denials{Items: []wire.Denial{{Name: "pypi.org", Port: 443, Reason: "no rule allows it"}}, Total: 7 + d.denied})
	case "PATCH /sandboxes/lab/limits", "PATCH /sandboxes/lab/metadata":
		reply(200, d.sandbox())
	case "GET /sandboxes/lab/logs":
		fmt.Fprintln(w, r.URL.RawQuery)
	case "GET /sandboxes/lab/inspect":
		reply(200, wire.Inspection{Sandbox: d.sandbox()})
	case "GET /stats":
		d.cpu += 50_000
		reply(200, wire.StatsList{Items: []wire.SandboxStats{
			{
				ID: "tzzzzzzzzzzz", Runtime: "runc", State: wire.Paused, CreatedAt: time.Now(),
				Usage: wire.Usage{Time: time.Now(), MemoryBytes: 1 << 30},
			},
			{
				ID: testID, Name: "lab", Runtime: "runsc", State: wire.Running, CreatedAt: time.Now().Add(-time.Hour),
				Usage: wire.Usage{Time: time.Now(), CPUMicros: d.cpu, MemoryLimitBytes: 64 << 20},
			},
		}})
	case "POST /images":
		b, _ := io.ReadAll(r.Body)
		d.uploads = append(d.uploads, fmt.Sprintf("%s %d %.40q", r.URL.RawQuery, r.ContentLength, b))
		reply(200, wire.ImportLine{Progress: &wire.ImportProgress{Stage: "receive", Bytes: 1}})
		if r.URL.Query().Get("name") == "bad" {
			reply(200, wire.ImportLine{Error: &wire.Error{Code: "SANDBOX::INVALID_PARAMETER", Message: "layer 3 is \x1b bad"}})
			return
		}
		reply(200, wire.ImportLine{Image: &wire.ImageInfo{Name: "mine", Tag: "1", Notes: d.notes}})
	case "POST /images/pull":
		reply(200, wire.ImportLine{Progress: &wire.ImportProgress{Stage: "download", Bytes: 1 << 20, Total: 2 << 20}})
		reply(200, wire.ImportLine{Image: &wire.ImageInfo{Name: "absent", Tag: "latest", Notes: d.notes}})
	case "GET /images/python/export":
		io.WriteString(w, "an archive") //nolint:errcheck // the test sees what is missing
	case "GET /images/torn/export":
		w.Header().Set("Content-Length", "2000000") // more than comes
		io.WriteString(w, "half")                   //nolint:errcheck // the test sees what is missing
	case "POST /images/prune":
		reply(200, wire.PruneReport{
			Images: []string{"old:" + r.URL.Query().Get("all")}, Layers: []string{"sha256:1"},
			BytesReclaimed: 3 << 20,
		})
	case "GET /images/python":
		reply(200, wire.ImageInspection{
			ImageInfo: wire.ImageInfo{Name: "python"}, Labels: map[string]string{"team": "a"},
			StopSignal: "SIGQUIT", Unused: map[string]json.RawMessage{"ExposedPorts": json.RawMessage(`{"80/tcp":{}}`)},
		})
	case "GET /images":
		reply(200, wire.ImageList{Items: []wire.ImageInfo{{
			Name: "python", Tag: "latest", Digest: "sha256:0123456789abcdef0123",
			Bytes: 1 << 20, Created: time.Now(),
		}}})
	default:
		reply(404, wire.Error{Code: "DOCKER::SANDBOX_NOT_FOUND", Message: "Sandbox not found"})
	}
}

func (d *daemon) agent(w http.ResponseWriter, r *http.Request, p string) {
	if r.Method == http.MethodDelete {
		if p == "/command" {
			d.signals <- "interrupt " + r.URL.Query().Get("id")
		}
		return
	}
	if strings.HasPrefix(p, "/files/") {
		d.ofFiles(w, r, p)
		return
	}
	switch p {
	case "/code":
		w.WriteHeader(500)
		json.NewEncoder(w).Encode(agent.Error{ //nolint:errcheck // the test sees what is missing
			Code: "RUNTIME_ERROR", Message: agent.ContextBusy + ": context c is running other code; interrupt it with DELETE /code?id=c",
		})
	case "/session":
		json.NewDecoder(r.Body).Decode(&d.line)             //nolint:errcheck // the test sees what is missing
		io.WriteString(w, `{"session_id":"`+commandID+`"}`) //nolint:errcheck // the test sees what is missing
	case "/session/" + commandID + "/run":
		json.NewDecoder(r.Body).Decode(&d.line) //nolint:errcheck // the test sees what is missing
		w.Header().Set("Content-Type", agent.FramesType)
		frame(w, agent.FrameControl, `{"id":"`+commandID+`"}`)
		d.exec(w, d.signals)
	case "/command":
		json.NewDecoder(r.Body).Decode(&d.command) //nolint:errcheck // the test sees what is missing
		w.Header().Set("Content-Type", agent.FramesType)
		if d.denied > 0 {
			w.Header().Set(agent.DenialsHeader, "7")
		}
		frame(w, agent.FrameControl, `{"id":"`+commandID+`"`+d.init+`}`)
		if !d.command.Background {
			d.exec(w, d.signals)
		}
	case "/command/" + commandID + "/frames":
		w.Header().Set("Content-Type", agent.FramesType)
		frame(w, agent.FrameControl, `{"id":"`+commandID+`","resumes":true,`+d.back(r.URL.Query())+`}`)
		d.exec(w, d.signals)
	case "/command/" + commandID + "/signal", "/command/entrypoint/signal":
		d.signals <- r.URL.Query().Get("signal")
	case "/command/" + commandID + "/stdin":
		b, _ := io.ReadAll(r.Body)
		d.stdin <- string(b)
	case "/command/" + commandID + "/logs":
		const log = "first\nlog\n"
		n := 0
		fmt.Sscan(r.URL.Query().Get("cursor"), &n) //nolint:errcheck // none is 0
		w.Header().Set(agent.CursorHeader, fmt.Sprint(len(log)))
		io.WriteString(w, log[n:]) //nolint:errcheck // the test sees what is missing
		if r.URL.Query().Has("follow") {
			io.WriteString(w, "later\n") //nolint:errcheck // the test sees what is missing
		}
	default:
		http.NotFound(w, r)
	}
}

type result struct {
	code        int
	out, errout string
}

func (d *daemon) cmd(args ...string) *exec.Cmd {
	d.asked() // what the test has set is seen by the handlers
	c := exec.Command(os.Args[0], args...)
	c.Env = append(os.Environ(), "BE_SANDBOXCTL=1", "SANDBOXD_HOST="+d.url, "OPEN_SANDBOX_API_KEY=key", "GORACE=atexit_sleep_ms=0")
	return c
}

func (d *daemon) run(t *testing.T, args ...string) result {
	t.Helper()
	return d.runOut(t, new(bytes.Buffer), args...)
}

// An output is what a program has printed.
type output interface {
	io.Writer
	fmt.Stringer
}

// runOut is run with an output of the test's own.
func (d *daemon) runOut(t *testing.T, out output, args ...string) result {
	t.Helper()
	c := d.cmd(args...)
	var errout bytes.Buffer
	c.Stdout, c.Stderr, c.Stdin = out, &errout, strings.NewReader("typed")
	err := c.Run()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatal(err)
	}
	d.asked()
	return result{c.ProcessState.ExitCode(), out.String(), errout.String()}
}

func TestRun(t *testing.T) {
	d := newDaemon(t)
	d.exec = func(w io.Writer, _ <-chan string) {
		frame(w, 1, "42\n")
		frame(w, 2, "warning\n")
		exit(w, 3)
	}
	r := d.run(t, "run", "--runtime", "runc", "-m", "256m", "--cpus", "0.5", "--pids", "64", "-e", "A=b", "-l", "team=a",
		"--allow", "203.0.113.0/24:443", "--allow", "10.0.0.1", "-w", "/tmp", "--timeout", "30s",
		"python", "--", "python3", "-c", "print(6*7)")
	if r.code != 3 || r.out != "42\n" || r.errout != "warning\n" {
		t.Errorf("%+v", r)
	}
	want := "POST /sandboxes; POST /sandboxes/" + testID + "/proxy/44772/command; DELETE /sandboxes/" + testID
	if got := strings.Join(d.asked(), "; "); got != want {
		t.Errorf("requests: %s", got)
	}
	c := d.create
	if c.ResourceLimits["memory"] != "256Mi" || c.ResourceLimits["cpu"] != "0.5" || c.ResourceLimits["pids"] != "64" ||
		*c.Env["A"] != "b" || c.Metadata["team"] != "a" ||
		c.Extensions[wire.ExtAllow] != "203.0.113.0/24:443,10.0.0.1" || c.Extensions[wire.ExtIdle] != "true" ||
		c.Extensions[wire.ExtOneShot] != "true" || c.Extensions[wire.ExtRuntime] != "runc" || len(c.Entrypoint) != 0 {
		t.Errorf("create %+v", c)
	}
	if strings.Join(d.command.Argv, "|") != "python3|-c|print(6*7)" || d.command.Timeout != 30000 || d.command.Cwd != "/tmp" ||
		d.command.Stdin {
		t.Errorf("command %+v", d.command)
	}
}

// TestNoteOfDenials: a command that failed while something was denied says so, one that
// ended well does not ask.
func TestNoteOfDenials(t *testing.T) {
	for _, code := range []int{0, 3} {
		d := newDaemon(t)
		d.denied = 2
		d.exec = func(w io.Writer, _ <-chan string) { exit(w, code) }
		want, asked := "", false
		if code != 0 {
			want, asked = "sandboxctl: note: network: denied while this ran: pypi.org:443 (no rule allows it), the last of 2\n", true
		}
		if r := d.run(t, "exec", "lab", "--", "pip"); r.code != code || r.errout != want {
			t.Errorf("%+v, want %q", r, want)
		}
		if got := slices.Contains(d.asked(), "GET /sandboxes/lab/network/denials"); got != asked {
			t.Errorf("code %d: %q", code, d.asked())
		}
	}
}

func TestExitCodes(t *testing.T) {
	for name, c := range map[string]struct {
		exec  func(w io.Writer, _ <-chan string)
		state wire.Status
		args  []string
		code  int
		says  string
	}{
		"unknown image":  {args: []string{"run", "nope", "--", "true"}, code: 125, says: "image ls"},
		"no command":     {args: []string{"run", "base"}, code: 125, says: "neither ENTRYPOINT nor CMD"},
		"unknown flag":   {args: []string{"run", "--nope", "base", "true"}, code: 125, says: "--help"},
		"flag too late":  {args: []string{"run", "python", "--runtime", "runc"}, code: 125, says: "put flags of sandboxctl run before it"},
		"terminal":       {args: []string{"run", "-it", "base", "sh"}, code: 125, says: "not a TTY"},
		"unknown verb":   {args: []string{"rnu"}, code: 125, says: "or `sandboxctl run`?"},
		"unknown deeper": {args: []string{"image", "bild"}, code: 125, says: "did you mean `sandboxctl image build`?"},
		"unknown format": {args: []string{"ps", "-o", "xml"}, code: 125, says: "json"},
		"not found": {
			exec: func(w io.Writer, _ <-chan string) { frame(w, 3, `{"exit_code":127,"error":"no such file"}`) },
			code: 127, says: "installed",
		},
		"not executable": {
			exec: func(w io.Writer, _ <-chan string) { frame(w, 3, `{"exit_code":126,"error":"denied\u001b"}`) },
			code: 126, says: "tabcdefghijk: denied",
		},
		"timeout": {exec: func(w io.Writer, _ <-chan string) {
			frame(w, 3, `{"exit_code":137,"signal":"SIGKILL","timed_out":true}`)
		}, code: 124, says: "longer than"},
		"killed": {
			exec: func(w io.Writer, _ <-chan string) { frame(w, 3, `{"exit_code":137,"signal":"SIGKILL"}`) }, code: 137,
			says: "memory limit of 64MiB",
		},
		"killed alone": {
			exec: func(w io.Writer, _ <-chan string) { frame(w, 3, `{"exit_code":137,"signal":"SIGKILL"}`) },
			args: []string{"exec", "lab", "x"}, code: 137, says: "killed by SIGKILL",
		},
		"signal": {exec: func(w io.Writer, _ <-chan string) { frame(w, 3, `{"exit_code":139,"signal":"SIGSEGV"}`) }, code: 139},
		"sandbox oom": {
			exec: func(io.Writer, <-chan string) {}, state: wire.Status{State: wire.Failed, Reason: "oom"},
			args: []string{"exec", "lab", "x"}, code: 137, says: "memory limit of 64MiB",
		},
		"sandbox died": {
			exec:  func(io.Writer, <-chan string) {},
			state: wire.Status{State: wire.Failed, Reason: "runtime_crash", Message: "the sentry died"},
			args:  []string{"exec", "lab", "x"}, code: 137, says: "the sentry died",
		},
		"expired": {
			exec: func(io.Writer, <-chan string) {}, state: wire.Status{State: wire.Terminated, Reason: "expired"},
			args: []string{"exec", "lab", "x"}, code: 124, says: "timeout",
		},
		"create failed": {
			state: wire.Status{State: wire.Failed, Reason: "create_failed", Message: "runtime: boom"}, code: 125,
			says: "boom",
		},
		"no sandbox":    {args: []string{"exec", "other", "true"}, code: 125, says: "not found"},
		"rm unknown":    {args: []string{"rm", "other"}, code: 125, says: "not found"},
		"eval busy":     {args: []string{"eval", "lab", "1"}, code: 125, says: "`sandboxctl code context create -l python lab`"},
		"rm -f unknown": {args: []string{"rm", "-f", "other"}, code: 0},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDaemon(t)
			d.oom = 1
			if c.exec != nil {
				d.exec = c.exec
			}
			if c.state.State != "" {
				d.state = c.state
			}
			if c.args == nil {
				c.args = []string{"run", "base", "--", "true"}
			}
			r := d.run(t, c.args...)
			if r.code != c.code || !strings.Contains(r.errout, c.says) || strings.Contains(r.errout, "\x1b") {
				t.Errorf("%+v, want %d and %q", r, c.code, c.says)
			}
			if c.args[0] == "run" && slices.Contains(d.asked(), "POST /sandboxes") && d.create.Image.URI != "nope" &&
				!slices.Contains(d.asked(), "DELETE /sandboxes/"+testID) {
				t.Errorf("the sandbox was not destroyed: %v", d.asked())
			}
		})
	}
	d := &daemon{url: "unix:///nonexistent/sandboxd.sock"}
	if r := d.run(t, "ps"); r.code != 125 || !strings.Contains(r.errout, "make dev-up") || strings.Count(r.errout, "\n") != 1 {
		t.Errorf("no daemon: %+v", r)
	}
}

// TestRunDetached: what an entrypoint cannot have is refused before there is a
// sandbox, and all else reaches it.
func TestRunDetached(t *testing.T) {
	d := newDaemon(t)
	for _, c := range []struct{ flags, says string }{
		{"-u nobody", "sandboxctl exec -d -u nobody"},
		{"-w /tmp", "sandboxctl exec -d -w /tmp"},
		{"-i", "no standard input"},
		{"-t", "sandboxctl shell"},
		{"--rm", "--timeout"},
	} {
		args := append(append([]string{"run", "-d"}, strings.Fields(c.flags)...), "base", "--", "true")
		if r := d.run(t, args...); r.code != 125 || r.out != "" || !strings.Contains(r.errout, "-d and "+c.flags[:2]) ||
			!strings.Contains(r.errout, c.says) {
			t.Errorf("%s: %+v, want %q", c.flags, r, c.says)
		}
	}
	if asked := d.asked(); len(asked) != 0 {
		t.Errorf("the daemon was asked %q", asked)
	}
	if r := d.run(t, "run", "-d", "--rm=false", "--timeout", "1h", "--name", "web", "base", "--", "serve", "-u"); r.code != 0 ||
		r.out != testID+"\n" || r.errout != "" {
		t.Errorf("%+v", r)
	}
	if c := d.create; !slices.Equal(c.Entrypoint, []string{"serve", "-u"}) || c.Extensions[wire.ExtTimeout] != "1h0m0s" ||
		c.Extensions[wire.ExtIdle] != "" || c.Extensions[wire.ExtOneShot] != "" {
		t.Errorf("create %+v", c)
	}
	if got := strings.Join(d.asked(), "; "); got != "POST /sandboxes" {
		t.Errorf("requests: %s", got)
	}
}

// TestLiteral: an argument with white space in it is one word, also as the only one.
func TestLiteral(t *testing.T) {
	d := newDaemon(t)
	for _, args := range [][]string{{"create"}, {"run", "-d", "--rm=false"}} {
		for _, c := range []struct {
			argv    []string
			literal string
		}{{[]string{"a b"}, "true"}, {[]string{"a"}, ""}, {[]string{"a b", "c"}, ""}, {nil, ""}} {
			if c.argv == nil && args[0] == "run" {
				continue
			}
			all := append(append(slices.Clone(args), "base", "--"), c.argv...)
			if r := d.run(t, all...); r.code != 0 || !slices.Equal(d.create.Entrypoint, c.argv) ||
				d.create.Extensions[wire.ExtLiteral] != c.literal {
				t.Errorf("%q: %+v, %+v", all, r, d.create)
			}
		}
	}
}

// TestInterrupt: Ctrl-C goes to the command, and the sandbox is destroyed all the same.
func TestInterrupt(t *testing.T) {
	for _, twice := range []bool{false, true} {
		d := newDaemon(t)
		heard, gone := make(chan struct{}), make(chan struct{})
		d.exec = func(w io.Writer, signals <-chan string) {
			frame(w, 1, "up\n")
			if sig := <-signals; sig == "SIGINT" && !twice {
				exit(w, 130)
				return
			}
			close(heard)
			<-gone // deaf to it
		}
		c := d.cmd("run", "base", "--", "sleep", "9")
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		guard := time.AfterFunc(time.Minute, func() { c.Process.Kill() })
		io.ReadFull(out, make([]byte, 3)) //nolint:errcheck // it is up
		c.Process.Signal(syscall.SIGINT)  //nolint:errcheck // it lives
		if twice {
			select {
			case <-heard:
			case <-time.After(time.Minute): // the code is looked at
			}
			time.Sleep(2 * foreground.Once)  // two signals at once are one
			c.Process.Signal(syscall.SIGINT) //nolint:errcheck // it lives
		}
		c.Wait() //nolint:errcheck // the code is looked at
		guard.Stop()
		if c.ProcessState.ExitCode() != 130 || !slices.Contains(d.asked(), "DELETE /sandboxes/"+testID) {
			t.Errorf("twice %v: %d, %v", twice, c.ProcessState.ExitCode(), d.asked())
		}
		close(gone)
	}
}

// TestInterruptEarly: Ctrl-C counts before there is a command, too.
func TestInterruptEarly(t *testing.T) {
	for name, c := range map[string]struct {
		args  []string
		at    string // the request that hangs
		twice bool   // a second Ctrl-C, on which it hangs on
		want  string // requests after it
	}{
		"creating": {[]string{"run", "base", "--", "true"}, "POST /v1/sandboxes", false, "DELETE /sandboxes/" + testID},
		"creating, twice": {
			[]string{"run", "base", "--", "true"},
			"POST /v1/sandboxes", true,
			"GET /sandboxes DELETE /sandboxes/" + testID,
		},
		"kept, twice": {[]string{"run", "--rm=false", "base", "--", "true"}, "POST /v1/sandboxes", true, ""},
		"starting": {
			[]string{"exec", "lab", "true"},
			"POST /v1/sandboxes/lab/proxy/44772/command", false,
			"POST /sandboxes/lab/proxy/44772/command/" + commandID + "/signal",
		},
		"starting, twice": {
			[]string{"run", "base", "true"},
			"POST /v1/sandboxes/" + testID + "/proxy/44772/command", true,
			"DELETE /sandboxes/" + testID,
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDaemon(t)
			asked, awake := make(chan struct{}), make(chan struct{})
			d.before = func(r *http.Request) {
				if r.Method+" "+r.URL.Path == c.at {
					close(asked)
					<-awake
				}
			}
			d.exec = func(w io.Writer, signals <-chan string) {
				if !c.twice { // else nobody is left
					<-signals
				}
				exit(w, 130)
			}
			cmd := d.cmd(c.args...)
			noticed, told, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer noticed.Close()
			cmd.ExtraFiles, cmd.Env = []*os.File{told}, append(cmd.Env, "TELL_SIGNALS=1")
			err = cmd.Start()
			told.Close()
			if err != nil {
				t.Fatal(err)
			}
			guard := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
			defer guard.Stop()
			<-asked
			cmd.Process.Signal(syscall.SIGINT)    //nolint:errcheck // it lives
			io.ReadFull(noticed, make([]byte, 1)) //nolint:errcheck // the code is looked at
			if c.twice {
				time.Sleep(2 * foreground.Once)    // two signals at once are one
				cmd.Process.Signal(syscall.SIGINT) //nolint:errcheck // it lives
			} else {
				close(awake)
			}
			cmd.Wait() //nolint:errcheck // the code is looked at
			if c.twice {
				close(awake)
			}
			var after []string
			for _, r := range d.asked() {
				if "POST /v1"+strings.TrimPrefix(r, "POST ") == c.at {
					after = nil
					continue
				}
				if strings.HasSuffix(r, "/stats") { // asked for beside the command
					continue
				}
				after = append(after, r)
			}
			if got := strings.Join(after, " "); cmd.ProcessState.ExitCode() != 130 || got != c.want {
				t.Errorf("status %d, then %q, want 130 and %q", cmd.ProcessState.ExitCode(), got, c.want)
			}
		})
	}
}

// TestReaderLeaves: `| head -1` ends the command, and the sandbox of a run.
func TestReaderLeaves(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string // asked for afterwards
	}{
		{[]string{"exec", "lab", "yes"}, "POST /sandboxes/lab/proxy/44772/command/" + commandID + "/signal"},
		{[]string{"run", "base", "yes"}, "DELETE /sandboxes/" + testID},
	} {
		d := newDaemon(t)
		got := make(chan string, 1)
		d.exec = func(w io.Writer, signals <-chan string) {
			frame(w, 1, "y\n")
			got <- <-signals
		}
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
		cmd := d.cmd(c.args...)
		cmd.Stdout = w
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		w.Close()
		guard := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
		cmd.Wait() //nolint:errcheck // the code is looked at
		guard.Stop()
		signal := "none"
		select {
		case signal = <-got:
		case <-time.After(10 * time.Second):
		}
		if code := cmd.ProcessState.ExitCode(); code != 141 || signal != "SIGPIPE" || !slices.Contains(d.asked(), c.want) {
			t.Errorf("%v: status %d, the signal %s, %v", c.args, code, signal, d.asked())
		}
	}
}

// TestRunKept: without --rm the sandbox ends with the command, and stays.
func TestRunKept(t *testing.T) {
	for _, code := range []int{0, 3} {
		d := newDaemon(t)
		d.exec = func(w io.Writer, _ <-chan string) { exit(w, code) }
		r := d.run(t, "run", "--rm=false", "base", "--", "true")
		if asked := d.asked(); r.code != code || r.errout != "" || asked[len(asked)-1] != "POST /sandboxes/"+testID+"/stop" {
			t.Errorf("%+v, %v", r, asked)
		}
	}
}

// TestDaemonRestart: a run survives a restart of the daemon, with its output and its exit
// status, and its sandbox is removed in the end.
func TestDaemonRestart(t *testing.T) {
	d := newDaemon(t)
	var away atomic.Int32 // requests that find no daemon
	d.before = func(r *http.Request) {
		if away.Load() > 0 && away.Add(-1) >= 0 {
			panic(http.ErrAbortHandler)
		}
	}
	d.init = `,"resumes":true`
	runs := 0
	d.exec = func(w io.Writer, _ <-chan string) {
		if runs++; runs == 1 {
			frame(w, 1, "one\n")
			away.Store(3)
			panic(http.ErrAbortHandler)
		}
		frame(w, 1, "two\n")
		exit(w, 7)
		away.Store(3) // again, before the sandbox is removed
	}
	r := d.run(t, "run", "base", "--", "true")
	if r.code != 7 || r.out != "one\ntwo\n" || r.errout != "" {
		t.Errorf("%+v", r)
	}
	if asked := d.asked(); asked[len(asked)-1] != "DELETE /sandboxes/"+testID {
		t.Errorf("asked %q", asked)
	}
}

// TestDaemonAwayInterrupt: while the daemon is away, the first Ctrl-C ends the waiting, and a
// person at a terminal is told of both.
func TestDaemonAwayInterrupt(t *testing.T) {
	d := newDaemon(t)
	var away atomic.Bool
	d.before = func(r *http.Request) {
		if away.Load() {
			panic(http.ErrAbortHandler)
		}
	}
	d.init = `,"resumes":true`
	d.exec = func(w io.Writer, _ <-chan string) { away.Store(true); panic(http.ErrAbortHandler) }
	ptmx, tty := openPty(t)
	c := d.cmd("exec", "lab", "--", "sleep", "9")
	c.Stderr = tty
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	tty.Close()
	said, err := bufio.NewReader(ptmx).ReadString('\n')
	if err != nil || !strings.Contains(said, "waiting for the daemon") {
		t.Errorf("said %q, %v", said, err)
	}
	c.Process.Signal(syscall.SIGINT) //nolint:errcheck // it lives
	c.Wait()                         //nolint:errcheck // the code is looked at
	if code := c.ProcessState.ExitCode(); code != 130 {
		t.Errorf("status %d", code)
	}
}

// TestLease: a sandbox whose run was killed goes by itself.
func TestLease(t *testing.T) {
	d := newDaemon(t)
	if r := d.run(t, "run", "base", "--", "true"); r.code != 0 || d.create.Extensions[wire.ExtTimeout] != "10m0s" {
		t.Errorf("%+v: %v", r, d.create.Extensions)
	}
	if d.run(t, "run", "--rm=false", "base", "--", "true"); d.create.Extensions[wire.ExtTimeout] != "" {
		t.Errorf("kept: %v", d.create.Extensions)
	}
	// It is renewed every third of what the daemon gave.
	d.lease = 30 * time.Millisecond
	d.exec = func(w io.Writer, _ <-chan string) { <-d.renewed; exit(w, 0) }
	if r := d.run(t, "run", "base", "--", "true"); r.code != 0 {
		t.Errorf("%+v", r)
	}
}

func TestStdin(t *testing.T) {
	d := newDaemon(t)
	d.exec = func(w io.Writer, _ <-chan string) { frame(w, 1, <-d.stdin); exit(w, 0) }
	if r := d.run(t, "exec", "-i", "lab", "cat"); r.out != "typed" || !d.command.Stdin {
		t.Errorf("%+v", r)
	}
}

func TestOutput(t *testing.T) {
	d := newDaemon(t)
	for args, want := range map[string]string{
		"create python -o name":                testID + "\n",
		"create python --name lab -- a b":      testID + "\n",
		"ps -q":                                testID + "\n",
		"ps --filter name=other -q":            "",
		"exec -d lab sleep 9":                  commandID + "\n",
		"command logs lab " + commandID:        "first\nlog\n",
		"command logs -n all lab " + commandID: "first\nlog\n",
		"command logs -n 1 lab " + commandID:   "log\n",
		"command logs -n 0 lab " + commandID:   "",
		"command logs -n 9 lab " + commandID:   "first\nlog\n",
		"command logs -fn 1 lab " + commandID:  "log\nlater\n",
		"command logs -fn 0 lab " + commandID:  "later\n",
		"command logs -f lab " + commandID:     "first\nlog\nlater\n",
		"logs lab":                             "\n",
		"logs -n 3 lab":                        "tail=3\n",
		"logs -f --tail 0 lab":                 "follow=true&tail=0\n",
		"logs -t --since 1795000000 lab":       "since=2026-11-18T11%3A06%3A40Z&timestamps=true\n",
		"image ls -o name":                     "python:latest\n",
		"pause lab":                            "lab\n",
		"rm -f lab " + testID:                  "lab\n" + testID + "\n",
	} {
		if r := d.run(t, strings.Fields(args)...); r.code != 0 || r.out != want || r.errout != "" {
			t.Errorf("%s: %+v", args, r)
		}
	}
	// This daemon is of an older release: it knows no force, and removes what runs.
	if r := d.run(t, "rm", "lab"); r.code != 125 || r.out != "" || !strings.Contains(r.errout, "is running") {
		t.Errorf("rm of a sandbox that runs: %+v", r)
	}
	for _, tail := range []string{"-1", "x", "100001"} {
		for _, args := range [][]string{{"logs", "-n", tail, "lab"}, {"command", "logs", "-n", tail, "lab", commandID}} {
			if r := d.run(t, args...); r.code != 125 || !strings.Contains(r.errout, "or all") {
				t.Errorf("%q: %+v", args, r)
			}
		}
	}
	if r := d.run(t, "ps", "--no-trunc"); !strings.Contains(r.out, `a\x1b[2Jb`) || strings.Contains(r.out, "\x1b") ||
		!strings.HasPrefix(r.out, "ID ") {
		t.Errorf("ps %q", r.out)
	}
	for _, args := range []string{"ps -o json", "image ls -o json", "stats --no-stream -o json"} {
		r := d.run(t, strings.Fields(args)...)
		if !json.Valid([]byte(r.out)) || r.code != 0 {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if r := d.run(t, "stats", "lab", "--no-stream"); !strings.Contains(r.out, "64MiB") || strings.Contains(r.out, "\x1b") {
		t.Errorf("%+v", r)
	}
	if r := d.run(t, "completion", "bash"); r.code != 0 || !strings.Contains(r.out, "sandboxctl") {
		t.Errorf("completion: %d", r.code)
	}
}

// TestFilters: what can match nothing is refused, and says what could.
func TestFilters(t *testing.T) {
	d := newDaemon(t)
	for filter, want := range map[string]string{
		"state=Bogus": "the states are Pending, Running, Pausing, Paused, Resuming, Stopping, Terminated, Failed",
		"status=gone": "the states are",
		"state=":      "the states are",
		"color=red":   "want state=",
		"label=team":  "want label=KEY=VALUE",
	} {
		if r := d.run(t, "ps", "--filter", filter); r.code != 125 || !strings.Contains(r.errout, want) || r.out != "" {
			t.Errorf("%s: %+v", filter, r)
		}
	}
	if r := d.run(t, "code", "context", "ls", "-l", "klingon", "lab"); r.code != 125 ||
		!strings.Contains(r.errout, "the languages are python, ") {
		t.Errorf("%+v", r)
	}
	if asked := d.asked(); len(asked) != 0 {
		t.Errorf("the daemon was asked %q", asked)
	}
	if r := d.run(t, "ps", "-q", "--filter", "status=running"); r.code != 0 || r.out != testID+"\n" {
		t.Errorf("%+v", r)
	}
}
