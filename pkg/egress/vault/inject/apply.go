package inject

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/egress/paths"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// maxAdded is how many bytes the path, the query and the headers of a request may have after
// placeholders were replaced, each: a guest may write a short one often.
const maxAdded = 64 << 10

var errTooLong = errors.New("longer than it may be after its placeholders are replaced")

// apply is the state of one Apply.
type apply struct {
	l                    *Live
	r                    *http.Request
	scheme, host, method string
	port                 uint16
	b                    *vault.Binding // nil: none matches
	values               map[string]value
	mine                 map[string]vault.Header // the headers of b by their folded name
}

// Apply puts the credentials of the binding that matches into r, a request that net/http has
// parsed and will send to host. It changes URL, Header, Trailer, Body, GetBody and ContentLength.
// scheme is "https" or "http"; host is the name in normal form that was verified, or "" if none was.
//
// A *Denied is for the guest; another error is of the body, which Apply reads if it is announced
// as 64 KiB at most, so that a placeholder in it is found before anything is sent, or says that the
// context of r has ended. After an error
// r must not be sent, and may be changed in part. The Use is nil for a host without bindings.
//
// r.Trailer must have its values when r.Body returns io.EOF, as net/http fills it.
func (l *Live) Apply(r *http.Request, scheme, host string, port uint16) (*Use, error) {
	a := &apply{l: l, r: r, scheme: scheme, host: host, port: port, method: r.Method, values: map[string]value{}}
	if a.method == "" {
		a.method = http.MethodGet
	}
	if r.Header == nil {
		r.Header = http.Header{}
	}
	if err := a.whereTo(); err != nil {
		return nil, err
	}
	bound := host != "" && l.bound(host)
	if bound {
		if vault.Forbidden(a.method) && !weak.Off(weak.Judge) {
			return nil, a.deny(Event{Kind: Malformed, Place: "method"}, http.StatusMethodNotAllowed, "sandboxd refuses "+
				strings.ToUpper(a.method)+" to this host, because the host gets credentials, and the answer would show them.")
		}
		if err := a.target(); err != nil {
			return nil, err
		}
	}
	if err := a.resolve(); err != nil {
		return nil, err
	}
	for _, step := range []func() error{a.path, a.query, a.headers} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	if bound {
		a.connection()
	}
	a.set()
	if err := a.body(); err != nil {
		return nil, err
	}
	if !bound {
		return nil, nil
	}
	return l.use(host, a.b, a.values), nil
}

// whereTo refuses a request that says another host than the one it goes to.
func (a *apply) whereTo() error {
	if weak.Off(weak.Judge) {
		return nil
	}
	said := a.r.Host
	if said == "" {
		said = a.r.URL.Host // what net/http sends as Host
	}
	if h, p, err := net.SplitHostPort(said); err == nil && p == strconv.Itoa(int(a.port)) {
		said = h
	}
	// HTTP/2 lets a target have blanks, which would end it in HTTP/1.
	badQuery := strings.ContainsFunc(a.r.URL.RawQuery, func(c rune) bool { return c <= ' ' || c == 0x7f || c == '#' })
	if a.r.URL.Opaque != "" || a.r.URL.User != nil || badQuery {
		return a.deny(Event{Kind: Malformed, Place: "query"}, http.StatusBadRequest,
			"sandboxd does not send on this target of a request: write a path, or a URL without a user, and %20 for a blank.")
	}
	ascii := !strings.ContainsFunc(said, func(c rune) bool { return c > unicode.MaxASCII }) // some of which fold into ASCII
	if a.host != "" && (!ascii || strings.ToLower(strings.TrimSuffix(said, ".")) != a.host) {
		return a.deny(Event{Kind: Malformed, Place: "host"}, http.StatusMisdirectedRequest,
			"sandboxd does not send this request: its Host is not the name of the server that it goes to. Open a connection to that host.")
	}
	delete(a.r.Header, "Host")
	return nil
}

// resolve gets the values that the binding uses.
func (a *apply) resolve() error {
	if a.b == nil {
		return nil
	}
	a.mine = map[string]vault.Header{}
	for _, name := range a.b.Uses() {
		s := a.l.secrets[name]
		v, err := a.l.value(a.r.Context(), s)
		if err == nil && s.Source.Type != vault.Inline {
			err = a.fits(name, vault.NewSecret(v.text))
		}
		if gone := a.r.Context().Err(); err != nil && gone != nil {
			return fmt.Errorf("wait for the credential %q: %w", name, gone)
		}
		if err != nil {
			e := Event{Kind: Unavailable, Credential: name, Text: err.Error()}
			d := a.deny(e, http.StatusBadGateway, fmt.Sprintf("sandboxd cannot send this "+
				"request: the credential %q of the binding %q is not available. The administrator of the host finds the reason in its log.",
				name, a.b.Name))
			d.Err = err
			return d
		}
		a.values[name] = v
	}
	for _, h := range a.b.Auth.Headers {
		a.mine[vault.FoldHeader(h.Name)] = h
	}
	return nil
}

// fits checks a value of a file or a command as a vault does an inline one when it is written. As
// there, the answer depends on no text that the binding or the guest brings: the guest sees it.
func (a *apply) fits(name string, v vault.Secret) error {
	for _, h := range a.b.Auth.Headers {
		if h.Credential == name {
			if err := vault.CheckHeader(a.b.Auth.Type, v); err != nil {
				return err
			}
		}
	}
	for _, s := range a.b.Auth.Substitutions {
		if s.Credential == name && slices.Contains(s.In, vault.InHeader) {
			if err := vault.CheckHeader("", v); err != nil {
				return err
			}
		}
	}
	return nil
}

// deny reports an event and makes an error of it.
func (a *apply) deny(e Event, status int, text string) *Denied {
	e.Host = a.host
	if a.b != nil {
		e.Binding = a.b.Name
	}
	a.l.report(e)
	code := "SANDBOX::FORBIDDEN"
	switch status {
	case http.StatusBadRequest:
		code = "SANDBOX::INVALID_PARAMETER"
	case http.StatusMisdirectedRequest:
		code = "SANDBOX::MISDIRECTED"
	case http.StatusRequestHeaderFieldsTooLarge:
		code = "SANDBOX::HEADERS_TOO_LARGE"
	case http.StatusMethodNotAllowed:
		code = "SANDBOX::METHOD_NOT_ALLOWED"
	case http.StatusBadGateway:
		code = "SANDBOX::UNAVAILABLE"
	}
	return &Denied{Status: status, Code: code, Text: text, Kind: e.Kind}
}

// trailer takes a trailer away that no guest may send: one with the name of a header that a
// binding sets, a reserved one, or one that moves the request.
func (a *apply) trailer(name string) {
	if _, mine := a.mine[vault.FoldHeader(name)]; mine || a.b != nil && vault.Reserved(name) || a.moves(name) {
		delete(a.r.Trailer, name)
	}
}

// path replaces placeholders in the path. Each value becomes part of one segment.
func (a *apply) path() error {
	if a.b == nil { // the path may have escapes without need, so look behind them
		_, err := a.inspect("path").replace(a.r.URL.Path, maxAdded)
		return err
	}
	old := a.r.URL.EscapedPath()
	path, err := a.exchange(vault.InPath, escapeAll).replace(old, maxAdded)
	if err != nil || path == old {
		return a.tooLong("path", err)
	}
	if dotted(paths.Form(path)) || !a.setPath(path) {
		return a.deny(Event{Kind: Malformed, Place: "path"}, http.StatusBadRequest,
			"sandboxd cannot put the credential into the path of this request: it would become . or .. there.")
	}
	return nil
}

// query replaces placeholders in the query.
func (a *apply) query() error {
	x := a.exchange(vault.InQuery, escapeAll)
	query, err := x.replace(a.r.URL.RawQuery, maxAdded)
	if err != nil {
		return a.tooLong("query", err)
	}
	// A placeholder behind escapes is not exchanged, but it is seen.
	x.needles, x.replaces = nil, false
	if _, err := x.replace(paths.Form(a.r.URL.RawQuery), maxAdded); err != nil {
		return err
	}
	a.r.URL.RawQuery = query
	return nil
}

// tooLong makes a Denied of errTooLong.
func (a *apply) tooLong(place string, err error) error {
	if !errors.Is(err, errTooLong) {
		return err
	}
	return a.deny(Event{Kind: Malformed, Place: place}, http.StatusRequestHeaderFieldsTooLarge, fmt.Sprintf(
		"sandboxd does not send this request: its %s is longer than %d bytes after its placeholders are replaced.", place, maxAdded))
}

// movers are headers by which some servers and frameworks take another host, path or method than
// those that the binding has matched. With those that begin with one of moverPrefixes.
var (
	movers = []string{
		"forwarded", "x-host", "x-http-host-override", "x-http-method", "x-http-method-override", "x-method-override",
		"x-envoy-original-path", "x-script-name",
	}
	moverPrefixes = []string{"x-forwarded-", "x-original-", "x-rewrite-"}
)

// moves reports whether a header moves a request that gets credentials. A request without any
// keeps what its guest says.
func (a *apply) moves(name string) bool {
	name = vault.FoldHeader(name)
	return len(a.values) > 0 && !weak.Off(weak.Vault) && (slices.Contains(movers, name) ||
		slices.ContainsFunc(moverPrefixes, func(p string) bool { return strings.HasPrefix(name, p) }))
}

// headers replaces placeholders in headers, and takes away those that the binding sets, and those
// that move the request.
func (a *apply) headers() error {
	for name := range a.r.Trailer {
		a.trailer(name)
	}
	budget := maxAdded
	for name, values := range a.r.Header {
		x := a.exchange(vault.InHeader, asItIs)
		h, mine := a.mine[vault.FoldHeader(name)]
		switch {
		case mine:
			x = a.inspect("header")
			x.allowed = func(s *secret) bool { return s.Name == h.Credential }
		case vault.Reserved(name):
			x = a.inspect("header")
		}
		out := make([]string, len(values))
		for i, v := range values {
			var err error
			if out[i], err = x.field(v, budget); err != nil {
				return a.tooLong("header", err)
			}
			if budget -= len(out[i]) - len(v); budget < 0 {
				return a.tooLong("header", errTooLong)
			}
		}
		if mine || a.moves(name) {
			delete(a.r.Header, name)
		} else {
			a.r.Header[name] = out
		}
	}
	return nil
}

// field replaces placeholders in a value of a header, also inside of Basic credentials: clients
// write there what stands in a URL before the host.
func (x *exchange) field(v string, limit int) (string, error) {
	scheme, coded, ok := strings.Cut(v, " ")
	if ok && strings.EqualFold(scheme, "basic") {
		coded = strings.TrimSpace(coded)
		if plain, err := base64.StdEncoding.DecodeString(coded); err == nil {
			out, err := x.replace(string(plain), limit)
			if err != nil || out == string(plain) {
				return v, err
			}
			return scheme + " " + base64.StdEncoding.EncodeToString([]byte(out)), nil
		}
	}
	return x.replace(v, limit)
}

// set sets the headers of the binding.
func (a *apply) set() {
	if a.b == nil {
		return
	}
	for _, h := range a.b.Auth.Headers {
		a.r.Header[h.Name] = []string{a.b.Auth.Type.Prefix() + a.values[h.Credential].text}
	}
}

// connection takes away what the guest says about the connection, but for a WebSocket: a name of
// a header there would make the next proxy drop it, and with it the credential. Behind a change
// to HTTP/2 no request would be seen.
func (a *apply) connection() {
	h := a.r.Header
	upgrade := slices.ContainsFunc(h["Connection"], func(v string) bool {
		return slices.ContainsFunc(strings.Split(v, ","), func(t string) bool { return strings.EqualFold(strings.TrimSpace(t), "upgrade") })
	})
	delete(h, "Connection")
	delete(h, "Http2-Settings")
	if upgrade && strings.EqualFold(h.Get("Upgrade"), "websocket") {
		h["Connection"] = []string{"Upgrade"}
	} else {
		delete(h, "Upgrade")
	}
	if a.l.o.Mask {
		h["Accept-Encoding"] = []string{"identity"}
		delete(h, "Range") // a server may always answer with the whole (RFC 9110, section 14.2)
		delete(h, "If-Range")
	}
}

// unescape decodes a path.
func unescape(path string) (string, bool) {
	s, err := url.PathUnescape(path)
	return s, err == nil
}
