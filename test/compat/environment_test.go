package compat_test

import (
	"os"
	"testing"

	"github.com/sandboxd/sandboxd/test/official"
)

// installed is where programs for node lie, beside a link to their modules.
const installed = "../../build/compat"

// venv returns the Python of an environment with what a file of requirements
// names in it.
func venv(t *testing.T, requirements string) string {
	t.Helper()
	python, err := official.Python(t.Context(), requirements)
	if err != nil {
		t.Fatal(err)
	}
	return python
}

// node returns the path of a program beside the modules that it imports.
func node(t *testing.T, program string) string {
	t.Helper()
	path, err := official.Node(t.Context(), installed, program, "")
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	content, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, content, 0o644); err != nil {
		t.Fatal(err)
	}
}
