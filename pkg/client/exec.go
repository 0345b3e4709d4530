package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Command is what to run in a sandbox. Argv is run without a shell.
type Command struct {
	Argv       []string
	Shell      string            // instead of Argv: run as bash -c, or sh -c
	Dir        string            // default: the image's WORKDIR
	Env        map[string]string // over that of image and sandbox
	UID, GID   *int64            // default: the image's USER; GID needs UID
	Timeout    time.Duration     // the whole tree is killed after it; 0: never
	Stdin      bool              // Process.SendStdin will be called
	Background bool              // keep on when this client leaves; output by Commands.Logs
}

// Exit says how a command ended.
type Exit struct {
	Code     int    // 128+n after signal n; 126, 127: could not be started
	Signal   string // "SIGKILL", or empty
	TimedOut bool
	Error    string // why it could not be started
	Reason   string // "exited", "killed", "timeout", "disk_full" or "pids_limit"; empty from an older agent
	Hint     string // which limit was met, or empty
}

// Process is a command that was started.
type Process struct {
	ID string // by which Commands knows it
	// OOMKills is how many processes of the sandbox the kernel had killed for its memory
	// before this began; math.MaxInt64 if the daemon does not say.
	OOMKills int64

	in      sandbox
	session bool // it is a line of one, whose id ID is
	body    io.ReadCloser
	frames  *agent.FrameReader
}

// Start starts a command. Its output waits until Wait is called; when ctx ends, the
// agent decides whether a foreground command is killed.
func (c *Client) Start(ctx context.Context, idOrName string, cmd Command) (*Process, error) {
	return c.in(idOrName).begin(ctx, "/command", agent.CommandRequest{
		Argv: cmd.Argv, Command: cmd.Shell, Cwd: cmd.Dir, Envs: cmd.Env, UID: cmd.UID, GID: cmd.GID,
		Stdin: cmd.Stdin, Background: cmd.Background, Timeout: cmd.Timeout.Milliseconds(),
	})
}

// begin asks the agent for something that answers in frames.
func (s sandbox) begin(ctx context.Context, path string, body any) (*Process, error) {
	resp, err := s.stream(ctx, request{
		method: http.MethodPost, path: s.agentPath(path), json: body,
		header: http.Header{"Accept": {agent.FramesType}},
	})
	if err != nil {
		return nil, err
	}
	p := &Process{
		OOMKills: math.MaxInt64,
		in:       s, body: resp.Body, frames: agent.NewFrameReader(bufio.NewReaderSize(resp.Body, 32<<10)),
	}
	if n, err := strconv.ParseInt(resp.Header.Get(agent.OOMKillsHeader), 10, 64); err == nil {
		p.OOMKills = n
	}
	if err := p.first(resp.Header.Get("Content-Type")); err != nil {
		resp.Body.Close()
		return nil, err
	}
	return p, nil
}

func (p *Process) first(contentType string) error {
	if contentType != agent.FramesType {
		return errs.New(errs.Internal, "the agent of sandbox %s answered %q instead of frames; it is of another release or not an agent",
			p.in.name, contentType)
	}
	_, payload, err := p.frames.Next()
	if err != nil {
		return errs.Wrap(err, errs.Unavailable,
			"the agent of sandbox %s closed the connection before the command began; inspect the sandbox with `sandboxctl inspect %s`",
			p.in.name, p.in.name)
	}
	first, err := agent.ParseInit(payload)
	if err != nil {
		return errs.Wrap(err, errs.Internal, "the agent of sandbox %s does not follow the protocol", p.in.name)
	}
	p.ID = first.ID
	return nil
}

// ErrLost is returned by Wait when the stream ended before the command did:
// the sandbox, the daemon or the connection died under it.
var ErrLost = errors.New("the connection to the command broke before the command ended")

// Wait copies output until the command ends. It returns as soon as the exit
// is known. An error of a writer ends it, too.
func (p *Process) Wait(stdout, stderr io.Writer) (Exit, error) {
	keep := false // the rest of the body: there should be none
	defer func() {
		if keep {
			go p.drain()
			return
		}
		p.body.Close()
	}()
	for {
		stream, payload, err := p.frames.Next()
		if err != nil {
			return Exit{}, fmt.Errorf("%w (%w)", ErrLost, err)
		}
		switch stream {
		case agent.FrameStdout:
			_, err = stdout.Write(payload)
		case agent.FrameStderr:
			_, err = stderr.Write(payload)
		case agent.FrameEnd:
			keep = true
			e, err := agent.ParseExit(payload)
			if err != nil {
				return Exit{}, errs.Wrap(err, errs.Internal, "the agent of sandbox %s sent an invalid exit status of the command",
					p.in.name)
			}
			return Exit{Code: e.ExitCode, Signal: e.Signal, TimedOut: e.TimedOut, Error: e.Error, Reason: e.Reason, Hint: e.Hint}, nil
		}
		if err != nil {
			return Exit{}, fmt.Errorf("write the command's output: %w", err)
		}
	}
}

// drain reads the end of the body, so that its connection can serve again. A body
// that does not end within a second is cut off.
func (p *Process) drain() {
	t := time.AfterFunc(time.Second, func() { p.body.Close() })
	defer t.Stop()
	io.CopyN(io.Discard, p.body, 1<<10) //nolint:errcheck // whatever comes, it is over
	p.body.Close()
}

// Close closes the stream of a command that nobody will Wait for.
func (p *Process) Close() error { return p.body.Close() }

// SendStdin feeds the command until r ends, which is the end of its standard input.
func (p *Process) SendStdin(ctx context.Context, r io.Reader) error {
	return p.in.do(ctx, request{
		method: http.MethodPost, path: p.in.agentPath("/command/" + p.ID + "/stdin"), body: r,
		header: http.Header{"Content-Type": {"application/octet-stream"}},
	}, nil)
}

// Signal sends a signal, by name as "SIGINT", to the command's process group.
func (p *Process) Signal(ctx context.Context, name string) error {
	if p.session {
		return Commands{p.in}.Interrupt(ctx, p.ID)
	}
	return Commands{p.in}.Signal(ctx, p.ID, name)
}
