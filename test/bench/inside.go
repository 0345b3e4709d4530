package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// execTrue: the command true through the API, against true sent to the agent directly.
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
		b.add(row("exec_true", rt, "ms", a, "POST /command at the agent's own address", c,
			goal{maxP50: pick(rt, 2.0, 14.0), maxRatio: 1.3}))
	}
	return nil
}

// thinks is how long a client works on an answer before it sends the next command. The
// agent starts the shell ahead in that time. Both sides wait: after a pause each thread
// that a command passes wakes on an idle CPU, so that these rows cannot be compared with
// exec_true.
const thinks = 100 * time.Millisecond

// execAhead: true as a shell line through the API, run by the shell ahead, against a shell
// that is started for the line.
func execAhead(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		sb, err := b.create(ctx, rt)
		if err != nil {
			return err
		}
		timed := func(c client.Command) func() (float64, error) {
			return func() (float64, error) {
				time.Sleep(thinks)
				start := time.Now()
				_, err := b.run(ctx, sb.ID, c)
				return ms(time.Since(start)), err
			}
		}
		a, c, err := turns(b.times(200, 20), 5, timed(client.Command{Shell: "true"}),
			timed(client.Command{Argv: []string{"bash", "-c", "true"}}))
		if err := errors.Join(err, b.drop(ctx, sb.ID)); err != nil {
			return err
		}
		b.add(row("exec_true_ahead", rt, "ms", a, "the same, by a shell that is started for it", c,
			goal{maxP50: pick(rt, 1.5, 4.0), maxRatio: pick(rt, 0.4, 0.25)}))
	}
	return nil
}

// direct returns a function that runs a command through the agent of a sandbox without the
// daemon: the cost of exec without sandboxd.
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

// ask runs a command through the agent directly and returns when the first event came: its
// output or its end.
func ask(ctx context.Context, a *agent.Client, argv ...string) (at time.Time, err error) {
	return askFor(ctx, a, io.Discard, argv...)
}

// askFor is ask, and writes what the command writes to its standard output.
func askFor(ctx context.Context, a *agent.Client, out io.Writer, argv ...string) (at time.Time, err error) {
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
		if stream == agent.FrameStdout {
			if _, err := out.Write(payload); err != nil {
				return at, err
			}
		}
		if stream == agent.FrameEnd {
			exit, err := agent.ParseExit(payload)
			if err == nil && exit.ExitCode != 0 {
				err = fmt.Errorf("%v: exit status %d", argv, exit.ExitCode)
			}
			io.Copy(io.Discard, resp.Body) //nolint:errcheck // so that the connection is reused
			return at, err
		}
	}
}
