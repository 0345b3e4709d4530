package doctor

import (
	"context"
	"sync"

	"github.com/sandboxd/sandboxd/pkg/egress"
)

// packetChecks share one trial of the packet layer in a network namespace of
// its own.
var packetChecks = []check{
	tried(egress.ProbeSets, "which source address each sandbox may use", "ip_set", "ip_set_hash_netiface"),
	tried(egress.ProbeChains, "default deny for every sandbox", "nf_tables", "nf_conntrack", "xt_set", "xt_mark",
		"xt_hashlimit", "xt_NFQUEUE", "xt_NFLOG"),
	tried(egress.ProbeQueue, "sandboxd's decision about each new flow", "nfnetlink_queue", "nf_conntrack_netlink"),
}

func tried(part, protects string, modules ...string) check {
	mend := "modprobe -a"
	for _, m := range modules {
		mend += " " + m
	}
	return check{name: part, protects: protects, root: true, run: func(ctx context.Context, h *host) Finding {
		found, err := h.packets(ctx)
		if err != nil {
			return skipped("%v", err)
		}
		if err := found[part]; err != nil {
			f := fail(mend, "%v", err)
			f.modules = modules
			return f
		}
		return ok("created and removed in a test network namespace")
	}}
}

// packets runs the trial once for the three checks.
func (h *host) packets(ctx context.Context) (map[string]error, error) {
	h.packetsOnce.Do(func() { h.found, h.foundErr = egress.Probe(ctx, h.cfg.Instance) })
	return h.found, h.foundErr
}

// trial is the result of the one trial.
type trial struct {
	packetsOnce sync.Once
	found       map[string]error
	foundErr    error
}
