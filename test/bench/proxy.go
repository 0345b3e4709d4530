package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/client"
)

const (
	guestPort  = 8000
	proxyBytes = 256 << 20
)

// proxied: a server in a sandbox through the daemon's TCP listener, against the same server
// at the sandbox's own address.
func proxied(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		if err := b.proxiedOn(ctx, rt); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) proxiedOn(ctx context.Context, rt string) (err error) {
	sb, err := b.create(ctx, rt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.drop(ctx, sb.ID)) }()
	stop, err := b.serve(ctx, sb.ID)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	in, err := b.cl.Inspect(ctx, sb.ID)
	if err != nil {
		return err
	}
	port := strconv.Itoa(guestPort)
	ours := site{
		"http://" + b.tcp + "/v1/sandboxes/" + sb.ID + "/proxy/" + port,
		&http.Client{Transport: &http.Transport{WriteBufferSize: 64 << 10}},
	}
	direct := site{
		"http://" + net.JoinHostPort(in.Host["address"], port),
		&http.Client{Transport: &http.Transport{WriteBufferSize: 64 << 10}},
	}
	defer ours.client.CloseIdleConnections()
	defer direct.client.CloseIdleConnections()
	if err := direct.await(ctx); err != nil {
		return err
	}
	const baseline = "direct to the sandbox's address"
	a, t, err := turns(b.times(2000, 100), 50, ours.latency(ctx), direct.latency(ctx))
	if err != nil {
		return err
	}
	b.add(row("proxy_added_latency", rt, "ms", a, baseline, t, goal{maxOver: 0.2}))
	a, t, err = turns(b.times(10, 2), 1, ours.out(ctx), direct.out(ctx))
	if err != nil {
		return err
	}
	b.add(row("proxy_throughput", rt, "MB/s", a, baseline, t, goal{minRatio: 0.8}))
	a, t, err = turns(b.times(10, 2), 1, ours.in(ctx), direct.in(ctx))
	if err != nil {
		return err
	}
	b.add(row("proxy_throughput_in", rt, "MB/s", a, baseline, t, goal{minRatio: 0.8}))
	return nil
}

// serve copies the guest's server into a sandbox and starts it.
func (b *bench) serve(ctx context.Context, id string) (stop func() error, err error) {
	if err := putGuest(ctx, b, id, "/root/guest"); err != nil {
		return nil, err
	}
	p, err := b.cl.Start(ctx, id, client.Command{Argv: []string{"/root/guest", ":" + strconv.Itoa(guestPort)}})
	if err != nil {
		return nil, err
	}
	return func() error {
		err := p.Signal(ctx, "SIGKILL")
		_, waitErr := p.Wait(os.Stderr, os.Stderr)
		return errors.Join(err, waitErr)
	}, nil
}

func guestProgram(b *bench) string { return filepath.Join(b.dir, "..", "bench-guest") } // scripts/bench.sh builds it

// putGuest copies the guest's program into a sandbox.
func putGuest(ctx context.Context, b *bench, id, path string) error {
	fi, err := os.Stat(guestProgram(b))
	if err != nil {
		return fmt.Errorf("%w; scripts/bench.sh builds it", err)
	}
	return b.cl.Files(id).Put(ctx, []client.Upload{{
		Path: path, Mode: 755, Size: fi.Size(),
		Open: func() (io.ReadCloser, error) { return os.Open(guestProgram(b)) },
	}})
}

// A site is one way to the server.
type site struct {
	base   string
	client *http.Client
}

// await returns when the server answers.
func (s site) await(ctx context.Context) error {
	deadline := time.Now().Add(10 * time.Second)
	for {
		_, err := s.latency(ctx)()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(5 * time.Millisecond) // there is no event when a guest's server is ready
	}
}

func (s site) latency(ctx context.Context) func() (float64, error) {
	return func() (float64, error) {
		start := time.Now()
		n, err := s.do(ctx, http.MethodGet, "/", 0)
		took := ms(time.Since(start))
		if err == nil && n != 2 {
			err = fmt.Errorf("%s/ answers %d bytes", s.base, n)
		}
		return took, err
	}
}

// out is the rate of an answer in MB/s.
func (s site) out(ctx context.Context) func() (float64, error) {
	return func() (float64, error) {
		start := time.Now()
		n, err := s.do(ctx, http.MethodGet, "/out?n="+strconv.Itoa(proxyBytes), 0)
		took := time.Since(start)
		if err == nil && n != proxyBytes {
			err = fmt.Errorf("%s/out answers %d bytes of %d", s.base, n, proxyBytes)
		}
		return proxyBytes / mega / took.Seconds(), err
	}
}

// in is the rate of a request in MB/s.
func (s site) in(ctx context.Context) func() (float64, error) {
	return func() (float64, error) {
		start := time.Now()
		_, err := s.do(ctx, http.MethodPost, "/in", proxyBytes)
		return proxyBytes / mega / time.Since(start).Seconds(), err
	}
}

// do sends a request with a body of size bytes and returns the length of the answer's.
func (s site) do(ctx context.Context, method, path string, size int64) (int64, error) {
	var body io.Reader
	if size > 0 {
		body = noiseReader(size)
	}
	r, err := http.NewRequestWithContext(ctx, method, s.base+path, body)
	if err != nil {
		return 0, err
	}
	r.ContentLength = size
	r.Header.Set("OPEN-SANDBOX-API-KEY", key)
	resp, err := s.client.Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	n, err := swallow(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s%s: %s", s.base, path, resp.Status)
	}
	return n, err
}
