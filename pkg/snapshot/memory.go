package snapshot

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// A snapshot may have a memory image beside the frozen disk, and a sandbox that hibernates has one
// beside its disk: a directory of files that the runtime writes and reads.

// memoryDir is the directory of a memory image, whether it is there or not.
func (p *Pool) memoryDir(of string) (string, error) {
	if !record.IsSnapshotID(of) && !record.IsID(of) {
		return "", fmt.Errorf("memory image of %q: not an id", of)
	}
	return filepath.Join(p.dir, pool.MemoryDir, of), nil
}

// MemoryDir is where the memory image of a snapshot or a sandbox is, if it has one.
func (s *Snapshots) MemoryDir(of string) (string, error) { return s.pool.memoryDir(of) }

// MakeMemory makes the directory for the memory image of a snapshot or a sandbox, empty, and
// returns it.
func (s *Snapshots) MakeMemory(_ context.Context, of string) (dir string, err error) {
	if dir, err = s.pool.memoryDir(of); err != nil {
		return "", err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", poolFull(fmt.Errorf("make the memory image of %s: %w", of, err))
	}
	return dir, nil
}

// FinishMemory makes a memory image survive a crash of the host. It returns what CheckMemory
// wants to know of its files, sorted by name.
func (s *Snapshots) FinishMemory(ctx context.Context, of string) ([]record.MemoryFile, error) {
	dir, err := s.pool.memoryDir(of)
	if err != nil {
		return nil, err
	}
	files, err := s.readImage(ctx, dir, nil, (*os.File).Sync)
	if err == nil {
		err = errors.Join(durable.SyncDir(dir), durable.SyncDir(filepath.Dir(dir)))
	}
	if err != nil {
		return nil, poolFull(fmt.Errorf("finish the memory image of %s: %w", of, err))
	}
	return files, nil
}

// CheckMemory returns nil if the files of a memory image are as FinishMemory found them. If one
// is missing, or has other content, it fails with errs.Internal. The checksum finds damage. It
// does not withstand who can write to the files on purpose: root, and a sentry that its guest has
// taken over and that has kept the descriptors of its own image. A file that this process has
// read, and that nobody has written to since, is not read again.
func (s *Snapshots) CheckMemory(ctx context.Context, of string, files []record.MemoryFile) error {
	dir, err := s.pool.memoryDir(of)
	if err != nil {
		return err
	}
	found, err := s.readImage(ctx, dir, files, func(*os.File) error { return nil })
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err == nil && len(files) > 0 && slices.Equal(found, files):
		return nil
	}
	what, remedy := "snapshot", "delete the snapshot, or create a sandbox from its files alone"
	if record.IsID(of) {
		what, remedy = "sandbox", "its files are kept: `sandboxctl stop` and `sandboxctl start` begin it anew with them"
	}
	return errs.Wrap(err, errs.Internal, "the memory image of %s %s is damaged: its files on the storage pool are not those that were "+
		"written; %s", what, of, remedy)
}

// readImage reads the files of a memory image, each at the same time as the others, and
// calls also for each. It reads none that is known to be one of those in as.
func (s *Snapshots) readImage(ctx context.Context, dir string, as []record.MemoryFile, also func(*os.File) error) (
	[]record.MemoryFile, error,
) {
	entries, err := os.ReadDir(dir) // sorted
	if err != nil {
		return nil, err
	}
	files, failed := make([]record.MemoryFile, len(entries)), make([]error, len(entries))
	var wg sync.WaitGroup
	for i, e := range entries {
		wg.Go(func() { files[i], failed[i] = s.readFile(ctx, filepath.Join(dir, e.Name()), as, also) })
	}
	wg.Wait()
	return files, errors.Join(failed...)
}

// castagnoli is the CRC-32C of RFC 3720, which CPUs have instructions for: 100 MB take some
// 10 ms, and a restore waits for them.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (s *Snapshots) readFile(ctx context.Context, path string, as []record.MemoryFile, also func(*os.File) error) (
	m record.MemoryFile, err error,
) {
	f, err := os.Open(path)
	if err != nil {
		return m, err
	}
	defer f.Close()
	before, err := stampOf(f)
	if err != nil {
		return m, err
	}
	if m, ok := s.whole.at(path, before); ok && slices.Contains(as, m) {
		return m, nil
	}
	sum := crc32.New(castagnoli)
	n, err := io.CopyBuffer(sum, cancelable{ctx, f}, make([]byte, 1<<20))
	if err == nil {
		err = also(f)
	}
	m = record.MemoryFile{Name: filepath.Base(path), Bytes: n, Sum: sum.Sum32()}
	if after, serr := stampOf(f); err == nil && serr == nil && after == before && time.Since(time.Unix(0, after.change)) > tick {
		s.whole.note(path, before, m)
	}
	return m, err
}

// tick is longer than the kernel may leave the time of a change as it is: a file that was written
// to within it may be written to again without another stamp.
const tick = 20 * time.Millisecond

// A stamp changes whenever a file is written to, or another one takes its place (inode(7)).
type stamp struct {
	dev, ino      uint64
	bytes, change int64
}

func stampOf(f *os.File) (stamp, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return stamp{}, &os.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	return stamp{uint64(st.Dev), st.Ino, st.Size, st.Ctim.Nano()}, nil
}

// known is what this process has read of memory images: a fork restores one of them many times
// within a second.
type known struct {
	mu    sync.Mutex
	files map[string]readAt // by path
}

type readAt struct {
	stamp stamp
	file  record.MemoryFile
}

func (k *known) at(path string, now stamp) (record.MemoryFile, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	r, ok := k.files[path]
	return r.file, ok && r.stamp == now
}

func (k *known) note(path string, at stamp, m record.MemoryFile) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.files == nil {
		k.files = map[string]readAt{}
	}
	k.files[path] = readAt{at, m}
}

// forget drops what is known of the files in dir.
func (k *known) forget(dir string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.files, func(path string, _ readAt) bool { return filepath.Dir(path) == dir })
}

// cancelable reads until ctx ends.
type cancelable struct {
	ctx context.Context
	r   io.Reader
}

func (c cancelable) Read(b []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(b)
}

// DeleteMemory removes a memory image, also half of one; absent is fine.
func (s *Snapshots) DeleteMemory(_ context.Context, of string) error {
	dir, err := s.pool.memoryDir(of)
	if err == nil {
		s.whole.forget(dir)
		err = os.RemoveAll(dir)
	}
	return err
}

// ListHibernated lists the sandboxes that have a memory image, or half of one.
func (s *Snapshots) ListHibernated(context.Context) ([]string, error) {
	return s.pool.memories(record.IsID)
}

// memories lists the ids of one kind that have a memory image, or half of one.
func (p *Pool) memories(kind func(id string) bool) (ids []string, err error) {
	entries, err := os.ReadDir(filepath.Join(p.dir, pool.MemoryDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if kind(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, err
}
