package snapshot

import (
	"testing"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// TestDiffsAtOnce: a comparison beyond the most at once is refused.
func TestDiffsAtOnce(t *testing.T) {
	s := &Store{diffs: make(chan struct{}, 1), Pool: &Pool{dir: t.TempDir()}, Mounts: &Mounts{}}
	none := func(string, string) error { return nil }
	s.diffs <- struct{}{}
	if err := s.Diff(t.Context(), "daaaaaaaaaaa", "", nil, nil, none); !errs.Is(err, errs.Unavailable) {
		t.Errorf("beside others: %v", err)
	}
	<-s.diffs
	for range 2 { // each gives its place back
		if err := s.Diff(t.Context(), "daaaaaaaaaaa", "", nil, nil, none); !errs.Is(err, errs.WrongState) {
			t.Errorf("alone: %v", err)
		}
	}
}
