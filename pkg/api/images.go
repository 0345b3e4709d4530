package api

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"

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
// one that it names: the sandboxes of all clients start from that.
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
	p, err := h.images.Prune(context.WithoutCancel(r.Context()), all)
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
