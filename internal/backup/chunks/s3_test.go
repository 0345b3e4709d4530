package chunks

import (
	"bytes"
	"errors"
	"testing"

	"github.com/sandboxd/sandboxd/internal/backup/target/targettest"
)

// TestS3: packs are kept in S3-compatible storage as in a directory.
func TestS3(t *testing.T) {
	s := newStore(t)
	s.Target = targettest.S3(t).Target
	data := content(20, 3<<20)
	c, ids, _ := save(t, s, data)
	if got, err := readAll(t, s, c, ids[0]); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("%d bytes come back, %v", len(got), err)
	}
	if _, _, stats := save(t, s, data); stats.NewChunks > 0 {
		t.Errorf("%+v", stats)
	}
	must(t, s.Target.Remove(t.Context(), c.Packs[0].Name))
	if _, err := readAll(t, s, c, ids[0]); !errors.Is(err, ErrBad) {
		t.Errorf("without a pack: %v", err)
	}
	if lost, err := c.Lost(t.Context(), s.Target); err != nil || len(lost) != 1 || lost[0] != c.Packs[0].Name {
		t.Errorf("%q, %v", lost, err)
	}
	if _, _, stats := save(t, s, data); stats.Lost != 1 || stats.NewChunks == 0 {
		t.Errorf("%+v", stats)
	}
	n, _, err := Prune(t.Context(), s.Target, s.Whose, func() (func(string) bool, error) {
		return func(string) bool { return false }, nil
	})
	if there, perr := packsOf(t.Context(), s.Target, s.Whose.OwnsPacks); err != nil || perr != nil || n == 0 || len(there) > 0 {
		t.Errorf("%d are removed, %v are left, %v, %v", n, there, err, perr)
	}
}
