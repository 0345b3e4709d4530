package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestSBOM: the command writes a file, or to standard output, the same bytes for the same time.
func TestSBOM(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	run := func(epoch string, args ...string) (string, error) {
		t.Setenv("SOURCE_DATE_EPOCH", epoch)
		var out bytes.Buffer
		root := command()
		root.SetOut(&out)
		root.SetArgs(append([]string{"sbom"}, args...))
		err := root.Execute()
		return out.String(), err
	}
	path := filepath.Join(t.TempDir(), "sbom.json")
	out, err := run("1000000000", "--program", self)
	if err != nil || !strings.Contains(out, `"timestamp": "2001-09-09T01:46:40Z"`) {
		t.Errorf("%v: %.500s", err, out)
	}
	if said, err := run("1000000000", "--program", self, "-o", path); err != nil || said != "" {
		t.Errorf("%v: %q", err, said)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != out {
		t.Errorf("the file has other bytes than standard output (%v)", err)
	}
	for epoch, args := range map[string][]string{"": nil, "yesterday": {"--program", self}, "-1": {"--program", self}} {
		if _, err := run(epoch, args...); !errors.As(err, new(usageError)) {
			t.Errorf("SOURCE_DATE_EPOCH=%s sbom %q: %v; want a usage error", epoch, args, err)
		}
	}
}
