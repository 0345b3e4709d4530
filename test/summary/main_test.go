package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// run gives what the go command writes of a module of the given files.
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

// What one run leaves out and the next one runs is no failure; what no run has run is one.
func TestSkippedUntilRun(t *testing.T) {
	without := run(t, map[string]string{"a/a_test.go": gated})
	with := run(t, map[string]string{"a/a_test.go": gated}, "GATE=1")
	var out bytes.Buffer
	ok, err := summarize(strings.NewReader("== first\n"+without+"== second\n"+with), &out)
	if !ok || err != nil || !strings.HasPrefix(out.String(), "== first\npass x/a ") || !strings.HasSuffix(out.String(), "\n3 passed, 0 failed, 0 skipped\n") {
		t.Errorf("%v %v:\n%s", ok, err, out.String())
	}
	for _, stream := range []string{without, with + without} {
		out.Reset()
		ok, err = summarize(strings.NewReader(stream), &out)
		if ok || err != nil || !strings.Contains(out.String(), "--- skip x/a TestGated\n") || !strings.Contains(out.String(), "needs GATE\n") ||
			!strings.HasSuffix(out.String(), " 0 failed, 1 skipped\n") {
			t.Errorf("a test that was not run: %v %v:\n%s", ok, err, out.String())
		}
	}
}

// Whatever fails in the first run is named after all of the last one, each with its own words.
func TestFailuresLast(t *testing.T) {
	first := run(t, map[string]string{
		"a/a_test.go": "package a\n\nimport \"testing\"\n\nfunc TestBad(t *testing.T) { t.Error(\"is bad\") }\nfunc TestGood(t *testing.T) {}\n",
		"b/b_test.go": "package b\n\nimport \"testing\"\n\nfunc TestNotBuilt(t *testing.T) { missing() }\n",
		"c/c_test.go": "package c\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestExits(t *testing.T) { os.Exit(3) }\n",
		"d/d_test.go": "package d\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestGood(t *testing.T) {}\n\nfunc TestMain(m *testing.M) { m.Run(); println(\"left something\"); os.Exit(1) }\n",
	})
	second := run(t, map[string]string{"a/a_test.go": gated}, "GATE=1")
	var out bytes.Buffer
	ok, err := summarize(strings.NewReader(first+"== second\n"+second), &out)
	if ok || err != nil {
		t.Errorf("ok %v, %v", ok, err)
	}
	_, last, found := strings.Cut(out.String(), "== second\npass x/a ")
	if !found {
		t.Fatalf("the second run is not told of:\n%s", out.String())
	}
	for _, want := range []string{
		"--- fail x/a TestBad\n    a_test.go:5: is bad\n",
		"--- fail x/b\n", "undefined: missing\n",
		"--- fail x/c TestExits\n",
		"--- fail x/d\n", "left something\n",
		"\n4 passed, 4 failed, 0 skipped\n",
	} {
		if !strings.Contains(last, want) {
			t.Errorf("no %q at the end:\n%s", want, last)
		}
	}
}

// A test that fails once and then passes twice is told of as unsteady, and has failed; one
// that fails again, or races, is not unsteady.
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
		name, stream, again, end string
	}{
		{"passed twice", run(t, files, "BAD=slow") + good + good, "x/a ^TestTree$/^a\\.b$\n", "--- fail x/a TestTree/a.b (unsteady: it passed 2 times after that)\n    a_test.go:11: slow\n"},
		{"passed once", run(t, files, "BAD=slow") + good, "x/a ^TestTree$/^a\\.b$\n", "--- fail x/a TestTree/a.b\n"},
		{"failed again", run(t, files, "BAD=slow") + good + run(t, files, "BAD=slow") + good, "", "--- fail x/a TestTree/a.b\n"},
		{"a race", run(t, files, "BAD=race detected during execution of test") + good + good, "", "--- fail x/a TestTree/a.b\n"},
		{"nothing", good, "", "\n3 passed, 0 failed, 0 skipped\n"},
	} {
		var again, out bytes.Buffer
		some, err := worthAgain(strings.NewReader(tt.stream), &again)
		if err != nil || some != (tt.again != "") || again.String() != tt.again {
			t.Errorf("%s: run again %v, %v: %q, want %q", tt.name, some, err, again.String(), tt.again)
		}
		ok, err := summarize(strings.NewReader(tt.stream), &out)
		_, last, _ := strings.Cut("\n"+out.String(), "\npass x/a ")
		if err != nil || ok == strings.Contains(tt.end, "fail x") || !strings.Contains(last, tt.end) {
			t.Errorf("%s: %v %v, want %q:\n%s", tt.name, ok, err, tt.end, out.String())
		}
	}
}

// Many failures are no accident, and a package that ends by itself is none.
func TestNotWorthAgain(t *testing.T) {
	many := "package a\n\nimport \"testing\"\n"
	for _, name := range []string{"A", "B", "C", "D"} {
		many += "\nfunc Test" + name + "(t *testing.T) { t.Error(1) }\n"
	}
	exits := "package a\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nfunc TestA(t *testing.T) {}\n\nfunc TestMain(m *testing.M) { m.Run(); os.Exit(1) }\n"
	for _, source := range []string{many, exits} {
		var out bytes.Buffer
		if ok, err := worthAgain(strings.NewReader(run(t, map[string]string{"a/a_test.go": source})), &out); ok || err != nil || out.Len() > 0 {
			t.Errorf("%v, %v: %q of\n%s", ok, err, out.String(), source)
		}
	}
}
