package output

import (
	"testing"
	"time"
)

func TestSince(t *testing.T) {
	books := &Books{dir: t.TempDir(), limit: 1 << 30, each: OfCommand, pressed: func() {}}
	r := books.NewRing("x")
	before := time.Now()
	if got := r.Since(before); got != 0 {
		t.Errorf("of an empty ring: %d", got)
	}
	r.Write([]byte("old\n")) //nolint:errcheck // never fails
	if got := r.Since(before); got != 0 {
		t.Errorf("what was just written begins at %d", got)
	}
	if got := r.Since(time.Now().Add(time.Hour)); got != 4 {
		t.Errorf("of the future: %d, want the end", got)
	}
	r.Drop()
	r.Write([]byte("lost\n")) //nolint:errcheck // never fails
	if got, _ := r.Range(); r.Since(before) != got {
		t.Errorf("of a dropped ring: %d", r.Since(before))
	}
}

// TestTimes: after a day of output in any rhythm, the newest is found to the millisecond,
// and the older the more roughly, never too late.
func TestTimes(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for name, step := range map[string]time.Duration{"slow": time.Minute, "steady": time.Second, "fast": 20 * time.Millisecond} {
		var m times
		n := int64(0)
		now := start
		for ; now.Before(start.Add(24*time.Hour)) && n < 200_000; now = now.Add(step) {
			m.note(now, n)
			n++
		}
		if len(m.marks) > maxMarks || cap(m.marks) > 2*maxMarks {
			t.Errorf("%s: %d marks", name, len(m.marks))
		}
		for _, back := range []int64{1, 10, 200, 1000, n - 1} {
			at := now.Add(-time.Duration(back) * step)
			got, want := m.since(at, n), max(0, n-back)
			if got > want || want-got > max(0, back-maxMarks/2+1) {
				t.Errorf("%s, %d steps back: %d, want %d", name, back, got, want)
			}
		}
		if got := m.since(now, n); got != n {
			t.Errorf("%s: after the last: %d, want %d", name, got, n)
		}
	}
	var m times
	m.note(start, 0)
	m.note(start.Add(3*time.Millisecond), 10) // together with what came before
	m.note(start.Add(time.Hour), 20)
	for after, want := range map[time.Duration]int64{
		0: 0, 3 * time.Millisecond: 0, 4 * time.Millisecond: 20, time.Hour: 20, 2 * time.Hour: 30,
	} {
		if got := m.since(start.Add(after), 30); got != want {
			t.Errorf("%s: %d, want %d", after, got, want)
		}
	}
	m.note(start.Add(-time.Hour), 30) // the clock was set back
	if got := m.since(start.Add(30*time.Minute), 40); got != 20 {
		t.Errorf("after the clock was set back: %d", got)
	}
}
