package api

import (
	"net/http"
	"slices"

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

// keeping are the routes of methods that change something, and change nothing that the store has.
var keeping = []string{
	"POST /metrics/events", "POST /sandboxes/{id}/network/test",
	"PUT /system/drain", "DELETE /system/drain", // a file beside it
	"POST /system/backups/drill", // in a directory of its own
	"POST /system/backups/check", // it reads
}

// changes reports whether requests of a route change what the store has: these wait while an upgrade is
// on trial. Of ports of sandboxes only their server knows; see Server.port.
func (r route) changes() bool {
	switch r.method {
	case http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete:
		return !slices.Contains(keeping, r.method+" "+r.pattern)
	}
	return false
}

// These stand where a route needs no role.
const (
	anyone record.Role = "anyone" // without a key
	tokens record.Role = "tokens" // with the token of the port; see port
)

// table is the one place where a path becomes public. A path that is not in it is not
// served. TestRoles compares the table with the OpenAPI document, which has its roles:
// after a change, describe the route in api/ and run `go test ./api -update`.
//
// A viewer sees nothing that opens a sandbox, as the headers of an endpoint do, and no
// contents of files. Only admins remove what all clients share.
//
// Only the first pattern that fits a path counts: a path has no methods but those of
// this pattern.
func (s *Server) table() []route {
	return slices.Concat(s.publicTable(), s.sandboxTable(), s.forkTable(), s.networkTable(), s.policyTable(), s.poolTable(), s.vaultTable(),
		s.storageTable(), s.hostTable())
}

// publicTable is what needs no key.
func (s *Server) publicTable() []route {
	return []route{
		{"GET", "/", anyone, s.system.start},
		{"GET", "/health", anyone, s.system.health},
		{"GET", "/version", anyone, s.system.version}, // as upstream; without a key it is the release alone
		{"GET", "/openapi.json", anyone, s.system.openAPI},
		{"GET", "/docs", anyone, s.system.docs},
	}
}

// sandboxTable is the part of the table about single sandboxes.
func (s *Server) sandboxTable() []route {
	const viewer, operator = record.Viewer, record.Operator
	on := s.on
	return []route{
		{"POST", "/sandboxes", operator, s.sandboxes.create},
		{"GET", "/sandboxes", viewer, s.sandboxes.list},
		{"GET", "/sandboxes/{id}", viewer, on(s.sandboxes.get)},
		{"DELETE", "/sandboxes/{id}", operator, s.sandboxes.delete},
		{"GET", "/sandboxes/{id}/inspect", viewer, on(s.sandboxes.inspect)},
		{"GET", "/sandboxes/{id}/stats", viewer, on(s.stats.one)},
		{"GET", "/sandboxes/{id}/logs", viewer, on(s.logs.logs)},
		{"GET", "/sandboxes/{id}/diagnostics/{kind=logs|events|inspect|summary}", viewer, on(s.diagnostics.answer)},
		{"PATCH", "/sandboxes/{id}/limits", operator, on(s.sandboxes.updateLimits)},
		{"PATCH", "/sandboxes/{id}/metadata", operator, on(s.sandboxes.patchMetadata)},
		{"POST", "/sandboxes/{id}/rename", operator, on(s.sandboxes.rename)},
		{"POST", "/sandboxes/{id}/start", operator, on(s.sandboxes.start)},
		{"POST", "/sandboxes/{id}/stop", operator, on(s.sandboxes.stop)},
		{"POST", "/sandboxes/{id}/pause", operator, on(s.sandboxes.pause)},
		{"POST", "/sandboxes/{id}/hibernate", operator, on(s.sandboxes.hibernate)},
		{"POST", "/sandboxes/{id}/resume", operator, on(s.sandboxes.resume)},
		{"POST", "/sandboxes/{id}/renew-expiration", operator, on(s.sandboxes.renew)},
		{"POST", "/sandboxes/{id}/commit", operator, on(s.snapshots.commit)}, // another image's name: see image.Store.Tag
		{"POST", "/sandboxes/{id}/snapshots", operator, on(s.snapshots.create)},
		{"GET", "/sandboxes/{id}/networkpolicy", viewer, on(s.policies.route)},
		{"PUT", "/sandboxes/{id}/networkpolicy", operator, on(s.policies.route)},
		{"PATCH", "/sandboxes/{id}/networkpolicy", operator, on(s.policies.route)},
		{"DELETE", "/sandboxes/{id}/networkpolicy", operator, on(s.policies.route)},
		{"GET", "/sandboxes/{id}/endpoints/{port}", operator, on(s.endpoint)}, // its headers open the port
		{"*", "/sandboxes/{id}/proxy/{port}/{...}", tokens, nil},              // see port
	}
}

// forkTable is the part about forks.
func (s *Server) forkTable() []route {
	if s.cfg.NoForks {
		return nil
	}
	return []route{
		{"POST", "/sandboxes/{id}/fork", record.Operator, s.on(s.forks.create)},
		{"GET", "/forks/{id}", record.Viewer, s.forks.get},
		{"POST", "/sandboxes/{id}/promote", record.Operator, s.on(s.sandboxes.promote)},
	}
}

// storageTable is the part about snapshots, images and volumes.
func (s *Server) storageTable() []route {
	const viewer, operator, admin = record.Viewer, record.Operator, record.Admin
	rows := []route{
		{"GET", "/snapshots", viewer, s.snapshots.list},
		{"GET", "/snapshots/{id}", viewer, s.snapshots.get},
		{"DELETE", "/snapshots/{id}", operator, s.snapshots.delete},
		{"GET", "/snapshots/{id}/inspect", viewer, s.snapshots.inspect},
		{"POST", "/snapshots/{id}/commit", operator, s.snapshots.commitSnapshot}, // another image's name: see image.Store.Tag

		{"GET", "/images", viewer, s.images.list},
		{"POST", "/images", operator, s.images.load},
		{"POST", "/images/build", operator, s.images.build},
		{"POST", "/images/pull", operator, s.images.pull},
		{"POST", "/images/prune", admin, s.images.prune},
		{"GET", "/images/{ref}/export", operator, s.images.export},
		{"POST", "/images/{ref}/tag", operator, s.images.tag}, // another image's name: see image.Store.Tag
		{"GET", "/images/{ref...}", viewer, s.images.inspect},
		{"DELETE", "/images/{ref...}", admin, s.images.remove},
	}
	if s.cfg.NoVolumes {
		return rows
	}
	return append(rows, []route{
		{"GET", "/volumes", viewer, s.volumes.list},
		{"POST", "/volumes", operator, s.volumes.create},
		{"POST", "/volumes/prune", admin, s.volumes.prune}, // also what others want to keep
		{"GET", "/volumes/{name}", viewer, s.volumes.inspect},
		{"DELETE", "/volumes/{name}", operator, s.volumes.remove},
	}...)
}

// hostTable is the part about the host, and what OpenSandbox has beside it.
func (s *Server) hostTable() []route {
	const viewer, admin = record.Viewer, record.Admin
	return []route{
		{"GET", "/events", viewer, s.events.stream},
		{"GET", "/stats", viewer, s.stats.all},
		{"GET", "/diff", viewer, s.diffs.diff},

		{"GET", "/keys", admin, s.keys.list},
		{"POST", "/keys", admin, s.keys.create},
		{"DELETE", "/keys/{name}", admin, s.keys.remove},

		{"GET", "/system/info", viewer, s.system.info},
		{"GET", "/system/df", viewer, s.system.df},
		{"POST", "/system/prune", admin, s.system.prune},
		{"PUT", "/system/drain", admin, s.system.drain(true)}, // and on the host: see onTheHost
		{"DELETE", "/system/drain", admin, s.system.drain(false)},
		{"GET", "/system/backup", admin, s.system.backup},
		{"GET", "/system/backups", admin, s.backups.list}, // admin: they name directories of the host
		{"POST", "/system/backups", admin, s.backups.now},
		{"POST", "/system/backups/drill", admin, s.backups.drill},
		{"POST", "/system/backups/adopt", admin, s.backups.adopt},
		{"POST", "/system/backups/check", admin, s.backups.check},
		{"POST", "/system/backups/remove", admin, s.backups.remove},
		{"GET", "/system/backups/status", admin, s.backups.status},

		{"POST", "/metrics/events", viewer, noTelemetry},
		{"*", "/templates/{...}", viewer, never("FSB::API_NOT_SUPPORTED",
			"templates need OpenSandbox's Kubernetes runtime, which sandboxd does not have; make an image (sandboxctl image build, "+
				"image import) or a snapshot of a sandbox, and create sandboxes from it")},
	}
}

// policyTable is the part about named policies.
func (s *Server) policyTable() []route {
	if s.cfg.NoPolicies {
		return nil
	}
	return []route{
		{"GET", "/policies", record.Viewer, s.named.list},
		{"GET", "/policies/{name}", record.Viewer, s.named.get},
		{"PUT", "/policies/{name}", record.Admin, s.named.put}, // it changes what sandboxes of all clients may reach
		{"DELETE", "/policies/{name}", record.Admin, s.named.remove},
		{"PUT", "/sandboxes/{id}/policy", record.Operator, s.on(s.named.use)},
	}
}

// poolTable is the part about pools of ready sandboxes.
func (s *Server) poolTable() []route {
	if s.cfg.NoPools {
		return []route{{"*", "/pools/{...}", record.Viewer, never("KUBERNETES::POOL_NOT_SUPPORTED",
			"this daemon has no pools; the client-side pools of SDKs work without them")}}
	}
	return []route{
		{"GET", "/pools", record.Viewer, s.pools.list},
		{"POST", "/pools", record.Admin, s.pools.create}, // its members use memory whether or not somebody asks for them
		{"GET", "/pools/{name}", record.Viewer, s.pools.get},
		{"PUT", "/pools/{name}", record.Admin, s.pools.update},
		{"DELETE", "/pools/{name}", record.Admin, s.pools.remove},
	}
}

// vaultTable is the part about credential vaults. No answer of it has a value.
func (s *Server) vaultTable() []route {
	if s.cfg.NoInspect {
		return nil
	}
	const at = "/sandboxes/{id}" + vaultPath
	return []route{
		{"GET", at, record.Viewer, s.on(s.vaults.get)},
		{"POST", at, record.Operator, s.on(s.vaults.create)}, // with files and commands of the host: see vaultHandlers.trusts
		{"PATCH", at, record.Operator, s.on(s.vaults.patch)},
		{"DELETE", at, record.Operator, s.on(s.vaults.delete)},
		{"GET", at + "/{kind=credentials|bindings}", record.Viewer, s.on(s.vaults.get)},
		{"GET", at + "/{kind=credentials|bindings}/{name}", record.Viewer, s.on(s.vaults.get)},
	}
}

// networkTable is the part of the table about networks of sandboxes.
func (s *Server) networkTable() []route {
	on := s.on
	return []route{
		{"GET", "/sandboxes/{id}/network/denials", record.Viewer, on(s.network.denials)},
		{"GET", "/sandboxes/{id}/network/explain", record.Viewer, on(s.network.explain)},
		{"GET", "/sandboxes/{id}/network/flows", record.Viewer, on(s.flows.list)},
		{"GET", "/sandboxes/{id}/network/stats", record.Viewer, on(s.flows.stats)},
		{"POST", "/sandboxes/{id}/network/test", record.Operator, on(s.network.test)}, // it opens a flow
	}
}

// on is a handler of a route with the ID or name of a sandbox.
func (s *Server) on(f func(http.ResponseWriter, *http.Request, record.Record) error) handler {
	return on(s.sandboxes.sandboxes, f)
}

// RoleOf returns what the table asks for before it serves a path, for the document of the
// API (api/openapi.json): a role, "anyone" or "tokens". It is false if there is no such
// route.
func RoleOf(method, path string) (need record.Role, served bool) {
	s := &Server{sandboxes: &sandboxHandlers{}}
	p, _ := newRouter(s.table()).split(path)
	if p == nil {
		return "", false
	}
	row, ok := p.methods[method]
	if !ok {
		row, ok = p.methods["*"]
	}
	return row.need, ok
}

// Names of routes that are not patterns of the table.
const (
	nameNone    = "none"                        // of requests that have no route
	nameGateway = "/{id}/{port}"                // of all requests to the gateway's listener
	namePolicy  = "/sandboxes/{id}/proxy/18080" // the egress API, which is answered here
)

// noTelemetry accepts the telemetry of SDKs, and keeps none of it.
func noTelemetry(w http.ResponseWriter, _ *http.Request) error {
	writeEmpty(w, http.StatusNoContent)
	return nil
}

// never answers every method with the same refusal: 400, which SDKs show with its text,
// and after which no client tries again.
func never(wireCode, text string) handler {
	return func(http.ResponseWriter, *http.Request) error {
		return errs.Wire(errs.New(errs.Unsupported, "%s", text), wireCode)
	}
}
