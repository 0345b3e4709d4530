package proc

import "testing"

func FuzzStat(f *testing.F) {
	f.Add([]byte("12 (a) b) S 1 2 3 0 0 0 0 0 0 0 5 6 7 8 0 0"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, ok := parseStat(b); ok && (s.PID <= 0 || s.Parent < 0) {
			t.Fatalf("%+v", s)
		}
	})
}
