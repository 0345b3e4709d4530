package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/instance"
)

// A restraint is a sysctl that denies unprivileged processes a feature with which
// attacks on the kernel begin. The seccomp filter denies guests most of these features,
// or guests run in gVisor; restraints are for guests that got past that, and for other
// users of the host. Mend does not set restraints: users who debug or profile may need
// the features.
type restraint struct {
	name        string
	least, most int64 // the range of acceptable values
	set         int64 // the value to set otherwise
	protects    string
	risk        string // the risk of another value
}

// The values are from Linux: Documentation/admin-guide/sysctl/{kernel,vm}.rst,
// Documentation/admin-guide/LSM/Yama.rst and
// Documentation/networking/nf_conntrack-sysctl.rst.
var restraints = []restraint{
	{
		name: "kernel.unprivileged_bpf_disabled", least: 1, most: 2, set: 2, // 1 cannot be undone before the next boot
		protects: "the kernel, behind the seccomp filter of a guest",
		risk:     "any user may load BPF programs, and bugs of the BPF verifier are a known way into the kernel",
	},
	{
		name: "kernel.kptr_restrict", least: 1, most: 2, set: 1,
		protects: "the addresses of the kernel in memory",
		risk:     "/proc, which a guest on runc sees, shows addresses of the kernel: the first step of an exploit",
	},
	{
		name: "kernel.dmesg_restrict", least: 1, most: 1, set: 1,
		protects: "the addresses of the kernel in memory",
		risk:     "any user may read the kernel's log, which shows addresses of the kernel and actions of other users",
	},
	{
		name: "kernel.yama.ptrace_scope", least: 1, most: 3, set: 1,
		protects: "processes of one user from each other: image imports run as the user nobody",
		risk:     "a process may trace every other process of its user, and take control of it",
	},
	{
		name: "vm.unprivileged_userfaultfd", least: 0, most: 0, set: 0,
		protects: "the kernel, behind the seccomp filter of a guest",
		risk:     "any user may pause the kernel in the middle of a copy, and so win race conditions in the kernel",
	},
	// This one is not about attacks, but like the others it may have been set on purpose.
	{
		name: "net.netfilter.nf_conntrack_tcp_loose", least: 1, most: 1, set: 1,
		protects: "open connections of sandboxes, when the conntrack table was flushed or full",
		risk: "a connection that loses its conntrack entry hangs: its packets are invalid then and are dropped, instead of being " +
			"checked again",
	},
}

func hardeningChecks() []check {
	var checks []check
	for _, r := range restraints {
		checks = append(checks, check{
			name: r.name, protects: r.protects,
			run: func(_ context.Context, h *host) Finding { return h.within(r) },
		})
	}
	return append(checks, sentTimes, coreHandler, subordinateIDs, secretsKey, certificates, diskPressure, lastingStates)
}

// within checks that a sysctl is in the range of acceptable values.
func (h *host) within(r restraint) Finding {
	s := setting{r.name, r.set}
	text := strings.TrimSpace(h.read(s.path()))
	if text == "" {
		return skipped("%s does not exist on this host", r.name)
	}
	is, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return skipped("%s is %q, which is not a number", r.name, text)
	}
	if is < r.least || is > r.most {
		return warn(s.mendForGood(), "%s is %d: %s", r.name, is, r.risk)
	}
	return ok("%d", is)
}

// mendForGood is a command for a sysctl that Mend does not keep in sysctlFile: it sets
// the value now and for the next boot.
func (s setting) mendForGood() string {
	return fmt.Sprintf("echo '%s = %d' >>/etc/sysctl.d/99-hardening.conf && %s", s.name, s.want, s.mend())
}

// sentTimes checks the setting that the kernel has for the whole host, or for each network namespace: then sandboxes on
// runc have their own (pkg/netns).
var sentTimes = check{
	name: "net.core.tstamp_allow_data", protects: "the memory of the host from guests on runc", root: true,
	run: func(_ context.Context, h *host) Finding {
		s := setting{"net.core.tstamp_allow_data", 0}
		is := strings.TrimSpace(h.read(s.path()))
		if is == "" || is == "0" {
			return ok("the kernel keeps no message for the time at which it was sent")
		}
		own, err := TimesByNamespace()
		switch {
		case err != nil:
			return skipped("look into a new network namespace: %v", err)
		case own:
			return ok("it is %s for the host; each sandbox has its own, 0", is)
		}
		return warn(s.mendForGood(), "%s is %s for the whole host: a guest on runc may ask for the times of messages that it sent, and "+
			"until it reads them the kernel keeps the messages in memory that no cgroup is charged with (programs with CAP_NET_RAW get "+
			"them whatever it is)", s.name, is)
	},
}

// TimesByNamespace reports whether each network namespace has a net.core.tstamp_allow_data of its own (Linux 6.18 has,
// 6.12 has not).
func TimesByNamespace() (bool, error) {
	type answer struct {
		own bool
		err error
	}
	answers := make(chan answer)
	go func() { // the thread stays locked, and ends with this goroutine
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			_, err = os.Stat("/proc/sys/net/core/tstamp_allow_data")
		}
		answers <- answer{err == nil, err}
	}()
	a := <-answers
	if errors.Is(a.err, fs.ErrNotExist) {
		return false, nil
	}
	return a.own, a.err
}

// coreHandler checks the program that the kernel starts, as root of the host, for the
// core dump of each crashed process. Sandboxes have the one core size limit at which
// the kernel starts none (pkg/oci); other processes of the host do not.
var coreHandler = check{
	name: "kernel.core_pipe_limit", protects: "the host from a flood of crash handlers",
	run: func(_ context.Context, h *host) Finding {
		const name = "kernel.core_pipe_limit"
		pattern := strings.TrimSpace(h.read("/proc/sys/kernel/core_pattern"))
		program, piped := strings.CutPrefix(pattern, "|")
		if !piped {
			return ok("crashes start no program (kernel.core_pattern is %q)", pattern)
		}
		program, _, _ = strings.Cut(program, " ")
		limit := strings.TrimSpace(h.read(setting{name: name}.path()))
		switch limit {
		case "":
			return skipped("%s does not exist on this host", name)
		case "0": // core(5): no limit, and the kernel does not wait for them
			s := setting{name, 16} // systemd's value, in its 50-coredump.conf
			return warn(s.mendForGood(), "each crash on this host starts %s as root, without a limit (%s is 0); crashes of guests "+
				"start none", program, name)
		}
		return ok("crashes start %s, at most %s at once; crashes of guests start none", program, limit)
	},
}

// subordinateIDs checks that no user of the host may become a user of a guest. On runc,
// users of guests are ids of the host; newuidmap(1) lends ids to users by these files.
var subordinateIDs = check{
	name: "subordinate-ids", protects: "processes and files of guests on runc, from users of this host",
	run: func(_ context.Context, h *host) Finding {
		const helper = "/usr/bin/newuidmap"
		if h.read(helper) == "" {
			return ok("nobody can use the ids of /etc/subuid: there is no %s", helper)
		}
		first := uint64(h.cfg.Instance.UIDBase(0))
		last := first + 65536*instance.MaxSlots - 1
		var lent []string
		for _, file := range []string{"/etc/subuid", "/etc/subgid"} { // subuid(5): USER:FIRST:COUNT
			for line := range strings.Lines(h.read(file)) {
				f := strings.Split(strings.TrimSpace(line), ":")
				if len(f) != 3 || f[0] == "root" || f[0] == "0" {
					continue
				}
				from, err1 := strconv.ParseUint(f[1], 10, 32)
				count, err2 := strconv.ParseUint(f[2], 10, 32)
				if err1 == nil && err2 == nil && count > 0 && from <= last && from+count > first {
					lent = append(lent, fmt.Sprintf("%s (%s, %d-%d)", f[0], file, from, from+count-1))
				}
			}
		}
		if lent == nil {
			return ok("no user may use the ids of sandboxes, %d-%d", first, last)
		}
		return warn(fmt.Sprintf("give these users ids outside of %d-%d, by usermod --del-subuids, --add-subuids, --del-subgids and "+
			"--add-subgids; their own containers must be made anew", first, last),
			"ids of sandboxes are also lent to users of this host, who may so signal processes of guests and reach their files: %s",
			strings.Join(lent, ", "))
	},
}
