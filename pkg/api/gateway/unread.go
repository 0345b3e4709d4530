package gateway

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// unreadTime is how long the server may read on in a body that the app did not want.
const unreadTime = 5 * time.Second

// An unread body is one that may be answered before all of it was read.
type unread struct {
	io.ReadCloser
	mu    sync.Mutex // held by Read
	ended bool       // all of it was read
	over  bool       // it is read no more
}

func (u *unread) Read(p []byte) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.over {
		return 0, http.ErrBodyReadAfterClose
	}
	n, err := u.ReadCloser.Read(p)
	u.ended = u.ended || err == io.EOF
	return n, err
}

// stop ends the reading of the body, and bounds what the server reads on after the handler.
// It reports whether something is left to read.
//
// ReverseProxy's transport may still read when the handler returns. The server would break
// that read off, and forget the deadline with it (net/http, connReader.abortPendingRead). So
// stop breaks it off first. The server takes that for the end of the connection.
func (u *unread) stop(w http.ResponseWriter) (left bool) {
	rc := http.NewResponseController(w)
	if !u.mu.TryLock() {
		rc.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // a recorder in a test has none
		u.mu.Lock()
		if !u.ended {
			defer closeAfter(w)
		}
	}
	defer u.mu.Unlock()
	u.over = true
	if !u.ended {
		rc.SetReadDeadline(time.Now().Add(unreadTime)) //nolint:errcheck // likewise
	}
	return !u.ended
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
