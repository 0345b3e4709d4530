package bench

import (
	_ "embed"
	"strconv"
	"strings"
)

// A reference is what `make bench` measured of the same row on one machine.
type reference struct {
	P50     float64 `json:"p50"` // in the unit of the row
	Date    string  `json:"date"`
	Machine string  `json:"machine"`
}

// comparable are the rows that `make bench` measures as this command does. (Its run_once
// runs sandboxctl, and its list has 200 sandboxes.)
var comparable = []string{"cold_create_first_command", "exec_true", "delete", "file_put_100MB", "file_get_100MB"}

// references has a line for each comparable row: name, runtime, p50, unit, date and machine,
// with tabs between. scripts/bench.sh writes it from docs/benchmarks.md, and TestReference
// holds that they agree.
//
//go:embed reference.txt
var references string

// referenceOf returns the reference of a row, or nil if there is none in its unit.
func referenceOf(name, runtime, unit string) *reference {
	for line := range strings.Lines(references) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		if len(f) != 6 || f[0] != name || f[1] != runtime || f[3] != unit {
			continue
		}
		p50, err := strconv.ParseFloat(f[2], 64)
		if err != nil || p50 <= 0 {
			return nil
		}
		return &reference{p50, f[4], f[5]}
	}
	return nil
}

// machines lists the machines and days of the references in report, each once.
func (r *benchReport) machines() string {
	var all []string
	seen := map[string]bool{}
	for _, m := range r.Results {
		if m.Reference == nil {
			continue
		}
		if s := m.Reference.Machine + ", " + m.Reference.Date; !seen[s] {
			seen[s] = true
			all = append(all, s)
		}
	}
	return strings.Join(all, "; ")
}
