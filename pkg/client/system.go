package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// System is a daemon and its host.
type System struct{ *daemon }

// Pools returns the pools of ready sandboxes.
func (c System) Pools() Pools { return Pools(c) }

// Health returns nil if the daemon serves. The text names a fault that does not keep it from that.
func (c System) Health(ctx context.Context) (warning string, err error) {
	h, err := ask[map[string]string](ctx, c.daemon, get("/health"))
	return h["warning"], err
}

// Info says what the daemon is, on what host, with which limits.
func (c System) Info(ctx context.Context) (wire.SystemInfo, error) {
	return ask[wire.SystemInfo](ctx, c.daemon, get("/system/info"))
}

// DiskUsage says what images and sandboxes take on the host's disks.
func (c System) DiskUsage(ctx context.Context) (wire.DiskUsage, error) {
	return ask[wire.DiskUsage](ctx, c.daemon, get("/system/df"))
}

// Prune removes sandboxes that have ended, snapshots that failed and unused layers; with all
// also images that no sandbox uses. If before is not zero, only what was made before it.
func (c System) Prune(ctx context.Context, all bool, before time.Time) (p wire.SystemPruneReport, err error) {
	q := url.Values{}
	if all {
		q.Set("all", "true")
	}
	if !before.IsZero() {
		q.Set("until", before.UTC().Format(time.RFC3339Nano))
	}
	err = c.do(ctx, request{method: http.MethodPost, path: "/system/prune", query: q, patient: true}, &p)
	return p, err
}

// Drain makes the daemon refuse new sandboxes, or accept them again, also after a
// restart. Those that exist go on.
func (c System) Drain(ctx context.Context, on bool) error {
	method := http.MethodDelete
	if on {
		method = http.MethodPut
	}
	return c.do(ctx, request{method: method, path: "/system/drain"}, nil)
}

// Backup writes the state of the daemon to w. It is secret. After an error w does
// not hold a backup.
func (c System) Backup(ctx context.Context, w io.Writer) error {
	return c.copyTo(ctx, get("/system/backup"), w)
}

// Backups are the backups on the target of the daemon's configuration.
func (c System) Backups(ctx context.Context) ([]wire.Backup, error) {
	var l wire.BackupList
	err := c.do(ctx, request{method: http.MethodGet, path: "/system/backups", patient: true}, &l)
	return l.Items, err
}

// BackupStatus says where backups go, and how the last ones went.
func (c System) BackupStatus(ctx context.Context) (wire.BackupStatus, error) {
	return ask[wire.BackupStatus](ctx, c.daemon, get("/system/backups/status"))
}

// BackupNow takes a backup, and returns when the target has it.
func (c System) BackupNow(ctx context.Context) (b wire.Backup, err error) {
	err = c.do(ctx, request{method: http.MethodPost, path: "/system/backups", patient: true}, &b)
	return b, err
}

// AdoptBackups makes backups of other states count as the daemon's: those of names, which may be owners
// of backups, or without any, all that are unknown. It returns those that it has adopted.
func (c System) AdoptBackups(ctx context.Context, names []string) ([]wire.Backup, error) {
	var l wire.BackupList
	err := c.do(ctx, request{
		method: http.MethodPost, path: "/system/backups/adopt", json: wire.AdoptBackups{Names: names, All: len(names) == 0}, patient: true,
	}, &l)
	return l.Items, err
}

// RemoveBackups removes backups that count as the daemon's, and what only they need. If one of names may not be
// removed, nothing is.
func (c System) RemoveBackups(ctx context.Context, names []string) (r wire.RemovedBackups, err error) {
	err = c.do(ctx, request{
		method: http.MethodPost, path: "/system/backups/remove", json: wire.RemoveBackups{Names: names}, patient: true,
	}, &r)
	return r, err
}

// CheckBackups reads every byte of backups: those of names, which may be owners of backups, or without any, all on
// the target. It calls line for each damage, and a few times a second with how far it is. Damages are no
// error. Cancelling ctx ends the check.
func (c System) CheckBackups(ctx context.Context, names []string, line func(wire.BackupCheckLine)) (wire.BackupCheck, error) {
	resp, err := c.stream(ctx, request{
		method: http.MethodPost, path: "/system/backups/check", json: wire.CheckBackups{Names: names, All: len(names) == 0}, patient: true,
	})
	if err != nil {
		return wire.BackupCheck{}, err
	}
	defer resp.Body.Close()
	for l, err := range lines[wire.BackupCheckLine](c.followed(ctx, resp.Body), "answer") {
		switch {
		case err != nil:
			return wire.BackupCheck{}, err
		case l.Error != nil:
			return wire.BackupCheck{}, errs.Wire(errs.New(errs.Invalid, "%s", l.Error.Message), l.Error.Code)
		case l.Report != nil:
			return *l.Report, nil
		case line != nil:
			line(l)
		}
	}
	return wire.BackupCheck{}, c.lost(ctx, io.ErrUnexpectedEOF)
}

// BackupDrill tries whether the newest backup can be restored. The error says why it cannot.
func (c System) BackupDrill(ctx context.Context) (d wire.BackupDrill, err error) {
	err = c.do(ctx, request{method: http.MethodPost, path: "/system/backups/drill", patient: true}, &d)
	return d, err
}

// Keys are the API keys of a daemon.
type Keys struct{ *daemon }

// Create makes an API key, whose Secret is returned this once. An empty role is
// an operator's; expires zero is never.
func (c Keys) Create(ctx context.Context, name, role string, expires time.Time) (k wire.NewKey, err error) {
	req := wire.KeyRequest{Name: name, Role: role}
	if !expires.IsZero() {
		req.ExpiresAt = expires.UTC().Format(time.RFC3339Nano)
	}
	err = c.do(ctx, request{method: http.MethodPost, path: "/keys", json: req}, &k)
	return k, err
}

// List lists the API keys there are, those of the configuration first.
func (c Keys) List(ctx context.Context) ([]wire.Key, error) {
	var l wire.KeyList
	err := c.do(ctx, get("/keys"), &l)
	return l.Items, err
}

// Remove removes an API key; from then on it opens nothing.
func (c Keys) Remove(ctx context.Context, name string) error {
	return c.do(ctx, request{method: http.MethodDelete, path: "/keys/" + url.PathEscape(name)}, nil)
}
