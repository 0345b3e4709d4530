package server

import (
	"context"
	"net"
	"net/http"
	"sync"
)

// connections are all that clients have to the agent, also those that carry a terminal or an
// upgrade, which net/http knows no longer.
type connections struct {
	mu   sync.Mutex
	open map[net.Conn]struct{}
}

// connKey is the key of a request's own connection in its context.
type connKey struct{}

// opened notes a connection. It is http.Server.ConnContext.
func (cs *connections) opened(ctx context.Context, c net.Conn) context.Context {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.open == nil {
		cs.open = map[net.Conn]struct{}{}
	}
	cs.open[c] = struct{}{}
	return context.WithValue(ctx, connKey{}, c)
}

func (cs *connections) closed(c net.Conn) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	delete(cs.open, c)
}

// closeOthers closes all but the connection of r. Nobody is at their other ends, so nothing
// is sent to those any more.
func (cs *connections) closeOthers(r *http.Request) {
	own := r.Context().Value(connKey{})
	cs.mu.Lock()
	var others []net.Conn
	for c := range cs.open {
		if c != own {
			others = append(others, c)
		}
	}
	cs.mu.Unlock()
	for _, c := range others {
		if l, ok := c.(interface{ SetLinger(sec int) error }); ok {
			l.SetLinger(0) //nolint:errcheck // closed already is as well
		}
		c.Close()
	}
}
