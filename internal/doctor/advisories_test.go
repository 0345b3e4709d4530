package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestFlaws compares versions with the built-in table.
func TestFlaws(t *testing.T) {
	h := newTree(t, nil)
	for text, bad := range map[string]bool{
		"v1.1.5": true, "v1.1.15": true, "v1.2.7": true, "v1.2.8": false, "v1.3.2": true, "v1.3.3": false, "v1.4.0": false, "v1.5.2": false,
		"v2.0.0": false,
	} {
		v, ok := parseVersion(text)
		if !ok {
			t.Fatalf("%s is no version", text)
		}
		if f := h.flawsOf("runc", v); (f.Status == Warn) != bad || bad && !strings.Contains(f.Mend, "1.2.8") {
			t.Errorf("runc %s: %+v", text, f)
		}
	}
	// A version with two flaws: both are named, with what mends them and where that is said.
	f := h.flawsOf("runc", version{1, 1, 5})
	for _, want := range []string{"CVE-2025-31133", "CVE-2024-21626", "GHSA-xr7r-f8xq-vfvv"} {
		if !strings.Contains(f.Detail, want) {
			t.Errorf("%q does not say %s", f.Detail, want)
		}
	}
	if !strings.Contains(f.Mend, "CVE-2024-21626 is fixed in 1.1.12") {
		t.Errorf("%q", f.Mend)
	}
}

const ownTable = `date = 2027-01-10
[[flaw]]
part = "gvisor"
id = "OWN-1"
what = "a guest gets out"
since = "20260101.0"
fixed = ["20261201.0"]
source = "https://example.com/1"
[[flaw]]
part = "kernel"
id = "OWN-2"
what = "a guest gets out, and nothing helps"
source = "https://example.com/2"
`

// TestAdvisoriesFile: a file replaces the built-in table, at its place or by its name.
func TestAdvisoriesFile(t *testing.T) {
	named := filepath.Join(t.TempDir(), "named.toml")
	if err := os.WriteFile(named, []byte(strings.ReplaceAll(ownTable, "OWN", "NAMED")), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, id := range map[string]string{"": "OWN", named: "NAMED"} {
		h := newTree(t, map[string]string{AdvisoriesFile: ownTable})
		h.now = func() time.Time { return time.Date(2027, 2, 1, 0, 0, 0, 0, time.UTC) }
		h.advisoriesFile = path
		if f := find(t, "advisories").ask(t.Context(), h); f.Status != OK || !strings.Contains(f.Detail, "of 2027-01-10 in ") ||
			!strings.Contains(f.Detail, "2 flaws") {
			t.Errorf("%+v", f)
		}
		for day, want := range map[int]Status{20251231: OK, 20260101: Warn, 20261130: Warn, 20261201: OK} {
			if f := h.flawsOf("gvisor", version{day}); f.Status != want || want == Warn && (!strings.Contains(f.Detail, id+"-1") ||
				!strings.Contains(f.Mend, "20261201.0")) {
				t.Errorf("gVisor of %d: %+v; want %s", day, f, want)
			}
		}
		if f := h.flawsOf("kernel", version{99, 1}); f.Status != Warn || !strings.Contains(f.Mend, id+"-2 is fixed in no version yet") {
			t.Errorf("a flaw that nothing mends: %+v", f)
		}
		if f := h.flawsOf("runc", version{1, 0, 0}); f.Status != OK || !strings.Contains(f.Detail, "2027-01-10") {
			t.Errorf("the file replaces the built-in table, and is named by its date: %+v", f)
		}
	}
}

// TestAdvisoriesAge: the doctor prints the date of the table, says when the table is old,
// and when it is older than the built-in table.
func TestAdvisoriesAge(t *testing.T) {
	built, err := parseAdvisories(builtIn)
	if err != nil {
		t.Fatal(err)
	}
	day := built.day()
	file := func(at time.Time) string { return strings.Replace(ownTable, "2027-01-10", at.Format(time.DateOnly), 1) }
	for name, c := range map[string]struct {
		file   string
		now    time.Time
		want   Status
		detail string
	}{
		"built in":               {"", day.AddDate(0, 0, 182), OK, "the built-in table of " + built.Date.String()},
		"built in, old":          {"", day.AddDate(0, 0, 184), Warn, "184 days old"},
		"a file":                 {file(day), day.AddDate(0, 0, 182), OK, AdvisoriesFile},
		"a file, old":            {file(day.AddDate(0, 0, 1)), day.AddDate(0, 0, 200), Warn, "199 days old"},
		"older than the release": {file(day.AddDate(0, 0, -1)), day, Warn, "older than the built-in table of " + built.Date.String()},
		"of tomorrow, elsewhere": {file(day.AddDate(0, 0, 1)), day, OK, AdvisoriesFile},
		"of the future":          {file(day.AddDate(0, 0, 3)), day, Fail, "is in the future"},
	} {
		files := map[string]string{}
		if c.file != "" {
			files[AdvisoriesFile] = c.file
		}
		h := newTree(t, files)
		h.now = func() time.Time { return c.now }
		f := find(t, "advisories").ask(t.Context(), h)
		if f.Status != c.want || !strings.Contains(f.Detail, c.detail) || c.want != OK && f.Mend == "" {
			t.Errorf("%s: %+v; want %s, %q", name, f, c.want, c.detail)
		}
	}
}

// TestBadAdvisories: a file that cannot be used is refused, with each bad line and the
// reason, and the built-in table is used.
func TestBadAdvisories(t *testing.T) {
	replace := func(old, by string) string { return strings.Replace(ownTable, old, by, 1) }
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"empty":        {"", []string{"line 1: there is no date", "line 1: there is no [[flaw]]"}},
		"no TOML":      {replace("[[flaw]]", "[[flaw]"), []string{"line 2: "}},
		"no date":      {replace("2027-01-10", "'soon'"), []string{"line 1: "}},
		"unknown key":  {replace("since", "from"), []string{"line 6: unknown key flaw.from"}},
		"no part":      {replace(`part = "gvisor"`+"\n", ""), []string{`line 2: part "": want kernel, runc or gvisor`}},
		"foreign part": {replace(`"kernel"`, `"docker"`), []string{`line 10: part "docker"`}},
		"no source": {
			replace("https://example.com/1", " "),
			[]string{"line 8: the flaw has no source"},
		},
		"no id, no what": {
			strings.Replace(replace(`id = "OWN-1"`, ""), `what = "a guest gets out"`, "", 1),
			[]string{"line 2: the flaw has no id", "line 2: the flaw has no what"},
		},
		"a word for a version":      {replace("20261201.0", "next"), []string{`line 7: "next" is not a version`}},
		"one number":                {replace("20260101.0", "6"), []string{`line 6: "6" is not a version`}},
		"a version and more":        {replace("20260101.0", "6.1-rc1"), []string{`line 6: "6.1-rc1" is not a version`}},
		"versions that do not rise": {replace(`["20261201.0"]`, `["6.2", "6.1"]`), []string{"line 7: the versions do not ascend"}},
		"a list for a text":         {replace(`"OWN-1"`, `["OWN-1"]`), []string{"line 4: flaw.id does not fit"}},
		"large":                     {strings.Repeat("#", advisoriesMost+1), []string{"larger than"}},
	} {
		h := newTree(t, map[string]string{AdvisoriesFile: c.text})
		f := find(t, "advisories").ask(t.Context(), h)
		for _, want := range append(c.want, AdvisoriesFile+" is not used", "the built-in table") {
			if f.Status != Fail || !strings.Contains(f.Detail, want) || strings.Contains(f.Detail, "\n") {
				t.Errorf("%s: %+v; want %q", name, f, want)
			}
		}
		if f := h.flawsOf("runc", version{1, 0, 0}); f.Status != Warn {
			t.Errorf("%s: the built-in table is not used: %+v", name, f)
		}
	}
	h := newTree(t, nil)
	h.advisoriesFile = "/nowhere/table.toml"
	if f := find(t, "advisories").ask(t.Context(), h); f.Status != Fail || !strings.Contains(f.Detail, "no such file") {
		t.Errorf("a file that was named and is not there: %+v", f)
	}
}

// TestDocumentedAdvisories: the doctor takes the table that docs/operations.md shows.
func TestDocumentedAdvisories(t *testing.T) {
	b, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "### Known flaws")
	_, rest, _ = strings.Cut(rest, "```toml\n")
	text, _, found := strings.Cut(rest, "```")
	table, err := parseAdvisories([]byte(text))
	if !found || err != nil || len(table.Flaws) != 1 || len(table.Flaws[0].Fixed) != 4 {
		t.Errorf("%+v, %v", table, err)
	}
}
