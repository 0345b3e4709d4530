package output

import (
	"syscall"
	"testing"
)

// BenchmarkYes is a command that prints without end, in pieces of a wide pipe: the ring wraps again and
// again. cpu-ns is what one piece costs in CPU time, which a busy host does not change much.
func BenchmarkYes(b *testing.B) {
	r := NewBooks(b.TempDir(), OfAll, OfCommand, func() {}).NewRing("x")
	piece := make([]byte, widePipe)
	b.SetBytes(widePipe)
	var before, after syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &before) //nolint:errcheck // never fails
	for b.Loop() {
		r.Write(piece) //nolint:errcheck // never fails
	}
	syscall.Getrusage(syscall.RUSAGE_SELF, &after) //nolint:errcheck // never fails
	used := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
	b.ReportMetric(float64(used)/float64(b.N), "cpu-ns/op")
}
