//go:build weak

package oci

import (
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/seccomp"
	"github.com/sandboxd/sandboxd/internal/weak"
)

// weaken takes walls down, for test/attacks. Production has none of this: see unweakened.go.
func weaken(name string, s *specs.Spec) *specs.Spec {
	if weak.Off(weak.Caps) {
		all := everything()
		s.Process.Capabilities = &specs.LinuxCapabilities{Bounding: all, Effective: all, Permitted: all}
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
	if weak.Off(weak.Seccomp) || weak.Off(weak.NoNewPrivs) { // PID 1 cannot install the second filter without no_new_privs
		s.Process.Env = append(withoutLevel(s.Process.Env), seccomp.Variable+"="+string(seccomp.Compat))
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
	name, _, _ := strings.Cut(option, "=")
	return slices.Contains([]string{"size", "nr_inodes", "max"}, name)
}

// everything is all capabilities that both runtimes know, in the kernel's order
// (capability.h). A sandbox without a user namespace gets those that this process may pass
// on: the host may lack some.
func everything() (names []string) {
	for number, name := range strings.Fields(known) {
		have, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(number), 0, 0, 0)
		if have == 1 && err == nil || !weak.Off(weak.UserNS) {
			names = append(names, "CAP_"+name)
		}
	}
	return names
}

const known = "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE " +
	"NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT " +
	"SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG " +
	"WAKE_ALARM BLOCK_SUSPEND AUDIT_READ"
