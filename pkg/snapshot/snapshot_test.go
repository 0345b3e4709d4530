package snapshot_test

import (
	"testing"

	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/snapshot/snapshottest"
)

func TestMain(m *testing.M) { snapshottest.Main(m) }

func TestBtrfsLoop(t *testing.T) { snapshottest.Run(t, snapshot.PoolBtrfsLoop, nil) }

func TestPlain(t *testing.T) { snapshottest.Run(t, snapshot.PoolPlain, nil) }

func attached(c *snapshot.Config) { c.AttachedClones = true }

func TestBtrfsLoopAsLinux61(t *testing.T) { snapshottest.Run(t, snapshot.PoolBtrfsLoop, attached) }

func TestPlainAsLinux61(t *testing.T) { snapshottest.Run(t, snapshot.PoolPlain, attached) }
