package systemd

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
)

// TestShared: those who ask while a question is under way share the next one, whose answer is newer than their asking.
func TestShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, ends, failed := 0, false, errors.New("no answer")
		answers := make(chan struct{})
		s := NewShared(func(context.Context) (bool, error) {
			asked++
			is := ends // as it was when the question began
			<-answers
			if asked == 3 {
				return false, failed
			}
			return is, nil
		})
		var wg sync.WaitGroup
		ask := func(n int, want bool, why error) {
			for range n {
				wg.Go(func() {
					ctx, leave := context.WithCancel(t.Context())
					leave() // the answer is for others, too
					if yes, err := s.Ask(ctx); yes != want || !errors.Is(err, why) {
						t.Errorf("%v, %v; want %v, %v", yes, err, want, why)
					}
				})
			}
			synctest.Wait()
		}
		ask(1, false, nil)
		ends = true
		ask(1000, true, nil)
		if asked != 1 {
			t.Errorf("%d questions at once", asked)
		}
		for range 2 {
			answers <- struct{}{}
			synctest.Wait()
		}
		wg.Wait()
		ask(1, false, failed)
		answers <- struct{}{}
		wg.Wait()
		if asked != 3 {
			t.Errorf("%d questions, want 3", asked)
		}
	})
}
