package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/confine"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/snapshot/overlay"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// floor is the oldest kernel that the tests run on: Debian 12's.
var floor = version{6, 1}

var kernelChecks = []check{
	{
		name: "kernel", protects: "idmapped overlays and cgroup.kill need it; older ones are not tested", start: true,
		run: func(_ context.Context, h *host) Finding {
			release := strings.TrimSpace(h.read("/proc/sys/kernel/osrelease"))
			v, known := parseVersion(release)
			switch {
			case !known:
				return fail("boot a Linux of at least "+floor.String(), "the release %q of this kernel is not a version", release)
			case v.before(floor):
				return fail("boot a Linux of at least "+floor.String(), "Linux %s is older than %s", release, floor)
			}
			return ok("Linux %s", release)
		},
	},
	{
		name: "kernel-modules", protects: "what needs a module that is not loaded yet",
		run: func(_ context.Context, h *host) Finding {
			if h.read("/proc/modules") == "" {
				return ok("this kernel has no modules")
			}
			dir := "/lib/modules/" + strings.TrimSpace(h.read("/proc/sys/kernel/osrelease"))
			if _, err := os.Stat(h.root + dir); errors.Is(err, fs.ErrNotExist) {
				return warn("reboot", "%s does not exist: another kernel was installed, and this one loads no more modules", dir)
			}
			return ok("%s is there", dir)
		},
	},
	{
		name: "user-namespaces", protects: "guest root has no privileges on the host", root: true,
		run: func(_ context.Context, h *host) Finding {
			base := h.cfg.Instance.UIDBase(0)
			f, err := netns.UserNS(base, 65536)
			if err != nil {
				return fail("sysctl -w user.max_user_namespaces=65536; on Ubuntu see kernel.apparmor_restrict_unprivileged_userns",
					"%v", err)
			}
			f.Close()
			return ok("a test namespace maps 0-65535 to %d-%d", base, base+65535)
		},
	},
	{
		name: "overlay", protects: "root file systems: one copy of a layer for all sandboxes", root: true,
		run: func(_ context.Context, h *host) Finding {
			dir := existing(h.cfg.StateDir)
			users, err := netns.UserNS(0, 65536)
			if err != nil {
				return skipped("needs a user namespace: %v", err)
			}
			defer users.Close()
			how, err := overlay.Probe(dir, users)
			if err != nil {
				f := fail("put state_dir on ext4, xfs or btrfs; modprobe overlay", "%v", err)
				f.modules = []string{"overlay"}
				return f
			}
			return ok("idmapped overlays on %s work, by %s", dir, how)
		},
	},
	{
		name: "cgroups", protects: "limits, and killing all processes of a sandbox", root: true,
		run: func(_ context.Context, h *host) Finding {
			mode, swap, err := cgroups.Probe()
			if err != nil {
				return fail("boot with systemd.unified_cgroup_hierarchy=1, without cgroup_disable=", "%v", err)
			}
			if !swap {
				return warn("boot with swapaccount=1, or swapoff -a", "%s; the kernel does not limit swap: a guest over its memory "+
					"limit may fill the swap", mode)
			}
			for _, option := range []string{"nosocket", "nokmem"} {
				if slices.ContainsFunc(strings.Fields(h.read("/proc/cmdline")), func(word string) bool {
					value, is := strings.CutPrefix(word, "cgroup.memory=")
					return is && slices.Contains(strings.Split(value, ","), option)
				}) {
					return warn("boot without cgroup.memory="+option, "%s; no guest on runc is charged with memory of the kernel that it "+
						"uses: cgroup.memory=%s", mode, option)
				}
			}
			if mode != "unified" {
				return ok("%s: cgroup v1, which does not count memory in TCP and UDP sockets of guests on runc; they have a limit of "+
					"their own, and v2 (systemd.unified_cgroup_hierarchy=1) is better", mode)
			}
			return ok("%s", mode)
		},
	},
	{
		name: "seccomp", protects: "the kernel from a guest on runc: it limits system calls",
		run: func(context.Context, *host) Finding {
			// seccomp(2): SECCOMP_GET_ACTION_AVAIL says whether filters know an action.
			action := uint32(unix.SECCOMP_RET_ERRNO)
			if err := seccompActionAvailable(&action); err != nil {
				return fail("boot a kernel with CONFIG_SECCOMP_FILTER", "seccomp filters: %v", err)
			}
			return ok("the kernel has filters that return errno")
		},
	},
	{
		name: "landlock", protects: "the host from a child that reads an archive, beside its namespaces, mounts and system call filter",
		run: func(context.Context, *host) Finding { return landlock(confine.LandlockVersion()) },
	},
	{
		name: "loop", protects: "the storage pool, which is a file", root: true,
		run: func(ctx context.Context, h *host) Finding {
			if kind := h.pool(); kind != pool.BtrfsLoop {
				return ok("not needed with a pool of kind %s", kind)
			}
			if err := unix.Access("/dev/loop-control", unix.R_OK|unix.W_OK); err != nil {
				f := fail("modprobe loop", "/dev/loop-control: %v", err)
				f.modules = []string{"loop"}
				return f
			}
			return ok("/dev/loop-control exists")
		},
	},
	{
		name: "btrfs", protects: "disks with limits and snapshots", root: true,
		run: func(ctx context.Context, h *host) Finding {
			switch h.pool() {
			case pool.Project:
				return ok("not needed with a pool of kind %s", pool.Project)
			case pool.Plain:
				return warn(`set storage.pool = "auto"`, "the pool is a plain directory: one sandbox can fill the host's disk")
			}
			if strings.Contains(h.read("/proc/filesystems"), "\tbtrfs\n") {
				return ok("the kernel has btrfs")
			}
			if h.command(ctx, "modprobe", "-n", "btrfs") == nil {
				return ok("the kernel loads the module btrfs when needed")
			}
			return fail(`install a kernel with btrfs (Debian: linux-image-amd64), or set storage.pool = "plain", which cannot limit disks`,
				"this kernel has no btrfs")
		},
	},
}

// existing is dir, or the nearest directory above it that exists.
func existing(dir string) string {
	for {
		if fi, err := os.Stat(dir); err == nil && fi.IsDir() || dir == "/" {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

// version is a dotted version; missing numbers are 0.
type version [3]int

func (v version) String() string {
	if v[2] == 0 {
		return fmt.Sprintf("%d.%d", v[0], v[1])
	}
	return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2])
}

func (v version) compare(o version) int { return slices.Compare(v[:], o[:]) }

func (v version) before(o version) bool { return v.compare(o) < 0 }

// parseVersion reads the numbers at the beginning of s, after a "v" if there is one.
func parseVersion(s string) (v version, known bool) {
	s = strings.TrimPrefix(s, "v")
	if end := strings.IndexFunc(s, func(r rune) bool { return r != '.' && (r < '0' || r > '9') }); end >= 0 {
		s = s[:end]
	}
	for i, part := range strings.SplitN(s, ".", 4) {
		n, err := strconv.Atoi(part)
		if i == 3 || err != nil {
			break
		}
		v[i], known = n, i >= 1
	}
	return v, known
}

// landlock says what a version of Landlock means. A kernel without it is as good a host:
// many are built or booted without it.
func landlock(version int) Finding {
	switch {
	case version == 0:
		return ok("this kernel has no Landlock, or it is switched off; nothing depends on it")
	case version < confine.LeastLandlock:
		return ok("this kernel has version %d, which is not used: version %d is needed (Linux 5.19)", version, confine.LeastLandlock)
	}
	return ok("this kernel has version %d", version)
}
