package flowlog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/durable"
)

// The files of a log. The first is on disk when it is written, the second may be lost or
// torn by a power cut, and costs no sync. The one that was written last counts, if it is
// whole.
const (
	syncedFile = ".json"
	liveFile   = ".live"
	unfinished = ".new" // after either: is being written, or was when a daemon was killed
)

// A Book has the logs of all sandboxes. Its methods may be called concurrently.
type Book struct {
	dir  string // "": nothing is kept
	boot string // another after each start of the host
	log  *slog.Logger

	mu      sync.Mutex // guards all below
	logs    map[string]*Log
	traffic Traffic // of all sandboxes since OpenBook
}

// OpenBook opens the book whose files are in dir, which it makes. With an empty dir the
// book is in memory only.
func OpenBook(dir string, log *slog.Logger) (*Book, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("find out which boot of the host this is: %w", err)
	}
	b := &Book{dir: dir, boot: strings.TrimSpace(string(boot)), log: log, logs: map[string]*Log{}}
	if dir == "" {
		return b, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of flow logs: %w", err)
	}
	return b, nil
}

// Open returns the log of a sandbox, which stays in memory until Close. If its files
// cannot be read, the log begins anew.
func (b *Book) Open(id string) *Log {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.logs[id]
	if l == nil {
		l = b.load(id)
		if l == nil {
			l = &Log{id: id, since: time.Now()}
		}
		b.logs[id] = l
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closing = false
	return l
}

// Close lets the log of a sandbox leave memory after the next Save.
func (b *Book) Close(id string) {
	if l := b.opened(id); l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.closing = true
	}
}

func (b *Book) opened(id string) *Log {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.logs[id]
}

// Sample takes what the counters of a sandbox's link show. Without an open log it does
// nothing.
func (b *Book) Sample(id string, index int, now Traffic) {
	l := b.opened(id)
	if l == nil {
		return
	}
	passed := l.sample(b.boot, index, now)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.traffic.add(passed)
}

// Traffic is that of all sandboxes since OpenBook, as far as it was sampled.
func (b *Book) Traffic() Traffic {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.traffic
}

// Report is what the log of a sandbox has, also after its end. If there is no log, it is
// empty.
func (b *Book) Report(id string) Report {
	l := b.opened(id)
	if l == nil {
		l = b.load(id)
	}
	if l == nil {
		return Report{}
	}
	return l.Report()
}

// Forget removes the log of a sandbox. Absent is success.
func (b *Book) Forget(id string) error {
	b.mu.Lock()
	l := b.logs[id]
	delete(b.logs, id)
	b.mu.Unlock()
	if l != nil {
		l.io.Lock() // a Save may be writing it
		defer l.io.Unlock()
		l.gone = true
	}
	if b.dir == "" {
		return nil
	}
	for _, end := range []string{liveFile + unfinished, liveFile, syncedFile + unfinished, syncedFile} {
		if err := os.Remove(b.path(id, end)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the flow log of %s: %w", id, err)
		}
	}
	return nil
}

// List lists the sandboxes that have a log, in memory or in a file.
func (b *Book) List() ([]string, error) {
	b.mu.Lock()
	all := map[string]bool{}
	for id := range b.logs {
		all[id] = true
	}
	b.mu.Unlock()
	if b.dir != "" {
		entries, err := os.ReadDir(b.dir)
		if err != nil {
			return nil, fmt.Errorf("list flow logs: %w", err)
		}
		for _, e := range entries {
			id, _, _ := strings.Cut(e.Name(), ".") // also of unfinished files
			all[id] = true
		}
	}
	return slices.Sorted(maps.Keys(all)), nil
}

// Save writes the logs with connections that are not in a file yet. With sync it writes
// all that have changed, so that a power cut does not lose them. A log whose sandbox
// ended is always written so, and then leaves memory.
func (b *Book) Save(sync bool) error {
	if sync {
		return b.saveAll(durably)
	}
	return b.saveAll(newConnections)
}

// Leave writes all that have changed, for the next daemon, and waits for no disk: to sync a
// hundred files takes half a second, for which clients would be without an API.
func (b *Book) Leave() error { return b.saveAll(changed) }

// A depth is what is written of a log.
type depth int

const (
	newConnections depth = iota // if there are connections that are in no file
	changed                     // if anything is in no file
	durably                     // likewise, and so that a power cut does not lose it
)

func (b *Book) saveAll(deep depth) error {
	if b.dir == "" {
		return nil
	}
	b.mu.Lock()
	all := slices.Collect(maps.Values(b.logs))
	b.mu.Unlock()
	var errs []error
	for _, l := range all {
		saved, closed, err := b.save(l, deep)
		if err != nil {
			errs = append(errs, fmt.Errorf("write the flow log of %s: %w", l.id, err))
		} else if closed {
			b.drop(l, saved)
		}
	}
	return errors.Join(errs...)
}

// drop takes a closed log out of memory, unless it was opened again since it was saved. It may
// be closed again already, and have counted meanwhile.
func (b *Book) drop(l *Log, saved state) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing && l.state() == saved && b.logs[l.id] == l {
		delete(b.logs, l.id)
	}
}

func (b *Book) path(id, end string) string { return filepath.Join(b.dir, id+end) }

// state tells whether a log differs from what was written. Counts only grow.
type state struct {
	connections uint64
	link        link
}

// file is how a log is written.
type file struct {
	Seq     uint64    `json:"seq"`
	Since   time.Time `json:"since"`
	Traffic Traffic   `json:"traffic"`
	Link    link      `json:"link,omitzero"`
	Total   Tally     `json:"total"`
	Other   Tally     `json:"other,omitzero"`
	Flows   []Entry   `json:"flows,omitempty"`
}

// state is that of the moment.
//
// Preconditions: l.mu is held.
func (l *Log) state() state { return state{l.total.Allowed + l.total.Denied, l.link} }

// save writes a log if it has to be. closed says that its sandbox ended and that all of
// it is on disk, as it is now.
func (b *Book) save(l *Log, deep depth) (now state, closed bool, err error) {
	l.io.Lock()
	defer l.io.Unlock()
	l.mu.Lock()
	closed = l.closing
	sync := deep == durably || closed
	now = l.state()
	stale := now.connections != l.live.connections
	switch {
	case sync:
		stale = now != l.synced
	case deep == changed:
		stale = now != l.live
	}
	if l.gone || !stale {
		l.mu.Unlock()
		return now, closed, nil
	}
	r := l.report() // a copy: Count must not wait for the disk
	l.mu.Unlock()
	l.seq++
	text, err := json.Marshal(file{l.seq, r.Since, r.Traffic, now.link, r.Total, r.Other, r.Flows})
	if err != nil {
		return now, false, err
	}
	if !sync {
		if err := writeLive(b.path(l.id, liveFile), text); err != nil {
			return now, false, err
		}
		l.live = now
		return now, false, nil
	}
	if err := durable.Write(b.path(l.id, syncedFile), text, 0o600); err != nil {
		return now, false, err
	}
	l.live, l.synced = now, now
	err = os.Remove(b.path(l.id, liveFile))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return now, closed, err
}

// writeLive replaces a file so that a process killed here leaves the old one or the new
// one.
func writeLive(path string, text []byte) error {
	if err := os.WriteFile(path+unfinished, text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+unfinished, path)
}

// load reads the log of a sandbox; nil: there is none that can be read.
func (b *Book) load(id string) *Log {
	if b.dir == "" {
		return nil
	}
	var last *file
	for _, end := range []string{syncedFile, liveFile} {
		f, err := read(b.path(id, end))
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			b.log.Warn("a flow log cannot be read; what it counted is lost if there is no older one", "sandbox", id, "err", err)
		case last == nil || f.Seq > last.Seq:
			last = f
		}
	}
	if last == nil {
		return nil
	}
	l := &Log{id: id, since: last.Since, total: last.Total, traffic: last.Traffic, link: last.Link, seq: last.Seq}
	l.live.connections = last.Total.Allowed + last.Total.Denied
	l.table.other = last.Other
	for _, e := range slices.Backward(last.Flows) {
		if l.table.by[e.Destination] == nil {
			l.table.insert(e.Destination).Tally = e.Tally
			l.table.place(l.table.by[e.Destination])
		}
	}
	return l
}

// maxFile is far more than a log takes, also with the longest names.
const maxFile = 1 << 20

func read(path string) (*file, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if fi.Size() > maxFile {
		return nil, fmt.Errorf("%s has %d bytes, more than a flow log can have", path, fi.Size())
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	f := new(file)
	if err := json.Unmarshal(bytes.TrimSpace(text), f); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return f, nil
}
