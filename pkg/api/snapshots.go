package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// snapshotStates says how OpenSandbox calls our states of a snapshot, with the
// reason and the message that go with each.
var snapshotStates = map[record.SnapshotState][3]string{
	record.SnapshotCreating: {wire.SnapshotCreating, "snapshot_accepted", "Snapshot creation accepted."},
	record.SnapshotReady:    {wire.SnapshotReady, "snapshot_runtime_ready", "Snapshot is ready."},
	record.SnapshotFailed:   {wire.SnapshotFailed, "snapshot_capture_failed", ""},
	record.SnapshotDeleting: {wire.SnapshotDeleting, "snapshot_deleting", "Snapshot deletion accepted."},
}

// SnapshotStateOf is the state of a snapshot as clients know it.
func SnapshotStateOf(s record.Snapshot) string { return snapshotStates[s.State][0] }

func toWireSnapshot(s record.Snapshot) wire.Snapshot {
	st := snapshotStates[s.State]
	changed := micros(s.Changed)
	out := wire.Snapshot{
		ID: s.ID, SandboxID: s.Source, Name: s.Name, CreatedAt: micros(s.Created),
		Status: wire.Status{State: st[0], Reason: st[1], Message: st[2], LastTransitionAt: &changed},
	}
	if s.State == record.SnapshotFailed {
		out.Status.Message = s.Message
	}
	return out
}

// snapshotRoutes finds what stands under /snapshots; seg[0] is "snapshots".
func (s *Server) snapshotRoutes(seg []string) (route, map[string]handler) {
	if len(seg) == 1 {
		return route{name: "/snapshots"}, only(http.MethodGet, s.listSnapshots)
	}
	id := unescape(seg[1])
	rt := route{name: "/snapshots/{id}"}
	switch {
	case len(seg) == 2:
		return rt, map[string]handler{
			http.MethodGet: func(w http.ResponseWriter, r *http.Request) error {
				snap, err := s.snapshots.Get(r.Context(), id)
				if err != nil {
					return fmt.Errorf("look up snapshot %q: %w", httperr.Clip(id, 80), err)
				}
				writeJSON(w, http.StatusOK, toWireSnapshot(snap))
				return nil
			},
			http.MethodDelete: func(w http.ResponseWriter, r *http.Request) error {
				// Who hangs up during a delete has still asked for it.
				if err := s.snapshots.Delete(context.WithoutCancel(r.Context()), id); err != nil {
					return fmt.Errorf("delete snapshot %q: %w", httperr.Clip(id, 80), err)
				}
				writeEmpty(w, http.StatusNoContent)
				return nil
			},
		}
	case len(seg) == 3 && seg[2] == "inspect":
		rt.name += "/inspect"
		return rt, only(http.MethodGet, func(w http.ResponseWriter, r *http.Request) error {
			snap, err := s.snapshots.Get(r.Context(), id)
			if err != nil {
				return fmt.Errorf("look up snapshot %q: %w", httperr.Clip(id, 80), err)
			}
			writeJSON(w, http.StatusOK, wire.SnapshotInspection{
				Snapshot: toWireSnapshot(snap), Image: imageURI(snap.Image), ImageDigest: snap.Image.Digest,
				Layers: snap.Image.Layers, Bytes: snap.Bytes,
			})
			return nil
		})
	}
	return route{}, nil
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
		if err := checkSnapshotName(name); err != nil {
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
	writeJSON(w, http.StatusAccepted, toWireSnapshot(snap))
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

// maxSnapshotName is bytes: a name is for people, and need not be unique.
const maxSnapshotName = 256

// checkSnapshotName refuses what is a path or an option to somebody. Names of
// sandboxes are stricter, because they become host names; OpenSandbox's clients call
// snapshots "before import". What was stored before is found by its name all the same.
func checkSnapshotName(name string) error {
	switch {
	case name == "":
		return httperr.Invalid("name is empty; leave it out for a snapshot without one")
	case len(name) > maxSnapshotName:
		return httperr.Invalid("name has %d bytes; at most %d are kept", len(name), maxSnapshotName)
	case strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }):
		return httperr.Invalid("name %q holds what can not be printed", httperr.Clip(name, 80))
	case strings.ContainsAny(name, `/\`), strings.Contains(name, ".."), !startsName(name), strings.HasSuffix(name, " "):
		return httperr.Invalid("name %q: want what begins with a letter or digit, without / and \\, two dots in a row, or a space at its end", httperr.Clip(name, 80))
	case record.IsSnapshotID(name):
		return httperr.Invalid("name %q has the form of a snapshot's id; choose another", name)
	}
	return nil
}

func startsName(name string) bool {
	r, _ := utf8.DecodeRuneInString(name)
	return unicode.IsLetter(r) || unicode.IsDigit(r)
}

func (s *Server) listSnapshots(w http.ResponseWriter, r *http.Request) error {
	f, err := parseFilter(r.URL.RawQuery)
	if err != nil {
		return err
	}
	all, err := s.snapshots.List(r.Context())
	if err != nil {
		return fmt.Errorf("list snapshots: %w", err)
	}
	q := r.URL.Query()
	all = slices.DeleteFunc(all, func(snap record.Snapshot) bool { return !matchSnapshot(q, f, &snap) })
	from, to, page := f.paginate(len(all))
	out := wire.SnapshotList{Items: []wire.Snapshot{}, Pagination: page}
	for _, snap := range all[from:to] {
		out.Items = append(out.Items, toWireSnapshot(snap))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func matchSnapshot(q url.Values, f filter, snap *record.Snapshot) bool {
	return (!q.Has("sandboxId") || q.Get("sandboxId") == snap.Source) &&
		(!q.Has("name") || q.Get("name") == snap.Name) &&
		(len(f.states) == 0 || slices.Contains(f.states, string(snap.State)))
}

// fromSnapshot has spec begin as a snapshot, with its image.
func (s *Server) fromSnapshot(ctx context.Context, spec *record.Spec, id string) error {
	snap, err := s.snapshots.Get(ctx, id)
	if err != nil {
		return fmt.Errorf("look up snapshot %q: %w", httperr.Clip(id, 80), err)
	}
	spec.Snapshot, spec.Image = snap.ID, snap.Image
	return nil
}
