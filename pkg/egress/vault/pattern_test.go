package vault

import (
	"fmt"
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
		{"/a%2Fb", "/a%2Fb /a%2fb", "/a/b"},
		{"/a%25b", "/a%25b", "/a%b%25"},
	} {
		p, err := ParsePattern(c.pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range strings.Fields(c.match) {
			if !p.Match(PathForm(path)) {
				t.Errorf("%s does not match %s", c.pattern, path)
			}
		}
		for _, path := range strings.Fields(c.not) {
			if p.Match(PathForm(path)) {
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

// TestBindingsOverlap compares the refusal of a vault with requests that are tried one by one.
func TestBindingsOverlap(t *testing.T) {
	hosts := []string{"a.example.com", "b.a.example.com", "*.example.com", "*.a.example.com", "a.example.org"}
	names := []string{"a.example.com", "b.a.example.com", "c.b.a.example.com", "z.example.com", "a.example.org"}
	paths := []string{"/*", "/x", "/x/*", "/*/y"}
	texts := []string{"/", "/x", "/x/", "/x/y", "/z/y"}
	r := rand.New(rand.NewPCG(3, 4))
	some := func(from []string) (string, []string) {
		var out []string
		for range 1 + r.IntN(2) {
			out = append(out, from[r.IntN(len(from))])
		}
		return `["` + strings.Join(out, `","`) + `"]`, out
	}
	refused := 0
	for range 500 {
		var list []string
		for i := range 2 {
			h, _ := some(hosts)
			p, _ := some(paths)
			m, _ := some([]string{"GET", "POST", "PUT"})
			s, _ := some([]string{"https", "http"})
			list = append(list, bearer(fmt.Sprint(i), fmt.Sprintf(`{"hosts":%s,"paths":%s,"methods":%s,"schemes":%s}`, h, p, m, s)))
		}
		one, two := create1(t, vaultOf(list[0])).Bindings()[0], create1(t, vaultOf(list[1])).Bindings()[0]
		want := false
		for _, name := range names {
			for _, path := range texts {
				for _, method := range []string{"GET", "POST", "PUT"} {
					for _, scheme := range []string{"https", "http"} {
						want = want || one.Matches(scheme, name, method, path) && two.Matches(scheme, name, method, path)
					}
				}
			}
		}
		if _, err := Create([]byte(vaultOf(list...))); (err != nil) != want {
			t.Fatalf("%s: %v; overlap %v", list, err, want)
		}
		if want {
			refused++
		}
	}
	if refused < 50 || refused > 450 {
		t.Errorf("%d of 500 were refused: too uneven to show much", refused)
	}
}

// BenchmarkOverlap is the worst case that the limits allow: all bindings differ in the last thing
// that is compared.
func BenchmarkOverlap(b *testing.B) {
	v := &Vault{1, map[string]*Credential{}, map[string]*Binding{}}
	for i := range MaxBindings {
		x := &Binding{Name: fmt.Sprint(i), Match: Match{Schemes: []string{"https"}, Methods: []string{"GET"}}}
		for j := range MaxAllHosts / MaxBindings {
			x.Match.Hosts = append(x.Match.Hosts, fmt.Sprintf("a%d.b%d.example.com", i, j))
			x.Match.Paths = append(x.Match.Paths, "/"+strings.Repeat("x", 480)+fmt.Sprintf("%d-%d*", i, j))
		}
		x.Match.Hosts[len(x.Match.Hosts)-1] = "*.example.com"
		if err := x.compile(""); err != nil {
			b.Fatal(err)
		}
		v.bindings[x.Name] = x
	}
	for b.Loop() {
		v.checkOverlap() //nolint:errcheck // the time counts
	}
}
