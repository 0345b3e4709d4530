package bench

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write reference.txt")

// TestReference: the references are the rows of docs/benchmarks.md, each with the day and the
// machine of its run, for each comparable row on both runtimes.
func TestReference(t *testing.T) {
	text, err := os.ReadFile("../../../docs/benchmarks.md")
	if err != nil {
		t.Fatal(err)
	}
	runs := map[string]string{} // date and machine, by number
	var want strings.Builder
	seen := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(line, "|\n"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case len(cells) == 4 && strings.HasPrefix(cells[1], "20"): // | run | date | machine | programs |
			runs[cells[0]] = cells[1] + "\t" + cells[2]
		// | name | runtime | p50 unit | ... | run |
		case len(cells) == 10 && slices.Contains(comparable, cells[0]) && !seen[cells[0]+cells[1]]:
			p50, unit, _ := strings.Cut(cells[2], " ")
			fmt.Fprintf(&want, "%s\t%s\t%s\t%s\t%s\n", cells[0], cells[1], p50, unit, runs[cells[9]])
			seen[cells[0]+cells[1]] = true
		}
	}
	if *update {
		if err := os.WriteFile("reference.txt", []byte(want.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		references = want.String()
	}
	if references != want.String() {
		t.Errorf("reference.txt is not what docs/benchmarks.md says; run: go test ./internal/cli/bench -update\n%s\nwant:\n%s",
			references, want.String())
	}
	for _, name := range comparable {
		for _, runtime := range []string{"runc", "runsc"} {
			unit := "ms"
			if strings.HasPrefix(name, "file_") {
				unit = "MB/s"
			}
			if r := referenceOf(name, runtime, unit); r == nil || !strings.HasPrefix(r.Date, "20") || !strings.Contains(r.Machine, "CPU") {
				t.Errorf("%s on %s has the reference %+v", name, runtime, r)
			}
		}
	}
	for _, row := range [][3]string{{"run_once", "runc", "ms"}, {"delete", "runc", "s"}, {"delete", "-", "ms"}, {"", "", ""}} {
		if r := referenceOf(row[0], row[1], row[2]); r != nil {
			t.Errorf("%q has the reference %+v", row, r)
		}
	}
}

// TestPrinted: what a user reads says which host this is, how it compares, and with which
// machine. A row without a reference, and a run without any, say nothing of one.
func TestPrinted(t *testing.T) {
	at := reference{P50: 40, Date: "2026-11-25", Machine: "2 CPUs (AMD EPYC), 24 GiB"}
	later := reference{P50: 500, Date: "2026-11-26", Machine: "2 CPUs (AMD EPYC), 24 GiB"}
	r := benchReport{
		Machine: benchMachine{Version: "v1", Kernel: "6.18", CPU: "Slow\x1b[2J", CPUs: 4},
		Results: []measured{
			{"cold_create_first_command", "runc", "ms", 10, 50, 60, &at},
			{"exec_true", "runc", "ms", 10, 20, 30, &at},
			{"file_put_100MB", "runc", "MB/s", 5, 400, 300, &later},
			{"list", "-", "ms", 10, 2.5, 3, nil},
		},
	}
	var out bytes.Buffer
	if err := r.table(&out); err != nil {
		t.Fatal(err)
	}
	const want = `sandboxd v1, Linux 6.18, 4 CPUs (Slow\x1b[2J)

NAME                        RUNTIME   UNIT   N    P50   P90   REFERENCE   RATIO
cold_create_first_command   runc      ms     10   50    60    40          1.25
exec_true                   runc      ms     10   20    30    40          0.50
file_put_100MB              runc      MB/s   5    400   300   500         0.80
list                        -         ms     10   2.5   3     -           -

REFERENCE is docs/benchmarks.md: 2 CPUs (AMD EPYC), 24 GiB, 2026-11-25; 2 CPUs (AMD EPYC), 24 GiB, 2026-11-26
`
	if out.String() != want {
		t.Errorf("it prints\n%s\nwant\n%s", &out, want)
	}
	r.Machine.CPUs, r.Results = 0, r.Results[3:] // an older daemon
	out.Reset()
	if err := r.table(&out); err != nil || !strings.HasPrefix(out.String(), "sandboxd v1, Linux 6.18, unknown\n") ||
		strings.Contains(out.String(), "docs/benchmarks.md") {
		t.Errorf("without a reference: %v\n%s", err, &out)
	}
}
