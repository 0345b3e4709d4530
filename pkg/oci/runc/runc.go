// Package runc starts sandboxes on runc with sandboxd-runc. That is the only binary
// that links libcontainer; it is kept running as a launcher.
//
// It starts, forgets and lists; it does not kill. A container's processes die with
// their cgroup. Only a directory below Config.Root is left then, and Forget removes it
// without libcontainer.
//
// What surprises: sandboxes are children of the launcher, which reaps them. They
// outlive the launcher and the daemon; then the host's init reaps them.
package runc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/oci/launch"
)

// Config says which launcher to run, and where.
type Config struct {
	// Binary is sandboxd-runc, absolute. Its directory must be neither above
	// nor below Root: libcontainer's overlays would overlap.
	Binary string
	Root   string                 // libcontainer's state; on a tmpfs, as it is useless after a boot
	Bundle func(id string) string // directory of a sandbox's config.json
	Log    *os.File               // the launcher's stderr; nil: os.Stderr
}

// A Driver starts sandboxes on runc. Its state is below Root, so any daemon can forget
// a sandbox that another one started.
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
		cmd.Env = append([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, weak.Environ()...)
		cmd.Stderr = c.Log
		return cmd
	})
	if err != nil {
		return nil, fmt.Errorf("run %s (make build puts it into build/bin): %w", c.Binary, err)
	}
	return &Driver{c: c, launcher: l}, nil
}

// Start returns when the init of id runs, or with libcontainer's error. stdin becomes
// PID 1's; Start does not close it. After an error processes may be left in the cgroup
// of id: kill the cgroup, then call Forget.
func (d *Driver) Start(ctx context.Context, id string, stdin *os.File) error {
	if err := d.launcher.Start(ctx, id, d.c.Bundle(id), stdin); err != nil {
		return fmt.Errorf("start %s on runc: %w", id, err)
	}
	return nil
}

// Forget removes libcontainer's state of id, whose processes must be dead. It is no
// error if there is none.
//
// libcontainer's own Destroy would also remove the cgroup, which belongs to
// pkg/cgroups.
func (d *Driver) Forget(_ context.Context, id string) error {
	if err := os.RemoveAll(filepath.Join(d.c.Root, id)); err != nil {
		return fmt.Errorf("remove runc's state of %s: %w", id, err)
	}
	return nil
}

// List returns the ids with a state of libcontainer, including those whose start was
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

// HelperPID fails with fs.ErrNotExist: PID 1 needs no other process.
func (d *Driver) HelperPID(string) (pid int, err error) { return 0, fs.ErrNotExist }

// MainPID is the process ID of PID 1 of id in the host's PID namespace.
func (d *Driver) MainPID(id string) (pid int, err error) {
	return oci.MainPID(filepath.Join(d.c.Root, id, "state.json"), "init_process_pid")
}

// Rename gives the guest of id, which runs, another hostname.
func (d *Driver) Rename(_ context.Context, id, hostname string) error {
	err := d.rename(id, hostname)
	if err != nil {
		return fmt.Errorf("give the guest of %s the hostname %s: %w", id, hostname, err)
	}
	return nil
}

func (d *Driver) rename(id, hostname string) error {
	pid, err := d.MainPID(id)
	if err != nil {
		return err
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/uts", pid))
	if err != nil {
		return err
	}
	defer ns.Close()
	// PID 1 may be dead, and its number another's. A process of id now was one when ns was opened.
	if where, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid)); err != nil || !strings.Contains(string(where), id) {
		return errors.Join(errors.New("its first process is gone"), err)
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocks: the thread ends with this goroutine
		err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWUTS)
		if err == nil {
			err = unix.Sethostname([]byte(hostname))
		}
		done <- err
	}()
	return <-done
}

// Pid is the process id of the launcher, or 0 while none runs.
func (d *Driver) Pid() int { return d.launcher.Pid() }

// Close ends the launcher. Sandboxes live on.
func (d *Driver) Close() error { return d.launcher.Close() }
