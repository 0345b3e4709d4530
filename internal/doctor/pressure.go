package doctor

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/pressure"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
)

// diskPressure checks on which rung the pool and the disk of the state directory are (pkg/pressure).
var diskPressure = check{
	name: "disk-pressure", protects: "creates, pulls and snapshots, which a host whose disks are full refuses", root: true,
	run: func(_ context.Context, h *host) Finding {
		spaces := []pressure.Space{{Name: pressure.State, Title: "the disk of the state directory"}}
		dirs := []string{existing(h.cfg.StateDir)}
		if dir := filepath.Join(h.cfg.StateDir, "pool"); h.mounted(dir) {
			spaces, dirs = append(spaces, pressure.Space{Name: pressure.Pool, Title: "the storage pool"}), append(dirs, dir)
		}
		for i := range spaces {
			if err := spaces[i].Stat(dirs[i]); err != nil {
				return skipped("%v", err)
			}
			spaces[i].Broken = pressure.Try(dirs[i])
		}
		return judge(spaces, int64(h.cfg.Storage.Reserve))
	},
}

// judge says on which rung each space is.
func judge(spaces []pressure.Space, reserve int64) Finding {
	for i := range spaces {
		if s := &spaces[i]; s.Broken != nil {
			return fail("dmesg; check the disk, and reboot", "%s: %s", pressure.Failed, s.Change(pressure.Calm, pressure.Failed, reserve))
		}
	}
	if reserve == 0 {
		return ok("storage.reserve is 0, so nothing is refused before a disk is full")
	}
	worst, said := pressure.Calm, []string{}
	for i := range spaces {
		r := spaces[i].Rung(pressure.Calm, reserve)
		worst = max(worst, r)
		said = append(said, fmt.Sprintf("%s: %s", r, spaces[i].Change(pressure.Calm, r, reserve)))
	}
	const mend = "sandboxctl system df; delete sandboxes, snapshots and images that nobody needs, or give sandboxd a larger disk"
	switch detail := strings.Join(said, ". "); worst {
	case pressure.Calm:
		return ok("%s", detail)
	case pressure.Collect:
		return warn(mend, "%s", detail)
	default:
		return fail(mend, "%s", detail)
	}
}

// mounted reports whether the pool is there: one that the daemon mounts is not before its first start.
func (h *host) mounted(dir string) bool {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return false
	}
	switch h.pool() {
	case pool.Btrfs, pool.BtrfsLoop:
		return st.Type == unix.BTRFS_SUPER_MAGIC
	}
	return true
}
