package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const slowest = 20

// printTimes prints how long each package took, in seconds, and the slowest tests. The
// times of packages that ran side by side add up to more than the run took.
func (s *summary) printTimes(out io.Writer) {
	fmt.Fprintln(out, "seconds of each package:")
	for _, name := range byTime(s.packages) {
		fmt.Fprintf(out, "%7.1f %s\n", s.packages[name], name)
	}
	fmt.Fprintf(out, "the %d slowest tests:\n", slowest)
	tests := byTime(s.tests)
	for _, name := range tests[:min(slowest, len(tests))] {
		fmt.Fprintf(out, "%7.1f %s\n", s.tests[name], name)
	}
}

// byTime lists the names, the longest first.
func byTime(seconds map[string]float64) []string {
	return slices.SortedFunc(maps.Keys(seconds), func(a, b string) int {
		return cmp.Or(cmp.Compare(seconds[b], seconds[a]), cmp.Compare(a, b))
	})
}

// machine describes the machine of the run: the CPUs and, if since names an earlier copy
// of /proc/stat, the share of their time that others had (proc_stat(5): steal).
func machine(since string) string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "CPU: " + err.Error()
	}
	models := cpuModel.FindAllSubmatch(info, -1)
	model := "of unknown model"
	if len(models) > 0 {
		model = string(models[0][1])
	}
	text := fmt.Sprintf("CPU: %d x %s", max(len(models), 1), model)
	if since == "" {
		return text
	}
	before, err := os.ReadFile(since)
	if err != nil {
		return text + ", stolen: " + err.Error()
	}
	now, err := os.ReadFile("/proc/stat")
	if err != nil {
		return text + ", stolen: " + err.Error()
	}
	return text + ", " + shares(string(before), string(now))
}

var cpuModel = regexp.MustCompile(`(?m)^model name\s*: (.*)$`)

// shares returns the share of stolen and of idle time between two contents of /proc/stat.
func shares(before, now string) string {
	a, b := ticks(before), ticks(now)
	if len(a) < 8 || len(b) < 8 {
		return "stolen: unknown, /proc/stat has no times of cpu"
	}
	total := 0.0
	for i := range 8 { // guest time is part of user time
		total += b[i] - a[i]
	}
	if total <= 0 {
		return "stolen: 0.0 %, idle: 0 %"
	}
	return fmt.Sprintf("stolen: %.1f %%, idle: %.0f %%", 100*(b[7]-a[7])/total, 100*(b[3]-a[3]+b[4]-a[4])/total)
}

// ticks are the numbers of the first line, which is for all CPUs together.
func ticks(stat string) (n []float64) {
	line, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(line)
	if len(fields) == 0 || fields[0] != "cpu" {
		return nil
	}
	for _, f := range fields[1:] {
		v, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return nil
		}
		n = append(n, v)
	}
	return n
}
