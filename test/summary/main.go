// Summary reads `go test -json`, of any number of runs one after the other, and says
// what a person wants to know: which packages ran, what failed and why, and how many
// tests that were in all. A test that was skipped, and that no later run has run, is a
// failure: a prerequisite was missing. Of a long log often only a part is
// kept, so what daemons logged below a warning is left out (`go test -v -run` shows
// it), and what failed is named once more at the end.
//
// A test that failed, and passed when it was run twice more, has failed all the same, and
// is told of as unsteady: who looks for its cause knows where to begin. With -again it says
// instead which tests those are that are worth running again, a line each: their package
// and the pattern for -run. There are none where a data race was found, a package failed
// as a whole, or more than three tests did: that is no accident.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
)

func main() {
	again := flag.Bool("again", false, "say what is worth running again, and nothing else")
	flag.Parse()
	tell := summarize
	if *again {
		tell = worthAgain
	}
	ok, err := tell(os.Stdin, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "read test events:", err)
	}
	if !ok || err != nil {
		os.Exit(1)
	}
}

// event is a line of `go test -json`: `go doc test2json`, and of builds `go help
// buildjson`, whose lines name what is built instead of a package.
type event struct {
	Action, Package, Test, Output string
	ImportPath, FailedBuild       string
	Elapsed                       float64
}

// summary is what has been read so far. Keys are a package and a test with a space
// between them.
type summary struct {
	out      io.Writer
	passed   int
	builds   map[string]string   // what building said, by what is built
	output   map[string][]string // of what has not ended
	skipped  map[string][]string // what was said by tests that no later run has run
	blamed   map[string]bool     // packages of which a test failed in this run
	failures []*failure
}

// failure is a test that failed, or a package by itself.
type failure struct {
	pkg, test string // no test: a package
	said      string
	sure      bool // it is no accident
	passes    int  // of runs since
}

// unsteady is whether it was an accident, as far as running it again can tell.
func (f *failure) unsteady() bool { return !f.sure && f.passes >= 2 }

func (f *failure) key() string { return strings.TrimSpace(f.pkg + " " + f.test) }

// summarize says on out what it reads from in, and whether all of it passed.
func summarize(in io.Reader, out io.Writer) (bool, error) {
	s, err := read(in, out)
	return s.end(), err
}

// worthAgain says on out which tests of in to run again, and whether there are any.
func worthAgain(in io.Reader, out io.Writer) (bool, error) {
	s, err := read(in, io.Discard)
	again, ok := s.again()
	for _, f := range again {
		fmt.Fprintf(out, "%s %s\n", f.pkg, pattern(f.test))
	}
	return ok, err
}

// read says on out what goes on in in.
func read(in io.Reader, out io.Writer) (*summary, error) {
	s := &summary{
		out: out, builds: map[string]string{}, output: map[string][]string{},
		skipped: map[string][]string{}, blamed: map[string]bool{},
	}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			fmt.Fprintln(out, lines.Text()) // the go command's own words, and the script's
			continue
		}
		s.add(e)
	}
	return s, lines.Err()
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
		if e.Test == "" {
			s.packageEnded(e)
		} else {
			s.testEnded(e.Action, e.Package, e.Test)
		}
		delete(s.output, key)
	}
}

func (s *summary) packageEnded(e event) {
	if e.Action == "fail" {
		for _, key := range slices.Sorted(maps.Keys(s.output)) { // tests that never ended
			if name, ok := strings.CutPrefix(key, e.Package+" "); ok && name != "" {
				s.testEnded("fail", e.Package, name)
				delete(s.output, key)
			}
		}
		said := s.builds[e.FailedBuild] + strings.Join(s.output[e.Package+" "], "")
		delete(s.builds, e.FailedBuild) // it is told once, by the first of what needed it
		fmt.Fprint(s.out, said)
		if !s.blamed[e.Package] { // it was not built, or ended by itself
			s.failures = append(s.failures, &failure{pkg: e.Package, said: said, sure: true})
		}
	}
	delete(s.blamed, e.Package)
	if e.Action != "skip" { // it has no tests
		fmt.Fprintf(s.out, "%-4s %s %.1fs\n", e.Action, e.Package, e.Elapsed)
	}
}

func (s *summary) testEnded(action, pkg, test string) {
	key := pkg + " " + test
	delete(s.skipped, key)
	switch action {
	case "pass":
		s.passed++
		for _, f := range s.failures {
			if f.pkg == pkg && f.test == test {
				f.passes++
			}
		}
	case "fail":
		s.blamed[pkg] = true
		whole := strings.Join(s.output[key], "")
		fmt.Fprintf(s.out, "--- fail %s\n%s", key, whole)
		f := &failure{pkg: pkg, test: test, said: said(s.output[key]), sure: certain.MatchString(whole)}
		for _, before := range s.failures {
			if before.key() == key {
				before.sure, f.sure = true, true
			}
		}
		s.failures = append(s.failures, f)
	case "skip":
		s.skipped[key] = s.output[key]
	}
}

// again gives the tests that failed once and should be run again, without those that
// failed because of another of them.
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

// pattern is what -run takes for one test.
func pattern(test string) string {
	parts := strings.Split(test, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	return strings.Join(parts, "/")
}

// end says what failed once more, and the counts.
func (s *summary) end() bool {
	for _, key := range slices.Sorted(maps.Keys(s.skipped)) {
		fmt.Fprintf(s.out, "--- skip %s\n%s", key, said(s.skipped[key]))
	}
	for _, f := range s.failures {
		how := ""
		if f.unsteady() {
			how = fmt.Sprintf(" (unsteady: it passed %d times after that)", f.passes)
		}
		fmt.Fprintf(s.out, "--- fail %s%s\n%s", f.key(), how, f.said)
	}
	fmt.Fprintf(s.out, "%d passed, %d failed, %d skipped\n", s.passed, len(s.failures), len(s.skipped))
	return s.passed > 0 && len(s.failures) == 0 && len(s.skipped) == 0
}

// passing matches what slog's text handler writes below a warning.
var passing = regexp.MustCompile(`\btime=\S+ level=(DEBUG|INFO)\b`)

// certain matches what no second run makes good.
var certain = regexp.MustCompile(`(?m)^WARNING: DATA RACE|^panic: |^fatal error: |race detected during execution`)

// said is what a test said itself, by the lines that the testing package marks
// with the file they come from, each with at most two that follow.
func said(output []string) string {
	var b strings.Builder
	keep := 0
	for _, line := range output {
		if own.MatchString(line) {
			keep = 3
		}
		if keep > 0 {
			fmt.Fprintf(&b, "%.400s\n", strings.TrimRight(line, "\n"))
			keep--
		}
	}
	return b.String()
}

// own matches how testing begins what a test logs.
var own = regexp.MustCompile(`^\s+\w+_test\.go:\d+: |^panic: `)
