package spec

import (
	"strings"
	"testing"
)

// TestShape: values and levels are counted outside strings, wherever the body is cut.
func TestShape(t *testing.T) {
	for _, c := range []struct {
		name, body, says string
	}{
		{"as many values as there may be", `[` + strings.Repeat(`,`, maxValues-1), ""},
		{"one more", `[` + strings.Repeat(`,`, maxValues), "more than 200000 values"},
		{"empty objects", `[` + strings.Repeat(`{},`, maxValues/2), "more than 200000 values"},
		{"a string", `["` + strings.Repeat(`,[{\"\\`, maxValues) + `"]`, ""},
		{"after a string", `["\\",` + strings.Repeat(`,`, maxValues), "more than 200000 values"},
		{"as deep as it may be", strings.Repeat(`[`, maxDepth), ""},
		{"deeper", strings.Repeat(`[`, maxDepth+1), "deeper than 100 levels"},
		{"side by side", strings.Repeat(`[]`, maxDepth+1), ""},
		{"rules of the largest policy", `{"egress":[` + strings.Repeat(`{"action":"allow","target":"example.com"},`, maxRules), ""},
	} {
		for _, size := range []int{1, 7, len(c.body)} {
			var s Shape
			var err error
			for rest := c.body; rest != "" && err == nil; rest = rest[min(size, len(rest)):] {
				err = s.Add([]byte(rest[:min(size, len(rest))]))
			}
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("%s, in parts of %d bytes: %v, want %q", c.name, size, err, c.says)
			}
		}
	}
}
