package flowlog

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var noon = time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)

func host(i int) Destination {
	a := [4]byte{203, byte(i >> 16), byte(i >> 8), byte(i)}
	return Destination{Addr: netip.AddrFrom4(a), Port: 443, Proto: unix.IPPROTO_TCP}
}

func name(s string) Destination { return Destination{Name: s, Port: 443, Proto: unix.IPPROTO_TCP} }

func openBook(t testing.TB, dir string) *Book {
	t.Helper()
	b, err := OpenBook(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// wantReport compares what the log of "a" has with r. Times lose what JSON does not
// keep.
func wantReport(t *testing.T, b *Book, r Report) {
	t.Helper()
	plain := func(r Report) Report {
		tally := func(t *Tally) { t.First, t.Last = t.First.UTC().Round(0), t.Last.UTC().Round(0) }
		r.Since = r.Since.UTC().Round(0)
		tally(&r.Total)
		tally(&r.Other)
		r.Flows = slices.Clone(r.Flows)
		for i := range r.Flows {
			tally(&r.Flows[i].Tally)
		}
		return r
	}
	if got, want := plain(b.Report("a")), plain(r); !reflect.DeepEqual(got, want) {
		t.Errorf("the log has\n%+v\nwant\n%+v", got, want)
	}
}

// TestLogAgainstLists counts at random, and compares with two lists that are sorted anew
// for every connection.
func TestLogAgainstLists(t *testing.T) {
	r := rand.New(rand.NewPCG(16, 5))
	l := &Log{id: "a"}
	var reached, refused []Entry // the latest first
	var other, total Tally
	for i := range 50_000 {
		to, allowed, at := host(r.IntN(400)), r.IntN(3) == 0, noon.Add(time.Duration(i)*time.Second)
		if r.IntN(4) == 0 { // more often one of a few
			to = name(fmt.Sprint(r.IntN(30)))
		}
		l.Count(to, allowed, at)
		total.add(allowed, at)
		e := Entry{Destination: to}
		for _, list := range []*[]Entry{&reached, &refused} {
			if at := slices.IndexFunc(*list, func(e Entry) bool { return e.Destination == to }); at >= 0 {
				e = (*list)[at]
				*list = slices.Delete(*list, at, at+1)
			}
		}
		e.add(allowed, at)
		list, most := &refused, maxRefused
		if e.Allowed > 0 {
			list, most = &reached, maxReached
		}
		*list = slices.Insert(*list, 0, e)
		if len(*list) > most {
			other.merge((*list)[most].Tally)
			*list = (*list)[:most]
		}
	}
	all := slices.Concat(reached, refused)
	slices.SortFunc(all, func(a, b Entry) int { return b.Last.Compare(a.Last) })
	if got := l.Report(); !slices.Equal(got.Flows, all) || got.Other != other || got.Total != total {
		t.Errorf("%d destinations, others %+v, total %+v\nwant %d, %+v, %+v", len(got.Flows), got.Other, got.Total, len(all), other, total)
	}
	if len(all) < 240 || other.Allowed == 0 || other.Denied == 0 {
		t.Errorf("the test pushed out too little: %d destinations, others %+v", len(all), other)
	}
}

// TestRefusedPushOutNoConnection: a guest that is refused a hundred thousand times is still
// known to have reached one host.
func TestRefusedPushOutNoConnection(t *testing.T) {
	l := &Log{id: "a"}
	l.Count(name("pypi.org"), true, noon)
	for i := range 100_000 {
		l.Count(host(i), false, noon.Add(time.Minute))
	}
	r := l.Report()
	if n := len(r.Flows); n != 1+maxRefused || r.Flows[n-1].Destination != name("pypi.org") || r.Flows[n-1].Allowed != 1 {
		t.Errorf("%d destinations, the first %+v", n, r.Flows[len(r.Flows)-1])
	}
	if r.Total.Denied != 100_000 || r.Other.Denied != 100_000-maxRefused || !r.Other.Last.Equal(noon.Add(time.Minute)) {
		t.Errorf("total %+v, others %+v", r.Total, r.Other)
	}
}

// TestTraffic: totals go on when a link is made anew, and when the host starts again, which
// may give a link the old one's index.
func TestTraffic(t *testing.T) {
	b := openBook(t, "")
	b.Open("a")
	steps := []struct {
		what  string
		boot  string
		index int
		now   uint64
		want  uint64
	}{
		{"a new link", "one", 7, 100, 100},
		{"the same", "one", 7, 150, 150},
		{"nothing passed", "one", 7, 150, 150},
		{"another link", "one", 8, 10, 160},
		{"another link that has more", "one", 9, 500, 660},
		{"another boot", "two", 9, 600, 1260},
		{"its counters began again", "two", 9, 50, 1310},
	}
	for _, s := range steps {
		b.boot = s.boot
		b.Sample("a", s.index, Traffic{s.now, 2 * s.now, 3 * s.now, 4 * s.now})
		if got, want := b.Report("a").Traffic, (Traffic{s.want, 2 * s.want, 3 * s.want, 4 * s.want}); got != want {
			t.Errorf("%s: %+v, want %+v", s.what, got, want)
		}
	}
	b.Sample("unknown", 1, Traffic{1, 1, 1, 1})
	if got, want := b.Traffic(), b.Report("a").Traffic; got != want {
		t.Errorf("all sandboxes: %+v, want %+v", got, want)
	}
}

// fill counts two connections and a link.
func fill(b *Book) {
	l := b.Open("a")
	l.Count(name("pypi.org"), true, noon)
	l.Count(host(1), false, noon.Add(time.Second))
	b.Sample("a", 7, Traffic{1000, 100, 10, 1})
}

// TestKilled holds the statement of docs/design/network.md on what a killed daemon and a
// power cut lose: a Book that nobody closes is opened again, with and without the file
// that a power cut may tear.
func TestKilled(t *testing.T) {
	dir := t.TempDir()
	b := openBook(t, dir)
	fill(b)
	if err := b.Save(true); err != nil {
		t.Fatal(err)
	}
	synced := b.Report("a")
	b.Open("a").Count(name("pypi.org"), true, noon.Add(time.Minute))
	b.Sample("a", 7, Traffic{2000, 200, 20, 2})
	if err := b.Save(false); err != nil {
		t.Fatal(err)
	}
	saved := b.Report("a")
	b.Open("a").Count(host(2), true, noon.Add(time.Hour)) // is lost

	killed := openBook(t, dir)
	wantReport(t, killed, saved)
	killed.Open("a")
	killed.Sample("a", 7, Traffic{2500, 250, 25, 3}) // the link went on meanwhile
	if got := killed.Report("a").Traffic; got != (Traffic{2500, 250, 25, 3}) {
		t.Errorf("the traffic of a link that outlived its daemon: %+v", got)
	}

	live := filepath.Join(dir, "a"+liveFile)
	text, err := os.ReadFile(live)
	if err != nil {
		t.Fatal(err)
	}
	for what, torn := range map[string][]byte{
		"empty": nil, "half": text[:len(text)/2], "zeros": make([]byte, len(text)), "absent": []byte("-"),
	} {
		if err := os.WriteFile(live, torn, 0o600); err != nil {
			t.Fatal(err)
		}
		if what == "absent" {
			os.Remove(live)
		}
		t.Run(what, func(t *testing.T) { wantReport(t, openBook(t, dir), synced) })
	}
}

// TestLeave: what a daemon counted until it ended is there for the next one, bytes included, though
// it waits for no disk.
func TestLeave(t *testing.T) {
	dir := t.TempDir()
	b := openBook(t, dir)
	fill(b)
	if err := b.Save(true); err != nil {
		t.Fatal(err)
	}
	b.Sample("a", 7, Traffic{2000, 200, 20, 2})
	if err := b.Leave(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(b.path("a", liveFile)); err != nil {
		t.Error("it was synced:", err)
	}
	wantReport(t, openBook(t, dir), b.Report("a"))
}

// TestSaveWritesWhatChanged: bytes alone wait for the next sync, and what did not change
// is not written.
func TestSaveWritesWhatChanged(t *testing.T) {
	dir := t.TempDir()
	b := openBook(t, dir)
	written := func(sync bool) (files string) {
		t.Helper()
		before := map[string]os.FileInfo{}
		for _, e := range []string{syncedFile, liveFile} {
			before[e], _ = os.Stat(b.path("a", e))
		}
		if err := b.Save(sync); err != nil {
			t.Fatal(err)
		}
		for _, e := range []string{syncedFile, liveFile} {
			if now, err := os.Stat(b.path("a", e)); err == nil && (before[e] == nil || !os.SameFile(now, before[e])) {
				files += e
			}
		}
		return files
	}
	b.Open("a")
	steps := []struct {
		what string
		do   func()
		sync bool
		want string
	}{
		{"nothing", func() {}, true, ""},
		{"bytes", func() { b.Sample("a", 7, Traffic{1, 1, 1, 1}) }, false, ""},
		{"bytes, sync", func() {}, true, syncedFile},
		{"a connection", func() { b.Open("a").Count(host(1), true, noon) }, false, liveFile},
		{"nothing more", func() {}, false, ""},
		{"the same, sync", func() {}, true, syncedFile},
		{"nothing more, sync", func() {}, true, ""},
		{"the end", func() { b.Sample("a", 7, Traffic{2, 2, 2, 2}); b.Close("a") }, false, syncedFile},
	}
	for _, s := range steps {
		s.do()
		if got := written(s.sync); got != s.want {
			t.Errorf("%s: wrote %q, want %q", s.what, got, s.want)
		}
	}
	if b.opened("a") != nil {
		t.Error("the log of a sandbox that ended stays in memory")
	}
	if r := b.Report("a"); r.Traffic.RxBytes != 2 || r.Total.Allowed != 1 {
		t.Errorf("the log of a sandbox that ended: %+v", r)
	}
	b.Close("a") // is closed
	l := b.Open("a")
	l.Count(host(1), true, noon)
	b.Close("a")
	if b.Open("a") != l {
		t.Error("a log that is opened again before it was written is another")
	}
	if written(false); b.opened("a") != l {
		t.Error("a log that was opened again left memory")
	}
}

// TestForget: of a sandbox that is deleted nothing stays, whatever was being written.
func TestForget(t *testing.T) {
	dir := t.TempDir()
	b := openBook(t, dir)
	for _, saves := range [][]bool{{}, {true}, {false}, {true, false}} {
		fill(b)
		for _, sync := range saves {
			b.Open("a").Count(host(3), true, noon)
			if err := b.Save(sync); err != nil {
				t.Fatal(err)
			}
		}
		for _, end := range []string{syncedFile, liveFile} { // a daemon was killed while it wrote them
			if err := os.WriteFile(b.path("a", end+unfinished), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		late := b.opened("a")
		for range 2 {
			if err := b.Forget("a"); err != nil {
				t.Fatal(err)
			}
		}
		late.Count(host(1), true, noon)
		if _, _, err := b.save(late, durably); err != nil { // began before Forget
			t.Fatal(err)
		}
		if ids, err := b.List(); err != nil || len(ids) != 0 {
			t.Errorf("after %v: %v, %v", saves, ids, err)
		}
		if r := b.Report("a"); !r.Since.IsZero() {
			t.Errorf("after %v: %+v", saves, r)
		}
	}
}

func TestList(t *testing.T) {
	dir := t.TempDir()
	b := openBook(t, dir)
	fill(b)
	for _, f := range []string{"b.live", "c.json", "d.live.new"} {
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if ids, err := b.List(); err != nil || strings.Join(ids, "") != "abcd" {
		t.Errorf("%v, %v", ids, err)
	}
}

// TestTogether has everybody at one log: connections, the queries of clients, saves, stops
// and starts. No connection is lost.
func TestTogether(t *testing.T) {
	b := openBook(t, t.TempDir())
	const lives, counters, each = 20, 4, 100
	var others sync.WaitGroup
	done := make(chan struct{})
	for _, f := range []func(){
		func() { b.Report("a") },
		func() { b.Sample("a", 1, Traffic{1, 1, 1, 1}) },
		func() {
			if err := b.Save(false); err != nil {
				t.Error(err)
			}
		},
	} {
		others.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
					f()
				}
			}
		})
	}
	for range lives {
		l := b.Open("a")
		var wg sync.WaitGroup
		for i := range counters {
			wg.Go(func() {
				for j := range each {
					l.Count(host(i*each+j), j%2 == 0, noon)
				}
			})
		}
		wg.Wait()
		b.Close("a")
	}
	close(done)
	others.Wait()
	if err := b.Save(true); err != nil {
		t.Fatal(err)
	}
	r := openBook(t, b.dir).Report("a")
	if n := r.Total.Allowed + r.Total.Denied; n != lives*counters*each {
		t.Errorf("%d connections, want %d", n, lives*counters*each)
	}
}

// TestFloodOfDestinations: a hundred thousand destinations more take no memory.
func TestFloodOfDestinations(t *testing.T) {
	l := &Log{id: "a"}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	count := func(from, to int) {
		for i := from; i < to; i++ {
			l.Count(host(i), i%2 == 0, noon)
		}
	}
	was := heap()
	count(0, 1000)
	if taken := int64(heap()) - int64(was); taken > 100<<10 {
		t.Errorf("a full log takes %d bytes", taken)
	}
	was = heap()
	count(1000, 101_000)
	if grown := int64(heap()) - int64(was); grown > 32<<10 {
		t.Errorf("the log grew by %d bytes", grown)
	}
	if allocs := testing.AllocsPerRun(10, func() { count(200_000, 201_000) }); allocs > 1 {
		t.Errorf("%.0f allocations for 1,000 new destinations", allocs)
	}
	runtime.KeepAlive(l)
}

// BenchmarkCount is what the log adds to a verdict.
func BenchmarkCount(b *testing.B) {
	for what, most := range map[string]int{"known": 10, "new": 100_000} {
		b.Run(what, func(b *testing.B) {
			l := &Log{id: "a"}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				l.Count(host(i%most), i%2 == 0, time.Now())
			}
		})
	}
}

// BenchmarkSave has 1,000 full logs, each with a new connection.
func BenchmarkSave(b *testing.B) {
	for _, sync := range []bool{false, true} {
		b.Run(map[bool]string{true: "sync", false: "live"}[sync], func(b *testing.B) {
			book := openBook(b, b.TempDir())
			logs := make([]*Log, 1000)
			for i := range logs {
				logs[i] = book.Open(fmt.Sprint(i))
				for j := range 500 {
					logs[i].Count(host(j), j%2 == 0, noon)
				}
			}
			for b.Loop() {
				for _, l := range logs {
					l.Count(host(1), true, noon)
				}
				if err := book.Save(sync); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
