package gateway

import (
	"net/http"
	"net/http/httputil"
	"net/netip"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// cleanHeaders removes the headers that only the daemon may see, and sets those that
// name the client. unix: the request came by a Unix socket.
func (g *Gateway) cleanHeaders(pr *httputil.ProxyRequest, port uint16, unix bool) {
	if weak.Off(weak.Headers) {
		return
	}
	h := pr.Out.Header
	h.Del(wire.HeaderAccessRenew)
	h.Del(wire.HeaderAPIKey)
	h.Del(wire.HeaderEndpointToken)
	h.Del(wire.HeaderSecureAccess)
	h.Del(wire.HeaderIngressTo)
	h.Del(wire.HeaderEgressToken)
	if port != wire.AgentPort {
		h.Del(wire.HeaderAgentToken)
	}
	for _, k := range []string{wire.HeaderAPIKeyOther, wire.HeaderAgentToken, "Authorization"} { // other values are the app's own
		if k := http.CanonicalHeaderKey(k); len(h[k]) > 0 {
			if h[k] = slices.DeleteFunc(slices.Clone(h[k]), g.cfg.Guard.Holds); len(h[k]) == 0 {
				delete(h, k)
			}
		}
	}
	if strings.EqualFold(h.Get("Upgrade"), "h2c") || len(h["Http2-Settings"]) > 0 { // the proxy could not read what follows
		h.Del("Upgrade")
		h.Del("Connection")
		h.Del("Http2-Settings")
	}
	if cookies := pr.In.Cookies(); len(cookies) > 0 {
		h.Del("Cookie")
		for _, c := range cookies {
			if !strings.HasPrefix(c.Name, tokenCookie) {
				pr.Out.AddCookie(c)
			}
		}
	}
	g.forwarded(pr, unix)
}

// forwarded sets the headers that name the client of a request. It removes those that
// the request has, because an app would trust them, unless a trusted proxy has sent
// them.
func (g *Gateway) forwarded(pr *httputil.ProxyRequest, unix bool) {
	h, in := pr.Out.Header, pr.In.Header
	if !unix && !g.trustedProxy(pr.In) {
		for k := range h {
			if strings.HasPrefix(k, "X-Forwarded-") || k == "X-Real-Ip" || k == "Forwarded" {
				delete(h, k)
			}
		}
		pr.SetXForwarded()
		return
	}
	h["X-Forwarded-For"] = in["X-Forwarded-For"]
	pr.SetXForwarded()
	for _, k := range []string{"X-Forwarded-Host", "X-Forwarded-Proto", "Forwarded"} { // ReverseProxy has taken them out
		if v := in.Get(k); v != "" {
			h.Set(k, v)
		}
	}
	if unix {
		h.Del("X-Forwarded-For") // a socket has no address
	}
}

// trustedProxy reports whether the peer is one of Config.TrustedProxies.
func (g *Gateway) trustedProxy(r *http.Request) bool {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && slices.ContainsFunc(g.cfg.TrustedProxies, func(p netip.Prefix) bool { return p.Contains(peer.Addr().Unmap()) })
}

// hideFromGuest removes token and signature of the port from every header. A browser
// repeats the address in Referer and Origin, and a proxy in between repeats it in
// headers of its own.
func (t *Target) hideFromGuest(h http.Header) {
	for _, values := range h {
		for i, v := range values {
			if strings.Contains(v, tokenQuery) {
				v = tokenInText.ReplaceAllString(v, "")
			}
			if t.sig.mac != "" && strings.Contains(strings.ToLower(v), t.sig.mac) {
				if !strings.Contains(v, t.sig.mac) { // hosts have no case
					v = strings.ToLower(v)
				}
				v = strings.NewReplacer("-"+t.sig.expires+"-"+t.sig.mac, "", "/"+t.sig.expires+"/"+t.sig.mac, "", t.sig.mac, "").Replace(v)
			}
			values[i] = v
		}
	}
}

// ofOrigin are headers that concern everything served at the answer's address, which
// more than one guest may share.
var ofOrigin = []string{"Service-Worker-Allowed", "Clear-Site-Data", "Strict-Transport-Security", "Alt-Svc", "Nel", "Report-To"}

// cleanAnswer changes the headers of an answer, or of an interim one, so that what runs
// in a sandbox speaks for its own port alone. rest is the request's path behind the
// port, host is what the port was asked as, and base is the path that it is served
// below.
func cleanAnswer(h http.Header, port uint16, rest, host, base string) {
	if weak.Off(weak.Answers) {
		return
	}
	h.Del(wire.HeaderRequestID) // ours is set already
	for _, k := range ofOrigin {
		h.Del(k)
	}
	ownCookies(h)
	relocate(h, host, base)
	if base != "" { // pages of other guests have this origin, too: they must not read a signed address in document.referrer
		h.Set("Referrer-Policy", referrerPolicy(h.Values("Referrer-Policy")))
	}
	if port != wire.AgentPort {
		return
	}
	for k := range h {
		if strings.HasPrefix(k, "Access-Control-") { // ours are set already
			delete(h, k)
		}
	}
	// The agent itself leads nowhere else. A guest that replaced it could: clients that
	// follow would take the API key with them.
	if to := h.Get("Location"); !strings.HasPrefix(rest, "/proxy/") && !localPath(to) {
		h.Del("Location")
	}
}

// referrerPolicy is the policy of an answer where guests share an origin, by what the guest says. Browsers follow the
// last of a list. Only no-referrer is stricter than ours: same-origin gives the whole address to other guests.
func referrerPolicy(guest []string) string {
	all := strings.Split(strings.Join(guest, ","), ",")
	if last := strings.TrimSpace(all[len(all)-1]); strings.EqualFold(last, "no-referrer") {
		return "no-referrer"
	}
	return "strict-origin"
}

// localPath reports whether an address is a path of the same host, also to clients that
// take a backslash for a slash.
func localPath(to string) bool {
	return strings.HasPrefix(to, "/") && (len(to) == 1 || to[1] != '/' && to[1] != '\\')
}

// A hinted writer passes interim answers (1xx) on with clean headers. ReverseProxy has
// no hook for them.
type hinted struct {
	http.ResponseWriter
	clean func(http.Header)
}

func (w hinted) WriteHeader(status int) {
	if status < http.StatusOK && status != http.StatusSwitchingProtocols {
		w.clean(w.Header())
	}
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap serves http.ResponseController.
func (w hinted) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// relocate changes the redirects of an app to itself, so that they lead to where the
// app is served. It has Location and Refresh once at most.
func relocate(h http.Header, host, base string) {
	if all := h["Location"]; len(all) > 0 {
		h["Location"] = []string{relocated(all[0], host, base)}
	}
	if all := h["Refresh"]; len(all) > 0 {
		h["Refresh"] = []string{refreshed(all[0], host, base)}
	}
}

// relocated is an address at the root of host as one below base. Other addresses stay.
func relocated(to, host, base string) string {
	to = strings.ReplaceAll(to, "\t", "") // browsers ignore it
	if rest, ok := strings.CutPrefix(to, "http://"+host); ok && (rest == "" || strings.ContainsRune("/?#", rune(rest[0]))) {
		to = rest
		if !strings.HasPrefix(to, "/") {
			to = "/" + to
		}
	}
	if !strings.HasPrefix(to, "/") || strings.HasPrefix(to, "//") {
		return to
	}
	to = withoutDots(to)
	if rest, ok := strings.CutPrefix(to, base); !ok || rest != "" && !strings.ContainsRune("/?#", rune(rest[0])) {
		to = base + to
	}
	return to
}

// withoutDots is an address at the root of a host without dot segments: with them it could
// leave the path that is put before it. Browsers read %2e as a dot and \ as a slash (URL
// standard, 4.4).
func withoutDots(to string) string {
	end := len(to)
	if i := strings.IndexAny(to, "?#"); i >= 0 {
		end = i
	}
	dots := false
	var kept []string
	for s := range strings.SplitSeq(strings.ReplaceAll(to[1:end], `\`, "/"), "/") {
		switch strings.ReplaceAll(strings.ToLower(s), "%2e", ".") {
		case "..":
			kept = kept[:max(0, len(kept)-1)]
			dots = true
		case ".":
			dots = true
		default:
			kept = append(kept, s)
		}
	}
	if !dots {
		return to
	}
	return "/" + strings.TrimLeft(strings.Join(kept, "/"), "/") + to[end:]
}

// refreshed is a value of Refresh, "5" or "5; url=/next", with its address relocated.
// Browsers read it as they read <meta http-equiv="refresh"> (HTML §4.2.5.3).
func refreshed(value, host, base string) string {
	const space = " \t"
	value = strings.Trim(value, space)
	i := strings.IndexAny(value, ";,"+space)
	if i < 0 {
		return value
	}
	seconds, to := value[:i], strings.TrimLeft(value[i:], space)
	if to[0] == ';' || to[0] == ',' { // a browser needs neither
		to = strings.TrimLeft(to[1:], space)
	}
	if len(to) >= 3 && strings.EqualFold(to[:3], "url") {
		if rest, ok := strings.CutPrefix(strings.TrimLeft(to[3:], space), "="); ok {
			to = strings.TrimLeft(rest, space)
		}
	}
	for to != "" && (to[0] == '"' || to[0] == '\'') { // quoted quotes: what remains must not be a quoted address
		to, _, _ = strings.Cut(to[1:], to[:1])
		to = strings.Trim(to, space)
	}
	return seconds + "; url=" + relocated(to, host, base)
}

// ownCookies lets a guest set cookies for its own address alone: none for the domain
// that it shares with others, and none that the gateway reads.
func ownCookies(h http.Header) {
	lines := h["Set-Cookie"]
	if len(lines) == 0 {
		return
	}
	kept := lines[:0]
	for _, line := range lines {
		if strings.HasPrefix(strings.Trim(line, "= \t"), tokenCookie) { // a cookie without a name is sent as its value alone
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
