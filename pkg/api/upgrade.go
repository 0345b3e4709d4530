package api

import (
	"io"
	"net/http"
	"sync/atomic"
	"time"
)

// halfOpen is how long a sandbox may stay silent on an upgraded connection
// whose client has said its last.
const halfOpen = time.Minute

// upgraded bounds what is left of an upgrade when its client leaves: ReverseProxy
// then waits for the sandbox to hang up too, and a sandbox that never does would
// hold two descriptors for as long as it lives.
func upgraded(resp *http.Response) {
	if b, ok := resp.Body.(io.ReadWriteCloser); ok && resp.StatusCode == http.StatusSwitchingProtocols {
		resp.Body = &upgrade{ReadWriteCloser: b}
	}
}

type upgrade struct {
	io.ReadWriteCloser
	patience atomic.Pointer[time.Timer] // from CloseWrite on
}

func (u *upgrade) Read(p []byte) (int, error) {
	n, err := u.ReadWriteCloser.Read(p)
	if t := u.patience.Load(); t != nil && n > 0 {
		t.Reset(halfOpen)
	}
	return n, err
}

// CloseWrite is called at the client's end of file.
func (u *upgrade) CloseWrite() error {
	w, ok := u.ReadWriteCloser.(interface{ CloseWrite() error })
	if !ok {
		return u.Close()
	}
	u.patience.Store(time.AfterFunc(halfOpen, func() { u.Close() })) //nolint:errcheck // closed already is as well
	return w.CloseWrite()
}
