package year

import (
	"math"
	"strings"
	"testing"
)

// TestFlat: a store that grows by a little each day is found, and one that turns over is not.
func TestFlat(t *testing.T) {
	m := Measure{Name: "files", Bound: 3}
	slow := Measure{Name: "memory", Bound: 3, Slow: true}
	days := func(n int, f func(i int) float64) (all []float64) {
		for i := range n {
			all = append(all, f(i))
		}
		return all
	}
	for name, c := range map[string]struct {
		days []float64
		want string
	}{
		"still":                       {days(365, func(int) float64 { return 40 }), ""},
		"none":                        {days(12, func(int) float64 { return 0 }), ""},
		"one day":                     {days(1, func(int) float64 { return 7 }), ""},
		"turns over in three days":    {days(12, func(i int) float64 { return 40 + 10*float64(i%3) }), ""},
		"fills in the first quarter":  {days(365, func(i int) float64 { return math.Min(float64(i), 80) }), ""},
		"shrinks":                     {days(365, func(i int) float64 { return 400 - float64(i) }), ""},
		"a file each day":             {days(12, func(i int) float64 { return 40 + float64(i) }), "files grows by 1 a day"},
		"a file in thirty days":       {days(365, func(i int) float64 { return 40 + float64(i/30) }), "files grows by 0.03"},
		"a file a day, and turnover":  {days(60, func(i int) float64 { return 40 + 10*float64(i%3) + float64(i) }), "grows by 1"},
		"grows in the last half only": {days(365, func(i int) float64 { return 40 + math.Max(0, float64(i-180)/10) }), "grows by"},
	} {
		err := m.Flat(c.days)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	grows := days(months, func(i int) float64 { return float64(i) })
	if slow.Flat(grows) == nil || slow.Flat(grows[:months-1]) != nil {
		t.Error("what is slow is judged by few days, or not by many")
	}
}
