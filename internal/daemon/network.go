package daemon

import (
	"context"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

var _ api.Network = network{}

// network says what the egress refuses sandboxes, and why.
type network struct{ *Daemon }

// toldLimit is how long the end of a command waits for denials that are on their way. They
// take microseconds, unless other sandboxes cause so many that some are lost anyway.
const toldLimit = 50 * time.Millisecond

func (n network) Denials(id string) wire.Denials { return n.denials.of(id) }

func (n network) Denied(id string) int64 { return n.denials.count(id) }

func (n network) DeniedSince(id string, before int64) string {
	ctx, cancel := context.WithTimeout(context.Background(), toldLimit)
	defer cancel()
	n.egress.Told(ctx)
	return n.denials.since(id, before)
}

func (n network) Explain(context.Context, *record.Record, spec.Target) (wire.Explanation, error) {
	return wire.Explanation{}, errs.New(errs.Unsupported, "not yet")
}
