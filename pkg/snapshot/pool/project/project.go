// Package project is the pool in a directory of an xfs or ext4 with project quotas.
//
// The files of each disk carry a project id of their own, which has a limit of
// bytes and of files. Guests cannot change it: in their user namespace the kernel
// refuses, and gVisor passes no such ioctl on. Snapshots are copies (on xfs they
// share blocks) and belong to no project.
package project

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

// Pool is a [pool.Driver].
type Pool struct {
	pool.Directory
	mu sync.Mutex // held from the choice of a project id until it has a limit
}

// New returns the driver. image is where a pool of kind btrfs-loop would be: if
// there is one, Open fails.
func New(image string) *Pool { return &Pool{Directory: pool.Directory{Image: image}} }

// Every disk may have minFiles files, and one for each bytesPerFile of its limit.
const (
	bytesPerFile = 8 << 10
	minFiles     = 1 << 16
)

// Kind is pool.Project.
func (p *Pool) Kind() string { return pool.Project }

// Describe says where the pool is.
func (p *Pool) Describe() string {
	return fmt.Sprintf("%s: %s, project quotas of bytes and files", pool.Project, p.Dir)
}

// Open fails unless the file system of dir limits projects.
func (p *Pool) Open(_ context.Context, dir string) error {
	p.Dir = dir
	if _, err := os.Stat(p.Image); err == nil {
		return p.LoopPoolError()
	}
	if err := Check(dir); err != nil {
		return err
	}
	return os.Chmod(dir, 0o700)
}

// Create makes a directory with a project of its own.
func (p *Pool) Create(path string, bytes int64) error {
	if err := p.make(path); err != nil {
		return err
	}
	return p.Limit(path, bytes)
}

// make makes a directory with a project id that nothing else has.
func (p *Pool) make(path string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	return tree.WithDir(path, func(fd int) error {
		for {
			id := 1<<20 + rand.Uint32N(1<<30) // people use low ones
			q, err := getQuota(fd, id)
			if err != nil {
				return err
			}
			if q.used > 0 || q.files > 0 || q.limit > 0 || q.maxFiles > 0 {
				continue
			}
			return setProject(fd, id) // from here on the directory itself counts as a file of the project
		}
	})
}

// Limit limits the bytes of a disk's project, and its files.
func (p *Pool) Limit(path string, bytes int64) error {
	return tree.WithDir(path, func(fd int) error {
		id, err := projectOf(fd)
		if err != nil {
			return err
		}
		q := quota{limit: bytes}
		if bytes > 0 {
			q.maxFiles = minFiles + bytes/bytesPerFile
		}
		return setQuota(fd, id, q)
	})
}

// Branch copies a snapshot into a directory with a project of its own.
func (p *Pool) Branch(ctx context.Context, from, to string, bytes int64) error {
	if err := p.make(to); err != nil {
		return err
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := p.Copy(ctx, filepath.Join(from, e.Name()), filepath.Join(to, e.Name())); err != nil {
			return err
		}
	}
	// The limit comes last: if it is below the size of the snapshot, that means only that
	// nothing more can be written.
	return p.Limit(to, bytes)
}

// Destroy removes the limit first. If the daemon is killed in between, a directory is
// left, which is destroyed later, and never a quota without a directory.
func (p *Pool) Destroy(path string) error {
	if there, err := tree.Exists(path); err != nil || !there {
		return err
	}
	err := tree.WithDir(path, func(fd int) error {
		id, err := projectOf(fd)
		if err != nil || id == 0 { // a snapshot
			return err
		}
		return setQuota(fd, id, quota{})
	})
	return errors.Join(err, tree.Remove(path))
}

// If a disk has no room for more files, its Usage is its limit. Snapshots are not
// counted.
func (p *Pool) Usage(path string) (used, limit int64, err error) {
	err = tree.WithDir(path, func(fd int) error {
		id, err := projectOf(fd)
		if err != nil {
			return err
		}
		if id == 0 {
			return errs.New(errs.Unsupported, "%s belongs to no project, like all snapshots on this pool: its usage is not measured", path)
		}
		q, err := getQuota(fd, id)
		used, limit = q.used, q.limit
		if q.maxFiles > 0 && q.files >= q.maxFiles {
			used = max(used, limit) // full, of files
		}
		return err
	})
	return used, limit, err
}
