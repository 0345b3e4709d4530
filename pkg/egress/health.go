package egress

import (
	"fmt"
	"sync"
	"time"
)

// guardOverdue is when the guard counts as stuck: some six rounds late. The longest
// regular round is an install in which every iptables waits for another program's lock.
const guardOverdue = time.Minute

// health is the state of an Engine.
type health struct {
	mu     sync.Mutex
	fault  error     // what failed for good
	looked time.Time // when the guard last finished a round
}

func (h *health) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fault == nil {
		h.fault = err
	}
}

func (h *health) look(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.looked = now
}

// Err says why an open Engine has stopped working for good: only a new Engine helps.
// Nil means healthy.
func (e *Engine) Err() error {
	e.health.mu.Lock()
	defer e.health.mu.Unlock()
	if e.health.fault != nil {
		return e.health.fault
	}
	if late := time.Since(e.health.looked); late > guardOverdue {
		return fmt.Errorf("chains, sets and lock were not checked for %v: iptables or the kernel hangs (see `ps -ef | grep iptables`)",
			late.Round(time.Second))
	}
	return nil
}
