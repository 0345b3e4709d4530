// Package oci turns a Config into an OCI runtime spec and keeps it as a bundle.
//
// NewSpec is a pure function: the same Config gives the same spec, for gVisor's
// runsc and for runc. The rights of a sandbox (capabilities, no_new_privs,
// seccomp, masked paths, rlimits, mounts) are decided here and nowhere else.
//
// What surprises: Config has no field for any of that but the level of security, which
// is one of three words. No client request can set a capability, a hook, an annotation, a
// sysctl or a mount, except empty memory and the volumes that pkg/snapshot has attached:
// there is no field to put one into. (Stores and AgentFiles are files that the daemon has
// written.) A property test checks that. What a level changes is one table (differences).
//
// Sources: the OCI runtime spec (github.com/opencontainers/runtime-spec),
// capabilities(7), seccomp(2), kernel fs/coredump.c.
package oci

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/internal/seccomp"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// The runtimes that NewSpec knows.
const (
	Runsc = "runsc"
	Runc  = "runc"
)

// AgentDir is where a sandbox finds the agent: a read-only bind mount of
// Config.AgentDir, so that the agent never comes from a guest's own disk.
const AgentDir = "/opt/opensandbox"

// AgentState is where the agent writes. On a read-only root file system it is
// a bind mount of Config.AgentState.
const AgentState = "/.sandboxd"

// BootIDPath is where a guest reads the boot ID of its machine (random(4)). gVisor draws
// one for each sandbox. On runc it is a read-only bind mount of Config.BootID. That mount
// is the one that libcontainer does not make: it refuses mounts inside /proc.
const BootIDPath = "/proc/sys/kernel/random/boot_id"

// AgentPath is PID 1 of every sandbox.
const AgentPath = AgentDir + "/sandbox-agent"

// OOMScoreAdj is the OOM score that every process of a sandbox starts with: the kernel
// kills guests before any process of the host. A starter with CAP_SYS_RESOURCE
// also sets a floor with it, and only that keeps a guest from lowering its score.
const OOMScoreAdj = 500

// MaxNoFile is the limit of open files where the host allows that many.
const MaxNoFile = 65536

// Config is everything a runtime spec is made from. Paths are host paths,
// absolute. It holds paths, not the packages they come from.
type Config struct {
	ID       string          // of the sandbox
	Hostname string          // inside; empty: ID
	Security record.Security // empty: record.SecurityDefault

	RootFS   string // the mounted root file system
	ReadOnly bool   // mount it read-only
	// AgentState is a directory that only the agent uses, bound to AgentState; empty:
	// none, the agent writes to the root file system.
	AgentState string
	Tmpfs      []Tmpfs // file systems in memory, in order
	Volumes    []Volume
	ShmBytes   int64 // size of /dev/shm; 0: 64 MiB

	NetNS  string // network namespace to join
	UserNS string // runc: user namespace to join, which owns NetNS; empty: the host's. runsc: not used
	// UIDBase is the host id to which UserNS maps 0; it maps instance.UsersPerSlot ids.
	UIDBase uint32
	// CgroupsPath is the cgroup of the runtime's processes, a leaf relative to the
	// cgroup root, for example "/sandboxd-d/<id>/run". It exists already.
	CgroupsPath string

	// Files of the host, bound read-only to the same names in /etc. Empty: the image's
	// own file.
	ResolvConf   string
	Hosts        string
	HostnameFile string
	// BootID is a file of the host, bound read-only to BootIDPath; runc only. Empty: the
	// guest reads the host's boot ID.
	BootID string

	// Stores are mounted over stores of the guest's certificates (pkg/oci/trust). Memory and
	// volumes of the sandbox must be mounted on none of them: runsc sorts all mounts by the
	// length of the path.
	Stores []File
	// AgentFiles are mounted in AgentDir, where Config.AgentDir has a file for each.
	AgentFiles []File

	AgentDir string   // directory that holds sandbox-agent, bound to AgentDir
	Env      []string // of PID 1, KEY=VALUE; seccomp.Variable is left out

	MemoryBytes int64  // memory that the guest sees; enforced by pkg/cgroups
	CPUMillis   int64  // thousandths of a core; enforced by pkg/cgroups. gVisor shows whole CPUs, at least two
	Pids        int64  // runsc: RLIMIT_NPROC, which the sentry enforces; runc: pkg/cgroups
	NoFile      uint64 // RLIMIT_NOFILE; 0: MaxNoFile. More than the starter's own hard limit fails the start
}

// A Tmpfs is a file system in memory, mounted nosuid, nodev, and noexec unless Exec.
type Tmpfs struct {
	Path  string // absolute
	Bytes int64
	Mode  uint32 // of its root
	Exec  bool
}

// A File is a file of the host that is bound read-only over a file of the guest.
type File struct {
	Source string
	Path   string // absolute; of a file that exists, or the runtime makes it in the guest's own layer
}

// A Volume is a directory or file of the host that is bound with all mounts below it:
// nosuid and nodev.
type Volume struct {
	Source   string // only root may be able to change it
	Path     string // absolute
	ReadOnly bool
}

// NewSpec makes the spec of one sandbox for runtime, Runsc or Runc. It panics on any
// other name, and on an unknown level of security: those in requests are checked long
// before.
func NewSpec(runtimeName string, c Config) *specs.Spec {
	return newSpec(runtimeName, runtime.GOARCH, c)
}

func newSpec(name, goarch string, c Config) *specs.Spec {
	if name != Runsc && name != Runc {
		panic(fmt.Sprintf("oci: no runtime %q", name))
	}
	c.Security = cmp.Or(c.Security, record.SecurityDefault)
	if !slices.Contains(record.SecurityLevels, c.Security) {
		panic(fmt.Sprintf("oci: no level of security %q", c.Security))
	}
	if c.Hostname == "" {
		c.Hostname = c.ID
	}
	if c.NoFile == 0 {
		c.NoFile = MaxNoFile
	}
	s := &specs.Spec{
		Version:  "1.0.2", // the newest version that both runtimes fully support
		Hostname: c.Hostname,
		Root:     &specs.Root{Path: c.RootFS, Readonly: c.ReadOnly},
		Process:  process(c),
		Mounts:   mounts(name, c),
		Linux: &specs.Linux{
			CgroupsPath:   c.CgroupsPath,
			MaskedPaths:   maskedPaths,
			ReadonlyPaths: readonlyPaths,
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace},
				{Type: specs.MountNamespace},
				{Type: specs.NetworkNamespace, Path: c.NetNS},
			},
		},
	}
	if name == Runsc {
		runscOnly(s, c)
	} else {
		runcOnly(s, c, goarch)
	}
	for _, d := range differences {
		if d.change != nil && d.of(name, c.Security) {
			d.change(s)
		}
	}
	return weaken(name, s)
}

// process is PID 1: the agent, as guest root.
func process(c Config) *specs.Process {
	score := OOMScoreAdj
	// Three equal sets. Inheritable and ambient stay empty: nothing the agent
	// execs as another user keeps a capability.
	caps := &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities}
	return &specs.Process{
		Args:            []string{AgentPath},
		Cwd:             "/",
		Env:             append([]string{defaultPath}, withoutLevel(c.Env)...),
		Capabilities:    caps,
		NoNewPrivileges: true,
		OOMScoreAdj:     &score,
		Rlimits: []specs.POSIXRlimit{
			// Exactly 1: at any other value, 0 included, a crash pipes guest data into
			// the host's core_pattern helper, which runs as root (fs/coredump.c).
			{Type: "RLIMIT_CORE", Soft: 1, Hard: 1},
			{Type: "RLIMIT_MEMLOCK", Soft: 64 << 10, Hard: 64 << 10},
			{Type: "RLIMIT_NOFILE", Soft: c.NoFile, Hard: c.NoFile},
		},
	}
}

// withoutLevel returns env without the variable that only runcOnly sets.
func withoutLevel(env []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(kv string) bool { return strings.HasPrefix(kv, seccomp.Variable+"=") })
}

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// runscOnly adds settings for gVisor only. The sentry has its own filter: an OCI
// seccomp profile would only run inside it, and a user namespace adds nothing.
func runscOnly(s *specs.Spec, c Config) {
	if c.Pids > 0 {
		n := uint64(c.Pids)
		s.Process.Rlimits = append(s.Process.Rlimits, specs.POSIXRlimit{Type: "RLIMIT_NPROC", Soft: n, Hard: n})
	}
	// Not for any cgroup: runsc is run with --ignore-cgroups. sandboxd's sentry reads
	// MemTotal and the number of CPUs from here (tools/runsc).
	r := &specs.LinuxResources{}
	if c.MemoryBytes > 0 {
		r.Memory = &specs.LinuxMemory{Limit: &c.MemoryBytes}
	}
	if c.CPUMillis > 0 {
		quota, period := c.CPUMillis*100, uint64(100_000)
		r.CPU = &specs.LinuxCPU{Quota: &quota, Period: &period}
	}
	s.Linux.Resources = r
}

// runcOnly adds the walls between a guest and the kernel of the host.
func runcOnly(s *specs.Spec, c Config, goarch string) {
	// pkg/cgroups sets memory, CPU and pids; a second writer would be one too many.
	s.Linux.Resources = &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}}
	s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	if c.UserNS != "" {
		// The mappings are those of the namespace, for readers that cannot look into it
		// cheaply (cmd/sandboxd-runc).
		s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace, Path: c.UserNS})
		ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: c.UIDBase, Size: instance.UsersPerSlot}}
		s.Linux.UIDMappings, s.Linux.GIDMappings = ids, ids
	}
	// The starter's own may be higher, and would let guests take the CPU from the host.
	s.Process.Rlimits = append(s.Process.Rlimits, specs.POSIXRlimit{Type: "RLIMIT_NICE"}, specs.POSIXRlimit{Type: "RLIMIT_RTPRIO"})
	s.Linux.Seccomp = denyList(goarch)
	if c.Security == record.SecurityCompat {
		s.Linux.Seccomp.Syscalls = append(s.Linux.Seccomp.Syscalls, ownFilters()...)
	}
	// PID 1 installs the second filter before it reads anything.
	s.Process.Env = append(s.Process.Env, seccomp.Variable+"="+string(c.Security))
}

// capabilities is Docker's list without NET_RAW, MKNOD and AUDIT_WRITE. SYS_CHROOT
// stays: apt and sshd call chroot, and it is harmless behind pivot_root. ping works
// without NET_RAW through net.ipv4.ping_group_range.
var capabilities = []string{
	"CAP_CHOWN",
	"CAP_DAC_OVERRIDE",
	"CAP_FOWNER",
	"CAP_FSETID",
	"CAP_KILL",
	"CAP_NET_BIND_SERVICE",
	"CAP_SETFCAP",
	"CAP_SETGID",
	"CAP_SETPCAP",
	"CAP_SETUID",
	"CAP_SYS_CHROOT",
}

// maskedPaths is Docker's list and further paths in /proc and /sys that describe the
// host. runsc's /proc is its own; there the list costs nothing.
//
// /proc/pressure also takes triggers from guests, and the kernel needs 10 ms to close
// each of them (synchronize_rcu in psi_trigger_destroy): 20,000 made a process unkillable
// for 3.5 minutes. The paths of block devices have the numbers of diskstats.
var maskedPaths = []string{
	"/proc/acpi",
	"/proc/asound",
	"/proc/config.gz",
	"/proc/diskstats",
	"/proc/interrupts",
	"/proc/kcore",
	"/proc/key-users",
	"/proc/keys",
	"/proc/kpagecount",
	"/proc/kpageflags",
	"/proc/latency_stats",
	"/proc/pressure",
	"/proc/sched_debug",
	"/proc/scsi",
	"/proc/timer_list",
	"/proc/timer_stats",
	"/sys/block",
	"/sys/class/block",
	"/sys/class/dmi",
	"/sys/dev/block",
	"/sys/devices/virtual/block",
	"/sys/devices/virtual/dmi",
	"/sys/devices/virtual/powercap",
	"/sys/firmware",
	"/sys/fs/btrfs",
	"/sys/kernel/notes",
	"/sys/kernel/vmcoreinfo",
}

var readonlyPaths = []string{
	"/proc/bus",
	"/proc/fs",
	"/proc/irq",
	"/proc/sys",
	"/proc/sysrq-trigger",
}
