package upgrade

import (
	"context"
	"strings"
	"testing"
	"time"
)

// TestLimit: a version that does not come up in time is undone, and the version of before has more time.
func TestLimit(t *testing.T) {
	s := build(t, t.TempDir())
	var out strings.Builder
	c, err := s.change(&out)
	if err != nil {
		t.Fatal(err)
	}
	c.Limit = 3 * time.Second
	restart, times := c.Restart, []time.Duration{}
	c.Restart = func(ctx context.Context) error {
		end, ok := ctx.Deadline()
		if !ok {
			t.Error("a restart may take for ever")
		}
		if times = append(times, time.Until(end)); len(times) == 1 {
			<-ctx.Done()
			return ctx.Err()
		}
		return restart(ctx)
	}
	want := from + " runs again: it was not found good within 3s: restart the daemon"
	if err := c.Run(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v\n%s", err, out.String())
	}
	if version, err := s.consistent(); err != nil || version != from {
		t.Errorf("%q, %v", version, err)
	}
	if len(times) != 2 || times[0] > c.Limit || times[1] < backLimit-time.Minute {
		t.Errorf("the restarts had %v", times)
	}
}
