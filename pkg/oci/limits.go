package oci

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
)

// HostNoFile is the highest Config.NoFile that this process may set: MaxNoFile, or its
// own hard limit if that is lower and CAP_SYS_RESOURCE may be missing.
func HostNoFile() (uint64, error) {
	if weak.Off(weak.NoFile) {
		return 4 * MaxNoFile, nil
	}
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, fmt.Errorf("read RLIMIT_NOFILE: %w", err)
	}
	return min(MaxNoFile, l.Max), nil
}
