package gateway

import (
	"net"
	"net/http"
	"net/netip"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
)

// Names are the names of a listener that serves ports of sandboxes and nothing else.
//
// A request to it names a port in one of three ways, tried in this order:
//
//	Host: {id}-{port}.domain
//	OpenSandbox-Ingress-To: {id}-{port}
//	/{id}/{port}/…
//
// Below the domain the header may only say the same again: a guest's page can send
// headers to its own address, and must not become another guest's page by that.
type Names struct {
	Domain string // of wildcard names, in lower case; empty: none
	// Address is host[:port][/path] under which clients reach the listener by path. If
	// it is empty, endpoints are announced there only if there is a Domain.
	Address string
	// Port is what clients add to names below Domain, as ":8443"; may be empty.
	Port string
}

// announced reports whether clients are sent to the gateway's listener.
func (n *Names) announced() bool { return n.Domain != "" || n.Address != "" }

// endpoint is where clients find a port of a sandbox.
func (n *Names) endpoint(id, port string, sig signature) string {
	if n.Domain != "" {
		return sig.label(id, port) + "." + n.Domain + n.Port
	}
	return strings.TrimSuffix(n.Address, "/") + sig.path(id, port)
}

// Itself reports whether a request to the listener names the gateway itself, and no
// guest's port by host or header.
func (n *Names) Itself(r *http.Request) bool {
	host, err := plainHost(r.Host)
	return err == nil && n.own(host) && r.Header.Get(wire.HeaderIngressTo) == ""
}

// own reports whether host is a name of the gateway itself, under which the path or a
// header names the sandbox. Any other name may belong to a web page that has bound it
// to this address (DNS rebinding).
func (n *Names) own(host string) bool {
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return true
	}
	address, _, _ := strings.Cut(n.Address, "/")
	if h, _, err := net.SplitHostPort(address); err == nil {
		address = h
	}
	address = strings.ToLower(strings.TrimSuffix(strings.Trim(address, "[]"), "."))
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || host != "" && (host == n.Domain || host == address)
}

// plainHost is a Host header in lower case, without port and the dot of the root. It
// refuses characters that no host name has instead of dropping them, because the next
// program may read them.
func plainHost(hostport string) (string, error) {
	bad := strings.IndexFunc(hostport, func(c rune) bool {
		return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("-._:[]", c))
	})
	host, port, _ := strings.Cut(hostport, ":")
	if strings.HasPrefix(hostport, "[") {
		host, port, _ = strings.Cut(hostport, "]")
		host, port = host+"]", strings.TrimPrefix(port, ":")
	}
	if bad >= 0 || strings.Trim(port, "0123456789") != "" {
		return "", httperr.Invalid("the host %q is not valid; send a name or an address, optionally with :port", httperr.Clip(hostport, 80))
	}
	return strings.ToLower(strings.TrimSuffix(host, ".")), nil
}
