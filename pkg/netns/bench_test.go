package netns

import (
	"context"
	"slices"
	"testing"
	"time"
)

// quantiles reports p50 and p90 in microseconds.
func quantiles(b *testing.B, what string, d []time.Duration) {
	slices.Sort(d)
	b.ReportMetric(float64(d[len(d)/2])/1e3, what+"-p50-us")
	b.ReportMetric(float64(d[len(d)*9/10])/1e3, what+"-p90-us")
}

func BenchmarkLife(b *testing.B) {
	ballast := make([]byte, 60<<20) // a daemon's worth of memory to fork
	for i := 0; i < len(ballast); i += 4096 {
		ballast[i] = 1
	}
	for name, own := range map[string]bool{"net": false, "user+net": true} {
		b.Run(name, func(b *testing.B) {
			m := newManager(b)
			var create, attach, detach, remove, gone []time.Duration
			timed := func(to *[]time.Duration, f func() error) {
				start := time.Now()
				if err := f(); err != nil {
					b.Fatal(err)
				}
				*to = append(*to, time.Since(start))
			}
			ctx := context.Background()
			for i := 0; b.Loop(); i++ {
				id := id(i % 1000)
				timed(&create, func() error { return m.CreateNamespaces(ctx, id, own, inst.UIDBase(1)) })
				timed(&attach, func() error { return m.Attach(ctx, id, addr(1)) })
				timed(&detach, func() error { return m.Detach(ctx, id) })
				timed(&remove, func() error { return m.DeleteNamespaces(ctx, id) })
				timed(&gone, func() error { return m.Gone(ctx, id) })
			}
			quantiles(b, "create", create)
			quantiles(b, "attach", attach)
			quantiles(b, "detach", detach)
			quantiles(b, "delete", remove)
			quantiles(b, "gone", gone)
		})
	}
	_ = ballast[0]
}
