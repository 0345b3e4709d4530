// Summary reads the output of `go test -json`, one file for each run, and prints a result
// for people: how long each package took and which tests were slowest, what failed and
// why, and how many tests there were. The most important comes last: often only the end
// of a log is kept, so its last 100 lines are enough to know what failed.
//
//	summary [-since FILE] FILE...
//
// -since names a copy of /proc/stat from before the runs. With it, summary prints how much
// of the CPUs' time the hypervisor gave to others.
//
// A test that is in several files is counted once. A test that was skipped and that no
// other file has run is a failure: a prerequisite was missing. A file that ends without a
// result is a failure, too.
//
// A test that failed, and then passed two more runs, still counts as failed, and is called
// unsteady. With -again, summary prints instead which tests should run again, one per
// line: the package and the pattern for -run. It prints none if there was a data race, if
// a package failed as a whole, or if more than three tests failed: these are no accidents.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

func main() {
	again := flag.Bool("again", false, "print what is worth running again, and nothing else")
	since := flag.String("since", "", "a copy of /proc/stat of before the runs")
	flag.Parse()
	s := newSummary()
	for _, path := range flag.Args() {
		if err := s.readFile(path); err != nil {
			fmt.Fprintln(os.Stderr, "read test events:", err)
			os.Exit(1)
		}
	}
	ok := false
	if *again {
		ok = s.printAgain(os.Stdout)
	} else {
		s.printTimes(os.Stdout)
		fmt.Fprintln(os.Stdout, machine(*since))
		ok = s.end(os.Stdout)
	}
	if !ok {
		os.Exit(1)
	}
}

// event is a line of `go test -json` (`go doc test2json`). Lines of builds name what is
// built instead of a package (`go help buildjson`).
type event struct {
	Action, Package, Test, Output string
	ImportPath, FailedBuild       string
	Elapsed                       float64
}

// summary is what has been read so far. Keys are a package and a test with a space
// between them.
type summary struct {
	passed   map[string]bool
	skipped  map[string][]string // output of tests that every run skipped
	failures []*failure
	packages map[string]float64 // seconds
	tests    map[string]float64 // seconds, the longest of each

	// Of the file that is being read:
	results int                 // tests and packages that ended
	other   []string            // lines that are no events: output of the go command itself
	builds  map[string]string   // output of builds, by what is built
	output  map[string][]string // of tests and packages that have not ended
	blamed  map[string]bool     // packages in which a test failed
}

func newSummary() *summary {
	return &summary{passed: map[string]bool{}, skipped: map[string][]string{}, packages: map[string]float64{}, tests: map[string]float64{}}
}

// failure is a failed test, or a package that failed without a failed test.
type failure struct {
	pkg, test string // empty test: the package
	said      string
	sure      bool // it is no accident
	passes    int  // in later runs
}

// unsteady reports whether the test passed when it ran again.
func (f *failure) unsteady() bool { return !f.sure && f.passes >= 2 }

func (f *failure) how() string {
	if f.unsteady() {
		return fmt.Sprintf(" (unsteady: it passed %d times after that)", f.passes)
	}
	return ""
}

func (f *failure) key() string { return strings.TrimSpace(f.pkg + " " + f.test) }

func (s *summary) readFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return s.read(strings.TrimSuffix(filepath.Base(path), ".json"), f)
}

// read reads one run.
func (s *summary) read(name string, in io.Reader) error {
	s.results, s.other = 0, nil
	s.builds, s.output, s.blamed = map[string]string{}, map[string][]string{}, map[string]bool{}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			s.other = append(s.other, lines.Text()+"\n")
			continue
		}
		s.add(e)
	}
	for _, key := range slices.Sorted(maps.Keys(s.output)) { // tests without an end
		if pkg, test, _ := strings.Cut(key, " "); test != "" {
			s.testEnded("fail", pkg, test)
		}
	}
	if s.results == 0 {
		s.failures = append(s.failures, &failure{
			pkg: name, said: head("it ended without a result\n" + strings.Join(s.other, "")),
			sure: true,
		})
	}
	return lines.Err()
}

func (s *summary) add(e event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "build-output":
		s.builds[e.ImportPath] += e.Output
	case "output":
		if !passing.MatchString(e.Output) {
			s.output[key] = append(s.output[key], e.Output)
		}
	case "pass", "fail", "skip":
		s.results++
		if e.Test == "" {
			s.packageEnded(e)
		} else {
			s.testEnded(e.Action, e.Package, e.Test)
			s.tests[key] = max(s.tests[key], e.Elapsed)
		}
		delete(s.output, key)
	}
}

func (s *summary) packageEnded(e event) {
	s.packages[e.Package] += e.Elapsed
	said := strings.Join(s.output[e.Package+" "], "")
	if e.Action == "fail" {
		for _, key := range slices.Sorted(maps.Keys(s.output)) { // tests that never ended
			if name, ok := strings.CutPrefix(key, e.Package+" "); ok && name != "" {
				s.testEnded("fail", e.Package, name)
				delete(s.output, key)
			}
		}
		said = s.builds[e.FailedBuild] + said
		delete(s.builds, e.FailedBuild) // printed once, with the first package that needed it
	}
	if e.Action == "fail" && !s.blamed[e.Package] { // it did not compile, or ended outside of a test
		s.failures = append(s.failures, &failure{pkg: e.Package, said: head(said), sure: true})
	}
	delete(s.blamed, e.Package)
}

func (s *summary) testEnded(action, pkg, test string) {
	key := pkg + " " + test
	if action != "skip" {
		delete(s.skipped, key)
	}
	switch action {
	case "pass":
		s.passed[key] = true
		for _, f := range s.failures {
			if f.pkg == pkg && f.test == test {
				f.passes++
			}
		}
	case "fail":
		s.blamed[pkg] = true
		whole := strings.Join(s.output[key], "")
		f := &failure{pkg: pkg, test: test, said: said(s.output[key]), sure: certain.MatchString(whole)}
		if f.said == "" {
			f.said = head(strings.Join(slices.DeleteFunc(slices.Clone(s.output[key]), framework.MatchString), ""))
		}
		for _, before := range s.failures {
			if before.key() == key {
				before.sure, f.sure = true, true
			}
		}
		s.failures = append(s.failures, f)
	case "skip":
		if !s.passed[key] && !slices.ContainsFunc(s.failures, func(f *failure) bool { return f.key() == key }) {
			s.skipped[key] = s.output[key]
		}
	}
}

// printAgain prints which tests should run again, and reports whether there are any.
func (s *summary) printAgain(out io.Writer) bool {
	again, ok := s.again()
	for _, f := range again {
		fmt.Fprintf(out, "%s %s\n", f.pkg, pattern(f.test))
	}
	return ok
}

// again returns the tests that failed once and should run again, without tests that failed
// only because a subtest failed.
func (s *summary) again() (fs []*failure, ok bool) {
	for _, f := range s.failures {
		if f.sure {
			return nil, false
		}
		if !slices.ContainsFunc(s.failures, func(of *failure) bool { return strings.HasPrefix(of.key(), f.key()+"/") }) {
			fs = append(fs, f)
		}
	}
	if len(fs) > maxAgain {
		return nil, false
	}
	return fs, len(fs) > 0
}

const maxAgain = 3

// pattern is the argument of -run for one test.
func pattern(test string) string {
	parts := strings.Split(test, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	return strings.Join(parts, "/")
}

// end prints the failures, each with the first lines of its output, then one line for each
// failure, and the counts. It reports whether everything passed.
func (s *summary) end(out io.Writer) bool {
	for _, key := range slices.Sorted(maps.Keys(s.skipped)) {
		fmt.Fprintf(out, "--- skip %s\n%s", key, said(s.skipped[key]))
	}
	for _, f := range s.failures {
		fmt.Fprintf(out, "--- fail %s%s\n%s", f.key(), f.how(), f.said)
	}
	if len(s.failures) > 1 {
		for _, f := range s.failures {
			first, _, _ := strings.Cut(strings.TrimSpace(f.said), "\n")
			fmt.Fprintf(out, "fail %s%s: %.160s\n", f.key(), f.how(), first)
		}
	}
	failed := map[string]bool{}
	for _, f := range s.failures {
		failed[f.key()] = true
		delete(s.passed, f.key())
	}
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", len(s.passed), len(failed), len(s.skipped))
	return len(s.passed) > 0 && len(failed) == 0 && len(s.skipped) == 0
}

// passing matches lines of slog's text handler below the level of a warning.
var passing = regexp.MustCompile(`\btime=\S+ level=(DEBUG|INFO)\b`)

// certain matches failures that a second run cannot excuse.
var certain = regexp.MustCompile(`(?m)^WARNING: DATA RACE|^panic: |^fatal error: |race detected during execution`)

// maxSaid is how many lines of a failure are printed.
const maxSaid = 40

// said is what the test itself logged: the lines to which the testing package adds a file
// and a line number, each with at most two lines that follow.
func said(output []string) string {
	var b strings.Builder
	keep := 0
	for _, line := range output {
		switch {
		case own.MatchString(line):
			keep = 3
		case framework.MatchString(line):
			keep = 0
		}
		if keep > 0 {
			fmt.Fprintf(&b, "%.400s\n", strings.TrimRight(line, "\n"))
			keep--
		}
	}
	return head(b.String())
}

// head is the first lines of a text, at most maxSaid.
func head(text string) string {
	lines := slices.Collect(strings.Lines(text))
	if len(lines) <= maxSaid {
		return text
	}
	return strings.Join(lines[:maxSaid], "") + fmt.Sprintf("... %d lines more\n", len(lines)-maxSaid)
}

// framework matches lines that the testing package itself prints.
var framework = regexp.MustCompile(`^\s*(---|===) [A-Z]+`)

// own matches the beginning of what a test logs.
var own = regexp.MustCompile(`^\s+\w+_test\.go:\d+: |^panic: `)
