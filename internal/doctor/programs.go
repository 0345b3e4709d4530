package doctor

import (
	"context"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/oci/trust"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

var programChecks = []check{
	{
		name: "root", protects: "namespaces, cgroups and firewall rules, which only root can make", start: true,
		run: func(_ context.Context, h *host) Finding {
			if !h.isRoot {
				return fail("run it as root", "not running as root; only root can make namespaces, cgroups and firewall rules")
			}
			return ok("running as root")
		},
	},
	{
		name: "programs", protects: "the runtime and the agent of every sandbox", start: true,
		run: func(_ context.Context, h *host) Finding {
			var missing []string
			for _, f := range []string{"runsc", "sandboxd-runc", "agent/sandbox-agent"} {
				p := filepath.Join(h.cfg.LibexecDir, f)
				if err := unix.Access(p, unix.X_OK); err != nil {
					missing = append(missing, p+" ("+err.Error()+")")
				}
			}
			if missing != nil {
				return fail("set libexec_dir to the directory of the programs", "cannot be executed: %s", strings.Join(missing, ", "))
			}
			return ok("runsc, sandboxd-runc and sandbox-agent are in %s", h.cfg.LibexecDir)
		},
	},
	{
		name: "agent-files", protects: "sandboxes with inspected hosts, whose authority is mounted on these files",
		run: func(_ context.Context, h *host) Finding {
			var missing []string
			for _, target := range trust.AgentFiles {
				p := filepath.Join(h.cfg.LibexecDir, "agent", filepath.Base(target))
				if fi, err := os.Lstat(p); err != nil || !fi.Mode().IsRegular() {
					missing = append(missing, p)
				}
			}
			if missing != nil {
				return warn("install -m 644 /dev/null "+strings.Join(missing, " && install -m 644 /dev/null "),
					"no regular file: %s; sandboxes with inspected hosts do not start", strings.Join(missing, ", "))
			}
			return ok("the files are in %s", filepath.Join(h.cfg.LibexecDir, "agent"))
		},
	},
	needsProgram("iptables", "iptables", "the firewall of every sandbox", func(*host) bool { return true }),
	needsProgram("mkfs.btrfs", "btrfs-progs", "disks with limits and snapshots", func(h *host) bool {
		return h.pool() == pool.BtrfsLoop || h.cfg.Storage.Device != ""
	}),
	{
		name: "access", protects: "access to the API", root: true,
		run: func(_ context.Context, h *host) Finding {
			if h.cfg.Listen.TCP != "" {
				if _, err := h.cfg.APIKeys(); err != nil {
					return fail("see listen.api_key_file in the configuration", "%v", err)
				}
			}
			g := h.cfg.Listen.SocketGroup
			if _, err := user.LookupGroup(g); err != nil {
				return warn("groupadd --system "+g, "the group %s does not exist: only root may use the socket", g)
			}
			return ok("the socket is for root and group %s", g)
		},
	},
}

func needsProgram(program, pkg, protects string, wanted func(*host) bool) check {
	return check{name: program, protects: protects, start: true, run: func(_ context.Context, h *host) Finding {
		if !wanted(h) {
			return ok("not needed with this configuration")
		}
		path, err := exec.LookPath(program)
		if err != nil {
			return fail("apt-get install "+pkg, "%s is missing", program)
		}
		return ok("%s", path)
	}}
}
