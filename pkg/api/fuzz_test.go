package api

import (
	"bufio"
	"net/http"
	"strings"
	"testing"
)

// FuzzRoute: no path reaches a handler with an id that is neither id nor name.
func FuzzRoute(f *testing.F) {
	f.Add("/v1/sandboxes/a%2fb/proxy/44772/x")
	f.Add("/sandboxes/../proxy/1")
	w := newWorld(f)
	f.Fuzz(func(t *testing.T, raw string) {
		if strings.ContainsAny(raw, " \r\n\x00#") || !strings.HasPrefix(raw, "/") {
			return
		}
		r, err := newRequest(raw)
		if err != nil {
			return
		}
		found := w.s.routes.find(r)
		if found.handle == nil && found.need != tokens {
			t.Fatalf("%q has neither handler nor proxy", raw)
		}
	})
}

func newRequest(raw string) (*http.Request, error) {
	return http.ReadRequest(bufio.NewReader(strings.NewReader("GET " + raw + " HTTP/1.1\r\nHost: x\r\n\r\n")))
}
