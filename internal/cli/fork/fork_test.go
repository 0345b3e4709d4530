package fork

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestTree holds the picture of what is a copy of what.
func TestTree(t *testing.T) {
	box := func(id, name, source string) wire.Sandbox {
		sb := wire.Sandbox{ID: id, Status: wire.Status{State: wire.Running}, Sandboxd: &wire.Info{Name: name}}
		if source != "" {
			sb.Sandboxd.Fork = &wire.ForkOf{ID: "fork-1", Source: source, Mode: wire.ForkFiles, Index: 1}
		}
		return sb
	}
	all := []wire.Sandbox{ // the oldest first; the daemon sends the newest first
		box("lab1", "lab", ""),
		box("try1", "try-1", "lab1"),
		box("other", "", ""),
		box("try2", "", "lab1"),
		box("deep1", "", "try1"),
		box("deeper", "a b", "deep1"),
		box("deep2", "", "try1"),
		box("orphan1", "", "gone1"),
		box("orphan2", "", "gone2"),
		box("orphan3", "", "gone1"),
		box("below", "", "orphan1"),
		{ID: "foreign", Status: wire.Status{State: wire.Paused}},
	}
	all[3].Status.State = wire.Failed
	all[5].Sandboxd.Fork.Mode = wire.ForkMemory
	slices.Reverse(all)
	const want = `lab1 lab Running
├─ try1 try-1 Running (files)
│  ├─ deep1 Running (files)
│  │  └─ deeper a b Running (memory)
│  └─ deep2 Running (files)
└─ try2 Failed (files)
other Running
foreign Paused
gone1 (gone)
├─ orphan1 Running (files)
│  └─ below Running (files)
└─ orphan3 Running (files)
gone2 (gone)
└─ orphan2 Running (files)
`
	var out strings.Builder
	if err := writeTree(&out, all); err != nil || out.String() != want {
		t.Errorf("%v\n%s\nwant\n%s", err, &out, want)
	}
	for n := range strings.Count(want, "\n") {
		if err := writeTree(&full{lines: n}, all); !errors.Is(err, errFull) {
			t.Errorf("after %d lines: %v", n, err)
		}
	}
	out.Reset()
	if err := writeTree(&out, nil); err != nil || out.String() != "" {
		t.Errorf("%v %q", err, &out)
	}
}

var errFull = errors.New("it is full")

// full takes some lines.
type full struct{ lines int }

func (f *full) Write(b []byte) (int, error) {
	if f.lines--; f.lines < 0 {
		return 0, errFull
	}
	return len(b), nil
}

// TestLines: whole lines come, each with the copy before it, however they are written.
func TestLines(t *testing.T) {
	long := strings.Repeat("x", maxLine)
	for _, c := range []struct {
		writes []string
		want   string
	}{
		{nil, ""},
		{[]string{""}, ""},
		{[]string{"a\n"}, "c | a\n"},
		{[]string{"a"}, "c | a\n"},
		{[]string{"a", "b", "c\nd"}, "c | abc\nc | d\n"},
		{[]string{"a\nb\n\nc"}, "c | a\nc | b\nc | \nc | c\n"},
		{[]string{"\n"}, "c | \n"},
		{[]string{"a\r\n"}, "c | a\r\n"},
		{[]string{"\xff\x00", "\n"}, "c | \xff\x00\n"},
		{[]string{long}, "c | " + long + "\n"},
		{[]string{long + "\n"}, "c | " + long + "\n"},
		{[]string{long, "y"}, "c | " + long + "y\n"},
		{[]string{long + "yz", "\nb"}, "c | " + long + "yz\nc | \nc | b\n"}, // the rest of a line without bounds is a line
		{[]string{long + "y\n"}, "c | " + long + "y\n"},
	} {
		var out bytes.Buffer
		l := newRace(nil, &out, nil).lines(&out, wire.ForkChild{ID: "c"})
		for _, w := range c.writes {
			given := []byte(w)
			if n, err := l.Write(given); n != len(w) || err != nil {
				t.Errorf("%.20q: %d, %v", c.writes, n, err)
			}
			clear(given) // the caller writes into it again
		}
		if err := l.end(); err != nil || out.String() != c.want {
			t.Errorf("%.40q: %v, %.80q", c.writes, err, &out)
		}
	}
	l := newRace(nil, &full{}, nil).lines(&full{}, wire.ForkChild{})
	if _, err := l.Write([]byte("a\n")); !errors.Is(err, errFull) {
		t.Errorf("%v", err)
	}
	l.rest = []byte("b")
	if err := l.end(); !errors.Is(err, errFull) {
		t.Errorf("%v", err)
	}
}

// TestLinesAtOnce: lines of two copies, on both streams, are never mixed within a line.
func TestLinesAtOnce(t *testing.T) {
	const each = 500
	var out bytes.Buffer
	r := newRace(nil, &out, &out)
	var wg sync.WaitGroup
	for _, c := range []wire.ForkChild{{ID: "1", Name: "a"}, {ID: "b"}} {
		for _, stream := range []string{"out", "err"} {
			wg.Go(func() {
				l := r.lines(&out, c)
				for i := range each {
					for _, piece := range []string{stream, " ", fmt.Sprint(i), "\n"} {
						if _, err := l.Write([]byte(piece)); err != nil {
							t.Error(err)
						}
					}
				}
			})
		}
	}
	wg.Wait()
	seen := map[string]int{}
	for line := range strings.Lines(out.String()) {
		var from, stream string
		var i int
		if n, err := fmt.Sscanf(line, "%s | %s %d\n", &from, &stream, &i); n != 3 || err != nil || i != seen[from+stream] {
			t.Fatalf("%q after %d: %v", line, seen[from+stream], err)
		}
		seen[from+stream]++
	}
	if seen["aout"] != each || seen["aerr"] != each || seen["bout"] != each || seen["berr"] != each {
		t.Errorf("%v", seen)
	}
}

// TestPromoted: the line says what each of the two is called, and by which name it was known.
func TestPromoted(t *testing.T) {
	for _, c := range []struct{ copy, source, want string }{ // their names before
		{"try-2", "lab", "try-2 (c1) is now called lab; the former lab (s1) is now called try-2"},
		{"", "lab", "c1 is now called lab; the former lab (s1) has no name now"},
		{"try-2", "", "try-2 (c1) has no name now; s1 is now called try-2"},
		{"", "", "c1 has no name now; s1 has no name now"},
	} {
		copied := wire.Sandbox{ID: "c1", Sandboxd: &wire.Info{Name: c.source}} // they have traded
		source := wire.Sandbox{ID: "s1", Sandboxd: &wire.Info{Name: c.copy}}
		if now := promoted(copied, source); now != c.want {
			t.Errorf("%q, %q: %q, want %q", c.copy, c.source, now, c.want)
		}
	}
}
