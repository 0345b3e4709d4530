package layer

import (
	"bytes"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzReports: a child that was taken over may report anything. The daemon marks
// directories of the layer only, and believes no number of bytes beyond the bound.
func FuzzReports(f *testing.F) {
	f.Add([]byte("{\"opaque\":\"ZA==\"}\n{\"done\":true,\"bytes\":5}\n"))            // d
	f.Add([]byte("{\"opaque\":\"Li4=\"}\n{\"opaque\":\"bA==\"}\n{\"done\":true}\n")) // .. and l
	f.Add([]byte("{\"opaque\":\"L2V0Yw==\"}\n{\"done\":true,\"bytes\":-1}\n"))       // /etc
	f.Fuzz(func(t *testing.T, b []byte) {
		into, victim := outside(t)
		if err := unix.Mkdir(filepath.Join(into, "d"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Symlink("..", filepath.Join(into, "l")); err != nil {
			t.Fatal(err)
		}
		n, err := followReports(into, bytes.NewReader(b))
		if err == nil && (n < 0 || n > layerLimits.Bytes) {
			t.Fatalf("%q: %d bytes", b, n)
		}
		for _, path := range []string{filepath.Dir(into), victim} {
			if _, err := unix.Lgetxattr(path, opaqueAttr, nil); err == nil {
				t.Fatalf("%q marks %s", b, path)
			}
		}
	})
}
