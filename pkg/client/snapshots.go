package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Snapshots are the snapshots of a host.
type Snapshots struct{ *daemon }

func snapshotPath(idOrName, rest string) string {
	return "/snapshots/" + url.PathEscape(idOrName) + rest
}

// Create takes a snapshot of the files of a sandbox; name may be empty. If another
// snapshot has the name, the error is errs.Exists.
// With wait it returns when the snapshot is ready or has failed; Status.State
// says which. A snapshot that failed is not an error here.
func (c Snapshots) Create(ctx context.Context, sandbox, name string, wait bool) (wire.Snapshot, error) {
	return c.create(ctx, sandbox, name, false, wait)
}

// CreateWithMemory is Create for a snapshot that also keeps what the sandbox has in memory.
func (c Snapshots) CreateWithMemory(ctx context.Context, sandbox, name string, wait bool) (wire.Snapshot, error) {
	return c.create(ctx, sandbox, name, true, wait)
}

func (c Snapshots) create(ctx context.Context, sandbox, name string, memory, wait bool) (s wire.Snapshot, err error) {
	var body wire.CreateSnapshotRequest
	r := request{method: http.MethodPost, path: sandboxPath(sandbox, "/snapshots"), query: url.Values{}}
	if name != "" {
		body.Name = &name
		r.query.Set("unique", "true")
	}
	r.json = body
	if memory {
		r.query.Set("memory", "true")
	}
	if wait {
		r.query.Set("wait", "true")
		r.patient = true // copying may take minutes
	}
	err = c.do(ctx, r, &s)
	return s, err
}

// List lists the snapshots of a sandbox, by its ID, or all if that is
// empty, the newest first.
func (c Snapshots) List(ctx context.Context, sandboxID string) ([]wire.Snapshot, error) {
	q := url.Values{}
	if sandboxID != "" {
		q.Set("sandboxId", sandboxID)
	}
	return pages(q, func(s wire.Snapshot) string { return s.ID }, func(q url.Values) ([]wire.Snapshot, wire.Pagination, error) {
		l, err := ask[wire.SnapshotList](ctx, c.daemon, request{method: http.MethodGet, path: "/snapshots", query: q})
		return l.Items, l.Pagination, err
	})
}

// Inspect returns all there is to know of a snapshot.
func (c Snapshots) Inspect(ctx context.Context, idOrName string) (wire.SnapshotInspection, error) {
	return ask[wire.SnapshotInspection](ctx, c.daemon, get(snapshotPath(idOrName, "/inspect")))
}

// Commit makes an image, NAME[:TAG], of the files of a snapshot.
func (c Snapshots) Commit(ctx context.Context, idOrName, name string) (im wire.ImageInfo, err error) {
	err = c.do(ctx, request{
		method: http.MethodPost, path: snapshotPath(idOrName, "/commit"), json: wire.CommitRequest{Name: name}, patient: true,
	}, &im)
	return im, err
}

// Remove deletes a snapshot. Sandboxes that were made from it stay.
func (c Snapshots) Remove(ctx context.Context, idOrName string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: snapshotPath(idOrName, "")}, nil)
}

// Diff calls change for what is different between the files of a sandbox or a
// snapshot, by id or name, and base, which is another one of the same image, or
// its image alone if it is empty.
func (c Snapshots) Diff(ctx context.Context, idOrName, base string, change func(kind, path string) error) error {
	q := url.Values{"of": {idOrName}}
	if base != "" {
		q.Set("base", base)
	}
	resp, err := c.stream(ctx, request{method: http.MethodGet, path: "/diff", query: q, patient: true})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for l, err := range lines[wire.Change](c.followed(ctx, resp.Body), "diff") {
		if err != nil {
			return err
		}
		if l.Error != nil {
			return errs.Wire(errs.New(errs.Internal, "%s", l.Error.Message), l.Error.Code)
		}
		if err := change(l.Kind, l.Path); err != nil {
			return err
		}
	}
	return nil
}

// Fork copies a sandbox. With wait it returns when all copies have come up or failed, without it
// when the fork has begun; Status.State says which. A fork that failed is not an error here.
func (c Snapshots) Fork(ctx context.Context, idOrName string, r wire.ForkRequest, wait bool) (f wire.Fork, err error) {
	req := request{method: http.MethodPost, path: sandboxPath(idOrName, "/fork"), json: r}
	if wait {
		req.query = url.Values{"wait": {"true"}}
		req.patient = true // copying may take minutes
	}
	err = c.do(ctx, req, &f)
	return f, err
}

// Promote has a copy trade name and expiry with the sandbox that it is a copy of.
func (c Snapshots) Promote(ctx context.Context, idOrName string) (sb wire.Sandbox, err error) {
	err = c.do(ctx, request{method: http.MethodPost, path: sandboxPath(idOrName, "/promote")}, &sb)
	return sb, err
}

// GetFork returns a fork.
func (c Snapshots) GetFork(ctx context.Context, id string) (wire.Fork, error) {
	return ask[wire.Fork](ctx, c.daemon, get("/forks/"+url.PathEscape(id)))
}
