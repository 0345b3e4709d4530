package client

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Snapshots are the snapshots of a host.
type Snapshots struct{ *daemon }

func snapshotPath(idOrName, rest string) string {
	return "/snapshots/" + url.PathEscape(idOrName) + rest
}

// Create takes a snapshot of the files of a sandbox; name may be empty.
// With wait it returns when the snapshot is ready or has failed, which
// Status.State tells: a failed one is not an error here.
func (c Snapshots) Create(ctx context.Context, sandbox, name string, wait bool) (s wire.Snapshot, err error) {
	var body wire.CreateSnapshotRequest
	if name != "" {
		body.Name = &name
	}
	r := request{method: http.MethodPost, path: sandboxPath(sandbox, "/snapshots"), json: body}
	if wait {
		r.query, r.patient = url.Values{"wait": {"true"}}, true // copying may take minutes
	}
	err = c.do(ctx, r, &s)
	return s, err
}

// List lists the snapshots of a sandbox, by its ID, or all if that is
// empty, the newest first.
func (c Snapshots) List(ctx context.Context, sandboxID string) (all []wire.Snapshot, err error) {
	q := url.Values{"pageSize": {"200"}}
	if sandboxID != "" {
		q.Set("sandboxId", sandboxID)
	}
	seen := map[string]bool{} // pages shift when snapshots come and go between two requests
	for page := 1; ; page++ {
		q.Set("page", strconv.Itoa(page))
		var l wire.SnapshotList
		if err := c.do(ctx, request{method: http.MethodGet, path: "/snapshots", query: q}, &l); err != nil {
			return nil, err
		}
		for _, s := range l.Items {
			if !seen[s.ID] {
				seen[s.ID] = true
				all = append(all, s)
			}
		}
		if !l.Pagination.HasNextPage || len(l.Items) == 0 {
			return all, nil
		}
	}
}

// Inspect returns all there is to know of a snapshot.
func (c Snapshots) Inspect(ctx context.Context, idOrName string) (s wire.SnapshotInspection, err error) {
	err = c.do(ctx, request{method: http.MethodGet, path: snapshotPath(idOrName, "/inspect")}, &s)
	return s, err
}

// Remove deletes a snapshot. What was made from it stays.
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
	sc := bufio.NewScanner(resp.Body)
	sc.Buffer(nil, maxEvent)
	for sc.Scan() {
		var l wire.Change
		if err := json.Unmarshal(sc.Bytes(), &l); err != nil {
			return fmt.Errorf("decode a line of the diff: %w", err)
		}
		if l.Error != nil {
			return errs.Wire(errs.New(errs.Internal, "%s", l.Error.Message), l.Error.Code)
		}
		if err := change(l.Kind, l.Path); err != nil {
			return err
		}
	}
	if err := sc.Err(); err != nil {
		return c.lost(ctx, err)
	}
	return nil
}
