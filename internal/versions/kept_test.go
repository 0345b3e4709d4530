package versions

import (
	"os"
	"path/filepath"
	"testing"
)

// TestPutBack: what a package manager has removed of the version that it replaces is put back, as often as it is asked,
// and that version is the current one. The link that the service's unit follows stays until the scripts end.
func TestPutBack(t *testing.T) {
	r := makeRoot(t, map[string]string{"1.0.0": "7", "1.1.0": "7"})
	kept := filepath.Join(string(r), "kept")
	write := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	replaced := func(want string) {
		t.Helper()
		if got, err := r.Replaced(); got != want || err != nil {
			t.Errorf("replaced: %q, %v; want %q", got, err, want)
		}
	}
	replaced("")
	program := r.Program("1.0.0", "sandboxd")
	write(program, "program")
	if err := os.CopyFS(filepath.Join(kept, "1.0.0"), os.DirFS(r.Dir("1.0.0"))); err != nil {
		t.Fatal(err)
	}
	replaced("") // the scripts were cut short
	write(filepath.Join(kept, "current"), "")
	replaced("") // likewise
	write(filepath.Join(kept, "current"), "1.0.0\n")
	replaced("1.0.0")
	if err := r.Point(Current, "1.1.0"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("kept/1.0.0", filepath.Join(string(r), "undo")); err != nil {
		t.Fatal(err)
	}
	for _, removed := range []string{program, filepath.Dir(program), r.Dir("1.0.0"), ""} {
		if removed != "" {
			if err := os.RemoveAll(removed); err != nil {
				t.Fatal(err)
			}
		}
		if err := r.PutBack("1.0.0"); err != nil {
			t.Errorf("without %s: %v", removed, err)
		}
		if b, err := os.ReadFile(program); string(b) != "program" {
			t.Errorf("without %s the program is %q, %v", removed, b, err)
		}
		if n, err := r.Schema("1.0.0"); n != 7 || err != nil {
			t.Errorf("without %s the schema is %d, %v", removed, n, err)
		}
		if current, err := r.Named(Current); current != "1.0.0" || err != nil {
			t.Errorf("without %s %q is current, %v", removed, current, err)
		}
	}
	if err := r.Disarm(); err != nil {
		t.Fatal(err)
	}
	if undo, err := r.Named(Undo); undo != "1.0.0" || err != nil {
		t.Errorf("undo is %q, %v", undo, err)
	}
	if err := r.Point(Current, "1.1.0"); err != nil {
		t.Fatal(err)
	}
	for _, gone := range []string{kept + "/1.0.0/bin", r.Dir("1.0.0") + "/bin"} {
		if err := os.RemoveAll(gone); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.PutBack("1.0.0"); err == nil {
		t.Error("a version without its program is put back")
	}
	if current, err := r.Named(Current); current != "1.1.0" || err != nil {
		t.Errorf("after that %q is current, %v", current, err)
	}
}
