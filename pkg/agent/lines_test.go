package agent

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestLastLines(t *testing.T) {
	for _, c := range []struct {
		text  string
		lines int
		want  string
	}{
		{"", 3, ""},
		{"one\ntwo\nthree\n", 0, ""},
		{"one\ntwo\nthree\n", 1, "three\n"},
		{"one\ntwo\nthree", 1, "three"},
		{"one\ntwo\nthree", 2, "two\nthree"},
		{"one\ntwo\nthree\n", 3, "one\ntwo\nthree\n"},
		{"one\ntwo\nthree\n", MaxLines, "one\ntwo\nthree\n"},
		{"\n\n\n", 2, "\n\n"},
		{"a\n\nb\n", 2, "\nb\n"},
		{strings.Repeat("x\n", 1000), 7, strings.Repeat("x\n", 7)},
	} {
		for _, step := range []int{1, 3, 1 << 20} { // where writes part does not matter
			l := LastLines{Lines: c.lines}
			for rest := c.text; rest != ""; {
				n := min(step, len(rest))
				if m, err := l.Write([]byte(rest[:n])); m != n || err != nil {
					t.Fatal(m, err)
				}
				rest = rest[n:]
			}
			if got := c.text[len(c.text)-int(l.Bytes()):]; got != c.want {
				t.Errorf("last %d lines of %.20q in steps of %d: %q, want %q", c.lines, c.text, step, got, c.want)
			}
			if len(l.starts) > 2*c.lines {
				t.Errorf("%d lines are remembered to find %d", len(l.starts), c.lines)
			}
		}
	}
}

func TestFirstBytes(t *testing.T) {
	var got bytes.Buffer
	w := FirstBytes(&got, 5)
	for _, s := range []string{"abc", "", "defg", "h"} {
		if n, err := io.WriteString(w, s); n != len(s) || err != nil {
			t.Errorf("%q: %d, %v", s, n, err)
		}
	}
	if got.String() != "abcde" {
		t.Errorf("%q", got.String())
	}
	r, p := io.Pipe()
	r.Close()
	if _, err := io.WriteString(FirstBytes(p, 5), "a"); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("a writer that fails: %v", err)
	}
}
