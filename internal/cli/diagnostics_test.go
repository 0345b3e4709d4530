package cli

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestDiagnostics: the text goes to stdout without what would steer a terminal,
// what could not be had to stderr.
func TestDiagnostics(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch kind := strings.TrimPrefix(r.URL.Path, "/v1/sandboxes/lab/diagnostics/"); kind {
		case "logs", "events":
			json.NewEncoder(w).Encode(wire.Diagnostic{ //nolint:errcheck // the test sees what is missing
				Kind: kind, Content: kind + " of " + r.URL.Query().Get("scope") + ":\ta\x1b[2J\nb", Warnings: []string{"no\x1b more"},
				Truncated: kind == "logs",
			})
		default:
			io.WriteString(w, kind+" "+r.URL.RawQuery+"\n") //nolint:errcheck // the test sees what is missing
		}
	}))
	t.Cleanup(s.Close)
	d := &daemon{url: s.URL}
	const note = "sandboxctl: note: no\\x1b more\n"
	for args, want := range map[string]result{
		"logs lab": {
			0, "logs of all:\ta\\x1b[2J\nb",
			note + "sandboxctl: note: the output is longer; this is the end of it\n",
		},
		"events -s network lab":            {0, "events of network:\ta\\x1b[2J\nb", note},
		"inspect lab":                      {0, "inspect \n", ""},
		"summary lab":                      {0, "summary event_limit=20&tail=50\n", ""},
		"summary -n 5 --event-limit 6 lab": {0, "summary event_limit=6&tail=5\n", ""},
	} {
		if r := d.run(t, append([]string{"diagnostics"}, strings.Fields(args)...)...); r != want {
			t.Errorf("%s: %+v, want %+v", args, r, want)
		}
	}
	if r := d.run(t, "diagnostics", "logs", "-s", "network", "lab"); r.code != 125 ||
		!strings.Contains(r.errout, "the scopes of logs are container, lifecycle, all") {
		t.Errorf("%+v", r)
	}
}
