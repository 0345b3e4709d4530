package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/versions"
)

// TestVersions: which are there, which of them run, and what came of the last change.
func TestVersions(t *testing.T) {
	dir := t.TempDir()
	r := versions.Root(dir)
	shows := func(args, want string) {
		t.Helper()
		out, err := run(append([]string{"versions", "--root", dir}, strings.Fields(args)...)...)
		if err != nil || out != want {
			t.Errorf("versions %s: %v\n%s\nwant\n%s", args, err, out, want)
		}
	}
	shows("", dir+" has no versions: this sandboxd was not installed by a package\n")
	shows("-o json", "[]\n")
	for version, schema := range map[string]string{"1.9.0": "6", "1.10.0": "7", "1.8.0": ""} {
		share := filepath.Join(r.Dir(version), "share/sandboxd")
		if err := os.MkdirAll(share, 0o755); err != nil {
			t.Fatal(err)
		}
		if schema == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(share, "schema"), []byte(schema), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	undone := versions.Journal{
		Step: versions.Undone, From: "1.9.0", To: "1.10.0", Ended: time.Unix(1767225600, 0).UTC(), Reason: "it did not answer",
	}
	if err := errors.Join(r.Point(versions.Current, "1.9.0"), r.Point(versions.Previous, "1.8.0"), r.Note(&undone)); err != nil {
		t.Fatal(err)
	}
	shows("", `VERSION   ROLE       SCHEMA
1.10.0    -          7
1.9.0     current    6
1.8.0     previous   0

the change to 1.10.0 was undone at 2026-01-01T00:00:00Z: it did not answer
`)
	shows("--output json", `[
  {
    "version": "1.10.0",
    "schema": 7,
    "role": ""
  },
  {
    "version": "1.9.0",
    "schema": 6,
    "role": "current"
  },
  {
    "version": "1.8.0",
    "schema": 0,
    "role": "previous"
  }
]
`)
	for _, args := range [][]string{{"versions", "-o", "yaml"}, {"versions", "x"}, {"upgrade"}, {"rollback", "1.0.0", "2.0.0"}} {
		if _, err := run(args...); err == nil {
			t.Errorf("%q is accepted", args)
		}
	}
}
