package auth

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestClients holds who is one client where clients take turns.
func TestClients(t *testing.T) {
	g, err := New(Config{Keys: []string{"one", "two"}})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		p    Peer
		key  string
		want string
	}{
		"a user of the host":             {Peer{Unix: true, user: "uid=1000"}, "", "uid=1000"},
		"a user of the host, with a key": {Peer{Unix: true, user: "uid=1000"}, "two", "uid=1000"},
		"a key":                          {Peer{user: "10.0.0.1"}, "two", "key configuration-2"},
		"the same from elsewhere":        {Peer{user: "10.0.0.2"}, "two", "key configuration-2"},
		"another":                        {Peer{user: "10.0.0.2"}, "one", "key configuration-1"},
		"no key":                         {Peer{user: "10.0.0.2"}, "", "10.0.0.2"},
		"a wrong key":                    {Peer{user: "10.0.0.2"}, "three", "10.0.0.2"},
	} {
		r := httptest.NewRequest(http.MethodPost, "/v1/sandboxes", nil)
		r = r.WithContext(context.WithValue(r.Context(), peerKey{}, &c.p))
		if c.key != "" {
			r.Header.Set(wire.HeaderAPIKey, c.key)
		}
		if got := g.Client(r); got != c.want {
			t.Errorf("%s is %q, want %q", name, got, c.want)
		}
	}
}
