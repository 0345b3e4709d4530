package proc

import "testing"

// TestStat: a process may have any name; none is taken for the fields behind it.
func TestStat(t *testing.T) {
	for _, name := range []string{"a", "", ")", "a) S 1 7 7", "(", ") R 9 9 9 (", "\n12 (x) S 1", "a b"} {
		s, ok := parseStat([]byte("12 (" + name + ") S 34 5 6 0 0 0 0 0 0 0 5 6 7 8 0 0"))
		if !ok || s.PID != 12 || s.Parent != 34 {
			t.Errorf("%q: %+v, %v", name, s, ok)
		}
	}
	for _, bad := range []string{"", "12", "12 (a)", "12 (a) S", "x (a) S 1 2 3", "12 (a) S x 2 3"} {
		if s, ok := parseStat([]byte(bad)); ok {
			t.Errorf("%q: %+v", bad, s)
		}
	}
}
