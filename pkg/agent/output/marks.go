package output

// maxRuns bounds how often Marks remember that output went from one stream to the other:
// four bytes each.
const maxRuns = 8 << 10

// Marks remember which bytes of a ring came from which of two streams, 1 and 2, and
// number the bytes of each stream. The zero value is of an empty ring.
type Marks struct {
	runs   []uint32 // how many bytes of stream 1, then of stream 2, then of stream 1, …
	before [2]int64 // bytes of each stream before runs: their order is forgotten
	end    [2]int64 // bytes of each stream ever
}

// A Piece is output of one stream: the bytes of the ring between two numbers.
type Piece struct {
	Stream   byte
	Off, End int64
}

// Add notes that the next n bytes of the ring are of a stream.
func (m *Marks) Add(stream byte, n int) {
	i := int(stream - 1)
	m.end[i] += int64(n)
	for n > 0 {
		for len(m.runs) == 0 || (len(m.runs)-1)%2 != i {
			m.runs = append(m.runs, 0)
		}
		last := &m.runs[len(m.runs)-1]
		fits := int(min(uint64(n), uint64(^uint32(0)-*last)))
		*last += uint32(fits)
		if n -= fits; n > 0 {
			m.runs = append(m.runs, 0) // of the other stream
		}
	}
	if len(m.runs) <= maxRuns {
		return
	}
	const half = maxRuns / 2 // even: the first run is of stream 1 as before
	for j, n := range m.runs[:half] {
		m.before[j%2] += int64(n)
	}
	m.runs = append(m.runs[:0], m.runs[half:]...)
}

// Forget frees the memory of m: the order of all output so far is forgotten.
func (m *Marks) Forget() { m.before, m.runs = m.end, nil }

// End returns the numbers of the next byte of each stream.
func (m *Marks) End() [2]int64 { return m.end }

// Since returns the output from a byte of each stream on, in order. from is the oldest
// byte that the ring has. first are the bytes of the streams that the pieces begin with:
// they are later than since if output is lost.
func (m *Marks) Since(since [2]int64, from int64) (pieces []Piece, first [2]int64) {
	pos, at := m.before[0]+m.before[1], m.before
	first = [2]int64{max(since[0], at[0]), max(since[1], at[1])}
	for j, run := range m.runs {
		i, n := j%2, int64(run)
		skip := min(n, max(0, first[i]-at[i]))
		if lost := min(n, max(0, from-pos)); lost > skip {
			skip, first[i] = lost, at[i]+lost
		}
		if skip < n {
			pieces = append(pieces, Piece{byte(i + 1), pos + skip, pos + n})
		}
		pos, at[i] = pos+n, at[i]+n
	}
	return pieces, first
}
