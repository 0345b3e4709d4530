// Package netns makes the namespaces of a sandbox and its link to the host.
//
// A sandbox is one routed address behind a point-to-point link. There is no
// bridge, no ARP and no IPv6; the host is the only neighbour:
//
//	guest netns                         host netns
//	eth0  10.x.y.z/32  ──── veth ────  sb-<id>        no address
//	      02:…:02                      02:…:01        route 10.x.y.z/32
//	default via gateway                gateway/32 on lo
//
// The namespaces are pinned as files, <run>/ns/<id>/{net,user}; runtimes join them by
// path. They outlive the daemon, and it needs only the path to remove them.
//
// What surprises: a sandbox with users of its own (runc) gets a user namespace that was
// *created* by its own mapped root, and whose per-user limits were lowered from inside.
// The reason: the kernel charges inotify instances and the like to the creator too, so
// in a namespace made by root one guest could use up root's limits. Creating it and
// lowering the limits need a process inside the namespace for a moment. That process is
// a fork that never execs (see fork.go), so a create needs neither a helper binary nor
// a re-exec of the daemon.
package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// idLen is the length of a sandbox ID: with "sb-" in front it fills IFNAMSIZ-1.
const idLen = 12

// Manager creates, removes and lists the namespaces and links of one instance. The zero
// value is not usable; call New. All methods may be called concurrently, but not two
// for one ID.
type Manager struct {
	// Pool and Gateway default to those of the instance. Change them before
	// the first call.
	Pool    netip.Prefix
	Gateway netip.Addr
	// BeforeForward, if not nil, is called before forwarding is switched on for a link.
	// SwitchedOn names the link by then. If BeforeForward fails the link stays as it
	// was.
	BeforeForward func() error
	// Log reports changes to the host. Nil: no log.
	Log *slog.Logger

	inst instance.Instance
	dir  string // <runDir>/ns

	mtu    atomic.Int32 // of new links; 0: the kernel's default
	host   func() (*netlink.Handle, error)
	listed atomic.Pointer[map[string]int] // the indexes of links, by ID, as ListLinks saw them last
	reap   reaper
}

// New returns a Manager that keeps its files below runDir. It changes nothing on the
// host; Setup does.
func New(inst instance.Instance, runDir string) *Manager {
	m := &Manager{
		Pool:    inst.Pool(),
		Gateway: inst.Gateway(),
		inst:    inst,
		dir:     filepath.Join(runDir, "ns"),
	}
	m.host = sync.OnceValues(func() (*netlink.Handle, error) {
		return netlink.NewHandle(unix.NETLINK_ROUTE)
	})
	m.reap.waiting = map[string]*leaving{}
	return m
}

// NetPath is the path at which the network namespace of id is pinned.
func (m *Manager) NetPath(id string) string { return filepath.Join(m.dir, id, "net") }

// UserPath is the path at which the user namespace of id is pinned, if it has its own.
func (m *Manager) UserPath(id string) string { return filepath.Join(m.dir, id, "user") }

// Link names the host end of the link of id.
func Link(id string) string { return "sb-" + id }

// CreateNamespaces makes and pins the network namespace of id and, if ownUsers,
// a user namespace that maps guest ids 0..65535 to uidBase and up, and owns
// the network namespace (sysfs and joining by a runtime depend on that).
//
// It fails if id has namespaces. After a failed call, DeleteNamespaces removes what is
// left.
func (m *Manager) CreateNamespaces(ctx context.Context, id string, ownUsers bool, uidBase uint32) error {
	if err := m.check(id); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("create namespaces of %s: %w", id, err)
	}
	if err := m.create(id, ownUsers, uidBase); err != nil {
		return fmt.Errorf("create namespaces of %s: %w", id, err)
	}
	return nil
}

func (m *Manager) create(id string, ownUsers bool, uidBase uint32) error {
	if err := os.MkdirAll(filepath.Join(m.dir, id), 0o700); err != nil {
		return err
	}
	net, err := pinPoint(m.NetPath(id))
	if err != nil {
		return err
	}
	if !ownUsers {
		return newNet(net)
	}
	user, err := pinPoint(m.UserPath(id))
	if err != nil {
		return err
	}
	return withChild(uidBase, instance.UsersPerSlot, unix.CLONE_NEWNET, guestSteps(), func(proc string) error {
		if err := bind(proc+"/ns/user", user); err != nil {
			return err
		}
		return bind(proc+"/ns/net", net)
	})
}

// pinPoint makes the empty file that a namespace is mounted on.
func pinPoint(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o600)
	if err != nil {
		return "", err
	}
	return path, f.Close()
}

func bind(from, to string) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("pin %s on %s: %w", from, to, err)
	}
	return nil
}

// newNet pins a new network namespace, owned by the host's user namespace, on path. It
// moves the calling thread there and back.
func newNet(path string) error {
	runtime.LockOSThread()
	here, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer here.Close()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("unshare network: %w", err)
	}
	err = writeGuestSysctls()
	if err == nil {
		err = bind("/proc/thread-self/ns/net", path)
	}
	if back := unix.Setns(int(here.Fd()), unix.CLONE_NEWNET); back != nil {
		// The goroutine ends with its thread still locked, so the thread dies
		// with it and nothing else ever runs in the wrong namespace.
		return errors.Join(err, fmt.Errorf("return to the host's network: %w", back))
	}
	runtime.UnlockOSThread()
	return err
}

// DeleteNamespaces unpins the namespaces of id. The kernel removes them, and a link
// into them, some 40 ms after the last process in them has ended (see Gone). Absent is
// success.
func (m *Manager) DeleteNamespaces(_ context.Context, id string) error {
	if err := m.check(id); err != nil {
		return err
	}
	var errs []error
	for _, path := range []string{m.NetPath(id), m.UserPath(id)} {
		errs = append(errs, unpin(path))
	}
	if err := os.Remove(filepath.Join(m.dir, id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("delete namespaces of %s: %w", id, err)
	}
	return nil
}

// unpin removes a pin with every mount on it.
func unpin(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break // not a mount, or no longer
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// ListNamespaces lists the IDs that have namespaces, or half of them.
func (m *Manager) ListNamespaces(context.Context) ([]string, error) {
	entries, err := os.ReadDir(m.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list namespaces: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if m.check(e.Name()) == nil {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// Pinned reports whether the namespaces of id can be joined. If somebody unmounts a
// pin, the sandbox goes on in namespaces that only its processes hold.
func (m *Manager) Pinned(_ context.Context, id string) (bool, error) {
	if err := m.check(id); err != nil {
		return false, err
	}
	for _, path := range []string{m.NetPath(id), m.UserPath(id)} {
		var st unix.Statfs_t
		err := unix.Statfs(path, &st)
		if errors.Is(err, fs.ErrNotExist) && path == m.UserPath(id) {
			continue // it never had users of its own
		}
		if errors.Is(err, fs.ErrNotExist) || err == nil && st.Type != unix.NSFS_MAGIC {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("inspect the pin %s: %w", path, err)
		}
	}
	return true, nil
}

// check refuses a string that is not an ID of this instance before it becomes a path or
// a link name.
func (m *Manager) check(id string) error {
	if len(id) != idLen || strings.Trim(id, instance.Alphabet) != "" || id[0] != byte(m.inst) {
		return fmt.Errorf("netns: %q is not a sandbox id of instance %s", id, m.inst)
	}
	return nil
}
