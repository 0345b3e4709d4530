package oci

import (
	"fmt"
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Terminals is how many terminals a sandbox with a limit of so many processes may have at once; 0 is no limit. A
// terminal needs processes to be of use.
func Terminals(pids int64) int64 {
	if pids == 0 {
		return maxTerminals
	}
	return min(max(pids/2, 64), maxTerminals)
}

const maxTerminals = 1024

// defaultShm is the size of /dev/shm, as docker has it.
const defaultShm = 64 << 20

// mounts are the mounts of a sandbox beside its root file system.
//
// cgroup and mqueue are not mounted. Without cgroup there is no release_agent to write
// and no limit to lift (and a start takes 2.5 ms less). mq_open(3) does not need mqueue.
// /tmp is on the root file system, i.e. within the disk limit. The runtime would make
// missing mount points in the guest's own layer; pkg/snapshot's scaffold layer has them
// all.
func mounts(name string, c Config) []specs.Mount {
	tmpfs := func(options ...string) []string {
		if name == Runsc {
			// The sentry's tmpfs takes size and mode only; the memory limit bounds the
			// rest.
			options = options[:len(options)-1]
		}
		return options
	}
	// An inode costs the kernel about a page: allow as many as pages, and a few for
	// small sizes.
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
		// max: kernel.pty.max is one number for the whole host, and no cgroup is charged with
		// the 105 KiB that a terminal holds when both its queues are full (Linux 6.18). doctor
		// checks that there are enough for all sandboxes.
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{
			"nosuid", "noexec", "newinstance", "ptmxmode=0666",
			"mode=0620", "gid=5", fmt.Sprintf("max=%d", Terminals(c.Pids)),
		}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: sized(c.ShmBytes, "nosuid", "noexec", "nodev", "mode=1777")},
		{Destination: "/run", Type: "tmpfs", Source: "tmpfs", Options: tmpfs("nosuid", "noexec", "nodev", "mode=755", "size=16384k",
			"nr_inodes=4k")},
		// Needs a network namespace owned by the container's user namespace, else EPERM.
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
	}
	for _, f := range slices.Concat(c.Stores, []File{
		{c.ResolvConf, "/etc/resolv.conf"},
		{c.Hosts, "/etc/hosts"},
		{c.HostnameFile, "/etc/hostname"},
	}) {
		if f.Source != "" {
			m = append(m, f.mount())
		}
	}
	if name == Runc && c.BootID != "" {
		m = append(m, File{c.BootID, BootIDPath}.mount())
	}
	for _, t := range c.Tmpfs {
		options := []string{"nosuid", "nodev", fmt.Sprintf("mode=%o", t.Mode)}
		if !t.Exec {
			options = append(options, "noexec")
		}
		// It replaces one of ours, for example /run, and is not mounted on top.
		m = slices.DeleteFunc(m, func(o specs.Mount) bool { return o.Destination == t.Path })
		m = append(m, specs.Mount{Destination: t.Path, Type: "tmpfs", Source: "tmpfs", Options: sized(t.Bytes, options...)})
	}
	// No later mount may hide the agent's directories.
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
	for _, f := range c.AgentFiles {
		m = append(m, f.mount())
	}
	// Volumes come last: guests may be writing to them now, so no other mount point may
	// be looked up in them. The code that attaches them checks that they hide nothing.
	for _, v := range c.Volumes {
		options := []string{"rbind", "nosuid", "nodev", "rprivate"}
		if v.ReadOnly {
			options = append(options, "ro")
		}
		m = append(m, specs.Mount{Destination: v.Path, Type: "bind", Source: v.Source, Options: options})
	}
	return m
}

// mount is the bind mount of f.
func (f File) mount() specs.Mount {
	return specs.Mount{
		Destination: f.Path, Type: "bind", Source: f.Source,
		Options: []string{"bind", "ro", "nosuid", "nodev", "noexec", "rprivate"},
	}
}
