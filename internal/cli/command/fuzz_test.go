package command

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// FuzzSince: a time that a person types is read as the same when it is typed in full.
func FuzzSince(f *testing.F) {
	for _, s := range []string{
		"10m", "2026-11-23T13:00:00.5+02:00", "2026-11-23", "1795000000.25", "-5", "0", "1.", "-2562047h47m16.854775808s",
	} {
		f.Add(s)
	}
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, s string) {
		at, err := Since("--since", s, now)
		if err != nil {
			if !errs.Is(err, errs.Invalid) || len(err.Error()) > 500 {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		full := at.UTC().Format(time.RFC3339Nano)
		if s == "" || at.UTC().Year() < 0 || at.UTC().Year() > 9999 {
			return
		}
		if again, err := Since("--since", full, now); err != nil || !again.Equal(at) {
			t.Fatalf("%q is %v, which is read as %v, %v", s, full, again, err)
		}
	})
}
