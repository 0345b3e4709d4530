package daemon

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
)

var _ sandbox.Bundles = (*bundles)(nil)

// bundles writes OCI bundles below <run>/bundles. It alone turns a record and the paths
// of its resources into a runtime spec.
type bundles struct {
	cfg     *config.Config
	mounts  *snapshot.Mounts
	volumes *snapshot.Volumes
	ns      *netns.Manager
	cgroups *cgroups.Tree
	noFile  uint64 // the most open files that a sandbox's process may have
}

func newBundles(cfg *config.Config, files *snapshot.Store, ns *netns.Manager, cg *cgroups.Tree) (*bundles, error) {
	n, err := oci.HostNoFile()
	if err != nil {
		return nil, err
	}
	b := &bundles{cfg: cfg, mounts: files.Mounts, volumes: files.Volumes, ns: ns, cgroups: cg, noFile: n}
	return b, b.makeDir()
}

// makeDir makes the directory of bundles.
func (b *bundles) makeDir() error {
	err := os.MkdirAll(b.dir(""), bundlesMode)
	if err == nil {
		err = os.Chmod(b.dir(""), bundlesMode) // also that of an older version
	}
	if err != nil {
		return fmt.Errorf("make the directory of bundles: %w", err)
	}
	return nil
}

// The first process of a sandbox with users of its own has the host's ids of guest root
// while it binds files of its bundle. If it cannot reach them, libcontainer opens each of
// them for it, which costs a round trip between two processes. So it may pass through the
// directory of bundles, which nobody but root can list, and through its own bundle, whose
// config.json nobody but root can read.
const bundlesMode, ownBundleMode = 0o711, 0o710

// share lets the first process of r pass through the bundle dir.
func (b *bundles) share(dir string, r *record.Record) error {
	err := os.Chown(dir, 0, int(b.cfg.Instance.UIDBase(r.Slot)))
	if err == nil {
		err = os.Chmod(dir, ownBundleMode)
	}
	if err != nil {
		return fmt.Errorf("share the bundle of %s with its users: %w", r.ID, err)
	}
	return nil
}

func (b *bundles) dir(id string) string { return filepath.Join(b.cfg.RunDir, "bundles", id) }

// Write makes the bundle of r.
func (b *bundles) Write(_ context.Context, r *record.Record) error {
	dir := b.dir(r.ID)
	hostname := r.Hostname()
	c := oci.Config{
		ID:           r.ID,
		Hostname:     hostname,
		Security:     r.Spec.Level(),
		RootFS:       b.mounts.RootfsDir(r.ID),
		NetNS:        b.ns.NetPath(r.ID),
		CgroupsPath:  b.cgroups.CgroupsPath(r.ID),
		ResolvConf:   filepath.Join(dir, "resolv.conf"),
		Hosts:        filepath.Join(dir, "hosts"),
		HostnameFile: filepath.Join(dir, "hostname"),
		AgentDir:     filepath.Join(b.cfg.LibexecDir, "agent"),
		MemoryBytes:  r.Spec.MemoryBytes,
		CPUMillis:    r.Spec.CPUMillis,
		Pids:         r.Spec.Pids + record.AgentTasks,
		NoFile:       b.noFile,
		ReadOnly:     r.Spec.ReadOnly,
		ShmBytes:     r.Spec.ShmBytes,
	}
	for _, t := range r.Spec.Tmpfs {
		c.Tmpfs = append(c.Tmpfs, oci.Tmpfs(t))
	}
	for i, outer := range record.Outer(r.Spec.Volumes) {
		if outer < 0 { // otherwise volume number outer contains it
			v := r.Spec.Volumes[i]
			c.Volumes = append(c.Volumes, oci.Volume{Source: b.volumes.VolumeDir(r.ID, i), Path: v.Path, ReadOnly: v.ReadOnly})
		}
	}
	if r.Spec.ReadOnly {
		c.AgentState = filepath.Join(c.RootFS, oci.AgentState)
	}
	if ownUsers(r) {
		c.UserNS, c.UIDBase = b.ns.UserPath(r.ID), b.cfg.Instance.UIDBase(r.Slot)
	}
	if r.Spec.Runtime == oci.Runc {
		c.BootID = filepath.Join(dir, "boot_id")
	}
	if err := oci.Write(dir, oci.NewSpec(r.Spec.Runtime, c)); err != nil {
		return err
	}
	// ndots:1 and no search list: one query for a name, not five. A start is a boot of
	// the sandbox.
	files := map[string]string{
		"boot_id":     newBootID() + "\n",
		"resolv.conf": fmt.Sprintf("nameserver %s\noptions ndots:1\n", b.cfg.Instance.Gateway()),
		"hosts":       fmt.Sprintf("127.0.0.1 localhost\n%s %s\n", b.cfg.Addr(r.Slot), hostname),
		"hostname":    hostname + "\n",
	}
	for name, text := range files {
		if err := oci.WriteFile(dir, name, []byte(text), 0o644); err != nil {
			return err
		}
	}
	if ownUsers(r) {
		return b.share(dir, r)
	}
	return nil
}

// newBootID draws a boot ID as the kernel does: a random UUID (RFC 9562, version 4).
func newBootID() string {
	var b [16]byte
	rand.Read(b[:]) //nolint:errcheck // never fails since Go 1.24
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// Remove removes the bundle of id.
func (b *bundles) Remove(_ context.Context, id string) error { return oci.Remove(b.dir(id)) }

// List returns the ids that have a bundle.
func (b *bundles) List(context.Context) (ids []string, err error) {
	entries, err := os.ReadDir(b.dir(""))
	if err != nil {
		return nil, fmt.Errorf("list bundles: %w", err)
	}
	for _, e := range entries {
		if record.IsID(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// ownUsers reports whether the guest ids of r are mapped to host ids of its own. Under
// runc only the host's kernel separates sandboxes, so root inside must be nobody
// outside. gVisor's guest ids never reach the host's kernel.
func ownUsers(r *record.Record) bool { return r.Spec.Runtime == oci.Runc && !weak.Off(weak.UserNS) }
