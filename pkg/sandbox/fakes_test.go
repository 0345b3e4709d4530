package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"

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
	fakeBundles    struct{ *incarnation }
	fakeRuntime    struct {
		*incarnation
		name string
	}
	fakeAgents struct{ *incarnation }
	fakeStore  struct{ *incarnation }
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

func (f fakeDisks) CreateDisk(ctx context.Context, id string, _ int64) error {
	return f.make(ctx, "disk", id)
}

func (f fakeDisks) DeleteDisk(ctx context.Context, id string) error { return f.unmake(ctx, "disk", id) }
func (f fakeDisks) ListDisks(ctx context.Context) ([]string, error) { return f.list(ctx, "disk") }
func (f fakeDisks) MoveStray(ctx context.Context, id string) error {
	return f.do(ctx, "disk.MoveStray", id, func() error {
		if f.things["disk/"+id] {
			delete(f.things, "disk/"+id)
			f.strays = append(f.strays, id)
		}
		return nil
	})
}

func (f fakeRootfs) Mount(ctx context.Context, id string, _ Mount) error {
	return f.make(ctx, "rootfs", id)
}

func (f fakeRootfs) Unmount(ctx context.Context, id string) error { return f.unmake(ctx, "rootfs", id) }

func (f fakeRootfs) ListMounts(ctx context.Context) ([]string, error) { return f.list(ctx, "rootfs") }

func (f fakeCgroups) Create(ctx context.Context, id string, _ CgroupLimits) error {
	return f.make(ctx, "cgroup", id)
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

func (f fakeCgroups) Freeze(ctx context.Context, id string) error { return f.make(ctx, "frozen", id) }

func (f fakeCgroups) Thaw(ctx context.Context, id string) error {
	return f.do(ctx, "frozen.unmake", id, func() error {
		delete(f.things, "frozen/"+id)
		return nil
	})
}

func (f fakeCgroups) Kill(ctx context.Context, id string) error {
	return f.do(ctx, "cgroup.Kill", id, func() error {
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

func (f fakeNetwork) Gone(ctx context.Context, id string) error {
	return f.do(ctx, "network.Gone", id, func() error { return nil })
}

func (f fakeEgress) Register(ctx context.Context, id string, _ netip.Addr, _ record.Network) error {
	return f.do(ctx, "egress.make", id, func() error {
		f.things["egress/"+id] = true
		f.registered[id] = true
		return nil
	})
}

func (f fakeEgress) Unregister(ctx context.Context, id string) error {
	return f.unmake(ctx, "egress", id)
}

func (f fakeEgress) ListRegistered(ctx context.Context) ([]string, error) {
	return f.list(ctx, "egress")
}

func (f fakeBundles) Write(ctx context.Context, r *record.Record) error {
	return f.make(ctx, "bundle", r.ID)
}

func (f fakeBundles) Remove(ctx context.Context, id string) error { return f.unmake(ctx, "bundle", id) }
func (f fakeBundles) List(ctx context.Context) ([]string, error)  { return f.list(ctx, "bundle") }

func (f fakeRuntime) Start(ctx context.Context, id string, _ *os.File) error {
	return f.do(ctx, f.name+".Start", id, func() error {
		for _, kind := range []string{"namespaces", "disk", "rootfs", "cgroup", "network", "egress", "bundle"} {
			if !f.things[kind+"/"+id] {
				return fmt.Errorf("no %s for %s", kind, id)
			}
		}
		f.things[f.name+"/"+id] = true
		f.things["process/"+id] = true
		f.host.dead[id] = make(chan struct{})
		return nil
	})
}

func (f fakeRuntime) Forget(ctx context.Context, id string) error { return f.unmake(ctx, f.name, id) }
func (f fakeRuntime) List(ctx context.Context) ([]string, error)  { return f.list(ctx, f.name) }

func (f fakeAgents) Bootstrap(r *record.Record) (file *os.File, err error) {
	err = f.do(context.Background(), "agent.Bootstrap", r.ID, func() error {
		file, err = os.Open(os.DevNull)
		return err
	})
	return file, err
}

func (f fakeAgents) Ready(ctx context.Context, r *record.Record) error {
	return f.do(ctx, "agent.Ready", r.ID, func() error {
		if !f.things["process/"+r.ID] {
			return errors.New("connection refused")
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
	return f.do(ctx, "store.Insert", r.ID, func() error {
		for _, other := range f.records {
			if other.Spec.Name != "" && other.Spec.Name == r.Spec.Name && other.State != record.Deleting {
				return errs.New(errs.Exists, "name")
			}
		}
		r.Slot, f.free = f.free[0], f.free[1:]
		f.records[r.ID] = *r
		return nil
	})
}

func (f fakeStore) Put(ctx context.Context, r record.Record) error {
	return f.do(ctx, "store.Put "+string(r.State), r.ID, func() error {
		if _, ok := f.records[r.ID]; !ok {
			return errs.New(errs.NotFound, "no sandbox %s", r.ID)
		}
		f.records[r.ID] = r
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
		delete(f.records, id)
		f.bad = slices.DeleteFunc(f.bad, func(b string) bool { return b == id })
		return nil
	})
}

func (f fakeStore) List(ctx context.Context) (out []record.Record, err error) {
	err = f.do(ctx, "store.List", "", func() error {
		for _, r := range f.records {
			out = append(out, r)
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
