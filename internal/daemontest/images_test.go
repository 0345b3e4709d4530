package daemontest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// What was kept is opened as long as it is what was written, and as nothing else.
func TestKeep(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image.tar")
	if _, err := openWhole(path); err == nil {
		t.Error("a file that is not there was opened")
	}
	write := func(w io.Writer) error { _, err := fmt.Fprint(w, "a whole image"); return err }
	if err := keep(path, write); err != nil {
		t.Fatal(err)
	}
	f, err := openWhole(path)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(f); err != nil || string(b) != "a whole image" {
		t.Errorf("it holds %q, %v", b, err)
	}
	f.Close()

	for name, damage := range map[string]func() error{
		"cut short":    func() error { return os.Truncate(path, 5) },
		"changed":      func() error { return os.WriteFile(path, []byte("b whole image"), 0o600) },
		"no digest":    func() error { return os.Remove(path + ".sha256") },
		"empty":        func() error { return os.Truncate(path, 0) },
		"not a digest": func() error { return os.WriteFile(path+".sha256", nil, 0o600) },
	} {
		if err := keep(path, write); err != nil {
			t.Fatal(err)
		}
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if _, err := openWhole(path); err == nil {
			t.Errorf("%s: it was opened", name)
		}
	}
	gone := errors.New("the export broke off")
	if err := keep(path, func(w io.Writer) error { fmt.Fprint(w, "half"); return gone }); !errors.Is(err, gone) {
		t.Errorf("a write that failed: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".new-*")); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}
