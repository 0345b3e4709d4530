package output

import (
	"bytes"
	"math/rand/v2"
	"os"
	"testing"
)

// all reads a ring from off in pieces.
func (r *Ring) all(off int64) []byte {
	var out []byte
	b := make([]byte, 10_007)
	for {
		n, at := r.ReadAt(b, off)
		if n == 0 {
			return out
		}
		out = append(out, b[:n]...)
		off = at + int64(n)
	}
}

// TestRing compares rings in all places with the tail of what was written.
func TestRing(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for name, c := range map[string]struct {
		limit, each, kept int64
		total             int
		dir               bool
	}{
		"memory":              {1 << 30, OfCommand, 40_000, 40_000, true},
		"file":                {1 << 30, OfCommand, 3_000_000, 3_000_000, true},
		"wrapped file":        {1 << 30, OfCommand, OfCommand, 20_000_000, true},
		"no budget at all":    {1000, OfCommand, InMemory, 1_000_000, true},
		"small budget":        {600 << 10, OfCommand, 512 << 10, 3_000_000, true},
		"least":               {1 << 30, 64 << 10, 64 << 10, 1_000_000, true},
		"odd":                 {1 << 30, 300_000, 300_000, 1_000_000, true},
		"no directory":        {1 << 30, OfCommand, InMemory, 1_000_000, false},
		"no directory, short": {1 << 30, OfCommand, 30_000, 30_000, false},
	} {
		dir := t.TempDir()
		if !c.dir {
			dir += "/nope"
		}
		books := &Books{dir: dir, limit: c.limit, each: c.each, pressed: func() {}}
		r := books.NewRing("x")
		var want []byte
		for len(want) < c.total {
			b := make([]byte, min(1+rnd.IntN(64<<10), c.total-len(want)))
			for i := range b {
				b[i] = byte(len(want) + i*i) // no period that a ring's size divides
			}
			r.Write(b) //nolint:errcheck // never fails
			want = append(want, b...)
		}
		from, end := r.Range()
		if end != int64(c.total) || end-from != c.kept {
			t.Errorf("%s: keeps %d to %d, want the last %d", name, from, end, c.kept)
		}
		if got := r.all(0); !bytes.Equal(got, want[from:]) {
			t.Errorf("%s: content differs", name)
		}
		if got := r.Tail(8 << 10); !bytes.Equal(got, want[len(want)-len(got):]) || len(got) != 8<<10 {
			t.Errorf("%s: tail of %d bytes differs", name, len(got))
		}
		r.Settle(true)
		if got := r.all(0); c.dir && !bytes.Equal(got, want[from:]) {
			t.Errorf("%s: content differs after it was settled", name)
		}
		r.Drop()
		r.Drop()
		r.Write([]byte("late")) //nolint:errcheck // never fails
		if f, e := r.Range(); f != e || len(r.all(0)) != 0 || books.inFile != 0 {
			t.Errorf("%s: dropped, but %d to %d, %d reserved", name, f, e, books.inFile)
		}
		if left, _ := os.ReadDir(dir); len(left) != 0 {
			t.Errorf("%s: left %v", name, left)
		}
	}
}

// TestRingWithoutDisk: where the disk takes no more the newest output is kept in
// memory, and nothing fails.
func TestRingWithoutDisk(t *testing.T) {
	for name, wrapped := range map[string]int{"before it wraps": 100_000, "after it wrapped": 800_000} {
		r := &Ring{books: &Books{dir: t.TempDir(), limit: 1 << 30, pressed: func() {}}, each: 300_000, name: "x"}
		var want []byte
		write := func(n int) {
			b := make([]byte, n)
			for i := range b {
				b[i] = byte((len(want) + i) >> 3)
			}
			r.Write(b) //nolint:errcheck // never fails
			want = append(want, b...)
		}
		for len(want) < wrapped {
			write(10_007)
		}
		same, err := os.Open(r.file.Name()) // which can be read, and not written any more
		if err != nil {
			t.Fatal(err)
		}
		r.file.Close()
		r.file = same
		for _, n := range []int{1, 10_007, 100_000, 70_001} {
			write(n)
			from, end := r.Range()
			if end != int64(len(want)) || end-from < InMemory {
				t.Errorf("%s: keeps %d to %d of %d", name, from, end, len(want))
			}
			if !bytes.Equal(r.all(0), want[from:]) {
				t.Errorf("%s: content differs", name)
			}
		}
		if left, _ := os.ReadDir(r.books.dir); len(left) > 0 || r.books.inFile != 0 {
			t.Errorf("%s: left %v, %d reserved", name, left, r.books.inFile)
		}
	}
}
