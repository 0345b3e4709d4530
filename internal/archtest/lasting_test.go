package archtest

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestLastingStates holds the table of docs/operations.md: each state that lasts until an operator
// ends it is a line of the log at the start, a check of the doctor, a metric, an alert, and has a
// command that ends it. A state without one of them is not noticed, or nobody gets out of it.
func TestLastingStates(t *testing.T) {
	read := func(path string) string {
		t.Helper()
		b, err := os.ReadFile("../../" + path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	code, doctor, metrics := read("internal/daemon/ties.go"), read("internal/doctor/daemons.go"), read("internal/metrics/look.go")
	page, alerts := read("docs/operations.md"), read("docs/monitoring/alerts.yml")
	_, rest, _ := strings.Cut(page, "## What lasts until somebody ends it?")
	section, _, _ := strings.Cut(rest, "\n## ")
	for _, said := range []struct{ where, text, in string }{
		{"the page", "a state that lasts until somebody ends it", section},
		{"the log", "a state that lasts until somebody ends it", code},
		{"the page", "sandboxd_lasting_state", section},
		{"the metrics", `"lasting_state"`, metrics},
		{"the start", "sayLasting(ctx, d)", read("internal/daemon/daemon.go")},
	} {
		if !strings.Contains(said.in, said.text) {
			t.Errorf("%s does not have %q", said.where, said.text)
		}
	}

	var states, rows []string
	for _, m := range regexp.MustCompile(`\tstate[A-Z]\w* += "(\w+)"`).FindAllStringSubmatch(code, -1) {
		states = append(states, m[1])
	}
	for line := range strings.Lines(section) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if len(cells) != 6 || !strings.HasPrefix(strings.TrimSpace(cells[0]), "`") {
			continue
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
			if cells[i] == "" {
				t.Errorf("a row has an empty cell: %s", line)
			}
		}
		state, check, alert, ends := strings.Trim(cells[0], "`"), strings.Trim(cells[3], "`"), strings.Trim(cells[4], "`"), cells[5]
		rows = append(rows, state)
		if !strings.Contains(doctor, `name: "`+check+`"`) {
			t.Errorf("%s: the doctor has no check %q", state, check)
		}
		_, rule, ok := strings.Cut(alerts, "- alert: "+alert+"\n")
		rule, _, _ = strings.Cut(rule, "- alert: ")
		selects := strings.Contains(rule, `sandboxd_lasting_state{state="`+state+`"}`) ||
			strings.Contains(rule, "sandboxd_lasting_state{state!=") && !strings.Contains(rule, `state!="`+state+`"`)
		if !ok || !selects {
			t.Errorf("%s: the alert %s is not about it: %s", state, alert, rule)
		}
		command := regexp.MustCompile("`(sandbox[^`]+)`").FindStringSubmatch(ends)
		if command == nil || !strings.Contains(code+read("internal/daemon/restore.go"), "`"+command[1]+"`") {
			t.Errorf("%s: what the daemon says of it does not have the command of the table, %v", state, command)
		}
	}
	slices.Sort(states)
	slices.Sort(rows)
	if len(states) == 0 || !slices.Equal(states, rows) {
		t.Errorf("the daemon knows %v, the table has %v", states, rows)
	}
}
