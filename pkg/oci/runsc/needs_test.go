package runsc

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestNeeds: an image is refused where its build or a feature of its CPU is missing, and the
// refusal says which.
func TestNeeds(t *testing.T) {
	dir := t.TempDir()
	binary, cpuinfo := filepath.Join(dir, "runsc"), filepath.Join(dir, "cpuinfo")
	d := &Driver{c: Config{Binary: binary}, cpuinfo: cpuinfo}
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read := func() record.MemoryNeeds {
		t.Helper()
		n, err := d.needs(binary)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	write(binary, "one")
	write(cpuinfo, "processor\t: 0\nmodel name\t: Fast 1\nflags\t\t: sse fpu avx\n\n"+
		"processor\t: 1\nmodel name\t: Fast 1\nflags\t\t: none\n")
	made := read()
	if made.CPU != "Fast 1" || !slices.Equal(made.Features, []string{"avx", "fpu", "sse"}) || len(made.Build) != 64 {
		t.Fatalf("%+v", made)
	}
	meets := func() error { return d.Meets(made) }
	if err := meets(); err != nil {
		t.Error(err)
	}
	write(cpuinfo, "model name\t: Faster 2\nflags\t\t: sse fpu avx avx512f\n")
	if err := meets(); err != nil {
		t.Error("a CPU that has more:", err)
	}
	refused := func(words ...string) {
		t.Helper()
		err := meets()
		if !errs.Is(err, errs.Unavailable) {
			t.Fatalf("got %v", err)
		}
		for _, w := range append(words, "files alone") {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q is not in: %v", w, err)
			}
		}
	}
	write(cpuinfo, "model name\t: Slow 0\nflags\t\t: sse fpu\n")
	refused("Fast 1", "Slow 0", "lacks: avx;")
	write(binary, "two")
	refused("another build of runsc", made.Build[:12])
	os.Remove(binary)
	if err := meets(); err == nil || !strings.Contains(err.Error(), "identify runsc") {
		t.Error(err)
	}
}
