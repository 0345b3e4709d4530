//go:build all

package carry

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// TestCarry: the daemon has the image after Install, and both ways take some time.
func TestCarry(t *testing.T) {
	d := daemontest.New(t)
	daemontest.Image(t, d, "base")
	c, err := client.New("unix://"+d.Socket, "")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "images"), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(dir, "images/base.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := c.Images().Export(t.Context(), "base", f); err != nil {
		t.Fatal(err)
	}
	t.Chdir("../../..") // where the packager finds licences and units
	load, err := Pack(t.Context(), dir, daemontest.Bin(""), "build/tools/packages", d.Socket)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := load.Bytes(); err != nil || n < 1<<20 {
		t.Errorf("the bundle has %d bytes, %v", n, err)
	}
	if _, err := c.Images().Remove(t.Context(), "base"); err != nil {
		t.Fatal(err)
	}
	took, err := load.Install(t.Context())
	if err != nil || took <= 0 {
		t.Fatalf("it took %v s, %v", took, err)
	}
	t.Logf("installed in %.2f s", took)
	if _, err := c.Images().Inspect(t.Context(), "base"); err != nil {
		t.Error(err)
	}
	took, err = load.Unpack(t.Context())
	if err != nil || took <= 0 {
		t.Errorf("it took %v s, %v", took, err)
	}
	t.Logf("unpacked in %.2f s", took)
	if left, err := os.ReadDir(dir); err != nil || len(left) != 7 {
		t.Errorf("left %v, %v", left, err)
	}
}
