package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func (s *Server) getSnapshot(w http.ResponseWriter, r *http.Request) error {
	snap, err := s.snapshot(r)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, spec.Snapshot(snap))
	return nil
}

func (s *Server) inspectSnapshot(w http.ResponseWriter, r *http.Request) error {
	snap, err := s.snapshot(r)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, spec.InspectSnapshot(snap))
	return nil
}

// snapshot finds the snapshot that the path names.
func (s *Server) snapshot(r *http.Request) (record.Snapshot, error) {
	id := segmentOf(r, "id")
	snap, err := s.snapshots.Get(r.Context(), id)
	if err != nil {
		return snap, fmt.Errorf("look up snapshot %q: %w", httperr.Clip(id, 80), err)
	}
	return snap, nil
}

func (s *Server) deleteSnapshot(w http.ResponseWriter, r *http.Request) error {
	id := segmentOf(r, "id")
	// A client that hangs up during a delete has still asked for it.
	if err := s.snapshots.Delete(context.WithoutCancel(r.Context()), id); err != nil {
		return fmt.Errorf("delete snapshot %q: %w", httperr.Clip(id, 80), err)
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}

// createSnapshot answers when the intent is durable, and if asked to wait when
// the snapshot is ready or has failed.
func (s *Server) createSnapshot(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	wait, err := wantsWait(r)
	if err != nil {
		return err
	}
	var req wire.CreateSnapshotRequest
	if r.Body, err = orEmptyObject(r.Body); err != nil {
		return errs.Wrap(err, errs.Invalid, "the body could not be read; send it again")
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
	snap, err := s.snapshots.Create(r.Context(), rec.ID, name)
	if err != nil {
		return fmt.Errorf("snapshot sandbox %s: %w", rec.ID, httperr.Recode(err, errs.WrongState, "SNAPSHOT::INVALID_SOURCE_STATE"))
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

func (s *Server) listSnapshots(w http.ResponseWriter, r *http.Request) error {
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

// fromSnapshot has a new sandbox begin with the files of a snapshot, over its image.
func (s *Server) fromSnapshot(ctx context.Context, to *record.Spec, id string) error {
	snap, err := s.snapshots.Get(ctx, id)
	if err != nil {
		return fmt.Errorf("look up snapshot %q: %w", httperr.Clip(id, 80), err)
	}
	to.Snapshot, to.Image = snap.ID, snap.Image
	return nil
}
