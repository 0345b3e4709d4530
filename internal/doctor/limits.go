package doctor

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/oci"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A setting is a sysctl and the least value that it should have.
type setting struct {
	name string // as sysctl(8) writes it
	want int64
}

func (s setting) path() string { return "/proc/sys/" + strings.ReplaceAll(s.name, ".", "/") }

func (s setting) mend() string { return fmt.Sprintf("sysctl -w %s=%d", s.name, s.want) }

// What one sandbox may need. Measured on idle sandboxes of the image base, five of each
// runtime (Linux 6.18, 21 November 2026): 15 tasks on runc and 31 to 33 on gVisor, 1
// descriptor and 1 watch of the daemon, 2 to 3 mounts, 1 key. Commands and streams need
// more.
const (
	tasksEach  = 64
	filesEach  = 16
	watchEach  = 2
	mountsEach = 4
	ownTasks   = 4096 // of the rest of the host
)

// sysctls are the limits that max_sandboxes may reach; need is what n sandboxes need.
var sysctls = []struct {
	name, protects string
	need           func(n int64) int64
	raise          int64 // the value to set if it is more than the need: a round number that others set
	modules        []string
}{
	{name: "kernel.pid_max", protects: "forks of the whole host", raise: 4194304, // systemd's on 64 bit
		need: func(n int64) int64 { return n*tasksEach + ownTasks }},
	{
		name: "kernel.threads-max", protects: "forks of the whole host",
		need: func(n int64) int64 { return n*tasksEach + ownTasks },
	},
	{
		name: "fs.file-max", protects: "open files of the whole host",
		need: func(n int64) int64 { return n*256 + 65536 },
	},
	{
		name: "fs.inotify.max_user_instances", protects: "noticing when sandboxes end; 64 for each guest", raise: 1024,
		need: func(int64) int64 { return 64 },
	},
	{
		name: "fs.inotify.max_user_watches", protects: "noticing when sandboxes end",
		need: func(n int64) int64 { return n*watchEach + 8192 },
	},
	{
		name: "fs.mount-max", protects: "root file systems, and the mounts of a sandbox's PID 1",
		need: func(n int64) int64 { return n*mountsEach + 1024 },
	},
	{
		name:     "kernel.pty.max",
		protects: "terminals: half as many as processes for each guest on runc, and 1,024 that the kernel keeps for the host",
		// With the default limit of processes; at most NR_UNIX98_PTY_MAX.
		need: func(n int64) int64 { return min(n*oci.Terminals(256+record.AgentTasks)+1024, 1<<20) },
	},
	{
		name: "vm.max_map_count", protects: "memory of large guests on gVisor",
		need: func(int64) int64 { return 65530 },
	}, // the kernel's default; only a lowered value is too low
	// runc gives each sandbox a session keyring, charged to its own user id.
	{
		name: "kernel.keys.maxkeys", protects: "starts on runc",
		need: func(int64) int64 { return 16 },
	},
}

// namespaceSysctls are counted for each user that makes namespaces: on gVisor, root.
var namespaceSysctls = []string{"user", "net", "mnt", "pid", "ipc", "uts", "cgroup"}

func limitChecks() []check {
	checks := []check{nofile}
	for _, s := range sysctls {
		checks = append(checks, check{name: s.name, protects: s.protects, run: func(_ context.Context, h *host) Finding {
			n := int64(h.cfg.Limits.MaxSandboxes)
			return h.atLeast(s.name, s.need(n), max(s.need(n), s.raise), s.modules)
		}})
	}
	checks = append(checks, check{
		name: "namespaces", protects: "namespaces of every sandbox",
		run: func(_ context.Context, h *host) Finding {
			need := 2*int64(h.cfg.Limits.MaxSandboxes) + 64
			for _, kind := range namespaceSysctls {
				if f := h.atLeast("user.max_"+kind+"_namespaces", need, need, nil); f.Status != OK && f.Status != Skipped {
					return f
				}
			}
			return ok("user.max_*_namespaces are enough for %s", h.sandboxes())
		},
	})
	return append(checks, flowTable, neighbours)
}

// flowTable checks the table of conntrack, which is the whole host's: when it is full,
// the host itself cannot connect any more. The need counts a sixteenth of the sandboxes
// at network.max_flows at once, which is no accident any more.
var flowTable = check{
	name: "net.netfilter.nf_conntrack_max", protects: "connections of the whole host",
	run: func(_ context.Context, h *host) Finding {
		need := int64(h.cfg.Limits.MaxSandboxes)*int64(h.cfg.Network.MaxFlows)/16 + 16384
		return h.atLeast("net.netfilter.nf_conntrack_max", need, need, []string{"nf_conntrack"})
	},
}

// sandboxes is how many the configuration allows, in words.
func (h *host) sandboxes() string {
	return errs.Count(h.cfg.Limits.MaxSandboxes, "sandbox", "sandboxes")
}

// atLeast compares a sysctl with the need of max_sandboxes.
func (h *host) atLeast(name string, need, want int64, modules []string) Finding {
	s := setting{name, want}
	text := strings.TrimSpace(h.read(s.path()))
	if text == "" {
		f := skipped("%s does not exist on this host yet", name)
		f.modules = modules
		return f
	}
	is, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return skipped("%s is %q, which is not a number", name, text)
	}
	if is < need {
		f := warn(s.mend(), "%s is %d, and %s (limits.max_sandboxes) may need %d", name, is, h.sandboxes(), need)
		f.sysctl = &s
		return f
	}
	return ok("%d, enough for %s", is, h.sandboxes())
}

// nofile checks the limit of the running daemon or, if none runs, of this process.
var nofile = check{
	name: "nofile", protects: "the daemon's descriptors, and 65536 for each guest",
	run: func(_ context.Context, h *host) Finding {
		need := uint64(max(h.cfg.Limits.MaxSandboxes*filesEach+1024, 65536))
		pid, whose := h.daemon(), "this shell (no daemon runs)"
		if pid != 0 {
			whose = fmt.Sprintf("the daemon, pid %d,", pid)
		}
		var l unix.Rlimit
		if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &l); err != nil {
			return skipped("read the limits of %s: %v", strings.TrimSuffix(whose, ","), err)
		}
		if l.Max < need {
			return warn(fmt.Sprintf("set LimitNOFILE=%d in its unit, or ulimit -Hn %d before sandboxd serve", max(need, 1048576),
				max(need, 1048576)),
				"%s may open %d files, and %s may need %d", whose, l.Max, h.sandboxes(), need)
		}
		return ok("%s may open %d files", whose, l.Max)
	},
}

// daemon is the pid of the daemon that holds the lock of this instance; 0 if none runs
// or the pid is unknown.
func (h *host) daemon() int { return holder(fmt.Sprintf("/run/%s%s.lock", lockPrefix, h.cfg.Instance)) }

// neighbours checks the neighbour table that all networks of a host share. Permanent
// entries, such as those of sandboxes, do not count since Linux 5.0 (neigh_alloc in
// net/core/neighbour.c); the host's own do.
var neighbours = check{
	name: "net.ipv4.neigh.default.gc_thresh3", protects: "the host's own network, next to the links of sandboxes",
	run: func(_ context.Context, h *host) Finding {
		const name = "net.ipv4.neigh.default.gc_thresh3"
		text := h.read(setting{name: name}.path())
		if text == "" {
			return skipped("%s does not exist on this host", name)
		}
		limit, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
		if err != nil {
			return skipped("%s is %q, which is not a number", name, text)
		}
		used := int64(0)
		for line := range strings.Lines(h.read("/proc/net/arp")) {
			// IP address, HW type, Flags (0x2 complete, 0x4 permanent; if_arp.h), …
			if f := strings.Fields(line); len(f) > 3 && f[2] == "0x2" {
				used++
			}
		}
		if used*10 > limit*8 {
			s := setting{name, limit * 4}
			w := warn(s.mend(), "%d of %d neighbour entries are in use: when all are, the host cannot reach new neighbours", used, limit)
			w.sysctl = &s
			return w
		}
		return ok("%d of %d entries in use; those of sandboxes do not count", used, limit)
	},
}
