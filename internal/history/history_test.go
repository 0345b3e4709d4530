package history

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestBook(t *testing.T) {
	b := New()
	at := time.Unix(1000, 0)
	tick := func() time.Time { at = at.Add(time.Second); return at }
	b.Note("a", State, tick(), "nobody opened this")
	if e, _ := b.Of("a", State); e != nil {
		t.Errorf("a page that was not opened: %v", e)
	}
	b.Open("a")
	b.Note("a", State, tick(), "creating")
	b.Note("a", Network, tick(), "deny tcp 192.0.2.1:80")
	b.Note("a", State, tick(), "running")
	b.Note("a", Network, tick(), "deny tcp 192.0.2.1:80")
	b.Open("a") // changes nothing
	all, dropped := b.Of("a", State, Operation, Network)
	if len(all) != 3 || dropped != 0 || all[0].Text != "creating" || all[1].Text != "running" || all[2].Times != 2 || all[2].Time != at {
		t.Errorf("%+v, %d", all, dropped)
	}
	b.Forget("a")
	b.Note("a", State, tick(), "late")
	if e, _ := b.Of("a", State); e != nil {
		t.Errorf("what came late brought back %v", e)
	}
}

// TestBounds fills a page as a hostile guest would.
func TestBounds(t *testing.T) {
	b := New()
	b.Open("a")
	b.Note("a", State, time.Now(), "creating")
	for i := range 10_000 {
		b.Note("a", Network, time.Now(), fmt.Sprint(i, "\x1b[2J\n", strings.Repeat("ß", 1<<10)))
	}
	all, dropped := b.Of("a", State, Network)
	if len(all) != maxEntries+1 || dropped != 10_000-maxEntries || all[0].Text != "creating" {
		t.Errorf("%d entries, %d dropped, the first is %q", len(all), dropped, all[0].Text)
	}
	for _, e := range all {
		if len(e.Text) > maxText+8 || strings.ContainsAny(e.Text, "\x1b\n") {
			t.Fatalf("entry %q", e.Text)
		}
	}
}

func BenchmarkNote(b *testing.B) {
	k := New()
	k.Open("a")
	at := time.Now()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		k.Note("a", Network, at, []string{"one", "another"}[i%2])
	}
}
