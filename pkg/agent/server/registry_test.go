package server

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent/output"
)

// TestOutputsMakeRoom lets many commands write more than all may keep.
func TestOutputsMakeRoom(t *testing.T) {
	g := newRegistry(t.TempDir(), 4<<20, output.OfCommand)
	var last *command
	for range 20 {
		last = &command{id: newID(), out: nil, done: make(chan struct{})}
		last.out = g.books.NewRing(last.id)
		g.add(last)
		last.out.Write(make([]byte, 1<<20)) //nolint:errcheck // never fails
		g.finished(last)
		for g.evicting.Load() {
			time.Sleep(time.Millisecond) // it runs beside
		}
	}
	if n := g.books.InFile(); n > 4<<20 {
		t.Errorf("%d bytes of files, %d are allowed", n, 4<<20)
	}
	if from, end := last.out.Range(); from != 0 || end != 1<<20 {
		t.Errorf("the newest output keeps only %d to %d", from, end)
	}
	for range 100 {
		c := &command{id: newID(), done: make(chan struct{})}
		c.out = g.books.NewRing(c.id)
		c.out.Write(make([]byte, output.InMemory)) //nolint:errcheck // never fails
		g.finished(c)
	}
	if g.inUse > finishedMemory {
		t.Errorf("finished commands hold %d bytes of memory", g.inUse)
	}
}
