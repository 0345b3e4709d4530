package api

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/image"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// snapshotHandlers serve the routes of snapshots.
type snapshotHandlers struct {
	snapshots Snapshots
	diffs     Diffs
	images    *imageHandlers
}

func (s *snapshotHandlers) get(w http.ResponseWriter, r *http.Request) error {
	snap, err := s.find(r)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, spec.Snapshot(snap))
	return nil
}

func (s *snapshotHandlers) inspect(w http.ResponseWriter, r *http.Request) error {
	snap, err := s.find(r)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, spec.InspectSnapshot(snap))
	return nil
}

// find finds the snapshot that the path names.
func (s *snapshotHandlers) find(r *http.Request) (record.Snapshot, error) {
	id := segmentOf(r, "id")
	snap, err := s.snapshots.Get(r.Context(), id)
	if err != nil {
		return snap, fmt.Errorf("look up snapshot %q: %w", httperr.Clip(id, 80), err)
	}
	return snap, nil
}

func (s *snapshotHandlers) delete(w http.ResponseWriter, r *http.Request) error {
	id := segmentOf(r, "id")
	// A client that hangs up during a delete has still asked for it.
	if err := s.snapshots.Delete(context.WithoutCancel(r.Context()), id); err != nil {
		return fmt.Errorf("delete snapshot %q: %w", httperr.Clip(id, 80), err)
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}

// create answers when the intent is durable, and if asked to wait when
// the snapshot is ready or has failed.
func (s *snapshotHandlers) create(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	wait, err := wantsWait(r)
	if err != nil {
		return err
	}
	unique, err := spec.ParseBool(cmp.Or(r.URL.Query().Get("unique"), "false"))
	if err != nil {
		return httperr.Invalid("unique: want true or false")
	}
	var req wire.CreateSnapshotRequest
	if r.Body, err = orEmptyObject(r.Body); err != nil {
		return errs.Wrap(err, errs.Invalid, "the request body could not be read completely; send it again")
	}
	if err := decode(w, r, &req); err != nil {
		return err
	}
	name := ""
	if req.Name != nil {
		name = *req.Name
		if err := spec.CheckSnapshotName(name); err != nil {
			return err
		}
	}
	snap, err := s.snapshots.Create(r.Context(), rec.ID, name, unique && name != "")
	if err != nil {
		return fmt.Errorf("take a snapshot of sandbox %s: %w", rec.ID,
			httperr.Recode(err, errs.WrongState, "SNAPSHOT::INVALID_SOURCE_STATE"))
	}
	if wait {
		id := snap.ID
		if snap, err = s.snapshots.Await(r.Context(), id); err != nil {
			return fmt.Errorf("wait for snapshot %s: %w", id, err)
		}
		w.Header().Set("Preference-Applied", "wait")
	}
	w.Header().Set("Location", "/v1/snapshots/"+snap.ID)
	writeJSON(w, http.StatusAccepted, spec.Snapshot(snap))
	return nil
}

// commit makes an image of the files of a sandbox. It takes a snapshot, whose files become
// a layer over those of the sandbox's image, and deletes it. It ends when its client
// leaves.
func (s *snapshotHandlers) commit(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	var req wire.CommitRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	infoOf(r).op, infoOf(r).image = opImageCommit, httperr.Clip(req.Name, 200)
	as, err := image.ParseReference(req.Name)
	if err != nil {
		return err
	}
	snap, err := s.snapshots.CreateTemporary(r.Context(), rec.ID)
	if err != nil {
		return fmt.Errorf("take a snapshot of sandbox %s: %w", rec.ID,
			httperr.Recode(err, errs.WrongState, "SNAPSHOT::INVALID_SOURCE_STATE"))
	}
	id := snap.ID
	defer func() { // it cannot be deleted before it is taken, also if the client has left
		ctx := context.WithoutCancel(r.Context())
		s.snapshots.Await(ctx, id)  //nolint:errcheck // Delete tells
		s.snapshots.Delete(ctx, id) //nolint:errcheck // a person can delete it
	}()
	if snap, err = s.snapshots.Await(r.Context(), id); err != nil {
		return fmt.Errorf("wait for snapshot %s: %w", id, err)
	}
	if snap.State != record.SnapshotReady {
		return errs.New(errs.Internal, "no snapshot of sandbox %s could be taken: %s", rec.ID, snap.Message)
	}
	tar, in := io.Pipe()
	go func() { in.CloseWithError(s.diffs.Pack(r.Context(), snap.ID, in)) }()
	i, err := s.images.images.Commit(r.Context(), snap.Image, as, mayReplace(r), tar)
	tar.Close() // ends a Pack that nobody reads
	if err != nil {
		return fmt.Errorf("commit sandbox %s: %w", rec.ID, err)
	}
	writeJSON(w, http.StatusOK, s.images.show(i))
	return nil
}

// orEmptyObject lets a body be left out.
func orEmptyObject(body io.ReadCloser) (io.ReadCloser, error) {
	var b [1]byte
	n, err := io.ReadFull(body, b[:])
	if err == io.EOF {
		return io.NopCloser(strings.NewReader("{}")), nil
	}
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(strings.NewReader(string(b[:n])), body), body}, err
}

func (s *snapshotHandlers) list(w http.ResponseWriter, r *http.Request) error {
	f, err := spec.ParseFilter(r.URL.RawQuery)
	if err != nil {
		return err
	}
	all, err := s.snapshots.List(r.Context())
	if err != nil {
		return fmt.Errorf("list snapshots: %w", err)
	}
	all = slices.DeleteFunc(all, func(snap record.Snapshot) bool { return !f.MatchSnapshot(&snap) })
	from, to, page := f.Paginate(len(all))
	out := wire.SnapshotList{Items: []wire.Snapshot{}, Pagination: page}
	for _, snap := range all[from:to] {
		out.Items = append(out.Items, spec.Snapshot(snap))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// diffHandlers compare the files of sandboxes and snapshots.
type diffHandlers struct {
	sandboxes Sandboxes
	snapshots Snapshots
	diffs     Diffs
}

// A side of a comparison is the files of a sandbox or of a snapshot.
type side struct {
	id     string
	image  string
	layers []string
}

// side finds a snapshot or a sandbox, by id or name. A snapshot comes first.
func (d *diffHandlers) side(r *http.Request, id string) (side, error) {
	snap, err := d.snapshots.Get(r.Context(), id)
	switch {
	case err == nil && snap.State == record.SnapshotReady:
		return side{snap.ID, spec.ImageName(snap.Image), snap.Image.Layers}, nil
	case err == nil:
		return side{}, errs.Wire(errs.New(errs.WrongState, "snapshot %s is %s; only a ready snapshot can be compared", snap.ID, snap.State),
			"SNAPSHOT::NOT_READY")
	case !errs.Is(err, errs.NotFound) || record.IsSnapshotID(id):
		return side{}, fmt.Errorf("look up snapshot %q: %w", httperr.Clip(id, 80), err)
	}
	rec, err := lookup(r, d.sandboxes, id)
	if err != nil {
		return side{}, err
	}
	if rec.State == record.Creating || rec.State == record.Ended && rec.NeverRan() {
		return side{}, errs.New(errs.WrongState, "sandbox %s is %s and has no files of its own", rec.ID, spec.StateOf(&rec))
	}
	return side{rec.ID, spec.ImageName(rec.Spec.Image), rec.Spec.Image.Layers}, nil
}

// sides finds the two sides of a diff. Without a base, the base is the image itself.
func (d *diffHandlers) sides(r *http.Request) (of, base side, err error) {
	q := r.URL.Query()
	if q.Get("of") == "" {
		return of, base, httperr.Invalid("of is missing; set it to the sandbox or the snapshot to compare")
	}
	if of, err = d.side(r, q.Get("of")); err != nil || q.Get("base") == "" {
		return of, base, err
	}
	if base, err = d.side(r, q.Get("base")); err == nil && !slices.Equal(base.layers, of.layers) {
		err = httperr.Invalid("%s is based on image %s and %s on %s, with other layers; only files over the same layers can be "+
			"compared", of.id, of.image,
			base.id, base.image)
	}
	return of, base, err
}

// diff streams the differences, one JSON object a line. A late error is the last line,
// because the status was sent long before.
func (d *diffHandlers) diff(w http.ResponseWriter, r *http.Request) error {
	of, base, err := d.sides(r)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := json.NewEncoder(w)
	out.SetEscapeHTML(false)
	err = d.diffs.Diff(r.Context(), of.id, base.id, of.layers, func(kind, path string) error {
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
