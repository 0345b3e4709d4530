package gateway

import (
	"context"
	"io"
	"mime"
	"net"
	"net/http"

	"github.com/sandboxd/sandboxd/internal/relay"
)

// minPoured is the least length, in bytes, of a body that is poured: from one socket into
// the other, past the daemon's memory. A shorter one is not worth a pipe.
const minPoured = 256 << 10

// A sourced body is one of net/http, which says where it ends, and the connection below
// it. relay.Copy pours it. Its length is known.
type sourced struct {
	io.ReadCloser
	conn net.Conn
}

// NetConn serves relay.Copy.
func (s *sourced) NetConn() net.Conn { return s.conn }

// A poured body of an answer writes itself: ReverseProxy copies by buffers only.
type poured struct {
	sourced
	relay.Meter
	to    io.ReaderFrom
	flush func() error
	err   error // of reading
}

// pour makes the body of resp, read from guest, write itself to w, which writes to client.
// It reports whether it has. Then nothing else may write to w.
func pour(w http.ResponseWriter, resp *http.Response, client, guest net.Conn) bool {
	// ReverseProxy flushes the head of such an answer beside its copying. It finds them in
	// this way (flushInterval).
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")) //nolint:errcheck // kind is set all the same
	if kind == "text/event-stream" {
		return false
	}
	to, ok := servers(w).(io.ReaderFrom)
	meter, metered := w.(relay.Meter)
	if !ok || !metered || resp.ContentLength < minPoured || !relay.Diverts(client, guest) {
		return false
	}
	resp.Body = &poured{sourced: sourced{resp.Body, guest}, Meter: meter, to: to, flush: http.NewResponseController(w).Flush}
	return true
}

// Read writes the whole body, and reads nothing into b.
func (p *poured) Read([]byte) (int, error) {
	if err := p.flush(); err != nil { // the head does not wait for the first of the body
		return 0, context.Canceled
	}
	switch _, err := p.to.ReadFrom((*pouring)(p)); {
	case err == nil:
		return 0, io.EOF
	case p.err != nil:
		return 0, p.err
	}
	return 0, context.Canceled // the client is gone: of that ReverseProxy logs nothing
}

// pouring is a poured body as it is read.
type pouring poured

func (p *pouring) Read(b []byte) (int, error) {
	n, err := p.ReadCloser.Read(b)
	if err != io.EOF {
		p.err = err
	}
	return n, err
}
