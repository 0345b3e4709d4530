package e2e_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
)

// TestMonitoringFiles holds that every metric that the dashboard and the alert
// rules ask for, and every label they select by, is in what a daemon shows that
// has done what daemons do.
func TestMonitoringFiles(t *testing.T) {
	ca := newAuthority(t)
	ca.serve("a name")
	h := newHost(t, daemontest.Options{Listen: ca.config()})
	for _, runtime := range runtimes {
		sb := h.create(t, spec(runtime))
		h.answers(t, sb.ID)
		if err := h.api.Delete(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		operation(t, h, "delete", sb.ID)
	}
	labels := map[string]map[string]bool{ // by metric
		"up": {"job": true}, // Prometheus's own
	}
	sample := regexp.MustCompile(`^([a-z_]+)(?:\{(.*)\})? `)
	label := regexp.MustCompile(`([a-z_]+)(?:=~|!~|!=|=)"`)
	for line := range strings.Lines(scrape(t, h.Daemon)) {
		m := sample.FindStringSubmatch(line)
		if m == nil {
			continue // a comment
		}
		if labels[m[1]] == nil {
			labels[m[1]] = map[string]bool{"job": true, "instance": true} // Prometheus adds them
		}
		for _, l := range label.FindAllStringSubmatch(m[2], -1) {
			labels[m[1]][l[1]] = true
		}
	}
	asked := regexp.MustCompile(`\b(up|(?:sandboxd|go|process)_[a-z_]+)\b(?:\{([^}]*)\})?`)
	for _, file := range []string{"alerts.yml", "grafana.json"} {
		b, err := os.ReadFile(filepath.Join("..", "..", "docs", "monitoring", file))
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for line := range strings.Lines(string(b)) {
			text := strings.ReplaceAll(line, `\"`, `"`)
			if !strings.Contains(text, "_") && !strings.Contains(text, "up{") || strings.Contains(text, "summary:") ||
				strings.Contains(text, "description") {
				continue
			}
			for _, m := range asked.FindAllStringSubmatch(text, -1) {
				have := labels[m[1]]
				if have == nil {
					t.Errorf("%s: no metric %s: %s", file, m[1], strings.TrimSpace(text))
				}
				found++
				for _, l := range label.FindAllStringSubmatch(m[2], -1) {
					if have != nil && !have[l[1]] {
						t.Errorf("%s: %s has no label %s, but %v", file, m[1], l[1], have)
					}
				}
			}
		}
		if found < 10 {
			t.Errorf("%s: only %d metrics are asked for: this test looks in the wrong place", file, found)
		}
	}
}
