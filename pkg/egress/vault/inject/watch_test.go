package inject

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// borders reads w as a proxy does, and returns where each Read ended.
func borders(t *testing.T, w *watch) (ends []int, all string) {
	t.Helper()
	b := make([]byte, 32<<10)
	var got []byte
	for {
		n, err := w.Read(b)
		got = append(got, b[:n]...)
		if n > 0 {
			ends = append(ends, len(got))
		}
		if err == io.EOF {
			return ends, string(got)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestWatchTellsNothing: where an answer is cut does not tell a right guess of a value from a wrong
// one, wherever the guess ends, also at the end of a read of the server and before a pause of it.
func TestWatchTellsNothing(t *testing.T) {
	const value = "sEcr3T-token-of-a-guest"
	for _, hide := range []bool{false, true} {
		for n := 1; n < len(value); n++ {
			for _, size := range []int{n, 100, chunk / 8, chunk/8 + 3, 3*chunk/8 + 5} {
				for _, line := range []int{0, 1, 5, size} {
					run := func(guess string) []int {
						first := strings.Repeat("x", max(0, size-n)) + guess
						if at := len(first) - n - line; line > 0 && at >= 0 {
							first = first[:at] + "\n" + first[at+1:]
						}
						src := io.NopCloser(io.MultiReader(strings.NewReader(first), strings.NewReader("the rest")))
						needles := []needle{{[]byte(value), "c"}}
						ends, _ := borders(t, newWatch(src, needles, hide, func(*needle) {}, func() {}))
						return ends
					}
					right, wrong := run(value[:n]), run(value[:n-1]+"~")
					if !slices.Equal(right, wrong) {
						t.Fatalf("hide %v, %d bytes of %d: borders %v; of a wrong guess %v", hide, n, size, right, wrong)
					}
				}
			}
		}
	}
}

// steps is a source that gives one text at each Read, and then an error.
type steps struct {
	texts []string
	err   error
}

func (s *steps) Read(p []byte) (int, error) {
	if len(s.texts) == 0 {
		return 0, s.err
	}
	n := copy(p, s.texts[0])
	if s.texts = s.texts[1:]; len(s.texts) == 0 {
		return n, s.err
	}
	return n, nil
}

// TestWatchAtOnce: what need not be held back comes with the read that brought it; all of it comes
// before an error.
func TestWatchAtOnce(t *testing.T) {
	for _, c := range []struct {
		hide   bool
		needle string
		first  string
		want   string
	}{
		{false, "sEcr3T-token", "data: x sEcr3T-", "data: x sEcr3T-"},
		{true, "sEcr3T-token", "data: x\n\n", "data: x\n\n"},
		{true, "sEcr3T-token", "data: x\nab", "data: x\n"},
		{true, "sEcr3T-token", "0123456789abcdef", "01234"},
		{true, "sEcr3T\ntoken", "0123456789abcd\n", "0123"},
	} {
		broken := errors.New("broken")
		src := &steps{[]string{c.first, "the end"}, broken}
		w := newWatch(io.NopCloser(src), []needle{{[]byte(c.needle), "c"}}, c.hide, func(*needle) {}, func() {})
		b := make([]byte, 100)
		n, err := w.Read(b)
		if string(b[:n]) != c.want || err != nil || len(src.texts) != 1 {
			t.Errorf("%+v: %q, %v", c, b[:n], err)
		}
		rest, err := io.ReadAll(w)
		if string(rest) != (c.first + "the end")[n:] || err != broken {
			t.Errorf("%+v: then %q, %v", c, rest, err)
		}
	}
}

// TestWatchByTheBook compares a watch with its definition, on texts and needles of few letters, cut
// anywhere: of each needle, from the left, what does not overlap is found and hidden.
func TestWatchByTheBook(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	word := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = "aab\n"[r.IntN(4)]
		}
		return string(b)
	}
	for round := range 4000 {
		var needles []needle
		for i := range r.IntN(5) {
			needles = append(needles, needle{[]byte(word(1 + r.IntN(6))), fmt.Sprint(i)})
		}
		in := word(r.IntN(80))
		want, found := []byte(in), map[string]int{}
		for _, n := range needles {
			for from := 0; ; {
				at := strings.Index(in[from:], string(n.text))
				if at < 0 {
					break
				}
				found[n.credential]++
				stars(want[from+at : from+at+len(n.text)])
				from += at + len(n.text)
			}
		}
		hide := round%2 == 0
		if !hide {
			want = []byte(in)
		}
		ended := 0
		w := newWatch(io.NopCloser(&pieces{in, r, 0}), needles, hide, func(n *needle) { found[n.credential]-- }, func() { ended++ })
		w.room = 1 + r.IntN(9) // so that it makes room often
		if _, got := borders(t, w); got != string(want) || ended != 1 {
			t.Fatalf("%q of %q: %q; want %q", needles, in, got, want)
		}
		for name, n := range found {
			if n != 0 {
				t.Fatalf("%q of %q: needle %s was found %d times too few", needles, in, name, n)
			}
		}
	}
}

// TestWatchMemory: a long answer needs memory for a chunk and the longest needle.
func TestWatchMemory(t *testing.T) {
	n := needle{bytes.Repeat([]byte("ab"), 50_000), "c"}
	src := io.NopCloser(io.LimitReader(&endless{"ab", 0}, 3_000_000))
	w := newWatch(src, []needle{n}, true, func(*needle) {}, func() {})
	total, err := io.Copy(io.Discard, w)
	if most := cap(w.raw) + cap(w.show); total != 3_000_000 || err != nil || most > 6*len(n.text)+6*chunk {
		t.Errorf("%d bytes came out, by %d of memory, %v", total, most, err)
	}
}
