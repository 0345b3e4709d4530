package client

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"sync/atomic"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Images are the images of a host.
type Images struct{ *daemon }

func imagePath(ref, rest string) string { return "/images/" + url.PathEscape(ref) + rest }

// List lists the images of the host.
func (c Images) List(ctx context.Context) ([]wire.ImageInfo, error) {
	var l wire.ImageList
	err := c.do(ctx, get("/images"), &l)
	return l.Items, err
}

// Remove removes name[:tag] or a digest, and the layers that no other image has.
func (c Images) Remove(ctx context.Context, ref string) (wire.PruneReport, error) {
	return ask[wire.PruneReport](ctx, c.daemon, request{method: http.MethodDelete, path: imagePath(ref, "")})
}

// Tag gives an image a further name, NAME[:TAG].
func (c Images) Tag(ctx context.Context, ref, name string) (wire.ImageInfo, error) {
	return ask[wire.ImageInfo](ctx, c.daemon, request{
		method: http.MethodPost, path: imagePath(ref, "/tag"), json: wire.TagRequest{Name: name},
	})
}

// Build makes the image of a recipe and calls progress for each line of the build.
func (c Images) Build(ctx context.Context, name string, progress func(line string)) (wire.ImageInfo, error) {
	resp, err := c.stream(ctx, request{method: http.MethodPost, path: "/images/build", json: wire.BuildRequest{Name: name}})
	if err != nil {
		return wire.ImageInfo{}, err
	}
	defer resp.Body.Close()
	im, err := parseBuild(resp.Body, progress)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = c.lost(ctx, err)
	}
	return im, err
}

func parseBuild(r io.Reader, progress func(string)) (wire.ImageInfo, error) {
	for l, err := range lines[wire.BuildLine](r, "build") {
		switch {
		case err != nil:
			return wire.ImageInfo{}, err
		case l.Error != nil:
			return wire.ImageInfo{}, errs.Wire(errs.New(errs.Internal, "%s", l.Error.Message), l.Error.Code)
		case l.Image != nil:
			return *l.Image, nil
		default:
			progress(l.Line)
		}
	}
	return wire.ImageInfo{}, io.ErrUnexpectedEOF
}

// Archive is an image to import.
type Archive struct {
	Name   string // NAME[:TAG]; empty: what the archive says
	Format string // auto, rootfs, docker or oci; empty: auto
	Size   int64  // bytes; 0: unknown
	Body   io.Reader
}

// Import makes an image of an archive. progress is called a few times a second
// with how far the daemon is. Cancelling ctx ends the import, and leaves
// nothing.
func (c Images) Import(ctx context.Context, a Archive, progress func(wire.ImportProgress)) (wire.ImageInfo, error) {
	q := url.Values{}
	for k, v := range map[string]string{"name": a.Name, "format": a.Format} {
		if v != "" {
			q.Set(k, v)
		}
	}
	body := &remembering{r: a.Body} // an archive that cannot be read is not the daemon's fault
	if a.Size == 0 {
		in := unblocked(a.Body)
		defer in.Close()
		body.r, ctx = in, closeWithConn(ctx, in)
	}
	resp, err := c.stream(ctx, request{
		method: http.MethodPost, path: "/images", query: q, body: body, length: a.Size,
		header: http.Header{"Content-Type": {"application/octet-stream"}}, patient: true,
	})
	if err != nil {
		return wire.ImageInfo{}, body.blame(err)
	}
	defer resp.Body.Close() // also ends what is still sent
	im, err := c.arriving(ctx, resp.Body, progress)
	return im, body.blame(err)
}

// Pull gets an image from the registry that the daemon's configuration
// names for it. progress is called a few times a second with how far that is.
// Cancelling ctx ends the pull; the next goes on from there.
func (c Images) Pull(ctx context.Context, name string, auth *wire.ImageAuth, progress func(wire.ImportProgress)) (wire.ImageInfo, error) {
	resp, err := c.stream(ctx, request{
		method: http.MethodPost, path: "/images/pull", json: wire.PullRequest{Name: name, Auth: auth}, patient: true,
	})
	if err != nil {
		return wire.ImageInfo{}, err
	}
	defer resp.Body.Close()
	return c.arriving(ctx, resp.Body, progress)
}

// arriving reads the lines of an import or a pull.
func (c Images) arriving(ctx context.Context, r io.ReadCloser, progress func(wire.ImportProgress)) (wire.ImageInfo, error) {
	for l, err := range lines[wire.ImportLine](c.followed(ctx, r), "answer") {
		switch {
		case err != nil:
			return wire.ImageInfo{}, err
		case l.Error != nil:
			return wire.ImageInfo{}, errs.Wire(errs.New(errs.Invalid, "%s", l.Error.Message), l.Error.Code)
		case l.Image != nil:
			return *l.Image, nil
		case l.Progress != nil && progress != nil:
			progress(*l.Progress)
		}
	}
	return wire.ImageInfo{}, c.lost(ctx, io.ErrUnexpectedEOF)
}

// unblocked reads r in another goroutine, so that Close ends a Read that waits.
func unblocked(r io.Reader) io.ReadCloser {
	out, in := io.Pipe()
	go func() {
		_, err := io.CopyBuffer(struct{ io.Writer }{in}, struct{ io.Reader }{r}, make([]byte, 1<<18))
		in.CloseWithError(err)
	}()
	return out
}

// closeWithConn closes the body of the request to be made with the context it
// returns when the connection breaks or ctx ends: net/http waits for a Read of
// it, and a pipe may never say anything again.
func closeWithConn(ctx context.Context, body io.Closer) context.Context {
	context.AfterFunc(ctx, func() { body.Close() })
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		conn := i.Conn
		if t, ok := conn.(*tls.Conn); ok {
			conn = t.NetConn()
		}
		if w, ok := conn.(*watched); ok {
			context.AfterFunc(w.alive, func() { body.Close() })
		}
	}})
}

// watched is a connection whose alive ends when it breaks.
type watched struct {
	net.Conn
	alive context.Context
	end   context.CancelFunc
}

func watch(c net.Conn, err error) (net.Conn, error) {
	if err != nil {
		return nil, err
	}
	w := &watched{Conn: c}
	w.alive, w.end = context.WithCancel(context.Background())
	return w, nil
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if err != nil {
		w.end()
	}
	return n, err
}

func (w *watched) Close() error {
	w.end()
	return w.Conn.Close()
}

// remembering is a body that keeps the error with which reading it failed.
type remembering struct {
	r   io.Reader
	err atomic.Pointer[error] // net/http reads where it likes
}

func (r *remembering) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrClosedPipe) {
		r.err.CompareAndSwap(nil, &err)
	}
	return n, err
}

func (r *remembering) blame(err error) error {
	if why := r.err.Load(); why != nil {
		return errs.Wrap(*why, errs.Invalid, "read the archive: %v", *why)
	}
	return err
}

// Export writes the archive of an image to w. The archive is whole only if there
// is no error.
func (c Images) Export(ctx context.Context, ref string, w io.Writer) error {
	return c.copyTo(ctx, request{method: http.MethodGet, path: imagePath(ref, "/export"), patient: true}, w)
}

// Inspect returns all there is to know of an image.
func (c Images) Inspect(ctx context.Context, ref string) (wire.ImageInspection, error) {
	return ask[wire.ImageInspection](ctx, c.daemon, get(imagePath(ref, "")))
}

// Prune removes unused layers, and with all also images that no sandbox uses.
func (c Images) Prune(ctx context.Context, all bool) (wire.PruneReport, error) {
	return ask[wire.PruneReport](ctx, c.daemon, request{
		method: http.MethodPost, path: "/images/prune", query: url.Values{"all": {strconv.FormatBool(all)}},
	})
}
