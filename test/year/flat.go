// Package year simulates a year of a host without hands: days of load, backups, clock jumps,
// upgrades and kill -9, of a few seconds each. `make year` runs it.
//
//	build two versions ─▶ each day: step the clock ─▶ load, kill ─▶ upgrade ─▶ check ─▶ measure ─▶ flat?
//
// What surprises: the clock of the machine stays as it is. The daemons under test are built with
// another clock in Go's runtime (clock_test.go).
package year

import (
	"fmt"
	"math"
)

// A Measure is something that must not grow.
type Measure struct {
	Name  string
	Unit  string  // "B" or ""
	Bound float64 // it may grow by this; if it is Slow, by a tenth of its mean if that is more
	Slow  bool    // memory, which comes to its bound after months: fewer days show nothing
}

// A Trend is the straight line of least squares through the last three quarters of the days, each
// point of it a cycle: what turns over in a cycle has no slope.
type Trend struct {
	Mean   float64
	Slope  float64 // a day
	Growth float64 // over these days
	Bound  float64 // of Growth
}

const (
	months = 90 // days after which what is slow counts

	cycle = 3 // days; everything that rotates does so in as many
	warm  = 4 // the first of so many parts, in which everything comes to its bound, does not count
)

// Fit fits the values of days.
func (m Measure) Fit(days []float64) Trend {
	days = days[len(days)/warm:]
	days = days[len(days)%cycle:]
	var n, sum, sumX, sumXX, sumXY float64
	for at := 0; at+cycle <= len(days); at += cycle {
		y := 0.0
		for _, v := range days[at : at+cycle] {
			y += v / cycle
		}
		n, sum, sumX, sumXX, sumXY = n+1, sum+y, sumX+float64(at), sumXX+float64(at*at), sumXY+float64(at)*y
	}
	if n == 0 {
		return Trend{Bound: m.Bound}
	}
	t := Trend{Mean: sum / n}
	if d := n*sumXX - sumX*sumX; d > 0 {
		t.Slope = (n*sumXY - sumX*sum) / d
	}
	t.Growth, t.Bound = t.Slope*float64(len(days)), m.Bound
	if m.Slow {
		t.Bound = math.Max(m.Bound, t.Mean/10)
	}
	return t
}

// Flat is nil unless the days grow by more than the bound.
func (m Measure) Flat(days []float64) error {
	t := m.Fit(days)
	if t.Growth <= t.Bound || m.Slow && len(days) < months {
		return nil
	}
	return fmt.Errorf("%s grows by %s a day, which is %s in the last three quarters of %d days; the bound is %s, at a mean of %s",
		m.Name, m.Text(t.Slope), m.Text(t.Growth), len(days), m.Text(t.Bound), m.Text(t.Mean))
}

// Text is a value as people read it.
func (m Measure) Text(v float64) string {
	switch a := math.Abs(v); {
	case m.Unit != "B":
		return fmt.Sprintf("%.4g", v)
	case a >= 1<<20:
		return fmt.Sprintf("%.2f MiB", v/(1<<20))
	case a >= 1<<10:
		return fmt.Sprintf("%.2f KiB", v/(1<<10))
	default:
		return fmt.Sprintf("%.3g B", v)
	}
}
