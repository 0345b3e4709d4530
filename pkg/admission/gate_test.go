package admission

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// yard is a host that a test furnishes.
type yard struct {
	all    []*record.Record
	memory int64
	disk   int64
	failed error
}

func newGate(t *testing.T, y *yard, l Limits) (g *Gate, refused *[]string) {
	t.Helper()
	drain, err := OpenDrain(filepath.Join(t.TempDir(), "draining"))
	if err != nil {
		t.Fatal(err)
	}
	refused = &[]string{}
	return &Gate{
		Limits: l, Queue: NewQueue(2), Drain: drain,
		Refused: func(bound string) { *refused = append(*refused, bound) },
		Host: Host{
			Sandboxes:   func(context.Context) ([]*record.Record, error) { return y.all, y.failed },
			Deadline:    func(r record.Record) time.Time { return r.Expires },
			MemoryBytes: func() (int64, error) { return y.memory, y.failed },
			Spaces:      func() ([]Space, error) { return []Space{{"the pool", y.disk, "delete some"}}, y.failed },
			StartBytes:  func(string) int64 { return 10 << 20 },
		},
	}, refused
}

func wantRefusal(t *testing.T, g *Gate, code errs.Code, retry time.Duration, words ...string) {
	t.Helper()
	_, err := g.Enter(t.Context(), "runc", 1)
	e, ok := errors.AsType[*errs.Error](err)
	if !ok || e.Code != code || e.Retry != retry {
		t.Fatalf("got %+v, want %s and %v", err, code, retry)
	}
	for _, w := range words {
		if !strings.Contains(e.Text, w) {
			t.Errorf("%q does not say %q", e.Text, w)
		}
	}
	if len(e.Text) > 400 { // OpenSandbox's Python SDK prints 512 bytes of an answer
		t.Errorf("%d bytes are too many: %s", len(e.Text), e.Text)
	}
}

func mustEnter(t *testing.T, g *Gate) func() {
	t.Helper()
	leave, err := g.Enter(t.Context(), "runc", 1)
	if err != nil {
		t.Fatal(err)
	}
	return leave
}

func TestBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		y := &yard{memory: 1 << 30, disk: 1 << 30}
		g, refused := newGate(t, y, Limits{MaxSandboxes: 3, MemoryReserve: 256 << 20, DiskReserve: 256 << 20})
		leave := mustEnter(t, g)
		y.all = []*record.Record{{State: record.Running}, {State: record.Ended}}
		wantRefusal(t, g, errs.Exhausted, unknownRetry, "its maximum of 3 sandboxes", "limits.max_sandboxes", "sandboxctl rm")
		if again, err := g.Enter(t.Context(), "runc", 0); err != nil { // one of those that are there
			t.Error(err)
		} else {
			again()
		}
		leave() // it was not made
		mustEnter(t, g)()

		// Retry-After is when the first one goes by itself, within reason.
		for expires, retry := range map[time.Duration]time.Duration{
			-time.Hour: minRetry, 20 * time.Second: 20 * time.Second,
			time.Hour: maxRetry,
		} {
			y.all = []*record.Record{{}, {Expires: time.Now().Add(expires)}, {Expires: time.Now().Add(2 * time.Hour)}}
			wantRefusal(t, g, errs.Exhausted, retry)
		}

		y.all = nil
		y.disk = 100 << 20
		wantRefusal(t, g, errs.Exhausted, unknownRetry, "the pool has 100 MiB free", "256 MiB", "storage.reserve", "delete some")
		y.disk = 1 << 30
		if got := strings.Join(*refused, " "); got != "max_sandboxes max_sandboxes max_sandboxes max_sandboxes disk" {
			t.Errorf("refused: %s", got)
		}
	})
}

// TestMemory counts what is on its way, and not the limits of what runs.
func TestMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		y := &yard{memory: 300 << 20, disk: 1 << 30}
		g, _ := newGate(t, y, Limits{MaxSandboxes: 100, MemoryReserve: 256 << 20})
		for range 20 {
			y.all = append(y.all, &record.Record{State: record.Running, Spec: record.Spec{Limits: record.Limits{MemoryBytes: 8 << 30}}})
		}
		leave := mustEnter(t, g)
		mustEnter(t, g)
		y.all = append(y.all, &record.Record{State: record.Creating}, &record.Record{State: record.Creating})
		wantRefusal(t, g, errs.Exhausted, unknownRetry, "300 MiB of free memory", "4 creations in progress need 40 MiB",
			"256 MiB", "limits.memory_reserve")
		leave()
		mustEnter(t, g)()
		y.memory = 200 << 20
		// Those under way are done before anything expires.
		turn := g.Queue.Enter(t.Context(), "x")
		time.Sleep(8 * time.Second)
		turn.Done()
		g.Queue.Enter(t.Context(), "y")
		wantRefusal(t, g, errs.Exhausted, 4*time.Second)
		g.Limits.MemoryReserve = 0
		mustEnter(t, g)()
	})
}

// TestNotKnown refuses when the host cannot be looked at, and for no bound.
func TestNotKnown(t *testing.T) {
	y := &yard{failed: errors.New("no /proc")}
	g, refused := newGate(t, y, Limits{MaxSandboxes: 3})
	if _, err := g.Enter(t.Context(), "runc", 1); !errors.Is(err, y.failed) || len(*refused) > 0 {
		t.Errorf("%v, %v", err, *refused)
	}
}

// TestDrain is not forgotten, and ends.
func TestDrain(t *testing.T) {
	y := &yard{memory: 1 << 30, disk: 1 << 30}
	g, refused := newGate(t, y, Limits{MaxSandboxes: 3})
	for range 2 {
		if err := g.Drain.Set(true); err != nil {
			t.Fatal(err)
		}
	}
	wantRefusal(t, g, errs.Unavailable, maxRetry, "draining since", "system drain --off")
	if _, err := g.Enter(t.Context(), "runc", 0); !errs.Is(err, errs.Unavailable) {
		t.Errorf("a start: %v", err)
	}
	again, err := OpenDrain(g.Drain.path)
	if err != nil || again.Since().IsZero() || time.Since(again.Since()).Abs() > time.Minute {
		t.Fatalf("after a restart: %v, %v", again.Since(), err)
	}
	g.Drain = again
	wantRefusal(t, g, errs.Unavailable, maxRetry)
	for range 2 {
		if err := g.Drain.Set(false); err != nil {
			t.Fatal(err)
		}
	}
	mustEnter(t, g)()
	if again, err = OpenDrain(g.Drain.path); err != nil || !again.Since().IsZero() {
		t.Fatalf("%v, %v", again.Since(), err)
	}
	if strings.Join(*refused, " ") != "draining draining draining" {
		t.Error(*refused)
	}

	// A state directory that cannot be written to keeps what is.
	if err := os.RemoveAll(filepath.Dir(again.path)); err != nil {
		t.Fatal(err)
	}
	if err := again.Set(true); err == nil || !again.Since().IsZero() {
		t.Errorf("%v, %v", again.Since(), err)
	}
}

// TestMakeRoom: what no sandbox needs is released before the gate refuses for want of
// memory or disk, once, and a refusal is counted once.
func TestMakeRoom(t *testing.T) {
	y := &yard{memory: 100 << 20, disk: 1 << 30}
	g, refused := newGate(t, y, Limits{MaxSandboxes: 1, MemoryReserve: 256 << 20, DiskReserve: 256 << 20})
	frees, asked := int64(0), 0
	g.Host.MakeRoom = func(context.Context) bool {
		asked++
		y.memory += frees
		y.disk += frees
		return true
	}
	if _, err := g.Enter(t.Context(), "runc", 1); !errs.Is(err, errs.Exhausted) || asked != 1 || len(*refused) != 1 {
		t.Errorf("without enough memory: %v; asked %d times, refused %v", err, asked, *refused)
	}
	if err := g.Room(t.Context(), "runc"); !errs.Is(err, errs.Exhausted) || asked != 1 || len(*refused) != 1 {
		t.Errorf("Room says %v; asked %d times, refused %v", err, asked, *refused)
	}
	frees = 200 << 20
	mustEnter(t, g)()
	y.disk = 100 << 20
	mustEnter(t, g)()
	if asked != 3 || len(*refused) != 1 {
		t.Errorf("asked %d times, refused %v", asked, *refused)
	}
	if err := g.Room(t.Context(), "runc"); err != nil {
		t.Error(err)
	}
	y.all = []*record.Record{{State: record.Running}}
	if _, err := g.Enter(t.Context(), "runc", 1); !errs.Is(err, errs.Exhausted) || asked != 3 || len(*refused) != 2 {
		t.Errorf("with too many sandboxes: %v; asked %d times, refused %v", err, asked, *refused)
	}
}
