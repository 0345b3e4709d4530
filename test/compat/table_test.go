package compat_test

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the generated part of docs/compatibility.md")

const (
	document = "../../docs/compatibility.md"
	marker   = "<!-- What follows is written by `make test-compat UPDATE=1`. -->\n"
)

// checkTable compares the end of the document with what the judges did.
func checkTable(t *testing.T, known map[string]unserved, results map[string]report) {
	have, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	before, after, ok := bytes.Cut(have, []byte(marker))
	if !ok {
		t.Fatalf("%s has no line %q", document, marker)
	}
	want := table(t, known, results)
	if string(after) == want {
		return
	}
	if !*update {
		t.Errorf("%s is not what was measured; run make test-compat UPDATE=1 and read the difference. It would be:\n%s", document, want)
		return
	}
	if err := os.WriteFile(document, append(append(before, marker...), want...), 0o644); err != nil {
		t.Fatal(err)
	}
}

// table writes a table of methods for each client, and one of what is not served.
func table(t *testing.T, known map[string]unserved, results map[string]report) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("\n## Not served\n\n| feature | why |\n|---|---|\n")
	for _, chapter := range slices.Sorted(maps.Keys(known)) {
		fmt.Fprintf(&b, "| %s | %s |\n", chapter, known[chapter].Why)
	}
	for _, client := range clients() {
		var columns []string // heads
		var reports []report
		rows := map[string]bool{}
		for _, j := range judges {
			if j.client != client {
				continue
			}
			if len(columns) == 0 {
				fmt.Fprintf(&b, "\n## %s: `%s` %s\n\n", client, j.pinned, release(t, j))
			}
			for _, runtime := range runtimes {
				r := results[j.name()+" "+runtime]
				columns, reports = append(columns, strings.TrimSpace(j.flavour+" "+runtime)), append(reports, r)
				for _, row := range r.Rows {
					rows[row] = true
				}
			}
		}
		fmt.Fprintf(&b, "| | %s | not served |\n|---|%s---|\n", strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
		for _, row := range slices.Sorted(maps.Keys(rows)) {
			fmt.Fprintf(&b, "| `%s` |%s\n", row, cells(row, reports))
		}
	}
	return b.String()
}

// cells tells of one row in each report, and the features that it waits for.
func cells(row string, reports []report) string {
	line, missing := "", map[string]bool{}
	for _, r := range reports {
		switch chapter := r.refusedIn(row); {
		case slices.Contains(r.Done, row):
			line += " yes |"
		case chapter != "":
			line += " no |"
			missing[chapter] = true
		default:
			line += " |"
		}
	}
	return line + " " + strings.Join(slices.Sorted(maps.Keys(missing)), ", ") + " |"
}

// clients are those of the judges, in their order.
func clients() (all []string) {
	for _, j := range judges {
		if !slices.Contains(all, j.client) {
			all = append(all, j.client)
		}
	}
	return all
}

// release reads what a judge is pinned to.
func release(t *testing.T, j judge) string {
	t.Helper()
	text, err := os.ReadFile(j.needs)
	if err != nil {
		t.Fatal(err)
	}
	name := regexp.QuoteMeta(j.pinned)
	found := regexp.MustCompile(`(?m)^` + name + `==([0-9.]+)|node_modules/` + name + `": \{\s*"version": "([0-9.]+)"`).FindSubmatch(text)
	if found == nil {
		t.Fatalf("%s pins no %s", j.needs, j.pinned)
	}
	return string(found[1]) + string(found[2])
}
