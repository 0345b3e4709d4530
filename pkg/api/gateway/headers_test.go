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
