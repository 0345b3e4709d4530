package api

import (
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Gateway is a listener that serves ports of sandboxes and nothing else.
//
// A request says which one in one of three ways, tried in this order:
//
//	Host: {id}-{port}.domain
//	OpenSandbox-Ingress-To: {id}-{port}
//	/{id}/{port}/…
//
// Below the domain the header may only say the same again: a guest's page can
// send headers to its own address, and must not become another's page by that.
// The rest is the proxy's work; no API key is asked for, and none is needed.
type Gateway struct {
	Domain string // of wildcard names, in lower case; empty: none
	// Address is host[:port][/path] under which clients reach it by path; empty:
	// endpoints are not announced there, unless there is a Domain.
	Address string
	// Port is what clients add to names below Domain, as ":8443"; may be empty.
	Port string
}

// announced reports whether endpoints are to be used through the gateway.
func (g Gateway) announced() bool { return g.Domain != "" || g.Address != "" }

// endpoint is where clients find a port of a sandbox.
func (g Gateway) endpoint(id, port string, sig signature) string {
	if g.Domain != "" {
		return sig.label(id, port) + "." + g.Domain + g.Port
	}
	return strings.TrimSuffix(g.Address, "/") + sig.path(id, port)
}

// gateway finds the sandbox and the port that a request to the gateway is for.
func (s *Server) gateway(r *http.Request) (route, error) {
	rt := route{name: "/{id}/{port}", proxy: true, rest: r.URL.EscapedPath()}
	if rt.rest != "" && rt.rest[0] != '/' { // OPTIONS *
		return rt, httperr.Invalid("the path %q does not begin with /", httperr.Clip(rt.rest, 20))
	}
	if r.URL.User != nil {
		return rt, httperr.Invalid("the request's target names a user; send credentials in headers")
	}
	host, err := plainHost(r.Host)
	if err != nil {
		return rt, err
	}
	to := r.Header.Values(wire.HeaderIngressTo)
	if len(to) > 1 {
		return rt, httperr.Invalid("the header %s is there %d times; send it once", wire.HeaderIngressTo, len(to))
	}
	if label, ok := strings.CutSuffix(host, "."+s.cfg.Gateway.Domain); ok && s.cfg.Gateway.Domain != "" {
		err := rt.parseLabel(label)
		if err == nil && len(to) == 1 && to[0] != label {
			err = httperr.Invalid("the host is %q, and the header %s says %q; leave the header out", httperr.Clip(label, 80), wire.HeaderIngressTo, httperr.Clip(to[0], 80))
		}
		return rt, err
	}
	if !s.ownName(host) {
		return rt, httperr.New(http.StatusNotFound, "GENERAL::NOT_FOUND", errs.NotFound,
			"this gateway does not answer as %q: use an IP address, localhost, or what gateway.domain and gateway.address of its configuration say", httperr.Clip(host, 80))
	}
	if len(to) == 1 {
		return rt, rt.parseLabel(to[0])
	}
	return rt, rt.parsePath()
}

// gatewayHealth reports whether /health of the gateway is asked for, and not a
// guest's.
func (s *Server) gatewayHealth(r *http.Request) bool {
	host, err := plainHost(r.Host)
	return err == nil && s.ownName(host) && r.Header.Get(wire.HeaderIngressTo) == ""
}

// ownName reports whether host may name the gateway where the path or a header
// names the sandbox. Any other may be a web page's own, bound anew to this address.
func (s *Server) ownName(host string) bool {
	g := s.cfg.Gateway
	address, _, _ := strings.Cut(g.Address, "/")
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return true
	}
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || host != "" && (host == g.Domain || host == hostname(address))
}

// plainHost is a Host header in lower case, without port and the dot of the root.
// What no host name has is refused, and not cleaned: what one program drops the
// next one reads.
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
		return "", httperr.Invalid("the host %q is none; send a name or an address, and perhaps :port", httperr.Clip(hostport, 80))
	}
	return strings.ToLower(strings.TrimSuffix(host, ".")), nil
}

// parseLabel reads {id}-{port}, or the four segments of a signed one. The port is
// what follows the last hyphen: names of sandboxes may have some.
func (rt *route) parseLabel(label string) error {
	if id, port, sig, ok := parseSigned(label); ok {
		rt.id, rt.port, rt.sig = id, port, sig
		return nil
	}
	i := strings.LastIndexByte(label, '-')
	if i <= 0 || strings.ContainsAny(label, "./%") {
		return httperr.Invalid("%q names no port of a sandbox; want {id}-{port}, as abcdefghijkl-8000", httperr.Clip(label, 80))
	}
	rt.id, rt.port = label[:i], label[i+1:]
	return nil
}

// parsePath reads /{id}/{port}/…, or /{id}/{port}/{expires}/{signature}/….
func (rt *route) parsePath() error {
	seg := strings.SplitN(rt.rest, "/", 6) // the first is empty
	if len(seg) < 3 || seg[1] == "" || seg[2] == "" || strings.Contains(seg[1], "%") {
		return httperr.New(http.StatusNotFound, "GENERAL::NOT_FOUND", errs.NotFound,
			"this gateway serves ports of sandboxes at /{id}/{port}/…, and %q names none; the API is at another address", httperr.Clip(rt.rest, 80))
	}
	rt.id, rt.port = seg[1], seg[2]
	rt.base = "/" + seg[1] + "/" + seg[2]
	if len(seg) >= 5 {
		sig := signature{expires: seg[3], mac: seg[4]}
		if sig.wellFormed() {
			rt.sig, rt.sigInPath = sig, true
			rt.base += "/" + seg[3] + "/" + seg[4]
		}
	}
	rt.rest = rt.rest[len(rt.base):]
	return nil
}

// unsign takes what looked like a signature for a part of the guest's own path.
func (rt *route) unsign() {
	end := "/" + rt.sig.expires + "/" + rt.sig.mac
	rt.base, rt.rest = strings.TrimSuffix(rt.base, end), end+rt.rest
	rt.sig, rt.sigInPath = signature{}, false
}

// hideFromGuest takes out of every header what opens the port: a browser puts the
// address that it was given into Referer and Origin, and a proxy in between into
// headers of its own.
func (rt *route) hideFromGuest(h http.Header) {
	for _, values := range h {
		for i, v := range values {
			if strings.Contains(v, tokenQuery) {
				v = tokenInText.ReplaceAllString(v, "")
			}
			if rt.sig.mac != "" && strings.Contains(strings.ToLower(v), rt.sig.mac) {
				if !strings.Contains(v, rt.sig.mac) { // hosts have no case
					v = strings.ToLower(v)
				}
				v = strings.NewReplacer("-"+rt.sig.expires+"-"+rt.sig.mac, "", "/"+rt.sig.expires+"/"+rt.sig.mac, "", rt.sig.mac, "").Replace(v)
			}
			values[i] = v
		}
	}
}

// cookiePath is what a cookie for the port is sent with, and nothing else under
// the same host.
func (rt *route) cookiePath() string {
	if rt.base == "" {
		return "/"
	}
	return rt.base
}

// ownCookies has a guest set cookies for its own address alone: none for the
// domain that others have theirs below, and none of ours.
func ownCookies(h http.Header) {
	lines := h["Set-Cookie"]
	if len(lines) == 0 {
		return
	}
	kept := lines[:0]
	for _, line := range lines {
		if strings.HasPrefix(strings.TrimSpace(line), tokenCookie) {
			continue
		}
		var parts []string
		for i, p := range strings.Split(line, ";") {
			name, _, _ := strings.Cut(strings.TrimSpace(p), "=")
			if i == 0 || !strings.EqualFold(strings.TrimSpace(name), "domain") {
				parts = append(parts, p)
			}
		}
		kept = append(kept, strings.Join(parts, ";"))
	}
	h["Set-Cookie"] = kept
}

// proxyBase is the path under which a port is served by the API's own route.
func proxyBase(v1 bool, id, port string) string {
	mount := ""
	if v1 {
		mount = "/v1"
	}
	return fmt.Sprintf("%s/sandboxes/%s/proxy/%s", mount, url.PathEscape(id), port)
}
