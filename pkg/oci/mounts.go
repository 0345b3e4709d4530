package oci

import "github.com/opencontainers/runtime-spec/specs-go"

// mounts are what stands in a sandbox beside its root file system.
//
// Not mounted: cgroup, because nothing to write to is no release_agent and no
// limit lifted (and 2.5 ms saved), and mqueue, which mq_open(3) does not need.
// /tmp lies on the root file system, i.e. within the disk limit. Missing mount
// points would be made by the runtime, in the guest's own layer: pkg/snapshot's
// scaffold layer holds them all.
func mounts(name string, c Config) []specs.Mount {
	tmpfs := func(options ...string) []string {
		if name == Runsc {
			// The sentry's tmpfs takes size and mode only; memory stops the rest.
			options = options[:len(options)-1]
		}
		return options
	}
	m := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: tmpfs("nosuid", "noexec", "strictatime", "mode=755", "size=64k", "nr_inodes=1k")},
		// max: kernel.pty.max is one number for the whole host.
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5", "max=1024"}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: tmpfs("nosuid", "noexec", "nodev", "mode=1777", "size=65536k", "nr_inodes=16k")},
		{Destination: "/run", Type: "tmpfs", Source: "tmpfs", Options: tmpfs("nosuid", "noexec", "nodev", "mode=755", "size=16384k", "nr_inodes=4k")},
		// Needs a network namespace owned by the container's user namespace, else EPERM.
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
	}
	for _, f := range []struct{ dst, src string }{
		{"/etc/resolv.conf", c.ResolvConf},
		{"/etc/hosts", c.Hosts},
		{"/etc/hostname", c.HostnameFile},
	} {
		if f.src != "" {
			m = append(m, specs.Mount{Destination: f.dst, Type: "bind", Source: f.src, Options: []string{"bind", "ro", "nosuid", "nodev", "noexec", "rprivate"}})
		}
	}
	return append(m, specs.Mount{Destination: AgentDir, Type: "bind", Source: c.AgentDir, Options: []string{"bind", "ro", "nosuid", "nodev", "rprivate"}})
}
