package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// execTrue: true by the API, against true asked of the agent itself.
func execTrue(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		sb, err := b.create(ctx, rt)
		if err != nil {
			return err
		}
		direct, err := b.direct(ctx, sb.ID)
		if err != nil {
			return err
		}
		ours := func() (float64, error) {
			start := time.Now()
			_, err := b.exec(ctx, sb.ID, "true")
			return ms(time.Since(start)), err
		}
		theirs := func() (float64, error) {
			start := time.Now()
			err := direct(ctx, "true")
			return ms(time.Since(start)), err
		}
		a, c, err := turns(b.times(200, 20), 5, ours, theirs)
		if err := errors.Join(err, b.drop(ctx, sb.ID)); err != nil {
			return err
		}
		b.add(row("exec_true", rt, "ms", a, "POST /command at the agent's own address", c, goal{maxP50: pick(rt, 2.0, 14.0), maxRatio: 1.3}))
	}
	return nil
}

// direct returns a way to run a command by the agent of a sandbox, the daemon
// left out: what exec costs without sandboxd.
func (b *bench) direct(ctx context.Context, id string) (func(context.Context, ...string) error, error) {
	e, err := b.cl.Endpoint(ctx, id, agent.Port)
	if err != nil {
		return nil, err
	}
	in, err := b.cl.Inspect(ctx, id)
	if err != nil {
		return nil, err
	}
	addr := net.JoinHostPort(in.Host["address"], strconv.Itoa(agent.Port))
	a := agent.New(func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp4", addr)
	}, e.Headers[agent.TokenHeader])
	return func(ctx context.Context, argv ...string) error {
		_, err := ask(ctx, a, argv...)
		return err
	}, nil
}

// ask runs a command by the agent itself and says when its first word came: its
// output, or its end.
func ask(ctx context.Context, a *agent.Client, argv ...string) (at time.Time, err error) {
	body, err := json.Marshal(agent.CommandRequest{Argv: argv})
	if err != nil {
		return at, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandbox/command", bytes.NewReader(body))
	if err != nil {
		return at, err
	}
	r.Header.Set("Accept", agent.FramesType)
	resp, err := a.RoundTripper().RoundTrip(r)
	if err != nil {
		return at, err
	}
	defer resp.Body.Close()
	for frames := agent.NewFrameReader(resp.Body); ; {
		stream, payload, err := frames.Next()
		if err != nil {
			return at, fmt.Errorf("the agent answers %s: %w", resp.Status, err)
		}
		if at.IsZero() && (stream == agent.FrameStdout || stream == agent.FrameEnd) {
			at = time.Now()
		}
		if stream == agent.FrameEnd {
			exit, err := agent.ParseExit(payload)
			if err == nil && exit.ExitCode != 0 {
				err = fmt.Errorf("%v: exit status %d", argv, exit.ExitCode)
			}
			io.Copy(io.Discard, resp.Body) //nolint:errcheck // so that the connection serves again
			return at, err
		}
	}
}

const (
	fileSize = 100 << 20
	mega     = 1e6
)

// files: 100 MB in and out through the proxy, against cp inside the sandbox.
func files(ctx context.Context, b *bench) error {
	data := make([]byte, fileSize) // not compressible, not a hole
	for i, r := 0, rand.New(rand.NewPCG(1, 2)); i < len(data); i += 8 {
		v := r.Uint64()
		for k := range 8 {
			data[i+k] = byte(v >> (8 * k))
		}
	}
	for _, rt := range runtimes {
		if err := b.filesOn(ctx, rt, data); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) filesOn(ctx context.Context, rt string, data []byte) error {
	sb, err := b.create(ctx, rt)
	if err != nil {
		return err
	}
	put := func(path string) error {
		return b.cl.Put(ctx, sb.ID, []client.Upload{{Path: path, Mode: 644, Size: fileSize, Open: func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(data)), nil
		}}})
	}
	if err := put("/root/source"); err != nil {
		return err
	}
	// rate times f and then removes what it made, off the clock.
	rate := func(f func() error) func() (float64, error) {
		return func() (float64, error) {
			start := time.Now()
			err := f()
			took := time.Since(start)
			if err == nil {
				_, err = b.exec(ctx, sb.ID, "rm", "-f", "/root/copy")
			}
			return fileSize / mega / took.Seconds(), err
		}
	}
	cp := rate(func() error {
		_, err := b.exec(ctx, sb.ID, "cp", "--reflink=never", "/root/source", "/root/copy")
		return err
	})
	get := rate(func() error {
		r, err := b.cl.Download(ctx, sb.ID, "/root/source")
		if err != nil {
			return err
		}
		defer r.Close()
		n, err := io.Copy(io.Discard, r)
		if err == nil && n != fileSize {
			err = fmt.Errorf("read %d of %d bytes", n, fileSize)
		}
		return err
	})
	n := b.times(8, 2)
	g := pick(rt, goal{minRatio: 0.5}, goal{minP50: 200})
	puts, cps, err := turns(n, 1, rate(func() error { return put("/root/copy") }), cp)
	if err != nil {
		return err
	}
	b.add(row("file_put_100MB", rt, "MB/s", puts, "cp --reflink=never inside the sandbox", cps, g))
	gets, cps, err := turns(n, 0, get, cp)
	if err != nil {
		return err
	}
	b.add(row("file_get_100MB", rt, "MB/s", gets, "cp --reflink=never inside the sandbox", cps, g))
	return b.drop(ctx, sb.ID)
}
