package client

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
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
	// Denials is how often the network had refused the sandbox something before this began;
	// math.MaxInt64 if the daemon does not say.
	Denials int64

	in      sandbox
	session bool // it is a line of one, whose id ID is
	body    io.ReadCloser
	frames  *agent.FrameReader
	resumes bool     // the agent lets a client come back
	had     [2]int64 // bytes of standard output and error that were written
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
		OOMKills: math.MaxInt64, Denials: math.MaxInt64,
		in: s, body: resp.Body, frames: agent.NewFrameReader(bufio.NewReaderSize(resp.Body, 32<<10)),
	}
	if n, err := strconv.ParseInt(resp.Header.Get(agent.OOMKillsHeader), 10, 64); err == nil {
		p.OOMKills = n
	}
	if n, err := strconv.ParseInt(resp.Header.Get(agent.DenialsHeader), 10, 64); err == nil {
		p.Denials = n
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
	p.ID, p.resumes = first.ID, first.Resumes
	return nil
}

// resume comes back to a command whose stream broke, at the bytes where it was. It
// returns how many bytes of output the agent has forgotten meanwhile.
func (p *Process) resume(ctx context.Context) (forgotten int64, err error) {
	resp, err := p.in.stream(ctx, request{
		method: http.MethodGet, path: p.in.agentPath("/command/" + p.ID + "/frames"),
		query: url.Values{
			"stdout": {strconv.FormatInt(p.had[0], 10)}, "stderr": {strconv.FormatInt(p.had[1], 10)},
		},
		header: http.Header{"Accept": {agent.FramesType}},
	})
	if err != nil {
		return 0, err
	}
	frames := agent.NewFrameReader(bufio.NewReaderSize(resp.Body, 32<<10))
	_, payload, err := frames.Next()
	if err != nil {
		resp.Body.Close()
		return 0, fmt.Errorf("%w (%w)", ErrLost, err)
	}
	first, err := agent.ParseInit(payload)
	if err != nil || first.ID != p.ID || first.Stdout < p.had[0] || first.Stderr < p.had[1] {
		resp.Body.Close()
		return 0, errs.Wrap(err, errs.Internal, "the agent of sandbox %s does not follow the protocol", p.in.name)
	}
	forgotten = first.Stdout - p.had[0] + first.Stderr - p.had[1]
	p.body, p.frames, p.had = resp.Body, frames, [2]int64{first.Stdout, first.Stderr}
	return forgotten, nil
}

// WaitOn is Wait for a command that is not lost with its connection: when the daemon is
// restarted, WaitOn waits for it and goes on where the output was. It calls forgot if the
// agent has forgotten bytes of output meanwhile. ErrLost then means that the command is
// gone, or that its agent is of a release that lets nobody come back.
func (p *Process) WaitOn(ctx context.Context, n Notices, forgot func(bytes int64), stdout, stderr io.Writer) (exit Exit, err error) {
	if !p.resumes {
		return p.Wait(stdout, stderr)
	}
	here := true
	err = p.in.persist(ctx, n, func(up func()) error {
		if !here {
			forgotten, err := p.resume(ctx)
			if err != nil {
				return err
			}
			if forgotten > 0 {
				forgot(forgotten)
			}
		}
		here = false
		up()
		exit, err = p.Wait(stdout, stderr)
		return err
	})
	return exit, err
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
			err = p.write(0, stdout, payload)
		case agent.FrameStderr:
			err = p.write(1, stderr, payload)
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

func (p *Process) write(stream int, w io.Writer, b []byte) error {
	n, err := w.Write(b)
	p.had[stream] += int64(n)
	return err
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

// SendStdin feeds the command until r ends, which is the end of its standard input. When
// the daemon is restarted meanwhile, it goes on where it was.
func (p *Process) SendStdin(ctx context.Context, r io.Reader) error {
	if p.resumes {
		return p.sendParts(ctx, r)
	}
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

// A stdinPart is a piece of a command's standard input.
type stdinPart struct {
	b    []byte
	last bool
	err  error // of the reader; there is no more to send
}

// sendParts sends what r gives in parts. A part whose answer is lost with the connection is
// sent again; the agent knows by its offset what it has written. While one is on its way
// the next is read.
func (p *Process) sendParts(ctx context.Context, r io.Reader) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	parts := make(chan stdinPart)
	go readParts(ctx, r, parts)
	for offset := int64(0); ; {
		var next stdinPart
		select {
		case next = <-parts:
		case <-ctx.Done():
			return ctx.Err()
		}
		if next.err != nil {
			return next.err
		}
		err := p.in.again(ctx, Notices{}, true, func(func()) error { return p.sendPart(ctx, offset, next) })
		if err != nil || next.last {
			return err
		}
		offset += int64(len(next.b))
	}
}

func (p *Process) sendPart(ctx context.Context, offset int64, next stdinPart) error {
	q := url.Values{"offset": {strconv.FormatInt(offset, 10)}}
	if !next.last {
		q.Set("more", "true")
	}
	return p.in.do(ctx, request{
		method: http.MethodPost, path: p.in.agentPath("/command/" + p.ID + "/stdin"), query: q, body: bytes.NewReader(next.b),
		length: int64(len(next.b)), header: http.Header{"Content-Type": {"application/octet-stream"}},
	}, nil)
}

// readParts reads r until it ends or ctx does. What comes while nobody takes the part is
// added to it, as far as it fits.
func readParts(ctx context.Context, r io.Reader, parts chan<- stdinPart) {
	read := make(chan stdinPart)
	go func() {
		for {
			b := make([]byte, 64<<10)
			n, err := r.Read(b)
			piece := stdinPart{b: b[:n], last: errors.Is(err, io.EOF)}
			if err != nil && !piece.last {
				piece.err = err
			}
			select {
			case read <- piece:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	var have stdinPart
	for {
		in, out := read, parts
		if have.last || have.err != nil || len(have.b)+64<<10 > agent.MaxStdinPart {
			in = nil
		}
		if len(have.b) == 0 && !have.last && have.err == nil {
			out = nil
		}
		send := have
		if len(have.b) > 0 { // what was read before an error is sent first
			send.err = nil
		}
		select {
		case piece := <-in:
			have = stdinPart{append(have.b, piece.b...), piece.last, piece.err}
		case out <- send:
			done := have.last || send.err != nil
			have = stdinPart{err: have.err}
			if done {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}
