package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// plain is a pool in a directory. It limits nothing.
type plain struct {
	image string // where a btrfs pool would lie
	dir   string
}

func (p *plain) kind() string { return PoolPlain }

func (p *plain) describe() string {
	return fmt.Sprintf("%s: %s, NO limit of disks: one sandbox can fill the host", PoolPlain, p.dir)
}

func (p *plain) open(_ context.Context, dir string) error {
	p.dir = dir
	mounted, err := isMountPoint(dir)
	if err != nil {
		return err
	}
	if _, err := os.Stat(p.image); err == nil || mounted {
		return errs.New(errs.WrongState, "the state directory holds a pool of kind %q: set pool = %q, or remove %s and the sandboxes on it", PoolBtrfsLoop, PoolBtrfsLoop, p.image)
	}
	return os.Chmod(dir, 0o700)
}

func (p *plain) close() error { return nil }

func (p *plain) create(path string, bytes int64) error {
	if bytes > 0 {
		return errs.New(errs.Unsupported, "a disk limit of %d bytes needs a pool that can limit, and this host's is a plain directory: leave --disk out, or set pool = %q in the daemon's configuration", bytes, PoolBtrfsLoop)
	}
	return os.Mkdir(path, 0o700)
}

func (p *plain) destroy(path string) error { return removeTree(path) }

func (p *plain) usage(string) (used, limit int64, err error) {
	return 0, 0, errs.New(errs.Unsupported, "a pool that is a plain directory does not count: set pool = %q in the daemon's configuration", PoolBtrfsLoop)
}

func (p *plain) sweep(context.Context) error { return nil }

// exists is what absent-is-fine removals ask.
func exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
