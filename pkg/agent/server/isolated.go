package server

import (
	"net/http"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/agent/reply"
)

// Isolated sessions are sandboxes within a sandbox. They would need namespaces and
// mounts in the guest, which its system call filter refuses, on purpose. So the agent
// answers that they are unavailable, as the protocol allows.
const noIsolation = "isolated sessions need new namespaces, " +
	"which no process in this sandbox may create: create another sandbox, or use POST /session"

func isolatedRoutes(path string) reply.Methods {
	rest, ok := strings.CutPrefix(path, "/v1/isolated/")
	switch {
	case !ok:
		return nil
	case rest == "capabilities":
		return reply.Methods{"GET": isolation}
	case rest == "session", rest == "sessions", strings.HasPrefix(rest, "session/"):
		refuse := func(http.ResponseWriter, *http.Request) error {
			return reply.Fail(http.StatusServiceUnavailable, reply.Unavailable, "%s", noIsolation)
		}
		return reply.Methods{"GET": refuse, "POST": refuse, "DELETE": refuse}
	}
	return nil
}

// isolation is GET /v1/isolated/capabilities. It does not mention hardening, which the
// host does from outside.
func isolation(w http.ResponseWriter, _ *http.Request) error {
	return reply.JSON(w, http.StatusOK, agent.Isolation{Message: noIsolation})
}
