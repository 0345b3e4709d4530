package upgrade

import (
	"errors"
	"testing"
)

// TestWorse: what failed before is no fault of the new version. Where nothing was tried before, a sandbox that does not
// come up is one, and a check that may fail for the image's sake is none.
func TestWorse(t *testing.T) {
	broken := errors.New("broken")
	fails := func(image string, checks ...string) tried {
		f := tried{image: image, failed: map[string]error{}}
		for _, c := range checks {
			f.failed[c] = broken
		}
		return f
	}
	all := append([]string{comesUp}, names(checks)...)
	for name, c := range map[string]struct {
		now, was tried
		want     int
	}{
		"good":                         {fails("i"), fails("i"), 0},
		"does not come up":             {fails("i", all...), fails("i"), 1},
		"did not come up before":       {fails("i", all...), fails("i", all...), 0},
		"no forks any more":            {fails("i", "a fork"), fails("i"), 1},
		"no forks before":              {fails("i", "a fork", "a name"), fails("i", "a fork"), 1},
		"nothing known, and dead":      {fails("i", all...), tried{}, 1},
		"nothing known, and no cat":    {fails("i", "a command"), tried{}, 0},
		"the host was full before":     {fails("i", all...), tried{skipped: "the host is full"}, 1},
		"mended":                       {fails("i"), fails("i", all...), 0},
		"a name that is of no runtime": {fails("i", "a name"), fails("i", "a file"), 1},
	} {
		if got := c.now.worse(c.was); len(got) != c.want {
			t.Errorf("%s: %v, want %d", name, got, c.want)
		}
	}
}
