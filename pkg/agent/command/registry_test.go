package command

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/output"
)

// TestOutputsMakeRoom lets many commands write more than all may keep.
func TestOutputsMakeRoom(t *testing.T) {
	g := NewRegistry(Config{OutputDir: t.TempDir(), OutputLimit: 4 << 20, OutputEach: output.OfCommand})
	var last *Command
	for range 20 {
		last = &Command{ID: NewID(), done: make(chan struct{})}
		last.Output = g.books.NewRing(last.ID)
		g.add(last)
		last.Output.Write(make([]byte, 1<<20)) //nolint:errcheck // never fails
		g.finished(last)
		for g.evicting.Load() {
			time.Sleep(time.Millisecond) // it runs beside
		}
	}
	if n := g.books.InFile(); n > 4<<20 {
		t.Errorf("%d bytes of files, %d are allowed", n, 4<<20)
	}
	if from, end := last.Output.Range(); from != 0 || end != 1<<20 {
		t.Errorf("the newest output keeps only %d to %d", from, end)
	}
	for range 100 {
		c := &Command{ID: NewID(), done: make(chan struct{})}
		c.Output = g.books.NewRing(c.ID)
		c.Output.Write(make([]byte, output.InMemory)) //nolint:errcheck // never fails
		g.finished(c)
	}
	if g.inUse > finishedMemory {
		t.Errorf("finished commands hold %d bytes of memory", g.inUse)
	}
}

// TestDetailsAreForgotten: what is remembered of the order and the times of output is
// bounded, however many commands have ended.
func TestDetailsAreForgotten(t *testing.T) {
	g := NewRegistry(Config{OutputDir: t.TempDir(), OutputLimit: 4 << 20, OutputEach: output.OfCommand})
	var all []*Command
	for range detailed + 2 {
		c := &Command{ID: NewID(), done: make(chan struct{})}
		c.Output = g.books.NewRing(c.ID)
		for i := range 4 {
			framed := make([]byte, agent.FrameHeader+1)
			c.keep(byte(1+i%2), framed, false)
		}
		g.finished(c)
		all = append(all, c)
	}
	for i, c := range all {
		pieces, first := c.watch.marks.Since([2]int64{}, 0)
		if old := i < 2; old != (len(pieces) == 0) || old && first != [2]int64{2, 2} || len(c.Output.Times().Marks) == 0 {
			t.Errorf("command %d of %d: %v from %v on, %v", i, len(all), pieces, first, c.Output.Times())
		}
	}
}

// TestForgetEnded: a command that has just ended is forgotten, too, although its end is not noted yet; one
// that runs is not.
func TestForgetEnded(t *testing.T) {
	g := NewRegistry(Config{OutputDir: t.TempDir(), OutputLimit: 4 << 20, OutputEach: output.OfCommand})
	var all []*Command
	for range 3 {
		c := &Command{ID: NewID(), done: make(chan struct{})}
		c.Output = g.books.NewRing(c.ID)
		c.Output.Write([]byte("secret")) //nolint:errcheck // never fails
		g.add(c)
		all = append(all, c)
	}
	noted, ended, runs := all[0], all[1], all[2]
	close(noted.done)
	g.finished(noted)
	close(ended.done)
	g.ForgetEnded()
	g.finished(ended)
	if g.Known() != 1 || g.Get(runs.ID) != runs || len(g.old) != 0 || g.inUse != 0 || len(g.memory) != 0 {
		t.Errorf("%d commands are known, %v have ended, with %d bytes, %v", g.Known(), g.old, g.inUse, g.memory)
	}
	close(runs.done)
	g.finished(runs)
	if len(g.old) != 1 {
		t.Errorf("%d have ended after that", len(g.old))
	}
}
