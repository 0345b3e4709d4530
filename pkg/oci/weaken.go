//go:build weak

package oci

import (
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/internal/weak"
)

// weaken takes walls down, for test/attacks. Production has none of this: see unweakened.go.
func weaken(name string, s *specs.Spec) *specs.Spec {
	if weak.Off(weak.Caps) {
		all := &specs.LinuxCapabilities{Bounding: everything, Effective: everything, Permitted: everything}
		s.Process.Capabilities = all
	}
	if weak.Off(weak.Pids) {
		s.Process.Rlimits = slices.DeleteFunc(s.Process.Rlimits, func(r specs.POSIXRlimit) bool { return r.Type == "RLIMIT_NPROC" })
	}
	if weak.Off(weak.Tmpfs) {
		for i, m := range s.Mounts {
			s.Mounts[i].Options = slices.DeleteFunc(slices.Clone(m.Options), limitsTmpfs)
		}
	}
	if name != Runc {
		return s
	}
	if weak.Off(weak.Seccomp) {
		s.Linux.Seccomp = nil
	}
	if weak.Off(weak.NoNewPrivs) {
		s.Process.NoNewPrivileges = false
	}
	if weak.Off(weak.MaskedPaths) {
		s.Linux.MaskedPaths = nil
	}
	if weak.Off(weak.Devices) {
		s.Linux.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
	}
	if weak.Off(weak.BootID) {
		s.Mounts = slices.DeleteFunc(s.Mounts, func(m specs.Mount) bool { return m.Destination == BootIDPath })
	}
	if weak.Off(weak.ReadOnlyPaths) {
		s.Linux.ReadonlyPaths = nil
		for i, m := range s.Mounts {
			if m.Destination == "/sys" || m.Destination == AgentDir {
				s.Mounts[i].Options = slices.DeleteFunc(slices.Clone(m.Options), func(o string) bool { return o == "ro" })
			}
		}
	}
	return s
}

// limitsTmpfs reports whether a mount option limits a file system in memory.
func limitsTmpfs(option string) bool {
	for _, prefix := range []string{"size=", "nr_inodes=", "max="} {
		if len(option) > len(prefix) && option[:len(prefix)] == prefix {
			return true
		}
	}
	return false
}

// everything is all capabilities that both runtimes know.
var everything = []string{
	"CAP_AUDIT_CONTROL", "CAP_AUDIT_READ", "CAP_AUDIT_WRITE", "CAP_BLOCK_SUSPEND", "CAP_CHOWN", "CAP_DAC_OVERRIDE",
	"CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_KILL", "CAP_LEASE",
	"CAP_LINUX_IMMUTABLE", "CAP_MAC_ADMIN", "CAP_MAC_OVERRIDE", "CAP_MKNOD", "CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE",
	"CAP_NET_BROADCAST", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_ADMIN",
	"CAP_SYS_BOOT", "CAP_SYS_CHROOT", "CAP_SYSLOG", "CAP_SYS_MODULE", "CAP_SYS_NICE", "CAP_SYS_PACCT", "CAP_SYS_PTRACE",
	"CAP_SYS_RAWIO", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_WAKE_ALARM",
}
