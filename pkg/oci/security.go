package oci

import (
	"slices"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A difference is one thing in which a level of security differs from the default.
type difference struct {
	level   record.Security
	runtime string            // Runsc or Runc; empty: both
	text    string            // for people
	change  func(*specs.Spec) // nil: another package does it, and says so beside
}

func (d difference) of(runtime string, level record.Security) bool {
	return d.level == level && (d.runtime == "" || d.runtime == runtime)
}

// Differences says, for people, how a level differs from the default on a runtime. For
// the default it is nil.
func Differences(runtime string, level record.Security) (texts []string) {
	for _, d := range differences {
		if d.of(runtime, level) {
			texts = append(texts, d.text)
		}
	}
	return texts
}

// differences is all that levels change.
//
// Strict takes what a program that computes and reads and writes files can do without.
// Compat gives what programs of docker's images expect and what the default refuses: an
// administrator has to allow it (security.levels).
var differences = []difference{
	{
		// No file gets capabilities that count later, in an image made of it, a file that is
		// written loses its setuid bits, and no process changes its own set of capabilities.
		// chroot(2) is half of many escapes.
		level: record.SecurityStrict, text: "no capabilities FSETID, SETFCAP, SETPCAP and SYS_CHROOT: apt and sshd do not work",
		change: func(s *specs.Spec) {
			few := slices.DeleteFunc(slices.Clone(capabilities), func(c string) bool { return slices.Contains(notStrict, c) })
			s.Process.Capabilities = &specs.LinuxCapabilities{Bounding: few, Effective: few, Permitted: few}
		},
	},
	{
		// A volume outlives its sandbox, and others mount it.
		level: record.SecurityStrict, text: "no program in a volume can be executed",
		change: func(s *specs.Spec) {
			for i, m := range s.Mounts {
				if m.Type == "bind" && m.Options[0] == "rbind" { // a volume
					s.Mounts[i].Options = append(m.Options, "noexec")
				}
			}
		},
	},
	{
		// The second filter refuses them: internal/seccomp has the reasons.
		level: record.SecurityStrict, runtime: Runc,
		text: "no ptrace, personality, mincore, locks of open file descriptions and a few rare system calls: gdb and strace do not work",
	},
	{
		// Without no_new_privs PID 1 installs no second filter: see internal/seccomp.
		level: record.SecurityCompat, runtime: Runc, text: "system calls that no list names reach the kernel",
	},
	{
		// Group 0 sees all processes, because the agent does not have CAP_SYS_PTRACE
		// (proc(5)). subset=pid is not possible: libcontainer's init reads
		// /proc/sys/kernel/cap_last_cap.
		level: record.SecurityStrict, runtime: Runc, text: "/proc shows users outside of group 0 their own processes only",
		change: func(s *specs.Spec) {
			for i, m := range s.Mounts {
				if m.Type == "proc" {
					s.Mounts[i].Options = append(m.Options, "hidepid=2", "gid=0")
				}
			}
		},
	},
	{
		// Every file of sysfs is a function of the kernel or of a driver.
		level: record.SecurityStrict, runtime: Runc, text: "/sys is empty",
		change: func(s *specs.Spec) { s.Linux.MaskedPaths = slices.Concat(s.Linux.MaskedPaths, []string{"/sys"}) },
	},
	{
		// The sentry then opens no files of the host itself: a process of its own does
		// (the gofer), and a sentry that a guest has taken over reaches no others.
		level: record.SecurityStrict, runtime: Runsc, text: "gVisor's sentry opens no files itself (directfs off): file access is slower",
		change: func(s *specs.Spec) { runscFlag(s, "directfs", "false") },
	},
	{
		// The root file system is also mounted without nosuid then (pkg/sandbox).
		level: record.SecurityCompat, text: "programs may gain rights by setuid bits and file capabilities: sudo and su work",
		change: func(s *specs.Spec) { s.Process.NoNewPrivileges = false },
	},
	{
		level: record.SecurityCompat, runtime: Runsc, text: "gVisor honours setuid bits (allow-suid)",
		change: func(s *specs.Spec) { runscFlag(s, "allow-suid", "true") },
	},
}

// notStrict are the capabilities that strict takes.
var notStrict = []string{"CAP_FSETID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_SYS_CHROOT"}

// runscFlag sets a flag of runsc for one sandbox (gVisor's runsc/specutils, FixConfig).
func runscFlag(s *specs.Spec, name, value string) {
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations["dev.gvisor.flag."+name] = value
}
