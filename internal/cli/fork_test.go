package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// forkDaemon plays a daemon that makes three copies of lab, and the agents in them.
type forkDaemon struct {
	daemon
	fork wire.Fork
	runs map[string]func(w io.Writer, r *http.Request) // by copy: its command, after the init frame

	mu      sync.Mutex
	asked   string // the query of POST fork
	request wire.ForkRequest
	argv    map[string][]string
	removed []string
}

func newForkDaemon(t *testing.T) *forkDaemon {
	d := &forkDaemon{
		fork: wire.Fork{
			ID: "fork-x", SandboxID: testID, Mode: wire.ForkFiles, Count: 3, Status: wire.Status{State: wire.ForkReady},
			Sandboxes: []wire.ForkChild{
				{ID: "c1", Name: "try-1", State: wire.Running},
				{ID: "c2", Name: "try-2", State: wire.Running},
				{ID: "c3", State: wire.Running},
			},
		},
		runs: map[string]func(io.Writer, *http.Request){}, argv: map[string][]string{},
	}
	s := httptest.NewServer(d)
	t.Cleanup(s.Close)
	d.url = s.URL
	return d
}

func (d *forkDaemon) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(r.URL.Path, "/v1/sandboxes/")
	id, below, _ := strings.Cut(path, "/")
	switch {
	case r.Method == http.MethodPost && below == "fork":
		d.mu.Lock()
		d.asked, d.request = r.URL.RawQuery, wire.ForkRequest{}
		json.NewDecoder(r.Body).Decode(&d.request) //nolint:errcheck // the test sees what is missing
		d.mu.Unlock()
		if d.fork.ID == "" {
			w.WriteHeader(503)
			io.WriteString(w, `{"code":"SANDBOX::CAPACITY_EXCEEDED","message":"2 would fit"}`) //nolint:errcheck // the client sees it
			return
		}
		w.WriteHeader(202)
		fmt.Fprintln(w, encoded(d.fork))
	case below == "proxy/44772/command" && r.Method == http.MethodPost:
		var c agent.CommandRequest
		json.NewDecoder(r.Body).Decode(&c) //nolint:errcheck // the test sees what is missing
		d.mu.Lock()
		d.argv[id] = c.Argv
		d.mu.Unlock()
		w.Header().Set("Content-Type", agent.FramesType)
		frame(w, agent.FrameControl, `{"id":"`+commandID+`"}`)
		d.runs[id](w, r)
	case r.Method == http.MethodDelete && below == "":
		d.mu.Lock()
		d.removed = append(d.removed, id)
		d.mu.Unlock()
		w.WriteHeader(204)
	default:
		http.NotFound(w, r)
	}
}

// exits is a command that says what it is given and ends.
func exits(code int, lines ...string) func(io.Writer, *http.Request) {
	return func(w io.Writer, _ *http.Request) {
		for _, l := range lines {
			frame(w, 1, l)
		}
		exit(w, code)
	}
}

// TestFork: what is asked for is sent, and the ids are printed, one a line.
func TestFork(t *testing.T) {
	d := newForkDaemon(t)
	if r := d.run(t, "fork", "lab"); r != (result{0, "c1\nc2\nc3\n", ""}) {
		t.Errorf("%+v", r)
	}
	if q := d.request; d.asked != "wait=true" || q.Count != 1 || q.Mode != wire.ForkFiles || q.Timeout != nil ||
		len(q.Overrides.Extensions) != 1 || q.Overrides.Extensions[wire.ExtTimeout] != "1h0m0s" {
		t.Errorf("%s %+v %+v", d.asked, q, q.Overrides)
	}
	t.Setenv("LOCAL", "here")
	r := d.run(t, "fork", "-n", "3", "--memory", "lab", "--name", "try", "-e", "A=b", "--env", "LOCAL", "--timeout", "90s", "-q")
	if r != (result{0, "c1\nc2\nc3\n", ""}) {
		t.Errorf("%+v", r)
	}
	if q := d.request; q.Count != 3 || q.Mode != wire.ForkMemory || *q.Overrides.Env["A"] != "b" || *q.Overrides.Env["LOCAL"] != "here" ||
		q.Overrides.Extensions[wire.ExtTimeout] != "1m30s" || q.Overrides.Extensions[wire.ExtName] != "try" {
		t.Errorf("%+v %+v", q, q.Overrides)
	}
	if r := d.run(t, "fork", "lab", "-o", "json"); r.code != 0 || !strings.Contains(r.out, `"sandboxId": "`+testID) {
		t.Errorf("%+v", r)
	}

	// If some copies cannot be made, the ids of the others are printed. No command is run in them.
	d.fork.Status = wire.Status{State: wire.ForkFailed, Message: "1 of 3 copies could not be made; copy 3: \x1b[2J"}
	d.fork.Sandboxes = d.fork.Sandboxes[:2]
	r = d.run(t, "fork", "lab", "-n", "3")
	if r.code != 125 || r.out != "c1\nc2\n" || !strings.Contains(r.errout, "fork fork-x is not whole: 1 of 3") ||
		!strings.Contains(r.errout, "2 copies") || strings.Contains(r.errout, "\x1b") {
		t.Errorf("%+v", r)
	}
	if r := d.run(t, "fork", "lab", "-n", "3", "--", "true"); r.code != 125 || r.out != "" || len(d.argv) != 0 {
		t.Errorf("%+v; commands %v", r, d.argv)
	}
	d.fork.ID = ""
	if r := d.run(t, "fork", "lab", "-n", "9"); r.code != 125 || r.out != "" || !strings.Contains(r.errout, "2 would fit") {
		t.Errorf("%+v", r)
	}

	d.asked = ""
	for args, says := range map[string]string{
		"fork":                         "accepts 1 sandbox, received 0; put a command after --",
		"fork -- python3":              "accepts 1 sandbox, received 0",
		"fork lab python3":             "accepts 1 sandbox, received 2; put a command after --",
		"fork lab more -- python3":     "accepts 1 sandbox, received 2",
		"fork lab --until-success":     "--until-success needs a command: put it after --",
		"fork lab --until-success --":  "--until-success needs a command",
		"fork lab -o yaml":             "want table, json or name",
		"fork lab -n x":                "-n, --count",
		"fork lab -e =b":               "",
		"fork lab --timeout forever":   "--timeout",
		"fork --count 2 lab --nothing": "unknown flag",
		"tree lab":                     "",
	} {
		if r := d.run(t, strings.Fields(args)...); r.code != 125 || !strings.Contains(r.errout, says) || r.out != "" {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if d.asked != "" {
		t.Errorf("a fork was asked for: %s", d.asked)
	}
}

// TestForkCommand: a command runs in all copies at once, and its exit status is that of the first
// copy in which it fails.
func TestForkCommand(t *testing.T) {
	d := newForkDaemon(t)
	var all sync.WaitGroup // the three are there at once, or none goes on
	all.Add(3)
	meet := func(next func(io.Writer, *http.Request)) func(io.Writer, *http.Request) {
		return func(w io.Writer, r *http.Request) {
			all.Done()
			all.Wait()
			next(w, r)
		}
	}
	d.runs["c1"], d.runs["c2"] = meet(exits(0, "one\n", "two")), meet(exits(0, "one\n"))
	d.runs["c3"] = meet(func(w io.Writer, _ *http.Request) {
		frame(w, 2, "warning\n")
		exit(w, 0)
	})
	r := d.run(t, "fork", "lab", "-n", "3", "--", "solve", "--fast", "-n", "1")
	lines := strings.SplitAfter(r.out, "\n")
	slices.Sort(lines)
	if r.code != 0 || strings.Join(lines, "") != "try-1 | one\ntry-1 | two\ntry-2 | one\n" || r.errout != "c3 | warning\n" {
		t.Errorf("%+v", r)
	}
	for _, id := range []string{"c1", "c2", "c3"} {
		if got := strings.Join(d.argv[id], " "); got != "solve --fast -n 1" {
			t.Errorf("%s runs %q", id, got)
		}
	}
	d.runs["c1"], d.runs["c2"], d.runs["c3"] = exits(0, "late\n"), exits(3, "no\n"), exits(0)
	r = d.run(t, "fork", "lab", "--", "solve")
	if r.code != 3 || !strings.Contains(r.errout, "the command exited with 3 in try-2") {
		t.Errorf("%+v", r)
	}
	for _, line := range []string{"try-1 | late\n", "try-2 | no\n"} { // all are waited for
		if !strings.Contains(r.out, line) {
			t.Errorf("no %q in %q", line, r.out)
		}
	}
	d.runs["c1"] = func(io.Writer, *http.Request) { panic(http.ErrAbortHandler) }
	d.runs["c2"] = exits(0)
	if r = d.run(t, "fork", "lab", "--", "solve"); r.code != 125 || !strings.Contains(r.errout, "run the command in c1") {
		t.Errorf("a connection that breaks: %+v", r)
	}
	if len(d.removed) > 0 {
		t.Errorf("removed: %v", d.removed)
	}
}

// An awaited is output that says when it has a text.
type awaited struct {
	b    bytes.Buffer // not embedded: its ReadFrom would be used in place of Write
	text string
	seen chan struct{} // closed then
}

func (a *awaited) String() string { return a.b.String() }

func (a *awaited) Write(b []byte) (int, error) {
	had := strings.Contains(a.String(), a.text)
	n, err := a.b.Write(b)
	if !had && strings.Contains(a.String(), a.text) {
		close(a.seen)
	}
	return n, err
}

// TestForkUntilSuccess: the first copy in which the command exits with 0 is kept, the others are
// removed while they run, and the id is the last that is printed.
func TestForkUntilSuccess(t *testing.T) {
	d := newForkDaemon(t)
	shown := &awaited{text: "try-2 | no\n", seen: make(chan struct{})}
	d.runs["c1"] = func(w io.Writer, r *http.Request) { // it would run forever
		frame(w, 1, "on and on")
		<-r.Context().Done()
	}
	d.runs["c2"] = exits(1, "no\n")
	d.runs["c3"] = func(w io.Writer, r *http.Request) { // what the others print after it may be cut
		<-shown.seen
		exits(0, "found\n")(w, r)
	}
	r := d.runOut(t, shown, "fork", "lab", "-n", "3", "--until-success", "--", "solve")
	if r.code != 0 || !strings.HasSuffix(r.out, "\nc3\n") || !strings.Contains(r.out, "c3 | found\n") ||
		r.errout != "sandboxctl: note: the command succeeded first in c3, which is kept; the other copies are removed\n" {
		t.Errorf("%+v", r)
	}
	slices.Sort(d.removed)
	if !slices.Equal(d.removed, []string{"c1", "c2"}) {
		t.Errorf("removed: %v", d.removed)
	}

	// All fail: all are kept.
	d.removed = nil
	for _, id := range []string{"c1", "c2", "c3"} {
		d.runs[id] = exits(7, id+"\n")
	}
	r = d.run(t, "fork", "lab", "-n", "3", "--until-success", "--", "solve")
	if r.code != 7 || strings.Count(r.out, "\n") != 3 || !strings.Contains(r.errout, "failed in all copies, which are kept") {
		t.Errorf("%+v", r)
	}
	if len(d.removed) > 0 {
		t.Errorf("removed: %v", d.removed)
	}
}

// TestTree: the tree is of all sandboxes.
func TestTree(t *testing.T) {
	if r := newDaemon(t).run(t, "tree"); r != (result{0, testID + " lab Running\n", ""}) {
		t.Errorf("%+v", r)
	}
}

// TestMemorySnapshot: --memory keeps the memory, and --leave-running=false stops the sandbox when it
// is kept; create begins with it by --with-memory.
func TestMemorySnapshot(t *testing.T) {
	var mu sync.Mutex
	var asked []string
	var create wire.CreateRequest
	state := wire.SnapshotReady
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, strings.TrimSuffix(r.Method+" "+strings.TrimPrefix(r.URL.Path, "/v1/sandboxes")+"?"+r.URL.RawQuery, "?"))
		switch {
		case strings.HasSuffix(r.URL.Path, "/stop"):
			w.WriteHeader(202)
		case strings.HasSuffix(r.URL.Path, "/snapshots"):
			w.WriteHeader(202)
			fmt.Fprintln(w, encoded(wire.Snapshot{ID: "snap-" + testID, Status: wire.Status{State: state, Message: "the disk is full"}}))
		default:
			create = wire.CreateRequest{}
			json.NewDecoder(r.Body).Decode(&create) //nolint:errcheck // the test sees what is missing
			w.WriteHeader(202)
			fmt.Fprintln(w, encoded(wire.Sandbox{ID: testID, Status: wire.Status{State: wire.Running}, Sandboxd: &wire.Info{}}))
		}
	}))
	t.Cleanup(s.Close)
	d := &daemon{url: s.URL}
	run := func(args string, want ...string) result {
		t.Helper()
		asked = nil
		r := d.run(t, strings.Fields(args)...)
		mu.Lock()
		defer mu.Unlock()
		if !slices.Equal(asked, want) {
			t.Errorf("%s asks %q", args, asked)
		}
		return r
	}
	const taken = "POST /lab/snapshots?memory=true&wait=true"
	for args, want := range map[string][]string{
		"snapshot create lab":                                 {"POST /lab/snapshots?wait=true"},
		"snapshot create --memory lab":                        {taken},
		"snapshot create --memory --leave-running lab":        {taken},
		"snapshot create --memory --leave-running=true lab":   {taken},
		"snapshot create --memory --no-wait lab":              {"POST /lab/snapshots?memory=true"},
		"snapshot create --memory lab --name warm":            {"POST /lab/snapshots?memory=true&unique=true&wait=true"},
		"snapshot create --memory --leave-running=false lab":  {taken, "POST /lab/stop?grace=0"},
		"snapshot create --memory lab --leave-running=false ": {taken, "POST /lab/stop?grace=0"},
	} {
		if r := run(args, want...); r != (result{0, "snap-" + testID + "\n", ""}) {
			t.Errorf("%s: %+v", args, r)
		}
	}
	for _, args := range []string{"--leave-running=false lab", "--memory --leave-running=false --no-wait lab"} {
		if r := run("snapshot create " + args); r.code != 125 || !strings.Contains(r.errout, "it needs --memory, and excludes --no-wait") {
			t.Errorf("%s: %+v", args, r)
		}
	}
	state = wire.SnapshotFailed // what is not kept goes on
	if r := run("snapshot create --memory --leave-running=false lab", taken); r.code != 125 ||
		!strings.Contains(r.errout, "the disk is full") {
		t.Errorf("%+v", r)
	}

	if r := run("create --from warm --with-memory", "POST ?wait=true"); r != (result{0, testID + "\n", ""}) {
		t.Errorf("%+v", r)
	}
	if create.SnapshotID != "warm" || create.Image != nil || create.Entrypoint != nil || create.Extensions[wire.ExtMemory] != "true" ||
		create.Extensions[wire.ExtIdle] != "" || create.Extensions[wire.ExtImageCommand] != "" || len(create.ResourceLimits) != 0 {
		t.Errorf("%+v", create)
	}
	for _, args := range []string{"create --with-memory base", "create --with-memory"} {
		if r := run(args); r.code != 125 || r.out != "" {
			t.Errorf("%s: %+v", args, r)
		}
	}
}
