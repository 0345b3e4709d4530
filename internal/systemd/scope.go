package systemd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
	godbus "github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
)

// slice holds the scopes of all instances, so that an operator can bound all sandboxes
// together: systemctl set-property sandboxd.slice MemoryMax=...
const slice = "sandboxd.slice"

// jobLimit bounds how long systemd may take to start or stop a scope.
const jobLimit = 30 * time.Second

// A Scope is a delegated scope unit: systemd touches nothing below its cgroup.
type Scope struct {
	name  string
	mount string // of the hierarchy that systemd keeps its units in
}

// NewScope names the scope of an instance.
func NewScope(instance string) *Scope {
	s := &Scope{name: "sandboxd-" + instance + ".scope", mount: "/sys/fs/cgroup"}
	// Where systemd keeps its units on each kind of host: "Two Key Design Rules" and
	// the sections after it, in systemd's CGROUP_DELEGATION.md.
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var fs unix.Statfs_t
		if unix.Statfs(dir, &fs) == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC {
			s.mount = dir
			return s
		}
	}
	s.mount = "/sys/fs/cgroup/systemd"
	return s
}

// Cgroup is the scope's cgroup, relative to the mounts.
func (s *Scope) Cgroup() string { return slice + "/" + s.name }

// Keep makes the scope if it does not exist. Otherwise it is cheap, so it can be called
// again and again.
func (s *Scope) Keep(ctx context.Context) error {
	if s.held() {
		return nil
	}
	holder, err := startHolder()
	if err != nil {
		return err
	}
	if s.Stands() {
		err = s.park(holder.Pid) // the holder died, the scope lives on with its sandboxes
	} else {
		err = s.start(ctx, holder)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("hold %s, the systemd scope of sandboxes: %w; see `systemctl status %s`", s.name, err, s.name),
			holder.Kill())
	}
	return nil
}

func (s *Scope) start(ctx context.Context, holder *os.Process) error {
	properties := []dbus.Property{
		dbus.PropDescription("sandboxes of sandboxd, " + s.name),
		dbus.PropSlice(slice),
		dbus.PropPids(uint32(holder.Pid)),
		{Name: "Delegate", Value: godbus.MakeVariant(true)},
		{Name: "TasksMax", Value: godbus.MakeVariant(^uint64(0))},
		// Also after a stop that failed: else systemd makes no other one until somebody calls reset-failed.
		{Name: "CollectMode", Value: godbus.MakeVariant("inactive-or-failed")},
		// A shutdown does not wait for guests.
		{Name: "KillSignal", Value: godbus.MakeVariant(int32(syscall.SIGKILL))},
	}
	if unit := ownUnit(); unit != "" && unit != s.name {
		// At a shutdown, the other way round: the daemon ends while its sandboxes live, so it records no
		// end of any. It must not be After= in the unit of the service: systemd forgets no unit that
		// another one names so, and makes no scope while it remembers one of that name.
		properties = append(properties, dbus.PropBefore(unit))
	}
	err := s.job(ctx, func(c *dbus.Conn, done chan<- string) error {
		_, err := c.StartTransientUnitContext(ctx, s.name, "replace", properties, done)
		return err
	})
	if err != nil {
		return err
	}
	return s.park(holder.Pid)
}

// Stop ends the scope and everything in it. A missing scope is no error.
func (s *Scope) Stop(ctx context.Context) error {
	if _, err := os.Stat(s.dir()); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	err := s.job(ctx, func(c *dbus.Conn, done chan<- string) error {
		_, err := c.StopUnitContext(ctx, s.name, "replace", done)
		return err
	})
	if err != nil {
		return fmt.Errorf("stop %s: %w", s.name, err)
	}
	return nil
}

func (s *Scope) dir() string { return s.mount + "/" + s.Cgroup() }

// held reports whether the holder lives in its cgroup.
func (s *Scope) held() bool {
	b, err := os.ReadFile(s.dir() + "/holder/cgroup.procs")
	return err == nil && strings.TrimSpace(string(b)) != ""
}

// Stands reports whether any process is in the scope: then the scope exists, with or
// without its holder.
func (s *Scope) Stands() bool {
	b, err := os.ReadFile(s.dir() + "/cgroup.events")
	if err == nil {
		return strings.Contains(string(b), "populated 1")
	}
	stands := false // v1 has no such file, so each cgroup is asked
	_ = filepath.WalkDir(s.dir(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil //nolint:nilerr // groups come and go
		}
		if b, err := os.ReadFile(path + "/cgroup.procs"); err == nil && strings.TrimSpace(string(b)) != "" {
			stands = true
			return fs.SkipAll
		}
		return nil
	})
	return stands
}

// park moves the holder from the scope's own cgroup into one below, because v2
// lets a cgroup have processes or controllers for its children, not both
// (cgroup-v2.rst, "No Internal Process Constraint").
func (s *Scope) park(pid int) error {
	dir := s.dir() + "/holder"
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return os.WriteFile(dir+"/cgroup.procs", []byte(strconv.Itoa(pid)), 0)
}

// job makes systemd do something and waits until it is done.
func (s *Scope) job(ctx context.Context, start func(*dbus.Conn, chan<- string) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, jobLimit, fmt.Errorf("systemd did not answer within %s", jobLimit))
	defer cancel()
	c, err := dbus.NewWithContext(ctx)
	if err != nil {
		return fmt.Errorf("connect to systemd: %w", err)
	}
	defer c.Close()
	done := make(chan string, 1)
	if err := start(c, done); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case result := <-done:
		if result != "done" {
			return fmt.Errorf("systemd reports the result %q for the job", result)
		}
		return nil
	}
}

// startHolder starts the process that a scope needs to exist. It outlives the daemon.
// While the daemon lives it waits for the process, so that no zombie is left.
func startHolder() (*os.Process, error) {
	cmd := exec.Command("sleep", "infinity")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C at a daemon in a terminal must not reach it
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the process that keeps the scope of sandboxes: %w", err)
	}
	go cmd.Wait() //nolint:errcheck // however it ended
	return cmd.Process, nil
}
