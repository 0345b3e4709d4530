package auth

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Keyless reports whether the API is open to everybody who can connect. The first
// key that somebody makes ends that.
func (g *Guard) Keyless() bool { return g.open() != nil }

// open is how long requests without a key last; nil: they need one.
func (g *Guard) open() context.Context {
	if all := g.keys.all.Load(); g.insecure && len(all.keys) == 0 {
		return all.open
	}
	return nil
}

// FromPage refuses requests of web pages where no key is asked for. The same origin
// proves nothing: pages under this address are guests', whose ports are served beside
// the API. Browsers send no Origin with a GET, and Sec-Fetch-Site only to https and to
// loopback; by plain HTTP only the User-Agent is left. A Referer proves that a page
// sent the request. A missing one proves nothing, because a page may drop it.
func (g *Guard) FromPage(r *http.Request) error {
	if !g.Keyless() {
		return nil
	}
	h := r.Header
	site := h.Get("Sec-Fetch-Site")
	switch {
	case h.Get("Origin") != "", h.Get("Referer") != "", site != "" && site != "none":
	case site == "" && strings.HasPrefix(h.Get("User-Agent"), "Mozilla/"):
	default:
		return nil
	}
	return httperr.New(http.StatusForbidden, "SANDBOX::FORBIDDEN", errs.Denied,
		"this daemon requires no API key, so it refuses requests of web pages and browsers (this one came from %q): guests serve pages "+
			"under its address too; set listen.api_key_file to call it from a page",
		httperr.Clip(cmp.Or(h.Get("Origin"), h.Get("Referer"), h.Get("User-Agent"), site), 80))
}

// foreign refuses requests that a browser sends for a foreign page: those with another
// Origin, and those to a name that may be the page's own, bound anew to this address
// (DNS rebinding). It is for a daemon that asks for no key. Where a key is needed, such
// requests do no harm: no browser sends the key by itself.
func (g *Guard) foreign(r *http.Request) error {
	host := hostname(r.Host)
	_, err := netip.ParseAddr(host)
	if err != nil && host != "localhost" && !strings.HasSuffix(host, ".localhost") && host != hostname(g.external) {
		return httperr.New(http.StatusForbidden, "SANDBOX::FORBIDDEN", errs.Denied,
			"this daemon requires no API key, so it must be addressed by an IP address, localhost or its listen.public_address, "+
				"not by %q: any web page may have that name; use one of these, or set listen.api_key_file", httperr.Clip(host, 80))
	}
	if origin := r.Header.Get("Origin"); origin != "" {
		u, err := url.Parse(origin)
		if err != nil || !strings.EqualFold(u.Host, r.Host) && (g.external == "" || !strings.EqualFold(u.Host, g.external)) {
			return httperr.New(http.StatusForbidden, "SANDBOX::FORBIDDEN", errs.Denied,
				"this daemon requires no API key, so it refuses requests of foreign web pages (this one came from %q); set "+
					"listen.api_key_file to call it from a page", httperr.Clip(origin, 80))
		}
	}
	return nil
}

// hostname is the host of a Host header, in lower case, without port and brackets.
func hostname(hostport string) string {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	return strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
}
