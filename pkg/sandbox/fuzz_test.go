package sandbox

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// FuzzCursor: a client that comes back gets each event that it has not read once, in
// order, and hears of those that are forgotten; another cursor stands for the beginning.
func FuzzCursor(f *testing.F) {
	f.Add("", uint16(3), uint16(2))
	f.Add("0-5", uint16(eventsKept+5), uint16(1))
	f.Add("ffffffffffffffff-9223372036854775808", uint16(1), uint16(9))
	f.Fuzz(func(t *testing.T, cursor string, sent, read uint16) {
		sent %= eventsKept + 20
		b := &bus{epoch: 0x1234}
		for i := range int(sent) {
			b.publish("running", &record.Record{ID: fmt.Sprint(i)})
		}
		own := fmt.Sprintf("1234-%d", read)
		for _, c := range []string{own, cursor} {
			if c == "" {
				continue
			}
			ctx, cancel := context.WithCancel(t.Context())
			ch := b.since(ctx, c, time.Time{})
			first := <-ch
			var after, next int
			_, err := fmt.Sscanf(first.Cursor, "1234-%d", &after)
			if err != nil || after < 0 || after > int(sent) || first.Type != EventCursor {
				t.Fatalf("%q of %d events: %+v, %v", c, sent, first, err)
			}
			if c == own && after != min(int(read), int(sent)) {
				t.Fatalf("%q of %d events is number %d", c, sent, after)
			}
			next = after
			for len(ch) > 0 {
				e := <-ch
				if e.Type == EventLost && next == after && int(sent) > eventsKept && after < int(sent)-eventsKept {
					next = int(sent) - eventsKept
					continue
				}
				if e.ID != fmt.Sprint(next) {
					t.Fatalf("%q of %d events: %+v, want number %d", c, sent, e, next)
				}
				next++
			}
			if next != int(sent) {
				t.Fatalf("%q ends at %d of %d events", c, next, sent)
			}
			cancel()
		}
	})
}
