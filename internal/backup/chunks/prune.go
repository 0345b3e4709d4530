package chunks

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/backup/target"
	"github.com/sandboxd/sandboxd/internal/failpoint"
)

// Prune removes the packs of a state that are not needed, and returns how many and how large they
// were. It asks how to tell whether one is, if there are any. Packs of others stay.
func Prune(
	ctx context.Context, t target.Target, w target.Whose, needed func() (func(name string) bool, error),
) (n int, bytes int64, err error) {
	there, err := packsOf(ctx, t, w.OwnsPacks)
	if err != nil || len(there) == 0 {
		return 0, 0, err
	}
	keep, err := needed()
	if err != nil {
		return 0, 0, err
	}
	for name, size := range there {
		if keep(name) {
			continue
		}
		if err := failpoint.Pass("backup:prune"); err != nil {
			return n, bytes, err
		}
		if err := t.Remove(ctx, name); err != nil {
			return n, bytes, err
		}
		n++
		bytes += size
	}
	return n, bytes, nil
}

// Lost lists the packs of a catalog that the target has no more, or with another size.
func (c *Catalog) Lost(ctx context.Context, t target.Target) (names []string, err error) {
	all, err := t.List(ctx)
	if err != nil {
		return nil, err
	}
	there := make(map[string]int64, len(all))
	for _, o := range all {
		there[o.Name] = o.Bytes
	}
	for _, p := range c.Packs {
		if bytes, ok := there[p.Name]; !ok || bytes != p.Bytes {
			names = append(names, p.Name)
		}
	}
	return names, nil
}

// Forget notes that a pack is bad: what was in it is sent again. The caller lets no Session run
// meanwhile.
func (s *Store) Forget(name string) error {
	j, err := openJournal(s.Journal, func(kind, []byte) error { return nil })
	if err != nil {
		return err
	}
	if j.end > 0 { // else nothing is known of any pack
		err = j.append(badRecord, []byte(name))
	}
	return errors.Join(err, j.close())
}

// unnamed makes a file in dir that has no name (open(2), O_TMPFILE).
func unnamed(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, unix.O_TMPFILE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a file in %s: %w", dir, err)
	}
	return f, nil
}

// Known are the names of the packs in the journal: this host has sent them.
func (s *Store) Known() (map[string]bool, error) {
	f, err := os.Open(s.Journal)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the journal of backups: %w", err)
	}
	defer f.Close() //nolint:errcheck // read only
	names := map[string]bool{}
	_, err = readJournal(f, func(k kind, b []byte) error {
		if k != packRecord {
			return nil
		}
		p, err := decodePacked(b)
		names[p.Name] = true
		return err
	})
	return names, err
}
