package sandbox

import (
	"context"
	"net/netip"
	"os"
	"time"

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
		// Pinned reports whether the namespaces of id can still be joined.
		Pinned(ctx context.Context, id string) (bool, error)
	}
	// Disks keeps the writable layer of a sandbox, on the storage pool. (snapshot)
	Disks interface {
		// CreateDisk makes an empty disk, or one that begins as a snapshot.
		CreateDisk(ctx context.Context, id, snapshot string, bytes int64) error
		DeleteDisk(ctx context.Context, id string) error
		ListDisks(ctx context.Context) ([]string, error)
		// LimitDisk lets a disk hold at most bytes.
		LimitDisk(ctx context.Context, id string, bytes int64) error
		// Usage returns the bytes a disk holds and its limit, 0 for none. A pool
		// that does not count is errs.Unsupported.
		Usage(id string) (used, limit int64, err error)
		// MoveStray puts a disk without a record into lost+found for 24 h.
		MoveStray(ctx context.Context, id string) error
	}
	// Frozen keeps snapshots of disks, on the storage pool. (snapshot)
	Frozen interface {
		// PrepareSnapshot does beforehand what would make TakeSnapshot slow.
		PrepareSnapshot(ctx context.Context) error
		// SyncDisk makes the disk of a sandbox, which does not change meanwhile, durable.
		SyncDisk(ctx context.Context, id string) error
		// TakeSnapshot copies the disk of a sandbox that does not change meanwhile.
		TakeSnapshot(ctx context.Context, snap, id string) error
		// FinishSnapshot makes it durable and returns what that disk is charged
		// with, 0 if unknown.
		FinishSnapshot(ctx context.Context, snap, id string) (bytes int64, err error)
		// DeleteSnapshot also deletes the memory image.
		DeleteSnapshot(ctx context.Context, snap string) error
		// MakeMemory makes an empty directory for the memory image of a snapshot, or of a sandbox
		// that is to hibernate.
		MakeMemory(ctx context.Context, of string) (dir string, err error)
		// FinishMemory makes the image durable and returns its files.
		FinishMemory(ctx context.Context, of string) ([]record.MemoryFile, error)
		// CheckMemory fails unless the image consists of these files.
		CheckMemory(ctx context.Context, of string, files []record.MemoryFile) error
		// MemoryDir is the directory of an image.
		MemoryDir(of string) (string, error)
		// DeleteMemory removes an image, also half of one.
		DeleteMemory(ctx context.Context, of string) error
		// ListHibernated lists the sandboxes that have an image, or half of one.
		ListHibernated(ctx context.Context) ([]string, error)
		ListSnapshots(ctx context.Context) ([]string, error)
		// MoveStraySnapshot is MoveStray of a snapshot.
		MoveStraySnapshot(ctx context.Context, snap string) error
	}
	// VolumeFiles keeps named volumes on the storage pool, and mounts them and
	// directories of the host for sandboxes. (snapshot)
	VolumeFiles interface {
		// MakeVolume makes a volume of at most bytes, 0 for no limit, that begins
		// as seed. One that is there stays as it is.
		MakeVolume(ctx context.Context, vol string, bytes int64, seed VolumeSeed) error
		DeleteVolume(ctx context.Context, vol string) error
		// VolumeUsage returns the bytes in a volume; see Disks.Usage.
		VolumeUsage(vol string) (int64, error)
		// CheckHostPath fails if a path of the host cannot be mounted.
		CheckHostPath(m record.VolumeMount) error
		// AttachVolumes mounts volumes where the runtime takes them from. The root
		// file system is mounted, and nothing runs in it.
		AttachVolumes(ctx context.Context, id string, a Attachment) error
		DetachVolumes(ctx context.Context, id string) error
		ListAttached(ctx context.Context) ([]string, error)
	}
	// Rootfs mounts image layers and disk as one tree. (snapshot)
	Rootfs interface {
		Mount(ctx context.Context, id string, m Mount) error
		Unmount(ctx context.Context, id string) error
		ListMounts(ctx context.Context) ([]string, error)
		// Keep has a disk that was mounted volatile survive a crash of the host: it is unmounted, and
		// was synced when it last changed.
		Keep(ctx context.Context, id string) error
		// Mounted reports whether the root of id is mounted where Mount put it.
		Mounted(ctx context.Context, id string) (bool, error)
	}
	// Cgroups limits, counts, freezes and kills. (cgroups)
	Cgroups interface {
		Create(ctx context.Context, id string, l CgroupLimits) error
		// Limit gives a sandbox that runs other limits than Create did.
		Limit(ctx context.Context, id string, l CgroupLimits) error
		// MemoryHeld is the memory, in bytes, that the kernel could not take
		// from id without killing.
		MemoryHeld(id string) (int64, error)
		// LimitCPU lets a sandbox use at most millis thousandths of a CPU.
		LimitCPU(ctx context.Context, id string, millis int64) error
		Populated(id string) (bool, error)
		OOMKills(id string) (uint64, error)
		// MemoryLimitHit reports whether id ever had all the memory that its limit allows.
		MemoryLimitHit(id string) (bool, error)
		// PidsRefused counts the tasks that id was refused at its limit.
		PidsRefused(id string) (uint64, error)
		Freeze(ctx context.Context, id string) error
		Thaw(ctx context.Context, id string) error
		// Kill kills all processes of id, and returns when there is none left. If all are
		// killed when ctx ends, and the kernel has not ended them, it is ErrLingering.
		Kill(ctx context.Context, id string) error
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
		// Joined reports whether the host reaches addr by the link of id.
		Joined(ctx context.Context, id string, addr netip.Addr) (bool, error)
		// Rejoin has the host do so again. It needs nothing of the sandbox's
		// side, which on gVisor is the sentry's.
		Rejoin(ctx context.Context, id string, addr netip.Addr) error
	}
	// Ports serves ports of a sandbox at addresses of the host, for as long as
	// the daemon lives. (publish)
	Ports interface {
		// Reserve takes the ports before there is a sandbox, all or none: they
		// are errs.Exists if somebody has one.
		Reserve(ctx context.Context, id string, ports []record.Publish) error
		// Open serves the ports, so that connections to them reach the sandbox. Without
		// Reserve it reserves them first. List also names a sandbox without any ports.
		Open(ctx context.Context, id string, addr netip.Addr, ports []record.Publish) error
		// Cut cuts the connections, and the ports stay open.
		Cut(ctx context.Context, id string) error
		Close(ctx context.Context, id string) error
		List(ctx context.Context) ([]string, error)
	}
	// Egress decides what a sandbox may reach. (egress)
	Egress interface {
		// Register puts the policy of r in force, and what is known of its secrets. The caller
		// has locked r.
		Register(ctx context.Context, r *record.Record, addr netip.Addr) error
		Unregister(ctx context.Context, id string) error
		ListRegistered(ctx context.Context) ([]string, error)
	}
	// Bundles writes what the runtime starts from. (oci, through internal/daemon)
	Bundles interface {
		Write(ctx context.Context, r *record.Record) error
		// Trust has the guest of r trust the authority of r: it adds to the bundle what it
		// finds in the mounted root file system. Only for a record with Spec.Inspect.
		Trust(ctx context.Context, r *record.Record) error
		// Rename has a guest that runs read its new hostname in the files of its bundle.
		Rename(ctx context.Context, r *record.Record) error
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
		// MainPID is the process of this host with which id ends.
		MainPID(id string) (pid int, err error)
		// HelperPID is the process of this host without which the main process ends id. It
		// fails with fs.ErrNotExist if the runtime has none.
		HelperPID(id string) (pid int, err error)
	}
	// Agents speaks to PID 1 of a sandbox. (agent)
	Agents interface {
		// Bootstrap returns a file that reads as the one JSON line PID 1 wants on stdin.
		Bootstrap(r *record.Record) (*os.File, error)
		// Ready blocks until the agent answers, or ctx ends.
		Ready(ctx context.Context, r *record.Record) error
		// Adopt makes the agent that answers to token that of r: it takes what Bootstrap would tell
		// it, and from then on answers to r.Token only. It is that of a member of a pool, without
		// an entrypoint, or with copied that of a copied memory, which Adopt first waits for.
		Adopt(ctx context.Context, r *record.Record, token string, copied bool) error
		// Run runs a line with the shell of r for limit at most, and fails if that does. The error
		// is one that a client may read.
		Run(ctx context.Context, r *record.Record, line string, limit time.Duration) error
		// Tell lets the agent of r know its limits, which it reports inside.
		Tell(ctx context.Context, r *record.Record) error
		// Terminate asks the entrypoint of r to end, and returns at once.
		Terminate(ctx context.Context, r *record.Record) error
		// Obituary reads what a dead agent left on its disk: exit code of the
		// entrypoint, whether a signal did it, last output. ok is false when it left nothing.
		Obituary(ctx context.Context, id string) (o Obituary, ok bool)
	}
	// Vaults are the secrets that the daemon puts into requests of sandboxes. (secrets)
	Vaults interface {
		// Copy gives the sandbox to what the sandbox source has, with placeholders of its own. It fails
		// if that has none.
		Copy(ctx context.Context, source, to string) error
		// Drop takes it away again. Store.Delete does so, too.
		Drop(ctx context.Context, id string) error
	}
	// Memory keeps what running sandboxes have in memory. (oci/runsc)
	Memory interface {
		// Checkpoint writes the memory of id into dir, which is empty. Meanwhile its guest
		// stands still, and afterwards it goes on, also after an error and if this daemon dies.
		// It calls still once, while the guest stands still and its disk has all that it wrote.
		Checkpoint(ctx context.Context, id, dir string, still func() error) error
		// Pause stops the guest of id, also while Checkpoint works, until Resume is called as often
		// as Pause was, which is the guest's end if it is called more often.
		Pause(ctx context.Context, id string) error
		Resume(ctx context.Context, id string) error
		// Restore is Runtime.Start from the memory in dir, which needs n. ran is whether the guest may
		// have run, also after an error.
		Restore(ctx context.Context, id, dir string, n record.MemoryNeeds, stdin *os.File) (ran bool, err error)
		// Needs returns what restoring the memory of id needs; Meets fails if this host lacks it.
		Needs(id string) (record.MemoryNeeds, error)
		Meets(n record.MemoryNeeds) error
	}
	// Store persists records. Insert, Put and Delete are durable before they return. (store)
	Store interface {
		// Insert allocates r.Slot, least recently used first, and checks that
		// r.ID and r.Spec.Name are free, in one transaction. A record that is
		// Deleting holds its slot, but no name.
		Insert(ctx context.Context, r *record.Record) error
		// Put replaces records in one transaction; one may have the name that another had.
		Put(ctx context.Context, r record.Record, more ...record.Record) error
		Get(ctx context.Context, idOrName string) (r record.Record, ok bool, err error)
		Delete(ctx context.Context, id string) error
		List(ctx context.Context) ([]*record.Record, error) // newest first; shared, to be read only
		// Unreadable lists the IDs of records that List leaves out because they
		// are damaged. What they hold is nobody's stray.
		Unreadable(ctx context.Context) ([]string, error)

		PutSnapshot(ctx context.Context, s record.Snapshot) error
		DeleteSnapshotRecord(ctx context.Context, id string) error
		SnapshotRecord(ctx context.Context, id string) (s record.Snapshot, ok bool, err error)
		// SnapshotRecords returns all of them, in no order, and the IDs of those
		// that are damaged.
		SnapshotRecords(ctx context.Context) (all []record.Snapshot, unreadable []string, err error)

		// Insert also gives each mount of r the volume of its name, and adds the
		// missing volumes. Delete condemns the volumes that go with a sandbox and that
		// no other sandbox has mounted.

		AddVolume(ctx context.Context, v record.Volume) error
		// VolumeMade notes that the files of a volume are there.
		VolumeMade(ctx context.Context, name, id string) error
		// CondemnVolume sets a volume to deleting if no record of a sandbox names it.
		CondemnVolume(ctx context.Context, name string) (record.Volume, error)
		ForgetVolume(ctx context.Context, name, id string) error
		// Volumes returns all, in no order, and the names of those that are damaged.
		Volumes(ctx context.Context) (all []record.Volume, unreadable []string, err error)

		// Insert also gives r the version of the policy that it names.

		// PutPolicy adds a version to a policy, or makes the policy, and returns it as it is
		// and as it was, without versions if it is new. A version like the newest adds none.
		PutPolicy(ctx context.Context, name string, fixed bool, v record.PolicyVersion) (p, was record.Policy, err error)
		// DeletePolicy removes a policy if no record of a sandbox uses it.
		DeletePolicy(ctx context.Context, name string) error
		// Policy finds a policy that can be read.
		Policy(ctx context.Context, name string) (p record.Policy, ok bool, err error)
		// Policies returns all, by name, and the names of those that are damaged.
		Policies(ctx context.Context) (all []record.Policy, unreadable []string, err error)

		// Insert of a record with a MemberToken takes the member of a pool that has this token.

		// Pools returns all that can be read, by name.
		Pools(ctx context.Context) ([]record.Pool, error)
	}
)

// Deps are the neighbours of a Manager. All are needed.
type Deps struct {
	Namespaces Namespaces
	Disks      Disks
	Frozen     Frozen
	Volumes    VolumeFiles
	Rootfs     Rootfs
	Cgroups    Cgroups
	Network    Network
	Egress     Egress
	Ports      Ports
	Bundles    Bundles
	Agents     Agents
	Vaults     Vaults
	Store      Store
	Runtimes   map[string]RuntimeKind // by the name that Spec.Runtime has
}

// RuntimeKind is a runtime and how it wants its surroundings.
type RuntimeKind struct {
	Runtime       Runtime
	OwnUsers      bool  // guest ids are mapped by a user namespace of the sandbox (runc)
	OOMGroup      bool  // losing one process to the OOM killer is losing all (runsc)
	HeadroomBytes int64 // memory of the runtime itself, on top of the guest's
	// HoldsLink says that it reads packets off the link it started with, and
	// cannot take up another that is put in its place (runsc).
	HoldsLink bool
	// ExitsLikeInit says that its main process is the guest's kernel, which exits as PID 1 of the
	// guest does: with 128+n after signal n (runsc).
	ExitsLikeInit bool
	// HostPids replaces Spec.Pids as the limit of host tasks, if not 0. gVisor
	// keeps Spec.Pids itself; on the host its sentry must always find a task.
	HostPids int64
	// Memory is nil if the runtime cannot keep memory (runc).
	Memory Memory
	// Rename, if not nil, gives a guest that runs another hostname.
	Rename func(ctx context.Context, id, hostname string) error
	// Early, if not nil, is called when a client asks for a sandbox, and makes its start
	// faster. It runs beside what comes before the start.
	Early func()
}

// Mount says how to mount a root file system.
type Mount struct {
	Layers   []string // image layers, lowest first
	OwnUsers bool     // map guest ids with the sandbox's user namespace, else one to one
	UIDBase  uint32   // host id of guest id 0, if OwnUsers
	Volatile bool     // a host crash may lose it
	SetUID   bool     // the setuid and setgid bits of programs in it count, for the sandbox
	RunsOn   bool     // programs that have its files open will run on in it
}

// VolumeSeed is a directory in the mounted root file system of a sandbox that a
// new volume begins as; an empty ID is none.
type VolumeSeed struct {
	ID, Path string
	OwnUsers bool // as in Mount
	UIDBase  uint32
}

// Attachment says which volumes to mount for a sandbox.
type Attachment struct {
	All      []record.VolumeMount
	Memory   []string // where file systems in memory will stand
	NoExec   bool     // no program in a volume can be executed
	OwnUsers bool     // as in Mount
	UIDBase  uint32
}

// CgroupLimits are the limits of a whole sandbox; zero is unlimited.
type CgroupLimits struct {
	MemoryBytes int64
	Pids        int64
	CPUShares   int64 // weight: 2 to 262144; 0 is the default, 1024
	// Bytes and operations in a second, on each disk that its files are on.
	IOReadBps, IOWriteBps, IOReadIOPS, IOWriteIOPS int64
	OOMGroup                                       bool // one OOM kills all (runsc: a sentry cannot lose a part)
	// Head-room of the runtime itself, on top of what the guest is told.
	HeadroomBytes int64
	KeepMemory    bool // Limit leaves that of memory as it is
}

// Obituary is what a dead sandbox is remembered by.
type Obituary struct {
	ExitCode   int
	Signal     string // "SIGKILL", or empty
	Message    string // why the entrypoint could not start, or empty; ≤ 1 KiB, hostile
	Reason     string // what the agent takes for the reason; hostile
	LastOutput string // ≤ 8 KiB, hostile
	Kept       string // without an obituary: the end of what the entrypoint printed; ≤ 8 KiB, hostile
}
