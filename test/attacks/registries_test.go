package attacks_test

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/sandboxd/sandboxd/internal/weak"
)

// registryAttacks are what a registry of the configuration can try. pkg/image has many
// more lies of registries (TestPullLies).
var registryAttacks = []attack{
	{
		name: "a registry that leads inside", wall: "redirects go to public addresses", held: words{"not-reached"},
		daemon: without(weak.Registries), ask: func(t *testing.T, w *target) string {
			return w.pulled(t, func(rw http.ResponseWriter, r *http.Request) {
				http.Redirect(rw, r, "http://"+w.canary+"/x", http.StatusFound)
			})
		},
	},
	{
		name: "a registry whose tokens are inside", wall: "redirects go to public addresses; the registry's client refuses it, too",
		held: words{"not-reached"}, daemon: unproven("go-containerregistry refuses it before it dials"),
		ask: func(t *testing.T, w *target) string {
			return w.pulled(t, func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="x"`, w.canary))
				rw.WriteHeader(http.StatusUnauthorized)
			})
		},
	},
	{
		name: "a registry with an endless manifest", wall: "manifests have a size", held: words{"not-reached"},
		daemon: unproven("the bound is one of pkg/image/registry"), ask: func(t *testing.T, w *target) string {
			var sent atomic.Int64
			word := w.pulled(t, func(rw http.ResponseWriter, r *http.Request) {
				for block := bytes.Repeat([]byte(" "), 1<<20); sent.Add(int64(len(block))) < 1<<30 && r.Context().Err() == nil; {
					if _, err := rw.Write(block); err != nil {
						return
					}
				}
			})
			if sent.Load() > 64<<20 {
				return fmt.Sprintf("%d bytes were read", sent.Load())
			}
			return word
		},
	},
}

// A liar is a registry that answers every request for a manifest with a lie.
type liar struct {
	*httptest.Server
	lie atomic.Pointer[http.HandlerFunc]
}

func newLiar(t *testing.T) *liar {
	t.Helper()
	l := &liar{}
	l.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f := l.lie.Load(); f != nil && strings.Contains(r.URL.Path, "/manifests/") {
			(*f)(w, r)
			return
		}
		w.WriteHeader(http.StatusOK)
	}))
	t.Cleanup(l.Close)
	return l
}

// config is the daemon's configuration of the registry.
func (l *liar) config() []string {
	return []string{"[[registries]]", fmt.Sprintf("prefix = %q", l.Listener.Addr()), "insecure = true"}
}

// pulled has the daemon pull from a registry that lies like that.
func (w *target) pulled(t *testing.T, lie http.HandlerFunc) string {
	t.Helper()
	asked := atomic.Bool{}
	all := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		asked.Store(true)
		lie(rw, r)
	})
	w.liar.lie.Store(&all)
	defer w.liar.lie.Store(nil)
	word := w.reached(func() {
		w.asAdmin(t, "POST", "/v1/images/pull", fmt.Sprintf(`{"name":"%s/attack/x:latest"}`, w.liar.Listener.Addr()))
	})
	if !asked.Load() {
		return "the registry was not asked"
	}
	return word
}
