package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Interpreters are the living interpreters in a sandbox, also called contexts:
// what one call defines the next one finds.
type Interpreters struct{ sandbox }

// Create starts an interpreter of a language, in dir or, if that is
// empty, in the image's WORKDIR.
func (c Interpreters) Create(ctx context.Context, language, dir string) (agent.CodeContext, error) {
	return ask[agent.CodeContext](ctx, c.daemon, request{
		method: http.MethodPost, path: c.agentPath("/code/context"), patient: true,
		json: agent.CodeContext{Language: language, Cwd: dir},
	})
}

// List lists the interpreters of a language, or all.
func (c Interpreters) List(ctx context.Context, language string) (list []agent.CodeContext, err error) {
	r := get(c.agentPath("/code/contexts"))
	if language != "" {
		r.query = url.Values{"language": {language}}
	}
	err = c.do(ctx, r, &list)
	return list, err
}

// Remove ends an interpreter and what runs in it.
func (c Interpreters) Remove(ctx context.Context, id string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: c.agentPath("/code/contexts/" + url.PathEscape(id))}, nil)
}

// Code is what Interpreters.Run runs.
type Code struct {
	Text     string
	Language string // it runs in the context that the sandbox keeps for this language
	Context  string // or in the context with this id
}

// CodeError is code that failed: an exception it did not catch, or the end of
// its interpreter.
type CodeError agent.EventError

func (e *CodeError) Error() string { return fmt.Sprintf("%s: %s", e.Name, e.Value) }

// Evaluation is code that runs.
type Evaluation struct {
	Context string // id of the context that it runs in

	in     sandbox
	body   io.ReadCloser
	events *bufio.Reader
}

// Run starts code. Its output waits until Wait is called; it goes on when
// this client leaves.
func (c Interpreters) Run(ctx context.Context, code Code) (*Evaluation, error) {
	resp, err := c.stream(ctx, request{
		method: http.MethodPost, path: c.agentPath("/code"), patient: true,
		json: agent.CodeRequest{Code: code.Text, Context: agent.CodeContext{ID: code.Context, Language: code.Language}},
	})
	if err != nil {
		return nil, err
	}
	e := &Evaluation{in: c.sandbox, body: resp.Body, events: bufio.NewReaderSize(resp.Body, 32<<10)}
	first, err := e.next()
	if err == nil && (first.Type != "init" || first.Text == "") {
		err = fmt.Errorf("the first event is %.32q", first.Type)
	}
	if err != nil {
		resp.Body.Close()
		return nil, errs.Wrap(err, errs.Internal, "the agent of sandbox %s does not follow the protocol", c.name)
	}
	e.Context = first.Text
	return e, nil
}

// maxCodeEvent bounds an event, in bytes: the agent sends a figure in one.
const maxCodeEvent = 64 << 20

// next reads an event: JSON in a line, and an empty line after it.
func (e *Evaluation) next() (ev agent.Event, err error) {
	var line []byte
	for len(line) == 0 {
		for {
			part, err := e.events.ReadSlice('\n')
			line = append(line, part...)
			if len(line) > maxCodeEvent {
				return ev, fmt.Errorf("an event is longer than %d bytes", maxCodeEvent)
			}
			if err == nil {
				break
			}
			if !errors.Is(err, bufio.ErrBufferFull) {
				return ev, fmt.Errorf("%w (%w)", ErrLost, err)
			}
		}
		line = bytes.TrimRight(line, "\r\n")
	}
	return ev, json.Unmarshal(line, &ev)
}

// Wait copies output until the code ends, and hands over each value that it
// shows, as text by MIME type; bytes are base64. Code that failed is a
// *CodeError. An error of a writer, or of result, ends it, too.
func (e *Evaluation) Wait(stdout, stderr io.Writer, result func(map[string]string) error) error {
	defer e.body.Close()
	for {
		ev, err := e.next()
		if err != nil {
			return err
		}
		switch ev.Type {
		case "stdout":
			_, err = io.WriteString(stdout, ev.Text)
		case "stderr":
			_, err = io.WriteString(stderr, ev.Text)
		case "result":
			err = result(ev.Results)
		case "error":
			if ev.Error == nil {
				return errs.New(errs.Internal, "the agent of sandbox %s sent an invalid result of the code", e.in.name)
			}
			return (*CodeError)(ev.Error)
		case "execution_complete":
			return nil
		}
		if err != nil {
			return fmt.Errorf("write the code's output: %w", err)
		}
	}
}

// Signal interrupts the code, whatever the name: its context lives on.
func (e *Evaluation) Signal(ctx context.Context, _ string) error {
	return e.in.do(ctx, request{method: http.MethodDelete, path: e.in.agentPath("/code"), query: url.Values{"id": {e.Context}}}, nil)
}
