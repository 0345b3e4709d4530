package client

import (
	"context"
	"io"
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// System is a daemon and its host.
type System struct{ *daemon }

// Info says what the daemon is, on what host, with which limits.
func (c System) Info(ctx context.Context) (wire.SystemInfo, error) {
	return ask[wire.SystemInfo](ctx, c.daemon, get("/system/info"))
}

// DiskUsage says what images and sandboxes take on the host's disks.
func (c System) DiskUsage(ctx context.Context) (wire.DiskUsage, error) {
	return ask[wire.DiskUsage](ctx, c.daemon, get("/system/df"))
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
