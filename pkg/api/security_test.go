package api

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestSecurity: a creation asks for a level of security that the host offers, and every
// answer that shows the sandbox shows it.
func TestSecurity(t *testing.T) {
	for _, host := range []struct {
		offers []record.Security
		levels map[string]string // of a request, "" for none: of the sandbox, or words of the error
	}{
		{nil, map[string]string{"": "default", "strict": "strict", "default": "default", "compat": "its levels are strict, default"}},
		{record.SecurityLevels, map[string]string{"": "default", "compat": "compat", "Strict": "its levels are strict, default, compat"}},
		{record.SecurityLevels[:1], map[string]string{"": "strict", "default": "levels are strict (", "lax": "its levels are strict"}},
	} {
		w := newWorld(t, func(c *Config) {
			c.SecurityLevels = host.offers
			if len(host.offers) == 1 {
				c.Security = host.offers[0]
			}
			c.Differences = func(runtime string, level record.Security) []string { return []string{runtime + " " + string(level)} }
		})
		for asked, want := range host.levels {
			extensions := map[string]string{}
			if asked != "" {
				extensions[wire.ExtSecurity] = asked
			}
			made := w.do("POST", "/v1/sandboxes", securityBody(t, `"image":{"uri":"python"}`, extensions))
			if strings.Contains(want, " ") {
				if e := made.error(t); made.StatusCode != http.StatusBadRequest || !strings.Contains(e.Message, want) ||
					!strings.Contains(e.Message, "security.levels") {
					t.Errorf("%v, asked for %q: %d %s", host.offers, asked, made.StatusCode, made.body)
				}
				continue
			}
			sb := made.sandbox(t)
			var in wire.Inspection
			if a := w.do("GET", "/v1/sandboxes/"+sb.ID+"/inspect", ""); json.Unmarshal(a.body, &in) != nil {
				t.Errorf("inspect: %s", a.body)
			}
			if sb.Sandboxd.Security != want || in.Sandboxd.Security != want ||
				!slices.Equal(in.SecurityDifferences, []string{"runsc " + want}) {
				t.Errorf("%v, asked for %q: %q, inspect %q with %q", host.offers, asked, sb.Sandboxd.Security, in.Sandboxd.Security,
					in.SecurityDifferences)
			}
		}
	}
}

// TestSecurityOfASnapshot: a sandbox that begins as a snapshot is as strict as the
// sandbox that it was taken of, and never less strict than the host's default, unless the
// request names a level.
func TestSecurityOfASnapshot(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.SecurityLevels = record.SecurityLevels })
	for _, c := range []struct{ of, asked, want string }{
		{"", "", "default"}, // of an older daemon
		{"default", "", "default"},
		{"strict", "", "strict"},
		{"compat", "", "default"},
		{"strict", "default", "default"},
		{"default", "strict", "strict"},
		{"compat", "compat", "compat"},
	} {
		snap := record.Snapshot{
			ID: record.NewSnapshotID('t'), State: record.SnapshotReady, Security: record.Security(c.of),
			Image: record.Image{Name: "python", Tag: "latest", Digest: "sha256:1", Layers: []string{"sha256:2"}},
		}
		w.mu.Lock()
		w.snaps[snap.ID] = snap
		w.mu.Unlock()
		extensions := map[string]string{}
		if c.asked != "" {
			extensions[wire.ExtSecurity] = c.asked
		}
		sb := w.do("POST", "/v1/sandboxes", securityBody(t, `"snapshotId":"`+snap.ID+`"`, extensions)).sandbox(t)
		if sb.Sandboxd.Security != c.want {
			t.Errorf("from a snapshot of %q, asked for %q: %q, want %q", c.of, c.asked, sb.Sandboxd.Security, c.want)
		}
		var in wire.SnapshotInspection
		a := w.do("GET", "/v1/snapshots/"+snap.ID+"/inspect", "")
		if err := json.Unmarshal(a.body, &in); err != nil || in.Security != string(snap.Level()) {
			t.Errorf("inspect: %s", a.body)
		}
	}
}

func securityBody(t *testing.T, origin string, extensions map[string]string) string {
	t.Helper()
	b, err := json.Marshal(extensions)
	if err != nil {
		t.Fatal(err)
	}
	return `{` + origin + `,"entrypoint":["x"],"resourceLimits":{},"extensions":` + string(b) + `}`
}
