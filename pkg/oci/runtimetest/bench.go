package runtimetest

import (
	"slices"
	"testing"
	"time"
)

// Bench measures starts: back to back, and with a pause before each, like the starts of
// a single user on an idle host. Namespaces, cgroup and root file system exist already.
// Run it with -benchtime=40x.
func Bench(b *testing.B, name string, open Open) {
	h := NewHost(b, name)
	rt := open(b, h)
	b.Cleanup(func() { must(b, rt.Close()) })
	for _, c := range []struct {
		name  string
		pause time.Duration
	}{{"b2b", 0}, {"gap", 200 * time.Millisecond}} {
		b.Run(c.name, func(b *testing.B) {
			var started, answered []time.Duration
			for b.Loop() {
				b.StopTimer()
				box := h.NewBox(b, rt)
				time.Sleep(c.pause)
				b.StartTimer()
				t0 := time.Now()
				must(b, box.Start(b.Context()))
				started = append(started, time.Since(t0))
				var pong string
				must(b, box.Ask("ping", &pong))
				answered = append(answered, time.Since(t0))
				b.StopTimer()
				box.Remove(b)
				b.StartTimer()
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(quantile(started, 0.5), "ms-start-p50")
			b.ReportMetric(quantile(started, 0.9), "ms-start-p90")
			b.ReportMetric(quantile(answered, 0.5), "ms-answer-p50")
			b.ReportMetric(quantile(answered, 0.9), "ms-answer-p90")
		})
	}
}

func quantile(d []time.Duration, q float64) float64 {
	slices.Sort(d)
	return float64(d[min(len(d)-1, int(q*float64(len(d))))]) / float64(time.Millisecond)
}
