package egress

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/instance"
	"github.com/sandboxd/sandboxd/pkg/egress/conntrack"
)

// Probe makes all that an Engine needs of this kernel: sets, every chain with every
// rule, the queue, and a listing of flows. It works in a network namespace of its own, so
// it affects neither the host nor a running daemon. For each part it returns the error
// that Open would fail with. An error of its own means that it could not try.
func Probe(ctx context.Context, i instance.Instance) (found map[string]error, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Never unlocked: the thread ends here, and its namespace with it.
		runtime.LockOSThread()
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			err = fmt.Errorf("create a network namespace for the probe: %w", err)
			return
		}
		found, err = probe(ctx, i)
	}()
	<-done
	return found, err
}

// The parts that Probe tries.
const (
	ProbeSets   = "ipset"
	ProbeChains = "firewall-rules"
	ProbeQueue  = "nfqueue"
)

// Preconditions: the calling thread is in a network namespace of its own.
func probe(ctx context.Context, i instance.Instance) (map[string]error, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_NETFILTER, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	e := &Engine{cfg: Config{Instance: i}, sets: handle}
	found := map[string]error{ProbeSets: e.createSets()}
	found[ProbeChains] = func() error {
		if found[ProbeSets] != nil {
			return nil // rules that name a set cannot be made without it; the set's error says so
		}
		c, err := newChains(i, i.Pool(), i.Gateway(), slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		if err := c.install(ctx); err != nil {
			return err
		}
		_, err = lock{i, i.Gateway().As4()}.install([]string{"lo"})
		return err
	}()
	found[ProbeQueue] = func() error {
		if err := conntrack.Each(func() {}, func(conntrack.Entry) {}); err != nil {
			return err
		}
		q, err := openQueue(ctx, i.Queue())
		if err != nil {
			return err
		}
		return q.close()
	}()
	return found, nil
}
