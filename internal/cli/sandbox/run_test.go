package sandbox

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// TestLease: the lease counts from the expiry that the daemon gave.
func TestLease(t *testing.T) {
	expires := time.Now().Add(-24 * time.Hour) // by the clock of the daemon
	got := make(chan time.Time)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body wire.Renewal
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || r.URL.Path != "/v1/sandboxes/x/renew-expiration" {
			t.Error(r.URL, err)
		}
		got <- body.ExpiresAt
		w.WriteHeader(http.StatusServiceUnavailable) // that does not stop it
	}))
	defer s.Close()
	cl, err := client.New(s.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { keepLease(ctx, cl, "x", expires, 5*time.Millisecond); close(done) }()
	for last, i := expires, 0; i < 3; i++ {
		at := <-got
		if !at.After(last) || at.Sub(expires) > time.Minute {
			t.Errorf("renewed to %s after %s", at, last)
		}
		last = at
	}
	cancel()
	go func() {
		for range got { //nolint:revive // one may be under way
		}
	}()
	<-done
	s.Close()
	close(got)
}
