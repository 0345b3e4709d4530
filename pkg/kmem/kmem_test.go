package kmem

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// bench is a host whose memory and sockets the test sets.
type bench struct {
	Watch
	left  atomic.Int64
	held  map[string]netns.Held
	looks atomic.Int64
	ended map[string]string
	asked []string
	err   error
	slow  chan struct{} // an end of "a" waits for it; nil: it does not
	mu    sync.Mutex    // of ended

	counts map[string]int64
}

func newBench() *bench {
	b := &bench{ended: map[string]string{}}
	b.left.Store(8 << 30)
	all := []*record.Record{
		{ID: "a", State: record.Running, Spec: record.Spec{Runtime: "runc"}},
		{ID: "b", State: record.Paused, Spec: record.Spec{Runtime: "runc"}},
		{ID: "c", State: record.Ended, Spec: record.Spec{Runtime: "runc"}},
		{ID: "d", State: record.Running, Spec: record.Spec{Runtime: "runsc"}},
	}
	b.Watch = Watch{
		Sandboxes: func(context.Context) ([]*record.Record, error) { return all, b.err },
		Held: func(ids []string, least int64) (map[string]netns.Held, error) {
			b.asked = ids
			b.looks.Add(1)
			held := maps.Clone(b.held)
			maps.DeleteFunc(held, func(_ string, h netns.Held) bool { return h.Bytes <= least })
			return held, nil
		},
		Counts:    func(id string) (int64, error) { return b.counts[id], nil },
		Processes: func(string) ([]int, error) { return nil, nil },
		Available: func() (int64, error) { return b.left.Load(), nil },
		End: func(_ context.Context, was record.Record, text string) error {
			if b.slow != nil && was.ID == "a" {
				<-b.slow
			}
			b.mu.Lock()
			defer b.mu.Unlock()
			b.ended[was.ID] = text
			return nil
		},
		Watched: func(r *record.Record) bool { return r.Spec.Runtime == "runc" },
		Log:     slog.New(slog.DiscardHandler),
	}
	return b
}

// Who holds more than the limit is ended, and the message names what and how much.
func TestLook(t *testing.T) {
	b := newBench()
	b.held = map[string]netns.Held{"a": {Bytes: Limit, Most: "UDP"}, "b": {Bytes: 400 << 20, Most: "netlink"}}
	if err := b.look(t.Context(), b.sockets); err != nil {
		t.Fatal(err)
	}
	b.ends.Wait()
	if !slices.Equal(b.asked, []string{"a", "b"}) {
		t.Errorf("looked at %v; want those that live on runc", b.asked)
	}
	if text := b.ended["b"]; len(b.ended) != 1 || !strings.Contains(text, "400 MiB") || !strings.Contains(text, "netlink") {
		t.Errorf("ended: %v", b.ended)
	}
	b.held, b.ended, b.counts = nil, map[string]string{}, map[string]int64{"a": Counted + 1, "b": Counted}
	err := b.look(t.Context(), b.sockets)
	if b.ends.Wait(); err != nil || len(b.ended) != 1 || !strings.Contains(b.ended["a"], "cgroup v1") {
		t.Errorf("ended: %v, %v", b.ended, err)
	}
	b.err = errors.New("no store")
	if err := b.look(t.Context(), b.sockets); !errors.Is(err, b.err) {
		t.Errorf("without a list: %v", err)
	}
}

// A sandbox whose end takes long keeps nobody from ending another one, and is ended once.
func TestSlowEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench()
		b.slow = make(chan struct{})
		b.held = map[string]netns.Held{"a": {Bytes: 2 * Limit, Most: "UDP"}, "b": {Bytes: 2 * Limit, Most: "netlink"}}
		for range 2 {
			if err := b.look(t.Context(), b.sockets); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if b.mu.Lock(); len(b.ended) != 1 || b.ended["b"] == "" {
				t.Errorf("ended: %v", b.ended)
			}
			b.mu.Unlock()
		}
		close(b.slow)
		if b.ends.Wait(); len(b.ended) != 2 {
			t.Errorf("ended: %v", b.ended)
		}
	})
}

// While a look at locks takes long, sockets are looked at each time that it is due, and their sandboxes are ended.
func TestSlowLook(t *testing.T) {
	fd, was := newFile(), lockBounds
	lock(fd, unix.F_SETLK, 0, 1)
	lockBounds = bounds{} // one lock on the host is many
	t.Cleanup(func() {
		unix.Close(fd)
		lockBounds = was
	})
	synctest.Test(t, func(t *testing.T) {
		b := newBench()
		b.held = map[string]netns.Held{"b": {Bytes: 2 * Limit, Most: "UDP"}}
		var asked atomic.Int64
		answer := make(chan struct{})
		b.Processes = func(string) ([]int, error) {
			asked.Add(1)
			<-answer
			return nil, nil
		}
		ctx, stop := context.WithCancel(t.Context())
		go b.Run(ctx)
		for n := range int64(5) {
			time.Sleep(tick)
			synctest.Wait()
			if locks, sockets := asked.Load(), b.looks.Load(); locks != 1 || sockets != n+1 {
				t.Errorf("%d sandboxes were asked for locks, want the first one; %d looks at sockets, want %d", locks, sockets, n+1)
			}
			b.left.Add(-Step)
		}
		if b.mu.Lock(); len(b.ended) != 1 || b.ended["b"] == "" {
			t.Errorf("ended: %v", b.ended)
		}
		b.mu.Unlock()
		stop()
		close(answer)
		synctest.Wait()
	})
}

// All are looked at when the host's memory falls, and otherwise each five seconds.
func TestWhen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench()
		ctx, stop := context.WithCancel(t.Context())
		go b.Run(ctx)
		after := func(d time.Duration, want int64, what string) {
			t.Helper()
			time.Sleep(d)
			synctest.Wait()
			if n := b.looks.Load(); n != want {
				t.Errorf("%d looks %s, want %d", n, what, want)
			}
		}
		after(tick, 1, "at the start")
		b.left.Add(1 - Step)
		after(Often-2*tick, 1, "after the memory fell by less than the step")
		b.left.Add(-1)
		after(tick, 2, "after it fell by the step")
		b.left.Add(4 << 30)
		after(tick, 2, "after much became free")
		b.left.Add(-Step)
		after(tick, 3, "after that was taken")
		after(Often, 4, "after a while")
		stop()
		synctest.Wait()
	})
}
