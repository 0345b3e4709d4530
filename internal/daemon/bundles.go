package daemon

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/sandboxd/sandboxd/internal/config"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/oci/trust"
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
	log     *slog.Logger
	// authority returns the certificate of r's authority, one block of PEM. It makes or renews
	// the authority if that is due. nil: no sandbox has one.
	authority func(ctx context.Context, r *record.Record) (pem []byte, err error)
	// recalled returns the directory with the agent that is in the memory with which r comes up.
	recalled func(ctx context.Context, r *record.Record) (string, error)
}

func newBundles(
	cfg *config.Config, files *snapshot.Store, ns *netns.Manager, cg *cgroups.Tree, log *slog.Logger,
) (*bundles, error) {
	n, err := oci.HostNoFile()
	if err != nil {
		return nil, err
	}
	b := &bundles{cfg: cfg, mounts: files.Mounts, volumes: files.Volumes, ns: ns, cgroups: cg, noFile: n, log: log}
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

// config is what the specification of r is made from.
func (b *bundles) config(r *record.Record) oci.Config {
	dir := b.dir(r.ID)
	c := oci.Config{
		ID:           r.ID,
		Hostname:     r.Hostname(),
		Security:     r.Spec.Level(),
		RootFS:       b.mounts.RootfsDir(r.ID),
		NetNS:        b.ns.NetPath(r.ID),
		CgroupsPath:  b.cgroups.CgroupsPath(r.ID),
		ResolvConf:   filepath.Join(dir, "resolv.conf"),
		Hosts:        filepath.Join(dir, "hosts"),
		HostnameFile: filepath.Join(dir, "hostname"),
		AgentDir:     b.agentDir(),
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
	return c
}

// agentDir is the host's directory at oci.AgentDir of every sandbox that does not recall memory.
func (b *bundles) agentDir() string { return filepath.Join(b.cfg.LibexecDir, "agent") }

// configOf is config with the agent that is in the memory of r, if it recalls any: another version may
// have kept that.
func (b *bundles) configOf(ctx context.Context, r *record.Record) (c oci.Config, err error) {
	c = b.config(r)
	if r.Recalls() {
		c.AgentDir, err = b.recalled(ctx, r)
	}
	return c, err
}

// Write makes the bundle of r.
func (b *bundles) Write(ctx context.Context, r *record.Record) error {
	dir := b.dir(r.ID)
	c, err := b.configOf(ctx, r)
	if err != nil {
		return err
	}
	if err := oci.Write(dir, oci.NewSpec(r.Spec.Runtime, c)); err != nil {
		return err
	}
	// ndots:1 and no search list: one query for a name, not five. A start is a boot of
	// the sandbox.
	files := b.names(r)
	files["boot_id"] = newBootID() + "\n"
	files["resolv.conf"] = fmt.Sprintf("nameserver %s\noptions ndots:1\n", b.cfg.Instance.Gateway())
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

// names are the files of the bundle of r that have its hostname.
func (b *bundles) names(r *record.Record) map[string]string {
	hostname := r.Hostname()
	return map[string]string{
		"hosts":    fmt.Sprintf("127.0.0.1 localhost\n%s %s\n", b.cfg.Addr(r.Slot), hostname),
		"hostname": hostname + "\n",
	}
}

// Rename writes the hostname of r into files that a guest has mounted: it sees only what is
// written in place.
func (b *bundles) Rename(_ context.Context, r *record.Record) error {
	for name, text := range b.names(r) {
		f, err := os.OpenFile(filepath.Join(b.dir(r.ID), name), os.O_WRONLY|os.O_TRUNC, 0)
		if err != nil {
			return fmt.Errorf("rename the guest of %s: %w", r.ID, err)
		}
		_, err = f.WriteString(text)
		if err = errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("rename the guest of %s: %w", r.ID, err)
		}
	}
	return nil
}

// Trust adds to the bundle of r files with which the guest trusts the authority of r, their
// mounts, and the variables for trusted. It plans by the mounted root file system of this
// start: an earlier life may have changed it.
func (b *bundles) Trust(ctx context.Context, r *record.Record) error {
	dir := b.dir(r.ID)
	c, err := b.configOf(ctx, r)
	if err != nil {
		return err
	}
	if err := checkAgentFiles(c.AgentDir); err != nil {
		return err
	}
	plan, err := b.plan(ctx, r, &c)
	if err != nil {
		return err
	}
	b.logLeft(r, plan.Left)
	env, err := json.Marshal(plan.Env)
	if err != nil {
		return fmt.Errorf("encode the variables of %s: %w", r.ID, err)
	}
	if err := oci.WriteFile(dir, trustedFile, env, 0o600); err != nil {
		return err
	}
	for _, f := range plan.Files {
		if err := oci.WriteFile(dir, f.Name, f.Data, 0o644); err != nil {
			return err
		}
	}
	files := func(mounts []trust.Mount) (all []oci.File) {
		for _, m := range mounts {
			all = append(all, oci.File{Source: filepath.Join(dir, m.File), Path: m.Target})
		}
		return all
	}
	c.Stores, c.AgentFiles = files(plan.StoreMounts), files(plan.AgentMounts)
	return oci.Write(dir, oci.NewSpec(r.Spec.Runtime, c)) // last: all that it names is there
}

// plan plans what the guest of r trusts; c is without that.
func (b *bundles) plan(ctx context.Context, r *record.Record, c *oci.Config) (*trust.Plan, error) {
	if b.authority == nil {
		return nil, errors.New("this daemon has no authorities")
	}
	ca, err := b.authority(ctx, r)
	if err != nil {
		return nil, err
	}
	root, err := os.Open(c.RootFS)
	if err != nil {
		return nil, fmt.Errorf("open the root file system of %s: %w", r.ID, err)
	}
	defer root.Close()
	var hidden []string
	for _, t := range c.Tmpfs {
		hidden = append(hidden, t.Path)
	}
	for _, v := range c.Volumes {
		hidden = append(hidden, v.Path)
	}
	return trust.NewPlan(root, ca, environment(r), hidden)
}

// checkAgentFiles holds that the mount points in the agent's directory are there. They come
// with the installation. The daemon makes none: libexec_dir may be on a read-only file system.
func checkAgentFiles(agentDir string) error {
	for _, target := range trust.AgentFiles {
		name := filepath.Join(agentDir, filepath.Base(target))
		fi, err := os.Lstat(name)
		if err == nil && !fi.Mode().IsRegular() {
			err = fmt.Errorf("%s is not a regular file: remove it", name)
		}
		if err != nil {
			return errs.Wrap(fmt.Errorf("find a mount point for the authority of a sandbox: %w", err), errs.Unavailable,
				"the installation of sandboxd lacks %s, on which the authority of a sandbox with inspected hosts is mounted: the "+
					"operator of this host must install sandboxd again (scripts/install.sh)", filepath.Base(target))
		}
	}
	return nil
}

// maxLeft is how many stores of a guest the log names, each with maxLeftText characters at
// most: the guest chooses how many there are.
const maxLeft, maxLeftText = 8, 300

// logLeft says which programs of the guest will not trust its authority.
func (b *bundles) logLeft(r *record.Record, left []trust.Left) {
	if len(left) == 0 {
		return
	}
	var named []string
	for _, l := range left[:min(len(left), maxLeft)] {
		named = append(named, fmt.Sprintf("%.*q", maxLeftText, l.Path+": "+l.Why))
	}
	b.log.Info("some programs of a sandbox will not trust its authority, so they refuse hosts that are inspected",
		"sandbox", r.ID, "n", len(left), "left", strings.Join(named, ", "))
}

// trustedFile is the file of a bundle with the variables of a plan. Its mode is 0600.
const trustedFile = "trusted.json"

// trusted returns the variables by which programs of the guest id find the files that they
// trust. They are no part of its record, so a snapshot of it and its next start are without.
// Preconditions: Trust has run.
func (b *bundles) trusted(id string) (env map[string]string, err error) {
	text, err := os.ReadFile(filepath.Join(b.dir(id), trustedFile))
	if err == nil {
		err = json.Unmarshal(text, &env)
	}
	if err != nil {
		return nil, fmt.Errorf("read the variables of %s: %w", id, err)
	}
	return env, nil
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
