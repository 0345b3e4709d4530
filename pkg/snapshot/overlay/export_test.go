package overlay

import (
	"errors"
	"os"
)

// ProbeAsLinux61 is Probe on a kernel that wants attached clones.
func ProbeAsLinux61(dir string, users *os.File) (how string, err error) {
	return probe(dir, users, func(*Mount) error { return errors.New("as before Linux 6.15") })
}
