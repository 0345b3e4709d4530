package proc

import "testing"

// TestStat: a process may have any name; none is taken for the fields behind it.
func TestStat(t *testing.T) {
	for _, name := range []string{"a", "", ")", "a) S 1 7 7", "(", ") R 9 9 9 (", "\n12 (x) S 1", "a b"} {
		s, ok := parseStat([]byte("12 (" + name + ") S 34 5 6 0 0 0 0 0 0 0 1 2 3 4 0 0 9"))
		if !ok || s.State != 'S' || s.Tasks != 9 || s.PID != 12 || s.Parent != 34 || s.Group != 5 || s.Session != 6 || s.ticks != 10 {
			t.Errorf("%q: %+v, %v", name, s, ok)
		}
	}
	for _, bad := range []string{"", "12", "12 (a)", "12 (a) S", "x (a) S 1 2 3 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0"} {
		if s, ok := parseStat([]byte(bad)); ok {
			t.Errorf("%q: %+v", bad, s)
		}
	}
}
