package gateway

import (
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// Endpoint says where clients reach a port, and which headers they send there. api is
// the address of the API, as "host:port/v1"; byAPI: clients reach the port there, even
// if there is a gateway.
func (g *Gateway) Endpoint(rec *record.Record, port uint16, api string, byAPI bool) wire.Endpoint {
	text := strconv.Itoa(int(port))
	e := wire.Endpoint{Endpoint: g.cfg.endpoint(rec.ID, text, signature{}), Headers: g.headers(rec, port)}
	if byAPI || !g.cfg.announced() {
		e.Endpoint = api + Base(rec.ID, text)
	}
	return e
}

// SignedEndpoint is an address that opens a port without a token until a time, in
// seconds since 1970. The agent and the egress API ask for tokens of their own all the
// same.
func (g *Gateway) SignedEndpoint(rec *record.Record, port uint16, until int64, api string) wire.Endpoint {
	sig, text := g.sign(rec.ID, port, until), strconv.Itoa(int(port))
	e := wire.Endpoint{Endpoint: g.cfg.endpoint(rec.ID, text, sig)}
	if !g.cfg.announced() {
		e.Endpoint = api + Base(sig.label(rec.ID, text), text)
	}
	if Ours(port) {
		e.Headers = g.headers(rec, port)
	}
	return e
}

// headers are those that a client must send to use a port.
func (g *Gateway) headers(rec *record.Record, port uint16) map[string]string {
	switch {
	case port == wire.AgentPort:
		return map[string]string{wire.HeaderAgentToken: rec.Token}
	case port == wire.EgressPort:
		return map[string]string{wire.HeaderEgressToken: g.Token(rec.ID, port)}
	case rec.Spec.SecureAccess:
		return map[string]string{wire.HeaderSecureAccess: g.Token(rec.ID, port)}
	}
	return map[string]string{wire.HeaderEndpointToken: g.Token(rec.ID, port)}
}
