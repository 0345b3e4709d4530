package api

import (
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Flows knows what sandboxes sent, received and connected to, also of those that have
// ended. (egress)
type Flows interface {
	Flows(id string) wire.NetworkFlows
	Traffic(id string) wire.NetworkStats
}

// flowHandlers show flow logs.
type flowHandlers struct {
	flows Flows
}

func (h *flowHandlers) list(w http.ResponseWriter, _ *http.Request, rec record.Record) error {
	writeJSON(w, http.StatusOK, h.flows.Flows(rec.ID))
	return nil
}

func (h *flowHandlers) stats(w http.ResponseWriter, _ *http.Request, rec record.Record) error {
	writeJSON(w, http.StatusOK, h.flows.Traffic(rec.ID))
	return nil
}
