package command

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
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
