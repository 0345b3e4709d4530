package gateway

import (
	"fmt"
	"net/http"
	"testing"
)

// TestOwnCookies: a guest sets cookies for its own name.
func TestOwnCookies(t *testing.T) {
	h := http.Header{"Set-Cookie": {
		"a=1; Domain=sandboxes.test; Path=/; HttpOnly", "sandboxd_token_8000=x", "b=domain=2;domain = .test",
		" sandboxd_token_1=y; Path=/", "=sandboxd_token_1=y", " = sandboxd_token_1=y",
	}}
	ownCookies(h)
	if got := fmt.Sprint(h["Set-Cookie"]); got != "[a=1; Path=/; HttpOnly b=domain=2]" {
		t.Error(got)
	}
}

// TestReferrerPolicy: a guest may be stricter than we are, and not more open to its neighbours.
func TestReferrerPolicy(t *testing.T) {
	const open = "strict-origin"
	for _, base := range []string{"/b", ""} {
		for _, c := range []struct {
			guest []string
			want  string
		}{
			{nil, open},
			{[]string{"no-referrer"}, "no-referrer"},
			{[]string{" No-Referrer "}, "no-referrer"},
			{[]string{"unsafe-url", "origin, no-referrer"}, "no-referrer"},
			{[]string{"same-origin"}, open}, // other guests are of the same origin
			{[]string{"no-referrer, unsafe-url"}, open},
			{[]string{"no-referrer", "no-referrer-when-downgrade"}, open},
			{[]string{"no-referrer,"}, open},
		} {
			h := http.Header{}
			for _, v := range c.guest {
				h.Add("Referrer-Policy", v)
			}
			was := fmt.Sprint(h.Values("Referrer-Policy"))
			cleanAnswer(h, 8000, "/", "localhost:8000", base)
			switch got := h.Values("Referrer-Policy"); {
			case base == "" && fmt.Sprint(got) != was:
				t.Errorf("at a name of its own, %s becomes %q", was, got)
			case base != "" && (len(got) != 1 || got[0] != c.want):
				t.Errorf("%q becomes %q, want %q", c.guest, got, c.want)
			}
		}
	}
}

// TestRefreshed: the address in a Refresh is treated as one in a Location, in every
// form that browsers read.
func TestRefreshed(t *testing.T) {
	for from, want := range map[string]string{
		"5": "5", "": "", "0 url=/next": "0; url=/b/next", " 0 /next": "0; url=/b/next", "0 ;": "0; url=",
		"0; url=/next": "0; url=/b/next", "0;URL=/next": "0; url=/b/next", "1 , url = '/next'x": "1; url=/b/next",
		`0; url="/a b"`: "0; url=/b/a b", "0;/next": "0; url=/b/next", "0; url/next": "0; url=url/next",
		"0; url=http://localhost:8000/x": "0; url=/b/x", "3; url=https://example.com/": "3; url=https://example.com/",
		"0; url=/b/again": "0; url=/b/again", "0; url='": "0; url=", `0; url=" /next"`: "0; url=/b/next", `0;"'/next'"`: "0; url=/b/next",
	} {
		if got := refreshed(from, "localhost:8000", "/b"); got != want {
			t.Errorf("%q becomes %q, want %q", from, got, want)
		}
	}
}

// TestRelocated: no path leads out of the base, however a client reads it, and what
// knows the base already stays.
func TestRelocated(t *testing.T) {
	for from, want := range map[string]string{
		"/next": "/b/next", "/b": "/b", "/b/x": "/b/x", "/b?q=/../x": "/b?q=/../x", "/b#x": "/b#x", "/bx": "/b/bx",
		"/../v1/keys": "/b/v1/keys", "/b/../../v1/keys": "/b/v1/keys", "/b/./x": "/b/x", "/a/%2E./x?y": "/b/x?y", `/b\..\..\x`: "/b/x",
		"/b/.\t./../x": "/b/x", "/..//x": "/b/x", "/a/..": "/b/", "/a/b/.": "/b/a/b", "/...": "/b/...", "../x": "../x", "//x/..": "//x/..",
		"http://localhost:8000/b/../c": "/b/c", "https://example.com/../x": "https://example.com/../x",
	} {
		if got := relocated(from, "localhost:8000", "/b"); got != want {
			t.Errorf("%q becomes %q, want %q", from, got, want)
		}
	}
}
