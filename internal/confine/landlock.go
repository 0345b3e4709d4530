package confine

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// LandlockVersion is the version of Landlock that this kernel has; 0: it has none, or it
// is switched off. (landlock_create_ruleset(2))
func LandlockVersion() int {
	v, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(v)
}

// LeastLandlock is the first version that allows hard links between directories, which
// layers have. (Linux 5.19)
const LeastLandlock = 2

// What a child may do below its root: everything but to execute, and to make sockets,
// pipes and devices. Whiteouts of layers are character devices 0:0; the mount is nodev.
const (
	ofFiles = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR |
		unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG |
		unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_SYM | unix.LANDLOCK_ACCESS_FS_MAKE_CHAR |
		unix.LANDLOCK_ACCESS_FS_REFER
	ofNobody = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_MAKE_FIFO |
		unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK
)

// lock restricts this thread, and the program that it executes, with Landlock: files below
// root only, and where the kernel's version has it no network and no signals to others.
// The descriptor self is the program. A kernel without Landlock is no error: the child
// then has its mounts, namespaces and filter only.
// Preconditions: no_new_privs is set.
func lock(self int, root string) error {
	version := LandlockVersion()
	if version < LeastLandlock {
		return nil
	}
	files := uint64(ofFiles)
	rules := unix.LandlockRulesetAttr{Handled_access_fs: ofFiles | ofNobody}
	if version >= 3 {
		files |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
		rules.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if version >= 4 {
		rules.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
	}
	if version >= 5 {
		rules.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	if version >= 6 {
		rules.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	}
	// A kernel takes a structure that is larger than its own if the rest is zero.
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&rules)), unsafe.Sizeof(rules), 0)
	if errno != 0 {
		return os.NewSyscallError("landlock_create_ruleset", errno)
	}
	defer unix.Close(int(fd)) //nolint:errcheck // nothing is written
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the root: %w", err)
	}
	defer unix.Close(dir) //nolint:errcheck // as above
	err = errors.Join(
		allow(fd, dir, files),
		allow(fd, self, unix.LANDLOCK_ACCESS_FS_EXECUTE|unix.LANDLOCK_ACCESS_FS_READ_FILE),
	)
	if err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return os.NewSyscallError("landlock_restrict_self", errno)
	}
	return nil
}

// allow adds a rule for a file, or a directory and all below it.
func allow(ruleset uintptr, at int, access uint64) error {
	rule := unix.LandlockPathBeneathAttr{Allowed_access: access, Parent_fd: int32(at)}
	if _, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, ruleset, unix.LANDLOCK_RULE_PATH_BENEATH,
		uintptr(unsafe.Pointer(&rule)), 0, 0, 0); errno != 0 {
		return os.NewSyscallError("landlock_add_rule", errno)
	}
	return nil
}
