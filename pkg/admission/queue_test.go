package admission

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// came lists, in the order of turns, the ids of those whose turn has come.
func came(turns []*Turn) (ids []string) {
	for _, t := range turns {
		select {
		case <-t.Came():
			ids = append(ids, t.id)
		default:
		}
	}
	return ids
}

func enter(t *testing.T, q *Queue, ids ...string) (turns []*Turn) {
	for _, id := range ids {
		turns = append(turns, q.Enter(By(t.Context(), id[:1]), id))
	}
	return turns
}

// served has each turn that came be done, and returns the order in which the
// others come.
func served(turns []*Turn) (order []string) {
	for done := map[string]bool{}; len(done) < len(turns); {
		for _, t := range turns {
			if !done[t.id] && slices.Contains(came(turns), t.id) {
				order = append(order, t.id)
				done[t.id] = true
				t.Done()
				break
			}
		}
	}
	return order
}

func TestTurns(t *testing.T) {
	for _, c := range []struct{ entered, order string }{
		{"a1 a2 a3", "a1 a2 a3"},
		{"a1 a2 a3 a4 b1 b2", "a1 a2 b1 a3 b2 a4"},
		{"a1 a2 b1 c1 a3 c2", "a1 a2 b1 c1 a3 c2"},
		{"a1 b1 b2 b3 c1 a2", "a1 b1 c1 a2 b2 b3"},
	} {
		q := NewQueue(1)
		turns := enter(t, q, strings.Fields(c.entered)...)
		if got := strings.Join(served(turns), " "); got != c.order {
			t.Errorf("%s: served %s, want %s", c.entered, got, c.order)
		}
		if going, waiting := q.Len(); going != 0 || waiting != 0 || len(q.ring) != 0 {
			t.Errorf("%s: left %d, %d, %d", c.entered, going, waiting, len(q.ring))
		}
	}
}

// TestPositions holds that they say in which order turns come.
func TestPositions(t *testing.T) {
	q := NewQueue(1)
	turns := enter(t, q, "a1", "a2", "a3", "b1", "c1", "b2")
	all := q.Positions()
	for i, id := range served(turns)[1:] {
		if all[id] != i+1 {
			t.Errorf("%s comes as number %d, and was told %d", id, i+1, all[id])
		}
	}
	if len(all) != 5 {
		t.Errorf("%v", all)
	}
}

func TestBound(t *testing.T) {
	q := NewQueue(3)
	turns := enter(t, q, "a1", "a2", "a3", "a4", "b1")
	if got := came(turns); len(got) != 3 {
		t.Fatalf("%v go on", got)
	}
	turns[1].Done()
	turns[1].Done() // once is what counts
	if got := strings.Join(came(turns), " "); got != "a1 a2 a3 a4" {
		t.Fatalf("came: %s", got)
	}
	if going, waiting := q.Len(); going != 3 || waiting != 1 {
		t.Fatalf("%d go on, %d wait", going, waiting)
	}
	if going, _ := NewQueue(0).Len(); going != 0 || NewQueue(-1).max != 1 {
		t.Error("a queue in which nothing goes on")
	}
}

// TestGivenUp has turns given up that wait, that are next, and that have come.
func TestGivenUp(t *testing.T) {
	q := NewQueue(1)
	turns := enter(t, q, "a1", "a2", "b1", "a3", "b2", "c1")
	turns[1].Done() // next
	turns[4].Done() // the last of its client
	turns[5].Done() // the only one of its client
	if p := q.Positions(); len(p) != 2 || p["b1"]+p["a3"] != 3 {
		t.Fatalf("%v", p)
	}
	turns[0].Done()
	turns[0].Done()
	for _, turn := range turns {
		turn.Done()
	}
	if going, waiting := q.Len(); going != 0 || waiting != 0 || len(q.ring) != 0 {
		t.Errorf("left %d, %d, %d", going, waiting, len(q.ring))
	}
	if got := came(enter(t, q, "d1")); len(got) != 1 {
		t.Error("the place did not come back")
	}
}

// TestNoStarvation has one client ask without end, and another once.
func TestNoStarvation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue(2)
		ctx, stop := context.WithCancel(t.Context())
		for i := range 50 {
			go func() {
				for n := 0; ctx.Err() == nil; n++ {
					turn := q.Enter(By(ctx, "greedy"), fmt.Sprint("g", i, "-", n))
					<-turn.Came()
					time.Sleep(time.Second)
					turn.Done()
				}
			}()
		}
		time.Sleep(10 * time.Second)
		start := time.Now()
		turn := q.Enter(By(ctx, "modest"), "m")
		<-turn.Came()
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("one creation waited for %v behind a client that asks for fifty", took)
		}
		turn.Done()
		if c := q.clears(); c < 20*time.Second || c > 30*time.Second {
			t.Errorf("fifty creations of a second, two at once, are guessed to take %v", c)
		}
		stop()
		time.Sleep(time.Minute)
		if going, waiting := q.Len(); going != 0 || waiting != 0 {
			t.Errorf("%d, %d", going, waiting)
		}
	})
}

func BenchmarkAlone(b *testing.B) {
	q := NewQueue(4)
	ctx := By(b.Context(), "uid=0")
	b.ReportAllocs()
	for b.Loop() {
		q.Enter(ctx, "a").Done()
	}
}
