package btrfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// attachLoop attaches a file to a free loop device. The device frees itself
// when its last user, the returned file or a mount, is gone.
//
// A file that is attached already keeps its device: it may still be mounted in the
// mount namespace of another process, and two devices over one file are two file
// systems that overwrite each other.
//
// Direct I/O avoids a second copy in the page cache, where the file system below
// can do it.
func attachLoop(image *os.File) (*os.File, error) {
	if dev, err := attachedLoop(image); dev != nil || err != nil {
		return dev, err
	}
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w (is the module loop loaded?)", err)
	}
	defer ctl.Close()
	flags := uint32(unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO)
	for range 64 { // others race for free devices
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("get a free loop device: %w", err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		c := unix.LoopConfig{Fd: uint32(image.Fd()), Size: 4096, Info: unix.LoopInfo64{Flags: flags}}
		copy(c.Info.File_name[:len(c.Info.File_name)-1], image.Name())
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &c)
		if err == nil {
			return dev, nil
		}
		dev.Close()
		switch {
		case errors.Is(err, unix.EBUSY):
		case errors.Is(err, unix.EINVAL) && flags&unix.LO_FLAGS_DIRECT_IO != 0:
			flags &^= unix.LO_FLAGS_DIRECT_IO
		default:
			return nil, fmt.Errorf("attach %s to %s: %w", image.Name(), dev.Name(), err)
		}
	}
	return nil, fmt.Errorf("attach %s: other programs took every free loop device", image.Name())
}

// attachedLoop returns the device that a file is attached to, or nil.
func attachedLoop(image *os.File) (*os.File, error) {
	var want unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &want); err != nil {
		return nil, fmt.Errorf("stat %s: %w", image.Name(), err)
	}
	bound, err := filepath.Glob("/sys/block/loop*/loop")
	if err != nil {
		return nil, err
	}
	for _, dir := range bound {
		dev, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(dir)), os.O_RDWR|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENXIO) || errors.Is(err, os.ErrNotExist) {
			continue // it was freed meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("find the loop device of %s: %w", image.Name(), err)
		}
		// While it is open, it cannot be freed.
		st, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
		if err == nil && st.Device == want.Dev && st.Inode == want.Ino {
			return dev, nil
		}
		dev.Close()
		if err != nil && !errors.Is(err, unix.ENXIO) {
			return nil, fmt.Errorf("find the loop device of %s: status of %s: %w", image.Name(), dev.Name(), err)
		}
	}
	return nil, nil
}
