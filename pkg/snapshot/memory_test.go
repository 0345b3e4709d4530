package snapshot

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/plain"
)

// TestMemoryImage: an image is known to be whole by its files, and goes with its snapshot.
func TestMemoryImage(t *testing.T) {
	const snap = "snap-saaaaaaaaaaa"
	ctx, p := t.Context(), &Pool{dir: t.TempDir(), driver: plain.New(""), trash: make(chan struct{}, 1), bg: new(sync.WaitGroup)}
	if err := p.prepare(); err != nil {
		t.Fatal(err)
	}
	s := &Snapshots{pool: p}
	dir, err := s.MakeMemory(ctx, snap)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := s.MakeMemory(ctx, snap); err == nil {
		t.Errorf("made twice: %s", again)
	}
	if same, err := s.MemoryDir(snap); err != nil || same != dir || filepath.Dir(dir) != filepath.Join(p.dir, pool.MemoryDir) {
		t.Errorf("%s and %s, %v", dir, same, err)
	}
	for _, d := range []string{dir, filepath.Dir(dir)} { // what guests have in memory is for root alone
		if info, err := os.Stat(d); err != nil {
			t.Error(err)
		} else if info.Mode() != fs.ModeDir|0o700 {
			t.Errorf("%s: %v", d, info.Mode())
		}
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("pages.img", "123456789")
	write("checkpoint.img", "")
	files, err := s.FinishMemory(ctx, snap)
	if err != nil || len(files) != 2 || files[0].Name != "checkpoint.img" || files[0].Bytes != 0 || files[1].Bytes != 9 ||
		files[1].Sum != 0xe3069283 { // the check value of CRC-32C
		t.Fatalf("%+v, %v", files, err)
	}
	if err := s.CheckMemory(ctx, snap, files); err != nil {
		t.Error(err)
	}
	for name, damage := range map[string]func(){
		"another byte": func() { write("pages.img", "123456788") },
		"truncated":    func() { write("pages.img", "12345678") },
		"longer":       func() { write("pages.img", "1234567890") },
		"another file": func() { write("more.img", "") },
		"missing file": func() { os.Remove(filepath.Join(dir, "checkpoint.img")) },
	} {
		damage()
		if err := s.CheckMemory(ctx, snap, files); !errs.Is(err, errs.Internal) {
			t.Errorf("%s: %v", name, err)
		}
		os.Remove(filepath.Join(dir, "more.img"))
		write("pages.img", "123456789")
		write("checkpoint.img", "")
	}
	if err := s.CheckMemory(ctx, snap, nil); !errs.Is(err, errs.Internal) {
		t.Errorf("a record without files: %v", err)
	}
	if ids, err := s.ListSnapshots(ctx); err != nil || !slices.Equal(ids, []string{snap}) {
		t.Errorf("snapshots %v, %v", ids, err)
	}
	if err := s.DeleteSnapshot(ctx, snap); err != nil {
		t.Error(err)
	}
	if ids, err := s.ListSnapshots(ctx); err != nil || len(ids) > 0 {
		t.Errorf("snapshots %v, %v", ids, err)
	}
	if err := s.CheckMemory(ctx, snap, files); !errs.Is(err, errs.Internal) {
		t.Errorf("deleted: %v", err)
	}
	for _, bad := range []string{"", "snap-../x", "saaaaaaaaaaaa", "../aaaaaaaaa"} {
		if _, err := s.MakeMemory(ctx, bad); err == nil {
			t.Errorf("made for %q", bad)
		}
	}
}
