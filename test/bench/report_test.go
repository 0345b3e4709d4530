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
	document := func(old string) (string, error) {
		if err := os.WriteFile(path, []byte(old), 0o600); err != nil {
			t.Fatal(err)
		}
		err := r.document(path)
		b, readErr := os.ReadFile(path)
		if readErr != nil {
			t.Fatal(readErr)
		}
		return string(b), err
	}

	const want = "# Head\n" + tableBegins +
		"Measured on 2026-11-23: 2 CPUs (Fast), 24 GiB, Linux 6.18, cgroups hybrid.\n" +
		"Programs: sandboxd abc, go1.26, podman version 4.\n\n" +
		"| name | runtime | p50 | p90 | baseline of the same run | its p50 | ratio | goal | |\n|---|---|---|---|---|---|---|---|---|\n" +
		"| exec_true | runc | 2 ms | 3 | direct | 1 | 2 | ≤ 1.5× | **missed** |\n" +
		"| list_200 | - | 4 ms | 4 | - | - | - | ≤ 5 | met |\n" +
		"| left | runc | 0 things | 0 | - | - | - | - |  |\n" +
		tableEnds + "Tail\n"
	got, err := document("# Head\n" + tableBegins + "| old |\n" + tableEnds + "Tail\n")
	if err != nil || got != want {
		t.Errorf("document wrote %v:\n%s\nwant:\n%s", err, got, want)
	}
	if again, err := document(got); err != nil || again != want {
		t.Errorf("a second run wrote %v:\n%s", err, again)
	}
	for _, old := range []string{"", "no marks\n", tableEnds + tableBegins, tableBegins + "no end\n"} {
		got, err := document(old)
		if err == nil || !strings.Contains(err.Error(), "lacks the mark") || got != old {
			t.Errorf("a document %q became %q: %v", old, got, err)
		}
	}
}
