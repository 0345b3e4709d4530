package gateway

import (
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
)

// unreadTime is how long the server may read on in a body that the app did not want.
const unreadTime = 5 * time.Second

// An unread body is one that may be answered before all of it was read.
type unread struct {
	io.ReadCloser
	ended atomic.Bool
}

func (u *unread) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	if err == io.EOF {
		u.ended.Store(true)
	}
	return n, err
}

// closeAfter makes the server of w close the connection after the answer, when the client
// has had the time to read it.
//
// The server does that by itself for a body that it was not sent in full, but not for a
// chunked one of which ReverseProxy's transport still reads when the handler returns: it
// breaks that read off, and body.Close takes the error for the end of the body. What
// follows would then be the next request (Go 1.26: abortPendingRead in net/http's
// server.go, Close in its transfer.go). A MaxBytesReader over its limit says so to the
// server.
func closeAfter(w http.ResponseWriter) {
	over := http.MaxBytesReader(servers(w), io.NopCloser(strings.NewReader("x")), 0)
	over.Read(make([]byte, 1)) //nolint:errcheck // that is what it is for
}

// servers is the server's own writer below w.
func servers(w http.ResponseWriter) http.ResponseWriter {
	for {
		under, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return w
		}
		w = under.Unwrap()
	}
}
