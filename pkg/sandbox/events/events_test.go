package events

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func TestSlowSubscriber(t *testing.T) {
	var b Bus
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ch := b.Subscribe(ctx)
	for i := range 2 * buffer {
		b.Publish(fmt.Sprint(i), &record.Record{})
	}
	var last Event
	for range buffer {
		last = <-ch
	}
	if last.Type != Lost || len(ch) != 0 {
		t.Fatalf("after a full buffer: %q, %d more; want the word that events are lost", last.Type, len(ch))
	}
	b.Publish("again", &record.Record{})
	if e := <-ch; e.Type != "again" {
		t.Fatalf("got %q", e.Type)
	}
}

// TestSince: a reader that comes back gets what it has missed, to this daemon or to the
// next one, and is told if that is not known any more.
func TestSince(t *testing.T) {
	var b Bus
	read := func(cursor string) (types []string, last string) {
		ctx, cancel := context.WithCancel(t.Context())
		ch := b.Since(ctx, cursor, time.Time{})
		cancel()
		for e := range ch {
			types, last = append(types, e.Type), e.Cursor
		}
		return types, last
	}
	types, start := read("")
	if !slices.Equal(types, []string{Cursor}) || start == "" {
		t.Errorf("at the start: %q, %q", types, start)
	}
	for i := range 3 {
		b.Publish(fmt.Sprint(i), &record.Record{})
	}
	types, end := read(start)
	if !slices.Equal(types, []string{Cursor, "0", "1", "2"}) {
		t.Errorf("since the start: %q", types)
	}
	if types, again := read(end); !slices.Equal(types, []string{Cursor}) || again != end {
		t.Errorf("since the end: %q, %q", types, again)
	}
	epoch, _, _ := strings.Cut(start, "-")
	for _, cursor := range []string{ // of the daemon before, or of nobody
		"1-2", "x", "1", "-", epoch + "--1", epoch + "-9223372036854775808", "10000000000000000-1",
	} {
		if types, _ := read(cursor); !slices.Equal(types, []string{Cursor, "0", "1", "2"}) {
			t.Errorf("since %q: %q", cursor, types)
		}
	}
	for i := range kept + 5 {
		b.Publish(fmt.Sprint(i), &record.Record{})
	}
	if types, _ := read(end); len(types) != 2+kept || types[1] != Lost || types[2] != "5" {
		t.Errorf("since long ago: %d events, begins with %q", len(types), types[:3])
	}
	if types, _ := read(""); !slices.Equal(types, []string{Cursor}) {
		t.Errorf("from now on: %q", types)
	}
}

// TestPassed: what guests can cause without end displaces no event that is kept, and
// reaches only readers that ask for it and keep up.
func TestPassed(t *testing.T) {
	var b Bus
	if b.Read() {
		t.Error("somebody reads")
	}
	inside, start := b.Subscribe(t.Context()), b.Since(t.Context(), "", time.Time{})
	if <-start; !b.Read() {
		t.Error("nobody reads")
	}
	for range 10 * buffer {
		b.Pass(Event{Type: Denied})
	}
	b.Publish("kept", &record.Record{})
	if e := <-inside; e.Type != "kept" {
		t.Errorf("a part of the daemon got %q", e.Type)
	}
	// What happens to the host is for readers outside, and kept.
	b.Tell("backup", "", "done")
	if len(inside) > 0 {
		t.Errorf("a part of the daemon got %+v", <-inside)
	}
	again := b.Since(t.Context(), b.cursor(1), time.Time{})
	<-again
	if e := <-again; e.Type != "backup" || e.ID != "" || e.Message != "done" || e.Cursor == "" {
		t.Errorf("a reader that comes back got %+v", e)
	}
	n := 0
	for e := <-start; e.Type != "kept"; e = <-start {
		if n++; e.Type != Denied || e.Cursor != "" {
			t.Fatalf("got %+v", e)
		}
	}
	if n != buffer/2 || len(b.recent) != 2 {
		t.Errorf("a reader that is behind got %d, and %d are kept", n, len(b.recent))
	}
}
