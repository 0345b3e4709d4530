package store

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/internal/failpoint"
)

const (
	// compactFrom is the size below which a file is left as it is: four times reserve.
	compactFrom = 32 << 20
	// compactStep is how much one transaction of a compaction copies. It is in memory.
	compactStep = 64 << 20
)

// compactName is the file in which a compaction writes. After a kill it is left, perhaps
// half written, and the next start removes it.
func compactName(path string) string { return path + ".compact" }

// A compaction makes a file smaller of which more than half is free: bbolt uses free pages
// again, but never gives one back, and each backup has them. It writes another file,
// compares it with this one, and only then gives it the name. If it cannot, the file stays
// as it is, and is used.
type compaction struct {
	bolt *bbolt.DB
	path string
	o    Options
}

// run returns the file to use: another one by the same name, or the one it was given. That
// is closed if it returns another one, and stays open if it fails.
func (c *compaction) run() (*bbolt.DB, error) {
	size, used, err := sizes(c.bolt)
	if err != nil {
		return nil, err
	}
	// A name that is a link stays one: the file that it names is replaced.
	if c.path, err = filepath.EvalSymlinks(c.path); err != nil {
		return nil, fmt.Errorf("find the state file that a link names: %w", err)
	}
	tmp := compactName(c.path)
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.o.Log.Warn("could not remove what a compaction of the state file left", "path", tmp, "err", err)
		return c.bolt, nil
	}
	if size < compactFrom || used > size/2 {
		return c.bolt, nil
	}
	began := time.Now()
	if err := c.into(tmp, used); err != nil {
		if rerr := os.Remove(tmp); !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
		c.o.Log.Warn("could not make the state file smaller, most of which is free; it is used as it is, and the next start tries again",
			"path", c.path, "bytes", size, "used", used, "err", err)
		return c.bolt, nil
	}
	// After a power cut the directory may have either file. So nothing is written into the
	// new one before its name is on the disk.
	if err := errors.Join(failpoint.Pass("store:renamed"), durable.SyncDir(filepath.Dir(c.path))); err != nil {
		return nil, fmt.Errorf("sync the directory of the state file %s after its compaction: %w; check the disk, and start again",
			c.path, err)
	}
	b, err := open(c.path, c.o.Wait, false)
	if err != nil {
		return nil, err
	}
	if err := c.bolt.Close(); err != nil {
		c.o.Log.Warn("could not close the state file of before the compaction", "path", c.path, "err", err)
	}
	now, _, err := sizes(b)
	if err != nil {
		now = 0 // for the log alone
	}
	c.o.Log.Info("made the state file smaller: most of it was free", "path", c.path, "bytes_before", size, "bytes", now,
		"dur", time.Since(began).Round(time.Millisecond))
	return b, nil
}

// sizes returns the bytes of a file, and of those of its pages that are in use.
func sizes(b *bbolt.DB) (size, used int64, err error) {
	fi, err := os.Stat(b.Path())
	if err != nil {
		return 0, 0, fmt.Errorf("look at the state file: %w", err)
	}
	err = b.View(func(tx *bbolt.Tx) error {
		s := tx.Cursor().Bucket().Stats() // with all buckets in it
		used = int64(s.BranchAlloc) + int64(s.LeafAlloc)
		return nil
	})
	return fi.Size(), used, err
}

// into copies the file, of which so many bytes are in use, to tmp and renames that.
func (c *compaction) into(tmp string, used int64) (err error) {
	fi, err := os.Stat(c.path)
	if err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(tmp), &st); err != nil {
		return &os.PathError{Op: "statfs", Path: filepath.Dir(tmp), Err: err}
	}
	// Not to the last byte: other programs would fail on the full disk.
	if free, need := int64(st.Bavail)*st.Bsize, 2*max(used, reserve); free < need {
		return fmt.Errorf("it needs %d MiB, and %d MiB are free: %w", need>>20, free>>20, unix.ENOSPC)
	}
	b, err := open(tmp, c.o.Wait, false)
	if err != nil {
		return err
	}
	b.NoSync = true // until all is there
	if err = failpoint.Pass("store:compact"); err == nil {
		err = bbolt.Compact(b, c.bolt, compactStep)
	}
	if err == nil {
		err = same(c.bolt, b)
	}
	if err == nil { // the free pages of the other file were room on a full disk
		err = fill(b, c.o.Reserve)
	}
	if err = errors.Join(err, b.Close()); err != nil {
		return err
	}
	if err := failpoint.Pass("store:compacted"); err != nil {
		return err
	}
	if err := settleFile(tmp, fi); err != nil {
		return err
	}
	return os.Rename(tmp, c.path) // the last: after it, this file has no name
}

// settleFile gives the file at path the mode and the owner of like, and syncs it.
func settleFile(path string, like fs.FileInfo) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	err = f.Chmod(like.Mode().Perm())
	if st, ok := like.Sys().(*syscall.Stat_t); ok {
		err = errors.Join(err, f.Chown(int(st.Uid), int(st.Gid)))
	}
	return errors.Join(err, f.Sync(), f.Close())
}

// same fails unless two files have the same keys, values and sequences, and bbolt finds
// every page of the second in order.
func same(a, b *bbolt.DB) error {
	return a.View(func(x *bbolt.Tx) error {
		return b.View(func(y *bbolt.Tx) error {
			var err error
			for e := range y.Check() { // read to its end: a goroutine sends
				err = errors.Join(err, e)
			}
			if err != nil {
				return fmt.Errorf("the copy is damaged: %w", err)
			}
			return sameBuckets(x, y)
		})
	})
}

func sameBuckets(x, y *bbolt.Tx) error {
	err := x.ForEach(func(name []byte, b *bbolt.Bucket) error {
		c := y.Bucket(name)
		if c == nil || c.Sequence() != b.Sequence() {
			return fmt.Errorf("bucket %s is missing in the copy, or has another sequence", name)
		}
		at := c.Cursor()
		k, v := at.First()
		if err := b.ForEach(func(key, value []byte) error {
			if !bytes.Equal(k, key) || !bytes.Equal(v, value) {
				return fmt.Errorf("in bucket %s the copy has key %q, and the file key %q, or their values differ", name, k, key)
			}
			k, v = at.Next()
			return nil
		}); err != nil {
			return err
		}
		if k != nil {
			return fmt.Errorf("in bucket %s the copy has one more key, %q", name, k)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return y.ForEach(func(name []byte, _ *bbolt.Bucket) error {
		if x.Bucket(name) == nil {
			return fmt.Errorf("the copy has one more bucket, %s", name)
		}
		return nil
	})
}
