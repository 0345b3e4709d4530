package archtest

import (
	"fmt"
	"go/ast"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// threatModel is the document whose tables are claims: the last cell of each row names the
// tests that fail if the row is not true.
const threatModel = "docs/design/threat-model.md"

// unheld are the words of a claim that no test holds, with which its cell begins.
var unheld = []string{"not tested", "unproven", "admitted"}

// codeSpan matches a code span, which in the last cell of a claim is a test: the
// directory of its package and its name, as `pkg/oci TestGolden`. A subtest has its name
// behind a slash. `attack NAME` is a row of the table of test/attacks, which has the names:
// its TestNamed looks for them.
var (
	codeSpan = regexp.MustCompile("`([^`]+)`")
	testSpan = regexp.MustCompile(`^([\w./-]+) ((?:Test|Fuzz)\w*)((?:/[\w.-]+)*)$`)
)

// TestClaims holds that every claim of the threat model names its tests, or says that
// there is none, and that these tests exist.
func TestClaims(t *testing.T) {
	known := testsOf(sources(t))
	rows := 0
	for _, d := range documents(t, []string{threatModel}) {
		faults, n := d.claims(known.has)
		rows += n
		for _, f := range faults {
			t.Errorf("%s:%s", d.path, f)
		}
	}
	if rows < 50 {
		t.Errorf("%s has %d claims: this looks in the wrong place", threatModel, rows)
	}
}

// claims checks the tables of a document. has says what is wrong with a test; "" if it
// exists.
func (d document) claims(has func(dir, name string, sub []string) string) (faults []string, rows int) {
	header := true
	for _, l := range d.lines {
		if !isRow(l.text) {
			header = true
			continue
		}
		cells := strings.Split(strings.Trim(strings.TrimSpace(l.text), "|"), "|")
		last := strings.TrimSpace(cells[len(cells)-1])
		bad := func(format string, args ...any) {
			faults = append(faults, fmt.Sprintf("%d: ", l.number)+fmt.Sprintf(format, args...))
		}
		switch {
		case header:
			header = false
			if last != "test" {
				bad("the last column of a table of claims is its test, not %q", last)
			}
			continue
		case last != "" && strings.Trim(last, "-:") == "": // the line below the header
			continue
		}
		rows++
		spans := codeSpan.FindAllStringSubmatch(last, -1)
		if len(spans) == 0 && !slices.ContainsFunc(unheld, func(words string) bool { return strings.HasPrefix(last, words) }) {
			bad("the claim names no test; write %q if it has none", unheld)
		}
		for _, s := range spans {
			if strings.HasPrefix(s[1], "attack ") {
				s[1] = "test/attacks TestNamed"
			}
			m := testSpan.FindStringSubmatch(s[1])
			if m == nil {
				bad("%q is no test: write its package and its name, such as `pkg/oci TestGolden`", s[1])
				continue
			}
			var sub []string
			if m[3] != "" {
				sub = strings.Split(m[3][1:], "/")
			}
			if why := has(m[1], m[2], sub); why != "" {
				bad("%s: %s", s[1], why)
			}
		}
	}
	return faults, rows
}

// A testIndex knows the tests of each package, and the texts in it from which subtests
// may have their names.
type testIndex struct {
	tests   map[string]map[string]bool // by directory
	texts   map[string]map[string]bool // by directory: string literals of all its files
	imports map[string][]string        // of test files, within the module
}

func testsOf(all []source) testIndex {
	x := testIndex{map[string]map[string]bool{}, map[string]map[string]bool{}, map[string][]string{}}
	note := func(m map[string]map[string]bool, dir, what string) {
		if m[dir] == nil {
			m[dir] = map[string]bool{}
		}
		m[dir][what] = true
	}
	for _, s := range all {
		dir := filepath.ToSlash(s.dir)
		ast.Inspect(s.file, func(n ast.Node) bool {
			if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
				if text, err := strconv.Unquote(l.Value); err == nil {
					note(x.texts, dir, text)
				}
			}
			return true
		})
		if !s.test() {
			continue
		}
		for _, imp := range s.file.Imports {
			if dep, ok := strings.CutPrefix(strings.Trim(imp.Path.Value, `"`), module); ok {
				x.imports[dir] = append(x.imports[dir], dep)
			}
		}
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.Name != "TestMain" {
				note(x.tests, dir, f.Name.Name)
			}
		}
	}
	return x
}

// has says why there is no such test; "" if there is. The name of a subtest stands as a
// text in its package or in one that its tests import, such as a suite.
func (x testIndex) has(dir, name string, sub []string) string {
	if !x.tests[dir][name] {
		return "there is no such test"
	}
	for _, part := range sub {
		if !slices.ContainsFunc(append([]string{dir}, x.imports[dir]...), func(d string) bool { return x.texts[d][part] }) {
			return "no subtest of it is called " + part
		}
	}
	return ""
}

// TestClaimsAreChecked holds that claims finds what is wrong with a claim.
func TestClaimsAreChecked(t *testing.T) {
	has := func(dir, name string, _ []string) string {
		if dir == "pkg/a" && name == "TestA" || dir == "test/attacks" && name == "TestNamed" {
			return ""
		}
		return "there is no such test"
	}
	for row, want := range map[string]string{
		"| x | `pkg/a TestA` |":                      "",
		"| x | `pkg/a TestA/b`, `pkg/a TestA` |":     "",
		"| x | not tested |":                         "",
		"| x | admitted |":                           "",
		"| x | unproven: why |":                      "",
		"| x | `pkg/a TestA`; the rest not tested |": "",
		"| x | `attack a name: of words` |":          "",
		"| x | `attacks` |":                          "is no test",
		"| x | `pkg/a TestB` |":                      "there is no such test",
		"| x | `pkg/a TestA`, `pkg/b TestA` |":       "pkg/b TestA: there is no such test",
		"| x | `TestA` |":                            "is no test",
		"| `pkg/a TestA` | |":                        "names no test",
		"| x | by reading |":                         "names no test",
	} {
		text := "| claim | test |\n|---|---|\n" + row + "\n"
		faults, n := document{lines: withoutCode(text)}.claims(has)
		got := strings.Join(faults, "; ")
		if n != 1 || (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %d claims, %q; want %q", row, n, got, want)
		}
	}
	if faults, _ := (document{lines: withoutCode("| claim | why |\n|---|---|\n")}).claims(has); len(faults) != 1 {
		t.Errorf("a table without tests: %q", faults)
	}
	x := testsOf(sources(t))
	for test, want := range map[[3]string]bool{
		{"internal/archtest", "TestClaims", ""}:              true,
		{"internal/archtest", "TestMain", ""}:                false,
		{"internal/archtest", "testsOf", ""}:                 true, // the form of the span asks for Test or Fuzz
		{"pkg/oci/runc", "TestConformance", "Report"}:        true, // of the suite that it imports
		{"pkg/oci/runc", "TestConformance", "NoSuchSubtest"}: false,
	} {
		var sub []string
		if test[2] != "" {
			sub = []string{test[2]}
		}
		if got := x.has(test[0], test[1], sub) == ""; got != want {
			t.Errorf("%v: %v, want %v", test, got, want)
		}
	}
}
