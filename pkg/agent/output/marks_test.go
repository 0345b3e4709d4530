package output

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestMarks compares with a list that has the stream of every byte.
func TestMarks(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var m Marks
	var all []byte // the stream of each byte
	var end [2]int64
	for range 300 {
		stream, n := byte(1+r.IntN(2)), r.IntN(5)
		m.Add(stream, n)
		end[stream-1] += int64(n)
		all = append(all, slices.Repeat([]byte{stream}, n)...)
		since := [2]int64{r.Int64N(end[0] + 1), r.Int64N(end[1] + 1)}
		from := r.Int64N(int64(len(all)/8 + 1))
		pieces, first := m.Since(since, from)
		var got []int
		for _, p := range pieces {
			for at := p.Off; at < p.End; at++ {
				if all[at] != p.Stream {
					t.Fatalf("byte %d is said to be of stream %d", at, p.Stream)
				}
				got = append(got, int(at))
			}
		}
		var want []int
		var seen, begin [2]int64
		begin = since
		for at, s := range all {
			if i := s - 1; seen[i] >= since[i] && int64(at) >= from {
				want = append(want, at)
			} else if int64(at) < from {
				begin[i] = max(begin[i], seen[i]+1)
			}
			seen[s-1]++
		}
		if !slices.Equal(got, want) || first != begin || m.End() != end {
			t.Fatalf("since %v, from %d: %v %v, want %v %v", since, from, got, first, want, begin)
		}
	}
}

// TestMarksForget: what is too much to remember is said to be lost, and nothing else.
func TestMarksForget(t *testing.T) {
	var m Marks
	for i := range 3 * maxRuns {
		m.Add(byte(1+i%2), 1)
	}
	pieces, first := m.Since([2]int64{}, 0)
	n := int64(len(pieces))
	if len(m.runs) > maxRuns || n < maxRuns/2 || first[0]+first[1] != 3*maxRuns-n || pieces[0].Off != first[0]+first[1] {
		t.Errorf("%d runs, %d pieces from %v on, the first is %v", len(m.runs), n, first, pieces[0])
	}
	if late, _ := m.Since([2]int64{m.End()[0] - 1, m.End()[1]}, 0); len(late) != 1 || late[0].End-late[0].Off != 1 {
		t.Errorf("the last byte of stream 1 is %v", late)
	}
}
