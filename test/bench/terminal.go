package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"time"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/client"
)

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
