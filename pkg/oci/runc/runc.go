// Package runc starts sandboxes on runc, by way of sandboxd-runc: the one
// binary that links libcontainer, kept running as a launcher.
//
// It starts, forgets and lists; it does not kill. A container's processes die
// with their cgroup, and then all that is left is a directory below
// Config.Root, which Forget removes without asking anybody.
//
// What surprises: sandboxes are children of the launcher, which reaps them.
// They outlive it, and the daemon; then the host's init reaps them.
package runc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/oci/launch"
)

// Config says which launcher to run, and where.
type Config struct {
	// Binary is sandboxd-runc, absolute. Its directory must be neither above
	// nor below Root: libcontainer's overlays would overlap.
	Binary string
	Root   string                 // libcontainer's state; on a tmpfs, as nothing in it outlives a boot
	Bundle func(id string) string // directory of a sandbox's config.json
	Log    *os.File               // the launcher's stderr; nil: os.Stderr
}

// A Driver starts sandboxes on runc. What it must remember lies below Root, so
// any daemon can forget what another one started.
type Driver struct {
	c        Config
	launcher *launch.Client
}

// New starts the launcher.
func New(c Config) (*Driver, error) {
	if c.Log == nil {
		c.Log = os.Stderr
	}
	if err := os.MkdirAll(c.Root, 0o700); err != nil {
		return nil, fmt.Errorf("make runc root: %w", err)
	}
	l, err := launch.New(func() *exec.Cmd {
		cmd := exec.Command(c.Binary, "launch", c.Root)
		cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
		cmd.Stderr = c.Log
		return cmd
	})
	if err != nil {
		return nil, fmt.Errorf("run %s (make build puts it into build/bin): %w", c.Binary, err)
	}
	return &Driver{c: c, launcher: l}, nil
}

// Start returns when the init of id runs, or with libcontainer's own words why
// not. stdin becomes PID 1's; Start does not close it. After an error processes
// may be left in the cgroup of id: kill that, then Forget.
func (d *Driver) Start(ctx context.Context, id string, stdin *os.File) error {
	if err := d.launcher.Start(ctx, id, d.c.Bundle(id), stdin); err != nil {
		return fmt.Errorf("start %s on runc: %w", id, err)
	}
	return nil
}

// Forget removes what libcontainer remembers of id, whose processes must be
// dead. Nothing to forget is no error.
//
// libcontainer's own Destroy would also remove the cgroup, which is
// pkg/cgroups' to remove.
func (d *Driver) Forget(_ context.Context, id string) error {
	if err := os.RemoveAll(filepath.Join(d.c.Root, id)); err != nil {
		return fmt.Errorf("forget %s: %w", id, err)
	}
	return nil
}

// List returns the ids that libcontainer remembers, also those whose start was
// cut short.
func (d *Driver) List(context.Context) ([]string, error) {
	entries, err := os.ReadDir(d.c.Root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list runc's sandboxes: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if e.IsDir() {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// MainPID is the process ID of PID 1 of id, as the host counts.
func (d *Driver) MainPID(id string) (pid int, err error) {
	return oci.MainPID(filepath.Join(d.c.Root, id, "state.json"), "init_process_pid")
}

// Pid is the process id of the launcher, or 0 while none runs.
func (d *Driver) Pid() int { return d.launcher.Pid() }

// Close ends the launcher. Sandboxes live on.
func (d *Driver) Close() error { return d.launcher.Close() }
