package btrfs

import (
	"bytes"
	"context"
	"fmt"
	"os"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/tree"
)

// DiskPool is a [pool.Driver] on a whole block device, such as a disk or a logical
// volume. It makes a btrfs on one that is blank, and mounts it.
type DiskPool struct {
	Pool
	device string
}

// NewDisk returns the driver. full is as in New.
func NewDisk(device string, full bool) *DiskPool {
	return &DiskPool{Pool: Pool{full: full}, device: device}
}

// Describe also says how it counts.
func (b *DiskPool) Describe() string {
	return fmt.Sprintf("%s: %s, %s", pool.Btrfs, b.device, b.quotas())
}

// Open makes the file system if the device is blank, and mounts it unless something is
// mounted.
func (b *DiskPool) Open(ctx context.Context, dir string) error {
	b.dir = dir
	mounted, err := tree.IsMountPoint(dir)
	if err != nil {
		return err
	}
	if !mounted {
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			return errs.Wrap(err, errs.WrongState, "the pool directory %s is not empty, and storage.device would be mounted over it: "+
				"move its files away", dir)
		}
		if err := b.format(ctx); err != nil {
			return err
		}
		if err := mount(b.device, dir, ""); err != nil {
			return fmt.Errorf("mount %s on %s: %w; dmesg says more", b.device, dir, err)
		}
	}
	return b.begin()
}

// format makes a btrfs, unless the device has one of sandboxd's. mkfs refuses a device
// that has a signature of a file system, a partition table, LVM or RAID.
func (b *DiskPool) format(ctx context.Context) error {
	switch ours, err := labelled(b.device); {
	case err != nil:
		return err
	case ours:
		return nil
	}
	if _, err := mkfsProgram(); err != nil {
		return err
	}
	if err := mkfs(ctx, b.device); err != nil {
		return errs.Wrap(err, errs.WrongState, "storage.device: if nothing on %s is needed, erase it with `wipefs -a %[1]s`", b.device)
	}
	return nil
}

// labelled reports whether a block device has a btrfs of sandboxd's.
func labelled(device string) (bool, error) {
	f, err := os.Open(device)
	if err != nil {
		return false, fmt.Errorf("open storage.device: %w", err)
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || fi.Mode()&os.ModeDevice == 0 || fi.Mode()&os.ModeCharDevice != 0 {
		return false, errs.Wrap(err, errs.Invalid, "storage.device = %q is not a block device", device)
	}
	// struct btrfs_super_block at 64 KiB: the magic at 0x40, the label at 0x12b.
	var super [0x22b]byte
	if _, err := f.ReadAt(super[:], 64<<10); err != nil {
		return false, fmt.Errorf("read storage.device: %w", err)
	}
	name, _, _ := bytes.Cut(super[0x12b:], []byte{0})
	return string(super[0x40:0x48]) == "_BHRfS_M" && string(name) == label, nil
}

// Close unmounts the pool.
func (b *DiskPool) Close() error { return Unmount(b.dir) }
