package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// A Result is one row. Values are in Unit. Ratio is P50 divided by BaselineP50: for times
// less is better, for rates more. In rows without a baseline the last three are zero.
type Result struct {
	Name        string  `json:"name"`
	Runtime     string  `json:"runtime"`
	Unit        string  `json:"unit"`
	N           int     `json:"n"`
	P50         float64 `json:"p50"`
	P90         float64 `json:"p90"`
	Baseline    string  `json:"baseline"`
	BaselineP50 float64 `json:"baseline_p50"`
	Ratio       float64 `json:"ratio"`

	goal goal
}

// Machine is where and when the numbers were taken.
type Machine struct {
	Time        time.Time `json:"time"`
	Kernel      string    `json:"kernel"`
	Arch        string    `json:"arch"`
	CPU         string    `json:"cpu"`
	CPUs        int       `json:"cpus"`
	MemoryBytes int64     `json:"memory_bytes"`
	Go          string    `json:"go"`
	Version     string    `json:"sandboxd"`
	Cgroups     string    `json:"cgroups"`
	LoadBefore  string    `json:"load_before"`
	LoadAfter   string    `json:"load_after"`
	Peers       []string  `json:"peers,omitempty"` // with their versions, such as "podman version 4.3.1"
}

// Report is bench.json.
type Report struct {
	Machine Machine  `json:"machine"`
	Results []Result `json:"results"`
}

// A goal bounds a row; all of its bounds must hold. Zero is no bound.
type goal struct {
	maxP50, maxRatio float64
	minP50, minRatio float64
	maxOver          float64 // how far P50 may be above the baseline's
	none             bool    // P50 must be 0
}

func (g goal) String() string {
	var parts []string
	add := func(format string, v float64) {
		if v != 0 {
			parts = append(parts, fmt.Sprintf(format, v))
		}
	}
	add("≤ %.4g", g.maxP50)
	add("≥ %.4g", g.minP50)
	add("≤ %.3g×", g.maxRatio)
	add("≥ %.3g×", g.minRatio)
	add("≤ baseline + %.3g", g.maxOver)
	if g.none {
		parts = append(parts, "0")
	}
	return strings.Join(parts, ", ")
}

// verdict is "ok" or "MISS"; empty without a goal.
func (r *Result) verdict() string {
	var checks []bool
	add := func(bound float64, ok bool) {
		if bound != 0 {
			checks = append(checks, ok)
		}
	}
	g := r.goal
	add(g.maxP50, r.P50 <= g.maxP50)
	add(g.minP50, r.P50 >= g.minP50)
	add(g.maxRatio, r.Ratio <= g.maxRatio)
	add(g.minRatio, r.Ratio >= g.minRatio)
	add(g.maxOver, r.P50 <= r.BaselineP50+g.maxOver)
	if g.none {
		checks = append(checks, r.P50 == 0)
	}
	switch {
	case len(checks) == 0:
		return ""
	case slices.Contains(checks, false):
		return "MISS"
	}
	return "ok"
}

// baseline returns the baseline's median and the ratio to it; both "-" without one.
func (r *Result) baseline() (p50, ratio string) {
	if r.BaselineP50 == 0 {
		return "-", "-"
	}
	return fmt.Sprintf("%.4g", r.BaselineP50), fmt.Sprintf("%.3g", r.Ratio)
}

// percentile is the nearest-rank percentile of values, which it sorts.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[max(0, int(math.Ceil(p/100*float64(len(values))))-1)]
}

func row(name, runtimeName, unit string, ours []float64, baseline string, theirs []float64, g goal) Result {
	r := Result{
		Name: name, Runtime: runtimeName, Unit: unit, N: len(ours), Baseline: baseline, goal: g,
		P50: round(percentile(ours, 50)), P90: round(percentile(ours, 90)), BaselineP50: round(percentile(theirs, 50)),
	}
	if r.BaselineP50 > 0 {
		r.Ratio = round(r.P50 / r.BaselineP50)
	}
	return r
}

// round keeps four digits; more digits are noise.
func round(v float64) float64 {
	if v == 0 {
		return 0
	}
	scale := math.Pow(10, 3-math.Floor(math.Log10(math.Abs(v))))
	return math.Round(v*scale) / scale
}

func (r *Report) write(path string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

func (r *Report) print(w io.Writer) {
	m := r.Machine
	fmt.Fprintf(w, "\nsandboxd %s, %s, Linux %s, %d CPUs (%s), load %s before, %s after\n\n", m.Version, m.Go, m.Kernel, m.CPUs, m.CPU,
		m.LoadBefore, m.LoadAfter)
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "NAME\tRUNTIME\tUNIT\tN\tP50\tP90\tBASELINE\tITS P50\tRATIO\tGOAL\t")
	for i := range r.Results {
		x := &r.Results[i]
		base, ratio := x.baseline()
		fmt.Fprintf(tw, "%s\t%s\t%s\t%d\t%.4g\t%.4g\t%s\t%s\t%s\t%s\t%s\n", x.Name, x.Runtime, x.Unit, x.N, x.P50, x.P90,
			cmp.Or(x.Baseline, "-"), base, ratio, x.goal, x.verdict())
	}
	tw.Flush() //nolint:errcheck // a table for a person
}

// The marks in docs/benchmarks.md between which a run writes its table.
const (
	tableBegins = "<!-- make bench writes from here -->\n"
	tableEnds   = "<!-- to here -->\n"
)

// document replaces the table between the marks of the document at path. With merge it
// replaces only the rows that have name and runtime of a result of this run; the others
// keep their numbers and their run. If a mark is missing, the document stays as it is.
func (r *Report) document(path string, merge bool) error {
	old, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	head, rest, begins := strings.Cut(string(old), tableBegins)
	was, tail, ends := strings.Cut(rest, tableEnds)
	if !begins || !ends {
		return fmt.Errorf("write the table: %s lacks the mark %q or %q", path, strings.TrimSpace(tableBegins), strings.TrimSpace(tableEnds))
	}
	var t table
	if merge {
		t = readTable(was)
	}
	t.add(r)
	return os.WriteFile(path, []byte(head+tableBegins+t.String()+tableEnds+tail), 0o644)
}

// A table is the table of the document: the runs, each with its number in the first cell,
// and the rows, each with the number of its run in the last cell.
type table struct{ runs, rows [][]string }

const (
	runsHead = "| run | date | machine | programs |\n|---|---|---|---|\n"
	rowsHead = "| name | runtime | p50 | p90 | baseline of the same run | its p50 | ratio | goal | | run |\n" +
		"|---|---|---|---|---|---|---|---|---|---|\n"
)

// readTable reads what String writes.
func readTable(text string) (t table) {
	into := &t.runs
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(line, "|\n"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case len(cells) < 2 || strings.HasPrefix(line, "|---"):
		case strings.HasPrefix(runsHead, line):
			into = &t.runs
		case strings.HasPrefix(rowsHead, line):
			into = &t.rows
		default:
			*into = append(*into, cells)
		}
	}
	return t
}

func (t table) String() string {
	var b strings.Builder
	write := func(head string, rows [][]string) {
		b.WriteString(head)
		for _, cells := range rows {
			b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
		}
	}
	write(runsHead, t.runs)
	b.WriteString("\n")
	write(rowsHead, t.rows)
	return b.String()
}

// add puts the rows of r in the places of rows with their names, runtimes and baselines, or
// at the end, and drops runs of which no row is left.
func (t *table) add(r *Report) {
	last := 0
	for _, run := range t.runs {
		n, _ := strconv.Atoi(run[0])
		last = max(last, n)
	}
	run := r.run(last + 1)
	type key [3]string
	keyOf := func(row []string) key { return key{row[0], row[1], row[4]} }
	fresh := map[key][][]string{}
	measured := r.rows(run[0])
	for _, row := range measured {
		fresh[keyOf(row)] = append(fresh[keyOf(row)], row)
	}
	var rows [][]string
	for _, row := range append(t.rows, measured...) {
		if now, ok := fresh[keyOf(row)]; ok {
			rows = append(rows, now...)
			fresh[keyOf(row)] = nil // they have their place
		} else {
			rows = append(rows, row)
		}
	}
	t.rows = rows
	t.runs = slices.DeleteFunc(append(t.runs, run), func(run []string) bool {
		return !slices.ContainsFunc(rows, func(row []string) bool { return row[len(row)-1] == run[0] })
	})
}

// run is the row of a run in the table of the document.
func (r *Report) run(number int) []string {
	m := r.Machine
	return []string{
		strconv.Itoa(number), m.Time.Format(time.DateOnly),
		fmt.Sprintf("%d CPUs (%s), %d GiB, Linux %s, cgroups %s", m.CPUs, m.CPU, (m.MemoryBytes+1<<29)>>30, m.Kernel, m.Cgroups),
		fmt.Sprintf("sandboxd %s, %s, %s", m.Version, m.Go, cmp.Or(strings.Join(m.Peers, ", "), "no podman, no docker")),
	}
}

// rows are the results as rows of the table of the document.
func (r *Report) rows(run string) (rows [][]string) {
	for i := range r.Results {
		x := &r.Results[i]
		base, ratio := x.baseline()
		verdict := map[string]string{"ok": "met", "MISS": "**missed**"}[x.verdict()]
		rows = append(rows, []string{
			x.Name, x.Runtime, fmt.Sprintf("%.4g %s", x.P50, x.Unit), fmt.Sprintf("%.4g", x.P90), cmp.Or(x.Baseline, "-"), base, ratio,
			cmp.Or(x.goal.String(), "-"), verdict, run,
		})
	}
	return rows
}

// progress prints the rows from shown on, one per line, for people who wait for the final
// table. It returns how many rows there are.
func (r *Report) progress(w io.Writer, shown int) int {
	for i := range r.Results[shown:] {
		x := &r.Results[shown+i]
		fmt.Fprintf(w, "  %s %s %.4g %s, baseline %.4g; %s %s\n", x.Name, x.Runtime, x.P50, x.Unit, x.BaselineP50, x.goal, x.verdict())
	}
	return len(r.Results)
}

func machine(version string) Machine {
	m := Machine{
		Time: time.Now().UTC(), Arch: runtime.GOARCH, CPUs: runtime.NumCPU(), Go: runtime.Version(), Version: version,
		LoadBefore: load(),
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) == nil {
		m.MemoryBytes = int64(si.Totalram) * int64(si.Unit)
	}
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			m.CPU = strings.TrimSpace(v)
			break
		}
	}
	return m
}

func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "?"
	}
	return strings.Fields(string(b))[0]
}
