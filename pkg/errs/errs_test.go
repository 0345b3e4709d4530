package errs_test

import (
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

func TestCount(t *testing.T) {
	for n, want := range map[int]string{0: "0 sandboxes", 1: "1 sandbox", 2: "2 sandboxes"} {
		if got := errs.Count(n, "sandbox", "sandboxes"); got != want {
			t.Errorf("%d: %q", n, got)
		}
	}
}
