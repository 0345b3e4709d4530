package compat_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// documents are the OpenAPI documents that the daemon answers to: OpenSandbox's
// own, as they came (api/opensandbox/README.md), and ours.
var documents = []struct {
	name, file string
	base       string // of its paths
	port       uint16 // of a sandbox; 0 is the daemon's own
	on         string // the runtime in `make test`; `make test-all` takes both
}{
	{"ours", "../../api/openapi.yaml", "", 0, "runsc"},
	{"lifecycle", "../../api/opensandbox/lifecycle.yaml", "/v1", 0, "runc"},
	{"diagnostics", "../../api/opensandbox/diagnostic.yaml", "/v1", 0, "runc"},
	{"egress", "../../api/opensandbox/egress.yaml", "", 18080, "runc"},
	{"execd", "../../api/opensandbox/execd.yaml", "", 44772, "runsc"},
}

// The document allows a fork of manyCopies. Schemathesis asks for the most that is allowed, and
// a daemon with room for so many makes them while the rest is asked; on a busy host that takes
// longer than an answer may. So it is told of fewCopies.
const (
	manyCopies = "maximum: 256, description: Number of copies"
	fewCopies  = "maximum: 2, description: Number of copies"
)

// judged is the name of the sandbox that is asked for; schemathesis.toml has it.
const judged = "judged"

// A difference is a failure that schemathesis finds and that stays: one entry
// of its baseline file, of which why is ours.
type difference struct {
	Operation string `json:"operation"`
	Check     string `json:"check"`
	Failure   string `json:"failure"`
	Signature string `json:"signature"`
	Why       string `json:"why"`
	LastSeen  string `json:"last_seen,omitempty"` // by the run that wrote the file; empty if it was not
}

type baseline struct {
	FormatVersion int          `json:"format_version"`
	Entries       []difference `json:"entries"`
}

const differences = "differences.json"

// TestDocuments has schemathesis send what each document allows and what it
// does not, on one runtime or both (documents.on), and looks whether an answer is a 5xx or one that
// the document does not have. differences.json lists those that are so on
// purpose, each with the reason, and none that is no more.
func TestDocuments(t *testing.T) {
	hosttest.Root(t)
	if *update && !everything {
		t.Fatalf("-update without `-tags all` judges each document on one runtime, and would lose what is in %s of the other", differences)
	}
	st := filepath.Join(filepath.Dir(venv(t, "python/requirements-schemathesis.txt")), "st")
	known := readBaseline(t, differences)
	d := daemontest.New(t)
	daemontest.Image(t, d, "python")
	c, err := client.New("unix://"+d.Socket, "")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	now, ran := baseline{FormatVersion: known.FormatVersion}, 0
	for _, runtime := range runtimes {
		for _, doc := range documents {
			if !everything && doc.on != runtime {
				continue
			}
			t.Run(doc.name+" "+runtime, func(t *testing.T) {
				at := target(t, d, c, runtime, doc.port)
				found := at.judge(t, st, doc.file, doc.base)
				if len(missing(found, known)) > 0 {
					t.Logf("%s", at.said)
				}
				now.Entries = append(now.Entries, missing(found, now)...)
				ran++
			})
		}
	}
	if *update {
		writeBaseline(t, now)
	}
	for _, e := range missing(now, known) {
		t.Errorf("%s %s: %s %q is not in %s; the output above shows how to ask for it again", e.Operation, e.Check, e.Failure, e.Signature,
			differences)
	}
	for _, e := range known.Entries {
		if e.Why == "" {
			t.Errorf("%s: %s %s has no reason", differences, e.Operation, e.Check)
		}
	}
	if ran < len(documents)*len(runtimes) { // -run left some out
		return
	}
	for _, e := range missing(known, now) {
		t.Errorf("%s: %s %s %q is no more: take it out (%s)", differences, e.Operation, e.Check, e.Signature, e.Why)
	}
}

// An asked is what one document is asked of.
type asked struct {
	url      string            // without the base of the document's paths
	headers  map[string]string // that let in
	session  string            // of the sandbox's agent
	examples *strings.Replacer // of the document's ids, by those of the sandbox, and of what must not be asked for
	accepted []string          // requests that are answered by 200 at least once; * is an id
	said     []byte            // by schemathesis
}

// target makes a sandbox for one document: with a session, a context and a
// command if the document is the agent's, so that not all ids are unknown.
func target(t *testing.T, d *daemontest.Daemon, c *client.Client, runtime string, port uint16) *asked {
	t.Helper()
	ctx := t.Context()
	sb, err := c.Create(ctx, wire.CreateRequest{
		Image: &wire.Image{URI: "python"}, Entrypoint: []string{"tail", "-f", "/dev/null"},
		Extensions: map[string]string{"sandboxd.name": judged, "sandboxd.runtime": runtime},
	}, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Delete(context.WithoutCancel(ctx), sb.ID) }) //nolint:errcheck // its name is the next one's; the daemon would say
	at := &asked{
		url: "http://" + d.TCP, session: "none", examples: strings.NewReplacer(manyCopies, fewCopies),
		headers: map[string]string{"OPEN-SANDBOX-API-KEY": daemontest.Key},
	}
	if port == 0 {
		return at
	}
	endpoint, err := c.Endpoint(ctx, sb.ID, port)
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(at.headers, endpoint.Headers)
	at.url += fmt.Sprintf("/sandboxes/%s/proxy/%d", sb.ID, port)
	if port != wire.AgentPort {
		return at
	}
	python, err := c.Interpreters(sb.ID).Create(ctx, "python", "")
	if err != nil {
		t.Fatal(err)
	}
	sleeps, err := c.Start(ctx, sb.ID, client.Command{Shell: "sleep infinity", Background: true})
	if err != nil {
		t.Fatal(err)
	}
	at.session = newSession(t, at)
	at.accepted = []string{
		"POST /code", "DELETE /code", "GET /code/contexts/*", "POST /session/*/run",
		"DELETE /command", "GET /command/status/*", "GET /command/*/logs",
	}
	at.examples = strings.NewReplacer(
		"session-123", strconv.Quote(python.ID), "session-456", strconv.Quote(sleeps.ID), "cmd-abc123", strconv.Quote(sleeps.ID))
	return at
}

// newSession makes a session of a sandbox.
func newSession(t *testing.T, at *asked) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, at.url+"/session", nil)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range at.headers {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var made struct {
		ID string `json:"session_id"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&made); err != nil || made.ID == "" {
		t.Fatalf("make a session: %s: %v", resp.Status, err)
	}
	return made.ID
}

// judge runs schemathesis and returns what it found.
func (at *asked) judge(t *testing.T, st, document, base string) (found baseline) {
	t.Helper()
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir() // it keeps a cache where it runs
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	if document == documents[0].file && !strings.Contains(string(text), manyCopies) {
		t.Fatalf("%s has no %q, so forks of many copies would be asked for", document, manyCopies)
	}
	document = filepath.Join(dir, filepath.Base(document))
	if err := os.WriteFile(document, []byte(at.examples.Replace(string(text))), 0o644); err != nil {
		t.Fatal(err)
	}
	list := filepath.Join(dir, differences)
	copyFile(t, differences, list)
	argv := []string{
		"--config-file", filepath.Join(here, "schemathesis.toml"), "run", document, "--url", at.url + base, "--baseline", list,
		"--baseline-update", "--report-har-path", filepath.Join(dir, "har"),
	}
	for k, v := range at.headers {
		argv = append(argv, "--header", k+": "+v)
	}
	ctx, cancel := context.WithTimeout(t.Context(), hosttest.Patient(5*time.Minute))
	defer cancel()
	cmd := exec.CommandContext(ctx, st, argv...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "JUDGED_SESSION="+at.session)
	var failed error
	at.said, failed = cmd.CombinedOutput()
	all := exchanges(t, filepath.Join(dir, "har"))
	if failed != nil {
		at.report(t, failed, all)
	}
	at.checkAccepted(t, all)
	found = readBaseline(t, list)
	found.Entries = slices.DeleteFunc(found.Entries, func(e difference) bool { return e.LastSeen == "" })
	for i := range found.Entries {
		found.Entries[i].LastSeen = ""
	}
	return found
}

// An exchange is a request of schemathesis's and its answer, as its report has them.
type exchange struct {
	Request  struct{ Method, URL string }
	Response struct{ Status int } // 0: there was none
	Time     float64              // ms until the answer
}

// exchanges reads such a report. It has none if schemathesis was ended before it wrote it.
func exchanges(t *testing.T, har string) []exchange {
	t.Helper()
	text, err := os.ReadFile(har)
	if err != nil {
		t.Error(err)
	}
	var all struct{ Log struct{ Entries []exchange } }
	if err := json.Unmarshal(text, &all); err != nil {
		t.Errorf("what schemathesis asked: %v", err)
	}
	return all.Log.Entries
}

// report says why schemathesis failed. Of a test's messages only the first lines may be
// seen, so what each error and failure is comes first, in a line of its own, then
// what was slow, and last all that was printed.
func (at *asked) report(t *testing.T, err error, all []exchange) {
	t.Helper()
	for _, e := range complaints(string(at.said)) {
		t.Errorf("%s", e)
	}
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b exchange) int { return cmp.Compare(b.Time, a.Time) })
	for _, e := range all {
		if e.Response.Status == 0 {
			t.Logf("no answer: %s %s", e.Request.Method, strings.TrimPrefix(e.Request.URL, at.url))
		}
	}
	for _, e := range all[:min(5, len(all))] {
		t.Logf("slow: %.1f s: %d: %s %s", e.Time/1000, e.Response.Status, e.Request.Method, strings.TrimPrefix(e.Request.URL, at.url))
	}
	t.Errorf("schemathesis: %v\n%s", err, at.said)
}

// section matches the head of a part of what schemathesis prints, as "=== ERRORS ===", or of
// an operation in it, as "___ GET /pools ___".
var section = regexp.MustCompile(`(?m)^(?:=+ ([A-Z]+) =+|_+ (.+) _+)$`)

// complaints are the errors and failures in what schemathesis printed, each as one line.
func complaints(said string) (lines []string) {
	part := ""
	heads := section.FindAllStringSubmatchIndex(said, -1)
	for i, h := range heads {
		if h[2] >= 0 {
			part = said[h[2]:h[3]]
			continue
		}
		end := len(said)
		if i+1 < len(heads) {
			end = heads[i+1][0]
		}
		if part == "ERRORS" || part == "FAILURES" {
			lines = append(lines, said[h[4]:h[5]]+": "+strings.Join(strings.Fields(said[h[1]:end]), " "))
		}
	}
	return lines
}

// checkAccepted looks whether the ids are still those that the requests have:
// else only refusals would be judged.
func (at *asked) checkAccepted(t *testing.T, all []exchange) {
	t.Helper()
	for _, want := range at.accepted {
		if !slices.ContainsFunc(all, func(e exchange) bool {
			below, _, _ := strings.Cut(strings.TrimPrefix(e.Request.URL, at.url), "?")
			match, _ := path.Match(want, e.Request.Method+" "+below)
			return match && e.Response.Status == http.StatusOK
		}) {
			t.Errorf("no %s of schemathesis's was answered by 200, so such answers were not judged", want)
		}
	}
}

func readBaseline(t *testing.T, file string) (b baseline) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &b); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return b
}

func writeBaseline(t *testing.T, b baseline) {
	t.Helper()
	slices.SortFunc(b.Entries, func(x, y difference) int {
		return cmp.Or(strings.Compare(x.Operation, y.Operation), strings.Compare(x.Check, y.Check),
			strings.Compare(x.Signature, y.Signature))
	})
	text, err := json.MarshalIndent(b, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(differences, append(text, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// missing returns the entries of a that b has not, whatever their reasons.
func missing(a, b baseline) (out []difference) {
	for _, e := range a.Entries {
		if !slices.ContainsFunc(b.Entries, func(o difference) bool { o.Why = e.Why; return o == e }) {
			out = append(out, e)
		}
	}
	return out
}

// TestComplaints has what is wrong first, whatever else schemathesis prints.
func TestComplaints(t *testing.T) {
	said := `Schemathesis v4.32.5
====================================== ERRORS ======================================
___________________ POST /sandboxes/{sandboxId}/fork ___________________
Network Error

Read timed out after 10.00 seconds

Reproduce with:

    curl -X POST http://127.0.0.1:1/sandboxes/judged/fork

____________________________ GET /pools ____________________________
Runtime Error
===================================== SUMMARY =====================================
Errors:
`
	want := []string{
		"POST /sandboxes/{sandboxId}/fork: Network Error Read timed out after 10.00 seconds Reproduce with: " +
			"curl -X POST http://127.0.0.1:1/sandboxes/judged/fork",
		"GET /pools: Runtime Error",
	}
	if got := complaints(said); !slices.Equal(got, want) {
		t.Errorf("complaints are %q; want %q", got, want)
	}
}
