package gateway

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const (
	tokenQuery  = "sandboxd_token"
	tokenCookie = "sandboxd_token_" // and the port
)

// authorise admits a request that has a key, token or signature for the port, and notes
// who sent it.
func (g *Gateway) authorise(w http.ResponseWriter, r *http.Request, v *Visit, rec *record.Record, port uint16, t *Target) error {
	secure := rec.Spec.SecureAccess && port != wire.AgentPort
	switch {
	case v.Role.Covers(record.Operator) && !(secure && v.Keyless), weak.Off(weak.Tokens):
		return nil
	case port == wire.AgentPort:
		return g.authoriseAgent(r, v, rec)
	case t.signed:
		v.Actor, v.until = "signed "+v.Peer, t.until
		return nil
	}
	want := g.Token(rec.ID, port)
	given, right := tokenGiven(r, want)
	switch {
	case right:
		return nil
	case !secure && g.cfg.Guard.Public(r):
		return nil // a guest's page asks its own port for more
	case given:
		return httperr.New(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied,
			"the endpoint token is not valid for port %d of this sandbox: send the headers that GET /v1/sandboxes/{id}/endpoints/%d "+
				"returns, unchanged", port, port)
	}
	name := tokenCookie + strconv.Itoa(int(port))
	if t.takesCookies() {
		for _, c := range r.Cookies() { // a guest at a neighbouring name may have set others
			if c.Name == name && equal(c.Value, want) && g.ownPage(r) {
				return nil
			}
		}
	}
	if given, _ := cutQuery(r.URL.RawQuery, tokenQuery); equal(given, want) {
		if t.takesCookies() {
			http.SetCookie(w, &http.Cookie{ // so that what the page loads next is let in
				Name: name, Value: want, HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteStrictMode, Path: "/",
			})
		}
		return nil
	}
	return httperr.New(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied,
		"port %d of this sandbox needs an endpoint token: send the headers that GET /v1/sandboxes/{id}/endpoints/%d returns, or add "+
			"?%s=…. A browser that gets in by a path needs a signed address (?expires= of that request) for what a page loads",
		port, port, tokenQuery)
}

// takesCookies reports whether a cookie may open the port. Ports by path or by header share their host, so to a
// browser the pages of all guests there are one origin: it adds the cookie of each port to what the page of any
// other one asks for, and lets that page read the answer. No path of a cookie and no header of the request
// separates them.
func (t *Target) takesCookies() bool { return t.alone || weak.Off(weak.Cookies) }

// authoriseAgent is authorise for the port of the agent, which only its own token
// opens, or a key of an operator.
func (g *Gateway) authoriseAgent(r *http.Request, v *Visit, rec *record.Record) error {
	if err := g.cfg.Guard.FromPage(r); err != nil { // a page that has the token got it where it should not have
		return err
	}
	given := r.Header.Get(wire.HeaderAgentToken)
	role, life := g.cfg.Guard.Role(given)
	switch {
	case rec.Token != "" && equal(given, rec.Token):
		v.Actor = "token " + v.Peer
		return nil
	case role.Covers(record.Operator): // Go's SDK sends the API key where an endpoint gave it no header
		v.Actor, v.life = "key "+v.Peer, life
		return nil
	}
	if err := g.cfg.Guard.Refusal(r, v.Role); err != nil {
		return err
	}
	return httperr.New(http.StatusUnauthorized, "UNAUTHORIZED", errs.Denied,
		"port %d of a sandbox needs its token: send the headers that GET /v1/sandboxes/{id}/endpoints/%d returns, or the API key",
		wire.AgentPort, wire.AgentPort)
}

// ownPage reports whether a browser sends a request with a cookie for a page of the
// same guest. To a browser all names below one domain are one site, so SameSite does
// not keep the pages of guests apart. Links from one to the other are let through.
func (g *Gateway) ownPage(r *http.Request) bool {
	switch site := r.Header.Get("Sec-Fetch-Site"); {
	case site == "same-origin", site == "none":
		return true
	case site != "":
		return r.Header.Get("Sec-Fetch-Mode") == "navigate" && (r.Method == http.MethodGet || r.Method == http.MethodHead)
	}
	origin := r.Header.Get("Origin")
	if origin == "" {
		return true
	}
	host := r.Host
	if g.trustedProxy(r) {
		host = cmp.Or(r.Header.Get("X-Forwarded-Host"), host)
	}
	u, err := url.Parse(origin)
	return err == nil && strings.EqualFold(u.Host, host)
}

// Token is the text that opens one port of one sandbox, and nothing else.
func (g *Gateway) Token(id string, port uint16) string {
	m := hmac.New(sha256.New, g.cfg.Secret)
	fmt.Fprintf(m, "endpoint\n%s\n%d\n", id, port)
	return hex.EncodeToString(m.Sum(nil)[:20])
}

// tokenHeaders carry the token of a port.
var tokenHeaders = []string{wire.HeaderEndpointToken, wire.HeaderSecureAccess}

// tokenGiven reports whether a request has a header with the token of a port, and
// whether every such header is right. A client that sends a wrong one is not let in
// for a cookie that a browser adds.
func tokenGiven(r *http.Request, want string) (given, right bool) {
	right = true
	for _, h := range tokenHeaders {
		for _, v := range r.Header.Values(h) {
			given = true
			right = equal(v, want) && right
		}
	}
	return given, given && right
}

// equal compares in a time that depends on neither text.
func equal(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// cutQuery takes key out of a raw query and returns its first value. It leaves the
// rest as it is, also what does not parse: that is for the guest to read.
func cutQuery(raw, key string) (value, rest string) {
	if !strings.Contains(raw, key) {
		return "", raw
	}
	var keep []string
	for pair := range strings.SplitSeq(raw, "&") {
		if k, v, _ := strings.Cut(pair, "="); k == key {
			if value == "" {
				value = v
			}
			continue
		}
		keep = append(keep, pair)
	}
	return value, strings.Join(keep, "&")
}

// Opens reports whether a text is the token of a port of a sandbox.
func (g *Gateway) Opens(text, id string, port uint16) bool { return equal(text, g.Token(id, port)) }
