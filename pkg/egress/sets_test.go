package egress

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestPaced: flushes that are asked for all the time take a tenth of it at most. The first
// one, and one after a quiet time, begin at once.
func TestPaced(t *testing.T) {
	for name, c := range map[string]struct{ took, period time.Duration }{
		"an ordinary table": {6 * time.Millisecond, 66 * time.Millisecond},
		"a huge table":      {2 * time.Second, 2*time.Second + flushPause},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { pacedBy(t, c.took, c.period) })
		})
	}
}

func pacedBy(t *testing.T, took, period time.Duration) {
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	var begun []time.Duration // since start
	var flusher sync.WaitGroup
	wake, start := make(chan struct{}, 1), time.Now()
	flusher.Go(func() {
		paced(ctx, wake, func() {
			mu.Lock()
			begun = append(begun, time.Since(start))
			mu.Unlock()
			time.Sleep(took)
		})
	})
	// flushed asks for flushes during d, and returns when they began.
	flushed := func(d time.Duration) []time.Duration {
		for end := time.Now().Add(d); ; time.Sleep(time.Millisecond) {
			select {
			case wake <- struct{}{}:
			default:
			}
			if !time.Now().Before(end) {
				break
			}
		}
		time.Sleep(2 * period)
		mu.Lock()
		defer mu.Unlock()
		all := begun
		begun, start = nil, time.Now()
		return all
	}
	for _, part := range []string{"at first", "after a quiet time"} {
		got := flushed(10 * period)
		if got[0] != 0 {
			t.Errorf("%s, the first flush began after %s, want at once", part, got[0])
		}
		if n := len(got); n < 10 || n > 12 {
			t.Errorf("%s, %d flushes that take %s began in %s, want one in %s", part, n, took, 10*period, period)
		}
	}
	cancel()
	flusher.Wait()
	if len(begun) != 1 {
		t.Errorf("%d flushes at the end, want 1: what is pending must be flushed", len(begun))
	}
}
