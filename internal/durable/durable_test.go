package durable

import (
	"os"
	"path/filepath"
	"testing"
)

func TestWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for _, text := range []string{"the first, which is longer", "the second"} {
		// What a power cut left of an earlier try.
		if err := os.WriteFile(path+".new", []byte("half of something that is longer than either"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Write(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != text {
			t.Errorf("%q, %v", b, err)
		}
	}
	// What cannot be written leaves what was there.
	if err := os.Mkdir(path+".new", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Write(path, []byte("the third"), 0o600); err == nil {
		t.Error("it was written over a directory")
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "the second" {
		t.Errorf("%q, %v", b, err)
	}
	if err := Write(filepath.Join(path, "below"), nil, 0o600); err == nil {
		t.Error("it was written below a file")
	}
}
