package snapshot

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// attachLoop attaches a file to a free loop device. The device frees itself
// when its last user, the returned file or a mount, is gone.
//
// Direct I/O spares the second copy in the page cache, where the file system
// below can do it.
func attachLoop(image *os.File) (*os.File, error) {
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
	return nil, fmt.Errorf("attach %s: every free loop device was taken by others", image.Name())
}
