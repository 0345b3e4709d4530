package dump

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestAgain(t *testing.T) {
	other := errors.New("other")
	for _, c := range []struct {
		interrupted int
		then, want  error
		asked       int
	}{
		{0, nil, nil, 1},
		{0, other, other, 1},
		{3, nil, nil, 4},
		{3, other, other, 4},
		{100, nil, netlink.ErrDumpInterrupted, tries},
	} {
		asked := 0
		got, err := Again(func() (int, error) {
			if asked++; asked <= c.interrupted {
				return asked, fmt.Errorf("list: %w", netlink.ErrDumpInterrupted)
			}
			return asked, c.then
		})
		if got != c.asked || asked != c.asked || !errors.Is(err, c.want) {
			t.Errorf("%+v: asked %d times, got %d, %v", c, asked, got, err)
		}
	}
}
