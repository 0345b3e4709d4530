package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestDocument: a whole run replaces the table of its document and nothing else, and a
// document without marks stays as it is.
func TestDocument(t *testing.T) {
	r := Report{
		Machine: Machine{
			Time: time.Date(2026, 11, 23, 1, 2, 3, 0, time.UTC), Kernel: "6.18", CPU: "Fast", CPUs: 2, MemoryBytes: 24 << 30, Go: "go1.26",
			Version: "abc", Cgroups: "hybrid", Peers: []string{"podman version 4"},
		},
		Results: []Result{
			row("exec_true", "runc", "ms", []float64{1, 2, 3}, "direct", []float64{1, 1, 1}, goal{maxRatio: 1.5}),
			row("list_200", "-", "ms", []float64{4}, "", nil, goal{maxP50: 5}),
			row("left", "runc", "things", []float64{0}, "", nil, goal{}),
		},
	}
	path := filepath.Join(t.TempDir(), "benchmarks.md")
	document := func(old string, merge bool) (string, error) {
		if err := os.WriteFile(path, []byte(old), 0o600); err != nil {
			t.Fatal(err)
		}
		err := r.document(path, merge)
		b, readErr := os.ReadFile(path)
		if readErr != nil {
			t.Fatal(readErr)
		}
		return string(b), err
	}

	const want = "# Head\n" + tableBegins + runsHead +
		"| 1 | 2026-11-23 | 2 CPUs (Fast), 24 GiB, Linux 6.18, cgroups hybrid | sandboxd abc, go1.26, podman version 4 |\n\n" + rowsHead +
		"| exec_true | runc | 2 ms | 3 | direct | 1 | 2 | ≤ 1.5× | **missed** | 1 |\n" +
		"| list_200 | - | 4 ms | 4 | - | - | - | ≤ 5 | met | 1 |\n" +
		"| left | runc | 0 things | 0 | - | - | - | - |  | 1 |\n" +
		tableEnds + "Tail\n"
	got, err := document("# Head\n"+tableBegins+"| old |\n"+tableEnds+"Tail\n", false)
	if err != nil || got != want {
		t.Errorf("document wrote %v:\n%s\nwant:\n%s", err, got, want)
	}
	if again, err := document(got, false); err != nil || again != want {
		t.Errorf("a second run wrote %v:\n%s", err, again)
	}
	for _, old := range []string{"", "no marks\n", tableEnds + tableBegins, tableBegins + "no end\n"} {
		for _, merge := range []bool{false, true} {
			got, err := document(old, merge)
			if err == nil || !strings.Contains(err.Error(), "lacks the mark") || got != old {
				t.Errorf("a document %q became %q (merge %v): %v", old, got, merge, err)
			}
		}
	}
}

// TestTable: the table in the repository is one that a run of some rows can change.
func TestTable(t *testing.T) {
	text, err := os.ReadFile("../../docs/benchmarks.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), tableBegins)
	was, _, _ := strings.Cut(rest, tableEnds)
	if now := readTable(was); now.String() != was || len(now.runs) == 0 || len(now.rows) < 100 {
		t.Errorf("%d runs and %d rows; written again it is\n%s", len(now.runs), len(now.rows), now)
	}
}

// TestMerge: a run of some rows replaces these and no others. Each row names its run, and a
// run of which no row is left is not in the document.
func TestMerge(t *testing.T) {
	ran := func(day int, cpu string, results ...Result) *Report {
		at := time.Date(2026, 11, day, 0, 0, 0, 0, time.UTC)
		m := Machine{Time: at, Kernel: "6.18", CPU: cpu, CPUs: 2, Go: "go1.26", Version: "v", Cgroups: "hybrid"}
		return &Report{Machine: m, Results: results}
	}
	one := func(name, runtimeName string, v float64) Result {
		return row(name, runtimeName, "ms", []float64{v}, "", nil, goal{})
	}
	path := filepath.Join(t.TempDir(), "benchmarks.md")
	if err := os.WriteFile(path, []byte(tableBegins+tableEnds), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		what      string
		run       *Report
		merge     bool
		runs, had string
	}{
		{
			"a whole run", ran(1, "A", one("cold", "runc", 1), one("cold", "runc", 2), one("cold", "runsc", 3), one("list", "-", 4)), false,
			"1 A", "cold runc 1 ms 1, cold runc 2 ms 1, cold runsc 3 ms 1, list - 4 ms 1",
		},
		{
			"two rows where three were, and a new one", ran(2, "B", one("new", "-", 5), one("cold", "runc", 6), one("list", "-", 7)), true,
			"1 A, 2 B", "cold runc 6 ms 2, cold runsc 3 ms 1, list - 7 ms 2, new - 5 ms 2",
		},
		{
			"the only row of the first run, now two", ran(3, "C", one("cold", "runsc", 8), one("cold", "runsc", 9)), true,
			"2 B, 3 C", "cold runc 6 ms 2, cold runsc 8 ms 3, cold runsc 9 ms 3, list - 7 ms 2, new - 5 ms 2",
		},
		{
			"a row with another baseline", ran(3, "E", row("cold", "runsc", "ms", []float64{11}, "podman", []float64{12}, goal{})), true,
			"2 B, 3 C, 4 E", "cold runc 6 ms 2, cold runsc 8 ms 3, cold runsc 9 ms 3, list - 7 ms 2, new - 5 ms 2, cold runsc 11 ms 4",
		},
		{"a whole run", ran(4, "D", one("list", "-", 10)), false, "1 D", "list - 10 ms 1"},
	} {
		if err := step.run.document(path, step.merge); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var runs, had []string
		now := readTable(string(text))
		for _, r := range now.runs {
			cpu, _, _ := strings.Cut(strings.TrimPrefix(r[2], "2 CPUs ("), ")")
			runs = append(runs, r[0]+" "+cpu)
		}
		for _, r := range now.rows {
			had = append(had, strings.Join([]string{r[0], r[1], r[2], r[9]}, " "))
		}
		if r, h := strings.Join(runs, ", "), strings.Join(had, ", "); r != step.runs || h != step.had {
			t.Errorf("after %s there are runs %q with rows %q, want %q with %q", step.what, r, h, step.runs, step.had)
		}
	}
}
