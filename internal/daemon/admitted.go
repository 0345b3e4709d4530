package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/admission"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/health"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// startBytes is the memory that a sandbox takes to come up. An idle one was
// measured at 17.7 MiB on gVisor and at 1.8 MiB on runc (docs/benchmarks.md);
// this is half as much again, and what the kernel keeps for a namespace with a
// link, a mount and a cgroup.
var startBytes = map[string]int64{oci.Runsc: 28 << 20, oci.Runc: 4 << 20}

// newGate makes what keeps the host from more sandboxes than it has room for.
func (d *Daemon) newGate() *admission.Gate {
	return &admission.Gate{
		Limits: admission.Limits{
			MaxSandboxes:  d.cfg.Limits.MaxSandboxes,
			MemoryReserve: int64(d.cfg.Limits.MemoryReserve),
			DiskReserve:   int64(d.cfg.Storage.Reserve),
		},
		Host: admission.Host{
			Sandboxes:   d.manager.List,
			Deadline:    d.manager.Deadline,
			MemoryBytes: memAvailable,
			Spaces:      d.spaces,
			StartBytes:  func(runtime string) int64 { return startBytes[runtime] },
		},
		Queue:   d.queue,
		Drain:   d.drain,
		Refused: d.metrics.Refused,
	}
}

// memAvailable reads MemAvailable of proc(5), in bytes.
func memAvailable() (int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), "MemAvailable:")
	n, _, ok := strings.Cut(rest, " kB")
	kb, err := strconv.ParseInt(strings.TrimSpace(n), 10, 64)
	if !ok || err != nil {
		return 0, errors.Join(errors.New("/proc/meminfo has no MemAvailable"), err)
	}
	return kb << 10, nil
}

// spaces are the places that sandboxes fill.
func (d *Daemon) spaces() ([]admission.Space, error) {
	pool, _, err := d.files.Pool.Space()
	if err != nil {
		return nil, err
	}
	state, err := stateSpace(d.cfg.StateDir)
	if err != nil {
		return nil, err
	}
	return []admission.Space{
		{Name: "the storage pool", FreeBytes: pool, Remedy: "delete sandboxes, ended ones too (`sandboxctl system df` shows what they " +
			"hold), or make storage.pool_size larger"},
		{Name: "the disk of the state directory", FreeBytes: state.FreeBytes, Remedy: "remove images (`sandboxctl image prune -a`), or " +
			"make room on it"},
	}, nil
}

// stateSpace is the room on the file system of the state directory.
func stateSpace(dir string) (wire.Space, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return wire.Space{}, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return wire.Space{FreeBytes: int64(st.Bavail) * st.Bsize, TotalBytes: int64(st.Blocks) * st.Bsize}, nil
}

var _ api.Sandboxes = (*admitted)(nil)

// admitted is the Manager as the API wants it, behind the host's limits.
type admitted struct {
	*sandbox.Manager
	gate *admission.Gate
	may  func(context.Context) error // why none may be made at all
	made func(ctx context.Context, key string) (record.Made, bool, error)
	pull func(r *record.Record) string // how far its image is
}

// Made says what was made for the key of a request.
func (a *admitted) Made(ctx context.Context, key string) (record.Made, bool, error) {
	return a.made(ctx, key)
}

// Create refuses what the host has no room for.
func (a *admitted) Create(ctx context.Context, s record.Spec) (record.Record, error) {
	if err := a.may(ctx); err != nil {
		return record.Record{}, err
	}
	leave, err := a.gate.Enter(ctx, s.Runtime, 1)
	if err != nil {
		return record.Record{}, err
	}
	defer leave()
	r, err := a.Manager.Create(ctx, s)
	return a.placed(r), err
}

// Start refuses what the host has no room for, and what may no longer have its
// slot for itself.
func (a *admitted) Start(ctx context.Context, idOrName string) (record.Record, error) {
	if err := a.may(ctx); err != nil {
		return record.Record{}, err
	}
	r, err := a.Manager.Get(ctx, idOrName)
	if err != nil {
		return r, err
	}
	leave, err := a.gate.Enter(ctx, r.Spec.Runtime, 0)
	if err != nil {
		return r, err
	}
	defer leave()
	r, err = a.Manager.Start(ctx, r.ID)
	return a.placed(r), err
}

// Get says of a sandbox that waits for its turn where it stands.
func (a *admitted) Get(ctx context.Context, idOrName string) (record.Record, error) {
	r, err := a.Manager.Get(ctx, idOrName)
	return a.placed(r), err
}

// List is Get for all.
func (a *admitted) List(ctx context.Context) ([]*record.Record, error) {
	all, err := a.Manager.List(ctx)
	positions := a.gate.Queue.Positions() // once: it is as long as the queue
	for i, r := range all {
		text := place(positions[r.ID])
		if text == "" && r.State.Beginning() {
			text = a.pull(r)
		}
		if text != "" {
			waits := *r
			waits.Message = text
			all[i] = &waits
		}
	}
	return all, err
}

// placed returns r with the one thing about it that is not durable.
func (a *admitted) placed(r record.Record) record.Record {
	if r.State.Beginning() {
		if r.Message = place(a.gate.Queue.Positions()[r.ID]); r.Message == "" {
			r.Message = a.pull(&r)
		}
	}
	return r
}

func place(position int) string {
	switch position {
	case 0: // its turn has come
		return ""
	case 1:
		return "waiting for 1 creation before it"
	}
	return fmt.Sprintf("waiting for %d creations before it", position)
}

// Steps returns the steps of a creation in the API's words.
func (a *admitted) Steps(id string) (steps []api.Step) {
	for _, s := range a.Manager.Steps(id) {
		steps = append(steps, api.Step(s))
	}
	return steps
}

// Subscribe returns events in the API's words.
func (a *admitted) Subscribe(ctx context.Context) <-chan wire.Event {
	out := make(chan wire.Event)
	in := a.Manager.Subscribe(ctx)
	go func() {
		defer close(out)
		for e := range in {
			select {
			case out <- wire.Event(e):
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

var _ health.Manager = keeper{}

// keeper is the Manager as pkg/health wants it, behind the same limits: what is
// started by its policy takes turns with what somebody asks for.
type keeper struct {
	sandbox.Keeper
	gate *admission.Gate
}

// Restart refuses what the host has no room for; it is tried again.
func (k keeper) Restart(ctx context.Context, id string) error {
	r, err := k.Get(ctx, id)
	if errs.Is(err, errs.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	leave, err := k.gate.Enter(ctx, r.Spec.Runtime, 0)
	if err != nil {
		return err
	}
	leave = sync.OnceFunc(leave)
	defer leave()
	// From its beginning on the gate finds it among the sandboxes.
	return k.Keeper.Restart(admission.By(ctx, "restarts"), id, leave)
}
