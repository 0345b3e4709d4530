package attacks_test

import (
	"maps"
	"testing"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// nothing changes no sandbox: the attack has one of its own, and is looked at afterwards.
func nothing(*wire.CreateRequest) {}

// limited gives a sandbox other limits, in pairs.
func limited(limits ...string) func(r *wire.CreateRequest) {
	return func(r *wire.CreateRequest) {
		r.ResourceLimits = maps.Clone(r.ResourceLimits)
		for i := 0; i < len(limits); i += 2 {
			r.ResourceLimits[limits[i]] = limits[i+1]
		}
	}
}

// forks starts 150 processes.
var forks = []string{
	"sh", "-c", "i=0; while [ $i -lt 150 ]; do sleep 20 >/dev/null 2>&1 & i=$((i+1)); done; kill $(jobs -p); echo ok $i",
}

// floods take what they can get. Each of them ends, also without its wall.
var floods = []attack{
	{
		name: "processes", wall: "pids of the cgroup, on gVisor of the sentry", run: forks, own: limited("pids", "64"),
		says: "pids_limit", held: words{"EAGAIN"}, runc: without(weak.Pids), runsc: without(weak.Pids),
	},
	{
		name: "threads", wall: "pids of the cgroup", run: []string{"threads", "150"}, own: limited("pids", "64"),
		says: "pids_limit", held: words{"EAGAIN"}, runc: without(weak.Pids),
	},
	{
		name: "memory", wall: "memory of the cgroup", run: []string{"memory", "320"}, own: limited("memory", "128Mi"),
		says: "oom", held: words{"SIGKILL", "gone", "ENOMEM"}, runc: without(weak.Memory), runsc: without(weak.Memory),
	},
	{
		name: "memory by files in memory", wall: "size of /dev/shm", run: []string{"fill", "/dev/shm", "80"}, own: nothing,
		held: words{"ENOSPC"}, runc: without(weak.Tmpfs), runsc: without(weak.Tmpfs),
	},
	{
		name: "the disk", wall: "the quota of the pool", run: []string{"fill", "/var", "96"}, own: limited("disk", "64Mi"),
		says: "disk_full", held: words{"ENOSPC", "EDQUOT"}, runc: without(weak.Disk), runsc: without(weak.Disk),
	},
	{
		name: "inodes of the disk", wall: "the quota of the pool counts metadata", run: []string{"inodes", "/var", "200000"}, all: true,
		own: limited("disk", "32Mi"), held: words{"ENOSPC", "EDQUOT"}, runc: without(weak.Disk),
		runsc: unproven("200,000 files take gVisor minutes"),
	},
	{
		name: "inodes in memory", wall: "inodes of /run", run: []string{"inodes", "/run", "6000"}, own: nothing,
		held: words{"ENOSPC"}, runc: without(weak.Tmpfs),
	},
	{
		name: "inodes of /dev", wall: "inodes of /dev", run: []string{"inodes", "/dev", "2000"}, own: nothing,
		held: words{"ENOSPC"}, runc: without(weak.Tmpfs),
	},
	{
		name: "descriptors", wall: "RLIMIT_NOFILE", run: []string{"files", "70000"}, own: nothing,
		held: words{"EMFILE"}, runc: without(weak.NoFile), runsc: without(weak.NoFile), needs: mayRaiseLimits,
	},
	{
		name: "terminals", wall: "terminals of /dev/pts", run: []string{"terminals", "1100"}, own: nothing,
		held: words{"ENOSPC", "EMFILE"}, runc: without(weak.Tmpfs),
	},
	{
		name: "inotify", wall: "limits of the user namespace", run: []string{"inotify", "100"}, own: nothing,
		held: words{"EMFILE"}, runc: without(weak.UserLimits),
	},
	{
		name: "locks on files", wall: "the watch of the kernel's memory", run: []string{"locks", "700"}, own: limited("memory", "128Mi"),
		says: "kernel_memory", held: words{"SIGKILL", "gone"}, runc: without(weak.KernelMemory),
	},
	unreadMessages("netlink"), unreadMessages("icmp"), unreadMessages("udp-errors"),
	{
		name: "unread streams of TCP", wall: "v1: the watch of the kernel's memory; v2: memory of the cgroup",
		run: []string{"unread-tcp", "240"}, own: limited("memory", "128Mi"), says: "kernel_memory", held: words{"SIGKILL", "gone"},
		runc: without(weak.KernelMemory), needs: chargesNoSockets,
	},
}

// unreadMessages fill a quarter more than the sandbox's memory.
func unreadMessages(kind string) attack {
	return attack{
		name: "unread messages of " + kind, wall: "the watch of the kernel's memory", run: []string{"unread", kind, "160"},
		own:  limited("memory", "128Mi"),
		says: "kernel_memory", held: words{"SIGKILL", "gone"}, runc: without(weak.KernelMemory),
	}
}

// chargesNoSockets reports whether this host has cgroup v1, which charges no sandbox with TCP and UDP by itself.
func chargesNoSockets(t testing.TB) bool {
	return exists("/sys/fs/cgroup/memory/memory.limit_in_bytes")(t)
}
