// Package dump asks the kernel for listings that change while they are read.
package dump

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// tries is how often one listing is read. Each failed try means some microseconds of
// changes on the host, and eight of them in a row were never seen.
const tries = 8

// Again calls ask until no change has interrupted its answer, at most tries times, and
// returns the last answer.
func Again[T any](ask func() (T, error)) (all T, err error) {
	for range tries {
		if all, err = ask(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}
