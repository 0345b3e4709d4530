// Package downtime measures how long a daemon leaves its clients without an API, and what its
// sandboxes lose meanwhile: nothing, if all is well.
//
//	Watch   asks for the version again and again: the longest time without an answer
//	Crowd   has a command in each sandbox write lines, has clients follow some of them, and
//	        compares afterwards what was written with what was read
//	Socket  is held open beside the daemon, as systemd does: clients wait, and are not refused
//
// It knows no more of the daemon than its API, so it fits any way to replace one.
package downtime

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// every is how often a Watch asks.
const every = 5 * time.Millisecond

// A Watch asks for the version of the daemon on a Unix socket, each time on a new connection.
type Watch struct {
	stop    context.CancelFunc
	ended   chan struct{}
	longest time.Duration
	from    time.Time // of the longest gap
	refused int
}

// Ask begins a Watch of a daemon that answers.
func Ask(ctx context.Context, socket string) (*Watch, error) {
	c := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
	if err := ask(ctx, c); err != nil {
		return nil, err
	}
	w := &Watch{ended: make(chan struct{}), from: time.Now()}
	ctx, w.stop = context.WithCancel(ctx)
	go w.run(ctx, c)
	return w, nil
}

func ask(ctx context.Context, c *http.Client) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://sandboxd/v1/version", nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET /v1/version: %s", resp.Status)
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

func (w *Watch) run(ctx context.Context, c *http.Client) {
	defer close(w.ended)
	tick := time.NewTicker(every)
	defer tick.Stop()
	last := time.Now()
	for ctx.Err() == nil {
		if err := ask(ctx, c); err == nil {
			now := time.Now()
			if gap := now.Sub(last); gap > w.longest {
				w.longest, w.from = gap, last
			}
			last = now
		} else if ctx.Err() == nil {
			w.refused++
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	if gap := time.Since(last); gap > w.longest { // it still does not answer
		w.longest, w.from = gap, last
	}
}

// Longest ends the Watch, and returns the longest time between two answers, when that began, and
// how many requests failed.
func (w *Watch) Longest() (gap time.Duration, from time.Time, failed int) {
	w.stop()
	<-w.ended
	return w.longest, w.from, w.refused
}

// A Socket is a listening Unix socket that outlives the daemons that serve it.
type Socket struct {
	f *os.File
}

// Hold opens a Socket. Close removes it.
func Hold(path string) (*Socket, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // it goes on in f
	f, err := l.File()
	l.Close() //nolint:errcheck // f is another descriptor of it
	return &Socket{f}, err
}

// Close closes the socket.
func (s *Socket) Close() error { return s.f.Close() }

// Serve starts a daemon, with the socket of s unless s is nil, and returns when the daemon serves.
// ended is closed when its process has ended.
func Serve(s *Socket, log *os.File, program string, args ...string) (p *os.Process, ended <-chan struct{}, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	defer w.Close()
	cmd := exec.Command(program, args...)
	cmd.ExtraFiles = []*os.File{w}
	cmd.Env = append(os.Environ(), "SANDBOXD_READY_FD=3")
	if s != nil { // sd_listen_fds(3): the sockets begin at 3, and LISTEN_PID is the daemon's own
		cmd = exec.Command("/bin/sh", append([]string{"-c", `LISTEN_PID=$$ exec "$0" "$@"`, program}, args...)...)
		cmd.ExtraFiles = []*os.File{s.f, w}
		cmd.Env = append(os.Environ(), "LISTEN_FDS=1", "LISTEN_FDNAMES=api", "SANDBOXD_READY_FD=4")
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	w.Close()
	done := make(chan struct{})
	go func() { defer close(done); cmd.Wait() }() //nolint:errcheck // whoever waits looks at what it left
	said, err := io.ReadAll(io.LimitReader(r, 8))
	if string(said) != "READY=1\n" {
		return nil, nil, fmt.Errorf("%s %s ended before it served (%w)", program, strings.Join(args, " "), orEnded(err))
	}
	return cmd.Process, done, nil
}

func orEnded(err error) error {
	if err == nil {
		return io.ErrUnexpectedEOF
	}
	return err
}
