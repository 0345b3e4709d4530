package internet

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
)

// VaultHost answers everybody, and keeps what it was asked. Below /echo it answers with what it got
// in the header Authorization.
const VaultHost = "vault.example"

// A Kept is a request that came to VaultHost, with what it had of secrets.
type Kept struct {
	Path, Query, Body string
	Header            http.Header
}

// keeper is VaultHost.
type keeper struct {
	mu  sync.Mutex
	all []Kept
}

// ServeHTTP keeps a request.
func (k *keeper) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	k.mu.Lock()
	k.all = append(k.all, Kept{r.URL.Path, r.URL.RawQuery, string(b), r.Header.Clone()})
	k.mu.Unlock()
	if r.URL.Path == "/echo" {
		fmt.Fprintf(rw, "you said %s\n", r.Header.Get("Authorization")) //nolint:errcheck // the client sees what is missing
		return
	}
	fmt.Fprintln(rw, Word) //nolint:errcheck // the same
}

// Kept are the requests that came to VaultHost since the last call.
func (in *Internet) Kept() []Kept {
	in.kept.mu.Lock()
	defer in.kept.mu.Unlock()
	all := slices.Clone(in.kept.all)
	in.kept.all = nil
	return all
}
