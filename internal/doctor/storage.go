package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/btrfs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool/project"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

// leastFree is how many bytes the file system of the state directory should have
// free, for records, layers and copies of the state.
const leastFree = 1 << 30

var storageChecks = []check{
	{
		name: "state", protects: "records, image layers and the pool file", root: true,
		run: func(_ context.Context, h *host) Finding {
			dir := existing(h.cfg.StateDir)
			free, _, err := space(dir)
			if err != nil {
				return skipped("%v", err)
			}
			need := int64(leastFree)
			if made, err := tree.Exists(pool.Image(h.cfg.StateDir)); err == nil && !made && h.pool() == pool.BtrfsLoop {
				size, err := h.poolSize() // the daemon will allocate it in full
				if err != nil {
					return fail("free space, or name a disk in storage.device", "%v", err)
				}
				if need += size; free < need && h.cfg.Storage.PoolSize > 0 {
					return fail("free space, or lower storage.pool_size", "%s has %d MiB free, and storage.pool_size needs %d MiB",
						dir, free>>20, size>>20)
				}
			}
			if free < need {
				return warn("free space; see sandboxctl system df", "%s has %d MiB free: creates and image builds will soon fail", dir,
					free>>20)
			}
			return ok("%s has %d MiB free", dir, free>>20)
		},
	},
	{
		name: "pool", protects: "the data that sandboxes write", root: true,
		run: func(_ context.Context, h *host) Finding {
			dir := filepath.Join(h.cfg.StateDir, "pool")
			kind, what := h.pool(), dir
			switch kind {
			case pool.Plain:
				return ok("a plain directory, %s", dir)
			case pool.Project:
				if err := project.Check(existing(dir)); err != nil {
					return fail("mount "+dir+" with project quotas, or set storage.pool", "%v", err)
				}
			case pool.BtrfsLoop:
				what = pool.Image(h.cfg.StateDir)
				if made, err := tree.Exists(what); err == nil && !made {
					size, err := h.poolSize()
					if err != nil {
						return skipped("%v", err) // the check of the state has said so
					}
					return ok("created at the first start, %d MiB", size>>20)
				}
				if _, err := os.Stat(what); err != nil {
					to, _ := os.Readlink(what)
					return fail("mount the disk of "+to, "the pool was moved and is not there: %v", err)
				}
			}
			var st unix.Statfs_t
			if err := unix.Statfs(existing(dir), &st); err != nil {
				return skipped("statfs %s: %v", dir, err)
			}
			switch is := st.Type == unix.BTRFS_SUPER_MAGIC; {
			case !is && kind == pool.BtrfsLoop:
				return ok("%s is not mounted; the daemon mounts it", what)
			case !is && kind == pool.Btrfs && h.cfg.Storage.Device != "":
				return ok("%s is not mounted; the daemon mounts it", h.cfg.Storage.Device)
			case !is && kind == pool.Btrfs:
				return fail("mount a btrfs on "+dir+", or set storage.pool = \"auto\"",
					"the pool must be a btrfs, and none is mounted on %s", dir)
			}
			if st.Flags&unix.ST_RDONLY != 0 {
				return fail("stop sandboxd; umount "+dir+"; check the file system of "+what,
					"the pool is read-only: file systems become so after an I/O error; dmesg shows the error")
			}
			if used := 100 - int64(st.Bavail)*100/int64(max(st.Blocks, 1)); used > 90 {
				return warn("sandboxctl system df; delete sandboxes, or sandboxd pool grow", "the pool is %d %% full: writes in "+
					"sandboxes will soon fail",
					used)
			}
			return ok("%s: %s, %d MiB free%s", kind, what, int64(st.Bavail)*st.Bsize>>20, readiness(kind, what))
		},
	},
	backups,
	drills,
}

// readiness says how much of a pool in a file was written once.
func readiness(kind, image string) string {
	if kind != pool.BtrfsLoop {
		return ""
	}
	written, size, err := btrfs.Written(image)
	if err != nil || size == 0 {
		return ""
	}
	return fmt.Sprintf(", %d %% ready (the first write to the rest is slow; the daemon writes to free blocks in the background)",
		written*100/size)
}

// poolSize is how large the daemon will make a pool in a file.
func (h *host) poolSize() (int64, error) {
	if n := int64(h.cfg.Storage.PoolSize); n > 0 {
		return n, nil
	}
	return btrfs.SizeFor(existing(h.cfg.StateDir))
}

// pool is the kind of pool that the daemon uses.
func (h *host) pool() string {
	kind, err := pool.Kind(h.cfg.StateDir, h.cfg.Storage.Pool)
	if err != nil { // the state directory is unreadable, which its own check reports
		return h.cfg.Storage.Pool
	}
	return kind
}

func space(dir string) (free, total int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize, nil
}
