package sandbox

import (
	"context"
	"net/netip"
	"os"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// What the Manager needs of its neighbours, and no more. The concrete types
// live in the packages named; internal/daemon adapts them; tests put one fake
// host behind all of these.
//
// Every making verb may find its work half done or done, and may be cancelled
// half way. Every unmaking verb succeeds when there is nothing to unmake, and
// needs nothing but the ID. Every List returns the IDs that hold one, and may
// return what is no ID at all: the Manager sorts that out. All of them give up
// when their context ends. Records are read, never written.
type (
	// Namespaces makes the user and network namespace of a sandbox. (netns)
	Namespaces interface {
		CreateNamespaces(ctx context.Context, id string, ownUsers bool, uidBase uint32) error
		DeleteNamespaces(ctx context.Context, id string) error
		ListNamespaces(ctx context.Context) ([]string, error)
	}
	// Disks keeps the writable layer of a sandbox, on the storage pool. (snapshot)
	Disks interface {
		CreateDisk(ctx context.Context, id string, bytes int64) error
		DeleteDisk(ctx context.Context, id string) error
		ListDisks(ctx context.Context) ([]string, error)
		// MoveStray puts a disk without a record into lost+found for 24 h.
		MoveStray(ctx context.Context, id string) error
	}
	// Rootfs mounts image layers and disk as one tree. (snapshot)
	Rootfs interface {
		Mount(ctx context.Context, id string, m Mount) error
		Unmount(ctx context.Context, id string) error
		ListMounts(ctx context.Context) ([]string, error)
	}
	// Cgroups limits, counts, freezes and kills. (cgroups)
	Cgroups interface {
		Create(ctx context.Context, id string, l CgroupLimits) error
		// LimitCPU lets a sandbox use at most millis thousandths of a CPU.
		LimitCPU(ctx context.Context, id string, millis int64) error
		Populated(id string) (bool, error)
		OOMKills(id string) (uint64, error)
		Freeze(ctx context.Context, id string) error
		Thaw(ctx context.Context, id string) error
		Kill(ctx context.Context, id string) error // returns when empty
		Remove(ctx context.Context, id string) error
		List(ctx context.Context) ([]string, error)
		// Watch closes the channel when the last process of id is gone, at once
		// if there is none, or when ctx ends.
		Watch(ctx context.Context, id string) (<-chan struct{}, error)
	}
	// Network links a sandbox to the host. (netns)
	Network interface {
		Attach(ctx context.Context, id string, addr netip.Addr) error
		// Detach cuts a sandbox off. The link itself may go a little later.
		Detach(ctx context.Context, id string) error
		// Gone waits until the link is gone: only then may another sandbox
		// have the address.
		Gone(ctx context.Context, id string) error
		ListLinks(ctx context.Context) ([]string, error)
	}
	// Egress decides what a sandbox may reach. (egress)
	Egress interface {
		Register(ctx context.Context, id string, addr netip.Addr, n record.Network) error
		Unregister(ctx context.Context, id string) error
		ListRegistered(ctx context.Context) ([]string, error)
	}
	// Bundles writes what the runtime starts from. (oci, through internal/daemon)
	Bundles interface {
		Write(ctx context.Context, r *record.Record) error
		Remove(ctx context.Context, id string) error
		List(ctx context.Context) ([]string, error)
	}
	// Runtime starts the sandbox's init in its cgroup leaf and forgets it after
	// its death; killing is the cgroup's. (oci/runsc, oci/runc)
	Runtime interface {
		// Start returns when init runs, or with the runtime's own words why not.
		// stdin becomes PID 1's; Start does not close it.
		Start(ctx context.Context, id string, stdin *os.File) error
		Forget(ctx context.Context, id string) error
		List(ctx context.Context) ([]string, error)
	}
	// Agents speaks to PID 1 of a sandbox. (agent)
	Agents interface {
		// Bootstrap returns a file that reads as the one JSON line PID 1 wants on stdin.
		Bootstrap(r *record.Record) (*os.File, error)
		// Ready blocks until the agent answers, or ctx ends.
		Ready(ctx context.Context, r *record.Record) error
		// Obituary reads what a dead agent left on its disk: exit code of the
		// entrypoint, whether a signal did it, last output. ok is false when it left nothing.
		Obituary(ctx context.Context, id string) (o Obituary, ok bool)
	}
	// Store persists records. Insert, Put and Delete are durable before they return. (store)
	Store interface {
		// Insert allocates r.Slot, least recently used first, and checks that
		// r.ID and r.Spec.Name are free, in one transaction. A record that is
		// Deleting holds its slot, but no name.
		Insert(ctx context.Context, r *record.Record) error
		Put(ctx context.Context, r record.Record) error
		Get(ctx context.Context, idOrName string) (r record.Record, ok bool, err error)
		Delete(ctx context.Context, id string) error
		List(ctx context.Context) ([]record.Record, error)
		// Unreadable lists the IDs of records that List leaves out because they
		// are damaged. What they hold is nobody's stray.
		Unreadable(ctx context.Context) ([]string, error)
	}
)

// Deps are the neighbours of a Manager. All are needed.
type Deps struct {
	Namespaces Namespaces
	Disks      Disks
	Rootfs     Rootfs
	Cgroups    Cgroups
	Network    Network
	Egress     Egress
	Bundles    Bundles
	Agents     Agents
	Store      Store
	Runtimes   map[string]RuntimeKind // by the name that Spec.Runtime has
}

// RuntimeKind is a runtime and how it wants its surroundings.
type RuntimeKind struct {
	Runtime       Runtime
	OwnUsers      bool  // guest ids are mapped by a user namespace of the sandbox (runc)
	OOMGroup      bool  // losing one process to the OOM killer is losing all (runsc)
	HeadroomBytes int64 // memory of the runtime itself, on top of the guest's
	// HostPids replaces Spec.Pids as the limit of host tasks, if not 0. gVisor
	// keeps Spec.Pids itself; on the host its sentry must always find a task.
	HostPids int64
}

// Mount says how to mount a root file system.
type Mount struct {
	Layers   []string // image layers, lowest first
	OwnUsers bool     // map guest ids with the sandbox's user namespace, else one to one
	UIDBase  uint32   // host id of guest id 0, if OwnUsers
	Volatile bool     // a host crash may lose it
}

// CgroupLimits are the limits of a whole sandbox; zero is unlimited.
type CgroupLimits struct {
	MemoryBytes int64
	Pids        int64
	OOMGroup    bool // one OOM kills all (runsc: a sentry can not lose a part)
	// Head-room of the runtime itself, on top of what the guest is told.
	HeadroomBytes int64
}

// Obituary is what a dead sandbox is remembered by.
type Obituary struct {
	ExitCode   int
	Signal     string // "SIGKILL", or empty
	Message    string // why the entrypoint could not start, or empty; ≤ 1 KiB, hostile
	LastOutput string // ≤ 8 KiB, hostile
}
