package leases

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A file begins with one of two heads, and then has a line for each answer:
//
//	1764106873123 db.example 203.0.113.7 203.0.113.8 .
//
// The number is when the lease ends, in milliseconds of Unix time. The dot shows that the
// line is whole. A later line of the same name and address may only extend a lease. A line
// with a number alone says that all leases above that end by then had to make room. So a
// file is written anew only when it has grown, however often that happens.
const (
	headWhole = "DNS leases 1 whole\n"
	headParts = "DNS leases 1 parts\n" // as long: one is written over the other
	lastField = " .\n"

	unfinished = ".new" // after the name of a file: is being written, or was when a daemon was killed

	// spare is how much a file may grow, beside twice its size, before it is written anew.
	spare = 64 << 10
	// maxFile is more than a file can have: most leases with the longest names, twice. A
	// larger one is not read.
	maxFile = 3 << 20
	// maxFiles bounds the files of all sandboxes, also while one is written anew. Beyond it
	// leases are in memory only.
	maxFiles = 64 << 20
	// retry is how long a file that could not be written is left alone.
	retry = time.Second
)

var errFull = fmt.Errorf("the files of all sandboxes have %d MiB, which is the most", maxFiles>>20)

// kept is the file of a Table.
type kept struct {
	book *Book // nil: in memory only
	path string

	mu     sync.Mutex // guards all below
	file   *os.File   // nil: there is none yet
	size   int64      // where the next line begins
	least  int64      // its size when it was written anew
	whole  bool       // see Whole
	failed time.Time  // when it could not be written; zero: it has all
	closed bool
}

// Whole reports whether the table has every lease by which the sandbox may have opened a
// flow that is still open. It has not if the sandbox is older than the file, or had so many
// leases that some made room for others.
func (t *Table) Whole() bool {
	t.kept.mu.Lock()
	defer t.kept.mu.Unlock()
	return t.kept.whole
}

// Begin says that no open flow of the sandbox needs a lease that the table lacks. So from
// now on the table has all.
func (t *Table) Begin() {
	t.kept.mu.Lock()
	defer t.kept.mu.Unlock()
	if !t.kept.whole {
		t.kept.whole = true
		t.rewrite(time.Now())
	}
}

// keep writes a line, and one of those that made room, if room is not zero.
func (t *Table) keep(name string, addrs []netip.Addr, until, room, now time.Time) {
	k := &t.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	parts := k.whole && !room.IsZero() // from now on
	k.whole = k.whole && !parts
	switch {
	case k.book == nil || k.closed:
	case k.file == nil, !k.failed.IsZero():
		if now.Sub(k.failed) >= retry {
			t.rewrite(now)
		}
	default:
		line := make([]byte, 0, 128)
		if !room.IsZero() {
			line = append(strconv.AppendInt(line, room.UnixMilli(), 10), lastField...)
		}
		if err := k.write(appendLine(line, name, addrs, until), parts); err != nil {
			k.fail(err, now) // what of it was written has no dot, or the next line replaces it
		} else if k.size > 2*k.least+spare {
			t.rewrite(now)
		}
	}
}

// write writes at the end of the file. With parts, its head says so first.
//
// Preconditions: k.mu is held, and there is a file.
func (k *kept) write(lines []byte, parts bool) error {
	n := int64(len(lines))
	if !k.book.take(n) {
		return errFull
	}
	var err error
	if parts {
		_, err = k.file.WriteAt([]byte(headParts), 0)
	}
	if err == nil {
		_, err = k.file.WriteAt(lines, k.size)
	}
	if err != nil {
		k.book.give(n)
		return err
	}
	k.size += n
	return nil
}

// rewrite makes the file anew, with what is in memory.
//
// Preconditions: t.kept.mu is held.
func (t *Table) rewrite(now time.Time) {
	k := &t.kept
	if k.book == nil || k.closed {
		return
	}
	text := []byte(headParts)
	if k.whole {
		text = []byte(headWhole)
	}
	for l := range t.All {
		text = appendLine(text, l.Name, []netip.Addr{l.Addr}, l.Until)
	}
	n := int64(len(text))
	if !k.book.take(n) {
		k.fail(errFull, now)
		return
	}
	f, err := os.OpenFile(k.path+unfinished, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err == nil {
		if _, err = f.Write(text); err == nil {
			err = os.Rename(k.path+unfinished, k.path)
		}
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(k.path+unfinished))
		}
	}
	if err != nil {
		k.book.give(n)
		k.fail(err, now)
		return
	}
	if k.file != nil {
		k.file.Close()
	}
	k.book.give(k.size)
	k.file, k.size, k.least = f, n, n
	k.failed = time.Time{}
}

// fail notes that the file lacks what the memory has, for this daemon and the next one.
//
// Preconditions: k.mu is held.
func (k *kept) fail(err error, now time.Time) {
	k.failed = now
	if k.file != nil {
		_, e := k.file.WriteAt([]byte(headParts), 0) // it takes no room
		err = errors.Join(err, e)
	}
	if k.book.tells(now) {
		k.book.log.Error("cannot write the DNS leases of a sandbox; they are in memory only until that succeeds: if the daemon ends "+
			"before, guests must ask again for names. Is the file system full, or do guests ask for many names?",
			"file", k.path, "err", err)
	}
}

func (k *kept) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.file != nil {
		k.file.Close()
		k.book.give(k.size)
	}
	k.file, k.size, k.closed = nil, 0, true
}

// load reads what an earlier daemon has kept. Without an error it goes on with that file.
func (t *Table) load(now time.Time) error {
	k := &t.kept
	k.mu.Lock()
	defer k.mu.Unlock()
	f, err := os.OpenFile(k.path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("%s has more than %d bytes, which no such file has", k.path, maxFile)
	}
	lines, whole := bytes.CutPrefix(text, []byte(headWhole))
	if !whole {
		var ours bool
		if lines, ours = bytes.CutPrefix(text, []byte(headParts)); !ours && err == nil {
			err = fmt.Errorf("%s does not begin as a file of DNS leases", k.path)
		}
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	// The last line may be torn. Its answer was not sent.
	lines = lines[:bytes.LastIndexByte(lines, '\n')+1]
	for line := range strings.Lines(string(lines)) {
		switch name, addrs, until, ok := parseLine(line); {
		case !ok:
			whole = false
		case name == "":
			t.dropTo(until)
			whole = false
		default:
			if _, room := t.extend(name, addrs, until, now); !room.IsZero() {
				whole = false
			}
		}
	}
	t.shorten(now.Add(longest + Grace))
	k.file, k.whole = f, whole
	k.size = int64(len(headWhole) + len(lines)) // least stays 0: a long file is written anew soon
	k.book.used.Add(k.size)
	return nil
}

// dropTo is drop.
func (t *Table) dropTo(room time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop(room)
}

// shorten lets no lease end after latest: somebody may have changed the clock.
func (t *Table) shorten(latest time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, xs := range t.by {
		for i := range xs {
			if xs[i].until.After(latest) {
				xs[i].until = latest
			}
		}
	}
}

func appendLine(b []byte, name string, addrs []netip.Addr, until time.Time) []byte {
	b = strconv.AppendInt(b, until.UnixMilli(), 10)
	b = append(append(b, ' '), name...)
	for _, a := range addrs {
		b = a.AppendTo(append(b, ' '))
	}
	return append(b, lastField...)
}

// parseLine reads what keep wrote; without a name it is a line of those that made room.
// Anything else is not ok.
func parseLine(line string) (name string, addrs []netip.Addr, until time.Time, ok bool) {
	line, ok = strings.CutSuffix(line, lastField)
	fields := strings.Split(line, " ")
	millis, err := strconv.ParseInt(fields[0], 10, 64)
	if !ok || err != nil || millis < 0 {
		return "", nil, until, false
	}
	until = time.UnixMilli(millis)
	if len(fields) == 1 {
		return "", nil, until, true
	}
	if !isName(fields[1]) || len(fields) < 3 || len(fields) > most {
		return "", nil, until, false
	}
	for _, field := range fields[2:] {
		a, err := netip.ParseAddr(field)
		if err != nil || !a.Is4() {
			return "", nil, until, false
		}
		addrs = append(addrs, a)
	}
	return fields[1], addrs, until, true
}

// isName reports whether s may be a name that has a lease: the resolver answers for no others.
func isName(s string) bool {
	return s != "" && len(s) <= 253 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-_.") == ""
}
