package btrfs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/internal/failpoint"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// MoveLoop moves the file of a pool that is not mounted to the directory to. image, the name in the
// state directory, then is a link to it; if to is that directory, it is the file itself again.
//
// The old file is there until the new one is whole, compared with it and on disk. So a MoveLoop that
// was killed, or a power cut, leaves the pool where it was or where it is to be.
func MoveLoop(ctx context.Context, image, to string, progress func(done, all int64)) (file string, err error) {
	source, err := filepath.EvalSymlinks(image)
	if err != nil {
		return "", fmt.Errorf("find the pool: %w", err)
	}
	if file, err = destination(image, source, to); err != nil {
		return "", err
	}
	f, err := os.OpenFile(source, os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return "", errs.Wrap(err, errs.WrongState, "%s is being grown or moved by another process: wait until it ends", source)
	}
	if dev, err := attachedLoop(f); err != nil {
		return "", err
	} else if dev != nil {
		dev.Close()
		return "", errs.New(errs.WrongState, "%s is in use (%s): start sandboxd, stop all sandboxes (sandboxctl stop), and stop sandboxd "+
			"again", source, dev.Name())
	}
	tmp := file + ".new"
	if err := copyWhole(ctx, f, tmp, progress); err != nil {
		return "", errors.Join(fmt.Errorf("copy %s to %s: %w; the pool stays where it is", source, tmp, err), gone(os.Remove(tmp)))
	}
	if err := failpoint.Pass("pool:copied"); err != nil {
		return "", err
	}
	if err := durable.Rename(tmp, file); err != nil {
		return "", err
	}
	if file != image {
		link := image + ".link"
		err := errors.Join(gone(os.Remove(link)), os.Symlink(file, link), failpoint.Pass("pool:link"))
		if err == nil {
			err = os.Rename(link, image)
		}
		if err != nil {
			return "", errors.Join(fmt.Errorf("link %s to %s: %w", image, file, err), gone(os.Remove(link)), os.Remove(file))
		}
		// From here on the copy may be the only file of the pool: nothing removes it.
		if err := errors.Join(failpoint.Pass("pool:linked"), durable.SyncDir(filepath.Dir(image))); err != nil {
			return file, fmt.Errorf("the pool is %s now, and %s a link to it, which a power cut may undo: %w; the file of before stays, "+
				"if it had another name", file, image, err)
		}
	}
	if source != image { // otherwise the link, or the file, has taken its place
		err = os.Remove(source)
	}
	return file, err
}

func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// destination is the file in the directory to. It refuses what would not be safe there.
func destination(image, source, to string) (string, error) {
	dir, err := filepath.Abs(to)
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return "", fmt.Errorf("find the new place of the pool: %w", err)
	}
	home, err := filepath.EvalSymlinks(filepath.Dir(image))
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, pool.MovedImage)
	if dir == home {
		file = image
	}
	if file == source || filepath.Dir(source) == dir {
		return "", errs.New(errs.WrongState, "the pool is in %s already: %s", dir, source)
	}
	fi, err := os.Stat(dir)
	if err != nil {
		return "", err
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || st.Uid != 0 || fi.Mode().Perm()&0o022 != 0 {
		return "", errs.New(errs.Denied, "%s can be written to by others than root, who could replace the pool: name a directory of root "+
			"alone (install -d -m 700 DIR)", dir)
	}
	if _, err := os.Lstat(file); file != image && !errors.Is(err, fs.ErrNotExist) {
		return "", errs.Wrap(err, errs.WrongState, "%s is there already and may be the pool of another instance: name another directory, "+
			"or remove it if nothing needs it", file)
	}
	return file, nil
}

// copyWhole copies f to a new file that has all its blocks, and compares the two.
func copyWhole(ctx context.Context, f *os.File, path string, progress func(done, all int64)) error {
	if err := gone(os.Remove(path)); err != nil {
		return err
	}
	to, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer to.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if err := place(to, fi.Size()); err != nil {
		return err
	}
	err = eachPart(ctx, f, fi.Size(), func(buf []byte, at int64) error {
		progress(at, fi.Size())
		_, err := to.WriteAt(buf, at)
		return err
	})
	if err == nil {
		err = to.Sync()
	}
	if err == nil { // what is compared comes from the disk
		err = unix.Fadvise(int(to.Fd()), 0, 0, unix.FADV_DONTNEED)
	}
	if err != nil {
		return err
	}
	var copied [part]byte
	return eachPart(ctx, f, fi.Size(), func(buf []byte, at int64) error {
		if _, err := to.ReadAt(copied[:len(buf)], at); err != nil {
			return err
		}
		if !bytes.Equal(buf, copied[:len(buf)]) {
			return fmt.Errorf("the disk gave other bytes than were written, at %d: check it", at)
		}
		return nil
	})
}

// place gives a new file all its blocks.
func place(f *os.File, size int64) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Type == magic {
		if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, nocowFlag); err != nil {
			return fmt.Errorf("set nocow: %w", err)
		}
	}
	if free := int64(st.Bavail) * st.Bsize; free < size {
		return errs.Wrap(unix.ENOSPC, errs.Exhausted, "its disk has %d MiB free, and the pool needs %d MiB: free space there, or name "+
			"another disk", free>>20, size>>20)
	}
	return unix.Fallocate(int(f.Fd()), 0, 0, size)
}

const part = 1 << 20

// eachPart calls do with all parts of a file that were written. The others read as zeros, also in a new
// file.
func eachPart(ctx context.Context, f *os.File, size int64, do func(buf []byte, at int64) error) error {
	buf := make([]byte, part)
	for at := int64(0); at < size; {
		data, err := f.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // no data follows
		}
		if err != nil {
			return err
		}
		hole, err := f.Seek(data, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		for at = data; at < hole; {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			n, err := f.ReadAt(buf[:min(part, hole-at)], at)
			if err != nil && !(errors.Is(err, io.EOF) && n > 0) {
				return err
			}
			if err := do(buf[:n], at); err != nil {
				return err
			}
			at += int64(n)
		}
	}
	return nil
}
