package server

import (
	"sync"
	"sync/atomic"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/output"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

const (
	// rememberFinished bounds the commands that are known after their end.
	rememberFinished = 1000
	// finishedMemory bounds the output of all of them that stays in memory, in bytes.
	finishedMemory = 2 << 20
)

// registry knows the commands of this sandbox: all that run, and the last
// thousand that do not.
type registry struct {
	books    *output.Books
	evicting atomic.Bool

	mu     sync.Mutex
	byID   map[string]*command
	old    []*command // finished, oldest first
	memory map[*command]int64
	inUse  int64 // sum of memory
}

func newRegistry(dir string, limit, each int64) *registry {
	g := &registry{byID: map[string]*command{}, memory: map[*command]int64{}}
	g.books = output.NewBooks(dir, limit, each, g.pressed)
	return g
}

func (g *registry) add(c *command) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.byID[c.id] = c
}

func (g *registry) get(id string) *command {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.byID[id]
}

// finished notes that c has ended, and forgets what is too much: the oldest
// command beyond the thousandth, memory of outputs beyond 2 MiB.
func (g *registry) finished(c *command) {
	if c.forget {
		g.mu.Lock()
		delete(g.byID, c.id)
		g.mu.Unlock()
		c.out.Drop()
		return
	}
	kept := c.out.Settle(false)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.old = append(g.old, c)
	g.memory[c] = kept
	g.inUse += kept
	for len(g.old) > rememberFinished {
		first := g.old[0]
		g.old[0] = nil
		g.old = g.old[1:]
		delete(g.byID, first.id)
		g.inUse -= g.memory[first]
		delete(g.memory, first)
		first.out.Drop()
	}
	for i := 0; g.inUse > finishedMemory && i < len(g.old); i++ {
		if m := g.memory[g.old[i]]; m > 0 {
			now := g.old[i].out.Settle(true)
			g.inUse += now - m
			g.memory[g.old[i]] = now
		}
	}
}

// pressed frees files of finished commands, oldest first, until a fourth of the
// limit is free. It runs beside the command that pressed, which holds locks.
func (g *registry) pressed() {
	if g.evicting.Swap(true) {
		return
	}
	go proc.Guarded(func() {
		defer g.evicting.Store(false)
		g.mu.Lock()
		old := append([]*command(nil), g.old...)
		g.mu.Unlock()
		for _, c := range old {
			if !g.books.Tight() {
				return
			}
			if c.out.InFile() > 0 {
				c.out.Drop()
			}
		}
	})
}

// dropAll frees the output of every command but the entrypoint.
func (g *registry) dropAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.byID {
		if c.id != agent.EntrypointID {
			c.out.Drop()
		}
	}
}
