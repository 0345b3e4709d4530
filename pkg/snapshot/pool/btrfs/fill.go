package btrfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
	"golang.org/x/sys/unix"
)

const (
	// piece is how much is written at a time: an fsync of a sandbox waits for one.
	piece = 1 << 20
	// restFactor times as long as a piece took, Fill rests after it: it takes a tenth of
	// the time of the disk, and less of one that is busy.
	restFactor = 9
	// counted is after how many bytes Fill commits: the kernel does not count before that
	// what was written (statfs), and would show it as free.
	counted = 64 << 20
	// longestRest bounds how late Fill notices that sandboxes need the space.
	longestRest = time.Second
	// firstPart of a new file is written before there is a file system in it, for at most
	// firstTime: a sandbox then writes fast from the first second.
	firstPart = 1 << 30
	firstTime = time.Second
)

// leftFree is how much of a pool Fill leaves free: a quarter, and what btrfs may take for
// a chunk of metadata before Fill looks again.
func leftFree(size int64) int64 { return size/4 + min(size*3/16, 1<<30) }

// writeFirst writes zeros to the first eighth of a new file. It ends early when limit
// is over, or the file system below has no direct I/O: Fill does the rest.
func writeFirst(ctx context.Context, path string, bytes int64, limit time.Duration) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_DIRECT, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	zeros, err := unix.Mmap(-1, 0, piece, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS) // aligned to pages
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	defer unix.Munmap(zeros) //nolint:errcheck // it is mapped
	end := time.Now().Add(limit)
	for at := int64(0); at+piece <= min(bytes/8, firstPart) && time.Now().Before(end) && ctx.Err() == nil; at += piece {
		if _, err := f.WriteAt(zeros, at); err != nil {
			return err
		}
	}
	return nil
}

// Written returns how many bytes of the file were written at least once.
func (b *LoopPool) Written() (int64, error) {
	written, _, err := Written(b.image)
	return written, err
}

// Held returns how many bytes Fill has taken from the pool for now.
func (b *LoopPool) Held() int64 { return b.held.Load() }

// Fill writes zeros to the free part of the pool, until only a quarter of the pool is
// free, and frees it again. The file system below converts an extent at the first write
// to each of its blocks, and makes that durable for each fsync of a sandbox; after Fill
// this has happened. It does nothing if not much more is unwritten.
//
// The zeros are in a file without a name. The kernel removes it when this process ends,
// however it ends, and when the pool is mounted after a crash of the host.
func (b *LoopPool) Fill(ctx context.Context) error {
	written, size, err := Written(b.image)
	if errors.Is(err, errors.ErrUnsupported) || err == nil && size-written < leftFree(size)+size/8 {
		return nil
	}
	if err != nil {
		return err
	}
	f, err := os.OpenFile(b.dir, unix.O_TMPFILE|os.O_RDWR|unix.O_DIRECT, 0o600)
	if err != nil {
		return fmt.Errorf("make a file to fill: %w", err)
	}
	defer b.held.Store(0)
	err = b.fill(ctx, f)
	if err = errors.Join(err, f.Close()); err != nil || ctx.Err() != nil {
		return err
	}
	return tree.WithDir(b.dir, commit)
}

// fill writes zeros to f while enough of the pool is free.
func (b *LoopPool) fill(ctx context.Context, f *os.File) error {
	// Without sums: they would be written for each block, and kept nowhere.
	if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, nocowFlag); err != nil {
		return fmt.Errorf("set nocow on the file to fill: %w", err)
	}
	zeros, err := unix.Mmap(-1, 0, piece, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS) // aligned to pages
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	defer unix.Munmap(zeros) //nolint:errcheck // it is mapped
	rest := time.NewTimer(0)
	defer rest.Stop()
	for at := int64(0); ; at += piece {
		select {
		case <-ctx.Done():
			return nil
		case <-rest.C:
		}
		if at%counted == 0 {
			if err := tree.WithDir(b.dir, commit); err != nil {
				return err
			}
		}
		var st unix.Statfs_t
		if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
			return fmt.Errorf("statfs of the pool: %w", err)
		}
		if int64(st.Bavail)*st.Bsize-at%counted < leftFree(int64(st.Blocks)*st.Bsize) {
			return nil
		}
		start := time.Now()
		if _, err := f.WriteAt(zeros, at); errors.Is(err, unix.ENOSPC) {
			return nil
		} else if err != nil {
			return err
		}
		b.held.Store(at + piece)
		rest.Reset(min(restFactor*time.Since(start), longestRest))
	}
}

// commit makes the kernel account for what was written or freed. It writes no data of other files,
// unlike syncfs.
func commit(fd int) error {
	var transaction uint64
	if err := pool.Ioctl(fd, iocStartSync, unsafe.Pointer(&transaction)); err != nil {
		return fmt.Errorf("commit the pool: %w", err)
	}
	if err := pool.Ioctl(fd, iocWaitSync, unsafe.Pointer(&transaction)); err != nil {
		return fmt.Errorf("wait for a commit of the pool: %w", err)
	}
	return nil
}
