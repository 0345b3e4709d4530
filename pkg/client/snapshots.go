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
func (c Snapshots) Create(ctx context.Context, sandbox, name string, wait bool) (s wire.Snapshot, err error) {
	var body wire.CreateSnapshotRequest
	r := request{method: http.MethodPost, path: sandboxPath(sandbox, "/snapshots"), query: url.Values{}}
	if name != "" {
		body.Name = &name
		r.query.Set("unique", "true")
	}
	r.json = body
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
