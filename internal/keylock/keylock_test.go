package keylock

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
)

func TestExcludes(t *testing.T) {
	var (
		s  Set
		wg sync.WaitGroup
		n  int // the race detector watches
	)
	for range 100 {
		wg.Go(func() {
			unlock, err := s.Lock(t.Context(), "a")
			if err != nil {
				t.Error(err)
				return
			}
			n++
			unlock()
		})
	}
	wg.Wait()
	if n != 100 {
		t.Fatalf("n = %d", n)
	}
	if len(s.m) != 0 {
		t.Fatalf("the set kept %d locks that nobody holds", len(s.m))
	}
}

func TestGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Set
		unlock, err := s.Lock(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		why := errors.New("client hung up")
		ctx, cancel := context.WithCancelCause(t.Context())
		got := make(chan error)
		go func() {
			_, err := s.Lock(ctx, "a")
			got <- err
		}()
		synctest.Wait()
		cancel(why)
		if err := <-got; !errors.Is(err, why) {
			t.Fatalf("got %v, want the cause", err)
		}
		if _, ok := s.TryLock("a"); ok {
			t.Fatal("TryLock took a held lock")
		}
		if other, ok := s.TryLock("b"); !ok {
			t.Fatal("the lock of a holds b")
		} else {
			other()
		}
		unlock()
		again, ok := s.TryLock("a")
		if !ok {
			t.Fatal("TryLock failed on a free lock")
		}
		again()
		if len(s.m) != 0 {
			t.Fatalf("the set kept %d locks", len(s.m))
		}
	})
}
