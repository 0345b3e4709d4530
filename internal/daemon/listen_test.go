package daemon

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
)

// TestSocketModes: the API's socket is for root and a group, and the admin socket for
// root, whatever the umask of the daemon is.
func TestSocketModes(t *testing.T) {
	for _, umask := range []int{0, 0o077} {
		for _, mode := range []os.FileMode{0o660, 0o600} {
			path := filepath.Join(t.TempDir(), "s")
			old := unix.Umask(umask)
			l, err := bindUnix("listen.socket", path, mode)
			unix.Umask(old)
			if err != nil {
				t.Fatal(err)
			}
			if fi, err := os.Stat(path); err != nil || fi.Mode() != os.ModeSocket|mode {
				t.Errorf("umask %o: %v, %v; want %v", umask, fi.Mode(), err, mode)
			}
			l.Close()
		}
	}
}

// TestLastCall: while a daemon ends, everyone who asks on a socket that is held open gets an answer,
// by this server or by the next one.
func TestLastCall(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	held, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		},
	}}
	served, stopped := atomic.Int64{}, make(chan struct{})
	asked := make(chan error, 4)
	over := func() bool {
		select {
		case <-stopped:
			return true
		default:
			return false
		}
	}
	for range cap(asked) {
		go func() {
			var err error
			for err == nil && !over() {
				var resp *http.Response
				if resp, err = client.Get("http://sandboxd/"); err == nil {
					resp.Body.Close()
				}
			}
			if over() { // nobody serves any more
				err = nil
			}
			asked <- err
		}()
	}
	for range 50 {
		f, err := held.File() // as the next daemon gets it
		if err != nil {
			t.Fatal(err)
		}
		inherited, err := net.FileListener(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		inherited.(*net.UnixListener).SetUnlinkOnClose(false)
		l, ended, busy := newLastCall(inherited), make(chan struct{}), make(chan struct{}, 1)
		srv := auth.Listener{}.Server(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			served.Add(1)
			select {
			case busy <- struct{}{}:
			default:
			}
		}), nil)
		go func() {
			defer close(ended)
			// Or ErrServerClosed, if Drain comes before Serve looks at what Accept says.
			if err := srv.Serve(l); !errors.Is(err, net.ErrClosed) && !errors.Is(err, http.ErrServerClosed) {
				t.Error(err)
			}
		}()
		select {
		case <-busy:
		case err := <-asked:
			t.Fatal("a request failed:", err)
		}
		l.stop(ended)
		srv.Drain(t.Context())
		srv.Close()
	}
	close(stopped)
	held.Close()
	for range cap(asked) {
		if err := <-asked; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d requests were served", served.Load())
}
