package paths

import (
	"math/rand/v2"
	"strings"
	"testing"
)

func TestPattern(t *testing.T) {
	for _, c := range []struct{ pattern, match, not string }{
		{"/*", "/ /a /a/b /a%2Fb", "a"},
		{"/v1", "/v1", "/v1/ /v1x /V1 /"},
		{"/v1/*", "/v1/ /v1/a /v1/a/b", "/v1 /v2/"},
		{"/v1/*/x", "/v1/a/x /v1//x /v1/a/b/x", "/v1/x /v1/a/xy"},
		{"/*x*y", "/xy /axby /xxyy", "/yx /x /y"},
		{"/a**b", "/ab /axb", "/a"},
		{"/ü/*", "/%C3%BC/x /%c3%bc/", "/u/x"},
		{"/a%2Ab", "/a*b /a%2ab", "/axb"},
		{"/a%25b", "/a%25b", "/a%b%25"},
	} {
		p, err := ParsePattern(c.pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range strings.Fields(c.match) {
			if !p.Match(Form(path)) {
				t.Errorf("%s does not match %s", c.pattern, path)
			}
		}
		for _, path := range strings.Fields(c.not) {
			if p.Match(Form(path)) {
				t.Errorf("%s matches %s", c.pattern, path)
			}
		}
	}
}

// naive matches a pattern by its definition.
func naive(pattern, s string) bool {
	switch {
	case pattern == "":
		return s == ""
	case pattern[0] == '*':
		return naive(pattern[1:], s) || s != "" && naive(pattern, s[1:])
	}
	return s != "" && s[0] == pattern[0] && naive(pattern[1:], s[1:])
}

// TestPatternsByTheBook compares Match and Overlaps with their definitions: two patterns overlap
// if some text is matched by both. A shortest such text is not longer than both patterns together,
// so all of those are tried.
func TestPatternsByTheBook(t *testing.T) {
	texts := []string{""}
	for from := 0; len(texts[len(texts)-1]) < 8; {
		to := len(texts)
		for _, s := range texts[from:to] {
			texts = append(texts, s+"a", s+"b")
		}
		from = to
	}
	r := rand.New(rand.NewPCG(1, 2))
	random := func() (text string, p Pattern) {
		b := make([]byte, r.IntN(5))
		for i := range b {
			b[i] = "ab*"[r.IntN(3)]
		}
		p, err := ParsePattern("/" + string(b))
		if err != nil {
			t.Fatal(err)
		}
		return string(b), p
	}
	overlap := 0
	for range 3000 {
		a, pa := random()
		b, pb := random()
		want := false
		for _, s := range texts {
			ma, mb := naive(a, s), naive(b, s)
			if pa.Match("/"+s) != ma {
				t.Fatalf("/%s matches /%s: %v", a, s, !ma)
			}
			want = want || ma && mb
		}
		if pa.Overlaps(pb) != want || pb.Overlaps(pa) != want {
			t.Fatalf("/%s and /%s overlap: %v", a, b, !want)
		}
		if want {
			overlap++
		}
	}
	if overlap < 500 || overlap > 2500 {
		t.Errorf("%d of 3000 pairs overlap: too uneven to show much", overlap)
	}
}
