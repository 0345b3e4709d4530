package btrfs

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"golang.org/x/sys/unix"
)

// label is the label of the file systems that sandboxd makes.
const label = "sandboxd"

func mkfsProgram() (string, error) {
	path, err := exec.LookPath("mkfs.btrfs")
	if err != nil {
		err = errs.Wrap(err, errs.Unsupported, "mkfs.btrfs is missing: apt-get install btrfs-progs, or set pool = %q, which cannot "+
			"limit disks", pool.Plain)
	}
	return path, err
}

// mkfs makes a btrfs in a file or on a device. It refuses one that holds anything.
//
// Its metadata has one copy, as that of any file on the disk below. A node is
// one page, the least that every kernel takes: an fsync writes the leaves that changed. (Measured:
// with 16 KiB, the default, an fsync takes a quarter longer, and creating 30,000 files a
// fifth.)
func mkfs(ctx context.Context, path string, options ...string) error {
	program, err := mkfsProgram()
	if err != nil {
		return err
	}
	args := append([]string{
		"-q", "--metadata", "single", "--label", label,
		"--nodesize", strconv.Itoa(os.Getpagesize()),
	}, options...)
	// It ends with this process. The kernel takes the death of this thread for that.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, program, append(args, path)...)
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("mkfs.btrfs %s: %w: %s", path, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// mount mounts a btrfs of sandboxd's.
func mount(device, dir, options string) error {
	if err := unix.Mount(device, dir, "btrfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, options); err != nil {
		return err
	}
	return os.Chmod(dir, 0o700)
}
