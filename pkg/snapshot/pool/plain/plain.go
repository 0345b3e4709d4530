// Package plain is the pool in an ordinary directory. It limits nothing and counts
// nothing; snapshots are copies.
package plain

import (
	"context"
	"fmt"
	"os"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

// Pool is a [pool.Driver].
type Pool struct{ pool.Directory }

// New returns the driver. image is where a pool of kind btrfs-loop would be: if
// there is one, Open fails.
func New(image string) *Pool { return &Pool{pool.Directory{Image: image}} }

// Kind is pool.Plain.
func (p *Pool) Kind() string { return pool.Plain }

// Describe warns.
func (p *Pool) Describe() string {
	return fmt.Sprintf("%s: %s, NO limit of disks: one sandbox can fill the host", pool.Plain, p.Dir)
}

// Open takes the directory, on which nothing is mounted.
func (p *Pool) Open(_ context.Context, dir string) error {
	p.Dir = dir
	mounted, err := tree.IsMountPoint(dir)
	if err != nil {
		return err
	}
	if _, err := os.Stat(p.Image); err == nil || mounted {
		return p.LoopPoolError()
	}
	return os.Chmod(dir, 0o700)
}

// Create makes a directory.
func (p *Pool) Create(path string, bytes int64) error {
	if bytes > 0 {
		return p.Limit(path, bytes)
	}
	return os.Mkdir(path, 0o700)
}

// Limit fails with errs.Unsupported.
func (p *Pool) Limit(_ string, bytes int64) error {
	return errs.New(errs.Unsupported, "a disk limit of %s needs a pool with quotas, and the pool of this host is a plain directory: omit "+
		"--disk, or set pool = %q in the daemon's configuration", record.Size(bytes), pool.BtrfsLoop)
}

// Branch copies a snapshot.
func (p *Pool) Branch(ctx context.Context, from, to string, bytes int64) error {
	if err := p.Create(to, bytes); err != nil {
		return err
	}
	return p.Copy(ctx, from, to)
}

// Destroy removes a directory.
func (p *Pool) Destroy(path string) error { return tree.Remove(path) }

// Usage fails with errs.Unsupported.
func (p *Pool) Usage(string) (used, limit int64, err error) {
	return 0, 0, errs.New(errs.Unsupported,
		"a pool that is a plain directory does not measure usage: set pool = %q in the daemon's configuration", pool.BtrfsLoop)
}
