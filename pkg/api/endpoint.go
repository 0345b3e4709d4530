package api

import (
	"cmp"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// endpoint says where a port of a sandbox is reached: always through the
// proxy route of this server. It answers for any port and in any state,
// because SDKs resolve 44772 and 18080 before the sandbox runs.
func (s *Server) endpoint(w http.ResponseWriter, r *http.Request, rec record.Record, portText string, v1 bool) error {
	port, err := spec.ParsePort(portText)
	if err != nil {
		return err
	}
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return httperr.Invalid("the query string does not parse; percent-encode its values")
	}
	viaProxy := false
	if v := q.Get("use_server_proxy"); v != "" {
		if viaProxy, err = spec.ParseBool(v); err != nil {
			return httperr.Invalid("use_server_proxy %q: want true or false", httperr.Clip(v, 20))
		}
	}
	if q.Has("expires") {
		if viaProxy {
			return httperr.Invalid("expires and use_server_proxy=true are both given; leave one out")
		}
		return s.signedEndpoint(w, r, rec, port, q.Get("expires"), v1)
	}
	at := s.cfg.Gateway.endpoint(rec.ID, strconv.Itoa(int(port)), signature{})
	if viaProxy || !s.cfg.Gateway.announced() {
		at = s.ownHost(r) + proxyBase(v1, rec.ID, strconv.Itoa(int(port)))
	}
	writeJSON(w, http.StatusOK, wire.Endpoint{Endpoint: at, Headers: s.endpointHeaders(rec, port)})
	return nil
}

// signedEndpoint makes an address that opens a port by itself until it expires.
// What the agent and the egress API answer has tokens of its own all the same.
func (s *Server) signedEndpoint(w http.ResponseWriter, r *http.Request, rec record.Record, port uint16, expires string, v1 bool) error {
	until, err := parseExpires(expires, rec)
	if err != nil {
		return err
	}
	sig, text := s.sign(rec.ID, port, until), strconv.Itoa(int(port))
	e := wire.Endpoint{Endpoint: s.cfg.Gateway.endpoint(rec.ID, text, sig)}
	if !s.cfg.Gateway.announced() {
		e.Endpoint = s.ownHost(r) + proxyBase(v1, sig.label(rec.ID, text), text)
	}
	if port == wire.AgentPort || port == wire.EgressPort {
		e.Headers = s.endpointHeaders(rec, port)
	}
	writeJSON(w, http.StatusOK, e)
	return nil
}

// ownHost is the host, and perhaps a path, under which clients reach the API.
func (s *Server) ownHost(r *http.Request) string {
	host := cmp.Or(s.cfg.ExternalHost, r.Host)
	if peerOf(r).unix && s.cfg.ExternalHost == "" { // no client elsewhere could use what it called us
		host = cmp.Or(s.cfg.ListenAddress, host)
	}
	return strings.TrimSuffix(host, "/")
}

// endpointHeaders are what a caller must send to use a port.
func (s *Server) endpointHeaders(rec record.Record, port uint16) map[string]string {
	switch {
	case port == wire.AgentPort:
		return map[string]string{wire.HeaderAgentToken: rec.Token}
	case port == wire.EgressPort:
		return map[string]string{wire.HeaderEgressToken: s.endpointToken(rec.ID, port)}
	case rec.Spec.SecureAccess:
		return map[string]string{wire.HeaderSecureAccess: s.endpointToken(rec.ID, port)}
	}
	return map[string]string{wire.HeaderEndpointToken: s.endpointToken(rec.ID, port)}
}
