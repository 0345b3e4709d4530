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
		" sandboxd_token_1=y; Path=/",
	}}
	ownCookies(h)
	if got := fmt.Sprint(h["Set-Cookie"]); got != "[a=1; Path=/; HttpOnly b=domain=2]" {
		t.Error(got)
	}
}
