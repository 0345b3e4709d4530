package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Files are the files of a sandbox. Their names, and all other strings about them,
// come from the guest.
type Files struct{ sandbox }

// Upload is one file to put into a sandbox.
type Upload struct {
	Path string // absolute; missing parents are made
	Mode int    // permission bits whose decimal digits are the octal ones: 644
	Size int64  // bytes; less than 0 if that is not known
	Open func() (io.ReadCloser, error)
}

// Put puts files into a sandbox in one streamed request. Each replaces what
// was there once it has arrived in full. If a file grows meanwhile, its first Size
// bytes are put; if it shrinks, that is an error.
func (c Files) Put(ctx context.Context, files []Upload) error {
	var b uploads
	mw := multipart.NewWriter(&b.head)
	for i := range files {
		if err := writeHead(mw, files[i]); err != nil {
			return err
		}
		b.flush()
		b.add(&files[i])
	}
	if err := mw.Close(); err != nil {
		return err
	}
	b.flush()
	err := c.do(ctx, request{
		method: http.MethodPost, path: c.agentPath("/files/upload"), body: &b, length: max(b.length, 0),
		header: http.Header{"Content-Type": {mw.FormDataContentType()}},
	}, nil)
	if local := b.broken(); err != nil && local != nil {
		return local // why the request broke
	}
	return err
}

// writeHead writes all of a file but its content.
func writeHead(mw *multipart.Writer, f Upload) error {
	meta, err := json.Marshal(map[string]any{"path": f.Path, "mode": f.Mode})
	if err != nil {
		return err
	}
	w, err := mw.CreatePart(textproto.MIMEHeader{
		"Content-Disposition": {`form-data; name="metadata"; filename="metadata"`},
		"Content-Type":        {"application/json"},
	})
	if err != nil {
		return err
	}
	if _, err := w.Write(meta); err != nil {
		return err
	}
	_, err = mw.CreateFormFile("file", "file")
	return err
}

// uploads is the body of a request: files, each after its head.
type uploads struct {
	head   bytes.Buffer // not yet among parts
	parts  []part
	length int64 // of all parts; less than 0 if it is not known

	closed atomic.Bool
	mu     sync.Mutex // held while reading: a transport may close a body that it still reads
	open   io.ReadCloser
	read   int64 // bytes of the part at hand
	err    error // of a file
}

// part is a text, or a file.
type part struct {
	text []byte
	file *Upload
}

func (b *uploads) flush() {
	b.parts = append(b.parts, part{text: bytes.Clone(b.head.Bytes())})
	if b.length >= 0 {
		b.length += int64(b.head.Len())
	}
	b.head.Reset()
}

func (b *uploads) add(f *Upload) {
	b.parts = append(b.parts, part{file: f})
	if f.Size < 0 || b.length < 0 {
		b.length = -1
		return
	}
	b.length += f.Size
}

func (b *uploads) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for n < len(p) && len(b.parts) > 0 && b.err == nil && !b.closed.Load() { // small parts are sent together
		m, err := b.readPart(p[n:])
		n += m
		if err == nil {
			if m > 0 {
				break // a file that may have no more just now
			}
			continue
		}
		b.shut()
		b.parts, b.read = b.parts[1:], 0
		if err != io.EOF {
			b.err = err
		}
	}
	switch {
	case n > 0:
		return n, nil
	case b.err != nil:
		return 0, b.err
	case b.closed.Load():
		b.shut()
		return 0, io.ErrClosedPipe
	}
	return 0, io.EOF
}

// readPart reads from the first part; io.EOF is its end.
func (b *uploads) readPart(p []byte) (n int, err error) {
	at := b.parts[0]
	if at.file == nil {
		n = copy(p, at.text[b.read:])
		if b.read += int64(n); int(b.read) == len(at.text) {
			err = io.EOF
		}
		return n, err
	}
	if b.open == nil {
		b.open, err = at.file.Open()
	}
	size := at.file.Size
	if size >= 0 {
		p = p[:min(int64(len(p)), size-b.read)]
	}
	if err == nil && len(p) > 0 {
		n, err = b.open.Read(p)
		b.read += int64(n)
	}
	switch {
	case err == io.EOF && b.read < size:
		return n, errs.New(errs.Invalid,
			"put %s: the file became shorter while it was read: it had %d bytes; try again when no program writes to it",
			at.file.Path, size)
	case err != nil && err != io.EOF:
		return n, fmt.Errorf("put %s: %w", at.file.Path, err)
	case b.read == size:
		return n, io.EOF
	}
	return n, err
}

func (b *uploads) shut() {
	if b.open != nil {
		b.open.Close()
		b.open = nil
	}
}

// Close makes the next Read the last.
func (b *uploads) Close() error {
	b.closed.Store(true)
	if b.mu.TryLock() {
		b.shut()
		b.mu.Unlock()
	}
	return nil
}

// broken is the error of a file.
func (b *uploads) broken() error {
	if !b.mu.TryLock() {
		return nil // it is waiting for a file, so the file is not what broke
	}
	defer b.mu.Unlock()
	return b.err
}

// Download reads a file of a sandbox.
func (c Files) Download(ctx context.Context, path string) (io.ReadCloser, error) {
	resp, err := c.stream(ctx, request{
		method: http.MethodGet, path: c.agentPath("/files/download"), query: url.Values{"path": {path}},
	})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// Stat describes a file of a sandbox; one that does not exist is errs.NotFound.
func (c Files) Stat(ctx context.Context, path string) (agent.FileInfo, error) {
	var m map[string]agent.FileInfo
	err := c.do(ctx, request{
		method: http.MethodGet, path: c.agentPath("/files/info"), query: url.Values{"path": {path}},
	}, &m)
	if err != nil {
		return agent.FileInfo{}, err
	}
	fi, ok := m[path]
	if !ok {
		return fi, errs.New(errs.Internal, "the agent of sandbox %s sent no information on %s", c.name, path)
	}
	return fi, nil
}

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
