// Package output keeps what commands print.
//
//	pipe ─ Pump ─▶ Ring ─ ReadAt, Copy, Follow
//	                └─ a file, as far as Books has room
//
// The surprise: nothing is lost silently, and nothing fails. A byte is in the file before
// its client has it, so what the agent has printed outlives a SIGKILL. A ring that gets no more
// room forgets its oldest output, and Ring.Range returns the number of the oldest byte
// that is left.
package output

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// Limits of kept output, in bytes.
const (
	InMemory  = 64 << 10  // of one ring; the rest goes to its file
	OfCommand = 16 << 20  // ring of one command, by default
	OfAll     = 256 << 20 // files of all commands together, by default
	step      = 256 << 10 // by which a file's share grows
	block     = 4 << 10   // by which that of a short output grows
)

// A Ring keeps the last output of one command, addressed by the number of the byte
// since the start. All of it is written to a file (agent.OpenOutput reads it), because the
// agent may be killed at any moment. A short output is in memory, too. The file wraps at
// the limit of one command, or earlier where the sandbox's share or the disk is used up.
// Without a file, memory wraps. Nothing is lost silently: from is the oldest byte kept.
type Ring struct {
	Small bool // never goes to a file: what does not fit into memory is forgotten

	books *Books
	name  string
	each  int64 // bytes of its file at most

	mu       sync.Mutex
	mem      []byte
	file     *os.File
	stored   bool  // there is a file, open or not
	apart    bool  // it could not be written, and mem is all there is
	reserved int64 // of books
	end      int64 // bytes written ever
	from     int64 // oldest byte kept
	size     int64 // the ring wraps here; 0: not decided yet, so nothing has wrapped
	dropped  bool
	times    times
	grown    chan struct{} // closed by the next Write; nil while nobody waits for one
}

// Write appends b. It never fails: what cannot be kept is forgotten.
func (r *Ring) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.grown != nil {
		close(r.grown)
		r.grown = nil
	}
	if r.dropped {
		r.end += int64(len(b))
		r.from = r.end
		return len(b), nil
	}
	r.times.note(time.Now(), r.end)
	if r.short() {
		if len(r.mem)+len(b) <= InMemory {
			r.mem = append(r.mem, b...)
			r.end += int64(len(b))
			r.through(len(b))
			return len(b), nil
		}
		if r.Small {
			r.wrapInMemory()
		} else {
			r.spill()
		}
	}
	for rest := b; len(rest) > 0; {
		rest = rest[r.put(rest):]
	}
	return len(b), nil
}

// short reports whether all output so far is in memory.
func (r *Ring) short() bool { return r.size == 0 && (r.mem != nil || r.end == 0) }

// through writes the last n bytes of a short output to the file.
func (r *Ring) through(n int) {
	if r.Small || r.apart {
		return
	}
	if !r.store(min((r.end+block-1)/block*block, r.each), n) {
		r.abandon()
	}
}

// store sees to it that the file exists, has share bytes reserved and holds all of mem,
// whose last n bytes are new.
func (r *Ring) store(share int64, n int) bool {
	if share < r.end {
		return false
	}
	if share > r.reserved {
		if !r.books.reserve(share - r.reserved) {
			return false
		}
		r.reserved = share
	}
	if !r.stored {
		n = len(r.mem)
	}
	return r.open() && r.writeAt(r.mem[len(r.mem)-n:], int64(len(r.mem)-n)) == nil
}

// open opens the file, or makes it.
func (r *Ring) open() bool {
	if r.file != nil {
		return true
	}
	flags := os.O_RDWR
	if !r.stored {
		flags |= os.O_CREATE | os.O_TRUNC
	}
	proc.BriefTurns.Do(func() {
		if f, err := os.OpenFile(r.path(), flags, 0o600); err == nil {
			r.file, r.stored = f, true
		}
	})
	return r.file != nil
}

func (r *Ring) path() string { return filepath.Join(r.books.dir, r.name) }

// abandon gives the file up: a short output, or the rest of a long one, is in memory.
func (r *Ring) abandon() {
	r.apart = true
	r.removeFile()
	r.books.release(r.reserved)
	r.reserved = 0
}

// spill frees the memory of a short output, which is in the file. If there is no room for
// one, the ring stays in memory, as large as InMemory allows.
func (r *Ring) spill() {
	if !r.store(max(min(step, r.each), r.reserved), 0) && !r.store(max(r.end, r.reserved), 0) {
		r.abandon()
		r.wrapInMemory()
		return
	}
	r.mem, r.apart = nil, false
}

func (r *Ring) wrapInMemory() {
	r.size = InMemory
	r.mem = slices.Grow(r.mem, InMemory-len(r.mem))[:InMemory]
}

// put stores a part of b in one piece and returns its length; 0 asks to be
// called again, at most twice.
func (r *Ring) put(b []byte) int {
	if r.size == 0 && r.end+int64(len(b)) > r.reserved {
		r.grow(int64(len(b)))
	}
	pos, room := r.end, int64(len(b))
	if r.size > 0 {
		pos = r.end % r.size
		room = r.size - pos
	}
	b = b[:min(int64(len(b)), room)]
	if r.mem == nil && r.size > 0 {
		b = b[:min(int64(len(b)), agent.Gap(r.size))]
	}
	if r.mem != nil {
		copy(r.mem[pos:], b)
	} else if err := r.writeRing(b, pos); err != nil {
		if r.size == 0 && r.end > 0 { // the disk is full: what is there becomes the ring
			r.size = r.end
			r.cut()
			return 0
		}
		r.retreat() // on btrfs not even an existing block can be overwritten
		return 0
	}
	r.end += int64(len(b))
	if r.size > 0 {
		r.from = max(r.from, r.end-r.size)
	}
	return len(b)
}

// writeRing writes a piece of a long output, and then where a ring ends.
func (r *Ring) writeRing(b []byte, pos int64) (err error) {
	if !r.open() {
		return fs.ErrNotExist
	}
	proc.BriefTurns.Do(func() {
		end := r.end + int64(len(b))
		if _, err = r.file.WriteAt(b, pos); err == nil && r.size > 0 && end >= r.size {
			_, err = r.file.WriteAt(agent.Wrap(end), r.size)
		}
	})
	return err
}

// cut removes from the file what a write that failed has left behind the ring.
func (r *Ring) cut() {
	if r.file != nil {
		proc.BriefTurns.Do(func() { r.file.Truncate(r.size) }) //nolint:errcheck // the next write tells
	}
}

func (r *Ring) writeAt(b []byte, pos int64) (err error) {
	proc.BriefTurns.Do(func() { _, err = r.file.WriteAt(b, pos) })
	return err
}

func (r *Ring) readAt(b []byte, pos int64) (n int, err error) {
	proc.BriefTurns.Do(func() { n, err = r.file.ReadAt(b, pos) })
	return n, err
}

func (r *Ring) removeFile() {
	proc.BriefTurns.Do(func() {
		if r.file != nil {
			r.file.Close()
		}
		if r.stored {
			os.Remove(r.path()) //nolint:errcheck // absent is what is wanted
		}
	})
	r.file, r.stored = nil, false
}

// retreat moves the newest output from a file that cannot be written any more into
// memory. The ring is in memory from then on.
func (r *Ring) retreat() {
	mem, keep := make([]byte, InMemory), r.end-r.from
	keep = min(keep, InMemory)
	for off := r.end - keep; off < r.end; {
		at, to := off, off%InMemory
		if r.size > 0 {
			at = off % r.size
		}
		n := min(r.end-off, InMemory-to)
		if r.size > 0 {
			n = min(n, r.size-at)
		}
		if r.file == nil {
			keep = 0
			break
		}
		if _, err := r.readAt(mem[to:to+n], at); err != nil {
			keep = 0 // the file cannot be read either
			break
		}
		off += n
	}
	r.abandon()
	r.mem, r.size, r.from = mem, InMemory, r.end-keep
}

// grow raises the file's share so that n more bytes fit, or decides where it wraps.
func (r *Ring) grow(n int64) {
	want := min((r.end+n+step-1)/step*step, r.each)
	if want > r.reserved && r.books.reserve(want-r.reserved) {
		r.reserved = want
	}
	if r.end+n > r.reserved {
		r.size = r.reserved
	}
}

// drop forgets everything and frees it. The caller holds mu.
func (r *Ring) drop() {
	r.dropped, r.mem, r.from, r.times = true, nil, r.end, times{}
	r.abandon()
}

// Drop forgets everything and frees it.
func (r *Ring) Drop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.dropped {
		r.drop()
	}
}

// Settle frees what a finished output does not need any more; with toFile its memory
// too. It returns how many bytes of memory remain.
func (r *Ring) Settle(toFile bool) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if toFile && r.short() && !r.dropped && len(r.mem) > 0 {
		if r.spill(); r.file == nil {
			r.drop() // no room for it anywhere: the oldest goes
		}
	}
	if r.short() && r.file != nil { // a thousand finished commands do not hold a thousand descriptors
		proc.BriefTurns.Do(func() { r.file.Close() })
		r.file = nil
	}
	r.mem = slices.Clip(r.mem)
	if cap(r.mem)-len(r.mem) > 1<<10 {
		r.mem = slices.Clone(r.mem)
	}
	return int64(len(r.mem))
}

// Range returns the numbers of the oldest byte kept and of the next to come.
func (r *Ring) Range() (from, end int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.from, r.end
}

// Since returns the number of the first byte that may have been written at a time or
// later: the newer the output, the more exactly. There is none if it is the next to come.
func (r *Ring) Since(at time.Time) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return max(r.times.since(at, r.end), r.from)
}

// ForgetTimes keeps of the times of the output only the last one, for all of it.
func (r *Ring) ForgetTimes() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.times.marks); n > 0 {
		r.times.marks = []mark{{r.times.marks[0].off, r.times.marks[n-1].last}}
	}
}

// Times returns when the bytes that are kept were written.
func (r *Ring) Times() agent.OutputTimes {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := agent.OutputTimes{End: r.end, Marks: make([][2]int64, len(r.times.marks))}
	for i, m := range r.times.marks {
		t.Marks[i] = [2]int64{m.off, m.last}
	}
	return t
}

// Grown returns a channel that the next Write closes. Call Grown before a read, so that
// no Write is missed.
func (r *Ring) Grown() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.grown == nil {
		r.grown = make(chan struct{})
	}
	return r.grown
}

// Limit returns how many bytes r keeps at most: fewer where there is no room.
func (r *Ring) Limit() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.size > 0 {
		return r.size
	}
	return r.each
}

// InFile returns the bytes of file reserved for r.
func (r *Ring) InFile() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reserved
}

// ReadAt copies output from byte number off into b and returns how much, and
// the number of the byte it begins with, which is later than off if the ring
// has moved on.
func (r *Ring) ReadAt(b []byte, off int64) (n int, at int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at = max(off, r.from)
	if at >= r.end || r.dropped {
		return 0, r.end
	}
	pos, room := at, r.end-at
	if r.size > 0 {
		pos = at % r.size
		room = min(room, r.size-pos)
	}
	b = b[:min(int64(len(b)), room)]
	if r.mem != nil {
		return copy(b, r.mem[pos:]), at
	}
	n, _ = r.readAt(b, pos)
	return n, at
}

// Tail returns the last n bytes, or what is left of them.
func (r *Ring) Tail(n int) []byte {
	_, end := r.Range()
	off := max(end-int64(n), 0)
	var out []byte
	b := make([]byte, n)
	for off < end && len(out) < n {
		m, at := r.ReadAt(b[:n-len(out)], off)
		if m == 0 {
			break
		}
		out = append(out, b[:m]...)
		off = at + int64(m)
	}
	return out
}
