package leases

import (
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
	"sync/atomic"
	"time"
)

// A Book has the tables of all sandboxes. Its methods may be called concurrently.
type Book struct {
	dir  string // "": nothing is kept
	log  *slog.Logger
	told atomic.Int64 // when the log last said that a file cannot be written

	used  atomic.Int64 // bytes of all files
	bound int64        // of used

	mu     sync.Mutex // guards tables
	tables map[string]*Table
}

// OpenBook opens the book whose files are in dir, which it makes. With an empty dir the
// book is in memory only.
func OpenBook(dir string, log *slog.Logger) (*Book, error) {
	if dir != "" {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make the directory of DNS leases: %w", err)
		}
	}
	return &Book{dir: dir, log: log, bound: maxFiles, tables: map[string]*Table{}}, nil
}

// Open returns the table of a sandbox, with what an earlier daemon has kept.
func (b *Book) Open(id string) *Table {
	b.mu.Lock()
	defer b.mu.Unlock()
	t := b.tables[id]
	if t != nil {
		return t
	}
	t = &Table{}
	b.tables[id] = t
	if b.dir == "" {
		return t
	}
	t.kept.book, t.kept.path = b, filepath.Join(b.dir, id)
	if err := t.load(time.Now()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		b.log.Warn("DNS leases of an earlier daemon cannot be read; the sandbox must ask again for names", "sandbox", id, "err", err)
	}
	return t
}

// take takes n bytes for files. It reports whether there are so many left.
func (b *Book) take(n int64) bool {
	if b.used.Add(n) > b.bound {
		b.used.Add(-n)
		return false
	}
	return true
}

func (b *Book) give(n int64) { b.used.Add(-n) }

// tells reports whether the log may say that a file cannot be written: once a minute.
func (b *Book) tells(now time.Time) bool {
	last := b.told.Load()
	return now.UnixNano()-last >= int64(time.Minute) && b.told.CompareAndSwap(last, now.UnixNano())
}

// Forget removes the table of a sandbox and its file. Absent is success.
func (b *Book) Forget(id string) error {
	b.mu.Lock()
	t := b.tables[id]
	delete(b.tables, id)
	b.mu.Unlock()
	if t != nil {
		t.kept.close()
	}
	if b.dir == "" {
		return nil
	}
	for _, end := range []string{unfinished, ""} {
		if err := os.Remove(filepath.Join(b.dir, id) + end); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the DNS leases of %s: %w", id, err)
		}
	}
	return nil
}

// List lists the sandboxes that have a file.
func (b *Book) List() ([]string, error) {
	if b.dir == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(b.dir)
	if err != nil {
		return nil, fmt.Errorf("list DNS leases: %w", err)
	}
	all := map[string]bool{}
	for _, e := range entries {
		all[strings.TrimSuffix(e.Name(), unfinished)] = true
	}
	return slices.Sorted(maps.Keys(all)), nil
}

// Close closes the files, and leaves them for the next daemon.
func (b *Book) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.tables {
		t.kept.close()
	}
}
