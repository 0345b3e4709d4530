// Package dump asks the kernel for listings that change while they are read.
package dump

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// tries is how often one listing is asked for: each time it changed the host was
// busy for some microseconds, and eight of them in a row were not seen.
const tries = 8

// Again calls ask until what it returns was not interrupted by a change, and
// returns the last answer.
func Again[T any](ask func() (T, error)) (all T, err error) {
	for range tries {
		if all, err = ask(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}
