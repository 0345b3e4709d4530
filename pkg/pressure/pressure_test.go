package pressure

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// TestMarks: a higher rung needs less room, and the reserve is where nothing new is made.
func TestMarks(t *testing.T) {
	for _, c := range []struct{ size, reserve, collect int64 }{
		{20 * gib, 256 * mib, 2 * gib}, // the defaults: a tenth
		{10 * gib, 256 * mib, gib},
		{1000 * gib, 256 * mib, 2 * gib}, // eight reserves
		{3 * gib, 256 * mib, 512 * mib},  // two reserves
		{gib, 256 * mib, 256 * mib},      // a quarter of it
		{512 * mib, 256 * mib, 256 * mib},
		{100 * mib, 64 << 40, 64 << 40}, // more than there is
	} {
		m := ByBytes(c.size, c.reserve)
		if m[Collect] != c.collect || m[Refuse] != c.reserve || m[Rest] != c.reserve/4 || m[Calm] != 0 {
			t.Errorf("%d MiB with %d MiB of reserve: %v", c.size/mib, c.reserve/mib, m)
		}
	}
	if m := ByBytes(gib, 0); m != (Marks{}) {
		t.Errorf("without a reserve: %v", m)
	}
	for files, want := range map[int64]Marks{
		1_310_720: {0, 65_536, 13_107, 3_276}, 16 << 20: {0, 100_000, 20_000, 5_000}, 1000: {0, 50, 10, 2},
	} {
		if m := ByFiles(files, mib); m != want {
			t.Errorf("%d files: %v", files, m)
		}
	}
}

// TestAfter: each rung is entered at its mark and left a quarter above, whatever the way.
func TestAfter(t *testing.T) {
	m := &Marks{Collect: 1000, Refuse: 400, Rest: 100}
	now := Calm
	for _, c := range []struct {
		free int64
		want Rung
	}{
		{1000, Calm},
		{999, Collect},
		{1249, Collect},
		{1250, Calm},
		{399, Refuse},
		{499, Refuse},
		{500, Collect},
		{400, Collect},
		{99, Rest},
		{124, Rest},
		{125, Refuse},
		{500, Collect},
		{0, Rest},
		{1249, Collect},
		{1250, Calm},
		{0, Rest},
		{5000, Calm},
	} {
		if now = m.After(now, c.free); now != c.want {
			t.Fatalf("with %d free: %v, want %v", c.free, now, c.want)
		}
	}
	for r := Calm; r <= Rest; r++ {
		if got := new(Marks).After(r, 0); got != Calm {
			t.Errorf("without marks, from %v: %v", r, got)
		}
	}
}

// TestFiles: a disk without inodes is as full as one without bytes.
func TestFiles(t *testing.T) {
	s := Space{Title: "the disk", FreeBytes: 10 * gib, Bytes: 20 * gib, FreeFiles: 9, Files: 1000, Remedy: "delete some"}
	if r := s.Rung(Calm, 256*mib); r != Refuse {
		t.Errorf("9 of 1000 files: %v", r)
	}
	if text := s.why(Refuse, 256*mib); text != "the disk has room for 9 of 1000 files, and until 12 are nothing new is made "+
		"(storage.reserve); delete some" {
		t.Error(text)
	}
	if text := s.Change(Calm, Refuse, 256*mib); text != "the disk has room for 9 of 1000 files, less than 10: nothing new is made; "+
		"delete some" {
		t.Error(text)
	}
	s.Files, s.FreeFiles = 0, 0 // btrfs
	if r := s.Rung(Calm, 256*mib); r != Calm {
		t.Errorf("a file system that has no limit of files: %v", r)
	}
	if text := s.Change(Collect, Calm, 256*mib); !strings.HasPrefix(text, "the disk has 10240 MiB of 20480 MiB free: ") {
		t.Error(text)
	}
}

// A yard is a host whose disks a test fills.
type yard struct {
	Ladder
	free     map[string]int64
	err      error
	did      []string
	changes  []string
	collects int64 // what a round frees
}

func newYard(t *testing.T) *yard {
	y := &yard{free: map[string]int64{Pool: 20 * gib, State: 20 * gib}}
	y.Ladder = Ladder{
		Reserve: 256 * mib,
		Spaces: func() (all []Space, _ error) {
			for _, name := range []string{Pool, State} {
				all = append(all, Space{Name: name, Title: "the " + name, FreeBytes: y.free[name], Bytes: 20 * gib, Remedy: "buy another"})
			}
			return all, y.err
		},
		Collect: func(_ context.Context, s Space, r Rung) error {
			y.did = append(y.did, fmt.Sprint("collect ", s.Name, " ", r))
			y.free[s.Name] += y.collects
			return nil
		},
		Rest: func(_ context.Context, text string) { y.did = append(y.did, "rest, as "+text) },
		Tell: func(c Change) { y.changes = append(y.changes, fmt.Sprint(c.Space.Name, " ", c.From, "-", c.To)) },
		Log:  slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
	return y
}

func (y *yard) took(t *testing.T, now bool, want ...string) {
	t.Helper()
	if err := y.Act(t.Context(), now); err != nil {
		t.Error(err)
	}
	if !slices.Equal(y.did, want) {
		t.Errorf("did %q, want %q", y.did, want)
	}
	y.did = nil
}

// TestLadder climbs and comes down again. Each change is told once.
func TestLadder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		y := newYard(t)
		y.took(t, false)
		y.free[Pool] = gib
		y.took(t, false, "collect pool collect")
		y.took(t, false) // too soon
		y.took(t, true, "collect pool collect")
		time.Sleep(round)
		y.free[State] = 200 * mib
		y.took(t, false, "collect pool collect", "collect state refuse")
		err := y.Room("another image", State)
		if !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(), "no room for another image: "+
			"the state has 200 MiB of 20480 MiB free, and until 320 MiB are nothing new is made (storage.reserve); buy another") {
			t.Errorf("%v", err)
		}
		if e, _ := errors.AsType[*errs.Error](y.Room("a")); e == nil || e.Retry != retry {
			t.Errorf("any space: %+v", e)
		}
		if err := y.Room("another snapshot", Pool); err != nil {
			t.Error(err)
		}
		y.free[Pool] = 10 * mib
		y.took(t, true, "collect pool rest", "rest, as the pool is nearly full", "collect state refuse")
		if got := y.Rungs(); got[Pool] != Rest || got[State] != Refuse {
			t.Errorf("rungs %v", got)
		}
		y.free[Pool], y.free[State] = 20*gib, 300*mib
		y.took(t, true, "collect state refuse")
		y.free[State] = 320 * mib // room that was just made counts at once
		if err := y.Room("another image", State); err != nil {
			t.Error(err)
		}
		want := []string{
			"pool calm-collect", "state calm-refuse", "pool collect-rest", "pool rest-calm", "state refuse-collect",
		}
		if !slices.Equal(y.changes, want) {
			t.Errorf("told %q", y.changes)
		}
	})
}

// TestRun: what is collected ends the pressure, without anybody who asks.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		y := newYard(t)
		y.collects = gib
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		y.free[Pool] = 0
		go func() { y.Run(ctx); close(done) }()
		time.Sleep(time.Minute)
		cancel()
		<-done
		if got := y.Rungs(); got[Pool] != Calm || y.free[Pool] != 3*gib || len(y.did) != 4 { // with one rest
			t.Errorf("rungs %v, %d GiB free, did %q", got, y.free[Pool]/gib, y.did)
		}
	})
}

// TestUnknown: a disk that cannot be looked at stays on its rung, and the log says so once.
func TestUnknown(t *testing.T) {
	y := newYard(t)
	var log strings.Builder
	y.Log = slog.New(slog.NewTextHandler(&log, nil))
	y.free[Pool] = 0
	y.Look()
	y.err = errors.New("no statfs")
	for range 3 {
		y.took(t, true)
	}
	if y.Rungs()[Pool] != Rest || strings.Count(log.String(), "no statfs") != 1 {
		t.Errorf("%v\n%s", y.Rungs(), &log)
	}
	y.Reserve = 0
	if y.Run(t.Context()); y.Full() != "" {
		t.Error("without a reserve something is refused")
	}
}

// TestRealDisk fills a small tmpfs, by bytes and by files.
func TestRealDisk(t *testing.T) {
	hosttest.Root(t)
	dir := hosttest.SmallDisk(t, "size=64m,nr_inodes=1000")
	const reserve = 4 * mib
	now := Calm
	rung := func() Rung {
		t.Helper()
		s := Space{Title: "a tmpfs"}
		if err := s.Stat(dir); err != nil {
			t.Fatal(err)
		}
		if s.Bytes != 64*mib || s.Files != 1000 {
			t.Fatalf("%+v", s)
		}
		now = s.Rung(now, reserve)
		return now
	}
	ballast := filepath.Join(dir, "b")
	for used, want := range []struct {
		mib  int64
		rung Rung
	}{{0, Calm}, {50, Calm}, {58, Collect}, {55, Collect}, {53, Calm}, {61, Refuse}, {60, Refuse}, {59, Collect}, {63, Refuse}, {0, Calm}} {
		if err := os.WriteFile(ballast, make([]byte, want.mib*mib), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := rung(); got != want.rung {
			t.Errorf("step %d, %d MiB used: %v, want %v", used, want.mib, got, want.rung)
		}
	}
	free := hosttest.FillDisk(t, dir)
	if got := rung(); got != Rest {
		t.Errorf("a full disk: %v", got)
	}
	free()
	if got := rung(); got != Calm {
		t.Errorf("empty again: %v", got)
	}
	for i := range 1000 {
		f, err := os.Create(filepath.Join(dir, fmt.Sprint(i)))
		if err != nil {
			break
		}
		f.Close()
	}
	if got := rung(); got != Rest {
		t.Errorf("no inode is left: %v", got)
	}
	if err := new(Space).Stat(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// TestBroken: a disk that takes no writes after an error is on rung failed: nothing new is made, nothing
// is removed or paused there, whatever is free, and it is told once. After a boot it is as full as it is.
func TestBroken(t *testing.T) {
	hosttest.Root(t)
	disk := hosttest.NewDisk(t, 64*mib)
	for _, reserve := range []int64{256 * mib, 0} {
		y := newYard(t)
		y.Reserve = reserve
		y.Try = func(s Space) error {
			if s.Name == Pool {
				return nil
			}
			return Try(disk.Dir)
		}
		y.took(t, true)
		disk.Break()
		y.took(t, true)
		y.free[State] = 10 * mib
		if err := y.Room("another image", State); !errs.Is(err, errs.Exhausted) || !strings.Contains(err.Error(),
			"no room for another image: the state takes no writes: read-only file system: nothing new is made") {
			t.Errorf("%v", err)
		}
		if err := y.Room("another snapshot", Pool); err != nil {
			t.Error(err)
		}
		y.took(t, false)
		disk.Repair()
		y.free[State] = 20 * gib
		y.took(t, false)
		if err := y.Room("another image"); err != nil {
			t.Error(err)
		}
		if got := y.changes; !slices.Equal(got[len(got)-2:], []string{"state calm-failed", "state failed-calm"}) || len(got) != 2 {
			t.Errorf("told %q", got)
		}
	}
}
