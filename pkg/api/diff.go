package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A side of a comparison is the files of a sandbox or of a snapshot.
type side struct {
	id     string
	image  string
	layers []string
}

// side finds a snapshot or a sandbox, by id or name. A snapshot comes first.
func (s *Server) side(r *http.Request, id string) (side, error) {
	snap, err := s.snapshots.Get(r.Context(), id)
	switch {
	case err == nil && snap.State == record.SnapshotReady:
		return side{snap.ID, spec.ImageName(snap.Image), snap.Image.Layers}, nil
	case err == nil:
		return side{}, errs.Wire(errs.New(errs.WrongState, "snapshot %s is %s", snap.ID, snap.State), "SNAPSHOT::NOT_READY")
	case !errs.Is(err, errs.NotFound) || record.IsSnapshotID(id):
		return side{}, fmt.Errorf("look up snapshot %q: %w", httperr.Clip(id, 80), err)
	}
	rec, err := s.lookup(r, id)
	if err != nil {
		return side{}, err
	}
	if rec.State == record.Creating || rec.State == record.Ended && rec.NeverRan() {
		return side{}, errs.New(errs.WrongState, "sandbox %s is %s and has no files of its own", rec.ID, spec.StateOf(&rec))
	}
	return side{rec.ID, spec.ImageName(rec.Spec.Image), rec.Spec.Image.Layers}, nil
}

// sides finds what a diff is of and against; nothing is the image itself.
func (s *Server) sides(r *http.Request) (of, base side, err error) {
	q := r.URL.Query()
	if q.Get("of") == "" {
		return of, base, httperr.Invalid("of is missing; name the sandbox or the snapshot to look at")
	}
	if of, err = s.side(r, q.Get("of")); err != nil || q.Get("base") == "" {
		return of, base, err
	}
	if base, err = s.side(r, q.Get("base")); err == nil && !slices.Equal(base.layers, of.layers) {
		err = httperr.Invalid("%s lies over the image %s and %s over %s, so there is nothing to compare", of.id, of.image, base.id, base.image)
	}
	return of, base, err
}

// diff streams what is different, one JSON object a line. An error that comes
// late is the last line, because the status is long gone then.
func (s *Server) diff(w http.ResponseWriter, r *http.Request) error {
	of, base, err := s.sides(r)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := json.NewEncoder(w)
	out.SetEscapeHTML(false)
	err = s.diffs.Diff(r.Context(), of.id, base.id, of.layers, func(kind, path string) error {
		return out.Encode(wire.Change{Kind: kind, Path: strings.ToValidUTF8(path, "\uFFFD")})
	})
	if err != nil && infoOf(r).wrote {
		infoOf(r).err = err
		_, body := httperr.Body(err, infoOf(r).requestID)
		err = out.Encode(wire.Change{Error: &body})
	}
	if err == nil && !infoOf(r).wrote {
		w.WriteHeader(http.StatusOK) // nothing is different
	}
	return err
}
