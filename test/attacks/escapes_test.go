package attacks_test

import (
	"slices"

	"github.com/sandboxd/sandboxd/internal/weak"
)

// escapes are ways to files of the host and of the agent.
var escapes = []attack{
	// /proc and /sys: opened for writing, never written
	writing("/proc/sys/kernel/core_pattern"), // CVE-2025-31133, 52565, 52881 end here
	writing("/proc/sys/kernel/modprobe"),
	writing("/proc/sys/kernel/panic"),
	writing("/proc/sys/kernel/hostname"),
	writing("/proc/sys/kernel/random/boot_id"),
	writing("/proc/sys/vm/panic_on_oom"),
	writing("/proc/sys/vm/overcommit_memory"),
	writing("/proc/sys/fs/binfmt_misc/register"),
	writing("/proc/sys/fs/suid_dumpable"),
	writing("/proc/sysrq-trigger"),
	writing("/proc/irq/default_smp_affinity"),
	writing("/proc/bus/pci/devices", "EIO"),
	writing("/sys/kernel/uevent_helper"),
	writing("/sys/kernel/mm/transparent_hugepage/enabled"),
	writing("/sys/kernel/mm/ksm/run"),
	writing("/sys/power/state"),
	writing("/sys/fs/cgroup/release_agent"),
	writing("/sys/kernel/debug/sched/features"),
	{
		name: "trigger of pressure", wall: "masked paths: closing one takes the kernel 10 ms",
		run:  []string{"write", "/proc/pressure/cpu", "/proc/pressure/io", "/proc/pressure/memory"},
		held: refused.and("EISDIR"), runc: without(weak.MaskedPaths), needs: exists("/proc/pressure/cpu"),
	},
	{
		name: "many triggers of pressure", wall: "masked paths", run: []string{"pressure", "50"},
		held: refused, runc: without(weak.MaskedPaths), needs: exists("/proc/pressure/cpu"), own: nothing,
	},

	// what tells about the host
	reading("/proc/kcore", without(weak.MaskedPaths, weak.Caps, weak.UserNS)),
	reading("/proc/config.gz", without(weak.MaskedPaths)),
	reading("/proc/diskstats", without(weak.MaskedPaths)),
	reading("/proc/interrupts", without(weak.MaskedPaths)),
	reading("/proc/timer_list", without(weak.MaskedPaths, weak.UserNS)),
	reading("/sys/kernel/notes", without(weak.MaskedPaths)),
	reading("/sys/kernel/vmcoreinfo", without(weak.MaskedPaths)),
	listing("/sys/firmware", without(weak.MaskedPaths)),
	listing("/sys/fs/btrfs", without(weak.MaskedPaths)),
	listing("/sys/block", without(weak.MaskedPaths)),
	listing("/sys/class/block", without(weak.MaskedPaths)),
	listing("/sys/devices/virtual/block", without(weak.MaskedPaths)),
	listing("/proc/pressure", without(weak.MaskedPaths)),
	{
		name: "the host's boot ID", wall: "a boot ID for each start", run: []string{"boot-id", "BOOTID"},
		held: words{"other"}, runc: without(weak.BootID), runsc: unproven("the sentry draws one"),
	},

	// devices
	{
		name: "make a device", wall: "no CAP_MKNOD on the host", run: []string{"mknod", "/dev/shm", "1", "1"},
		held: refused, runc: without(weak.Caps, weak.UserNS), runsc: without(weak.Caps),
	},
	{ // kmsg, for writing: nothing is written
		name: "open a device of the host", wall: "no CAP_MKNOD on the host, the cgroup's list of devices",
		run: []string{"mknod", "/dev", "1", "11", "open"}, held: refused.and("ENXIO"), runc: without(weak.Caps, weak.UserNS, weak.Devices),
	},
	{
		name: "a disk of the host", wall: "/dev is the sandbox's own", run: []string{"write", "/dev/sda", "/dev/vda", "/dev/loop0"},
		held: refused.and("ENXIO"), runc: unproven("no device is there to open"), runsc: unproven("no device is there to open"),
	},
	{
		name: "/dev/kvm", wall: "/dev is the sandbox's own", run: []string{"write", "/dev/kvm"},
		held: refused, runc: unproven("no device is there to open"), runsc: unproven("no device is there to open"),
	},

	// the agent and its program
	{ // CVE-2019-5736
		name: "overwrite a running program", wall: "read-only mount, the user namespace", run: []string{"write", "/proc/1/exe"},
		held: refused.and("ETXTBSY"), runc: unproven("the kernel refuses to write to a program that runs"),
		runsc: unproven("the sentry refuses to write to a program that runs"),
	},
	{
		name: "a file beside the agent", wall: "read-only mount, the user namespace", run: []string{"create", "/opt/opensandbox"},
		held: refused, runc: without(weak.ReadOnlyPaths, weak.UserNS), runsc: unproven("runsc's gofer opens it read-only as well"),
	},
	{
		name: "open the agent's program", wall: "read-only mount, the user namespace",
		run: []string{"write", "/opt/opensandbox/sandbox-agent"}, held: refused.and("ETXTBSY"),
		runc: unproven("the kernel refuses to write to a program that runs"), runsc: unproven("as above"),
	},
	{
		name: "trace the agent as another user", wall: "the kernel's check of users", run: []string{"ptrace", "1"}, uid: nobody,
		held: refused, runc: unproven("guest root may trace its own agent, whose word the daemon does not trust"),
		runsc: unproven("the same"),
	},
	{
		name: "write the agent's memory as another user", wall: "the kernel's check of users",
		run: []string{"write", "/proc/1/mem"}, uid: nobody, held: refused,
		runc: unproven("as tracing the agent"), runsc: unproven("as tracing the agent"),
	},
	{
		name: "take the agent's port", wall: "one listener has a port", run: []string{"bind", "44772"},
		held: words{"EADDRINUSE"}, runc: unproven("a rule of the kernel"), runsc: unproven("a rule of the sentry"),
	},
	{
		name: "the agent's token in its arguments", wall: "it comes by standard input",
		run: []string{"search", "token", "/proc/1/environ", "/proc/1/cmdline"}, held: refused.and("none"),
		runc: unproven("there is no program that shows it"), runsc: unproven("the same"),
	},
	{
		name: "signal a process of the host", wall: "own pid namespace", run: []string{"signal", "PID"},
		held: words{"ESRCH"}, runc: unproven("the agent must be PID 1 of its namespace"), runsc: inSentry,
	},

	// descriptors
	{ // CVE-2024-21626
		name: "leave by an open directory", wall: "each child starts with the descriptors that it needs", run: []string{"reach", "MARKER"},
		held: words{"none"}, runc: without(weak.Descriptors), runsc: inSentry,
	},

	// users
	{
		name: "a setuid program", wall: "no_new_privs, nosuid", run: []string{"setuid", "/tmp"},
		held: words{"uid-65534", "EPERM", "EACCES"}, runc: without(weak.NoNewPrivs, weak.NoSuid), runsc: inSentry,
	},
}

const nobody = 65534

// writing opens a file of the kernel for writing.
func writing(path string, more ...string) attack {
	// gVisor's files are made up: some open, and change the sandbox alone.
	return attack{
		name: "write " + path, wall: "read-only paths, the user namespace", run: []string{"write", path},
		held: refused.and(more...), runc: provable(path), needs: exists(path),
	}
}

// cannotOpen are files that root of a host cannot open for writing, or that not each host has.
var cannotOpen = []string{
	"/proc/bus/pci/devices", "/proc/sys/kernel/random/boot_id", "/sys/fs/cgroup/release_agent", "/sys/kernel/debug/sched/features",
}

// provable: what root of the host itself cannot open proves nothing.
func provable(path string) *proof {
	if slices.Contains(cannotOpen, path) {
		return unproven("it cannot be opened for writing, or is not there, without walls either")
	}
	return without(weak.ReadOnlyPaths, weak.UserNS)
}

func reading(path string, runc *proof) attack {
	return attack{
		name: "read " + path, wall: "masked paths", run: []string{"read", path},
		held: refused.and("empty"), runc: runc, needs: exists(path),
		runsc: unproven("the sentry's /proc and /sys do not have it"),
	}
}

func listing(path string, runc *proof) attack {
	a := reading(path, runc)
	a.name, a.run = "list "+path, []string{"list", path}
	return a
}
