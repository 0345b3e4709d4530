package api

import (
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A route is one row of the table of all that the API serves.
type route struct {
	method string // or "*": every method; HEAD is GET without a body
	// pattern is a path, segment by segment: {id} stands for any one, {kind=a|b} for
	// one of these, {ref...} at the end for all that follow, and {...} for what the
	// route ignores or passes on. All of it is also served below /v1.
	//
	// The name of a route in the log and in the metrics is its pattern, without "=a|b"
	// and dots.
	pattern string
	// need is the least role of a caller, or one of the words below. A row without one is
	// for admins.
	need   record.Role
	handle handler
}

// Who else may use a route.
const (
	anyone record.Role = "anyone" // without a key
	tokens record.Role = "tokens" // who has the token of the port; see port
)

// table is the one place where a path becomes public. What is not in it is not
// served, and TestRoles holds it against the OpenAPI documents.
//
// A viewer sees nothing that opens a sandbox, as the headers of an endpoint do, and
// no contents of files. What all clients share is for admins to remove.
//
// The first pattern that fits a path counts, and its methods are all there are.
func (s *Server) table() []route {
	const viewer, operator, admin = record.Viewer, record.Operator, record.Admin
	on := s.on
	rows := []route{
		{"GET", "/health", anyone, s.health},
		{"GET", "/version", anyone, s.version}, // as upstream; without a key it is the release alone
		{"GET", "/openapi.json", anyone, s.openAPI},
		{"GET", "/docs", anyone, s.docs},

		{"POST", "/sandboxes", operator, s.create},
		{"GET", "/sandboxes", viewer, s.list},
		{"GET", "/sandboxes/{id}", viewer, on(s.get)},
		{"DELETE", "/sandboxes/{id}", operator, s.delete},
		{"GET", "/sandboxes/{id}/inspect", viewer, on(s.inspect)},
		{"GET", "/sandboxes/{id}/stats", viewer, on(s.usage)},
		{"GET", "/sandboxes/{id}/logs", viewer, on(s.logs)},
		{"GET", "/sandboxes/{id}/diagnostics/{kind=logs|events|inspect|summary}", viewer, on(s.diagnostics)},
		{"PATCH", "/sandboxes/{id}/limits", operator, on(s.updateLimits)},
		{"PATCH", "/sandboxes/{id}/metadata", operator, on(s.patchMetadata)},
		{"POST", "/sandboxes/{id}/start", operator, on(s.start)},
		{"POST", "/sandboxes/{id}/stop", operator, on(s.stop)},
		{"POST", "/sandboxes/{id}/pause", operator, on(s.pause)},
		{"POST", "/sandboxes/{id}/resume", operator, on(s.resume)},
		{"POST", "/sandboxes/{id}/renew-expiration", operator, on(s.renew)},
		{"POST", "/sandboxes/{id}/snapshots", operator, on(s.createSnapshot)},
		{"GET", "/sandboxes/{id}/networkpolicy", viewer, on(s.networkPolicy)},
		{"PUT", "/sandboxes/{id}/networkpolicy", operator, on(s.networkPolicy)},
		{"PATCH", "/sandboxes/{id}/networkpolicy", operator, on(s.networkPolicy)},
		{"DELETE", "/sandboxes/{id}/networkpolicy", operator, on(s.networkPolicy)},
		{"GET", "/sandboxes/{id}/endpoints/{port}", operator, on(s.endpoint)}, // its headers open the port
		{"*", "/sandboxes/{id}/proxy/{port}/{...}", tokens, nil},              // see port

		{"GET", "/snapshots", viewer, s.listSnapshots},
		{"GET", "/snapshots/{id}", viewer, s.getSnapshot},
		{"DELETE", "/snapshots/{id}", operator, s.deleteSnapshot},
		{"GET", "/snapshots/{id}/inspect", viewer, s.inspectSnapshot},

		{"GET", "/images", viewer, s.listImages},
		{"POST", "/images", operator, s.importImage},
		{"POST", "/images/build", operator, s.buildImage},
		{"POST", "/images/pull", operator, s.pullImage},
		{"POST", "/images/prune", admin, s.pruneImages},
		{"GET", "/images/{ref}/export", operator, s.exportImage},
		{"GET", "/images/{ref...}", viewer, s.inspectImage},
		{"DELETE", "/images/{ref...}", admin, s.removeImage},

		{"GET", "/events", viewer, s.events},
		{"GET", "/stats", viewer, s.usageOfAll},
		{"GET", "/diff", viewer, s.diff},

		{"GET", "/keys", admin, s.listKeys},
		{"POST", "/keys", admin, s.createKey},
		{"DELETE", "/keys/{name}", admin, s.removeKey},

		{"GET", "/system/info", viewer, s.info},
		{"GET", "/system/df", viewer, s.df},
		{"PUT", "/system/drain", admin, s.drain(true)}, // and on the host: see onTheHost
		{"DELETE", "/system/drain", admin, s.drain(false)},
		{"GET", "/system/backup", admin, s.backup},

		{"POST", "/metrics/events", viewer, noTelemetry},
		{"*", "/pools/{...}", viewer, never("KUBERNETES::POOL_NOT_SUPPORTED",
			"a single host has no pools; SDK-side pools work without them")},
		{"*", "/templates/{...}", viewer, never("FSB::API_NOT_SUPPORTED",
			"templates are built by OpenSandbox's Kubernetes runtime, which this is not; make an image (sandboxctl image build, "+
				"image import) or a snapshot of a sandbox, and create sandboxes from that")},
	}
	if s.cfg.NoVolumes {
		return rows
	}
	return append(rows, []route{
		{"GET", "/volumes", viewer, s.listVolumes},
		{"POST", "/volumes", operator, s.createVolume},
		{"POST", "/volumes/prune", admin, s.pruneVolumes}, // what anybody kept
		{"GET", "/volumes/{name}", viewer, s.inspectVolume},
		{"DELETE", "/volumes/{name}", operator, s.removeVolume},
	}...)
}

// Names of routes that are not patterns of the table.
const (
	nameNone    = "none"                        // what is not served
	nameGateway = "/{id}/{port}"                // all of the gateway's listener
	namePolicy  = "/sandboxes/{id}/proxy/18080" // the egress API, which is answered here
)

// noTelemetry takes what SDKs tell of their use, and keeps none of it.
func noTelemetry(w http.ResponseWriter, _ *http.Request) error {
	writeEmpty(w, http.StatusNoContent)
	return nil
}

// never answers every method with the same refusal: 400, which SDKs show with
// its text, and which no client takes for a server that is about to be better.
func never(wireCode, text string) handler {
	return func(http.ResponseWriter, *http.Request) error {
		return errs.Wire(errs.New(errs.Unsupported, "%s", text), wireCode)
	}
}
