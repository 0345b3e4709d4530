// Package pressure is the ladder that the daemon climbs as a disk fills: for the pool and for the
// disk of the state directory, each by itself.
//
//	rung      from            what the daemon does, beside what the rungs below do
//	calm
//	collect   a tenth free    removes what would go anyway, the earliest first
//	refuse    the reserve     refuses creates and starts; snapshots (pool); pulls, imports, builds (state)
//	rest      its quarter     pauses sandboxes that nobody uses, if they have an idle policy
//	failed    no write works  refuses like refuse, and does nothing else
//
// Rung and Marks decide, without I/O. Ladder looks, tells of each change, and does what the rungs
// say, by the functions it was given. Collector is what it collects, and Snapshots and Images are
// what refuses.
//
// What surprises: nothing that somebody made is removed to make room, and no sandbox is stopped. A
// sandbox that runs may fill a disk to the last byte, and then its writes fail. What must not break
// then does not: the store keeps room of its own, and a pool in a file has all its blocks.
package pressure

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A Rung is how far a disk has filled.
type Rung int

// The rungs.
const (
	Calm Rung = iota
	Collect
	Refuse
	Rest
	Failed // however much is free: the file system takes no writes
)

// String is the name of the rung, as events have it.
func (r Rung) String() string { return [...]string{"calm", "collect", "refuse", "rest", "failed"}[r] }

// The names of spaces.
const (
	Pool  = "pool"
	State = "state"
)

// A Space is a file system that fills.
type Space struct {
	Name  string // Pool or State
	Title string // for people: "the storage pool"
	// Files are what a file system has room for, directories included; 0: it has no such limit.
	FreeBytes, Bytes, FreeFiles, Files int64
	Remedy                             string // how to free space there
	Broken                             error  // why it takes no writes; nil: it does
}

// Marks are what must be free for each rung not to be entered, by Rung.
type Marks [Rest + 1]int64

// ByBytes are the marks of a file system of so many bytes. reserve is what its owner wants to stay
// free; 0: there is no ladder.
func ByBytes(size, reserve int64) (m Marks) {
	if reserve <= 0 {
		return m
	}
	// A tenth, but of a large disk not more than eight reserves, and of a small one not less than
	// two, if that leaves three quarters of it.
	collect := min(max(2*reserve, min(size/10, 8*reserve)), size/4)
	return Marks{Collect: max(collect, reserve), Refuse: reserve, Rest: reserve / 4}
}

// ByFiles are the marks of a file system with room for so many files. A layer of an image has some
// ten thousand.
func ByFiles(files, reserve int64) (m Marks) {
	if reserve <= 0 {
		return m
	}
	return Marks{Collect: min(files/20, 100_000), Refuse: min(files/100, 20_000), Rest: min(files/400, 5_000)}
}

// After is the rung after now, if so much is free. It is entered below its mark, and left when a
// quarter more than the mark is free, so that a disk at a mark does not go up and down.
func (m *Marks) After(now Rung, free int64) Rung {
	to := Calm
	for r := Collect; r <= Rest; r++ {
		if free < m[r] {
			to = r
		}
	}
	for now > to && free >= m[now]+m[now]/4 {
		now--
	}
	return max(now, to)
}

// Rung is the rung of a space after now.
func (s *Space) Rung(now Rung, reserve int64) Rung {
	bytes, files := ByBytes(s.Bytes, reserve), ByFiles(s.Files, reserve)
	switch {
	case s.Broken != nil:
		return Failed
	case reserve <= 0:
		return Calm
	case now == Failed:
		now = Calm // how full it was before says nothing
	}
	to := bytes.After(now, s.FreeBytes)
	if s.Files > 0 {
		to = max(to, files.After(now, s.FreeFiles))
	}
	return to
}

// a measure is one of the two by which a space is full.
type measure struct {
	marks      Marks
	free, size int64
	show       func(free, size int64) string
	mark       func(int64) string
}

// holds returns by which measure a space is on rung r.
func (s *Space) holds(r Rung, reserve int64) measure {
	bytes := measure{
		ByBytes(s.Bytes, reserve), s.FreeBytes, s.Bytes, func(free, size int64) string {
			return fmt.Sprintf("%s has %s of %s free", s.Title, record.Mebibytes(free), record.Mebibytes(size))
		}, record.Mebibytes,
	}
	if s.Files == 0 || bytes.marks.After(r, bytes.free) >= r {
		return bytes
	}
	return measure{
		ByFiles(s.Files, reserve), s.FreeFiles, s.Files, func(free, size int64) string {
			return fmt.Sprintf("%s has room for %d of %d files", s.Title, free, size)
		}, func(n int64) string { return fmt.Sprint(n) },
	}
}

// Change says in one line that a space came from one rung to another, and what that means.
func (s *Space) Change(from, to Rung, reserve int64) string {
	if to == Failed {
		return s.broken()
	}
	m := s.holds(to, reserve)
	text := m.show(m.free, m.size)
	if from == Failed {
		text = s.Title + " takes writes again. It" + strings.TrimPrefix(text, s.Title)
	} else if to > from {
		text += ", less than " + m.mark(m.marks[to])
	}
	text += ": " + doing[to]
	if to >= Refuse && s.Remedy != "" {
		text += "; " + s.Remedy
	}
	return text
}

// why says why nothing new is made on rung r, how much must be free, and how to free it.
func (s *Space) why(r Rung, reserve int64) string {
	if r == Failed {
		return s.broken()
	}
	m := s.holds(max(r, Refuse), reserve)
	need := m.marks[Refuse] + m.marks[Refuse]/4
	return fmt.Sprintf("%s, and until %s are nothing new is made (storage.reserve); %s", m.show(m.free, m.size), m.mark(need), s.Remedy)
}

// broken says that nothing can be written, and what to do.
func (s *Space) broken() string {
	return fmt.Sprintf("%s takes no writes: %v: %s; file systems become read-only after an I/O error, which dmesg shows: check the "+
		"disk, and reboot to have it checked and mounted again", s.Title, s.Broken, doing[Failed])
}

// doing is what the daemon does on a rung, for people.
var doing = [...]string{
	Calm:    "nothing is removed or refused for it",
	Collect: "sandboxd removes what would go anyway, the earliest first, and refuses nothing",
	Refuse:  "nothing new is made",
	Failed:  "nothing new is made, and nothing is removed",
	Rest:    "nothing new is made, and sandboxes with an idle policy that nobody uses are paused; the next use wakes them",
}

// Stat fills in what the file system of a directory has.
func (s *Space) Stat(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	s.FreeBytes, s.Bytes = int64(st.Bavail)*st.Bsize, int64(st.Blocks)*st.Bsize
	s.FreeFiles, s.Files = int64(st.Ffree), int64(st.Files)
	return nil
}

// Try finds out whether the file system of a directory takes writes: an error says why not. It makes a
// file without a name, of which nothing is left. A file system that is full takes writes.
func Try(dir string) error {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	switch {
	case err == nil:
		return unix.Close(fd)
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EIO), errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.ESHUTDOWN):
		return err
	}
	return nil // no room, or a file system that makes no such files
}
