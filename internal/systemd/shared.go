package systemd

import (
	"context"
	"sync"
)

// Shared asks a question for many at once: those who come while one is under way share the next. So an answer is
// never older than the asking, and a thousand sandboxes that fail together cost two connections.
type Shared struct {
	ask  func(context.Context) (bool, error)
	turn chan struct{} // holds one: the question under way
	mu   sync.Mutex
	next *answer // of the question that has not begun; guarded by mu
}

type answer struct {
	done chan struct{}
	yes  bool // written before done is closed, as err
	err  error
}

// NewShared returns what asks ask, which must have a limit of time.
func NewShared(ask func(context.Context) (bool, error)) *Shared {
	return &Shared{ask: ask, turn: make(chan struct{}, 1)}
}

// Ask returns the answer to a question that began after the call did. It outlives ctx, as others may wait for it.
func (s *Shared) Ask(ctx context.Context) (bool, error) {
	s.mu.Lock()
	a := s.next
	first := a == nil
	if first {
		a = &answer{done: make(chan struct{})}
		s.next = a
	}
	s.mu.Unlock()
	if first {
		s.turn <- struct{}{}
		s.mu.Lock()
		s.next = nil
		s.mu.Unlock()
		a.yes, a.err = s.ask(context.WithoutCancel(ctx))
		close(a.done)
		<-s.turn
	}
	<-a.done
	return a.yes, a.err
}
