package snapshot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Devices returns the block devices that the files of sandboxes are on, as "254:0":
// of the pool, which all of them write to, and of the image layers, which they only
// read. Both are whole disks, on which the kernel limits I/O, and may be the same. For
// a directory on no block device, as on NFS, it is "".
func (s *Store) Devices() (pool, layers string, err error) {
	for dir, dev := range map[string]*string{s.Pool.dir: &pool, s.layerDir: &layers} {
		if *dev, err = deviceOf(dir); err != nil {
			return "", "", fmt.Errorf("find the disk of %s: %w", dir, err)
		}
	}
	return pool, layers, nil
}

// deviceOf returns the disk that dir is on, or "" if it is on none.
func deviceOf(dir string) (string, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, 0, unix.STATX_MNT_ID, &st); err != nil {
		return "", &os.PathError{Op: "statx", Path: dir, Err: err}
	}
	major, minor := st.Dev_major, st.Dev_minor
	if major == 0 { // btrfs has numbers of its own; its mount names the device
		source, err := sourceOf(st.Mnt_id)
		if err != nil {
			return "", err
		}
		if !strings.HasPrefix(source, "/dev/") {
			return "", nil
		}
		var dev unix.Stat_t
		if err := unix.Stat(source, &dev); errors.Is(err, fs.ErrNotExist) { // as /dev/root
			return "", nil
		} else if err != nil {
			return "", &os.PathError{Op: "stat", Path: source, Err: err}
		}
		major, minor = unix.Major(dev.Rdev), unix.Minor(dev.Rdev)
	}
	return wholeDisk(fmt.Sprintf("%d:%d", major, minor))
}

// mountedAt returns what is mounted at dir, or "" if dir is no mount point.
func mountedAt(dir string) (string, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_MNT_ID, &st); err != nil {
		return "", &os.PathError{Op: "statx", Path: dir, Err: err}
	}
	if st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 {
		return "", nil
	}
	return sourceOf(st.Mnt_id)
}

// sourceOf finds what is mounted as number id, as mountinfo has it (proc(5)).
func sourceOf(id uint64) (string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		left, right, _ := strings.Cut(line, " - ")
		f := strings.Fields(right)
		if n, _, _ := strings.Cut(left, " "); n == strconv.FormatUint(id, 10) && len(f) > 1 {
			return f[1], nil
		}
	}
	return "", nil
}

// wholeDisk returns the disk that a partition is of, and any other device as it is.
func wholeDisk(dev string) (string, error) {
	dir, err := filepath.EvalSymlinks("/sys/dev/block/" + dev)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(filepath.Join(dir, "partition")); errors.Is(err, fs.ErrNotExist) {
		return dev, nil
	}
	b, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "dev"))
	return strings.TrimSpace(string(b)), err
}
