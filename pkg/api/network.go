package api

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// networkHandlers say what the network refuses a sandbox, and why.
type networkHandlers struct {
	network Network
	offer   *spec.Offer
	agents  gateway.Agents
	gateway *gateway.Gateway
}

// denials answers what was refused. They are in memory, so the list begins anew with the
// daemon.
func (h *networkHandlers) denials(w http.ResponseWriter, _ *http.Request, rec record.Record) error {
	writeJSON(w, http.StatusOK, h.network.Denials(rec.ID))
	return nil
}

// explain answers what the policy makes of a target, without a packet.
func (h *networkHandlers) explain(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	target, err := h.offer.ParseTarget(r.URL.Query().Get("target"))
	if err != nil {
		return err
	}
	why, err := h.network.Explain(r.Context(), &rec, target)
	if err != nil {
		return fmt.Errorf("explain %s for sandbox %s: %w", target, rec.ID, err)
	}
	writeJSON(w, http.StatusOK, why)
	return nil
}

// testLimit is how long a test may take: three steps of 5 s (agent/server), and the way.
const testLimit = 20 * time.Second

// test has the sandbox try to reach a target, and says how far it came. What the agent says
// is the guest's word; what was denied is the daemon's.
func (h *networkHandlers) test(w http.ResponseWriter, r *http.Request, rec record.Record) error {
	target, err := h.offer.ParseTarget(r.URL.Query().Get("target"))
	if err != nil {
		return err
	}
	if target.Proto != "tcp" {
		return errs.New(errs.Unsupported, "target %s: only tcp can be tested, because a server need not answer %s; `sandboxctl "+
			"egress explain` (GET /v1/sandboxes/{id}/network/explain) says what the policy makes of it", target, target.Proto)
	}
	leave, err := h.gateway.Enter(r.Context(), &rec, wire.AgentPort)
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithTimeout(r.Context(), testLimit)
	defer cancel()
	start := time.Now()
	got, can, err := agent.Reach(ctx, h.agents.Transport(&rec), target.Host(), target.Port)
	if err != nil {
		return gateway.Unreachable(fmt.Errorf("test %s: %w", target, err), rec.ID, wire.AgentPort)
	}
	if !can {
		return errs.New(errs.Unsupported, "the agent of sandbox %s is of an older release and cannot test; start the sandbox again, or "+
			"use GET /v1/sandboxes/{id}/network/explain", rec.ID)
	}
	out := wire.NetworkTest{
		Target: target.String(), Reached: got.OK, Step: got.Step, Address: got.Address, Error: got.Error,
		Took: math.Round(float64(time.Since(start).Microseconds())/10) / 100,
	}
	out.Denied = denialOf(h.network.Denials(rec.ID), target, got.Address, start)
	if out.Denied != nil {
		out.Reached = false
	}
	if out.Explanation, err = h.network.Explain(ctx, &rec, target); err != nil {
		return fmt.Errorf("explain %s for sandbox %s: %w", target, rec.ID, err)
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// denialOf is the last denial of a target since a time; nil: there is none. address is the
// one that a name had.
func denialOf(all wire.Denials, t spec.Target, address string, since time.Time) *wire.Denial {
	if t.Name == "" {
		address = t.Addr.String()
	}
	for _, n := range slices.Backward(all.Items) {
		if n.Time.Before(since) {
			return nil
		}
		query := n.Protocol == "dns" && n.Name == t.Name
		named := n.Name == "" || n.Name == t.Name
		if query || named && n.Address == address && n.Port == int(t.Port) {
			return &n
		}
	}
	return nil
}

// noNetwork is the Network of a daemon that has none.
type noNetwork struct{}

func (noNetwork) Denials(string) wire.Denials { return wire.Denials{Items: []wire.Denial{}} }

func (noNetwork) Denied(string) int64 { return 0 }

func (noNetwork) Explain(context.Context, *record.Record, spec.Target) (wire.Explanation, error) {
	return wire.Explanation{}, errs.New(errs.Unsupported, "this daemon was built without network rules")
}
