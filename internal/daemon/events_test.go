package daemon

import (
	"fmt"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
)

// TestRecent: a client that asks for the past gets all of it, or is told that some is
// missing.
func TestRecent(t *testing.T) {
	r := &recent{whole: time.Now()}
	begin := r.whole
	at := func(n int) time.Time { return begin.Add(time.Duration(n) * time.Second) }
	for n := 1; n <= recentEvents; n++ {
		r.note(wire.Event{Time: at(n), ID: fmt.Sprint(n)})
	}
	check := func(since time.Time, lost bool, first, count int) {
		t.Helper()
		past := r.since(since)
		if told := len(past) > 0 && past[0].Type == sandbox.EventLost; told != lost {
			t.Errorf("since %v: lost is %v", since.Sub(begin), told)
		} else if told {
			past = past[1:]
		}
		if len(past) != count || count > 0 && past[0].ID != fmt.Sprint(first) {
			t.Errorf("since %v: %d events, want %d from %d", since.Sub(begin), len(past), count, first)
		}
	}
	check(begin.Add(-time.Hour), true, 1, recentEvents)
	check(begin, false, 1, recentEvents)
	check(at(recentEvents-1), false, recentEvents-1, 2)
	check(at(recentEvents+1), false, 0, 0)
	r.note(wire.Event{Time: at(recentEvents + 1), ID: fmt.Sprint(recentEvents + 1)})
	check(at(1), true, 2, recentEvents)
	check(at(2), false, 2, recentEvents)
}
