package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const (
	// uploadStall is how long a client may send no byte of an archive. A program that
	// the client reads from may take minutes before it writes.
	uploadStall = 15 * time.Minute
	// uploadRate is how much a client must send beyond that, on average, in bytes a
	// second. Few imports run at once, and a slow one keeps out others.
	uploadRate = 16 << 10
	// reportEvery is how often an import says how far it is.
	reportEvery = 250 * time.Millisecond
	// refusalTime is how long the body is read after a refusal, so that the refusal
	// arrives; a client that reads it stops sending.
	refusalTime = 5 * time.Second
)

// load makes an image of the archive that is the body. Meanwhile the answer reports the
// progress, one JSON object a line; the last line has the image or the error. An error
// before the first line is an answer with a status of its own. The import ends when its
// client leaves.
func (h *imageHandlers) load(w http.ResponseWriter, r *http.Request) error {
	rc := http.NewResponseController(w)
	rc.EnableFullDuplex() //nolint:errcheck // a recorder in a test reads the body first anyway
	q := r.URL.Query()
	infoOf(r).op, infoOf(r).image = opImageImport, httperr.Clip(q.Get("name"), 200)
	report := &reporter{w: w, rc: rc, total: r.ContentLength, done: make(chan struct{})}
	report.going.Go(report.run)
	a := image.Archive{Format: q.Get("format"), Replace: mayReplace(r)}
	im, err := h.loadAs(r.Context(), q.Get("name"), a, &upload{ReadCloser: r.Body, deadline: rc.SetReadDeadline}, report.note)
	close(report.done)
	report.going.Wait()
	if err == nil {
		out := h.show(im)
		report.line(wire.ImportLine{Image: &out})
		return nil
	}
	err = fmt.Errorf("import image %q: %w", httperr.Clip(q.Get("name"), 200), httperr.Recode(err, errs.NotFound, "IMAGE::NOT_FOUND"))
	if infoOf(r).wrote {
		infoOf(r).err = err
		_, body := httperr.Body(err, infoOf(r).requestID)
		report.line(wire.ImportLine{Error: &body})
	} else {
		w.Header().Set("Connection", "close")
		fail(w, r, err)
		rc.Flush() //nolint:errcheck // a client that left needs no answer
	}
	rc.SetReadDeadline(time.Now().Add(refusalTime)) //nolint:errcheck // a recorder in a test has none
	io.Copy(io.Discard, r.Body)                     //nolint:errcheck // it is not wanted any more
	return nil
}

// loadAs imports an archive under a name, or under its own if that is empty.
func (h *imageHandlers) loadAs(ctx context.Context, name string, a image.Archive, body io.Reader,
	progress func(image.Progress),
) (i record.Image, err error) {
	if name != "" {
		if a.Ref, err = image.ParseReference(name); err != nil {
			return i, err
		}
	}
	return h.images.Import(ctx, a, body, progress)
}

// upload is a body whose sender must keep to uploadStall and uploadRate. Only the time
// spent waiting for the sender counts.
type upload struct {
	io.ReadCloser
	deadline func(time.Time) error
	n        int64
	waited   time.Duration
}

func (u *upload) Read(p []byte) (int, error) {
	start := time.Now()
	may := uploadStall + time.Duration(u.n/uploadRate)*time.Second - u.waited
	u.deadline(start.Add(min(may, uploadStall))) //nolint:errcheck // a recorder in a test has none
	n, err := u.ReadCloser.Read(p)
	u.n, u.waited = u.n+int64(n), u.waited+time.Since(start)
	switch {
	case err == nil, err == io.EOF: //nolint:errorlint // as a reader must return it
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = errs.Wrap(err, errs.Invalid, "the client stopped sending the archive, or sent it slower than %d KiB/s; send it again",
			uploadRate>>10)
	default:
		err = errs.Wrap(err, errs.Invalid, "the archive was cut off; send it again")
	}
	return n, err
}

// reporter writes progress once in reportEvery at most, however fast the import is.
type reporter struct {
	w     http.ResponseWriter
	rc    *http.ResponseController
	total int64 // of the archive; not known if not above 0
	done  chan struct{}
	going sync.WaitGroup

	mu  sync.Mutex
	now *wire.ImportProgress // not reported yet
}

func (t *reporter) note(p image.Progress) {
	out := &wire.ImportProgress{Stage: p.Stage, Layer: p.Layer, Layers: p.Layers, Bytes: p.Bytes, Total: p.Total}
	if out.Total == 0 && p.Layer == 0 {
		out.Total = max(t.total, 0)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.now = out
}

func (t *reporter) run() {
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for {
		select {
		case <-t.done:
			return
		case <-tick.C:
		}
		t.mu.Lock()
		p := t.now
		t.now = nil
		t.mu.Unlock()
		if p != nil {
			t.line(wire.ImportLine{Progress: p})
		}
	}
}

func (t *reporter) line(l wire.ImportLine) {
	t.w.Header().Set("Content-Type", "application/x-ndjson")
	b, err := json.Marshal(l)
	if err != nil {
		return
	}
	t.w.Write(append(b, '\n')) //nolint:errcheck // if the client has left, reading the body fails
	t.rc.Flush()               //nolint:errcheck // see above
}

// pull gets an image from a registry. It streams as an import does. The layers that
// were downloaded before a client left are kept for the next pull.
func (h *imageHandlers) pull(w http.ResponseWriter, r *http.Request) error {
	var req wire.PullRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := spec.CheckAuth("auth", req.Auth); err != nil {
		return err
	}
	infoOf(r).op, infoOf(r).image = opImagePull, httperr.Clip(req.Name, 200)
	report := &reporter{w: w, rc: http.NewResponseController(w), done: make(chan struct{})}
	report.going.Go(report.run)
	ctx := withAuth(r.Context(), &wire.Image{Auth: req.Auth})
	var im record.Image
	ref, err := image.ParseReference(req.Name)
	if err == nil {
		im, err = h.images.Pull(ctx, image.Pull{Ref: ref, Replace: mayReplace(r)}, report.note)
	}
	close(report.done)
	report.going.Wait()
	if err == nil {
		out := h.show(im)
		report.line(wire.ImportLine{Image: &out})
		return nil
	}
	err = httperr.Recode(fmt.Errorf("pull image %q: %w", httperr.Clip(req.Name, 200), err), errs.NotFound, "IMAGE::NOT_FOUND")
	if !infoOf(r).wrote {
		return err
	}
	infoOf(r).err = err
	_, body := httperr.Body(err, infoOf(r).requestID)
	report.line(wire.ImportLine{Error: &body})
	return nil
}
