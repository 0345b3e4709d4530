// Package uptime knows when the host was up, over its reboots, so that a time for which
// something is kept does not run while the host is down.
//
// The times of a boot lie in a small file: when it began, and when a daemon last saw the host up.
// The latter is the time of the file itself, so that noting it each minute writes no data and
// waits for no disk.
//
// What surprises: after a power cut, or a host that ran on without a daemon, the host counts as
// down from when a daemon last saw it up. So something may be kept longer than asked, and never
// shorter.
package uptime

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/durable"
)

// most is how many boots a Book remembers. Of a time before them it says that the host was up.
const most = 256

// steady is how far the clock may drift before the beginning of a boot is written again.
const steady = time.Second

// A span is a time for which the host was up, by the wall clock.
type span struct {
	Boot string    `json:"boot"` // the kernel's boot id
	From time.Time `json:"from"`
	Seen time.Time `json:"seen"` // of the present boot in the file: as old as the last change of its content
}

// A Book knows when the host was up. Its methods may be called concurrently.
type Book struct {
	path  string
	began func() time.Time // when this boot began, by the wall clock as it is now

	mu    sync.Mutex
	spans []span // of the last boots, in order; the last one is the present boot's
}

// Open reads the book at path, and begins it if there is none. boot is the id of the present boot.
// A book that cannot be read, or written, is of use all the same: the error is for the log.
func Open(path, boot string) (*Book, error) { return open(path, boot, began) }

func open(path, boot string, began func() time.Time) (*Book, error) {
	b := &Book{path: path, began: began}
	spans, err := read(path)
	if n := len(spans); n == 0 || spans[n-1].Boot != boot {
		spans = append(spans, span{Boot: boot, From: began()})
	}
	b.spans = spans[max(0, len(spans)-most):]
	return b, errors.Join(err, b.write())
}

// read reads the spans of a book. If its content is damaged, its time still says when the host was
// last up.
func read(path string) (spans []span, err error) {
	fi, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read when the host was up: %w", err)
	}
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &spans)
	}
	if err != nil || len(spans) == 0 {
		spans = []span{{From: fi.ModTime(), Seen: fi.ModTime()}}
	}
	if err != nil {
		err = fmt.Errorf("read from %s when the host was up: %w; sandboxd counts from when that file was written", path, err)
	}
	last := &spans[len(spans)-1]
	if fi.ModTime().After(last.Seen) {
		last.Seen = fi.ModTime()
	}
	return spans, err
}

// began is when the host was booted, by the clock as it is set now.
func began() time.Time {
	var up unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &up) // it fails only for clocks that a kernel does not have
	return time.Now().Round(0).Add(-time.Duration(up.Nano()))
}

// Beat notes that the host is up.
func (b *Book) Beat() error {
	b.mu.Lock()
	last := b.spans[len(b.spans)-1]
	b.mu.Unlock()
	if drift := b.began().Sub(last.From); drift > steady || drift < -steady { // somebody set the clock
		return b.write()
	}
	at := time.Now()
	err := os.Chtimes(b.path, at, at)
	if errors.Is(err, fs.ErrNotExist) {
		return b.write()
	}
	if err != nil {
		return fmt.Errorf("note that the host is up: %w", err)
	}
	return nil
}

func (b *Book) write() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	last := &b.spans[len(b.spans)-1]
	last.From, last.Seen = b.began(), time.Now().Round(0)
	text, err := json.Marshal(b.spans)
	if err == nil {
		err = durable.Write(b.path, append(text, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("note when the host was up: %w", err)
	}
	return nil
}

// Down returns for how long the host was down since a time. If the clock of this boot was set
// since the boot, as by a program that got the time from the network, the time before the boot
// is as that clock says now. A nil Book knows of no boot before this one.
func (b *Book) Down(since time.Time) (sum time.Duration) {
	if b == nil {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range len(b.spans) - 1 {
		from, to := b.spans[i].Seen, b.spans[i+1].From
		if i == len(b.spans)-2 {
			to = b.began()
		}
		if since.After(from) {
			from = since
		}
		if to.After(from) {
			sum += to.Sub(from)
		}
	}
	return sum
}
