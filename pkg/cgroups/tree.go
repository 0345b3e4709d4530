package cgroups

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"sort"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// leaf is the cgroup below <id> that holds all processes: in v2 a cgroup may either
// enable controllers for its children or hold processes.
const leaf = "run"

// Config configures a Tree.
type Config struct {
	Instance instance.Instance
	// Root is the cgroup below which all sandboxes live, relative to the mounts,
	// without slashes at its ends: Instance.CgroupRoot() if empty. It may be nested, as
	// "sandboxd.slice/sandboxes", and must hold no process.
	Root  string
	Disks []Disk // on which I/O is limited
	// Patience bounds how long Freeze, Kill and Remove wait for the kernel if their
	// context has no earlier end: 10 s if zero.
	Patience time.Duration
}

// A Tree is the cgroups of one instance. All methods may be called concurrently; a
// caller that creates, starts, kills and removes one ID must keep these calls in order.
type Tree struct {
	places
	inst     instance.Instance
	patience time.Duration
	flavours map[string]flavour
	control  control
	stats    *stats
	door     *door
}

// control performs the operations on all processes of a group. dir is the group in the
// hierarchy that the control uses.
type control interface {
	populated(dir string) (bool, error)
	frozen(dir string) (bool, error)
	freeze(ctx context.Context, dir string) error
	thaw(dir string) error
	kill(ctx context.Context, dir string) error // returns when empty
	// watch returns a channel that closes when dir is empty or gone, or ctx ends.
	watch(ctx context.Context, dir string) (<-chan struct{}, error)
	// removed reports that dir was removed.
	removed(dir string)
	close() error
}

// Open finds the host's cgroups and makes the root. If the host lacks a controller, the
// error names it. Close stops the watching and changes nothing on the host.
func Open(c Config) (*Tree, error) {
	lay, err := detect()
	if err != nil {
		return nil, err
	}
	return open(c, lay)
}

func open(c Config, lay *layout) (*Tree, error) {
	if c.Root == "" {
		c.Root = c.Instance.CgroupRoot()
	}
	if path.Clean("/"+c.Root) != "/"+c.Root {
		return nil, fmt.Errorf("open cgroups: root %q: want a clean relative path such as %s", c.Root, c.Instance.CgroupRoot())
	}
	if c.Patience == 0 {
		c.Patience = 10 * time.Second
	}
	t := &Tree{places: places{layout: lay, root: c.Root}, inst: c.Instance, patience: c.Patience}
	if err := t.makeRoot(); err != nil {
		return nil, err
	}
	t.flavours = map[string]flavour{}
	for _, ctrl := range needed {
		t.flavours[ctrl] = flavour{v2: lay.of[ctrl].v2}
	}
	swap := flavour{v2: t.flavours["memory"].v2}
	file := t.rootDir(lay.of["memory"]) + "/memory.memsw.limit_in_bytes"
	if swap.v2 {
		file = t.rootDir(lay.of["memory"]) + "/memory.swap.max"
	}
	swap.swap = unix.Access(file, unix.F_OK) == nil
	t.flavours["memory"] = swap
	if h := lay.of["io"]; h != nil && (!h.v2 || enable(t.rootDir(h), []string{"io"}) == nil) {
		t.flavours["io"] = flavour{v2: h.v2, disks: c.Disks}
	}

	t.stats = newStats(lay)
	var err error
	if t.door, err = newDoor(lay); err != nil {
		return nil, err
	}
	if lay.v2 == nil {
		t.control = &freezer{}
		return t, nil
	}
	if t.control, err = newUnified(); err != nil {
		t.door.close()
		return nil, err
	}
	return t, nil
}

// Close stops what Open started. Groups and processes stay.
func (t *Tree) Close() error {
	t.door.close()
	return t.control.close()
}

// Mode is "unified", "hybrid" or "legacy": all on v2, a v2 tree without all
// controllers, no v2 tree.
func (t *Tree) Mode() string { return t.layout.mode() }

// CgroupsPath is the leaf in the form of the OCI runtime spec (config-linux,
// "cgroupsPath"). It is absolute, hence relative to the mount of each hierarchy.
// libcontainer's fs manager then joins <mount>/<path> in every v1 hierarchy and, on a
// hybrid host, in /sys/fs/cgroup/unified. The groups that it finds are this leaf; those
// that it makes (devices, cpuset, freezer, ...) get the same name, so that Remove finds
// them. runsc does the same with a shorter list and uses an existing group as it is.
func (t *Tree) CgroupsPath(id string) string {
	return "/" + t.root + "/" + id + "/" + leaf
}

// check refuses a string that is no ID of this instance before it becomes a path.
func (t *Tree) check(id string) error {
	if !record.IsID(id) || id[0] != byte(t.inst) {
		return errs.New(errs.Invalid, "%q is not a sandbox id of instance %s", id, t.inst)
	}
	return nil
}

func (t *Tree) checkLimits(l Limits) error {
	if can, _ := t.LimitsIO(); l.limitsIO() && !can {
		return errs.New(errs.Unsupported, "limit I/O: this host has no io (v1: blkio) controller, or its storage pool is not on a "+
			"block device; leave it out")
	}
	return l.check()
}

func (t *Tree) makeRoot() error {
	if err := delegate(t.layout, t.root); err != nil {
		return err
	}
	for _, h := range t.layout.ours {
		if err := os.MkdirAll(t.rootDir(h), 0o755); err != nil {
			return fmt.Errorf("make cgroup root: %w", err)
		}
	}
	if h := t.layout.of["io"]; h != nil && h.v2 {
		t.layout.delegateIO(t.root)
	}
	return nil
}

// Create makes the cgroups of id and writes its limits, to the leaf as well: a guest
// that sees its own group sees them there. An ID is never used twice, so an ID that has
// cgroups already is an error (fs.ErrExist). After a failed Create, Remove removes what
// is left.
//
// It takes 0.2 ms p50 back to back, 0.3 on an idle host, nearly all of it mkdir
// (memory's two alone 0.14). Resolving the path for each file costs 1 µs; open
// directory descriptors would save that, but go stale when somebody removes the root.
func (t *Tree) Create(ctx context.Context, id string, l Limits) error {
	if err := errors.Join(t.check(id), t.checkLimits(l)); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("create cgroup of %s: %w", id, context.Cause(ctx))
	}
	err := t.create(id, l)
	if errors.Is(err, fs.ErrNotExist) {
		// The root is gone: RemoveRoot of another process, or an operator.
		if err = t.makeRoot(); err == nil {
			err = errors.Join(t.removeAll(ctx, id), t.create(id, l))
		}
	}
	if err != nil {
		return fmt.Errorf("create cgroup of %s: %w", id, err)
	}
	return nil
}

func (t *Tree) create(id string, l Limits) error {
	if weak.Off(weak.Memory) {
		l.MemoryBytes = 0
	}
	if weak.Off(weak.Pids) {
		l.Pids = 0
	}
	ctrls := t.layout.onV2()
	for _, h := range t.layout.ours {
		if err := mkdir(t.dir(h, id)); err != nil {
			return err
		}
		if h.v2 && len(ctrls) > 0 {
			if err := enable(t.dir(h, id), ctrls); err != nil {
				return err
			}
		}
		if err := mkdir(t.leafIn(h, id)); err != nil {
			return err
		}
	}
	for _, c := range needed {
		for _, dir := range []string{t.dir(t.layout.of[c], id), t.leafIn(t.layout.of[c], id)} {
			if err := t.write(c, dir, l); err != nil {
				return err
			}
		}
	}
	if err := limitSockets(t, id); err != nil {
		return err
	}
	if l.limitsIO() {
		return t.write("io", t.ioDir(id), l)
	}
	return nil
}

// socketBytes is from when on the kernel keeps TCP and UDP of a sandbox short of memory on cgroup v1. Each connection
// still gets some 70 KiB (2,000 of them took 208 MiB on Linux 6.18), so SocketMemory is to be watched.
const socketBytes = 64 << 20

// limitSockets has v1 count the memory of TCP and UDP: it does not before the file is written
// (cgroup-v1/memory.rst §2.7), and counts it beside the memory limit. v2 counts it as memory. Limit
// does not write the file again: the kernel refuses what is below the present use.
func limitSockets(t *Tree, id string) error {
	h := t.layout.of["memory"]
	if h.v2 || weak.Off(weak.KernelMemory) {
		return nil
	}
	for _, dir := range []string{t.dir(h, id), t.leafIn(h, id)} {
		err := writeFile(dir+"/memory.kmem.tcp.limit_in_bytes", itoa(socketBytes))
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a kernel that cannot: doctor says so
			return err
		}
	}
	return nil
}

// LimitsIO reports whether I/O can be limited here, and whether that includes writeback
// from the page cache: only v2 knows which sandbox that belongs to.
func (t *Tree) LimitsIO() (can, writeback bool) {
	f, ok := t.flavours["io"]
	return ok && len(f.disks) > 0, f.v2
}

// write writes the limits l for ctrl of one cgroup.
func (t *Tree) write(ctrl, dir string, l Limits) error {
	for _, w := range l.writes(ctrl, t.flavours[ctrl]) {
		if err := writeFile(dir+"/"+w.file, w.value); err != nil {
			return err
		}
	}
	return nil
}

// LimitCPU lets id use at most millis thousandths of a CPU from now on; less
// than 10 counts as 10, the kernel's floor, and 0 is no limit. An id without
// cgroups is fs.ErrNotExist.
//
// It is not part of Create because a start may need more than the sandbox may use.
func (t *Tree) LimitCPU(_ context.Context, id string, millis int64) error {
	if err := t.check(id); err != nil {
		return err
	}
	if millis < 0 || millis > maxCPU {
		return errs.New(errs.Invalid, "limit of cpu is %d: want 0 (unlimited) to %d thousandths of a CPU", millis, maxCPU)
	}
	h := t.layout.of["cpu"]
	w, free := cpuQuota(millis, h.v2), cpuQuota(0, h.v2)
	if reads(t.dir(h, id)+"/"+w.file, w.value) && reads(t.leafIn(h, id)+"/"+w.file, w.value) {
		return nil // a write costs four times as much, and the leaf has no limit meanwhile
	}
	// The leaf has the limit too, so that a guest can see it. v1 allows no group more
	// than its parent, so the leaf has no limit during the change.
	for _, w := range []struct{ dir, file, value string }{
		{t.leafIn(h, id), free.file, free.value}, {t.dir(h, id), w.file, w.value}, {t.leafIn(h, id), w.file, w.value},
	} {
		if err := writeFile(w.dir+"/"+w.file, w.value); err != nil {
			if gone(err) {
				err = fs.ErrNotExist
			}
			return fmt.Errorf("limit CPU of %s: %w", id, err)
		}
	}
	return nil
}

// List returns the IDs of this instance that have a cgroup in any hierarchy, sorted. It
// includes IDs that have only groups made by a runtime.
func (t *Tree) List(ctx context.Context) ([]string, error) {
	seen := map[string]bool{}
	for _, h := range t.layout.all {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("list cgroups: %w", context.Cause(ctx))
		}
		names, err := readNames(t.rootDir(h))
		if err != nil && !gone(err) {
			return nil, fmt.Errorf("list cgroups: %w", err)
		}
		for _, name := range names {
			if t.check(name) == nil { // no file of the kernel has such a name
				seen[name] = true
			}
		}
	}
	ids := make([]string, 0, len(seen))
	for id := range seen {
		ids = append(ids, id)
	}
	sort.Strings(ids)
	return ids, nil
}

// RemoveRoot removes the root in every hierarchy, for uninstalling. It fails
// while a sandbox has a cgroup.
func (t *Tree) RemoveRoot() error {
	var errs []error
	for _, h := range t.layout.all {
		if err := unix.Rmdir(t.rootDir(h)); err != nil && !gone(err) {
			errs = append(errs, &fs.PathError{Op: "remove cgroup", Path: t.rootDir(h), Err: err})
		}
	}
	return errors.Join(errs...)
}
