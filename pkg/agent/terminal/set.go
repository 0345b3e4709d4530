// Package terminal has the sessions of POST /pty: commands at a terminal, or at pipes,
// to which clients connect by WebSocket.
//
//	Set ─ terminal ─ command ─ its ring: what was written
//	         └─ viewer: the client that is connected, one at a time
//
// The surprise: a command starts only when the first client connects, and goes on when
// the last one leaves.
package terminal

import (
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/command"
	"github.com/sandboxd/sandboxd/pkg/agent/proc"
)

// Config is what terminals need to start.
type Config struct {
	Commands *command.Registry
	// Prepare resolves what a session asks for; without a command that is a shell. It is called
	// twice, when the session is made, for its errors, and when it starts, since files may have
	// changed. Its errors are the client's.
	Prepare  func(*agent.PtyRequest) (*command.Launch, error)
	Stopping func() bool // nothing new is started
}

// Set has the terminals of this sandbox, oldest first, at most proc.MaxTerminals. A new
// one takes the place of the oldest that has ended.
type Set struct {
	Config
	Ping      time.Duration // between two pings; a client that answers none by the next is gone
	Forgotten time.Duration // after it a session that nobody ever connected to may go

	mu  sync.Mutex
	all []*terminal
}

// NewSet makes one without terminals.
func NewSet(c Config) *Set { return &Set{Config: c, Ping: pingEvery, Forgotten: time.Minute} }

// add makes room for t, or reports that there is none.
func (ts *Set) add(t *terminal) bool {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if len(ts.all) >= proc.MaxTerminals {
		i := slices.IndexFunc(ts.all, (*terminal).ended)
		if i < 0 {
			i = slices.IndexFunc(ts.all, func(t *terminal) bool { return t.forgotten(ts.Forgotten) })
		}
		if i < 0 {
			return false
		}
		ts.all = slices.Delete(ts.all, i, i+1)
	}
	ts.all = append(ts.all, t)
	return true
}

func (t *terminal) ended() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.holder == nil && t.cmd != nil && !t.cmd.Running()
}

// forgotten reports whether a session was removed, or was not started within after.
// Such a session cannot start any more.
func (t *terminal) forgotten(after time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.removed = t.removed || t.holder == nil && t.cmd == nil && time.Since(t.made) > after
	return t.removed
}

func (ts *Set) get(id string) *terminal {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	for _, t := range ts.all {
		if t.id == id {
			return t
		}
	}
	return nil
}

func (ts *Set) list() []*terminal {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	return slices.Clone(ts.all)
}

// LoseClients cuts off all clients, since nobody is there any more. Terminals go on.
func (ts *Set) LoseClients() {
	for _, t := range ts.list() {
		t.mu.Lock()
		v := t.holder
		t.mu.Unlock()
		if v != nil {
			v.stop()
		}
	}
}

func (ts *Set) remove(t *terminal) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	ts.all = slices.DeleteFunc(ts.all, func(o *terminal) bool { return o == t })
}
