package gateway

import (
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sandboxd/sandboxd/internal/relay"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// halfOpen is how long a sandbox may stay silent on an upgraded connection whose
// client has closed its half.
const halfOpen = time.Minute

// upgraded bounds how long an upgraded connection outlives its client: ReverseProxy
// waits for the sandbox to hang up too, and a sandbox that never does would hold two
// descriptors for as long as it lives. An upgrade that was not asked for is an error:
// ReverseProxy refuses it as well, but leaves its connection open.
func upgraded(resp *http.Response, conn net.Conn) error {
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return nil
	}
	asked, got := protocol(resp.Request.Header), protocol(resp.Header)
	b, ok := resp.Body.(io.ReadWriteCloser)
	if !ok || asked == "" || !strings.EqualFold(asked, got) {
		return httperr.New(http.StatusBadGateway, "GENERAL::UNKNOWN_ERROR", errs.Unavailable,
			"the server in the sandbox switched to the protocol %q, but the request asked for %q; check that "+
				"server", httperr.Clip(got, 80), httperr.Clip(asked, 80))
	}
	resp.Body = &upgrade{ReadWriteCloser: b, conn: conn}
	return nil
}

// protocol is the protocol that headers upgrade a connection to, or "".
func protocol(h http.Header) string {
	for _, v := range h["Connection"] {
		for token := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(token), "upgrade") {
				return h.Get("Upgrade")
			}
		}
	}
	return ""
}

type upgrade struct {
	io.ReadWriteCloser
	conn     net.Conn                   // below it; may be nil
	patience atomic.Pointer[time.Timer] // from CloseWrite on
}

func (u *upgrade) Read(p []byte) (int, error) {
	n, err := u.ReadWriteCloser.Read(p)
	if t := u.patience.Load(); t != nil && n > 0 {
		t.Reset(halfOpen)
	}
	return n, err
}

// WriteTo and ReadFrom are how ReverseProxy copies, one for each direction.
func (u *upgrade) WriteTo(w io.Writer) (int64, error)  { return relay.Copy(w, u) }
func (u *upgrade) ReadFrom(r io.Reader) (int64, error) { return relay.Copy(u, r) }

// NetConn serves relay.Copy.
func (u *upgrade) NetConn() net.Conn { return u.conn }

// CloseWrite is called at the client's end of file.
func (u *upgrade) CloseWrite() error {
	w, ok := u.ReadWriteCloser.(interface{ CloseWrite() error })
	if !ok {
		return u.Close()
	}
	u.patience.Store(time.AfterFunc(halfOpen, func() { u.Close() })) //nolint:errcheck // it may be closed already
	return w.CloseWrite()
}
