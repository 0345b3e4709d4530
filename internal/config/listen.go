package config

import (
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"
)

// Insecure is the value of listen.insecure that serves TCP without a key, on loopback
// only. The value true does so on any address.
const Insecure = "anyone who can connect may run code"

func (c *Config) validateListen(bad func(string, ...any)) {
	l := &c.Listen
	for _, t := range l.TrustedProxies {
		p, err := netip.ParsePrefix(t)
		if a, aerr := netip.ParseAddr(t); aerr == nil {
			p, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		if err != nil {
			bad("listen.trusted_proxies: %q: want an address or a CIDR, such as 127.0.0.1 or 10.1.0.0/16", t)
		}
		l.Proxies = append(l.Proxies, p.Masked())
	}
	validateTLS("listen", l.TLSCert, l.TLSKey, bad)
	switch l.InsecureIf {
	case true, Insecure:
		l.Insecure = true
	case false, "":
	default:
		bad("listen.insecure: to serve TCP without a key, set it to true, or on loopback to %q", Insecure)
	}
	if l.Metrics != "" {
		if _, err := netip.ParseAddrPort(l.Metrics); err != nil {
			bad("listen.metrics = %q: want address:port, such as 127.0.0.1:9109", l.Metrics)
		}
	}
	if l.TCP == "" {
		return
	}
	at, err := netip.ParseAddrPort(l.TCP)
	if err != nil {
		bad("listen.tcp = %q: want address:port, such as 127.0.0.1:8080", l.TCP)
		return
	}
	const makeKey = "make the file with: (umask 077; openssl rand -hex 32 >/etc/sandboxd/api-key)"
	switch {
	case l.APIKeyFile != "" || l.InsecureIf == true:
	case !at.Addr().IsLoopback():
		bad("listen.tcp = %q is not a loopback address, and no API key is configured: every host that reaches it may run code, and so "+
			"may web pages, which can look like other clients there; set listen.api_key_file (%s), or set listen.insecure = true", l.TCP,
			makeKey)
	case !l.Insecure:
		bad("listen.tcp needs listen.api_key_file, because every client that reaches it may run code; %s", makeKey)
	}
}

// domainForm matches a domain name in lower case, without a wildcard.
var domainForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)

func (c *Config) validateGateway(bad func(string, ...any)) {
	g := &c.Gateway
	validateTLS("gateway", g.TLSCert, g.TLSKey, bad)
	switch g.Public {
	case "auto", "yes", "no":
	default:
		bad("gateway.public = %q: want auto, yes or no", g.Public)
	}
	g.Domain = strings.ToLower(strings.TrimSuffix(g.Domain, "."))
	if g.Domain != "" && (!domainForm.MatchString(g.Domain) || len(g.Domain) > 190) {
		bad("gateway.domain = %q: want a domain name without *. before it, such as sandboxes.example.com", g.Domain)
	}
	if strings.Contains(g.Address, "://") || strings.ContainsAny(g.Address, " ?#@") {
		bad("gateway.address = %q: want host:port, without a scheme", g.Address)
	}
	if g.Listen == "" {
		if g.Domain != "" || g.Address != "" {
			bad("gateway.domain and gateway.address need a gateway: set gateway.listen")
		}
		return
	}
	if _, err := netip.ParseAddrPort(g.Listen); err != nil {
		bad("gateway.listen = %q: want address:port, such as 127.0.0.1:8081", g.Listen)
	}
}

// validateTLS checks the paths of a certificate and its key. The files are read when
// the listener starts.
func validateTLS(table, cert, key string, bad func(string, ...any)) {
	if (cert == "") != (key == "") {
		bad("%s.tls_cert and %s.tls_key: only one is given; a certificate needs its key", table, table)
	}
	for name, path := range map[string]string{"tls_cert": cert, "tls_key": key} {
		if path != "" && !filepath.IsAbs(path) {
			bad("%s.%s = %q: want an absolute path", table, name, path)
		}
	}
}
