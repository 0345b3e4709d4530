package oci

import (
	"fmt"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// defaultShm is the size of /dev/shm, as docker has it.
const defaultShm = 64 << 20

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
	// An inode costs the kernel about a page: as many as pages, and a few for
	// the small ones.
	sized := func(bytes int64, options ...string) []string {
		return tmpfs(append(options, fmt.Sprintf("size=%dk", bytes>>10), fmt.Sprintf("nr_inodes=%d", max(bytes>>12, 1<<10)))...)
	}
	if c.ShmBytes == 0 {
		c.ShmBytes = defaultShm
	}
	m := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: tmpfs("nosuid", "noexec", "strictatime", "mode=755", "size=64k",
			"nr_inodes=1k")},
		// max: kernel.pty.max is one number for the whole host.
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{
			"nosuid", "noexec", "newinstance", "ptmxmode=0666",
			"mode=0620", "gid=5", "max=1024",
		}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: sized(c.ShmBytes, "nosuid", "noexec", "nodev", "mode=1777")},
		{Destination: "/run", Type: "tmpfs", Source: "tmpfs", Options: tmpfs("nosuid", "noexec", "nodev", "mode=755", "size=16384k",
			"nr_inodes=4k")},
		// Needs a network namespace owned by the container's user namespace, else EPERM.
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
	}
	for _, f := range []struct{ dst, src string }{
		{"/etc/resolv.conf", c.ResolvConf},
		{"/etc/hosts", c.Hosts},
		{"/etc/hostname", c.HostnameFile},
	} {
		if f.src != "" {
			m = append(m, specs.Mount{
				Destination: f.dst, Type: "bind", Source: f.src,
				Options: []string{"bind", "ro", "nosuid", "nodev", "noexec", "rprivate"},
			})
		}
	}
	for _, t := range c.Tmpfs {
		options := []string{"nosuid", "nodev", fmt.Sprintf("mode=%o", t.Mode)}
		if !t.Exec {
			options = append(options, "noexec")
		}
		// Instead of one of ours, as /run, not on top of it.
		m = slices.DeleteFunc(m, func(o specs.Mount) bool { return o.Destination == t.Path })
		m = append(m, specs.Mount{Destination: t.Path, Type: "tmpfs", Source: "tmpfs", Options: sized(t.Bytes, options...)})
	}
	// Nothing of these hides the agent's.
	if c.AgentState != "" {
		m = append(m, specs.Mount{
			Destination: AgentState, Type: "bind", Source: c.AgentState,
			Options: []string{"bind", "nosuid", "nodev", "noexec", "rprivate"},
		})
	}
	m = append(m, specs.Mount{
		Destination: AgentDir, Type: "bind", Source: c.AgentDir,
		Options: []string{"bind", "ro", "nosuid", "nodev", "rprivate"},
	})
	// Last: no other mount point is looked for in what guests may be writing to
	// at this moment. That they hide nothing is checked where they are attached.
	for _, v := range c.Volumes {
		options := []string{"rbind", "nosuid", "nodev", "rprivate"}
		if v.ReadOnly {
			options = append(options, "ro")
		}
		m = append(m, specs.Mount{Destination: v.Path, Type: "bind", Source: v.Source, Options: options})
	}
	return m
}
