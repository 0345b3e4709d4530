package api

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// imageHandlers serve the routes of images.
type imageHandlers struct {
	images Images
}

// show is spec.Image with the other names of an image.
func (h *imageHandlers) show(i record.Image) wire.ImageInfo {
	return spec.Image(i, h.images.Aliases(i))
}

// imageRef is the image that the path names. A name with slashes may stand there as it
// is, or escaped into one segment.
func imageRef(r *http.Request) string { return unescape(strings.TrimSuffix(r.PathValue("ref"), "/")) }

func (h *imageHandlers) list(w http.ResponseWriter, r *http.Request) error {
	all, err := h.images.List(r.Context())
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	out := wire.ImageList{Items: []wire.ImageInfo{}}
	for _, i := range all {
		out.Items = append(out.Items, h.show(i))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// mayReplace reports whether the sender of r may give a name to another image than the
// one that it names, or for which it is kept: the sandboxes of all clients start from that.
func mayReplace(r *http.Request) bool { return infoOf(r).role.Covers(record.Admin) }

// resolve finds the image that a client means by uri.
func (h *imageHandlers) resolve(ctx context.Context, uri string) (record.Image, error) {
	ref, err := image.ParseReference(uri)
	if err != nil {
		return record.Image{}, err
	}
	return h.images.Resolve(ctx, ref)
}

func (h *imageHandlers) inspect(w http.ResponseWriter, r *http.Request) error {
	ref := imageRef(r)
	i, err := h.resolve(r.Context(), ref)
	if err != nil {
		return httperr.Recode(fmt.Errorf("inspect image %q: %w", httperr.Clip(ref, 200), err), errs.NotFound, "IMAGE::NOT_FOUND")
	}
	writeJSON(w, http.StatusOK, spec.InspectImage(i, h.images.Aliases(i)))
	return nil
}

func (h *imageHandlers) remove(w http.ResponseWriter, r *http.Request) error {
	ref := imageRef(r)
	infoOf(r).op, infoOf(r).image = opImageRemove, httperr.Clip(ref, 200)
	var p image.Pruned
	parsed, err := image.ParseReference(ref)
	if err == nil {
		p, err = h.images.Remove(context.WithoutCancel(r.Context()), parsed)
	}
	if err != nil {
		return httperr.Recode(fmt.Errorf("remove image %q: %w", httperr.Clip(ref, 200), err), errs.NotFound, "IMAGE::NOT_FOUND")
	}
	writePruned(w, p)
	return nil
}

// tag gives an image a further name.
func (h *imageHandlers) tag(w http.ResponseWriter, r *http.Request) error {
	ref := imageRef(r)
	infoOf(r).op, infoOf(r).image = opImageTag, httperr.Clip(ref, 200)
	var req wire.TagRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	from, err := image.ParseReference(ref)
	if err != nil {
		return err
	}
	as, err := image.ParseReference(req.Name)
	if err != nil {
		return err
	}
	i, err := h.images.Tag(context.WithoutCancel(r.Context()), from, as, mayReplace(r))
	if err != nil {
		return httperr.Recode(fmt.Errorf("tag image %q: %w", httperr.Clip(ref, 200), err), errs.NotFound, "IMAGE::NOT_FOUND")
	}
	writeJSON(w, http.StatusOK, h.show(i))
	return nil
}

func (h *imageHandlers) prune(w http.ResponseWriter, r *http.Request) error {
	all, err := spec.ParseBool(cmp.Or(r.URL.Query().Get("all"), "false"))
	if err != nil {
		return httperr.Invalid("all: want true or false")
	}
	infoOf(r).op = opImagePrune
	p, err := h.images.Prune(context.WithoutCancel(r.Context()), all, time.Time{})
	if err != nil {
		return fmt.Errorf("prune images: %w", err)
	}
	writePruned(w, p)
	return nil
}

func writePruned(w http.ResponseWriter, p image.Pruned) {
	writeJSON(w, http.StatusOK, wire.PruneReport{
		Images: append([]string{}, p.Images...), Layers: append([]string{}, p.Layers...), BytesReclaimed: p.Bytes,
	})
}

// export writes an archive. An error in the middle of it cuts the connection: a short
// archive must not look like a whole one.
func (h *imageHandlers) export(w http.ResponseWriter, r *http.Request) error {
	ref := imageRef(r)
	i, err := h.resolve(r.Context(), ref)
	if err != nil {
		return httperr.Recode(fmt.Errorf("export image %q: %w", httperr.Clip(ref, 200), err), errs.NotFound, "IMAGE::NOT_FOUND")
	}
	infoOf(r).op, infoOf(r).image = opImageExport, i.Ref()
	w.Header().Set("Content-Type", "application/x-tar")
	if err := h.images.Export(r.Context(), i, w); err != nil {
		if !infoOf(r).wrote {
			return err
		}
		infoOf(r).err = err
		panic(http.ErrAbortHandler)
	}
	return nil
}

// build streams what the build writes, one JSON object a line. The last line has the
// image or the error, because the status was sent long before. A build goes on when the
// client hangs up: the next request finds the image.
func (h *imageHandlers) build(w http.ResponseWriter, r *http.Request) error {
	var req wire.BuildRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if !spec.IsName(req.Name) {
		return httperr.Invalid("name %q is not the name of a recipe; recipes are the directories in rootfs/, such as base or python",
			httperr.Clip(req.Name, 80))
	}
	infoOf(r).op, infoOf(r).image = opImageBuild, req.Name
	lw := &lineWriter{w: w}
	im, err := h.images.Build(context.WithoutCancel(r.Context()), req.Name, mayReplace(r), lw)
	lw.flush()
	if err != nil {
		err = fmt.Errorf("build image %q: %w", req.Name, err)
		if !infoOf(r).wrote {
			return httperr.Recode(err, errs.NotFound, "IMAGE::NOT_FOUND")
		}
		infoOf(r).err = err
		_, body := httperr.Body(err, infoOf(r).requestID)
		lw.send(wire.BuildLine{Error: &body})
		return nil
	}
	out := h.show(im)
	lw.send(wire.BuildLine{Image: &out})
	return nil
}

// lineWriter turns what a build writes into JSON lines.
type lineWriter struct {
	mu   sync.Mutex
	w    http.ResponseWriter
	part []byte
}

// maxLine cuts a line that does not end.
const maxLine = 4 << 10

func (l *lineWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.part = append(l.part, b...)
	for {
		i := bytes.IndexAny(l.part, "\r\n")
		if i < 0 && len(l.part) < maxLine {
			return len(b), nil
		}
		next := i + 1
		if i < 0 {
			i, next = maxLine, maxLine
		}
		if line := strings.TrimRight(string(l.part[:i]), " \t"); line != "" {
			l.sendLocked(wire.BuildLine{Line: line})
		}
		l.part = l.part[next:]
	}
}

func (l *lineWriter) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.part) > 0 {
		l.sendLocked(wire.BuildLine{Line: string(l.part)})
		l.part = nil
	}
}

func (l *lineWriter) send(v wire.BuildLine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sendLocked(v)
}

// sendLocked does not report a client that has left: the build goes on.
func (l *lineWriter) sendLocked(v wire.BuildLine) {
	l.w.Header().Set("Content-Type", "application/x-ndjson")
	b, err := json.Marshal(v)
	if err != nil {
		return
	}
	l.w.Write(append(b, '\n'))              //nolint:errcheck // see above
	http.NewResponseController(l.w).Flush() //nolint:errcheck // see above
}

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
