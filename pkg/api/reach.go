package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// portTripper reaches a port of a sandbox: at the sandbox's address, and where
// that is refused through the agent, because most development servers listen
// on 127.0.0.1 only (architecture.md, decision 7).
type portTripper struct {
	direct, agent http.RoundTripper
	port          uint16
}

func (p *portTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	body := r.Body
	first := r.Clone(r.Context())
	if body != nil && body != http.NoBody {
		first.Body = io.NopCloser(body) // a dial that fails must not close it
	}
	resp, err := p.direct.RoundTrip(first)
	if err == nil || !errors.Is(err, syscall.ECONNREFUSED) {
		return resp, err
	}
	second := r.Clone(r.Context())
	prefix := "/proxy/" + strconv.Itoa(int(p.port))
	second.URL.Path, second.URL.RawPath = prefix+r.URL.Path, prefix+r.URL.EscapedPath()
	return p.agent.RoundTrip(second)
}

// maxHints is how many interim answers (1xx) may come before the real one.
const maxHints = 32

// fewHints bounds them: ReverseProxy passes each on, and lifts the transport's
// own bound by that.
func fewHints(ctx context.Context) context.Context {
	n := 0
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: func(int, textproto.MIMEHeader) error {
		if n++; n > maxHints {
			return fmt.Errorf("more than %d interim answers", maxHints)
		}
		return nil
	}})
}

// poolKey is the host of URLs into a sandbox, by which connections are pooled:
// its id, which is never used twice, and which of its lives it is. Of the one
// before, a link that is gone has told no connection.
func poolKey(r *record.Record) string {
	return r.ID + "-" + strconv.FormatInt(r.Started.UnixNano(), 36)
}

// portTransport connects to ports other than the agent's. See poolKey.
func (s *Server) portTransport() *http.Transport {
	return &http.Transport{
		Proxy: nil,
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			key, portText, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			id, _, _ := strings.Cut(key, "-")
			port, err := spec.ParsePort(portText)
			if err != nil {
				return nil, err
			}
			rec, err := s.sandboxes.Get(ctx, id)
			if err != nil {
				return nil, err
			}
			return s.agents.Dial(ctx, rec, port)
		},
		DisableCompression:     true,
		MaxIdleConnsPerHost:    4,
		MaxIdleConns:           1024,
		IdleConnTimeout:        30 * time.Second,
		MaxResponseHeaderBytes: 64 << 10,
	}
}

// renewOnAccess moves the expiry of a sandbox made with ExtRenew, at most once
// in renewEvery, without making the request wait. Nobody asked for that, as one does
// who renews, so it gets no more than MaxTimeout from now.
func (s *Server) renewOnAccess(r *http.Request, rec record.Record) {
	v, ok := rec.Spec.Extensions[wire.ExtRenew]
	if !ok || rec.Expires.IsZero() {
		return
	}
	extend, err := spec.ParseRenew(v)
	if most := s.cfg.MaxTimeout; most > 0 {
		extend = min(extend, most)
	}
	now := time.Now()
	until := now.Add(extend)
	if err != nil || !until.After(rec.Expires) {
		return
	}
	s.renewMu.Lock()
	due := now.Sub(s.renewed[rec.ID]) >= renewEvery
	if due {
		if len(s.renewed) > 4096 { // forget the dead
			for id, at := range s.renewed {
				if now.Sub(at) >= renewEvery {
					delete(s.renewed, id)
				}
			}
		}
		s.renewed[rec.ID] = now
	}
	s.renewMu.Unlock()
	if !due {
		return
	}
	ctx, cancel := detached(r, time.Minute)
	go func() {
		defer cancel()
		if _, err := s.sandboxes.Renew(ctx, rec.ID, until); err != nil {
			s.cfg.Log.Warn("renew on access", "sandbox", rec.ID, "err", err)
		}
	}()
}
