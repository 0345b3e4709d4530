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
	_, err := g.Enter(t.Context(), "runc", 0, 1)
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
	leave, err := g.Enter(t.Context(), "runc", 0, 1)
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
		if again, err := g.Enter(t.Context(), "runc", 0, 0); err != nil { // one of those that are there
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
		pressed := "the pool has room for 0 files"
		g.Host.Pressed = func() string { return pressed }
		wantRefusal(t, g, errs.Exhausted, unknownRetry, "no room for another sandbox: the pool has room for 0 files")
		g.Limits.DiskReserve = 0 // a disk that takes no writes refuses without a reserve, too
		wantRefusal(t, g, errs.Exhausted, unknownRetry, "the pool has room for 0 files")
		pressed = ""
		mustEnter(t, g)()
		if got := strings.Join(*refused, " "); got != "max_sandboxes max_sandboxes max_sandboxes max_sandboxes disk disk disk" {
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
	if _, err := g.Enter(t.Context(), "runc", 0, 1); !errors.Is(err, y.failed) || len(*refused) > 0 {
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
	if _, err := g.Enter(t.Context(), "runc", 0, 0); !errs.Is(err, errs.Unavailable) {
		t.Errorf("a start: %v", err)
	}
	leave, err := g.Enter(Trial(t.Context()), "runc", 0, 1)
	if err != nil {
		t.Fatalf("the trial of a new version on a host that drains: %v", err)
	}
	leave()
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
	if _, err := g.Enter(t.Context(), "runc", 0, 1); !errs.Is(err, errs.Exhausted) || asked != 1 || len(*refused) != 1 {
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
	if _, err := g.Enter(t.Context(), "runc", 0, 1); !errs.Is(err, errs.Exhausted) || asked != 3 || len(*refused) != 2 {
		t.Errorf("with too many sandboxes: %v; asked %d times, refused %v", err, asked, *refused)
	}
}

// TestFits: many sandboxes at once are refused together, with how many would fit.
func TestFits(t *testing.T) {
	ctx := t.Context()
	y := &yard{memory: 356 << 20, disk: 1 << 30}
	g, refused := newGate(t, y, Limits{MaxSandboxes: 30, MemoryReserve: 256 << 20})
	fits := func(bytes int64, count int, words ...string) {
		t.Helper()
		err := g.Fits(ctx, "runc", bytes, count)
		if len(words) == 0 {
			if err != nil {
				t.Errorf("%d with %d bytes each: %v", count, bytes, err)
			}
			return
		}
		if !errs.Is(err, errs.Exhausted) {
			t.Fatalf("%d with %d bytes each: %v", count, bytes, err)
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%d with %d bytes each: %q does not say %q", count, bytes, err, w)
			}
		}
	}
	fits(0, 10) // 10 MiB is what each needs to come up
	fits(0, 11, "11 more sandboxes with 10 MiB", "10 would fit", "356 MiB of free memory", "256 MiB must stay free",
		"limits.memory_reserve")
	fits(9<<20, 10)
	fits(50<<20, 2)
	fits(50<<20, 3, "3 more sandboxes with 50 MiB", "2 would fit")
	fits(101<<20, 1, "0 would fit")
	if len(*refused) != 0 {
		t.Errorf("counted as %v, though one may enter", *refused)
	}
	for range 28 {
		y.all = append(y.all, &record.Record{State: record.Ended})
	}
	fits(0, 2)
	fits(0, 3, "3 more sandboxes", "2 would fit", "28 of at most 30", "limits.max_sandboxes", "sandboxctl rm")
	y.all = append(y.all, y.all...) // the limit was lowered since
	fits(0, 1, "its maximum of 30 sandboxes")
	y.all, y.memory = nil, 100<<20
	fits(0, 1, "100 MiB of free memory")
	g.Limits.MemoryReserve = 0
	g.Limits.DiskReserve, y.disk = 2<<30, 1<<30
	fits(0, 1, "the pool has 1024 MiB free")
	g.Limits.DiskReserve = 0
	if err := g.Drain.Set(true); err != nil {
		t.Fatal(err)
	}
	if err := g.Fits(ctx, "runc", 0, 1); !errs.Is(err, errs.Unavailable) {
		t.Errorf("on a host that drains: %v", err)
	}
	if err := g.Drain.Set(false); err != nil {
		t.Fatal(err)
	}
	fits(1<<40, 30)
	fits(1<<40, 31, "30 would fit")
	y.failed = errors.New("no store")
	if err := g.Fits(ctx, "runc", 0, 1); !errors.Is(err, y.failed) {
		t.Errorf("%v", err)
	}
	if got := strings.Join(*refused, " "); got != "max_sandboxes memory disk draining" {
		t.Errorf("refused: %s", got)
	}
}

// TestRelieve: before the gate refuses for want of memory, sandboxes that are asleep give theirs, one
// after the other, and no more of them than it takes; never for want of disk.
func TestRelieve(t *testing.T) {
	const mib = 1 << 20
	y := &yard{memory: 100 * mib, disk: 1 << 30}
	g, refused := newGate(t, y, Limits{MaxSandboxes: 100, MemoryReserve: 256 * mib, DiskReserve: 256 * mib})
	asleep, relieved := 10, 0
	g.Host.Relieve = func(context.Context) bool {
		if relieved == asleep {
			return false
		}
		relieved++
		y.memory += 50 * mib
		return true
	}
	mustEnter(t, g)()
	if relieved != 4 || y.memory != 300*mib {
		t.Errorf("%d sandboxes were relieved, and %d MiB are free", relieved, y.memory/mib)
	}
	leave, err := g.Enter(t.Context(), "runc", 120*mib, 0) // one that wakes with so much memory
	if err != nil || relieved != 6 {
		t.Errorf("for 120 MiB %d sandboxes were relieved, %v", relieved, err)
	}
	mustEnter(t, g)() // what was promised is not there for the next one
	if relieved != 6 {
		t.Errorf("%d sandboxes were relieved for 10 MiB more", relieved)
	}
	leave()
	y.memory, y.disk = 1<<30, 100*mib
	wantRefusal(t, g, errs.Exhausted, unknownRetry, "the pool has")
	y.memory, y.disk = 0, 1<<30
	wantRefusal(t, g, errs.Exhausted, unknownRetry, "limits.memory_reserve")
	if relieved != asleep || len(*refused) != 2 {
		t.Errorf("%d of %d were relieved, refused: %v", relieved, asleep, *refused)
	}
}

// TestWake: many who wait for one sandbox to wake need its memory once, until the last has left.
func TestWake(t *testing.T) {
	const mib = 1 << 20
	y := &yard{memory: 300 * mib}
	g, refused := newGate(t, y, Limits{MaxSandboxes: 10, MemoryReserve: 100 * mib})
	var leaves []func()
	for range 20 {
		leave, err := g.Wake(t.Context(), "one", "runc", 150*mib)
		if err != nil {
			t.Fatal(err)
		}
		leaves = append(leaves, leave)
	}
	for i, leave := range leaves {
		if _, err := g.Wake(t.Context(), "two", "runc", 150*mib); !errs.Is(err, errs.Exhausted) {
			t.Fatalf("another, while %d of %d wait: %v", len(leaves)-i, len(leaves), err)
		}
		leave()
		leave()
	}
	leave, err := g.Wake(t.Context(), "two", "runc", 150*mib)
	if err != nil {
		t.Fatalf("after the last has left: %v", err)
	}
	leave()
	if len(*refused) != len(leaves) || g.promised != 0 || len(g.wakes) != 0 {
		t.Errorf("%d refused; %d bytes and %d wakes are left", len(*refused), g.promised, len(g.wakes))
	}
}

// TestRestores: sandboxes that come up with a memory image count with the image until they run.
func TestRestores(t *testing.T) {
	const mib = 1 << 20
	y := &yard{memory: 1000 * mib, disk: 1 << 30}
	g, refused := newGate(t, y, Limits{MaxSandboxes: 100, MemoryReserve: 100 * mib})
	g.Host.ImageBytes = func(r *record.Record) int64 {
		if r.State == record.Creating && r.Spec.Memory {
			return 300 * mib
		}
		return 0
	}
	restored := record.Record{State: record.Creating, Spec: record.Spec{Memory: true}}
	for range 3 {
		leave, err := g.Enter(t.Context(), "runc", 300*mib, 1)
		if err != nil {
			t.Fatal(err)
		}
		y.all = append(y.all, &restored)
		leave() // its record is there
	}
	if _, err := g.Enter(t.Context(), "runc", 300*mib, 1); !errs.Is(err, errs.Exhausted) || len(*refused) != 1 {
		t.Errorf("a fourth: %v", err)
	}
	wantRefusal(t, g, errs.Exhausted, unknownRetry, "3 creations in progress need 900 MiB")
	y.all[0] = &record.Record{State: record.Running, Spec: restored.Spec}
	y.memory -= 300 * mib
	wantRefusal(t, g, errs.Exhausted, unknownRetry, "2 creations in progress need 600 MiB")
	y.all[1] = &record.Record{State: record.Starting, Spec: restored.Spec} // it failed, and begins anew
	mustEnter(t, g)()
}
