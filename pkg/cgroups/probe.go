package cgroups

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// Probe finds what Open would find: the mode, and whether the kernel limits swap. If
// there is a v2 tree, it starts a process directly in a new group there and removes the
// group.
func Probe() (mode string, swap bool, err error) {
	lay, err := detect()
	if err != nil {
		return "", false, err
	}
	memory := lay.of["memory"]
	// The root of a v2 tree has no limits; since 6.1, CONFIG_MEMCG alone provides swap
	// limits.
	swap = memory.v2 || unix.Access(memory.mount+"/memory.memsw.limit_in_bytes", unix.F_OK) == nil
	if lay.v2 != nil {
		err = startInside(lay.v2.mount)
	}
	return lay.mode(), swap, err
}

func startInside(mount string) (err error) {
	dir, err := os.MkdirTemp(mount, fmt.Sprintf("sandboxd-probe-%d-", os.Getpid()))
	if err != nil {
		return fmt.Errorf("make a cgroup below %s: %w", mount, err)
	}
	defer func() {
		if rerr := unix.Rmdir(dir); err == nil && rerr != nil {
			err = fmt.Errorf("remove cgroup %s: %w", dir, rerr)
		}
	}()
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	cmd := exec.Command("/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("start a process in cgroup %s (CLONE_INTO_CGROUP): %w", dir, err)
	}
	return nil
}
