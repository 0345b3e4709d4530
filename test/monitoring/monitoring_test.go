// Package monitoring_test holds the files of docs/monitoring against the tools
// that will read them: the alert rules and every query of the dashboard against
// promtool, the dashboard itself against what Grafana needs to draw it.
// That the metrics exist is seen on a real daemon, in test/e2e.
package monitoring_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const dir = "../../docs/monitoring"

// promtool runs Prometheus's own checker.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	bin, err := filepath.Abs("../../build/tools/promtool")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(bin); err != nil {
		if bin, err = exec.LookPath("promtool"); err != nil {
			if os.Getenv("SANDBOXD_TEST") == "root" {
				t.Fatal("promtool is missing: make promtool")
			}
			t.Skip("promtool is missing (make promtool); SANDBOXD_TEST=root wants it")
		}
	}
	cmd := exec.Command(bin, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func TestAlertRules(t *testing.T) {
	promtool(t, "check", "rules", "alerts.yml")
	promtool(t, "test", "rules", "alerts_test.yml")
}

// dashboard is what of Grafana's dashboard JSON model is looked at
// (https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/).
type dashboard struct {
	UID, Title    string
	SchemaVersion int
	Templating    struct {
		List []struct{ Name, Type string }
	}
	Panels []panel
}

type panel struct {
	ID                       int
	Type, Title, Description string
	GridPos                  struct{ H, W, X, Y int }
	Datasource               struct{ Type, UID string }
	FieldConfig              struct {
		Defaults struct{ Unit string }
	}
	Targets []struct {
		RefID, Expr, LegendFormat string
		Datasource                struct{ UID string }
	}
}

func load(t *testing.T) (d dashboard) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "grafana.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// TestDashboard is what Grafana's dashboard-linter asks for, as far as it
// applies: a data source to choose, panels that say what they show, in a unit,
// of the host chosen, and that do not lie on one another.
func TestDashboard(t *testing.T) {
	d := load(t)
	if d.UID != "sandboxd" || d.Title == "" || d.SchemaVersion < 36 || len(d.Panels) < 10 {
		t.Errorf("uid %q, title %q, schema %d, %d panels", d.UID, d.Title, d.SchemaVersion, len(d.Panels))
	}
	variables := map[string]string{}
	for _, v := range d.Templating.List {
		variables[v.Name] = v.Type
	}
	if variables["datasource"] != "datasource" || variables["instance"] != "query" {
		t.Errorf("variables: %v", variables)
	}
	ids, cells := map[int]bool{}, map[[2]int]string{}
	for _, p := range d.Panels {
		bad := func(format string, args ...any) { t.Errorf("panel %q: %s", p.Title, fmt.Sprintf(format, args...)) }
		if ids[p.ID] || p.ID == 0 || p.Title == "" {
			bad("id %d is taken, or it has no title", p.ID)
		}
		ids[p.ID] = true
		g := p.GridPos
		if g.W < 1 || g.H < 1 || g.X < 0 || g.X+g.W > 24 {
			bad("is at %+v, which is outside of the grid", g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other := cells[[2]int{x, y}]; other != "" {
					bad("lies on %q", other)
				}
				cells[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Description == "" || p.FieldConfig.Defaults.Unit == "" || len(p.Targets) == 0 || p.Datasource.UID != "${datasource}" {
			bad("wants a description, a unit, a query and the data source that was chosen")
		}
		for _, q := range p.Targets {
			if q.RefID == "" || q.LegendFormat == "" || q.Datasource.UID != "${datasource}" {
				bad("query %+v wants a refId, a legend and the data source that was chosen", q)
			}
			if !strings.Contains(q.Expr, `instance=~"$instance"`) {
				bad("does not keep to the host that was chosen: %s", q.Expr)
			}
		}
	}
}

// TestQueries has promtool parse every query of the dashboard, as a rule.
func TestQueries(t *testing.T) {
	type rule struct {
		Record string `json:"record"`
		Expr   string `json:"expr"`
	}
	var rules []rule
	for _, p := range load(t).Panels {
		for _, q := range p.Targets {
			expr := strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*", "$runtime", ".*").Replace(q.Expr)
			if strings.Contains(expr, "$") {
				t.Errorf("panel %q: a variable that is unknown: %s", p.Title, expr)
			}
			rules = append(rules, rule{fmt.Sprintf("query:%d", len(rules)), expr})
		}
	}
	// JSON is YAML.
	b, err := json.Marshal(map[string]any{"groups": []any{map[string]any{"name": "queries", "rules": rules}}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "queries.yml")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "check", "rules", file)
}
