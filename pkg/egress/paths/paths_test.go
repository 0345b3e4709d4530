package paths

import (
	"net/url"
	"path"
	"slices"
	"strings"
	"testing"
)

func TestRead(t *testing.T) {
	for in, want := range map[string][]string{
		"/":                {"/"},
		"/a/b/":            {"/a/b/"},
		"/%61%2d%7E":       {"/a-~"},
		"/a%20b":           {"/a b"},
		"/%c3%a9":          {"/é"},
		"/a%40b%3Ac":       {"/a@b:c"},
		"/@scope%2fname":   {"/@scope%2Fname", "/@scope/name"},
		"/100%25":          {"/100%25"},
		"/a;v=1/b":         {"/a;v=1/b", "/a/b"},
		"/a%3Bv/b":         {"/a;v/b", "/a/b"},
		"/a%2Fb;c":         {"/a%2Fb;c", "/a/b;c", "/a%2Fb", "/a/b"},
		"/...":             {"/..."},
		"/a.b/..c":         {"/a.b/..c"},
		"/!$&'()*+,=:@-._": {"/!$&'()*+,=:@-._"},
	} {
		got, why := Read(in)
		if why != "" || !slices.Equal(got, want) {
			t.Errorf("%q: %q, %s; want %q", in, got, why, want)
		}
	}
	for _, in := range []string{
		"", "*", "a", "http://x/", "//", "//a", "/a//b", "/.", "/..", "/a/../b", "/a/./b", "/%2e%2e/b", "/a/%2E", "/..%2fb", "/a%2f..",
		"/a%2f%2fb", "/%5c", `/a\b`, "/%00", "/%0d%0a", "/%7f", "/a b", "/\x01", "/é", "/%", "/%2", "/%zz", "/%+1", "/%252e", "/%252fb",
		"/%25%32e%25%32e/b", "/..;/b", "/.;x/b", "/a/..%3B/b", "/a%2f..;b", "/;/b", "/a?b", "/a#b", "/%c0%ae%c0%ae/b",
		"/%ff", "/a{b}", "/a|b", "/a^b",
	} {
		if got, why := Read(in); why == "" {
			t.Errorf("%q: %q", in, got)
		}
	}
}

func TestParsePatternRefuses(t *testing.T) {
	for _, in := range []string{
		"", "a", "*", "*a", "/a?b", "/a#b", "/..", "/a/./b", "/%2e%2e/b", "/a//b", "/a;b", "/a%3bb", "/%2f", "/%00", "/%", "/a\x01", `/a\b`,
		"/" + strings.Repeat("a", maxPattern),
	} {
		if p, err := ParsePattern(in); err == nil {
			t.Errorf("%.20q: %v", in, p)
		}
	}
}

// FuzzRead: no reading of a path that is accepted leads out of its segments, however often
// it is decoded, and all are readings of the path.
func FuzzRead(f *testing.F) {
	for _, s := range []string{"/", "/a/%2e%2e/b", "/%2f", "/a;b/..;/c", "/%25", "/%2525", "/*", "/a%c3%a9", "/%25%32e", "/a%2Fb;c"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		readings, why := Read(in)
		if why != "" {
			return
		}
		if len(readings) == 0 || len(readings) > 4 || readings[0] != Form(in) {
			t.Fatalf("%q: %q", in, readings)
		}
		is, err := url.PathUnescape(in)
		if err != nil {
			t.Fatalf("%q is no path: %v", in, err)
		}
		for _, r := range append(readings, is) {
			if clean := path.Clean(r); clean != r && clean+"/" != r {
				t.Fatalf("%q is read as %q, which is %q", in, r, clean)
			}
			once := strings.NewReplacer("%2F", "/", "%25", "%").Replace(r)
			if twice, err := url.PathUnescape(r); err == nil && path.Clean(twice) != path.Clean(once) {
				t.Fatalf("%q is read as %q, and that as %q", in, r, twice)
			}
		}
	})
}
