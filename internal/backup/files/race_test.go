package files

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup/chunks"
)

// TestRace: while a guest turns directories and files into links that lead out, and back, nothing of
// outside is saved, no save fails, and each restores.
func TestRace(t *testing.T) {
	outside, dir := t.TempDir(), t.TempDir()
	secret := []byte(strings.Repeat("secret of the host ", 100))
	must(t, os.WriteFile(filepath.Join(outside, "f"), secret, 0o644))
	at := func(i int, p string) string { return filepath.Join(dir, fmt.Sprintf("d%d%s", i, p)) }
	const n = 20
	for i := range n {
		must(t, os.MkdirAll(at(i, ".real"), 0o755), os.WriteFile(at(i, ".real/f"), []byte("of the guest"), 0o644),
			os.Symlink(outside, at(i, ".link")), os.Symlink(filepath.Join(outside, "f"), at(i, ".file")),
			unix.Mkfifo(at(i, ".pipe"), 0o600),
			os.WriteFile(at(i, ".reg"), []byte("regular"), 0o644))
	}
	stop, done := make(chan struct{}), make(chan int)
	go func() {
		swaps := 0
		for {
			for i := range n {
				for _, pair := range [][2]string{{".real", ".link"}, {".reg", ".file"}, {".reg", ".pipe"}} {
					//nolint:errcheck // both names are always there
					unix.Renameat2(unix.AT_FDCWD, at(i, pair[0]), unix.AT_FDCWD, at(i, pair[1]), unix.RENAME_EXCHANGE)
					swaps++
				}
				os.RemoveAll(at(i, ".dir"))                          //nolint:errcheck // somebody may read it
				os.MkdirAll(at(i, ".dir/a/b"), 0o755)                //nolint:errcheck // likewise
				os.Remove(at(i, ".gone"))                            //nolint:errcheck // it may be gone
				os.WriteFile(at(i, ".gone"), []byte("short"), 0o644) //nolint:errcheck // likewise
			}
			select {
			case <-stop:
				done <- swaps
				return
			default:
			}
		}
	}()
	s := newStore(t)
	saves, until := 0, time.Now().Add(time.Second)
	for ; time.Now().Before(until) || saves < 5; saves++ {
		session, err := s.Begin(t.Context())
		must(t, err)
		session.BeginTree()
		tree, err := Save(t.Context(), session, dir, t.TempDir())
		must(t, err)
		c, err := session.Finish(t.Context(), t.TempDir())
		must(t, err, session.Close())
		r, err := chunks.NewReader(t.Context(), s.Target, c, plain)
		must(t, err)
		to := t.TempDir()
		must(t, Restore(t.Context(), r, tree, to, nil))
		must(t, filepath.WalkDir(to, func(p string, d os.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			b, err := os.ReadFile(p)
			if bytes.Contains(b, secret[:20]) {
				t.Errorf("%s has the secret of the host", p)
			}
			return err
		}))
		all, err := io.ReadAll(r.Stream(t.Context(), tree.Stream))
		if err != nil || len(all) == 0 {
			t.Errorf("%d bytes, %v", len(all), err)
		}
		r.Close()
	}
	close(stop)
	if swaps := <-done; swaps < 100 {
		t.Errorf("only %d swaps in %d saves", swaps, saves)
	}
}
