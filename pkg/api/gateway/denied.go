package gateway

import (
	"net/http"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// unknownDenials stands for a count of denials that is not needed, or not known.
const unknownDenials = -1

// denials counts what the network has refused a sandbox, if a request to its agent runs
// something.
func (g *Gateway) denials(method, path string, rec *record.Record) int64 {
	if g.cfg.Denials == nil || method != http.MethodPost || !runs(path) {
		return unknownDenials
	}
	return g.cfg.Denials(rec.ID)
}

// denied returns a function that says in a line what was refused after so many denials.
func (g *Gateway) denied(rec *record.Record, before int64) func() string {
	return func() string {
		if before == unknownDenials {
			return ""
		}
		return g.cfg.Denied(rec.ID, before)
	}
}

// setDenials puts the number of denials so far into the answer to a command: a client of
// frames compares it with the number at the end. It always replaces the header, so no agent
// can send a number of its own.
func setDenials(h http.Header, n int64) {
	h.Del(agent.DenialsHeader)
	if n != unknownDenials {
		h.Set(agent.DenialsHeader, strconv.FormatInt(n, 10))
	}
}
