package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/cgroups"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/netns"
	"github.com/sandboxd/sandboxd/pkg/sandbox"
	"github.com/sandboxd/sandboxd/pkg/snapshot"
)

// The mechanisms know nothing of sandboxes; these say so in their types.

type cgroupTree struct{ *cgroups.Tree }

func (t cgroupTree) Create(ctx context.Context, id string, l sandbox.CgroupLimits) error {
	return t.Tree.Create(ctx, id, cgroups.Limits(l))
}

// links is netns, with the flows of an address counted as part of its link.
type links struct {
	*netns.Manager
	flows *egress.Engine
}

// Gone waits until nothing of the sandbox is left at its address.
func (l links) Gone(ctx context.Context, id string) error {
	return errors.Join(l.flows.Gone(ctx, id), l.Manager.Gone(ctx, id))
}

type rootfs struct{ *snapshot.Store }

func (s rootfs) Mount(ctx context.Context, id string, m sandbox.Mount) error {
	return s.Store.Mount(ctx, id, snapshot.Mount(m))
}

var (
	_ sandbox.Cgroups = cgroupTree{}
	_ sandbox.Rootfs  = rootfs{}
	_ sandbox.Network = links{}
	_ sandbox.Disks   = (*snapshot.Store)(nil)
	_ api.Stats       = (*stats)(nil)
)

// stats measures one sandbox.
type stats struct {
	cgroups *cgroups.Tree
	disks   *snapshot.Store
}

// Usage reads the counters of id.
func (s *stats) Usage(_ context.Context, id string) (wire.Usage, error) {
	c, err := s.cgroups.Usage(id)
	if err != nil {
		return wire.Usage{}, err
	}
	u := wire.Usage{
		Time:            time.Now().UTC(),
		MemoryBytes:     int64(c.MemoryBytes),
		MemoryPeakBytes: int64(c.MemoryPeakBytes),
		CPUMicros:       int64(c.CPUMicros),
		Pids:            int64(c.Pids),
		OOMKills:        int64(c.OOMKills),
	}
	u.DiskBytes, _, err = s.disks.Usage(id)
	if err != nil && !errs.Is(err, errs.Unsupported) { // a pool that can not limit does not count
		return wire.Usage{}, err
	}
	// The host's end of the link: what it receives, the sandbox has sent.
	u.TxBytes = counter(id, "rx_bytes")
	u.RxBytes = counter(id, "tx_bytes")
	return u, nil
}

// counter reads a counter of the sandbox's host link; 0 without a link.
func counter(id, name string) (n int64) {
	b, err := os.ReadFile("/sys/class/net/" + netns.Link(id) + "/statistics/" + name)
	if err == nil {
		_, _ = fmt.Sscan(string(b), &n)
	}
	return n
}
