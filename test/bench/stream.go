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
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/coder/websocket"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// The output of a command: lines of 4 KiB.
const (
	lineBytes   = 4 << 10
	streamBytes = 100_000_000 / lineBytes * lineBytes
	longStream  = 10 // times streamBytes: enough to see memory that grows
)

const linesFile = "/root/lines"

// commandStream: the rate of 100 MB of a command's output to the Go client; the memory of
// daemon and agent during ten times as much; and the rate as the SDKs get it, one JSON
// event for each line: to a Go program, and to the SDKs.
func commandStream(ctx context.Context, b *bench) (err error) {
	all, err := b.sdks(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, endAll(all)) }()
	for _, rt := range runtimes {
		if err := b.streamOn(ctx, rt, all); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) streamOn(ctx context.Context, rt string, all []*sdk) (err error) {
	sb, err := b.create(ctx, rt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.drop(ctx, sb.ID)) }()
	line := strings.Repeat("0123456789abcdef", lineBytes/16)[:lineBytes-1] + "\n"
	err = b.cl.Files(sb.ID).Put(ctx, []client.Upload{{Path: linesFile, Mode: 644, Size: streamBytes, Open: func() (io.ReadCloser, error) {
		return io.NopCloser(strings.NewReader(strings.Repeat(line, streamBytes/lineBytes))), nil
	}}})
	if err != nil {
		return err
	}
	goClient := func() (float64, error) { return b.stream(ctx, sb.ID, 1) }
	var ours, events []float64
	theirs := make([][]float64, len(all))
	for i := range b.times(12, 2) + 2 {
		v, err := goClient()
		if err != nil {
			return err
		}
		if i >= 2 { // the first two warm up
			ours = append(ours, v)
		}
		if v, err = b.events(ctx, sb.ID); err != nil {
			return err
		}
		if i >= 2 {
			events = append(events, v)
		}
		if i%4 != 3 { // an SDK takes seconds, so it runs in every fourth round only
			continue
		}
		for k, s := range all {
			var took float64
			var n int
			if err := s.ask("stream "+sb.ID+" cat "+linesFile, &took, &n); err != nil {
				return err
			}
			if n != streamBytes && n != streamBytes-streamBytes/lineBytes { // older SDKs drop the ends of lines
				return fmt.Errorf("the SDK %s got %d of %d bytes", s.name, n, streamBytes)
			}
			theirs[k] = append(theirs[k], streamBytes/mega/took)
		}
	}
	b.add(row("command_stream", rt, "MB/s", ours, "", nil, goal{minP50: pick(rt, 150.0, 80.0)}))
	b.add(row("command_stream_events", rt, "MB/s", events, "the Go client", ours, goal{}))
	for k, s := range all {
		b.add(row("command_stream_"+s.name, rt, "MB/s", theirs[k], "the Go client", ours, goal{}))
	}
	return b.streamMemory(ctx, rt, sb.ID)
}

// stream runs a command that prints all lines n times, and returns MB/s.
func (b *bench) stream(ctx context.Context, id string, n int) (float64, error) {
	argv := []string{"cat"}
	for range n {
		argv = append(argv, linesFile)
	}
	start := time.Now()
	p, err := b.cl.Start(ctx, id, client.Command{Argv: argv})
	if err != nil {
		return 0, err
	}
	var got counter
	exit, err := p.Wait(&got, io.Discard)
	took := time.Since(start)
	if err == nil && (exit.Code != 0 || int(got) != n*streamBytes) {
		err = fmt.Errorf("%d bytes of %d came, exit status %d", got, n*streamBytes, exit.Code)
	}
	return float64(n) * streamBytes / mega / took.Seconds(), err
}

// events runs a command whose output comes as events, decodes them, and returns MB/s of
// their content.
func (b *bench) events(ctx context.Context, id string) (float64, error) {
	e, err := b.cl.Endpoint(ctx, id, agent.Port)
	if err != nil {
		return 0, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+e.Endpoint+"/command",
		strings.NewReader(`{"command":"cat `+linesFile+`"}`))
	if err != nil {
		return 0, err
	}
	r.Header.Set("Content-Type", "application/json")
	for k, v := range e.Headers {
		r.Header.Set(k, v)
	}
	start := time.Now()
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	n, last := 0, ""
	for events := json.NewDecoder(resp.Body); ; {
		var ev agent.Event
		if err = events.Decode(&ev); err != nil {
			break
		}
		if last = ev.Type; last == "stdout" {
			n += len(ev.Text)
		}
	}
	took := time.Since(start)
	if n != streamBytes && n != streamBytes-streamBytes/lineBytes || last != "execution_complete" {
		return 0, fmt.Errorf("%d bytes of %d came in events, the last of them %q: %w", n, streamBytes, last, err)
	}
	return streamBytes / mega / took.Seconds(), nil
}

type counter int

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}

// streamMemory: the memory of daemon and agent during much output, against little output.
func (b *bench) streamMemory(ctx context.Context, rt, id string) error {
	for _, who := range []struct {
		name string
		peak func(f func() error) (float64, error)
	}{
		{"daemon", b.daemonPeak},
		{"agent", func(f func() error) (float64, error) { return b.agentPeak(ctx, id, f) }},
	} {
		var short, long []float64
		for range b.times(3, 1) {
			for _, s := range []struct {
				times int
				into  *[]float64
			}{{1, &short}, {longStream, &long}} {
				v, err := who.peak(func() error { _, err := b.stream(ctx, id, s.times); return err })
				if err != nil {
					return err
				}
				*s.into = append(*s.into, v)
			}
		}
		b.add(row("command_stream_"+who.name+"_memory", rt, "MiB", long, "100 MB instead of 1 GB", short, goal{maxRatio: 1.15}))
	}
	return nil
}

// ptyEcho: a key goes through API, proxy and terminal to a program that writes it back,
// against the same with the agent directly.
func ptyEcho(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		sb, err := b.create(ctx, rt)
		if err != nil {
			return err
		}
		ours, theirs, err := b.echoes(ctx, sb.ID)
		if err != nil {
			return errors.Join(err, b.drop(ctx, sb.ID))
		}
		a, c, err := turns(b.times(500, 50), 20, ours.round, theirs.round)
		ours.ws.CloseNow()   //nolint:errcheck // it is not needed any more
		theirs.ws.CloseNow() //nolint:errcheck // as above
		if err := errors.Join(err, b.drop(ctx, sb.ID)); err != nil {
			return err
		}
		b.add(row("pty_echo", rt, "ms", a, "the same WebSocket at the agent's own address", c, goal{maxP50: pick(rt, 1.0, 3.0)}))
	}
	return nil
}

// echoes opens two terminals, one through the daemon and one at the agent.
func (b *bench) echoes(ctx context.Context, id string) (ours, theirs *echo, err error) {
	socket := filepath.Join(inst.RunDir(), "sandboxd.sock")
	ours, err = b.echo(ctx, id, "http://sandboxd/v1/sandboxes/"+id+"/proxy/"+strconv.Itoa(agent.Port), &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}, nil)
	if err != nil {
		return nil, nil, err
	}
	e, err := b.cl.Endpoint(ctx, id, agent.Port)
	if err != nil {
		return nil, nil, err
	}
	in, err := b.cl.Inspect(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	token := http.Header{agent.TokenHeader: {e.Headers[agent.TokenHeader]}}
	theirs, err = b.echo(ctx, id, "http://"+net.JoinHostPort(in.Host["address"], strconv.Itoa(agent.Port)), &http.Transport{}, token)
	return ours, theirs, err
}

// An echo is a terminal in which a program writes back what is typed.
type echo struct {
	ctx context.Context
	ws  *websocket.Conn
}

func (b *bench) echo(ctx context.Context, id, base string, tr *http.Transport, h http.Header) (*echo, error) {
	t, err := b.cl.Terminals(id).Create(ctx, client.Command{Argv: []string{"sh", "-c", "stty raw -echo; echo ready; exec cat"}}, 80, 24)
	if err != nil {
		return nil, err
	}
	ws, _, err := websocket.Dial(ctx, base+"/pty/"+t.ID+"/ws", &websocket.DialOptions{
		HTTPClient: &http.Client{Transport: tr},
		HTTPHeader: h,
	})
	if err != nil {
		return nil, err
	}
	e := &echo{ctx, ws}
	return e, e.until([]byte("ready\n"))
}

// until reads until the output ends with want.
func (e *echo) until(want []byte) error {
	var got []byte
	for {
		kind, b, err := e.ws.Read(e.ctx)
		if err != nil {
			return err
		}
		if kind == websocket.MessageText {
			continue
		}
		if b[0] != agent.PtyStdout {
			return fmt.Errorf("a message of channel %d", b[0])
		}
		if got = append(got, b[1:]...); bytes.HasSuffix(got, want) {
			return nil
		}
	}
}

// round types a key and waits for its echo.
func (e *echo) round() (float64, error) {
	start := time.Now()
	if err := e.ws.Write(e.ctx, websocket.MessageBinary, []byte{agent.PtyStdin, 'x'}); err != nil {
		return 0, err
	}
	err := e.until([]byte("x"))
	return ms(time.Since(start)), err
}
