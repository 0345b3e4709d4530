package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/oci/runc"
	"github.com/sandboxd/sandboxd/pkg/oci/runsc"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// bareInstance owns the resources of the baselines.
const bareInstance = instance.Instance('y')

// The limits of a sandbox whose request names none: the daemon's defaults.
const (
	memoryBytes = 512 << 20
	cpuMillis   = 1000
	pids        = 256
	headroom    = 64 << 20
)

type driver interface {
	Start(ctx context.Context, id string, stdin *os.File) error
	Forget(ctx context.Context, id string) error
	Close() error
}

// bare starts the same bundles as the daemon with the same runtimes, and nothing else: no
// API, no record, no rules, no table.
type bare struct {
	run, state, bin string
	layers          []string
	noFile          uint64

	identity *os.File
	ns       *netns.Manager
	files    *snapshot.Store
	groups   *cgroups.Tree
	drivers  map[string]driver
	slots    chan int
}

// openBare prepares the baselines. layerDir is where the daemon keeps the named image
// layers.
func openBare(ctx context.Context, bin, layerDir string, layers []string) (b *bare, err error) {
	b = &bare{
		run: bareInstance.RunDir(), state: bareInstance.StateDir(), bin: bin, layers: layers,
		drivers: map[string]driver{}, slots: make(chan int, 256),
	}
	for i := range cap(b.slots) {
		b.slots <- i
	}
	if b.noFile, err = oci.HostNoFile(); err != nil {
		return nil, err
	}
	if err := b.linkLayers(layerDir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(b.run, 0o711); err != nil {
		return nil, err
	}
	b.ns = netns.New(bareInstance, b.run)
	if err := errors.Join(b.ns.Setup(ctx), b.ns.OpenUplinks(ctx)); err != nil {
		return nil, err
	}
	if b.identity, err = netns.UserNS(0, 65536); err != nil {
		return nil, err
	}
	b.files, err = snapshot.Open(ctx, snapshot.Config{
		Instance: bareInstance, StateDir: b.state, RunDir: b.run, Pool: pool.Auto, PoolBytes: 2 << 30,
		UserNS:         func(id string) (*os.File, error) { return os.Open(b.ns.UserPath(id)) },
		IdentityUserNS: b.identity,
	})
	if err != nil {
		return nil, err
	}
	if b.groups, err = cgroups.Open(cgroups.Config{Instance: bareInstance}); err != nil {
		return nil, err
	}
	if b.drivers[oci.Runsc], err = runsc.New(runsc.Config{
		Binary: filepath.Join(bin, "runsc"), Root: filepath.Join(b.run, "runsc"), Bundle: b.bundle, StartInCgroup: b.groups.Start,
		Processes: b.groups.Processes,
	}); err != nil {
		return nil, err
	}
	b.drivers[oci.Runc], err = runc.New(runc.Config{
		Binary: filepath.Join(bin, "sandboxd-runc"), Root: filepath.Join(b.run, "runc"), Bundle: b.bundle,
	})
	return b, err
}

// linkLayers gives the baselines the same inodes as the daemon's layers, so that both use
// the same page cache.
func (b *bare) linkLayers(from string) error {
	to := filepath.Join(b.state, "layers")
	if err := os.MkdirAll(to, 0o700); err != nil {
		return err
	}
	for _, l := range b.layers {
		name := l[len("sha256:"):]
		if _, err := os.Stat(filepath.Join(to, name)); err == nil {
			continue
		}
		if out, err := exec.Command("cp", "-al", filepath.Join(from, name), to+"/").CombinedOutput(); err != nil {
			return fmt.Errorf("link layer %s: %w: %s", name, err, out)
		}
	}
	return nil
}

func (b *bare) bundle(id string) string { return filepath.Join(b.run, "bundles", id) }

// close frees everything.
func (b *bare) close(ctx context.Context) error {
	var failed []error
	for _, d := range b.drivers {
		failed = append(failed, d.Close())
	}
	failed = append(failed, b.ns.Purge(ctx), b.groups.RemoveRoot(), b.groups.Close(), b.files.UnmountPool(), b.identity.Close())
	if err := errors.Join(failed...); err != nil {
		return err // a remaining mount would be emptied
	}
	return errors.Join(os.RemoveAll(b.run), os.RemoveAll(b.state))
}

// A box is everything that a bare runtime needs for one sandbox.
type box struct {
	b       *bare
	id      string
	runtime string
	slot    int
	addr    netip.Addr
	stdin   *os.File
	agent   *agent.Client
}

// prepare makes everything that a start needs, with a changed spec if changes are given.
// The daemon does this work inside the measured time, the baseline before it.
func (b *bare) prepare(ctx context.Context, runtime string, changes ...func(*specs.Spec)) (x *box, err error) {
	return b.prepareFrom(ctx, runtime, "", changes...)
}

// prepareFrom is prepare with a disk that begins as a snapshot.
func (b *bare) prepareFrom(ctx context.Context, runtime, snap string, changes ...func(*specs.Spec)) (x *box, err error) {
	x = &box{b: b, id: record.NewID(bareInstance), runtime: runtime, slot: <-b.slots}
	defer func() {
		if err != nil {
			err = errors.Join(err, x.remove(ctx))
			x = nil
		}
	}()
	a := bareInstance.Pool().Addr().As4()
	a[2], a[3] = byte((x.slot+2)>>8), byte(x.slot+2)
	x.addr = netip.AddrFrom4(a)
	own, base := runtime == oci.Runc, bareInstance.UIDBase(x.slot)
	if err := b.ns.CreateNamespaces(ctx, x.id, own, base); err != nil {
		return x, err
	}
	if err := b.files.Disks.CreateDisk(ctx, x.id, snap, 1<<30); err != nil {
		return x, err
	}
	if err := b.files.Mounts.Mount(ctx, x.id, snapshot.Mount{Layers: b.layers, OwnUsers: own, UIDBase: base, Volatile: true}); err != nil {
		return x, err
	}
	l := cgroups.Limits{MemoryBytes: memoryBytes, Pids: pids}
	if runtime == oci.Runsc {
		l.OOMGroup, l.HeadroomBytes = true, headroom
	}
	if err := b.groups.Create(ctx, x.id, l); err != nil {
		return x, err
	}
	if err := b.ns.Attach(ctx, x.id, x.addr); err != nil {
		return x, err
	}
	return x, x.writeBundle(changes)
}

func (x *box) writeBundle(changes []func(*specs.Spec)) error {
	b, dir := x.b, x.b.bundle(x.id)
	c := oci.Config{
		ID: x.id, RootFS: b.files.Mounts.RootfsDir(x.id), NetNS: b.ns.NetPath(x.id), CgroupsPath: b.groups.CgroupsPath(x.id),
		ResolvConf: filepath.Join(dir, "resolv.conf"), Hosts: filepath.Join(dir, "hosts"), HostnameFile: filepath.Join(dir, "hostname"),
		AgentDir: filepath.Join(b.bin, "agent"), MemoryBytes: memoryBytes, CPUMillis: cpuMillis, Pids: pids, NoFile: b.noFile,
	}
	if x.runtime == oci.Runc {
		c.UserNS, c.UIDBase = b.ns.UserPath(x.id), bareInstance.UIDBase(x.slot)
	}
	spec := oci.NewSpec(x.runtime, c)
	for _, change := range changes {
		change(spec)
	}
	if err := oci.Write(dir, spec); err != nil {
		return err
	}
	for _, name := range []string{"resolv.conf", "hosts", "hostname"} {
		if err := oci.WriteFile(dir, name, []byte("# the bench\n"), 0o644); err != nil {
			return err
		}
	}
	boot := agent.Bootstrap{
		Protocol: agent.Protocol, Token: "bench", Hostname: x.id,
		Limits: agent.Limits{MemoryBytes: memoryBytes, CPUMillis: cpuMillis},
	}
	var err error
	if x.stdin, err = boot.File(); err != nil {
		return err
	}
	addr := netip.AddrPortFrom(x.addr, agent.Port).String()
	x.agent = agent.New(func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp4", addr)
	}, boot.Token)
	return nil
}

// start is the baseline of a creation: from the start of the runtime to the agent's first
// answer.
func (x *box) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := x.b.drivers[x.runtime].Start(ctx, x.id, x.stdin); err != nil {
		return err
	}
	return x.agent.Ready(ctx)
}

// kill is the baseline of a deletion on runc. It leaves only what prepare made.
func (x *box) kill(ctx context.Context) error {
	if err := x.b.groups.Kill(ctx, x.id); err != nil {
		return err
	}
	return x.b.drivers[x.runtime].Forget(ctx, x.id)
}

// runscDelete is the baseline of a deletion on runsc, with the runsc command.
func (x *box) runscDelete(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, filepath.Join(x.b.bin, "runsc"), "--root="+filepath.Join(x.b.run, "runsc"), "--ignore-cgroups",
		"delete", "-force", x.id)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("runsc delete: %w: %s", err, out)
	}
	return nil
}

// drop is remove, and waits until everything is gone.
func (x *box) drop(ctx context.Context) error {
	if err := x.remove(ctx); err != nil {
		return err
	}
	return settle(x.id)
}

// remove kills the box if it lives and frees everything, even if ctx has ended.
func (x *box) remove(ctx context.Context) error {
	ctx, b := context.WithoutCancel(ctx), x.b
	if x.agent != nil {
		x.agent.Close()
	}
	if x.stdin != nil {
		x.stdin.Close()
	}
	err := errors.Join(
		x.kill(ctx),
		b.ns.Detach(ctx, x.id),
		b.files.Mounts.Unmount(ctx, x.id),
		b.groups.Remove(ctx, x.id),
		b.ns.DeleteNamespaces(ctx, x.id),
		b.files.Disks.DeleteDisk(ctx, x.id),
		oci.Remove(b.bundle(x.id)),
		b.ns.Gone(ctx, x.id),
	)
	b.slots <- x.slot
	return err
}
