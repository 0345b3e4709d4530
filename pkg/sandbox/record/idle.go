package record

import (
	"strings"
	"time"
)

// IdleAction is what happens to a sandbox that is idle.
type IdleAction string

// The actions.
const (
	IdlePause     IdleAction = "pause"     // the next use of the sandbox wakes it
	IdleHibernate IdleAction = "hibernate" // likewise, and meanwhile its memory is on disk
	IdleStop      IdleAction = "stop"      // as a client's stop: only a client starts it again
	IdleKill      IdleAction = "kill"      // as its expiry: it is deleted
)

// IdleActions are all there are, the default first.
var IdleActions = []IdleAction{IdlePause, IdleHibernate, IdleStop, IdleKill}

// Idle is the idle policy of a sandbox: what happens when nobody has used it for After. The
// zero Idle is none. pkg/idle says what a use is.
type Idle struct {
	After  time.Duration `json:"after,omitempty"`
	Action IdleAction    `json:"action,omitempty"`
}

// Given reports whether there is a policy.
func (i Idle) Given() bool { return i.After > 0 }

// For is After as people write it: 10m, and not 10m0s.
func (i Idle) For() string {
	s := i.After.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// Asleep reports whether the idle policy has paused or hibernated the sandbox, or is about to, or
// it is waking: the next use wakes it. One that a client paused is not asleep, and nothing wakes it.
func (r *Record) Asleep() bool { return r.Reason == ReasonIdle && r.State.Still() }

// Still reports whether a sandbox in state s is paused, to be paused or to be resumed, in memory or
// on disk.
func (s State) Still() bool {
	switch s {
	case Pausing, Paused, Resuming, Hibernating, Hibernated, Waking:
		return true
	}
	return false
}
