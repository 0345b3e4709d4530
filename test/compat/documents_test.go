package compat_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// documents are the OpenAPI documents that the daemon answers to: OpenSandbox's
// own, as they came (api/opensandbox/README.md), and ours.
var documents = []struct {
	name, file string
	base       string // of its paths
	port       uint16 // of a sandbox; 0 is the daemon's own
}{
	{"ours", "../../api/openapi.json", "", 0},
	{"lifecycle", "../../api/opensandbox/lifecycle.yaml", "/v1", 0},
	{"diagnostics", "../../api/opensandbox/diagnostic.yaml", "/v1", 0},
	{"egress", "../../api/opensandbox/egress.yaml", "", 18080},
	{"execd", "../../api/opensandbox/execd.yaml", "", 44772},
}

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
}

type baseline struct {
	FormatVersion int          `json:"format_version"`
	Entries       []difference `json:"entries"`
}

const differences = "differences.json"

// TestDocuments has schemathesis send what each document allows and what it
// does not, and looks whether an answer is a 5xx or one that the document does
// not have. differences.json lists those that are so on purpose, each with the
// reason, and none that is no more.
func TestDocuments(t *testing.T) {
	hosttest.Root(t)
	st := filepath.Join(filepath.Dir(venv(t, "python/requirements-schemathesis.txt")), "st")
	known := readBaseline(t, differences)
	d := daemontest.New(t)
	ensureImage(t, d, "base")
	c, err := client.New("unix://"+d.Socket, "")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	found := filepath.Join(t.TempDir(), differences) // each run adds what it finds, and drops what it does not
	copyFile(t, differences, found)
	ran := 0
	for _, doc := range documents {
		t.Run(doc.name, func(t *testing.T) {
			here, err := os.Getwd()
			if err != nil {
				t.Fatal(err)
			}
			argv := []string{"--config-file", filepath.Join(here, "schemathesis.toml"), "run", filepath.Join(here, doc.file)}
			argv = append(argv, "--baseline", found, "--baseline-update", "--baseline-prune")
			argv = append(argv, target(t, d, c, doc.base, doc.port)...)
			ctx, cancel := context.WithTimeout(t.Context(), hosttest.Patient(2*time.Minute))
			defer cancel()
			cmd := exec.CommandContext(ctx, st, argv...)
			cmd.Dir = t.TempDir() // it keeps a cache where it runs
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			if now := readBaseline(t, found); len(missing(now, known)) > 0 {
				t.Logf("%s", out)
			}
			ran++
		})
	}
	now := readBaseline(t, found)
	if *update {
		writeBaseline(t, now)
	}
	for _, e := range missing(now, known) {
		t.Errorf("%s %s: %s %q is not in %s; the output above shows how to ask for it again", e.Operation, e.Check, e.Failure, e.Signature, differences)
	}
	for _, e := range known.Entries {
		if e.Why == "" {
			t.Errorf("%s: %s %s has no reason", differences, e.Operation, e.Check)
		}
	}
	if ran < len(documents) { // -run left some out
		return
	}
	for _, e := range missing(known, now) {
		t.Errorf("%s: %s %s %q is no more: take it out (%s)", differences, e.Operation, e.Check, e.Signature, e.Why)
	}
}

// target makes a sandbox for one document and returns how its paths are reached.
func target(t *testing.T, d *daemontest.Daemon, c *client.Client, base string, port uint16) []string {
	t.Helper()
	sb, err := c.Create(t.Context(), client.CreateRequest{
		Image: &client.Image{URI: "base"}, Entrypoint: []string{"tail", "-f", "/dev/null"},
		Extensions: map[string]string{"sandboxd.name": judged},
	}, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Delete(context.WithoutCancel(t.Context()), sb.ID) }) //nolint:errcheck // its name is the next one's; the daemon would say
	argv := []string{"--header", "OPEN-SANDBOX-API-KEY: " + daemontest.Key}
	if port == 0 {
		return append(argv, "--url", "http://"+d.TCP+base)
	}
	at, err := c.Endpoint(t.Context(), sb.ID, port)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range at.Headers {
		argv = append(argv, "--header", k+": "+v)
	}
	return append(argv, "--url", fmt.Sprintf("http://%s/sandboxes/%s/proxy/%d", d.TCP, sb.ID, port))
}

func readBaseline(t *testing.T, path string) (b baseline) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &b); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return b
}

func writeBaseline(t *testing.T, b baseline) {
	t.Helper()
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
