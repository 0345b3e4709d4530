package gateway

import (
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

// A Target is the port of a sandbox that a request names, and the part of its path
// that is the port's.
type Target struct {
	ID   string // or name of the sandbox, as sent
	Port string // as sent
	Rest string // of the path, undecoded, for the guest; empty or begins with "/"

	base  string // path under which the port is served; empty: it is at the root of a host
	alone bool   // it has a host of its own, so to browsers its pages are of another origin than those of other guests

	sig       signature // in the address; zero: none
	sigInPath bool      // what looks like one may be the guest's path
	signed    bool      // sig is right
	until     time.Time // sig expires; set with signed
}

// Below is the target of the API's own route: base is its path up to the port, rest
// what follows.
func Below(base, id, port, rest string) Target {
	t := Target{ID: id, Port: port, Rest: rest, base: base}
	if signed, p, sig, ok := parseSigned(id); ok && p == port {
		t.ID, t.sig = signed, sig
	}
	return t
}

// Base is the path of the API's own route to a port.
func Base(id, port string) string { return "/sandboxes/" + url.PathEscape(id) + "/proxy/" + port }

// Find finds the port that a request to the gateway's listener names.
func (n *Names) Find(r *http.Request) (Target, error) {
	t := Target{Rest: r.URL.EscapedPath()}
	if t.Rest != "" && t.Rest[0] != '/' { // OPTIONS *
		return t, httperr.Invalid("the path %q does not begin with /", httperr.Clip(t.Rest, 20))
	}
	if r.URL.User != nil {
		return t, httperr.Invalid("the request's target contains a user name; send credentials in headers")
	}
	host, err := plainHost(r.Host)
	if err != nil {
		return t, err
	}
	to := r.Header.Values(wire.HeaderIngressTo)
	if len(to) > 1 {
		return t, httperr.Invalid("the header %s was sent %d times; send it once", wire.HeaderIngressTo, len(to))
	}
	if label, ok := strings.CutSuffix(host, "."+n.Domain); ok && n.Domain != "" {
		err := t.parseLabel(label)
		t.alone = true
		if err == nil && len(to) == 1 && to[0] != label {
			err = httperr.Invalid("the host is %q, and the header %s says %q; leave the header out", httperr.Clip(label, 80),
				wire.HeaderIngressTo, httperr.Clip(to[0], 80))
		}
		return t, err
	}
	if !n.own(host) {
		return t, httperr.New(http.StatusNotFound, "GENERAL::NOT_FOUND", errs.NotFound,
			"this gateway does not serve the host %q: use an IP address, localhost, or gateway.domain or gateway.address of its "+
				"configuration", httperr.Clip(host, 80))
	}
	if len(to) == 1 {
		return t, t.parseLabel(to[0])
	}
	return t, t.parsePath()
}

// parseLabel reads {id}-{port}, or the four segments of a signed one. The port follows
// the last hyphen, since names of sandboxes may have hyphens.
func (t *Target) parseLabel(label string) error {
	if id, port, sig, ok := parseSigned(label); ok {
		t.ID, t.Port, t.sig = id, port, sig
		return nil
	}
	i := strings.LastIndexByte(label, '-')
	if i <= 0 || strings.ContainsAny(label, "./%") {
		return httperr.Invalid("%q is not the name of a port of a sandbox; want {id}-{port}, such as abcdefghijkl-8000",
			httperr.Clip(label, 80))
	}
	t.ID, t.Port = label[:i], label[i+1:]
	return nil
}

// parsePath reads /{id}/{port}/…, or /{id}/{port}/{expires}/{signature}/….
func (t *Target) parsePath() error {
	seg := strings.SplitN(t.Rest, "/", 6) // the first is empty
	if len(seg) < 3 || seg[1] == "" || seg[2] == "" || strings.Contains(seg[1], "%") {
		return httperr.New(http.StatusNotFound, "GENERAL::NOT_FOUND", errs.NotFound,
			"this gateway serves ports of sandboxes at /{id}/{port}/…, and %q is not such a path; the API is at another address",
			httperr.Clip(t.Rest, 80))
	}
	t.ID, t.Port = seg[1], seg[2]
	t.base = "/" + seg[1] + "/" + seg[2]
	if len(seg) >= 5 {
		sig := signature{expires: seg[3], mac: seg[4]}
		if sig.wellFormed() {
			t.sig, t.sigInPath = sig, true
			t.base += "/" + seg[3] + "/" + seg[4]
		}
	}
	t.Rest = t.Rest[len(t.base):]
	return nil
}

// unsign makes what looked like a signature a part of the guest's own path.
func (t *Target) unsign() {
	end := "/" + t.sig.expires + "/" + t.sig.mac
	t.base, t.Rest = strings.TrimSuffix(t.base, end), end+t.Rest
	t.sig, t.sigInPath = signature{}, false
}
