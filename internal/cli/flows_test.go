package cli

import (
	"strings"
	"testing"
)

// TestNetwork compares the tables of the flow log, which has a row for all destinations that
// it does not list.
func TestNetwork(t *testing.T) {
	d := &daemon{url: newFixedDaemon(t)}
	cells := func(out string) string { // without the ages
		var b strings.Builder
		for line := range strings.Lines(out) {
			f := strings.Fields(line)
			b.WriteString(strings.Join(f[:min(len(f), 4)], " ") + "\n")
		}
		return b.String()
	}
	want := "DESTINATION PORT ALLOWED DENIED\npypi.org 443/tcp 3 0\n203.0.113.9 icmp 0 1\n(other) 0 9\n"
	r := d.run(t, "network", "flows", "lab")
	if got := strings.Replace(cells(r.out), "(other) 0 9 10", "(other) 0 9", 1); r.code != 0 ||
		!strings.HasPrefix(got, want[:len(want)-1]) {
		t.Errorf("%+v, want\n%s", r, want)
	}
	if r := d.run(t, "network", "flows", "-o", "name", "lab"); r.out != "pypi.org\n203.0.113.9\n" {
		t.Errorf("names: %+v", r)
	}
	r = d.run(t, "network", "stats", "--no-stream", "lab")
	if lines := strings.Split(r.out, "\n"); r.code != 0 || len(lines) != 3 ||
		strings.Join(strings.Fields(lines[0]), " ") != "ID NAME NET IN / OUT PACKETS IN / OUT ALLOWED DENIED" ||
		strings.Join(strings.Fields(lines[1]), " ") != testID+" lab 2KiB / 1KiB 20 / 10 3 10" {
		t.Errorf("stats: %+v", r)
	}
	r = d.run(t, "network", "stats", "--no-stream", "--format", "{{.Name}} {{.NetIO}} {{.denied}}", "lab")
	if r.out != "lab 2KiB / 1KiB 10\n" {
		t.Errorf("docker's format: %+v", r)
	}
	for args, text := range map[string]string{
		"stats": "at least 1", "flows": "accepts 1", "flows lab -o yaml": "table, json or name", "flow lab": "flows",
	} {
		if r := d.run(t, append([]string{"network"}, strings.Fields(args)...)...); r.code != 125 || !strings.Contains(r.errout, text) {
			t.Errorf("network %s: %+v", args, r)
		}
	}
}
