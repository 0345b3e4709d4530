// Package pool defines what a storage pool does, for the package above that keeps
// disks on one, and for the drivers below: pool/btrfs, pool/project and pool/plain.
//
// # Words
//
// A pool is a directory of the host with everything that sandboxes write. Its kind
// says what the file system there can do: limit bytes, limit files, share blocks.
//
// A disk is a directory of the pool in which one sandbox writes. A volume, which
// sandboxes share, is a disk to the driver.
//
// A limit is how many bytes a disk may hold; 0 is no limit. Usage is how many it is
// charged with, including writes that are still in memory.
//
// A snapshot is a copy of a disk, taken at one moment, that nobody changes
// afterwards. To freeze a disk is to take a snapshot of it. To branch a snapshot is
// to make a disk that begins with its files.
//
// # Example
//
// A disk dx gets a snapshot snap-s, from which another disk dy is made:
//
//	d.Open(ctx, dir)                                 // the pool is there
//	d.Create(dir/dx, 1<<30)                          // a sandbox writes to it
//	d.Flush(ctx)                                     // the sandbox still runs
//	d.Freeze(ctx, dir/dx, dir/snap-s)                // the sandbox stands still for this
//	d.Settle(ctx)                                    // it runs again; now snap-s survives a power cut
//	d.Branch(ctx, dir/snap-s, dir/dy, 1<<30)         // dy needs snap-s no longer
//	d.Unfreeze(dir/snap-s)                           // so that it can be renamed away
//	os.Rename(dir/snap-s, dir/.trash/snap-s)
//	d.Destroy(dir/.trash/snap-s)
//	d.Close()                                        // only when nothing is mounted from it
//
// What surprises: a driver may leave half of what it was making when it fails or is
// killed. Destroy takes half a disk and half a snapshot as well as a whole one.
package pool

import "context"

// A Driver is one kind of pool. Paths are absolute and below the directory of the
// pool. Methods may be called at the same time for different paths.
type Driver interface {
	// Kind is one of the kinds below, but for Auto.
	Kind() string
	// Describe says in one line, for people, where the pool is and what it limits.
	Describe() string
	// Open makes the pool usable at dir. At first use it makes the pool, and after
	// a reboot it mounts it.
	Open(ctx context.Context, dir string) error
	// CheckLayers refuses a directory of image layers that must not be in one overlay
	// with disks of this pool.
	CheckLayers(dir string) error
	// Create makes the directory of a disk and limits it to bytes. A pool that cannot
	// limit fails with errs.Unsupported, unless bytes is 0.
	Create(path string, bytes int64) error
	// Limit changes the limit of a disk.
	Limit(path string, bytes int64) error
	// Flush writes out what would make Freeze slow.
	Flush(ctx context.Context) error
	// Freeze copies the disk at path from, which does not change meanwhile, into a snapshot at path to.
	Freeze(ctx context.Context, from, to string) error
	// Settle returns when everything frozen so far survives a crash of the host.
	Settle(ctx context.Context) error
	// Sync returns when the disk at path, which does not change meanwhile, survives a crash of the host.
	Sync(ctx context.Context, path string) error
	// Branch makes a disk at path to from the snapshot at path from, and limits it to bytes.
	Branch(ctx context.Context, from, to string, bytes int64) error
	// Unfreeze lets a snapshot be renamed. Without one it is fs.ErrNotExist.
	Unfreeze(path string) error
	// Destroy removes a disk or a snapshot with everything in it; absent is fine.
	Destroy(path string) error
	// Usage returns the bytes that a disk is charged with, and its limit. A pool that
	// does not count fails with errs.Unsupported.
	Usage(path string) (used, limit int64, err error)
	// Sweep removes what destroyed disks left inside the file system.
	Sweep(ctx context.Context) error
	// Close takes the pool out of use: unmounts it, if Open has mounted it.
	Close() error
}

// A Filler is a Driver whose blocks are slow at their first write.
type Filler interface {
	// Fill writes to the free blocks, all but 30 to 44 % of the pool, while it does not
	// disturb sandboxes. It returns at once when ctx ends.
	Fill(ctx context.Context) error
	// Held returns how many bytes a Fill that goes on has taken. It gives them back when
	// sandboxes need them.
	Held() int64
	// Written returns how many bytes have been written once; errors.ErrUnsupported: that
	// is not known.
	Written() (int64, error)
}
