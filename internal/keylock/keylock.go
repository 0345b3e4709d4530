// Package keylock is a set of locks, one per key. A waiter gives up when its context
// ends.
//
// A lock without a holder or waiters takes no memory. Another goroutine than the one
// that took it may release it: an operation hands it to the background work that
// finishes it.
package keylock

import (
	"context"
	"sync"
)

// Set is a set of locks. The zero Set is ready for use.
type Set struct {
	mu sync.Mutex
	m  map[string]*entry // guarded by mu
}

type entry struct {
	sem  chan struct{}
	refs int // holder and waiters; guarded by Set.mu
}

// Lock takes the lock of key and returns the function that releases it, to be called
// once. When ctx ends first it returns the cause.
func (s *Set) Lock(ctx context.Context, key string) (unlock func(), err error) {
	e := s.ref(key)
	select {
	case e.sem <- struct{}{}:
		return func() { s.release(key, e) }, nil
	case <-ctx.Done():
		s.unref(key, e)
		return nil, context.Cause(ctx)
	}
}

// TryLock takes the lock of key if nobody holds it.
func (s *Set) TryLock(key string) (unlock func(), ok bool) {
	e := s.ref(key)
	select {
	case e.sem <- struct{}{}:
		return func() { s.release(key, e) }, true
	default:
		s.unref(key, e)
		return nil, false
	}
}

func (s *Set) ref(key string) *entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.m[key]
	if e == nil {
		if s.m == nil {
			s.m = map[string]*entry{}
		}
		e = &entry{sem: make(chan struct{}, 1)}
		s.m[key] = e
	}
	e.refs++
	return e
}

func (s *Set) release(key string, e *entry) {
	<-e.sem
	s.unref(key, e)
}

func (s *Set) unref(key string, e *entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.refs--; e.refs == 0 {
		delete(s.m, key)
	}
}
