package text

import (
	"strings"
	"testing"
)

func TestGrid(t *testing.T) {
	grid := Grid{
		Header: []string{"ID", "NAME", "STATE", "SINCE"},
		Rows:   [][]string{{"abc", "löb", "Running", "now"}, {"d", "a\x1b[2J", "Failed", "1 hour ago"}},
		Drop:   []string{"SINCE", "NAME"},
	}
	for _, c := range []struct {
		width  int
		colour bool
		want   string
	}{
		{0, false, "ID    NAME       STATE     SINCE\nabc   löb        Running   now\nd     a\\x1b[2J   Failed    1 hour ago\n"},
		{37, false, "ID    NAME       STATE     SINCE\nabc   löb        Running   now\nd     a\\x1b[2J   Failed    1 hour ago\n"},
		{36, false, "ID    NAME       STATE\nabc   löb        Running\nd     a\\x1b[2J   Failed\n"},
		{23, false, "ID    STATE\nabc   Running\nd     Failed\n"},
		{3, true, "ID    STATE\nabc   \x1b[32mRunning\x1b[0m\nd     Failed\n"},
		{
			0, true,
			"ID    NAME       STATE     SINCE\nabc   löb        \x1b[32mRunning\x1b[0m   now\nd     a\\x1b[2J   Failed    1 hour ago\n",
		},
	} {
		grid.Width, grid.Colour = c.width, nil
		if c.colour {
			grid.Colour = func(row int, column string) string {
				if row == 0 && column == "STATE" {
					return "32"
				}
				return ""
			}
		}
		var b strings.Builder
		if err := grid.Write(&b); err != nil || b.String() != c.want {
			t.Errorf("%d columns:\n%s%v, want\n%s", c.width, b.String(), err, c.want)
		}
	}
}
