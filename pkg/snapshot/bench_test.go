package snapshot_test

import (
	"crypto/rand"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
	"github.com/sandboxd/sandboxd/pkg/snapshot/pool"
	"github.com/sandboxd/sandboxd/pkg/snapshot/snapshottest"
)

// BenchmarkDisk times what a sandbox's start and end ask of this package: p50
// and p90 in microseconds. SANDBOXD_TEST=root go test -bench Disk -run '^$'
func BenchmarkDisk(b *testing.B) {
	for _, kind := range []string{pool.BtrfsLoop, pool.Plain} {
		for _, how := range []struct {
			name              string
			volatile, linux61 bool
			dirty             int // MiB that the guest wrote
		}{
			{name: "synced"},
			{name: "volatile", volatile: true},
			{name: "synced,dirty", dirty: 20},
			{name: "volatile,dirty", volatile: true, dirty: 20},
			{name: "linux61", volatile: true, linux61: true},
		} {
			b.Run(kind+"/"+how.name, func(b *testing.B) {
				e := snapshottest.New(b, kind, func(c *snapshot.Config) { c.AttachedClones = how.linux61; c.PoolBytes = 2 << 30 })
				ns, err := snapshottest.UserNS(snapshottest.Instance.UIDBase(9))
				fatal(b, err)
				defer ns.Close()
				e.Config.UserNS = func(string) (*os.File, error) {
					return os.Open(filepath.Join("/proc/self/fd", strconv.Itoa(int(ns.Fd()))))
				}
				e.Open(b)
				var times [4][]time.Duration
				for b.Loop() {
					id := record.NewID(snapshottest.Instance)
					limit := int64(1 << 30)
					if !e.Pool.Limits() {
						limit = 0
					}
					lap := time.Now()
					step := func(i int, err error) {
						fatal(b, err)
						times[i] = append(times[i], time.Since(lap))
						lap = time.Now()
					}
					step(0, e.Disks.CreateDisk(b.Context(), id, "", limit))
					step(1, e.Mounts.Mount(b.Context(), id, snapshot.Mount{
						Layers: []string{e.Layer}, OwnUsers: true,
						UIDBase: snapshottest.Instance.UIDBase(9), Volatile: how.volatile,
					}))
					// Beside the mount: host root cannot write through a mapped one.
					buf := make([]byte, how.dirty<<20)
					_, _ = rand.Read(buf)
					fatal(b, os.WriteFile(filepath.Join(e.Config.StateDir, "pool", id, "u/x"), buf, 0o644))
					lap = time.Now()
					step(2, e.Mounts.Unmount(b.Context(), id))
					step(3, e.Disks.DeleteDisk(b.Context(), id))
				}
				for i, name := range []string{"create", "mount", "unmount", "delete"} {
					slices.Sort(times[i])
					b.ReportMetric(float64(times[i][len(times[i])/2].Microseconds()), name+"-p50-µs")
					b.ReportMetric(float64(times[i][len(times[i])*9/10].Microseconds()), name+"-p90-µs")
				}
			})
		}
	}
}

func fatal(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}
