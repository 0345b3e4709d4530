package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// A goSDK makes the calls of the official Go SDK in their order and with its pauses: its
// module is not among the clients that the bench installs. Like the SDK it has one
// transport for the API and one for the agent.
type goSDK struct {
	base       string // of the API
	api, agent http.Client
}

// The pauses of the SDK (CreateSandbox in sandbox.go): when the state is not Running, and
// when a ping fails.
const (
	statePause = 2 * time.Second
	pingPause  = 200 * time.Millisecond
)

// goFirst is from CreateSandbox to the end of the first command. It returns the ID also
// with an error.
func (b *bench) goFirst(ctx context.Context, rt string) (took float64, id string, err error) {
	s := goSDK{base: "http://" + b.tcp + "/v1/sandboxes"}
	s.api.Transport, s.agent.Transport = &http.Transport{}, &http.Transport{}
	defer s.api.CloseIdleConnections()
	defer s.agent.CloseIdleConnections()
	start := time.Now()
	var made wire.Sandbox
	err = s.call(ctx, &s.api, http.MethodPost, s.base, sdkRequest(rt), &made)
	if err == nil {
		err = s.first(ctx, s.base+"/"+made.ID)
	}
	return ms(time.Since(start)), made.ID, err
}

func (s *goSDK) first(ctx context.Context, one string) error {
	for {
		var now wire.Sandbox
		if err := s.call(ctx, &s.api, http.MethodGet, one, "", &now); err != nil {
			return err
		}
		if now.Status.State == wire.Running {
			break
		}
		time.Sleep(statePause)
	}
	if err := s.call(ctx, &s.api, http.MethodGet, one+"/endpoints/44772?use_server_proxy=true", "", &wire.Endpoint{}); err != nil {
		return err
	}
	for s.call(ctx, &s.agent, http.MethodGet, one+"/proxy/44772/ping", "", nil) != nil && ctx.Err() == nil {
		time.Sleep(pingPause)
	}
	return s.call(ctx, &s.agent, http.MethodPost, one+"/proxy/44772/command", `{"command":"echo hello"}`, nil)
}

// call makes one request. Its answer goes into the value, or to the end of a stream.
func (s *goSDK) call(ctx context.Context, c *http.Client, method, url, body string, into any) error {
	r, err := http.NewRequestWithContext(ctx, method, url, bytes.NewBufferString(body))
	if err != nil {
		return err
	}
	r.Header.Set(wire.HeaderAPIKey, key)
	r.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	said := bufio.NewReader(resp.Body)
	if resp.StatusCode/100 != 2 {
		words, _ := io.ReadAll(said)
		return fmt.Errorf("%s %s: %s: %s", method, url, resp.Status, words)
	}
	if into != nil {
		err = json.NewDecoder(said).Decode(into)
	}
	_, restErr := io.Copy(io.Discard, said)
	if err == nil {
		err = restErr
	}
	return err
}

// sdkGo: the Go SDK's create with its first command, against cold_create_first_command.
func sdkGo(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		ours := func() (float64, error) {
			took, id, err := b.goFirst(ctx, rt)
			if id != "" {
				err = errors.Join(err, b.drop(ctx, id))
			}
			return took, err
		}
		theirs := func() (float64, error) { return b.firstCommand(ctx, rt) }
		a, c, err := turns(b.times(20, 2), 2, ours, theirs)
		if err != nil {
			return err
		}
		b.add(row("sdk_create_to_first_command_go", rt, "ms", a, "cold_create_first_command", c, goal{maxOver: 20}))
	}
	return nil
}
