package api

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// endpoint says where a port of a sandbox is reached: always through the
// proxy route of this server. It answers for any port and in any state,
// because SDKs resolve 44772 and 18080 before the sandbox runs.
func (s *Server) endpoint(w http.ResponseWriter, r *http.Request, rec record.Record, portText string, v1 bool) error {
	port, err := parsePort(portText)
	if err != nil {
		return err
	}
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return invalid("the query string does not parse; percent-encode its values")
	}
	viaProxy := false
	if v := q.Get("use_server_proxy"); v != "" {
		if viaProxy, err = parseBool(v); err != nil {
			return invalid("use_server_proxy %q: want true or false", clip(v, 20))
		}
	}
	switch {
	case q.Has("expires") && viaProxy:
		return invalid("expires and use_server_proxy=true are both given; leave one out")
	case q.Has("expires"):
		return errs.Wire(errs.New(errs.Unsupported, "expires: signed routes belong to OpenSandbox's Kubernetes gateway; leave it out, the endpoint's header is its token"), "SANDBOX::API_NOT_SUPPORTED")
	}
	host := s.cfg.ExternalHost
	if host == "" {
		host = r.Host
	}
	mount := ""
	if v1 {
		mount = "/v1"
	}
	writeJSON(w, http.StatusOK, wire.Endpoint{
		Endpoint: fmt.Sprintf("%s%s/sandboxes/%s/proxy/%d", strings.TrimSuffix(host, "/"), mount, rec.ID, port),
		Headers:  s.endpointHeaders(rec, port),
	})
	return nil
}

// endpointHeaders are what a caller must send to use a port.
func (s *Server) endpointHeaders(rec record.Record, port uint16) map[string]string {
	switch port {
	case wire.AgentPort:
		return map[string]string{wire.HeaderAgentToken: rec.Token}
	case wire.EgressPort:
		return map[string]string{wire.HeaderEgressToken: s.endpointToken(rec.ID, port)}
	}
	return map[string]string{wire.HeaderEndpointToken: s.endpointToken(rec.ID, port)}
}

func parsePort(v string) (uint16, error) {
	n, err := strconv.ParseUint(v, 10, 16)
	if err != nil || n == 0 || v[0] == '+' {
		return 0, errs.Wire(invalid("port %q: want a number from 1 to 65535", clip(v, 20)), "DOCKER::INVALID_PORT")
	}
	return uint16(n), nil
}
