//go:build all

package year

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"
)

// The lines of the document between which a run writes.
const (
	docFrom = "<!-- make year writes from here -->\n"
	docTo   = "<!-- make year writes to here -->\n"
)

// document replaces the table in a document.
func document(t *testing.T, path string, boxes []*box, rows [][]row, took time.Duration) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), docFrom)
	_, after, ok2 := strings.Cut(rest, docTo)
	if !ok || !ok2 {
		t.Fatalf("%s has no lines %q and %q", path, docFrom, docTo)
	}
	commit, _ := exec.Command("git", "rev-parse", "--short", "HEAD").Output()
	n := len(rows[0])
	var s strings.Builder
	fmt.Fprintf(&s, "%d days in %s, %s, commit %s, %d CPUs, seed %d:\n\n", n, took.Round(time.Second), time.Now().Format(time.DateOnly),
		strings.TrimSpace(string(commit)), runtime.NumCPU(), *seed)
	at := []int{1, max(n*90/365, 1), max(n*180/365, 1), max(n*270/365, 1), n}
	s.WriteString("| measure | daemon |")
	for _, d := range at {
		fmt.Fprintf(&s, " day %d |", d)
	}
	s.WriteString(" growth a day | bound a day |\n|---|---|" + strings.Repeat("---|", len(at)) + "---|---|\n")
	for _, m := range measures {
		for i, b := range boxes {
			values := column(rows[i], m)
			fit := m.Fit(values)
			fmt.Fprintf(&s, "| %s | %s |", m.Name, b.name)
			for _, d := range at {
				fmt.Fprintf(&s, " %s |", m.Text(values[d-1]))
			}
			fmt.Fprintf(&s, " %s | %s |\n", m.Text(fit.Slope), m.Text(fit.Bound/float64(n-n/warm)))
		}
	}
	if err := os.WriteFile(path, []byte(before+docFrom+s.String()+docTo+after), 0o644); err != nil {
		t.Fatal(err)
	}
}
