package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// The neighbours of one incarnation, all in front of the same host.
type (
	fakeNamespaces struct{ *incarnation }
	fakeDisks      struct{ *incarnation }
	fakeRootfs     struct{ *incarnation }
	fakeCgroups    struct{ *incarnation }
	fakeNetwork    struct{ *incarnation }
	fakeEgress     struct{ *incarnation }
	fakePorts      struct{ *incarnation }
	fakeBundles    struct{ *incarnation }
	fakeRuntime    struct {
		*incarnation
		name string
	}
	fakeAgents struct{ *incarnation }
	fakeVaults struct{ *incarnation }
	fakeStore  struct{ *incarnation }
	fakeFrozen struct{ *incarnation }
	fakeMemory struct{ *incarnation }

	fakeVolumes struct{ *incarnation }
)

func (f fakeNamespaces) CreateNamespaces(ctx context.Context, id string, _ bool, _ uint32) error {
	return f.make(ctx, "namespaces", id)
}

func (f fakeNamespaces) DeleteNamespaces(ctx context.Context, id string) error {
	return f.unmake(ctx, "namespaces", id)
}

func (f fakeNamespaces) ListNamespaces(ctx context.Context) ([]string, error) {
	return f.list(ctx, "namespaces")
}

func (f fakeNamespaces) Pinned(ctx context.Context, id string) (bool, error) {
	return f.whole(ctx, "namespaces", id)
}

func (f fakeRootfs) Mounted(ctx context.Context, id string) (bool, error) {
	return f.whole(ctx, "rootfs", id)
}

// whole is false of a thing that is there, but broken.
func (d *incarnation) whole(ctx context.Context, kind, id string) (ok bool, err error) {
	err = d.do(ctx, kind+".whole", id, func() error {
		ok = d.things[kind+"/"+id] && !d.things["broken "+kind+"/"+id]
		return nil
	})
	return ok, err
}

func (f fakeDisks) CreateDisk(ctx context.Context, id, snap string, bytes int64) error {
	return f.do(ctx, "disk.make", id, func() error {
		if snap != "" && !f.things["snapshot/"+snap] {
			return errs.New(errs.NotFound, "no files of snapshot %s", snap)
		}
		f.things["disk/"+id] = true
		f.diskLimit[id] = bytes
		return nil
	})
}

func (f fakeDisks) LimitDisk(ctx context.Context, id string, bytes int64) error {
	return f.do(ctx, "disk.Limit", id, func() error {
		if !f.things["disk/"+id] && f.records[id].State == record.Creating {
			return fs.ErrNotExist
		}
		f.diskLimit[id] = bytes
		return nil
	})
}

func (f fakeDisks) DeleteDisk(ctx context.Context, id string) error { return f.unmake(ctx, "disk", id) }
func (f fakeDisks) ListDisks(ctx context.Context) ([]string, error) { return f.list(ctx, "disk") }
func (f fakeDisks) Usage(id string) (used, limit int64, err error) {
	err = f.do(context.Background(), "disk.Usage", id, func() error {
		used, limit = f.diskUsed[id], f.diskLimit[id]
		return nil
	})
	return used, limit, err
}

func (f fakeDisks) MoveStray(ctx context.Context, id string) error {
	return f.do(ctx, "disk.MoveStray", id, func() error {
		if f.things["disk/"+id] {
			delete(f.things, "disk/"+id)
			f.strays = append(f.strays, id)
		}
		return nil
	})
}

func (f fakeRootfs) Mount(ctx context.Context, id string, m Mount) error {
	return f.do(ctx, "rootfs.make", id, func() error {
		f.things["rootfs/"+id] = true
		f.volatile[id] = m.Volatile
		return nil
	})
}

func (f fakeRootfs) Unmount(ctx context.Context, id string) error { return f.unmake(ctx, "rootfs", id) }

func (f fakeRootfs) Keep(ctx context.Context, id string) error {
	return f.do(ctx, "rootfs.Keep", id, func() error {
		if f.things["rootfs/"+id] || !f.synced[id] {
			return fmt.Errorf("the disk of %s changes", id)
		}
		delete(f.volatile, id)
		return nil
	})
}

func (f fakeRootfs) ListMounts(ctx context.Context) ([]string, error) { return f.list(ctx, "rootfs") }

func (f fakeCgroups) Create(ctx context.Context, id string, l CgroupLimits) error {
	return f.do(ctx, "cgroup.make", id, func() error {
		f.things["cgroup/"+id] = true
		f.limits[id] = l
		return nil
	})
}

func (f fakeCgroups) Limit(ctx context.Context, id string, l CgroupLimits) error {
	return f.do(ctx, "cgroup.Limit", id, func() error {
		if !f.things["cgroup/"+id] {
			return fs.ErrNotExist
		}
		if l.KeepMemory {
			l.MemoryBytes = f.limits[id].MemoryBytes
		}
		f.limits[id] = l
		return nil
	})
}

func (f fakeCgroups) MemoryHeld(id string) (n int64, err error) {
	err = f.do(context.Background(), "cgroup.MemoryHeld", id, func() error {
		n = f.held[id]
		return nil
	})
	return n, err
}

func (f fakeCgroups) LimitCPU(ctx context.Context, id string, millis int64) error {
	return f.do(ctx, "cgroup.LimitCPU", id, func() error {
		if !f.things["cgroup/"+id] {
			return fs.ErrNotExist
		}
		f.cpu[id] = millis
		return nil
	})
}

func (f fakeCgroups) Remove(ctx context.Context, id string) error { return f.unmake(ctx, "cgroup", id) }
func (f fakeCgroups) List(ctx context.Context) ([]string, error)  { return f.list(ctx, "cgroup") }
func (f fakeCgroups) Populated(id string) (ok bool, err error) {
	err = f.do(context.Background(), "cgroup.Populated", id, func() error {
		ok = f.things["process/"+id]
		return nil
	})
	return ok, err
}

func (f fakeCgroups) OOMKills(id string) (n uint64, err error) {
	err = f.do(context.Background(), "cgroup.OOMKills", id, func() error {
		n = f.ooms[id]
		return nil
	})
	return n, err
}

func (f fakeCgroups) MemoryLimitHit(id string) (hit bool, err error) {
	err = f.do(context.Background(), "cgroup.MemoryLimitHit", id, func() error {
		hit = !f.short
		return nil
	})
	return hit, err
}

func (f fakeCgroups) PidsRefused(id string) (n uint64, err error) {
	err = f.do(context.Background(), "cgroup.PidsRefused", id, func() error {
		n = f.refused[id]
		return nil
	})
	return n, err
}

func (f fakeCgroups) Freeze(ctx context.Context, id string) error { return f.make(ctx, "frozen", id) }

func (f fakeCgroups) Thaw(ctx context.Context, id string) error {
	return f.do(ctx, "frozen.unmake", id, func() error {
		delete(f.things, "frozen/"+id)
		return nil
	})
}

func (f fakeCgroups) Kill(ctx context.Context, id string) error {
	return f.do(ctx, "cgroup.Kill", id, func() error {
		if f.slow[id] && f.things["process/"+id] {
			return fmt.Errorf("%w: closing files", ErrLingering)
		}
		f.die(id)
		return nil
	})
}

func (f fakeCgroups) Watch(ctx context.Context, id string) (<-chan struct{}, error) {
	out := make(chan struct{})
	err := f.do(ctx, "cgroup.Watch", id, func() error {
		dead := f.host.dead[id]
		if dead == nil {
			close(out)
			return nil
		}
		go func() {
			defer close(out)
			select {
			case <-dead:
			case <-ctx.Done():
			}
		}()
		return nil
	})
	return out, err
}

func (f fakeNetwork) Attach(ctx context.Context, id string, _ netip.Addr) error {
	return f.make(ctx, "network", id)
}

func (f fakeNetwork) Detach(ctx context.Context, id string) error {
	return f.unmake(ctx, "network", id)
}

func (f fakeNetwork) ListLinks(ctx context.Context) ([]string, error) { return f.list(ctx, "network") }

func (f fakeNetwork) Joined(ctx context.Context, id string, _ netip.Addr) (bool, error) {
	return f.whole(ctx, "network", id)
}

func (f fakeNetwork) Rejoin(ctx context.Context, id string, _ netip.Addr) error {
	return f.do(ctx, "network.rejoin", id, func() error {
		if !f.things["network/"+id] {
			return errors.New("no link")
		}
		delete(f.things, "broken network/"+id)
		return nil
	})
}

func (f fakeNetwork) Gone(ctx context.Context, id string) error {
	return f.do(ctx, "network.Gone", id, func() error { return nil })
}

func (f fakeEgress) Register(ctx context.Context, r *record.Record, _ netip.Addr) error {
	return f.do(ctx, "egress.make", r.ID, func() error {
		if r.Spec.Fork.Vault && !f.things["vault/"+r.ID] {
			return fmt.Errorf("%s has no vault yet", r.ID)
		}
		f.things["egress/"+r.ID] = true
		f.registered[r.ID] = r.Spec.Network
		return nil
	})
}

func (f fakeEgress) Unregister(ctx context.Context, id string) error {
	return f.unmake(ctx, "egress", id)
}

func (f fakeEgress) ListRegistered(ctx context.Context) ([]string, error) {
	return f.list(ctx, "egress")
}

func (f fakeVaults) Copy(ctx context.Context, source, to string) error {
	return f.do(ctx, "vault.make", to, func() error {
		if !f.things["vault/"+source] {
			return errs.New(errs.WrongState, "%s has no vault", source)
		}
		f.things["vault/"+to] = true
		return nil
	})
}

func (f fakeVaults) Drop(ctx context.Context, id string) error { return f.unmake(ctx, "vault", id) }

func (f fakePorts) Reserve(ctx context.Context, id string, _ []record.Publish) error {
	return f.do(ctx, "ports.Reserve", id, func() error {
		f.published[id] = true
		return nil
	})
}

func (f fakePorts) Open(ctx context.Context, id string, _ netip.Addr, _ []record.Publish) error {
	return f.do(ctx, "ports.make", id, func() error {
		f.published[id] = true
		return nil
	})
}

func (f fakePorts) Close(ctx context.Context, id string) error {
	return f.do(ctx, "ports.unmake", id, func() error {
		delete(f.published, id)
		return nil
	})
}

func (f fakePorts) Cut(ctx context.Context, id string) error {
	return f.do(ctx, "ports.cut", id, func() error { return nil })
}

func (f fakePorts) List(ctx context.Context) (ids []string, err error) {
	err = f.do(ctx, "ports.list", "", func() error {
		ids = slices.Collect(maps.Keys(f.published))
		return nil
	})
	return ids, err
}

func (f fakeBundles) Write(ctx context.Context, r *record.Record) error {
	return f.do(ctx, "bundle.make", r.ID, func() error {
		f.things["bundle/"+r.ID] = true
		delete(f.things, "trust/"+r.ID)
		return nil
	})
}

// Trust reads the root file system, and what it adds is a part of the bundle.
func (f fakeBundles) Trust(ctx context.Context, r *record.Record) error {
	return f.do(ctx, "bundle.trust", r.ID, func() error {
		for _, kind := range []string{"rootfs", "bundle"} {
			if !f.things[kind+"/"+r.ID] {
				return fmt.Errorf("no %s for %s", kind, r.ID)
			}
		}
		f.things["trust/"+r.ID] = true
		return nil
	})
}

func (f fakeBundles) Rename(ctx context.Context, r *record.Record) error {
	return f.do(ctx, "bundle.Rename", r.ID, func() error {
		if !f.things["bundle/"+r.ID] {
			return fs.ErrNotExist
		}
		return nil
	})
}

func (f fakeBundles) Remove(ctx context.Context, id string) error {
	return f.do(ctx, "bundle.unmake", id, func() error {
		if f.things["process/"+id] {
			return fmt.Errorf("bundle of %s is busy", id)
		}
		delete(f.things, "bundle/"+id)
		delete(f.things, "trust/"+id)
		return nil
	})
}

func (f fakeBundles) List(ctx context.Context) ([]string, error) { return f.list(ctx, "bundle") }

func (f fakeRuntime) Start(ctx context.Context, id string, _ *os.File) error {
	return f.do(ctx, f.name+".Start", id, func() error { return f.run(id) })
}

// run is called with mu held.
func (f fakeRuntime) run(id string) error {
	for _, kind := range []string{"namespaces", "disk", "rootfs", "cgroup", "network", "egress", "bundle"} {
		if !f.things[kind+"/"+id] {
			return fmt.Errorf("no %s for %s", kind, id)
		}
	}
	if f.records[id].Spec.Inspect && !f.things["trust/"+id] {
		return fmt.Errorf("%s would not trust its authority", id)
	}
	for _, v := range f.records[id].Spec.Volumes {
		if !f.things["volumes/"+id] || !f.things["volume/"+v.Volume] {
			return fmt.Errorf("no volume %s for %s", v.Claim, id)
		}
	}
	f.things[f.name+"/"+id] = true
	delete(f.deaths, id) // the agent clears away what the last one left
	f.things["process/"+id] = true
	f.host.dead[id] = make(chan struct{})
	return nil
}

// rename is the Rename of a RuntimeKind.
func (f fakeRuntime) rename(ctx context.Context, id, hostname string) error {
	return f.do(ctx, f.name+".Rename", id, func() error {
		if hostname == unnamable {
			return errors.New("the kernel says no")
		}
		g := f.agents[id]
		g.hostname = hostname
		f.agents[id] = g
		return nil
	})
}

func (f fakeRuntime) MainPID(string) (int, error)                 { return 0, fs.ErrNotExist }
func (f fakeRuntime) HelperPID(string) (int, error)               { return 0, fs.ErrNotExist }
func (f fakeRuntime) Forget(ctx context.Context, id string) error { return f.unmake(ctx, f.name, id) }
func (f fakeRuntime) List(ctx context.Context) ([]string, error)  { return f.list(ctx, f.name) }

func (f fakeAgents) Bootstrap(r *record.Record) (file *os.File, err error) {
	err = f.do(context.Background(), "agent.Bootstrap", r.ID, func() error {
		f.agents[r.ID] = guest{r.Token, r.Hostname(), r.Spec.Env}
		file, err = os.Open(os.DevNull)
		return err
	})
	return file, err
}

func (f fakeAgents) Ready(ctx context.Context, r *record.Record) error {
	f.mu.Lock()
	paused := f.pauses[r.ID] > 0
	f.mu.Unlock()
	if paused {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return f.do(ctx, "agent.Ready", r.ID, func() error {
		if !f.things["process/"+r.ID] {
			return errors.New("connection refused")
		}
		return nil
	})
}

// Adopt is refused to all who do not have the token of the agent.
func (f fakeAgents) Adopt(ctx context.Context, r *record.Record, token string, _ bool) error {
	return f.do(ctx, "agent.Adopt", r.ID, func() error {
		if !f.things["process/"+r.ID] {
			return errors.New("connection refused")
		}
		if f.agents[r.ID].token != token {
			return errs.New(errs.Denied, "the agent of %s has another token", r.ID)
		}
		f.agents[r.ID] = guest{r.Token, f.agents[r.ID].hostname, r.Spec.Env}
		return nil
	})
}

// Run fails if the line is "false", and kills the guest if it is "exit". The line "third" fails
// twice.
func (f fakeAgents) Run(ctx context.Context, r *record.Record, line string, _ time.Duration) error {
	return f.do(ctx, "agent.Run", r.ID, func() error {
		if line == "exit" {
			f.die(r.ID)
		}
		f.warmed[r.ID]++
		if !f.things["process/"+r.ID] || line == "false" || line == "third" && f.warmed[r.ID] < 3 {
			return errors.New("it failed")
		}
		return nil
	})
}

func (f fakeAgents) Tell(ctx context.Context, r *record.Record) error {
	return f.do(ctx, "agent.Tell", r.ID, func() error { return nil })
}

// Terminate is heard by entrypoints that are called "polite".
func (f fakeAgents) Terminate(ctx context.Context, r *record.Record) error {
	return f.do(ctx, "agent.Terminate", r.ID, func() error {
		if f.things["process/"+r.ID] && r.Spec.Entrypoint[0] == "polite" {
			f.deaths[r.ID] = Obituary{ExitCode: 143, Signal: "SIGTERM", LastOutput: "bye"}
			f.die(r.ID)
		}
		return nil
	})
}

func (f fakeAgents) Obituary(ctx context.Context, id string) (o Obituary, ok bool) {
	if f.do(ctx, "agent.Obituary", id, func() error { o, ok = f.deaths[id]; return nil }) != nil {
		return Obituary{}, false
	}
	return o, ok
}

func (f fakeStore) Insert(ctx context.Context, r *record.Record) error {
	call := "store.Insert"
	if r.Prepared {
		call = "store.Take"
	}
	return f.do(ctx, call, r.ID, func() error {
		was, there := f.records[r.ID]
		if r.Prepared && (was.State != record.Prepared || was.Spec.Runtime != r.Spec.Runtime) || !r.Prepared && there {
			return fmt.Errorf("insert %+v over %+v", r, was)
		}
		if r.Prepared && ((was.Pool.Name != "") != (r.MemberToken != "") || r.MemberToken != "" && was.Token != r.MemberToken) {
			return errs.New(errs.NotFound, "no such member")
		}
		for _, other := range f.records {
			if other.Spec.Name != "" && other.Spec.Name == r.Spec.Name && other.State != record.Deleting {
				return errs.New(errs.Exists, "name")
			}
		}
		for i := range r.Spec.Volumes {
			m := &r.Spec.Volumes[i]
			v, ok := f.volumes[m.Claim]
			switch {
			case ok && v.State == record.VolumeDeleting:
				return errs.New(errs.Unavailable, "being deleted")
			case ok:
				m.Owned = false
			case !m.Create:
				return errs.New(errs.NotFound, "no volume")
			default:
				v = record.Volume{ID: m.Volume, Name: m.Claim, State: record.VolumeReady}
				if m.Owned {
					v.Owner = r.ID
				}
				f.volumes[m.Claim] = v
			}
			m.Volume = v.ID
		}
		if use := &r.Spec.Policy; use.Name != "" {
			p, ok := f.policies[use.Name]
			if !ok {
				return errs.New(errs.NotFound, "no policy")
			}
			v, _ := p.Version(use.Version)
			use.Version, r.Spec.Network, r.Spec.NetworkPolicy = v.Number, v.Network, v.NetworkPolicy
		}
		switch {
		case r.Prepared:
			r.Slot = was.Slot
		case len(f.free) == 0:
			return errs.New(errs.Exhausted, "no slot")
		default:
			r.Slot, f.free = f.free[0], f.free[1:]
		}
		f.records[r.ID] = *r
		return nil
	})
}

func (f fakeStore) Put(ctx context.Context, r record.Record, more ...record.Record) error {
	return f.do(ctx, "store.Put "+string(r.State), r.ID, func() error {
		for _, r := range append(more, r) {
			if _, ok := f.records[r.ID]; !ok {
				return errs.New(errs.NotFound, "no sandbox %s", r.ID)
			}
			f.records[r.ID] = r
		}
		return nil
	})
}

func (f fakeStore) Get(ctx context.Context, idOrName string) (r record.Record, ok bool, err error) {
	err = f.do(ctx, "store.Get", idOrName, func() error {
		if r, ok = f.records[idOrName]; ok {
			return nil
		}
		for _, other := range f.records {
			if other.Spec.Name == idOrName && other.State != record.Deleting {
				r, ok = other, true
			}
		}
		return nil
	})
	return r, ok, err
}

func (f fakeStore) Delete(ctx context.Context, id string) error {
	return f.do(ctx, "store.Delete", id, func() error {
		if r, ok := f.records[id]; ok {
			f.free = append(f.free, r.Slot)
		}
		for _, m := range f.records[id].Spec.Volumes {
			if v := f.volumes[m.Claim]; m.Owned && v.Owner == id {
				v.State = record.VolumeDeleting
				if len(f.users(v.ID)) > 1 {
					v.State, v.Owner = record.VolumeReady, ""
				}
				f.volumes[m.Claim] = v
			}
		}
		delete(f.records, id)
		delete(f.things, "vault/"+id)
		f.bad = slices.DeleteFunc(f.bad, func(b string) bool { return b == id })
		return nil
	})
}

func (f fakeStore) List(ctx context.Context) (out []*record.Record, err error) {
	err = f.do(ctx, "store.List", "", func() error {
		for _, r := range f.records {
			out = append(out, &r)
		}
		return nil
	})
	return out, err
}

func (f fakeStore) Unreadable(ctx context.Context) (ids []string, err error) {
	err = f.do(ctx, "store.Unreadable", "", func() error {
		ids = slices.Clone(f.bad)
		return nil
	})
	return ids, err
}

func (f fakeFrozen) PrepareSnapshot(ctx context.Context) error {
	return f.do(ctx, "snapshot.Prepare", "", func() error { return nil })
}

func (f fakeFrozen) TakeSnapshot(ctx context.Context, snap, id string) error {
	return f.do(ctx, "snapshot.make", snap, func() error {
		if !f.things["disk/"+id] {
			return fs.ErrNotExist
		}
		if f.things["process/"+id] && !f.things["frozen/"+id] && !f.still[id] {
			return fmt.Errorf("%s runs while its disk is copied", id)
		}
		f.things["snapshot/"+snap] = true
		return nil
	})
}

func (f fakeFrozen) FinishSnapshot(ctx context.Context, snap, _ string) (int64, error) {
	return 1 << 20, f.do(ctx, "snapshot.Finish", snap, func() error {
		if !f.things["snapshot/"+snap] {
			return fs.ErrNotExist
		}
		return nil
	})
}

func (f fakeFrozen) DeleteSnapshot(ctx context.Context, snap string) error {
	return f.do(ctx, "snapshot.unmake", snap, func() error {
		delete(f.things, "snapshot/"+snap)
		delete(f.things, "memory/"+snap)
		return nil
	})
}

func (f fakeFrozen) ListSnapshots(ctx context.Context) ([]string, error) {
	ids, err := f.list(ctx, "snapshot")
	f.mu.Lock()
	defer f.mu.Unlock()
	for t := range f.things {
		if id, ok := strings.CutPrefix(t, "memory/"); ok && !f.things["snapshot/"+id] {
			ids = append(ids, id)
		}
	}
	return ids, err
}

func (f fakeFrozen) MemoryDir(snap string) (string, error) { return "dir/" + snap, nil }

func (f fakeFrozen) SyncDisk(ctx context.Context, id string) error {
	return f.do(ctx, "disk.Sync", id, func() error {
		f.synced[id] = f.pauses[id] > 0
		return nil
	})
}

func (f fakeFrozen) MakeMemory(ctx context.Context, snap string) (string, error) {
	return "dir/" + snap, f.do(ctx, "memory.make", snap, func() error {
		if f.things["memory/"+snap] {
			return fs.ErrExist
		}
		f.things["memory/"+snap] = true
		return nil
	})
}

func (f fakeFrozen) DeleteMemory(ctx context.Context, of string) error {
	return f.do(ctx, "memory.unmake", of, func() error {
		delete(f.things, "memory/"+of)
		delete(f.images, "dir/"+of)
		return nil
	})
}

func (f fakeFrozen) ListHibernated(ctx context.Context) ([]string, error) {
	ids, err := f.list(ctx, "memory")
	return slices.DeleteFunc(ids, record.IsSnapshotID), err
}

func (f fakeFrozen) FinishMemory(ctx context.Context, snap string) (files []record.MemoryFile, err error) {
	return files, f.do(ctx, "memory.Finish", snap, func() error {
		if !f.images["dir/"+snap] {
			return fs.ErrNotExist
		}
		files = []record.MemoryFile{{Name: "pages", Bytes: 200 << 20}}
		return nil
	})
}

func (f fakeFrozen) CheckMemory(ctx context.Context, snap string, files []record.MemoryFile) error {
	return f.do(ctx, "memory.Check", snap, func() error {
		if !f.things["memory/"+snap] || len(files) != 1 {
			return errs.New(errs.Internal, "the memory image is damaged")
		}
		return nil
	})
}

// Checkpoint lets the guest go on when the daemon dies, because then it is no longer asked.
func (f fakeMemory) Checkpoint(ctx context.Context, id, dir string, still func() error) error {
	err := f.do(ctx, "memory.Still", id, func() error {
		if !f.things["process/"+id] || f.things["frozen/"+id] {
			return fmt.Errorf("%s does not run", id)
		}
		f.still[id] = true
		return nil
	})
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.still, id)
	}()
	if err == nil {
		err = still()
	}
	if err != nil {
		return err
	}
	return f.do(ctx, "memory.Checkpoint", id, func() error {
		f.images[dir] = true
		return nil
	})
}

// Pause and Resume count, and the guest panics as gVisor's does. From when it goes on, the image
// that was made of it in between no longer fits its disk.
func (f fakeMemory) Pause(ctx context.Context, id string) error {
	return f.do(ctx, "memory.Pause", id, func() error {
		if !f.things["process/"+id] || f.things["frozen/"+id] {
			return fmt.Errorf("%s does not answer", id)
		}
		f.pauses[id]++
		return nil
	})
}

func (f fakeMemory) Resume(ctx context.Context, id string) error {
	return f.do(ctx, "memory.Resume", id, func() error {
		switch {
		case !f.things["process/"+id] || f.things["frozen/"+id]:
			return fmt.Errorf("%s does not answer", id)
		case f.pauses[id] == 0:
			f.panics = append(f.panics, id)
			f.die(id)
			return errors.New("the sentry hung up")
		}
		if f.pauses[id]--; f.pauses[id] == 0 {
			delete(f.synced, id) // it may write
			delete(f.images, "dir/"+id)
		}
		return nil
	})
}

func (f fakeMemory) Restore(ctx context.Context, id, dir string, _ record.MemoryNeeds, _ *os.File) (ran bool, err error) {
	err = f.do(ctx, "memory.Restore", id, func() error {
		if !f.images[dir] {
			return fs.ErrNotExist
		}
		if err := (fakeRuntime{f.incarnation, "runsc"}).run(id); err != nil {
			return err
		}
		ran = true
		delete(f.images, "dir/"+id) // its own, after which it writes to its disk
		delete(f.synced, id)
		return nil
	})
	return ran, err
}

func (f fakeMemory) Needs(string) (record.MemoryNeeds, error) {
	return record.MemoryNeeds{Build: "1", CPU: "fast"}, nil
}

func (f fakeMemory) Meets(n record.MemoryNeeds) error {
	if n.Build != "1" {
		return errs.New(errs.Unavailable, "another build")
	}
	return nil
}

func (f fakeFrozen) MoveStraySnapshot(ctx context.Context, snap string) error {
	return f.do(ctx, "snapshot.MoveStray", snap, func() error {
		if f.things["snapshot/"+snap] {
			delete(f.things, "snapshot/"+snap)
			f.strays = append(f.strays, snap)
		}
		return nil
	})
}

func (f fakeStore) PutSnapshot(ctx context.Context, s record.Snapshot) error {
	return f.do(ctx, "store.PutSnapshot "+string(s.State), s.ID, func() error {
		f.snapshots[s.ID] = s
		return nil
	})
}

func (f fakeStore) DeleteSnapshotRecord(ctx context.Context, id string) error {
	return f.do(ctx, "store.DeleteSnapshot", id, func() error {
		delete(f.snapshots, id)
		f.badSnapshots = slices.DeleteFunc(f.badSnapshots, func(b string) bool { return b == id })
		return nil
	})
}

func (f fakeStore) SnapshotRecord(ctx context.Context, id string) (s record.Snapshot, ok bool, err error) {
	err = f.do(ctx, "store.Snapshot", id, func() error {
		s, ok = f.snapshots[id]
		return nil
	})
	return s, ok, err
}

func (f fakeStore) SnapshotRecords(ctx context.Context) (all []record.Snapshot, bad []string, err error) {
	err = f.do(ctx, "store.Snapshots", "", func() error {
		all, bad = slices.Collect(maps.Values(f.snapshots)), slices.Clone(f.badSnapshots)
		return nil
	})
	return all, bad, err
}

func (f fakeVolumes) MakeVolume(ctx context.Context, vol string, _ int64, _ VolumeSeed) error {
	return f.make(ctx, "volume", vol)
}

func (f fakeVolumes) DeleteVolume(ctx context.Context, vol string) error {
	return f.do(ctx, "volume.unmake", vol, func() error {
		if len(f.users(vol)) > 0 {
			return fmt.Errorf("volume %s is deleted under %v", vol, f.users(vol))
		}
		delete(f.things, "volume/"+vol)
		return nil
	})
}

func (f fakeVolumes) VolumeUsage(string) (int64, error) { return 1 << 20, nil }

func (f fakeVolumes) CheckHostPath(m record.VolumeMount) error {
	return f.do(context.Background(), "volume.Check", m.Source, func() error {
		if m.Source != "/lent" {
			return errs.New(errs.Invalid, "not lent")
		}
		return nil
	})
}

func (f fakeVolumes) AttachVolumes(ctx context.Context, id string, _ Attachment) error {
	return f.make(ctx, "volumes", id)
}

func (f fakeVolumes) DetachVolumes(ctx context.Context, id string) error {
	return f.unmake(ctx, "volumes", id)
}

func (f fakeVolumes) ListAttached(ctx context.Context) ([]string, error) {
	return f.list(ctx, "volumes")
}

// users lists who has a volume mounted, with mu held.
func (h *host) users(vol string) (ids []string) {
	for id, r := range h.records {
		if slices.ContainsFunc(r.Spec.Volumes, func(m record.VolumeMount) bool { return m.Volume == vol }) {
			ids = append(ids, id)
		}
	}
	return ids
}

func (f fakeStore) AddVolume(ctx context.Context, v record.Volume) error {
	return f.do(ctx, "store.AddVolume", v.Name, func() error {
		if _, ok := f.volumes[v.Name]; ok {
			return errs.New(errs.Exists, "name")
		}
		f.volumes[v.Name] = v
		return nil
	})
}

func (f fakeStore) VolumeMade(ctx context.Context, name, id string) error {
	return f.do(ctx, "store.VolumeMade", name, func() error {
		v, ok := f.volumes[name]
		if !ok || v.ID != id {
			return errs.New(errs.NotFound, "no volume")
		}
		v.Made = true
		f.volumes[name] = v
		return nil
	})
}

func (f fakeStore) CondemnVolume(ctx context.Context, name string) (v record.Volume, err error) {
	err = f.do(ctx, "store.CondemnVolume", name, func() error {
		var ok bool
		if v, ok = f.volumes[name]; !ok {
			return errs.New(errs.NotFound, "no volume")
		}
		if len(f.users(v.ID)) > 0 {
			return errs.New(errs.WrongState, "in use")
		}
		v.State = record.VolumeDeleting
		f.volumes[name] = v
		return nil
	})
	return v, err
}

func (f fakeStore) ForgetVolume(ctx context.Context, name, id string) error {
	return f.do(ctx, "store.ForgetVolume", name, func() error {
		if f.volumes[name].ID == id {
			delete(f.volumes, name)
		}
		return nil
	})
}

func (f fakeStore) Volumes(ctx context.Context) (all []record.Volume, bad []string, err error) {
	err = f.do(ctx, "store.Volumes", "", func() error {
		all = slices.Collect(maps.Values(f.volumes))
		return nil
	})
	return all, nil, err
}

func (f fakeStore) PutPolicy(ctx context.Context, name string, fixed bool, v record.PolicyVersion) (p, was record.Policy, err error) {
	err = f.do(ctx, "store.PutPolicy", name, func() error {
		ok := false
		was, ok = f.policies[name]
		p = record.Policy{Name: name, Fixed: fixed, Versions: slices.Clone(was.Versions)}
		if !ok || !was.Newest().Same(v) {
			v.Number = len(p.Versions) + 1
			p.Versions = append(p.Versions, v)
		}
		f.policies[name] = p
		return nil
	})
	return p, was, err
}

func (f fakeStore) DeletePolicy(ctx context.Context, name string) error {
	return f.do(ctx, "store.DeletePolicy", name, func() error {
		if _, ok := f.policies[name]; !ok {
			return errs.New(errs.NotFound, "no policy")
		}
		for id, r := range f.records {
			if r.Spec.Policy.Uses(name) && r.State != record.Deleting {
				return errs.New(errs.WrongState, "in use by %s", id)
			}
		}
		delete(f.policies, name)
		return nil
	})
}

func (f fakeStore) Pools(ctx context.Context) (all []record.Pool, err error) {
	err = f.do(ctx, "store.Pools", "", func() error {
		for _, name := range slices.Sorted(maps.Keys(f.pools)) {
			all = append(all, f.pools[name])
		}
		return nil
	})
	return all, err
}

func (f fakeStore) Policy(ctx context.Context, name string) (p record.Policy, ok bool, err error) {
	err = f.do(ctx, "store.Policy", name, func() error {
		p, ok = f.policies[name]
		return nil
	})
	return p, ok, err
}

func (f fakeStore) Policies(ctx context.Context) (all []record.Policy, bad []string, err error) {
	err = f.do(ctx, "store.Policies", "", func() error {
		for _, name := range slices.Sorted(maps.Keys(f.policies)) {
			all = append(all, f.policies[name])
		}
		return nil
	})
	return all, nil, err
}
