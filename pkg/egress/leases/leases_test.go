package leases

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	one = netip.MustParseAddr("203.0.113.1")
	two = netip.MustParseAddr("203.0.113.2")
)

// TestTable: bounds, ends, and several names of one address.
func TestTable(t *testing.T) {
	var l Table
	now := time.Now().Truncate(time.Millisecond)
	l.Add("one.test", []netip.Addr{one}, time.Second, now)
	l.Add("two.test", []netip.Addr{one}, time.Hour, now)
	l.Add("three.test", []netip.Addr{two}, 1<<40, now)
	for after, want := range map[time.Duration]string{
		0: "one.test two.test", Least + Grace - 1: "one.test two.test", Least + Grace: "two.test",
		time.Hour: "two.test", time.Hour + Grace: "",
	} {
		if got := strings.Join(l.Of(one, now.Add(after), false), " "); got != want {
			t.Errorf("after %v: %q, want %q", after, got, want)
		}
	}
	for after, want := range map[time.Duration]time.Duration{slack: 0, slack + time.Second: slack + time.Second} {
		var l Table
		l.Add("one.test", []netip.Addr{one}, 0, now)
		l.Add("one.test", []netip.Addr{one}, 0, now.Add(after))
		for x := range l.All {
			if got := x.Until.Sub(now.Add(Least + Grace)); got != want {
				t.Errorf("asked again after %v, a lease is longer by %v, want %v", after, got, want)
			}
		}
	}
	if got := l.Of(one, now.Add(24*time.Hour), true); len(got) != 2 {
		t.Errorf("those that have ended: %q", got)
	}
	if got := l.Of(two, now.Add(longest+Grace), false); got != nil {
		t.Errorf("no answer holds longer than %v, but %q does", longest, got)
	}
	for i := range 3 * most {
		many := netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)})
		at := now.Add(time.Duration(i) * time.Millisecond)
		l.Add("many.test", []netip.Addr{many}, 0, at)
		if l.n > most {
			t.Fatalf("%d leases", l.n)
		}
		if l.Of(many, at, false) == nil {
			t.Fatal("a lease is gone at once")
		}
	}
	n := 0
	for range l.All {
		n++
	}
	if n != l.n || n < most/2 {
		t.Errorf("%d leases, counted as %d", n, l.n)
	}
	if got := l.Of(one, now, false); !slices.Contains(got, "two.test") {
		t.Errorf("the lease that ends last went first: %q", got)
	}
}

func book(t testing.TB, dir string) *Book {
	t.Helper()
	b, err := OpenBook(dir, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// TestKept: what was added is there after a daemon that was killed, with its end; and
// nothing is left of a sandbox that is gone.
func TestKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "leases")
	b := book(t, dir)
	now := time.Now()
	l := b.Open("first")
	if b.Open("first") != l {
		t.Error("a sandbox has two tables")
	}
	l.Begin()
	l.Add("db.test", []netip.Addr{one, two}, 0, now)
	l.Add("other.test", []netip.Addr{two}, 10*time.Minute, now)
	l.Add("ended.test", []netip.Addr{two}, 0, now.Add(-time.Hour))
	b.Open("second").Add("db.test", []netip.Addr{one}, 0, now) // its flows are older than its table

	b = book(t, dir) // the first one was not closed: its daemon was killed
	l = b.Open("first")
	for _, c := range []struct {
		after time.Duration
		want  string
	}{{0, "db.test other.test"}, {Least + Grace + time.Second, "other.test"}, {10*time.Minute + Grace + time.Second, ""}} {
		if got := strings.Join(l.Of(two, now.Add(c.after), false), " "); got != c.want {
			t.Errorf("after %v: %q, want %q", c.after, got, c.want)
		}
	}
	if got := l.Of(two, now, true); !slices.Contains(got, "ended.test") {
		t.Errorf("a lease that has ended is lost: %q", got)
	}
	if second := b.Open("second"); !l.Whole() || second.Whole() || second.Of(one, now, false) == nil {
		t.Errorf("the first is whole: %v, the second: %v", l.Whole(), second.Whole())
	}
	if ids, err := b.List(); err != nil || fmt.Sprint(ids) != "[first second]" {
		t.Errorf("%q, %v", ids, err)
	}
	for range 2 {
		if err := b.Forget("first"); err != nil {
			t.Fatal(err)
		}
	}
	l.Add("late.test", []netip.Addr{one}, 0, now) // by an answer that was under way
	l.Begin()
	if ids, err := b.List(); err != nil || fmt.Sprint(ids) != "[second]" {
		t.Errorf("%q, %v", ids, err)
	}
	if l = b.Open("first"); l.Whole() || l.Of(two, now, true) != nil {
		t.Error("a new sandbox has the leases of an old one")
	}
}

// TestFile: of a file only whole lines count, and each file that is not one of this package
// counts as none. Whatever was there, the next daemon finds what was added to it.
func TestFile(t *testing.T) {
	now := time.Now()
	line := string(appendLine(nil, "good.test", []netip.Addr{one}, now.Add(time.Minute)))
	other := string(appendLine(nil, "more.test", []netip.Addr{two}, now.Add(time.Minute)))
	for text, c := range map[string]struct {
		names string
		whole bool
	}{
		"":                                      {},
		"DNS leases":                            {},
		line:                                    {},
		"DNS leases 2 whole\n":                  {},
		"\x00\x01\x02\xff\n":                    {},
		headWhole:                               {whole: true},
		headParts + line:                        {names: "good.test"},
		headWhole + line:                        {"good.test", true},
		headWhole + line + other:                {"good.test more.test", true},
		headWhole + line + line:                 {"good.test", true},
		headWhole + line[:20]:                   {whole: true}, // torn: its answer was not sent
		headWhole + line + other[:len(other)-1]: {"good.test", true},
		headWhole + line + "999999999999999999999 x.test 203.0.113.1 .\n":     {names: "good.test"},
		headWhole + strings.Replace(line, " .", "", 1) + other:                {names: "more.test"},
		headWhole + strings.Replace(line, "good", "GOOD", 1) + other:          {names: "more.test"},
		headWhole + strings.Replace(line, "203.0.113.1", "::ffff:1.2.3.4", 1): {},
		headWhole + strings.Replace(line, "203.0.113.1 ", "", 1):              {},
		headWhole + "9223372036854775807 good.test 203.0.113.1 .\n":           {"good.test", true}, // the clock was set
		headWhole + line + strings.Repeat("x", maxFile):                       {},
		headWhole + line + "0 .\n":                                            {names: "good.test"}, // others made room
		headWhole + line + "9223372036854775807 .\n" + other:                  {names: "more.test"},
		headWhole + line + " .\n" + other:                                     {names: "good.test more.test"},
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "id"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		what := text[:min(len(text), 120)]
		l := book(t, dir).Open("id")
		got := append(l.Of(one, now, false), l.Of(two, now, false)...)
		if strings.Join(got, " ") != c.names || l.Whole() != c.whole {
			t.Errorf("%q: %q, whole: %v; want %q, %v", what, got, l.Whole(), c.names, c.whole)
		}
		if got := l.Of(one, now.Add(longest+Grace+time.Minute), false); got != nil {
			t.Errorf("%q: a lease does not end: %q", what, got)
		}
		l.Add("next.test", []netip.Addr{one}, 0, now)
		l.Add("last.test", []netip.Addr{one}, 0, now)
		l = book(t, dir).Open("id")
		if got := l.Of(one, now, false); !slices.Contains(got, "next.test") || !slices.Contains(got, "last.test") || l.Whole() != c.whole {
			t.Errorf("%q: after it: %q, whole: %v", what, got, l.Whole())
		}
	}
}

// TestFileIsBounded: a guest that asks for ever fills no file system, and the file has what
// the memory has.
func TestFileIsBounded(t *testing.T) {
	dir := t.TempDir()
	l := book(t, dir).Open("id")
	l.Begin()
	now := time.Now().Add(-24 * time.Hour)
	long := strings.Repeat("a", 200) + ".test"
	largest := int64(0)
	for i := range 20000 {
		a := netip.AddrFrom4([4]byte{11, 0, byte(i % 1000 >> 8), byte(i % 1000)})
		now = now.Add(2 * time.Second)
		l.Add(long, []netip.Addr{a}, 0, now)
		largest = max(largest, l.kept.size)
	}
	if limit := int64(spare + 2*1000*(len(long)+40)); largest > limit {
		t.Errorf("the file had %d bytes; limit %d", largest, limit)
	}
	if !l.Whole() {
		t.Error("not whole, although nothing had to make room")
	}
	same(t, l, book(t, dir).Open("id"))
	anew := 0
	for i := range 2 * most {
		now = now.Add(time.Second)
		whole, file, size, least := l.Whole(), l.kept.file, l.kept.size, l.kept.least
		l.Add(fmt.Sprintf("%d.%s", i, long), []netip.Addr{one}, 0, now)
		largest = max(largest, l.kept.size)
		if whole && !l.Whole() { // they have just made room for the first time
			next := book(t, dir).Open("id")
			if next.Whole() {
				t.Error("whole, although leases have just made room for others")
			}
			same(t, l, next)
		}
		if l.kept.file != file {
			anew++
			if size+1000 < 2*least+spare {
				t.Errorf("a file of %d bytes was written anew with %d", least, size)
			}
		}
	}
	if anew == 0 {
		t.Error("the file was never written anew; the test shows nothing")
	}
	if limit := int64(spare + 2*most*(len(long)+50)); largest > limit || largest > maxFile {
		t.Errorf("the file had %d bytes; limit %d", largest, limit)
	}
	next := book(t, dir).Open("id")
	if l.Whole() || next.Whole() {
		t.Error("whole, although leases made room for others")
	}
	same(t, l, next)
}

// TestFilesAreBounded: many guests that ask for ever fill no file system together. A sandbox
// whose leases have no room has them in memory, and has them kept when another one is gone.
func TestFilesAreBounded(t *testing.T) {
	dir := t.TempDir()
	b := book(t, dir)
	if b.bound != maxFiles {
		t.Errorf("a bound of %d", b.bound)
	}
	b.bound = 180 << 10
	now := time.Now()
	add := func(id string, i int) {
		b.Open(id).Add("name.test", []netip.Addr{netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)})}, 0, now)
	}
	b.Open("b").Begin()
	add("b", 0)
	for i := range most {
		now = now.Add(time.Millisecond)
		add("a", i)
		if i > most/2 {
			add("b", i)
		}
		total := int64(0)
		for _, id := range []string{"a", "b"} {
			if s, err := os.Stat(filepath.Join(dir, id)); err == nil {
				total += s.Size()
			}
		}
		if used := b.used.Load(); total != used || total > b.bound {
			t.Fatalf("the files have %d bytes, counted as %d; bound %d", total, used, b.bound)
		}
	}
	l := b.Open("b")
	if n := l.n; l.kept.failed.IsZero() || n != most/2 {
		t.Fatalf("%d leases, all kept: %v", n, l.kept.failed.IsZero())
	}
	if next := book(t, dir).Open("b"); next.Whole() || !l.Whole() || next.n >= l.n {
		t.Errorf("of %d leases %d are kept, whole: %v", l.n, next.n, next.Whole())
	}
	if err := b.Forget("a"); err != nil {
		t.Fatal(err)
	}
	now = now.Add(retry)
	add("b", most)
	next := book(t, dir)
	if !next.Open("b").Whole() || next.used.Load() != b.used.Load() {
		t.Errorf("%d bytes are used, then %d", b.used.Load(), next.used.Load())
	}
	same(t, l, next.Open("b"))
	if err := b.Forget("b"); err != nil || b.used.Load() != 0 {
		t.Errorf("%d bytes are used when all are gone; %v", b.used.Load(), err)
	}
}

// same compares two tables.
func same(t *testing.T, a, b *Table) {
	t.Helper()
	all := func(l *Table) (lines []string) {
		for x := range l.All {
			lines = append(lines, string(appendLine(nil, x.Name, []netip.Addr{x.Addr}, x.Until)))
		}
		slices.Sort(lines)
		return lines
	}
	if x, y := all(a), all(b); !slices.Equal(x, y) {
		t.Errorf("%d leases in memory and %d in the file, or others", len(x), len(y))
	}
}

// BenchmarkAdd is what keeping leases costs before an answer is sent: of one address, where
// each 1,025th makes room for others, and of as many as an answer has, where each fifth
// does, with the longest names.
func BenchmarkAdd(b *testing.B) {
	for what, dir := range map[string]string{"kept": "/dev/shm", "memory": ""} {
		for _, addresses := range []int{1, 255} {
			b.Run(fmt.Sprintf("%s/%d", what, addresses), func(b *testing.B) {
				in := ""
				if dir != "" {
					var err error
					if in, err = os.MkdirTemp(dir, "leases"); err != nil {
						b.Fatal(err)
					}
					defer os.RemoveAll(in)
				}
				l := book(b, in).Open("id")
				l.Begin()
				var names []string
				var answers [][]netip.Addr
				for i := range 2 * most / addresses {
					name := fmt.Sprintf("%d.host.example.test", i)
					if addresses > 1 {
						name = strings.Repeat("a", 253-len(name)) + name
					}
					names, answers = append(names, name), append(answers, nil)
					for j := range addresses {
						n := i*addresses + j
						answers[i] = append(answers[i], netip.AddrFrom4([4]byte{211, 100, byte(n >> 8), byte(n)}))
					}
				}
				now := time.Now()
				for i := 0; b.Loop(); i++ {
					now = now.Add(5 * time.Millisecond) // as fast as a guest may ask
					l.Add(names[i%len(names)], answers[i%len(names)], 0, now)
				}
			})
		}
	}
}
