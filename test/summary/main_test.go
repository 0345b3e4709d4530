package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// run returns the output of `go test -json` for a module of the given files.
func run(t *testing.T, files map[string]string, env ...string) string {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module x\n\ngo 1.26\n"
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("go", "test", "-json", "-count=1", "./...")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	_ = cmd.Run() // it fails when tests do
	return out.String()
}

// summarize reads runs, writes to out what summary prints, and returns the verdict.
func summarize(out *bytes.Buffer, runs ...string) (bool, error) {
	s := newSummary()
	for i, r := range runs {
		if err := s.read(fmt.Sprint("run", i), strings.NewReader(r)); err != nil {
			return false, err
		}
	}
	s.printTimes(out)
	return s.end(out), nil
}

const gated = `package a

import (
	"os"
	"testing"
)

func TestAlways(t *testing.T) {}

func TestGated(t *testing.T) {
	if os.Getenv("GATE") == "" {
		t.Skip("needs GATE")
	}
}
`

// A test that one run skips and the next one runs is no failure; a test that no run has
// run is a failure.
func TestSkippedUntilRun(t *testing.T) {
	without := run(t, map[string]string{"a/a_test.go": gated})
	with := run(t, map[string]string{"a/a_test.go": gated}, "GATE=1")
	for name, runs := range map[string][]string{"run after": {without, with}, "run before": {with, without}} {
		var out bytes.Buffer
		ok, err := summarize(&out, runs...)
		if !ok || err != nil || !strings.HasSuffix(out.String(), "\n2 passed, 0 failed, 0 skipped\n") {
			t.Errorf("%s: %v %v:\n%s", name, ok, err, out.String())
		}
	}
	var out bytes.Buffer
	ok, err := summarize(&out, without)
	if ok || err != nil || !strings.Contains(out.String(), "--- skip x/a TestGated\n") || !strings.Contains(out.String(), "needs GATE\n") ||
		!strings.HasSuffix(out.String(), "\n1 passed, 0 failed, 1 skipped\n") {
		t.Errorf("a test that was not run: %v %v:\n%s", ok, err, out.String())
	}
}

// A failure of the first run is still printed after the last run, with its own output.
func TestFailuresLast(t *testing.T) {
	first := run(t, map[string]string{
		"a/a_test.go": "package a\n\nimport \"testing\"\n\nfunc TestBad(t *testing.T) { t.Error(\"is bad\") }\nfunc TestGood(t " +
			"*testing.T) {}\n",
		"b/b_test.go": "package b\n\nimport \"testing\"\n\nfunc TestNotBuilt(t *testing.T) { missing() }\n",
		"c/c_test.go": "package c\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestExits(t *testing.T) { os.Exit(3) }\n",
		"d/d_test.go": "package d\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestGood(t *testing.T) {}\n\nfunc TestMain(m " +
			"*testing.M) { m.Run(); println(\"left something\"); os.Exit(1) }\n",
	})
	second := run(t, map[string]string{"a/a_test.go": gated}, "GATE=1")
	var out bytes.Buffer
	ok, err := summarize(&out, first, second)
	if ok || err != nil {
		t.Errorf("ok %v, %v", ok, err)
	}
	_, last, _ := strings.Cut(out.String(), "slowest tests:\n")
	for _, want := range []string{
		"--- fail x/a TestBad\n    a_test.go:5: is bad\n",
		"--- fail x/b\n", "undefined: missing\n",
		"--- fail x/c TestExits\n",
		"--- fail x/d\n", "left something\n",
		"\nfail x/a TestBad: a_test.go:5: is bad\n",
		"\n4 passed, 4 failed, 0 skipped\n",
	} {
		if !strings.Contains(last, want) {
			t.Errorf("no %q at the end:\n%s", want, last)
		}
	}
}

// A test that fails once and then passes twice is called unsteady and counts as failed; a
// test that fails again, or has a data race, is not unsteady.
func TestUnsteady(t *testing.T) {
	const unsteady = `package a

import (
	"os"
	"testing"
)

func TestTree(t *testing.T) {
	t.Run("a.b", func(t *testing.T) {
		if os.Getenv("BAD") != "" {
			t.Error(os.Getenv("BAD"))
		}
	})
	t.Run("other", func(t *testing.T) {})
}
`
	files := map[string]string{"a/a_test.go": unsteady}
	good := run(t, files)
	for _, tt := range []struct {
		name       string
		runs       []string
		again, end string
	}{
		{
			"passed twice",
			[]string{run(t, files, "BAD=slow"), good, good},
			"x/a ^TestTree$/^a\\.b$\n",
			"--- fail x/a TestTree/a.b (unsteady: it passed 2 times after that)\n    a_test.go:11: slow\n",
		},
		{"passed once", []string{run(t, files, "BAD=slow"), good}, "x/a ^TestTree$/^a\\.b$\n", "--- fail x/a TestTree/a.b\n"},
		{"failed again", []string{run(t, files, "BAD=slow"), good, run(t, files, "BAD=slow"), good}, "", "--- fail x/a TestTree/a.b\n"},
		{"a race", []string{run(t, files, "BAD=race detected during execution of test"), good, good}, "", "--- fail x/a TestTree/a.b\n"},
		{"nothing", []string{good}, "", "\n3 passed, 0 failed, 0 skipped\n"},
	} {
		var again, out bytes.Buffer
		some := worthAgain(t, &again, tt.runs...)
		if some != (tt.again != "") || again.String() != tt.again {
			t.Errorf("%s: run again %v: %q, want %q", tt.name, some, again.String(), tt.again)
		}
		ok, err := summarize(&out, tt.runs...)
		if err != nil || ok == strings.Contains(tt.end, "fail x") || !strings.Contains(out.String(), tt.end) {
			t.Errorf("%s: %v %v, want %q:\n%s", tt.name, ok, err, tt.end, out.String())
		}
	}
}

func worthAgain(t *testing.T, out *bytes.Buffer, runs ...string) bool {
	t.Helper()
	s := newSummary()
	for _, r := range runs {
		if err := s.read("run", strings.NewReader(r)); err != nil {
			t.Fatal(err)
		}
	}
	return s.printAgain(out)
}

// Many failures are no accident, nor is a package that ends outside of a test.
func TestNotWorthAgain(t *testing.T) {
	many := "package a\n\nimport \"testing\"\n"
	for _, name := range []string{"A", "B", "C", "D"} {
		many += "\nfunc Test" + name + "(t *testing.T) { t.Error(1) }\n"
	}
	exits := "package a\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestA(t *testing.T) {}\n\nfunc TestMain(m *testing.M) { " +
		"m.Run(); os.Exit(1) }\n"
	for _, source := range []string{many, exits} {
		var out bytes.Buffer
		if worthAgain(t, &out, run(t, map[string]string{"a/a_test.go": source})) || out.Len() > 0 {
			t.Errorf("%q of\n%s", out.String(), source)
		}
	}
}

// A run that ends without a result, or in the middle of a test, has failed, even if all
// other tests passed.
func TestNoResult(t *testing.T) {
	good := run(t, map[string]string{"a/a_test.go": "package a\n\nimport \"testing\"\n\nfunc TestGood(t *testing.T) {}\n"})
	for name, tt := range map[string]struct{ stream, end string }{
		"empty":       {"", "--- fail run1\nit ended without a result\n"},
		"other words": {"exec: no such program\n", "it ended without a result\nexec: no such program\n"},
		"cut off": {
			`{"Action":"pass","Package":"x/b","Test":"TestA"}` + "\n" +
				`{"Action":"output","Package":"x/b","Test":"TestB","Output":"    b_test.go:7: so far\n"}` + "\n",
			"--- fail x/b TestB\n    b_test.go:7: so far\n",
		},
	} {
		var out bytes.Buffer
		if ok, err := summarize(&out, good, tt.stream); ok || err != nil || !strings.Contains(out.String(), tt.end) {
			t.Errorf("%s: %v %v, want %q:\n%s", name, ok, err, tt.end, out.String())
		}
	}
}

// The output of a failure is bounded, and the end of the summary is enough to know it.
func TestShort(t *testing.T) {
	files := map[string]string{"a/a_test.go": "package a\n\nimport \"testing\"\n\nfunc TestA(t *testing.T) {\n\tfor i := range 1000 " +
		"{\n\t\tt.Error(\"wrong\", i)\n\t}\n}\n\nfunc TestB(t *testing.T) { t.Error(\"why\") }\n"}
	var out bytes.Buffer
	if ok, err := summarize(&out, run(t, files)); ok || err != nil {
		t.Errorf("%v %v", ok, err)
	}
	if n := strings.Count(out.String(), "wrong"); n != maxSaid+1 { // and once in the list
		t.Errorf("%d lines of the failure are printed:\n%s", n, out.String())
	}
	for _, want := range []string{
		"... 960 lines more\n",
		"\nfail x/a TestA: a_test.go:7: wrong 0\nfail x/a TestB: a_test.go:11: why\n0 passed, 2 failed, 0 skipped\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

// Times of packages and tests are sorted, the longest first; those of two runs are added.
func TestTimes(t *testing.T) {
	s := newSummary()
	for _, text := range []string{
		`{"Action":"pass","Package":"x/a","Test":"TestA","Elapsed":1}` + "\n" + `{"Action":"pass","Package":"x/a","Elapsed":1.5}`,
		`{"Action":"pass","Package":"x/b","Test":"TestB","Elapsed":2}` + "\n" + `{"Action":"pass","Package":"x/b","Elapsed":2}`,
		`{"Action":"pass","Package":"x/a","Test":"TestC","Elapsed":1.2}` + "\n" + `{"Action":"pass","Package":"x/a","Elapsed":1.5}`,
	} {
		if err := s.read("run", strings.NewReader(text)); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	s.printTimes(&out)
	want := "seconds of each package:\n    3.0 x/a\n    2.0 x/b\nthe 20 slowest tests:\n    2.0 x/b TestB\n    1.2 x/a TestC\n    1.0 " +
		"x/a TestA\n"
	if out.String() != want {
		t.Errorf("%s\nwant\n%s", out.String(), want)
	}
}

// A tenth of the time was stolen; in half of it the CPUs were idle or waited for a disk.
func TestShares(t *testing.T) {
	before, now := "cpu  0 0 0 100 0 0 0 0 0 0\ncpu0 0", "cpu  30 0 10 140 10 0 0 10 5 0\ncpu0 1"
	if got := shares(before, now); got != "stolen: 10.0 %, idle: 50 %" {
		t.Error(got)
	}
	for _, bad := range []string{"", "cpu x", "cpu 1 2"} {
		if got := shares(bad, now); !strings.Contains(got, "unknown") {
			t.Errorf("%q: %s", bad, got)
		}
	}
	if got := machine(""); !strings.HasPrefix(got, "CPU: ") {
		t.Error(got)
	}
}
