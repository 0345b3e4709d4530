package doctor

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// aroundChecks check what else runs on the host.
var aroundChecks = []check{
	{
		name: "clock", protects: "timeouts, which use the wall clock",
		run: func(context.Context, *host) Finding {
			// adjtimex(2) without modes only reads.
			var t unix.Timex
			state, err := unix.Adjtimex(&t)
			if err != nil {
				return skipped("adjtimex: %v", err)
			}
			if state == unix.TIME_ERROR || t.Status&unix.STA_UNSYNC != 0 {
				return warn("apt-get install chrony, or timedatectl set-ntp true",
					"no program synchronises the clock: when the clock is set, timeouts shift")
			}
			return ok("synchronised, error at most %d ms", t.Maxerror/1000)
		},
	},
	{
		name: "iptables-family", protects: "the firewall of every sandbox", root: true,
		run: func(ctx context.Context, h *host) Finding {
			name, err := h.output(ctx, "iptables", "-V")
			if err != nil {
				return skipped("iptables -V: %v", err)
			}
			other := "iptables-legacy-save"
			if strings.Contains(name, "legacy") {
				other = "iptables-nft-save"
			}
			rules, err := h.output(ctx, other)
			if err != nil {
				return ok("%s; the other family is not available", strings.TrimSpace(name))
			}
			if drop := decides(rules); drop != "" {
				return warn("move those rules to the family of "+strings.TrimSpace(name)+" (update-alternatives --config iptables)",
					"%s has rules too, such as %q: packets that they drop stay dropped, even if a sandbox may send them",
					strings.TrimSuffix(other, "-save"), drop)
			}
			return ok("%s; the rules of the other family drop nothing", strings.TrimSpace(name))
		},
	},
	firewalld,
	plainNftables,
	{
		name: "docker-ufw", protects: "the order of firewall rules, with sandboxd's first", root: true,
		run: func(_ context.Context, h *host) Finding {
			var others []string
			if h.runs("dockerd") {
				others = append(others, "docker")
			}
			if strings.Contains(h.read("/etc/ufw/ufw.conf"), "ENABLED=yes") {
				others = append(others, "ufw")
			}
			if others == nil {
				return ok("docker and ufw do not run")
			}
			return ok("%s: their rules come after sandboxd's, and sandboxd keeps its own first", strings.Join(others, " and "))
		},
	},
}

// decides returns the first rule or policy of INPUT or FORWARD, in the output of
// iptables-save, that drops packets or sends them to another chain.
func decides(saved string) string {
	for line := range strings.Lines(saved) {
		line = strings.TrimSpace(line)
		for _, chain := range []string{"INPUT", "FORWARD"} {
			if strings.HasPrefix(line, ":"+chain+" DROP") {
				return line
			}
			if strings.HasPrefix(line, "-A "+chain+" ") && !strings.HasSuffix(line, "-j ACCEPT") &&
				!strings.Contains(line, "-j SANDBOXD-") {
				return line
			}
		}
	}
	return ""
}

// runs reports whether a process of that name runs.
func (h *host) runs(name string) bool {
	found, _ := filepath.Glob(h.root + "/proc/[0-9]*/comm")
	for _, p := range found {
		if strings.TrimSpace(h.read(strings.TrimPrefix(p, h.root))) == name {
			return true
		}
	}
	return false
}

func (h *host) command(ctx context.Context, argv ...string) error {
	_, err := h.output(ctx, argv...)
	return err
}

func (h *host) output(ctx context.Context, argv ...string) (string, error) {
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).Output()
	return string(out), err
}

func seccompActionAvailable(action *uint32) error {
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_GET_ACTION_AVAIL, 0, uintptr(unsafe.Pointer(action)))
	if errno != 0 {
		return errno
	}
	return nil
}
