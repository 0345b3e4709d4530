package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/sandboxd/sandboxd/internal/durable"
	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress"
	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

var _ api.Network = network{}

// network says what the egress refuses sandboxes, and why.
type network struct{ *Daemon }

func (n network) Denials(id string) wire.Denials {
	n.egress.Told()
	return n.denials.of(id)
}

func (n network) Denied(id string) int64 {
	n.egress.Told() // else the next command is told what this one was refused
	return n.denials.count(id)
}

func (n network) Explain(_ context.Context, r *record.Record, t spec.Target) (wire.Explanation, error) {
	x, err := n.egress.Explain(r.ID, r.Spec.Network, egress.Target{Name: t.Name, Addr: t.Addr, Port: t.Port, Proto: t.Proto})
	if err != nil {
		return wire.Explanation{}, err
	}
	out := explanationOf(x, t, r.ID)
	if x.Stored {
		out.Note = storedNote(spec.StateOf(r), t)
	}
	return out, nil
}

// storedNote says what an explanation of a sandbox that does not run leaves open.
func storedNote(state string, t spec.Target) string {
	note := "the sandbox is " + state + ": its stored policy answers, and can be changed when it runs"
	if t.Name == "" {
		note += "; which names DNS has answered with this address is not known, so no rule by name is counted"
	}
	return note
}

// explanationOf returns an explanation for a sandbox as an API type.
func explanationOf(x egress.Explanation, t spec.Target, id string) wire.Explanation {
	out := wire.Explanation{Target: t.String(), Verdict: wire.VerdictDeny, Rule: x.Rule, By: egress.ByPolicy, Names: x.Leased}
	byName := ""
	if x.ByName {
		byName = "the name that the client sends decides; if it sends none: "
	}
	switch {
	case x.Resolver:
		out.Verdict, out.By = wire.VerdictAllow, egress.ByDNS
		out.Reason = "port 53 is answered by sandboxd's resolver, whatever server is named: it knows the names that the rules allow, and " +
			"no rule about port 53 changes that"
		return out
	case x.Allowed && x.Rule == policy.Default:
		out.Verdict, out.Reason = wire.VerdictAllow, byName+"no rule matches, and the default is to allow"+decrypted(x)
		return out
	case x.Allowed:
		out.Verdict, out.Reason = wire.VerdictAllow, byName+"by the rule "+x.Rule+decrypted(x)
		return out
	case x.Block:
		out.By = egress.ByBlock
	}
	out.Reason = byName + egress.Denial{By: out.By, Rule: x.Rule}.Reason()
	if t.Name != "" && !x.Resolves {
		out.Reason += ", so the name is not resolved either"
	}
	if !x.Fixed && (t.Name == "" || !hidesName(t.Proto, int(t.Port))) {
		out.Allow = t.Rule()
		out.Command = "sandboxctl egress patch --allow " + out.Allow + " " + id
	} else if !x.Fixed {
		out.Reason += "; no rule by name opens this port, where nobody can see the name, but one by address does"
	}
	return out
}

// decrypted says whether requests to an allowed target are, and why.
func decrypted(x egress.Explanation) string {
	switch {
	case x.Judged && x.Bound:
		return "; requests there are decrypted: the rules decide on each of them, and a credential is bound to this host"
	case x.Judged:
		return "; requests there are decrypted, and the rules decide on each of them"
	case x.Bound:
		return "; requests there are decrypted, because a credential is bound to this host"
	}
	return ""
}

// keepAddresses refuses another address pool while sandboxes have addresses of the old
// one: an address is computed from pool and slot, and stored nowhere else.
func (d *Daemon) keepAddresses(ctx context.Context) error {
	path, now := filepath.Join(d.cfg.StateDir, "address-pool"), d.cfg.Network.Pool.String()
	was, err := os.ReadFile(path)
	if err == nil && string(was) == now {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the address pool of the last start: %w", err)
	}
	all, err := d.store.List(ctx)
	if err != nil {
		return err
	}
	// A prepared slot that a dead daemon left has one too, and is released before it is used.
	all = slices.DeleteFunc(all, func(r *record.Record) bool { return r.State == record.Prepared })
	if len(was) > 0 && len(all) > 0 {
		return fmt.Errorf("network.address_pool was %s and is now %s, but %s of the old pool: set it back, "+
			"delete the sandboxes, and then change it", was, now,
			errs.Count(len(all), "sandbox has an address", "sandboxes have addresses"))
	}
	if err := durable.Write(path, []byte(now), 0o600); err != nil {
		return fmt.Errorf("store the address pool: %w", err)
	}
	return nil
}
