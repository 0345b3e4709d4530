package command

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

func TestParsing(t *testing.T) {
	for s, want := range map[string]string{
		"256m": "256Mi", "1g": "1Gi", "512MB": "512Mi", "256Mi": "256Mi", "1Gi": "1Gi", "1000": "1000",
		"x": "x", "": "",
	} {
		if got := Size(s); got != want {
			t.Errorf("Size(%q) = %q", s, got)
		}
	}
	file := filepath.Join(t.TempDir(), "env")
	if err := os.WriteFile(file, []byte("# comment\n\nA=1\nB = x\nHOME\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("HOME", "/h")
	env, err := Environment([]string{"A=2", "UNSET_VARIABLE"}, []string{file})
	if got := fmt.Sprint(Flat(env)); err != nil || got != "map[A:2 B : x HOME:/h]" {
		t.Errorf("%s %v", got, err)
	}
	if _, err := Environment([]string{"=x"}, nil); err == nil {
		t.Error("=x was taken")
	}
}

// TestSince: docker's forms of a time.
func TestSince(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	for s, want := range map[string]time.Time{
		"":                          {},
		"10m":                       now.Add(-10 * time.Minute),
		"1h30m":                     now.Add(-90 * time.Minute),
		"2026-11-23T11:00:00Z":      now.Add(-time.Hour),
		"2026-11-23T11:00:00.5Z":    now.Add(-time.Hour + time.Second/2),
		"2026-11-23T13:00:00+02:00": now.Add(-time.Hour),
		"2026-11-23T11:00:00":       time.Date(2026, 11, 23, 11, 0, 0, 0, time.Local),
		"2026-11-23":                time.Date(2026, 11, 23, 0, 0, 0, 0, time.Local),
		"1795000000":                time.Unix(1795000000, 0),
		"0":                         time.Unix(0, 0),
		"1795000000.25":             time.Unix(1795000000, 250000000),
	} {
		if got, err := Since("--since", s, now); err != nil || !got.Equal(want) {
			t.Errorf("%q: %v, %v; want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"yesterday", "1.x", "2026-13-01", "1.0000000001"} {
		if got, err := Since("--since", s, now); !errs.Is(err, errs.Invalid) {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
}
