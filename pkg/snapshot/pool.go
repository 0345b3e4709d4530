package snapshot

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"golang.org/x/sys/unix"
)

// Pool is the storage pool in use. Disks, snapshots and volumes are directories in
// it, which they make and destroy by its driver.
type Pool struct {
	driver pool.Driver
	dir    string
	id     string                              // random name
	trash  chan struct{}                       // held while the trash is emptied
	bg     *sync.WaitGroup                     // work in the background
	down   func(since time.Time) time.Duration // see Config.Down
}

// openPool takes the pool at dir into use. The layers are in a directory that exists.
func openPool(ctx context.Context, d pool.Driver, dir, layers string, bg *sync.WaitGroup) (*Pool, error) {
	if err := d.Open(ctx, dir); err != nil {
		return nil, fmt.Errorf("open storage pool %s: %w", dir, err)
	}
	if err := d.CheckLayers(layers); err != nil {
		return nil, fmt.Errorf("open storage pool %s: %w", dir, err)
	}
	return &Pool{driver: d, dir: dir, trash: make(chan struct{}, 1), bg: bg}, nil
}

// prepare makes the directories and files of a pool that are no disks, snapshots or
// volumes.
func (p *Pool) prepare() (err error) {
	for _, d := range []string{pool.LostDir, pool.TrashDir, pool.MemoryDir} {
		if err := os.Mkdir(filepath.Join(p.dir, d), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := p.emptyBackup(); err != nil {
		return err
	}
	p.id, err = readOrMakeID(p.dir)
	return err
}

// emptyBackup destroys what a killed backup or restore has left.
func (p *Pool) emptyBackup() error {
	dir := filepath.Join(p.dir, pool.BackupDir)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		err = errors.Join(err, p.driver.Destroy(filepath.Join(dir, e.Name())))
	}
	return err
}

// backupPath is a path for a backup or a restore, where nothing is.
func (p *Pool) backupPath(id string) (string, error) {
	dir := filepath.Join(p.dir, pool.BackupDir)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	path := filepath.Join(dir, id)
	return path, p.driver.Destroy(path)
}

// freezes reports whether the pool can freeze a disk in a moment.
func (p *Pool) freezes() bool {
	return p.driver.Kind() == pool.Btrfs || p.driver.Kind() == pool.BtrfsLoop
}

// still calls f with the files of a disk or volume: as of one moment if the pool can freeze and has
// room for that, else as they change meanwhile.
func (p *Pool) still(ctx context.Context, dir string, f func(dir string) error) error {
	if !p.freezes() {
		return f(dir)
	}
	moment, err := p.backupPath(filepath.Base(dir))
	if err == nil {
		err = p.driver.Freeze(ctx, dir, moment)
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return f(dir)
	}
	if err != nil {
		return err
	}
	return errors.Join(f(moment), p.driver.Destroy(moment))
}

// readOrMakeID returns the random name of the pool, which it chooses at first use.
func readOrMakeID(dir string) (string, error) {
	path := filepath.Join(dir, pool.IDFile)
	b, err := os.ReadFile(path)
	if err == nil {
		return strings.TrimSpace(string(b)), nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	var r [16]byte
	_, _ = rand.Read(r[:]) // never fails since Go 1.24
	id := hex.EncodeToString(r[:])
	if err := durable.Write(path, []byte(id+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("save the id of the pool: %w", err)
	}
	return id, nil
}

// ID is the random name of the pool. If the store of records has another ID, it belongs
// to other disks: then nothing may be swept.
func (p *Pool) ID() string { return p.id }

// Limits reports whether the pool can limit the bytes of a disk.
func (p *Pool) Limits() bool { return p.driver.Kind() != pool.Plain }

// Space returns the free and the total bytes of the pool. What Fill holds is free.
func (p *Pool) Space() (free, total int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(p.dir, &st); err != nil {
		return 0, 0, fmt.Errorf("statfs %s: %w", p.dir, err)
	}
	free, total = int64(st.Bavail)*st.Bsize, int64(st.Blocks)*st.Bsize
	if f, ok := p.driver.(pool.Filler); ok {
		free = min(free+f.Held(), total)
	}
	return free, total, nil
}

// Fill writes once to the free blocks of a pool that is slow at the first write to each
// (see pool.Filler). It returns at once when ctx ends. Close waits for it.
func (p *Pool) Fill(ctx context.Context) error {
	p.bg.Add(1)
	defer p.bg.Done()
	f, ok := p.driver.(pool.Filler)
	if !ok {
		return nil
	}
	if err := f.Fill(ctx); err != nil {
		return fmt.Errorf("fill storage pool %s: %w", p.dir, err)
	}
	return nil
}

// Ready returns how many bytes of the pool have been written once. Other pools than one
// in a file need no filling; for them it fails with errors.ErrUnsupported.
func (p *Pool) Ready() (int64, error) {
	f, ok := p.driver.(pool.Filler)
	if !ok {
		return 0, errors.ErrUnsupported
	}
	return f.Written()
}

// ids lists the names in the pool for which is returns true.
func (p *Pool) ids(is func(name string) bool) (ids []string, err error) {
	entries, err := os.ReadDir(p.dir)
	for _, e := range entries {
		if is(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, err
}

// trashPath is where a disk, snapshot or volume is moved to be destroyed. Ids are
// never used twice, so the name is free.
func (p *Pool) trashPath(id string) string { return filepath.Join(p.dir, pool.TrashDir, id) }

// destroyLater destroys in the background what was moved from dir to the trash. moved
// is the error of that rename: a file system that is full to the last block refuses to
// rename, but can destroy. Absent is fine.
func (p *Pool) destroyLater(dir string, moved error) error {
	switch {
	case moved == nil:
		p.bg.Go(p.emptyTrash)
	case errors.Is(moved, unix.ENOSPC), errors.Is(moved, unix.EDQUOT):
		return p.driver.Destroy(dir)
	case errors.Is(moved, fs.ErrNotExist):
		return nil
	}
	return moved
}

// emptyTrash destroys what is in the trash. The next Sweep reports what it could not
// destroy.
func (p *Pool) emptyTrash() { _ = p.removeTrash(context.Background()) }

func (p *Pool) removeTrash(ctx context.Context) error {
	select {
	case p.trash <- struct{}{}:
		defer func() { <-p.trash }()
	case <-ctx.Done():
		return ctx.Err()
	}
	dir := filepath.Join(p.dir, pool.TrashDir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var all error
	for _, e := range entries {
		all = errors.Join(all, p.driver.Destroy(filepath.Join(dir, e.Name())), ctx.Err())
	}
	return all
}

// strayFor is how long a disk without a record is kept, not counting the time that the host is down.
const strayFor = 24 * time.Hour

// lostPath is where something that becomes a stray now is kept.
func (p *Pool) lostPath(id string) string {
	return filepath.Join(p.dir, pool.LostDir, pool.StrayName(id, time.Now()))
}

// Sweep removes strays of more than 24 h, what a killed daemon left in the trash, and
// what destroyed disks left inside the pool. Strays stay if noSweep is a reason why
// nothing may be swept.
func (p *Pool) Sweep(ctx context.Context, noSweep string) error {
	var err error
	if noSweep == "" {
		err = p.sweepStrays()
	}
	if err = errors.Join(err, p.removeTrash(ctx), p.driver.Sweep(ctx)); err != nil {
		return fmt.Errorf("sweep storage pool: %w", err)
	}
	return nil
}

// clocked is earlier than any release of sandboxd: a clock that shows an earlier time
// was not set.
var clocked = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)

func (p *Pool) sweepStrays() error {
	dir := filepath.Join(p.dir, pool.LostDir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		id, since := pool.CutStray(e.Name())
		if since.IsZero() || !record.IsID(id) && !record.IsSnapshotID(id) {
			continue // an operator put it there
		}
		path := filepath.Join(dir, e.Name())
		switch age := time.Since(since); {
		case age < 0, since.Before(clocked):
			// It came there while the clock was wrong. Its day begins now.
			err = errors.Join(err, os.Rename(path, p.lostPath(id)))
		case age-p.down(since) >= strayFor:
			err = errors.Join(err, p.driver.Destroy(path))
		}
	}
	return err
}

// Lost returns the ids of the disks and snapshots in lost+found.
func (p *Pool) Lost(context.Context) (ids []string, err error) {
	entries, err := os.ReadDir(filepath.Join(p.dir, pool.LostDir))
	for _, e := range entries {
		if id, since := pool.CutStray(e.Name()); !since.IsZero() && (record.IsID(id) || record.IsSnapshotID(id)) {
			ids = append(ids, id)
		}
	}
	return ids, err
}

// poolFull makes errs.Exhausted of err if the pool is full.
func poolFull(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errs.Wrap(err, errs.Exhausted, "the storage pool is full: delete sandboxes or snapshots, or grow the pool (sandboxd "+
			"pool grow)")
	}
	return err
}
