package registry

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// Limits of one request. A registry may take its time to find a manifest; stall bounds
// its silence in the middle of a blob.
const (
	dialLimit   = 15 * time.Second
	answerLimit = time.Minute
	maxHeader   = 64 << 10 // bytes; signed addresses of blobs are a few KiB
)

// guard is the only way to a registry and to the addresses it redirects to.
type guard struct {
	host     string          // of the registry
	own      map[string]bool // host:port that may be inside this network
	insecure bool
	base     *http.Transport
}

func newGuard(host string, insecure bool, roots *x509.CertPool, redirects []string) *guard {
	g := &guard{host: host, insecure: insecure, own: map[string]bool{}}
	for _, h := range append([]string{host}, redirects...) {
		u := &url.URL{Scheme: "https", Host: strings.ToLower(h)}
		g.own[hostPort(u)] = true
		if u.Scheme = "http"; insecure {
			g.own[hostPort(u)] = true
		}
	}
	// The operator chose the proxies in the environment; a registry did not.
	for _, scheme := range []string{"http", "https"} {
		if p, err := http.ProxyFromEnvironment(&http.Request{URL: &url.URL{Scheme: scheme, Host: host}}); err == nil && p != nil {
			g.own[hostPort(p)] = true
		}
	}
	g.base = &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            g.dial,
		TLSClientConfig:        &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		ForceAttemptHTTP2:      true,
		TLSHandshakeTimeout:    dialLimit,
		ResponseHeaderTimeout:  answerLimit,
		IdleConnTimeout:        answerLimit,
		MaxIdleConnsPerHost:    4,
		MaxResponseHeaderBytes: maxHeader,
		DisableCompression:     true, // the digest is that of the bytes as sent
	}
	return g
}

// hostPort is the address that a request to u dials.
func hostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = "443"
		if u.Scheme == "http" {
			port = "80"
		}
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}

// RoundTrip refuses forbidden requests. The address behind a name is checked when it is
// dialled: then it cannot change any more.
func (g *guard) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme == "http" && !g.insecure && strings.EqualFold(r.URL.Host, g.host) {
		// go-containerregistry also tries http with registries at private addresses.
		r = r.Clone(r.Context())
		r.URL.Scheme = "https"
	}
	if s := r.URL.Scheme; s != "https" && !(s == "http" && g.insecure) {
		return nil, errs.New(errs.Denied, "registry %s leads to %.10s, without TLS, at %.100s: refused; insecure = true in "+
			"its [[registries]] allows it", g.host, s, r.URL.Host)
	}
	if !g.own[hostPort(r.URL)] { // a proxy would dial it, and no address could be checked
		if a, err := netip.ParseAddr(r.URL.Hostname()); err == nil && !elsewhere(a) || strings.EqualFold(r.URL.Hostname(), "localhost") {
			return nil, g.inside(r.URL.Host)
		}
	}
	return g.base.RoundTrip(r)
}

func (g *guard) inside(where string) error {
	return errs.New(errs.Denied, "registry %s redirects to %.100s, an address of this host or its network: refused; to allow it, add it "+
		"to redirects in its [[registries]]", g.host, where)
}

func (g *guard) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialLimit, KeepAlive: 15 * time.Second}
	if !g.own[strings.ToLower(addr)] {
		d.Control = func(_, address string, _ syscall.RawConn) error {
			ap, err := netip.ParseAddrPort(address)
			if err != nil || !elsewhere(ap.Addr()) {
				return g.inside(addr)
			}
			return nil
		}
	}
	return d.DialContext(ctx, network, addr)
}

// inner are ranges, beside those that net/netip knows, that are not in the public
// network (IANA's registries of special-purpose addresses), or that embed IPv4
// addresses.
var inner = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("100.64.0.0/10"), // carriers' NAT
	netip.MustParsePrefix("192.0.0.0/24"),
	netip.MustParsePrefix("198.18.0.0/15"), // benchmarks
	netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("64:ff9b::/96"), // NAT64
	netip.MustParsePrefix("64:ff9b:1::/48"),
	netip.MustParsePrefix("2001::/32"), // Teredo
	netip.MustParsePrefix("2002::/16"), // 6to4
	netip.MustParsePrefix("fec0::/10"),
}

// elsewhere reports whether a is public and not an address of this host: the host's
// firewall keeps everybody else from what listens there.
func elsewhere(a netip.Addr) bool {
	if weak.Off(weak.Registries) {
		return true
	}
	if !public(a) {
		return false
	}
	own, err := net.InterfaceAddrs()
	return err == nil && !slices.ContainsFunc(own, func(o net.Addr) bool {
		n, ok := o.(*net.IPNet)
		return ok && n.IP.Equal(a.AsSlice())
	})
}

// public reports whether a is an address of the public network.
func public(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	if !a.IsGlobalUnicast() || a.IsPrivate() {
		return false
	}
	for _, p := range inner {
		if p.Contains(a) {
			return false
		}
	}
	return true
}
