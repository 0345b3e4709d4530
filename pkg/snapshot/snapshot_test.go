package snapshot_test

import (
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/snapshottest"
)

func TestMain(m *testing.M) { snapshottest.Main(m) }

func TestBtrfsLoop(t *testing.T) { snapshottest.Run(t, pool.BtrfsLoop, nil) }

func TestPlain(t *testing.T) { snapshottest.Run(t, pool.Plain, nil) }

// As a kernel before 6.7 counts.
func TestBtrfsLoopFullQgroups(t *testing.T) {
	snapshottest.Run(t, pool.BtrfsLoop, func(c *snapshot.Config) { c.FullQgroups = true })
}

func attached(c *snapshot.Config) { c.AttachedClones = true }

func TestBtrfsLoopAsLinux61(t *testing.T) { snapshottest.Run(t, pool.BtrfsLoop, attached) }

func TestPlainAsLinux61(t *testing.T) { snapshottest.Run(t, pool.Plain, attached) }

// On a host whose own disk is btrfs, layers are in one and uppers in another.
func TestOnBtrfs(t *testing.T) {
	host := snapshottest.New(t, pool.BtrfsLoop, func(c *snapshot.Config) { c.PoolBytes = 1 << 30 })
	snapshottest.Run(t, pool.Auto, func(c *snapshot.Config) {
		c.StateDir = filepath.Join(host.Config.StateDir, "pool", "state")
		c.PoolBytes = 256 << 20
	})
}
