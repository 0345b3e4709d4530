package command

import (
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/output"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

const (
	// RememberFinished bounds the commands that are known after their end.
	RememberFinished = 1000
	// finishedMemory bounds the output of all of them that stays in memory, in bytes.
	finishedMemory = 2 << 20
	// detailed bounds the finished commands, the newest, whose order and times of output
	// are known: 50 KiB of memory each at most.
	detailed = 64
)

// Registry starts the commands of this sandbox, and knows them: all that run, and the last
// thousand that do not.
type Registry struct {
	Config

	books    *output.Books
	evicting atomic.Bool

	mu     sync.Mutex
	byID   map[string]*Command
	old    []*Command // finished, oldest first
	memory map[*Command]int64
	inUse  int64 // sum of memory
}

// Config is what a Registry works with.
type Config struct {
	StateDir  string   // the agent's own, to try whether the disk is full
	DevNull   *os.File // /dev/null, open both ways
	Limits    func() agent.Limits
	Grace     time.Duration // between SIGTERM and SIGKILL; see Interrupt
	OutputDir string        // where long output is kept; it must be there

	OutputLimit, OutputEach int64 // bytes of its files together, and of one command
}

// NewRegistry makes one that knows no command.
func NewRegistry(c Config) *Registry {
	g := &Registry{Config: c, byID: map[string]*Command{}, memory: map[*Command]int64{}}
	g.books = output.NewBooks(c.OutputDir, c.OutputLimit, c.OutputEach, g.pressed)
	return g
}

// Known returns how many commands are known.
func (g *Registry) Known() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.byID)
}

func (g *Registry) add(c *Command) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.byID[c.ID] = c
}

func (g *Registry) remove(c *Command) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.byID, c.ID)
}

// Get returns the command called id, or nil.
func (g *Registry) Get(id string) *Command {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.byID[id]
}

// finished notes that c has ended. It forgets the oldest command if there are more than
// a thousand, and moves outputs out of memory if they hold more than 2 MiB.
func (g *Registry) finished(c *Command) {
	if c.Forget {
		g.remove(c)
		c.Output.Drop()
		return
	}
	kept := c.Output.Settle(false)
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.forgotten {
		return
	}
	g.old = append(g.old, c)
	g.memory[c] = kept
	g.inUse += kept
	for len(g.old) > RememberFinished {
		first := g.old[0]
		g.old[0] = nil
		g.old = g.old[1:]
		delete(g.byID, first.ID)
		g.inUse -= g.memory[first]
		delete(g.memory, first)
		first.Output.Drop()
	}
	if i := len(g.old) - 1 - detailed; i >= 0 {
		g.old[i].forgetDetails()
	}
	for i := 0; g.inUse > finishedMemory && i < len(g.old); i++ {
		if m := g.memory[g.old[i]]; m > 0 {
			now := g.old[i].Output.Settle(true)
			g.inUse += now - m
			g.memory[g.old[i]] = now
		}
	}
}

// pressed frees files of finished commands, oldest first, until a fourth of the limit
// is free. It runs in a goroutine of its own, because the caller holds locks.
func (g *Registry) pressed() {
	if g.evicting.Swap(true) {
		return
	}
	go proc.Guarded(func() {
		defer g.evicting.Store(false)
		g.mu.Lock()
		old := append([]*Command(nil), g.old...)
		g.mu.Unlock()
		for _, c := range old {
			if !g.books.Tight() {
				return
			}
			if c.Output.InFile() > 0 {
				c.Output.Drop()
			}
		}
	})
}

// LoseClients ends the replies to all who watch commands, since none of them will come back.
// Commands go on, and their output is kept.
func (g *Registry) LoseClients() {
	g.mu.Lock()
	all := slices.Collect(maps.Values(g.byID))
	g.mu.Unlock()
	for _, c := range all {
		c.loseClient()
	}
}

// ForgetEnded forgets the commands that have ended.
func (g *Registry) ForgetEnded() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for id, c := range g.byID {
		if !c.Running() {
			c.forgotten = true // finished may come later
			delete(g.byID, id)
			c.Output.Drop()
		}
	}
	g.old, g.inUse = nil, 0
	clear(g.memory)
}

// SetOutputLimits changes how many bytes of output are kept in files: in all, and of each
// command that starts from now on.
func (g *Registry) SetOutputLimits(total, each int64) { g.books.SetLimits(total, each) }

// DropAll frees the output of every command but the entrypoint.
func (g *Registry) DropAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.byID {
		if c.ID != agent.EntrypointID {
			c.Output.Drop()
		}
	}
}
