package client

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Archive returns a tar of the file or the directory at path in a sandbox, under the last part of
// path; "/." at the end of path asks for the contents of a directory. follow follows a link at the
// end of path. Reading fails unless all of the tar comes; the tar is a guest's.
func (c Files) Archive(ctx context.Context, path string, follow bool) (io.ReadCloser, error) {
	resp, err := c.stream(ctx, request{
		method: http.MethodGet, path: c.agentPath("/files/archive"),
		query:  url.Values{"path": {path}, "follow": {strconv.FormatBool(follow)}},
		header: http.Header{"Accept": {agent.FramesType}},
	})
	if err != nil {
		return nil, c.old(err)
	}
	if resp.Header.Get("Content-Type") != agent.FramesType {
		resp.Body.Close()
		return nil, errs.New(errs.Internal, "the agent of sandbox %s sent no tar of %s", c.name, path)
	}
	return &archive{
		Closer: resp.Body, frames: agent.NewFrameReader(bufio.NewReaderSize(resp.Body, 64<<10)),
		lost: func(err error) error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return errs.Wrap(err, errs.Unavailable, "the connection to sandbox %s broke before all of %s had come: %v", c.name, path, err)
		},
		failed: func(why string) error {
			return errs.New(errs.Internal, "copy %s out of sandbox %s: %s", path, c.name, why)
		},
	}, nil
}

// archive is what frames carry.
type archive struct {
	io.Closer
	frames *agent.FrameReader
	lost   func(error) error
	failed func(why string) error

	unread []byte
	err    error
}

func (a *archive) Read(p []byte) (int, error) {
	for len(a.unread) == 0 && a.err == nil {
		stream, payload, err := a.frames.Next()
		switch {
		case errors.Is(err, io.EOF):
			a.err = a.lost(io.ErrUnexpectedEOF)
		case err != nil:
			a.err = a.lost(err)
		case stream == agent.FrameStdout:
			a.unread = payload
		case stream == agent.FrameEnd:
			a.err = a.end(payload)
		}
	}
	if len(a.unread) == 0 {
		return 0, a.err
	}
	n := copy(p, a.unread)
	a.unread = a.unread[n:]
	return n, nil
}

// end is the error after the last byte: io.EOF if all of the tar came.
func (a *archive) end(payload []byte) error {
	x, err := agent.ParseExit(payload)
	switch {
	case err != nil:
		return a.lost(err)
	case x.Error != "" || x.ExitCode != 0:
		return a.failed(x.Error)
	}
	return io.EOF
}

// Target is where a tar goes in a sandbox.
type Target struct {
	Path string // absolute; nothing above it is made
	// Name is what the one file or directory in the tar is called in Path, if that is a directory;
	// "." puts the contents of a directory there. Without a name, any tar is unpacked into the
	// directory Path.
	Name   string
	Owners bool // keep users and groups by number; else files belong to root
}

// Unpack unpacks a tar in a sandbox, by the rules of docker cp. A file is replaced once its
// content has come in full.
func (c Files) Unpack(ctx context.Context, to Target, tar io.Reader) error {
	query := url.Values{"path": {to.Path}, "owners": {strconv.FormatBool(to.Owners)}}
	if to.Name != "" {
		query.Set("name", to.Name)
	}
	err := c.do(ctx, request{
		method: http.MethodPut, path: c.agentPath("/files/archive"), query: query, body: tar,
		header: http.Header{"Content-Type": {"application/x-tar"}},
	}, nil)
	if e, ok := errors.AsType[*errs.Error](err); ok && e.Wire == agent.ReasonDiskFull {
		return errs.New(errs.Exhausted, "%s; give it more with --disk", e.Text)
	}
	return c.old(err)
}

// old explains that an agent is older than the routes of this file.
func (c Files) old(err error) error {
	if e, ok := errors.AsType[*errs.Error](err); ok && e.Wire == "NOT_SUPPORTED" {
		return errs.Wrap(err, errs.Unsupported, "the agent of sandbox %s is of an older release and cannot copy; "+
			"stop and start the sandbox, and try again", c.name)
	}
	return err
}
