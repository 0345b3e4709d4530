package reply

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"
)

func split(bare bool, chunks ...string) (lines []string) {
	l := splitter{bare: bare}
	emit := func(b []byte) { lines = append(lines, string(b)) }
	for _, c := range chunks {
		l.feed([]byte(c), emit)
	}
	l.end(emit)
	return lines
}

func TestSplitter(t *testing.T) {
	for in, want := range map[string]string{
		"":                 "",
		"a":                "a",
		"a\n":              "a",
		"a\nb":             "a|b",
		"\n":               "\n",
		"\n\n":             "\n|\n",
		"a\r\nb":           "a|b",
		"a\r|\nb":          "a|b",
		"a\r|b":            "a|b",
		"a\r\r\n":          "a|\n",
		"10%\r20%\r30%\n":  "10%|20%|30%",
		"a|b|c\nd":         "abc|d",
		"|a|\r|\n|\n|b|\r": "a|\n|b",
	} {
		if got := strings.Join(split(true, strings.Split(in, "|")...), "|"); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string]string{
		"":                 "",
		"a":                "a",
		"a\nb":             "a\n|b",
		"\n\n":             "\n|\n",
		"a\r\nb\r\n":       "a\r\n|b\r\n",
		"a\r|\nb":          "a\r|\n|b",
		"a\r\r\n":          "a\r|\r\n",
		"10%\r|20%\r":      "10%\r|20%\r",
		"a|b|c\nd":         "abc\n|d",
		"|a|\r|\n|\n|b|\r": "a\r|\n|\n|b\r",
	} {
		if got := strings.Join(split(false, strings.Split(in, "|")...), "|"); got != want {
			t.Errorf("with endings, %q: %q, want %q", in, got, want)
		}
	}
	long := strings.Repeat("ä", maxLine)
	got := split(false, long[:maxLine-1], long[maxLine-1:]+"\nend\n")
	if strings.Join(got, "") != long+"\nend\n" {
		t.Error("with endings, a long line is not the sum of its parts")
	}
	got = split(true, "x"+long[:maxLine-1], long[maxLine-1:]+"\nend\n")
	if strings.Join(got[:len(got)-1], "") != "x"+long || got[len(got)-1] != "end" {
		t.Error("a long line is not the sum of its parts")
	}
	for _, l := range got {
		if len(l) > maxLine || !utf8.ValidString(l) {
			t.Errorf("a part of %d bytes is too long or cut within a character", len(l))
		}
	}
}

// TestEventIsOneLine: nothing in a text ends a line to any reader of lines.
func TestEventIsOneLine(t *testing.T) {
	for _, end := range []string{"\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\u0085", "\u2028", "\u2029"} { // those of str.splitlines
		got := appendQuoted(nil, []byte("a"+end+"b"))
		if strings.Contains(string(got), end) {
			t.Errorf("%q is in %s as it is", end, got)
		}
		var back string
		if err := json.Unmarshal(got, &back); err != nil || back != "a"+end+"b" {
			t.Errorf("%q: %q, %v", end, back, err)
		}
	}
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte("a\n\"\\\x00\xff\u2028\U0001F600<>"), byte(3))
	f.Fuzz(func(t *testing.T, b []byte, cut byte) {
		var got string
		if err := json.Unmarshal(appendQuoted(nil, b), &got); err != nil {
			t.Fatal(err)
		}
		if want := strings.ToValidUTF8(string(b), "\x00"); len([]rune(got)) < len([]rune(want)) {
			t.Fatalf("%q of %q", got, b)
		}
		want, _ := json.Marshal(string(b)) // replaces what is not UTF-8 alike
		var same string
		if json.Unmarshal(want, &same); got != same { //nolint:errcheck // it made it itself
			t.Fatalf("%q, encoding/json says %q", got, same)
		}
		n := min(int(cut), len(b))
		if a, c := split(true, string(b)), split(true, string(b[:n]), string(b[n:])); strings.Join(a, "|") != strings.Join(c, "|") {
			t.Fatalf("%q, cut after %d: %q", a, n, c)
		}
		if c := split(false, string(b[:n]), string(b[n:])); strings.Join(c, "") != string(b) {
			t.Fatalf("%q, cut after %d, with endings: %q", b, n, c)
		}
		var l splitter
		var chunks []string
		keep := func(c []byte) { chunks = append(chunks, string(c)) }
		l.chunk(b[:n], keep)
		l.chunk(b[n:], keep)
		l.end(keep)
		if strings.Join(chunks, "") != string(b) {
			t.Fatalf("%q, cut after %d, in chunks: %q", b, n, chunks)
		}
		for _, c := range chunks {
			if utf8.Valid(b) && !utf8.ValidString(c) {
				t.Fatalf("%q, cut after %d: a character is cut in %q", b, n, chunks)
			}
		}
	})
}
