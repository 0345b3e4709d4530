package api

import (
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// least is the role that each route needs. What is not in here is for admins
// alone, so that a new route is shut until somebody thinks of it; TestRoles walks
// all there are. Routes that are open need none, and the proxy has tokens of its
// own, for which a key of an operator stands (see authorise).
//
// A viewer sees nothing that opens a sandbox, as the headers of an endpoint do,
// and no contents of files. What all share is for admins to take away.
var least = map[string]record.Role{
	"GET /sandboxes":                         record.Viewer,
	"GET /sandboxes/{id}":                    record.Viewer,
	"GET /sandboxes/{id}/stats":              record.Viewer,
	"GET /sandboxes/{id}/inspect":            record.Viewer,
	"GET /sandboxes/{id}/logs":               record.Viewer,
	"GET /sandboxes/{id}/networkpolicy":      record.Viewer,
	"GET /sandboxes/{id}/diagnostics/{kind}": record.Viewer,
	"GET /snapshots":                         record.Viewer,
	"GET /snapshots/{id}":                    record.Viewer,
	"GET /snapshots/{id}/inspect":            record.Viewer,
	"GET /images":                            record.Viewer,
	"GET /images/{ref}":                      record.Viewer,
	"GET /events":                            record.Viewer,
	"GET /stats":                             record.Viewer,
	"GET /diff":                              record.Viewer,
	"GET /system/info":                       record.Viewer,
	"GET /system/df":                         record.Viewer,
	"GET /volumes":                           record.Viewer,
	"GET /volumes/{name}":                    record.Viewer,
	"POST /metrics/events":                   record.Viewer, // it keeps nothing
	"* /pools":                               record.Viewer, // it does nothing
	"* /templates":                           record.Viewer,

	"POST /sandboxes":                       record.Operator,
	"DELETE /sandboxes/{id}":                record.Operator,
	"PATCH /sandboxes/{id}/limits":          record.Operator,
	"PATCH /sandboxes/{id}/metadata":        record.Operator,
	"POST /sandboxes/{id}/start":            record.Operator,
	"POST /sandboxes/{id}/stop":             record.Operator,
	"POST /sandboxes/{id}/pause":            record.Operator,
	"POST /sandboxes/{id}/resume":           record.Operator,
	"POST /sandboxes/{id}/renew-expiration": record.Operator,
	"POST /sandboxes/{id}/snapshots":        record.Operator,
	"PUT /sandboxes/{id}/networkpolicy":     record.Operator,
	"PATCH /sandboxes/{id}/networkpolicy":   record.Operator,
	"DELETE /sandboxes/{id}/networkpolicy":  record.Operator,
	"GET /sandboxes/{id}/endpoints/{port}":  record.Operator, // its headers open the port
	"DELETE /snapshots/{id}":                record.Operator,
	"POST /volumes":                         record.Operator,
	"DELETE /volumes/{name}":                record.Operator,
	"POST /images":                          record.Operator,
	"POST /images/build":                    record.Operator,
	"POST /images/pull":                     record.Operator,
	"GET /images/{ref}/export":              record.Operator,

	"DELETE /images/{ref}": record.Admin,
	"POST /images/prune":   record.Admin,
	"POST /volumes/prune":  record.Admin, // what anybody kept
	"GET /keys":            record.Admin,
	"POST /keys":           record.Admin,
	"DELETE /keys/{name}":  record.Admin,
	"PUT /system/drain":    record.Admin, // and on the host: see onTheHost
	"DELETE /system/drain": record.Admin,
	"GET /system/backup":   record.Admin,
}

// leastRole is the role that a request to a route needs.
func leastRole(method string, rt route) record.Role {
	if rt.refused { // 404 and 405 tell nobody anything
		return record.Viewer
	}
	if method == http.MethodHead {
		method = http.MethodGet
	}
	for _, m := range []string{method, "*"} {
		if r, ok := least[m+" "+rt.name]; ok {
			return r
		}
	}
	return record.Admin
}
