package compat_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/test/internet"
)

var runtimes = []string{"runc", "runsc"}

// A judge is a program that nobody here wrote, or the official library under a
// program of ours. It is used unmodified, and says in a report which methods
// of its own it called (python/report.py).
type judge struct {
	client  string // whose table it is a part of
	flavour string // of the client; empty if there is one
	program string // below this directory
	needs   string // what it is installed from
	pinned  string // the package there whose release the table names
}

var judges = []judge{
	{"Python SDK", "sync", "python/sdk.py", requirements, "opensandbox"},
	{"Python SDK", "async", "python/sdk.py", requirements, "opensandbox"},
	{"Python code interpreter", "sync", "python/code_sdk.py", requirements, "opensandbox-code-interpreter"},
	{"Python code interpreter", "async", "python/code_sdk.py", requirements, "opensandbox-code-interpreter"},
	{"JavaScript SDK", "", "javascript/sdk.mjs", "javascript/package-lock.json", "@alibaba-group/opensandbox"},
	{"Command line `osb`", "", "python/osb.py", requirements, "opensandbox-cli"},
	{"MCP server", "", "python/mcp_tools.py", requirements, "opensandbox-mcp"},
}

func (j judge) name() string { return strings.TrimSpace(j.client + " " + j.flavour) }

// report is what a program says it did.
type report struct {
	Rows    []string // methods and options there are
	Done    []string // those that were called and came back
	Refused map[string]struct {
		Said string
		Rows []string
	} // by chapter
	Served []string // chapters that ended well
}

// unserved is a chapter that the daemon refuses, and is known to.
type unserved struct {
	Why  string
	Says string // a pattern of what the client is told
}

// TestJudges has every method of every client called on both runtimes, and
// holds docs/compatibility.md against what came back. A chapter that is in
// unserved.json must be refused, with the words given there, so that its line
// goes when the feature comes.
func TestJudges(t *testing.T) {
	hosttest.Root(t)
	known := knownUnserved(t)
	in := internet.New(t, daemontest.Instance.Pool())
	for _, name := range []string{"pypi.org", "*.example.com"} { // those of the chapter "policies by name"
		in.Set(name, internet.Record{A: []netip.Addr{internet.Shared}})
	}
	d := daemontest.New(t, "[network]", fmt.Sprintf("upstreams = [%q]", internet.DNS))
	daemontest.Image(t, d, "base")
	daemontest.Image(t, d, "code-interpreter")
	var mu sync.Mutex
	results := map[string]report{} // by judge and runtime; under mu
	t.Run("programs", func(t *testing.T) {
		for _, j := range judges {
			argv := command(t, j)
			for _, runtime := range runtimes {
				t.Run(j.name()+" "+runtime, func(t *testing.T) {
					t.Parallel()
					r := run(t, d, known, append(slices.Clone(argv), runtime))
					r.check(t, known)
					mu.Lock()
					defer mu.Unlock()
					results[j.name()+" "+runtime] = r
				})
			}
		}
	})
	if len(results) < len(judges)*len(runtimes) { // some failed, or -run left some out
		return
	}
	t.Run("table", func(t *testing.T) { checkTable(t, known, results) })
}

func knownUnserved(t *testing.T) map[string]unserved {
	t.Helper()
	text, err := os.ReadFile("unserved.json")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]unserved{}
	if err := json.Unmarshal(text, &known); err != nil {
		t.Fatalf("unserved.json: %v", err)
	}
	return known
}

// command makes a judge's environment and returns how it is called, but for the runtime.
func command(t *testing.T, j judge) []string {
	t.Helper()
	if strings.HasSuffix(j.program, ".mjs") {
		return []string{"node", node(t, j.program)}
	}
	argv := []string{venv(t, j.needs), j.program}
	if j.flavour != "" {
		argv = append(argv, j.flavour)
	}
	return argv
}

// run runs one program and returns its report.
func run(t *testing.T, d *daemontest.Daemon, known map[string]unserved, argv []string) (r report) {
	t.Helper()
	chapters := make([]string, 0, len(known))
	for name := range known {
		chapters = append(chapters, name)
	}
	path := filepath.Join(t.TempDir(), "report.json")
	story(t, d, argv, "COMPAT_REPORT="+path, "COMPAT_UNSERVED="+strings.Join(chapters, ","))
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return r
}

// story runs a program that tells its chapters on standard output. Where it
// ends early, the last one is what failed.
func story(t *testing.T, d *daemontest.Daemon, argv []string, env ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), hosttest.Patient(4*time.Minute))
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "OPEN_SANDBOX_DOMAIN="+d.TCP, "OPEN_SANDBOX_API_KEY="+daemontest.Key,
		"PYTHONWARNINGS=ignore", "PYTHONDONTWRITEBYTECODE=1", "HOME="+t.TempDir())
	cmd.Env = append(cmd.Env, env...)
	var errout bytes.Buffer
	cmd.Stderr = &errout
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // what it started ends with it
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	last := ""
	for lines := bufio.NewScanner(out); lines.Scan(); {
		last = lines.Text()
		t.Log(last)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("the story ended after %q: %v\n%s", last, err, errout.Bytes())
	}
	if !strings.HasSuffix(last, ": the end") {
		t.Errorf("the story ended with %q", last)
	}
}

// check compares what was refused with what is known to be.
func (r report) check(t *testing.T, known map[string]unserved) {
	t.Helper()
	for chapter, refused := range r.Refused {
		if ok, err := regexp.MatchString(known[chapter].Says, refused.Said); err != nil || !ok {
			t.Errorf("chapter %q was refused otherwise than unserved.json says (%v): %s", chapter, err, refused.Said)
		}
	}
	for _, chapter := range r.Served {
		if why, ok := known[chapter]; ok {
			t.Errorf("chapter %q is served now: take it out of unserved.json (%q)", chapter, why.Why)
		}
	}
	for _, row := range r.Rows {
		if !slices.Contains(r.Done, row) && r.refusedIn(row) == "" {
			t.Errorf("%s is in the library, and no chapter calls it", row)
		}
	}
}

// refusedIn is the chapter in which a method or an option was refused.
func (r report) refusedIn(row string) string {
	if slices.Contains(r.Done, row) {
		return ""
	}
	for chapter, refused := range r.Refused {
		if slices.Contains(refused.Rows, row) {
			return chapter
		}
	}
	return ""
}
