package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

func TestBar(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "terminal"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := Bar{On: f}
	b.Image(wire.ImportProgress{Stage: "receive", Bytes: 1 << 20})
	b.Image(wire.ImportProgress{Stage: "unpack", Layer: 2, Layers: 3, Bytes: 1 << 20, Total: 2 << 20})
	b.Image(wire.ImportProgress{Stage: "unpack", Layer: 2, Layers: 3, Bytes: 9, Total: 2}) // a daemon may err
	b.Count("copies", 2, 3)
	b.Clear()
	b.Clear() // nothing is left to clear
	got, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(got), "\r\x1b[K")
	if len(lines) != 6 || lines[1] != "receiving  1MiB" ||
		lines[2] != "unpacking layer 2 of 3  [===============               ] 1MiB of 2MiB  50%" ||
		!strings.HasSuffix(lines[3], "100%") || lines[4] != "copies  [====================          ] 2 of 3" ||
		lines[5] != "" {
		t.Errorf("%q", lines)
	}
}
