package main

import (
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/internal/doctor"
)

// TestVerdict: only what fails now makes the exit status 1, mended or not, and
// what was done is said.
func TestVerdict(t *testing.T) {
	mended := doctor.Finding{Check: "a", Status: doctor.OK, Detail: "fine", Fixed: "loaded a"}
	inVain := doctor.Finding{Check: "b", Status: doctor.Fail, Detail: "broken", Fixed: "loaded b", Mend: "another kernel"}
	if err := verdict([]doctor.Finding{mended}); err != nil {
		t.Error(err)
	}
	if err := verdict([]doctor.Finding{mended, inVain}); err == nil || !strings.Contains(err.Error(), "1 of 2") {
		t.Errorf("a check that fails after it was mended: %v", err)
	}
	var out strings.Builder
	if err := printFindings(&out, []doctor.Finding{mended, inVain}, "table"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"done: loaded a", "done: loaded b", "fix: another kernel"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in:\n%s", want, out.String())
		}
	}
}
