package egress

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
)

// TestTold: whoever has put a denial, and waits, finds it told, whoever told it. Nobody waits for more than
// mostToTell.
func TestTold(t *testing.T) {
	var told sync.Map
	d := newDenials(func(n Denial) {
		for range 20 {
			runtime.Gosched() // others look for what they have put
		}
		told.Store(n.ID, true)
	}, nil)
	go d.tellDenials(t.Context())
	var all sync.WaitGroup
	for who := range 4 {
		all.Go(func() {
			for i := range 500 {
				id := fmt.Sprint(who, " ", i)
				d.put(Denial{ID: id})
				d.Told()
				if _, ok := told.Load(id); !ok {
					t.Errorf("%q is not told", id)
					return
				}
			}
		})
	}
	all.Wait()

	d.telling.Lock() // nobody tells
	for i := range mostToTell + 9 {
		d.put(Denial{ID: fmt.Sprint(i)})
	}
	d.telling.Unlock()
	d.Told()
	for i := range mostToTell + 9 {
		if _, ok := told.Load(fmt.Sprint(i)); ok != (i < mostToTell) {
			t.Fatalf("of %d that waited, number %d was told: %v", mostToTell+9, i, ok)
		}
	}
}
