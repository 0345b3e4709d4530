package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// FileInfo describes a file in a sandbox. Its strings are the guest's.
type FileInfo = agent.FileInfo

// Upload is one file to put into a sandbox.
type Upload struct {
	Path string // absolute; missing parents are made
	Mode int    // permission bits whose decimal digits are the octal ones: 644
	Open func() (io.ReadCloser, error)
}

// Put puts files into a sandbox in one streamed request. Each replaces what
// was there once it has arrived in full.
func (c *Client) Put(ctx context.Context, idOrName string, files []Upload) error {
	pr, pw := io.Pipe()
	mw := multipart.NewWriter(pw)
	local := make(chan error, 1)
	go func() {
		err := writeParts(mw, files)
		if err == nil {
			err = mw.Close()
		}
		local <- err
		pw.CloseWithError(err)
	}()
	err := c.do(ctx, request{
		method: http.MethodPost, path: agentPath(idOrName, "/files/upload"), body: pr,
		header: http.Header{"Content-Type": {mw.FormDataContentType()}},
	}, nil)
	pr.CloseWithError(io.ErrClosedPipe) // the writer must not wait for a reader that left
	if werr := <-local; werr != nil && err != nil && !isPipe(werr) {
		return werr // why the request broke
	}
	return err
}

func isPipe(err error) bool { return err == io.ErrClosedPipe } //nolint:errorlint // it is passed through unwrapped

func writeParts(mw *multipart.Writer, files []Upload) error {
	for _, f := range files {
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
		if w, err = mw.CreateFormFile("file", "file"); err != nil {
			return err
		}
		if err := copyFrom(w, f); err != nil {
			return err
		}
	}
	return nil
}

func copyFrom(w io.Writer, f Upload) error {
	r, err := f.Open()
	if err != nil {
		return fmt.Errorf("put %s: %w", f.Path, err)
	}
	defer r.Close()
	buf := make([]byte, 256<<10) // 32 KiB halves the speed of a large file
	_, err = io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, buf)
	return err
}

// Download reads a file of a sandbox.
func (c *Client) Download(ctx context.Context, idOrName, path string) (io.ReadCloser, error) {
	resp, err := c.stream(ctx, request{
		method: http.MethodGet, path: agentPath(idOrName, "/files/download"), query: url.Values{"path": {path}},
	})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// Stat describes a file of a sandbox; one that does not exist is errs.NotFound.
func (c *Client) Stat(ctx context.Context, idOrName, path string) (FileInfo, error) {
	var m map[string]FileInfo
	err := c.do(ctx, request{
		method: http.MethodGet, path: agentPath(idOrName, "/files/info"), query: url.Values{"path": {path}},
	}, &m)
	if err != nil {
		return FileInfo{}, err
	}
	fi, ok := m[path]
	if !ok {
		return fi, errs.New(errs.Internal, "the agent of sandbox %s did not say what %s is", idOrName, path)
	}
	return fi, nil
}

// ListDir lists a directory of a sandbox, depth levels deep.
func (c *Client) ListDir(ctx context.Context, idOrName, path string, depth int) (l []FileInfo, err error) {
	err = c.do(ctx, request{
		method: http.MethodGet, path: agentPath(idOrName, "/directories/list"),
		query: url.Values{"path": {path}, "depth": {strconv.Itoa(depth)}},
	}, &l)
	return l, err
}

// Mkdir makes directories, parents too; modes as in Upload.
func (c *Client) Mkdir(ctx context.Context, idOrName string, modes map[string]int) error {
	body := map[string]agent.FileMode{}
	for p, m := range modes {
		body[p] = agent.FileMode{Mode: m}
	}
	return c.do(ctx, request{method: http.MethodPost, path: agentPath(idOrName, "/directories"), json: body}, nil)
}
