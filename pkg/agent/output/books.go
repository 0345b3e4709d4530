package output

import "sync"

// Books bound how much the files of all rings of a sandbox hold together.
type Books struct {
	dir     string
	pressed func()

	mu     sync.Mutex
	limit  int64 // bytes of files, together
	each   int64 // bytes of one file
	inFile int64 // reserved
}

// NewBooks keeps the files of rings in dir: at most limit bytes together, and each of one
// ring. It calls pressed when less than a fourth of limit is left. That must not wait,
// since the caller holds a ring.
func NewBooks(dir string, limit, each int64, pressed func()) *Books {
	return &Books{dir: dir, limit: limit, each: each, pressed: pressed}
}

// NewRing makes a ring whose file is called name.
func (b *Books) NewRing(name string) *Ring {
	b.mu.Lock()
	defer b.mu.Unlock()
	return &Ring{books: b, name: name, each: b.each}
}

// SetLimits changes the limits. Rings that exist keep their own.
func (b *Books) SetLimits(limit, each int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.limit, b.each = limit, each
}

// InFile returns the bytes of file that are reserved for all rings.
func (b *Books) InFile() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.inFile
}

// reserve asks for n more bytes of file.
func (b *Books) reserve(n int64) bool {
	b.mu.Lock()
	fits := b.inFile+n <= b.limit
	if fits {
		b.inFile += n
	}
	b.mu.Unlock()
	if !fits || b.Tight() {
		b.pressed()
	}
	return fits
}

// Tight reports whether less than a fourth of the limit is left.
func (b *Books) Tight() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.inFile > b.limit/4*3
}

func (b *Books) release(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.inFile -= n
}
