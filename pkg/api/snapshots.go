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

	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/fork"
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
	var q record.SnapshotRequest
	for name, to := range map[string]*bool{"unique": &q.Unique, "memory": &q.Memory} {
		if *to, err = spec.ParseBool(cmp.Or(r.URL.Query().Get(name), "false")); err != nil {
			return httperr.Invalid("%s: want true or false", name)
		}
	}
	var req wire.CreateSnapshotRequest
	if r.Body, err = orEmptyObject(r.Body); err != nil {
		return errs.Wrap(err, errs.Invalid, "the request body could not be read completely; send it again")
	}
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if req.Name != nil {
		q.Name = *req.Name
		if err := spec.CheckSnapshotName(q.Name); err != nil {
			return err
		}
	}
	q.Unique = q.Unique && q.Name != ""
	snap, err := s.snapshots.Create(r.Context(), rec.ID, q)
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
	as, err := toCommit(w, r)
	if err != nil {
		return err
	}
	snap, err := s.snapshots.Create(r.Context(), rec.ID, record.SnapshotRequest{Temporary: true})
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
	if err := s.pack(w, r, &snap, as); err != nil {
		return fmt.Errorf("commit sandbox %s: %w", rec.ID, err)
	}
	return nil
}

// toCommit reads the request for an image.
func toCommit(w http.ResponseWriter, r *http.Request) (image.Reference, error) {
	var req wire.CommitRequest
	if err := decode(w, r, &req); err != nil {
		return image.Reference{}, err
	}
	infoOf(r).op, infoOf(r).image = opImageCommit, httperr.Clip(req.Name, 200)
	return image.ParseReference(req.Name)
}

// commitSnapshot makes an image of the files of a snapshot. It ends when its client leaves.
func (s *snapshotHandlers) commitSnapshot(w http.ResponseWriter, r *http.Request) error {
	as, err := toCommit(w, r)
	if err != nil {
		return err
	}
	id := segmentOf(r, "id")
	snap, release, err := s.snapshots.Use(r.Context(), id, "an image can only be made of a snapshot that is ready")
	if err != nil {
		return fmt.Errorf("look up snapshot %q: %w", httperr.Clip(id, 80), err)
	}
	defer release()
	if err := s.pack(w, r, &snap, as); err != nil {
		return fmt.Errorf("commit snapshot %s: %w", snap.ID, err)
	}
	return nil
}

// pack makes an image of a snapshot that stays, and answers with it.
func (s *snapshotHandlers) pack(w http.ResponseWriter, r *http.Request, snap *record.Snapshot, as image.Reference) error {
	tar, in := io.Pipe()
	packed := make(chan struct{})
	go func() { defer close(packed); in.CloseWithError(s.diffs.Pack(r.Context(), snap.ID, in)) }()
	i, err := s.images.images.Commit(r.Context(), snap.Image, as, mayReplace(r), tar)
	tar.Close() // ends a Pack that nobody reads
	<-packed    // it reads the snapshot, which may be deleted then
	if err != nil {
		return err
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
	id      string
	image   string
	layers  []string
	release func() // lets the snapshot go
}

// side finds a snapshot or a sandbox, by id or name. A snapshot comes first, and is kept
// until it is released.
func (d *diffHandlers) side(r *http.Request, id string) (side, error) {
	snap, release, err := d.snapshots.Use(r.Context(), id, "only a ready snapshot can be compared")
	switch {
	case err == nil:
		return side{snap.ID, spec.ImageName(snap.Image), snap.Image.Layers, release}, nil
	case !errs.Is(err, errs.NotFound) || record.IsSnapshotID(id):
		return side{}, fmt.Errorf("look up snapshot %q: %w", httperr.Clip(id, 80), err)
	}
	rec, err := lookup(r, d.sandboxes, id)
	if err != nil {
		return side{}, err
	}
	if rec.State == record.Creating || rec.State == record.Ended && rec.Diskless() {
		return side{}, errs.New(errs.WrongState, "sandbox %s is %s and has no files of its own", rec.ID, spec.StateOf(&rec))
	}
	return side{rec.ID, spec.ImageName(rec.Spec.Image), rec.Spec.Image.Layers, func() {}}, nil
}

// sides finds the two sides of a diff. Without a base, the base is the image itself.
func (d *diffHandlers) sides(r *http.Request) (of, base side, err error) {
	q := r.URL.Query()
	if q.Get("of") == "" {
		return of, base, httperr.Invalid("of is missing; set it to the sandbox or the snapshot to compare")
	}
	base.release = func() {}
	if of, err = d.side(r, q.Get("of")); err != nil || q.Get("base") == "" {
		return of, base, err
	}
	if base, err = d.side(r, q.Get("base")); err != nil {
		of.release()
		return of, base, err
	}
	if !slices.Equal(base.layers, of.layers) {
		err = httperr.Invalid("%s is based on image %s and %s on %s, with other layers; only files over the same layers can be "+
			"compared", of.id, of.image,
			base.id, base.image)
		of.release()
		base.release()
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
	defer of.release()
	defer base.release()
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

// Forks makes copies of sandboxes. (fork.Forks)
type Forks interface {
	Begin(ctx context.Context, q fork.Request) (fork.State, error)
	// ByKey finds the fork that a request with an idempotency key has begun.
	ByKey(ctx context.Context, key string) (s fork.State, ok bool, err error)
	Get(ctx context.Context, id string) (fork.State, error)
	// Await is Get once the fork is no longer Creating, or ctx ends.
	Await(ctx context.Context, id string) (fork.State, error)
	// Hold is Await for a client that the fork is made for: when it leaves, no further copy is begun.
	Hold(ctx context.Context, id string) (fork.State, error)
}

// forkHandlers serve the routes of forks.
type forkHandlers struct {
	forks     Forks
	sandboxes Sandboxes
	guard     *auth.Guard
	offer     *spec.Offer
	// keepsMemory says whether the memory of sandboxes on a runtime can be copied.
	keepsMemory func(runtime string) bool
}

// create answers when the fork has begun, and if asked to wait when all copies have come up or
// failed. A client that waits holds the fork: when it leaves, no further copy is begun.
func (f *forkHandlers) create(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	wait, err := wantsWait(r)
	if err != nil {
		return err
	}
	body, done, err := readBody(w, r)
	if err != nil {
		return err
	}
	defer done()
	holder := f.guard.Holder(r)
	once, err := spec.Request(r.Header.Values(wire.HeaderIdempotency), cmp.Or(holder, f.guard.Client(r)), body)
	if err != nil {
		return err
	}
	once.Holder = holder
	s, again, err := f.begunBy(r.Context(), rec.ID, once)
	if err == nil && !again {
		s, err = f.begin(w, r, &rec, body, once, wait)
		if isRace(err) {
			s, again, err = f.begunBy(r.Context(), rec.ID, once)
		}
	}
	if err != nil {
		return err
	}
	done() // before it waits
	if again {
		w.Header().Set(wire.HeaderReplayed, "true")
	}
	if wait {
		if s, err = f.forks.Hold(r.Context(), s.ID); err != nil {
			return err
		}
		w.Header().Set("Preference-Applied", "wait")
	}
	w.Header().Set("Location", "/v1/forks/"+s.ID)
	writeJSON(w, http.StatusAccepted, spec.Fork(s))
	return nil
}

func (f *forkHandlers) begin(
	w http.ResponseWriter, r *http.Request, rec *record.Record, body []byte, once record.Request, held bool,
) (s fork.State, err error) {
	var req wire.ForkRequest
	if err := decodeBody(w, r, body, &req); err != nil {
		return s, err
	}
	copies, memory, err := f.offer.Forked(&req, rec, f.keepsMemory(rec.Spec.Runtime))
	if err != nil {
		return s, err
	}
	for _, c := range copies {
		if c.Name == "" {
			continue
		}
		if other, err := f.sandboxes.Get(r.Context(), c.Name); err == nil {
			return s, errs.New(errs.Exists, "the name %q, of a copy, belongs to sandbox %s; choose another name, or delete that sandbox",
				c.Name, other.ID)
		}
	}
	asker := admission.By(r.Context(), f.guard.Client(r))
	s, err = f.forks.Begin(asker, fork.Request{Source: *rec, Memory: memory, Copies: copies, Once: once, Held: held})
	if err != nil {
		return s, fmt.Errorf("fork sandbox %s: %w", rec.ID, httperr.Recode(err, errs.WrongState, "SNAPSHOT::INVALID_SOURCE_STATE"))
	}
	return s, nil
}

// begunBy finds the fork of a sandbox that was begun by a request of the same key: in memory, or by
// its first copy.
func (f *forkHandlers) begunBy(ctx context.Context, source string, once record.Request) (s fork.State, ok bool, err error) {
	if once.Key == "" {
		return s, false, nil
	}
	if s, ok, err = f.forks.ByKey(ctx, once.Key); err != nil {
		return s, false, err
	}
	made, body := "fork "+s.ID, s.Once.Body
	if !ok {
		m, found, err := f.sandboxes.Made(ctx, once.Key)
		if err != nil || !found {
			return s, false, err
		}
		made, body = "sandbox "+m.ID, m.Body
		first, err := f.sandboxes.Get(ctx, m.ID)
		switch {
		case body != once.Body: // whether it is there or not
		case errs.Is(err, errs.NotFound), err == nil && first.State == record.Deleting:
			return s, false, errs.Wire(errs.New(errs.WrongState, "this %s made a fork whose first copy, sandbox %s, has since been "+
				"deleted or has expired; use a new key for another fork", wire.HeaderIdempotency, m.ID), "SANDBOX::IDEMPOTENCY_KEY_SPENT")
		case err != nil:
			return s, false, err
		case first.Spec.Fork.ID != "":
			if s, err = f.forks.Get(ctx, first.Spec.Fork.ID); err != nil {
				return s, false, err
			}
		}
	}
	if body != once.Body || s.Source != source {
		return s, false, errs.Wire(errs.New(errs.WrongState, "this %s made %s with another request; use a new key for each fork, and "+
			"repeat a key only with the same request", wire.HeaderIdempotency, made), "SANDBOX::IDEMPOTENCY_KEY_REUSED")
	}
	return s, true, nil
}

func (f *forkHandlers) get(w http.ResponseWriter, r *http.Request) error {
	s, err := f.forks.Get(r.Context(), segmentOf(r, "id"))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, spec.Fork(s))
	return nil
}
