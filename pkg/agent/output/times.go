package output

import "time"

// times remember when the bytes of a ring were written: exactly for the newest, and for
// the others the more roughly the older they are. They take 8 KiB at most.
type times struct {
	marks []mark
	began int64 // when the newest mark began
}

// A mark is for the bytes from off to the next mark.
type mark struct {
	off  int64
	last int64 // when the last of them was written, in Unix milliseconds
}

const (
	maxMarks = 512
	together = 10 // milliseconds: what comes within them is one mark
)

// note says that the bytes from off on are written now.
func (t *times) note(now time.Time, off int64) {
	ms := now.UnixMilli()
	if n := len(t.marks); n > 0 && ms-t.began < together && ms >= t.began {
		t.marks[n-1].last = ms
		return
	}
	if len(t.marks) == maxMarks {
		t.thin()
	}
	t.began = ms
	t.marks = append(t.marks, mark{off, ms})
}

// thin puts pairs of marks of the older half together.
func (t *times) thin() {
	kept := t.marks[:0]
	for i := 0; i < maxMarks/2; i += 2 {
		kept = append(kept, mark{t.marks[i].off, t.marks[i+1].last})
	}
	t.marks = append(kept, t.marks[maxMarks/2:]...)
}

// since is the first byte that may have been written at a time or later; end if there is
// none.
func (t *times) since(at time.Time, end int64) int64 {
	ms := at.UnixMilli()
	for _, m := range t.marks { // clocks are set: the times need not grow
		if m.last >= ms {
			return m.off
		}
	}
	return end
}
