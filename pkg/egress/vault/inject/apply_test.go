package inject

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// The values of these tests. None of them is part of another, or of a request.
const (
	token  = "sEcr3T-token/+?&=%41"
	basic  = "dXNlcjpzRWNyM1QtcGFzcw==" // user:sEcr3T-pass
	second = "sEcr3T-second"
	multi  = "sEcr3T-\"multi\"\nline ü<&>"
)

const alien = vault.PlaceholderPrefix + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

// A world is a vault, made live, and what it has reported.
type world struct {
	*Live
	v      *vault.Vault
	events []Event
}

// bindings of the vault of these tests.
const bindings = `
	{"name":"api","match":{"hosts":["api.example.com"],"paths":["/v1/*"],"methods":["GET","POST"]},"auth":{"type":"bearer","credential":"token"}},
	{"name":"key","match":{"hosts":["*.key.example.com"]},"auth":{"type":"apiKey","name":"X-Api-Key","credential":"second"}},
	{"name":"git","match":{"hosts":["git.example.com"],"schemes":["https","http"]},"auth":{"type":"basic","credential":"basic"}},
	{"name":"two","match":{"hosts":["two.example.com"]},"auth":{"type":"customHeaders","headers":[{"name":"X-One","credential":"token"},
		{"name":"X-Two","credential":"second"}]}},
	{"name":"sub","match":{"hosts":["sub.example.com"]},"auth":{"type":"passthrough","substitutions":[
		{"credential":"token","placeholder":"{{TOKEN}}","in":["path","query","header","body"]},
		{"credential":"multi","placeholder":"<MULTI-LINE>","in":["body","query","path"]},
		{"credential":"second","placeholder":"$SECOND$$","in":["query"]}]}}`

func newWorld(t testing.TB, o Options) *world {
	t.Helper()
	q := func(name, value string) string { return fmt.Sprintf(`{"name":%q,"source":{"value":%q}}`, name, value) }
	v, err := vault.CreateTrusted([]byte(`{"credentials":[` + strings.Join([]string{
		q("token", token), q("basic", basic), q("second", second), q("multi", multi), q("unbound", "sEcr3T-unbound"),
	}, ",") + `],"bindings":[` + bindings + `]}`))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{v: v}
	o.Report = func(e Event) { w.events = append(w.events, e) }
	w.Live = New(v, o, nil)
	return w
}

func (w *world) drawn(credential string) string { return w.v.Credential(credential).Placeholder }

// parse reads a request as a server does, and makes an outgoing one of it.
func parse(t testing.TB, raw string) *http.Request {
	t.Helper()
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(strings.ReplaceAll(raw, "\n", "\r\n"))))
	if err != nil {
		t.Fatalf("%q: %v", raw, err)
	}
	r.RequestURI = ""
	return r
}

// sent is a request as net/http writes it.
func sent(t testing.TB, r *http.Request) string {
	t.Helper()
	var b bytes.Buffer
	if err := r.Write(&b); err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(b.String(), "\r\n", "\n")
}

// at applies the vault to a request to its Host.
func (w *world) at(r *http.Request) (*Use, error) { return w.Apply(r, "https", r.Host, 443) }

// The values as they stand in a URL.
const (
	tokenURL = "sEcr3T-token%2F%2B%3F%26%3D%2541"
	multiURL = "sEcr3T-%22multi%22%0Aline%20%C3%BC%3C%26%3E"
)

// same applies the vault to one request, and compares what is sent with another.
func (w *world) same(t *testing.T, name, in, want string) {
	t.Helper()
	r := parse(t, in)
	u, err := w.at(r)
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	if got, want := sent(t, r), sent(t, parse(t, want)); got != want {
		t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
	}
	if (u != nil) != w.bound(r.Host) {
		t.Errorf("%s: Use %v", name, u)
	}
	if len(w.events) > 0 {
		t.Errorf("%s: events %v", name, w.events)
	}
}

func TestApply(t *testing.T) {
	w := newWorld(t, Options{})
	coded := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	const bearer, password = "Authorization: Bearer " + token + "\n", "Authorization: Basic " + basic + "\n"
	for _, c := range []struct{ name, host, path, head, wantPath, wantHead string }{
		{"bearer", "api.example.com", "/v1/a?b", "", "", bearer},
		{"its own", "api.example.com", "/v1/", "authorization: Basic eDp5\nAUTHORIZATION: z\n", "", bearer},
		{"another path", "api.example.com", "/v2", "Authorization: mine\n", "", "Authorization: mine\n"},
		{"basic", "git.example.com", "/", "", "", password},
		{"spellings", "a.key.example.com", "/", "x_api_key: 1\nX_API-KEY: 2\nx-api-key: 3\n", "", "X-Api-Key: " + second + "\n"},
		{"two headers", "two.example.com", "/", "X-Two: a\n", "", "X-One: " + token + "\nX-Two: " + second + "\n"},
		{"no binding", "www.example.net", "/../x//y", "X-Api-Key: 1\n", "", "X-Api-Key: 1\n"},
		{"the apex of a wildcard", "key.example.com", "/", "", "", ""},
		{"connection", "git.example.com", "/", "Connection: authorization, x-y\n", "", password},
		{
			"WebSocket", "git.example.com", "/", "Connection: keep-alive, Upgrade\nUpgrade: websocket\n", "",
			password + "Connection: Upgrade\nUpgrade: websocket\n",
		},
		{"h2c", "git.example.com", "/", "Connection: Upgrade, HTTP2-Settings\nUpgrade: h2c\nHTTP2-Settings: AAMA\n", "", password},
		{
			"headers that move a request", "git.example.com", "/", "X-Original-URL: /a\nX-Rewrite-URL: /a\nX_Original_Uri: /a\n" +
				"X-HTTP-Method-Override: DELETE\nx-http-method: DELETE\nX-Method-Override: TRACE\nForwarded: host=x\n" +
				"X-Forwarded-Host: x\nX-Forwarded-Prefix: /a\nX-Host: x\nX-Original-Host: x\nX_Forwarded_Proto: http\nX-Kept: 1\n", "",
			password + "X-Kept: 1\n",
		},
		{
			"headers that move a request without a credential", "www.example.net", "/", "X-Original-URL: /a\nForwarded: host=x\n", "",
			"X-Original-URL: /a\nForwarded: host=x\n",
		},
		{"path", "sub.example.com", "/a/{{TOKEN}}b/c", "", "/a/" + tokenURL + "b/c", ""},
		{"escaped path", "sub.example.com", "/%7b%7bTOKEN%7d%7d/%7B%7BTOKEN%7D%7D", "", "/" + tokenURL + "/" + tokenURL, ""},
		{
			"query", "sub.example.com", "/?a={{TOKEN}}&b=%3CMULTI-LINE%3E&c=$SECOND$$&d=%24SECOND%24%24", "",
			"/?a=" + tokenURL + "&b=" + multiURL + "&c=" + second + "&d=" + second, "",
		},
		{
			"header", "sub.example.com", "/", "X-A: a{{TOKEN}}b{{TOKEN}}\nX-B: $SECOND$$\nAccept-Encoding: {{TOKEN}}\n", "",
			"Accept-Encoding: {{TOKEN}}\nX-A: a" + token + "b" + token + "\nX-B: $SECOND$$\n",
		},
		{
			"within basic", "sub.example.com", "/", "Authorization: basic " + coded("u:{{TOKEN}}") + "\n", "",
			"Authorization: basic " + coded("u:"+token) + "\n",
		},
		{"another host", "www.example.net", "/{{TOKEN}}", "", "/%7B%7BTOKEN%7D%7D", ""},
	} {
		request := func(path, head string) string {
			return "GET " + path + " HTTP/1.1\nHost: " + c.host + "\nUser-Agent: u\n" + head + "\n"
		}
		if c.wantPath == "" {
			c.wantPath = c.path
		}
		w.same(t, c.name, request(c.path, c.head), request(c.wantPath, c.wantHead))
	}
}

// TestApplyBody: values are written into bodies as the type of the body wants it.
func TestApplyBody(t *testing.T) {
	w := newWorld(t, Options{})
	for _, c := range []struct{ head, in, want string }{
		{"Content-Type: text/plain", "a{{TOKEN}}b$SECOND$$", "a" + token + "b$SECOND$$"},
		{
			"Content-Type: application/json; charset=utf-8", `{"a":"\u003cMULTI-LINE\u003e <MULTI-LINE>"}`,
			`{"a":"sEcr3T-\"multi\"\nline ü<&> sEcr3T-\"multi\"\nline ü<&>"}`,
		},
		{
			"Content-Type: application/x-www-form-urlencoded", `a={{TOKEN}}&b=%3CMULTI-LINE%3E`,
			"a=" + tokenURL + "&b=" + strings.ReplaceAll(multiURL, "%20", "+"),
		},
		{"Content-Type: multipart/form-data; boundary=x", "{{TOKEN}}", "{{TOKEN}}"},
		{"Content-Type: application/grpc", "{{TOKEN}}", "{{TOKEN}}"},
		{"Content-Encoding: gzip", "{{TOKEN}}", "{{TOKEN}}"},
	} {
		post := func(body string) string {
			return fmt.Sprintf("POST /x HTTP/1.1\nHost: sub.example.com\nContent-Length: %d\n%s\n\n%s", len(body), c.head, body)
		}
		w.same(t, c.head, post(c.in), post(c.want))
	}
	head := "POST / HTTP/1.1\nHost: sub.example.com\nTransfer-Encoding: chunked\n\n"
	w.same(t, "chunks", head+"5\n{{TOK\n4\nEN}}\n0\n\n", head+fmt.Sprintf("%x\n%s\n0\n\n", len(token), token))
}

// TestWhere: the binding is for a scheme, its port, and the verified name.
func TestWhere(t *testing.T) {
	w := newWorld(t, Options{})
	for _, c := range []struct {
		scheme, host string
		port         uint16
		said         string
		want         string // "": refused
	}{
		{"https", "api.example.com", 443, "api.example.com", "Bearer " + token},
		{"https", "api.example.com", 443, "API.example.com:443", "Bearer " + token},
		{"https", "api.example.com", 443, "api.example.com.", "Bearer " + token},
		{"http", "api.example.com", 80, "api.example.com", "mine"},
		{"https", "api.example.com", 8443, "api.example.com:8443", "mine"},
		{"http", "git.example.com", 80, "git.example.com", "Basic " + basic},
		{"http", "git.example.com", 443, "git.example.com", "mine"},
		{"https", "www.example.net", 443, "api.example.com", ""},
		{"https", "api.example.com", 443, "www.example.net", ""},
		{"https", "api.example.com", 443, "api.example.com:444", ""},
		{"https", "api.example.com", 443, "", ""},
		{"https", "a.key.example.com", 443, "a.\u212aey.example.com", ""}, // the Kelvin sign
		{"https", "", 443, "api.example.com", "mine"},
	} {
		r := parse(t, "GET /v1/x HTTP/1.1\nHost: x\nAuthorization: mine\n\n")
		r.Host = c.said
		_, err := w.Apply(r, c.scheme, c.host, c.port)
		d, _ := errors.AsType[*Denied](err)
		got := r.Header.Get("Authorization")
		if c.want != "" && (err != nil || got != c.want) || c.want == "" && (d == nil ||
			d.Status != 421 || d.Code != "SANDBOX::MISDIRECTED" || got != "mine") {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
}

// TestMalformed: what two readers could read in different ways gets no credential.
func TestMalformed(t *testing.T) {
	w := newWorld(t, Options{})
	for _, path := range []string{
		"/v1/../x", "/v1/..", "/v1/./x", "/v1/.", "/v1//x", "//v1/x", "/v1/%2e%2e/x", "/v1/%2E/x", "/v1/%5cx",
		`/v1/\x`, "/v1/%00", "/v1/%0d%0ax", "/v1/%7f", "/v1/%41", "/v1/%7e", "/v1/..;x/y", "/v1/.;/y", "/v1/%252e%252e/x", "/v1/%252fx", "/v1/%25%32", "/v1/%255c",
	} {
		r := parse(t, "GET / HTTP/1.1\nHost: api.example.com\n\n")
		u, err := r.URL.Parse("https://api.example.com/")
		if err != nil {
			t.Fatal(err)
		}
		r.URL = u
		var ok bool
		if r.URL.Path, ok = unescape(path); !ok {
			t.Fatal(path)
		}
		r.URL.RawPath = path
		_, err = w.at(r)
		if d, ok := errors.AsType[*Denied](err); !ok || d.Status != 400 || d.Kind != Malformed || r.Header["Authorization"] != nil {
			t.Errorf("%s: %v, %v", path, err, r.Header)
		}
		r.Host = "www.example.net"
		if _, err := w.at(r); err != nil {
			t.Errorf("%s to a host without bindings: %v", path, err)
		}
	}
	for _, method := range []string{"TRACE", "CONNECT", "trace", "TRACK"} {
		r := parse(t, "GET /v1/ HTTP/1.1\nHost: api.example.com\n\n")
		r.Method = method
		if d, ok := errors.AsType[*Denied](errOf(w.at(r))); !ok || d.Status != 405 {
			t.Errorf("%s: %v", method, d)
		}
	}
	r := parse(t, "GET /v1/ HTTP/1.1\nHost: api.example.com\n\n")
	r.URL.Opaque = "//www.example.net/x"
	if _, err := w.at(r); err == nil {
		t.Error("an opaque URL passes")
	}
	r = parse(t, "GET /v1/ HTTP/1.1\nHost: api.example.com\n\n")
	r.URL.RawQuery = "a HTTP/1.1" // HTTP/2 takes a blank
	if _, err := w.at(r); err == nil {
		t.Error("a query with a blank passes")
	}
	r = parse(t, "OPTIONS * HTTP/1.1\nHost: api.example.com\n\n")
	if _, err := w.at(r); err != nil || r.Header["Authorization"] != nil {
		t.Errorf("OPTIONS *: %v, %v", err, r.Header)
	}
}

func errOf3(_ int, _, text string) string { return text }

func errOf[T any](_ T, err error) error { return err }

// TestReadings: a binding must be the same in each reading of a path.
func TestReadings(t *testing.T) {
	v, err := vault.Create([]byte(`{"credentials":[{"name":"c","source":{"value":"sEcr3T-c"}}],"bindings":[{"name":"b","match":{
		"hosts":["npm.example.com"],"paths":["/@scope*","/group/*/end"]},"auth":{"type":"bearer","credential":"c"}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/@scope%2fname":     "Bearer sEcr3T-c",
		"/@scope%2Fname/x":   "Bearer sEcr3T-c",
		"/other%2Fname":      "",
		"/group/a%2Fend":     "refused", // it matches only with a slash
		"/group%2Fx/end":     "refused",
		"/group/x/end;v=1":   "refused", // without what follows the semicolon it matches
		"/other;v=1":         "",
		"/@scope%2f..%2fx":   "refused",
		"/@scope%2f%2fx":     "refused",
		"/@scope%252fname":   "refused",
		"/@scope%2f%2e%2e/x": "refused",
	} {
		r := parse(t, "PUT "+path+" HTTP/1.1\nHost: npm.example.com\n\n")
		_, err := New(v, Options{}, nil).Apply(r, "https", "npm.example.com", 443)
		got := r.Header.Get("Authorization")
		if err != nil {
			got = "refused"
		}
		if got != want {
			t.Errorf("%s: %q, %v; want %q", path, got, err, want)
		}
		if err == nil && !strings.HasPrefix(sent(t, r), "PUT "+path+" ") {
			t.Errorf("%s was sent as %.50s", path, sent(t, r))
		}
	}
}

// TestExactHost: a binding of the very host goes before one with a wildcard, and only where it matches.
func TestExactHost(t *testing.T) {
	v, err := vault.Create([]byte(`{"credentials":[{"name":"c","source":{"value":"sEcr3T-exact"}},{"name":"w","source":{"value":"sEcr3T-wild"}}],
		"bindings":[{"name":"m","match":{"hosts":["*.example.com"]},"auth":{"type":"bearer","credential":"w"}},
		{"name":"b","match":{"hosts":["api.example.com"],"paths":["/v1/*"]},"auth":{"type":"bearer","credential":"c"}},
		{"name":"z","match":{"hosts":["*.example.org","x.example.com"]},"auth":{"type":"bearer","credential":"c"}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	for target, want := range map[string]string{
		"api.example.com/v1/x": "Bearer sEcr3T-exact", "api.example.com/v2": "Bearer sEcr3T-wild",
		"www.example.com/v1/x": "Bearer sEcr3T-wild",
		"x.example.com/":       "Bearer sEcr3T-exact", "y.example.org/": "Bearer sEcr3T-exact",
	} {
		host, path, _ := strings.Cut(target, "/")
		r := parse(t, "GET /"+path+" HTTP/1.1\nHost: "+host+"\n\n")
		if _, err := New(v, Options{}, nil).Apply(r, "https", host, 443); err != nil || r.Header.Get("Authorization") != want {
			t.Errorf("%s: %q, %v; want %q", target, r.Header.Get("Authorization"), err, want)
		}
	}
}

// TestPathValue: a value stays within its segment, whatever it is.
func TestPathValue(t *testing.T) {
	for value, want := range map[string]string{
		"a/b?c#d": "/x/a%2Fb%3Fc%23d/y", "..": "", ".": "", "../../etc": "/x/..%2F..%2Fetc/y", "%2e%2e": "/x/%252e%252e/y", `a\b`: "/x/a%5Cb/y",
		"a;b": "/x/a%3Bb/y", "..;": "", ".;a": "", "a b\nc": "/x/a%20b%0Ac/y",
	} {
		v, err := vault.Create([]byte(fmt.Sprintf(`{"credentials":[{"name":"c","source":{"value":%q}}],"bindings":[{"name":"b","match":{
			"hosts":["a.example.com"]},"auth":{"type":"passthrough","substitutions":[{"credential":"c","placeholder":"{{TOKEN}}","in":["path"]}]}}]}`, value)))
		if err != nil {
			t.Fatal(err)
		}
		r := parse(t, "GET /x/{{TOKEN}}/y HTTP/1.1\nHost: a.example.com\n\n")
		_, err = New(v, Options{}, nil).Apply(r, "https", "a.example.com", 443)
		if want == "" && err == nil || want != "" && (err != nil || r.URL.RequestURI() != want) {
			t.Errorf("%q: %s, %v; want %q", value, r.URL.RequestURI(), err, want)
		}
	}
}

// TestDrawn: a placeholder that sandboxd has drawn goes only where its credential goes.
func TestDrawn(t *testing.T) {
	w := newWorld(t, Options{})
	b64 := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	tok, sec, unb := w.drawn("token"), w.drawn("second"), w.drawn("unbound")
	hex := func(s string) string { return strings.ReplaceAll(s, "sbxph", "%73b%78ph") }
	head := func(path, host, header string) string {
		return "POST " + path + " HTTP/1.1\nHost: " + host + "\n" + header
	}
	body := func(host, kind, b string) string {
		return head("/", host, fmt.Sprintf("Content-Type: %s\nContent-Length: %d\n\n%s", kind, len(b), b))
	}
	chunks := func(host, b, trailer string) string {
		return head("/", host, "Transfer-Encoding: chunked\nTrailer: X-T\n\n"+fmt.Sprintf("%x\n%s\n0\n%s\n", len(b), b, trailer))
	}
	for _, c := range []struct{ in, want string }{ // "": it is exchanged, and nothing of it is left
		{head("/v1/", "api.example.com", "Authorization: Bearer "+tok+"\n\n"), ""},
		{head("/v1/", "api.example.com", "Authorization: Basic "+b64("x:"+tok)+"\n\n"), ""},
		{head("/", "a.key.example.com", "x-api-key: "+sec+"\n\n"), ""},
		{head("/a/"+tok+"?b="+tok, "sub.example.com", "X-Y: "+tok+"\n\n"), ""},
		{head("/?b="+sec, "sub.example.com", "\n"), ""},
		{body("sub.example.com", "application/json", `"`+tok+`"`), ""},
		{chunks("sub.example.com", "a"+tok+"b", ""), ""},
		{head("/v1/", "api.example.com", "Authorization: Bearer "+sec+"\n\n"), "wrong-host second header"},
		{head("/", "two.example.com", "X-One: "+sec+"\n\n"), "wrong-place second header"},
		{head("/v1/", "api.example.com", "X-Other: "+tok+"\n\n"), "wrong-place token header"},
		{head("/v1/"+tok, "api.example.com", "\n"), "wrong-place token path"},
		{head("/v1/?"+tok, "api.example.com", "\n"), "wrong-place token query"},
		{head("/v1/?"+hex(tok), "api.example.com", "\n"), "wrong-place token query"},
		{head("/v2/", "api.example.com", "Authorization: Bearer "+tok+"\n\n"), "wrong-place token header"},
		{body("api.example.com", "text/plain", tok), "wrong-place token body"},
		{body("sub.example.com", "text/plain", sec), "wrong-place second body"},
		{body("sub.example.com", "multipart/form-data", tok), "wrong-place token body"},
		{head("/", "www.example.net", "Authorization: Bearer "+tok+"\n\n"), "wrong-host token header"},
		{head("/", "www.example.net", "Authorization: Basic "+b64("x:"+tok)+"\n\n"), "wrong-host token header"},
		{head("/"+hex(tok), "www.example.net", "\n"), "wrong-host token path"},
		{head("/?x="+tok, "www.example.net", "\n"), "wrong-host token query"},
		{body("www.example.net", "application/octet-stream", "x"+tok), "wrong-host token body"},
		{chunks("www.example.net", "a"+tok, ""), "wrong-host token body"},
		{chunks("www.example.net", "a", "X-T: "+tok+"\n"), "wrong-host token trailer"},
		{chunks("sub.example.com", "a", "X-T: "+tok+"\n"), "wrong-place token trailer"},
		{head("/", "api.example.com", "X: "+unb+"\n\n"), "wrong-host unbound header"},
		{head("/"+vault.PlaceholderPrefix+strings.Repeat("7", 26), "www.example.net", "\n"), "foreign  path"},
		{head("/"+alien, "www.example.net", "\n"), "foreign  path"},
		{head("/v1/", "api.example.com", "Authorization: Bearer "+alien+"\n\n"), "foreign  header"},
		{body("sub.example.com", "text/plain", alien), "foreign  body"},
	} {
		w.events = nil
		r := parse(t, c.in)
		_, err := w.at(r)
		var out bytes.Buffer
		if err == nil {
			if err = r.Write(&out); err != nil {
				_, err = r.Body.Read(make([]byte, 1)) // net/http wraps it in what cannot be unwrapped
			}
		}
		d, _ := errors.AsType[*Denied](err)
		got := ""
		for _, e := range w.events {
			got += fmt.Sprintf("%s %s %s", e.Kind, e.Credential, e.Place)
		}
		switch {
		case got != c.want, (c.want == "") != (err == nil),
			err != nil && (d == nil || d.Status != 403 || string(d.Kind) != strings.Fields(c.want)[0]):
			t.Errorf("%s\nevents %q, error %v; want %q", c.in, got, err, c.want)
		case strings.Contains(out.String(), tok) || strings.Contains(out.String(), sec) || strings.Contains(out.String(), alien):
			t.Errorf("%s\nsent with a placeholder:\n%s", c.in, out.String())
		case c.want != "" && strings.Contains(out.String(), "sEcr3T-"):
			t.Errorf("%s\nsent with a value before it was refused:\n%s", c.in, out.String())
		case d != nil && errOf3(d.Tell()) != d.Text:
			t.Errorf("it tells another text than %q", d.Text)
		case d != nil && (strings.Contains(d.Text, "sEcr3T") || strings.Contains(d.Text, vault.PlaceholderPrefix)):
			t.Errorf("the guest is told %q", d.Text)
		}
	}
	_, err := w.at(parse(t, head("/?"+tok, "www.example.net", "\n")))
	want := `the credential "token" in its query. It may stand only in the header Authorization of GET, POST by https to ` +
		"api.example.com with a path /v1/*; and in the path, the query, the header, the body of "
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v; want %s", err, want)
	}
}

// TestTrailers: a trailer has no name that a binding sets.
func TestTrailers(t *testing.T) {
	w := newWorld(t, Options{})
	r := parse(t, "POST /v1/ HTTP/1.1\nHost: api.example.com\nTransfer-Encoding: chunked\n"+
		"Trailer: Authorization, X-Ok, aUthorization, X-Original-Url\n\n1\na\n0\n"+
		"authorization: mine\nX-Original-Url: mine\nX-Ok: {{TOKEN}}\n\n")
	if _, err := w.at(r); err != nil {
		t.Fatal(err)
	}
	head, tail, _ := strings.Cut(sent(t, r), "\n\n")
	if strings.Contains(tail, "mine") || !strings.Contains(tail, "X-Ok: {{TOKEN}}") || strings.Count(head, "uthorization") != 1 {
		t.Errorf("%s\n%s", head, tail)
	}
}

type asked struct{}

// TestSources: values of files and commands are asked for at use, and checked.
func TestSources(t *testing.T) {
	v, err := vault.CreateTrusted([]byte(`{"credentials":[{"name":"f","source":{"type":"file","path":"/x"}}],"bindings":[
		{"name":"b","match":{"hosts":["a.example.com"]},"auth":{"type":"bearer","credential":"f","substitutions":[{"credential":"f",
		"placeholder":"{{TOKEN}}","in":["body"]}]}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	now, fail := "sEcr3T-1", error(nil)
	l := New(v, Options{Source: func(ctx context.Context, c *vault.Credential) (vault.Secret, error) {
		if c.Source.Path != "/x" || ctx.Value(asked{}) != "r" {
			t.Error(c)
		}
		return vault.NewSecret(now), fail
	}}, nil)
	ask := func() (string, error) {
		r := parse(t, "GET / HTTP/1.1\nHost: a.example.com\n\n")
		r = r.WithContext(context.WithValue(r.Context(), asked{}, "r"))
		_, err := l.Apply(r, "https", "a.example.com", 443)
		return r.Header.Get("Authorization"), err
	}
	if got, err := ask(); got != "Bearer sEcr3T-1" || err != nil {
		t.Error(got, err)
	}
	now = "sEcr3T-2"
	if got, err := ask(); got != "Bearer sEcr3T-2" || err != nil {
		t.Error(got, err)
	}
	for _, bad := range []string{
		"", "sEcr3T-\r\nX: y", "sEcr3T-\x00", "sEcr3T-\n", strings.Repeat("x", vault.MaxValue+1),
	} {
		now = bad
		got, err := ask()
		d, ok := errors.AsType[*Denied](err)
		if !ok || d.Status != 502 || d.Code != "SANDBOX::UNAVAILABLE" || d.Kind != Unavailable || got != "" ||
			strings.Contains(err.Error()+fmt.Sprint(d.Err), "sEcr3T") {
			t.Errorf("%q: %q, %v", bad, got, err)
		}
	}
	now, fail = "sEcr3T-3", errors.New("no such file")
	if got, err := ask(); got != "" || !errors.Is(err, fail) || strings.Contains(err.Error(), "no such file") {
		t.Error(got, err)
	}
	r := parse(t, "GET / HTTP/1.1\nHost: a.example.com\n\n")
	if _, err := New(v, Options{}, nil).Apply(r, "https", "a.example.com", 443); err == nil {
		t.Error("no Source, and no error")
	}
}

// TestPlaceholderInValue: a placeholder in a value is a part of the value, in each place, whether
// the value is in the vault or in a file.
func TestPlaceholderInValue(t *testing.T) {
	const substitutions = `,"substitutions":[{"credential":"a","placeholder":"{{A}}","in":["path","query","header","body"]},
		{"credential":"b","placeholder":"{{B}}","in":["path","query","header","body"]}]}`
	for name, source := range map[string]string{"inline": `"value":"sEcr3T-{{B}}{{A}}"`, "file": `"type":"file","path":"/x"`} {
		v, err := vault.CreateTrusted([]byte(`{"credentials":[{"name":"a","source":{` + source + `}},
			{"name":"b","source":{"value":"sEcr3T-{{A}}"}}],"bindings":[
			{"name":"p","match":{"hosts":["p.example.com"]},"auth":{"type":"apiKey","name":"X-Key","credential":"a"` + substitutions + `}]}`))
		if err != nil {
			t.Fatal(err)
		}
		w := &world{v: v, Live: New(v, Options{Source: func(context.Context, *vault.Credential) (vault.Secret, error) {
			return vault.NewSecret("sEcr3T-{{B}}{{A}}"), nil
		}}, nil)}
		const a, b = "sEcr3T-{{B}}{{A}}", "sEcr3T-{{A}}"
		const aURL, bURL = "sEcr3T-%7B%7BB%7D%7D%7B%7BA%7D%7D", "sEcr3T-%7B%7BA%7D%7D"
		w.same(t, name, "GET /{{A}}/{{B}}?q={{B}}{{A}} HTTP/1.1\nHost: p.example.com\nX-Two: {{A}} {{B}}\n\n",
			"GET /"+aURL+"/"+bURL+"?q="+bURL+aURL+" HTTP/1.1\nHost: p.example.com\nX-Two: "+a+" "+b+"\nX-Key: "+a+"\n\n")
		for how, length := range map[string]string{"short": "Content-Length: 14", "long": "Transfer-Encoding: chunked"} {
			body, want := "{{A}}{{B}}{{A}", a+b+"{{A}"
			if how == "long" {
				body = "e\n" + body + "\n0\n\n"
			}
			r := parse(t, "POST / HTTP/1.1\nHost: p.example.com\n"+length+"\n\n"+body)
			if _, err := w.at(r); err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(r.Body); string(got) != want || err != nil {
				t.Errorf("%s, %s body: %q, %v; want %q", name, how, got, err, want)
			}
		}
	}
}

// TestBodies: long bodies are replaced while they are sent, short ones have their length, and
// nothing of the guest is sent again by GetBody.
func TestBodies(t *testing.T) {
	w := newWorld(t, Options{})
	do := func(n int, body io.Reader, header ...string) *http.Request {
		t.Helper()
		r, err := http.NewRequest("POST", "https://sub.example.com/", body)
		if err != nil {
			t.Fatal(err)
		}
		r.ContentLength = int64(n)
		for _, h := range header {
			r.Header.Set(h, "100-continue")
		}
		r.GetBody = func() (io.ReadCloser, error) { t.Error("GetBody of the guest"); return nil, nil }
		if _, err := w.at(r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	text := strings.Repeat("0123456789", 30000) + "{{TOKEN}}" + strings.Repeat("x", 100) + "{{TOKEN}}"
	want := strings.ReplaceAll(text, "{{TOKEN}}", token)
	for name, in := range map[string]io.Reader{
		"whole":   strings.NewReader(text),
		"by half": iotest.HalfReader(strings.NewReader(text)), "by byte": iotest.OneByteReader(strings.NewReader(text)),
		"end with data": iotest.DataErrReader(strings.NewReader(text)),
	} {
		r := do(len(text), in)
		got, err := io.ReadAll(r.Body)
		if err != nil || string(got) != want || r.ContentLength != -1 || r.GetBody != nil {
			t.Errorf("%s: %d bytes, want %d; length %d, %v", name, len(got), len(want), r.ContentLength, err)
		}
	}
	r := do(9, strings.NewReader("{{TOKEN}}"))
	if r.ContentLength != int64(len(token)) {
		t.Errorf("length %d", r.ContentLength)
	}
	again, err := r.GetBody()
	if err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(again); string(b) != token {
		t.Errorf("again: %q", b)
	}
	if r := do(9, strings.NewReader("{{TOKEN}}"), "Expect"); r.ContentLength != -1 || r.GetBody != nil {
		t.Error("the body was read before the server said that it wants it")
	}
	// A short body that becomes long is sent in chunks.
	many := strings.Repeat("{{TOKEN}}", 7000)
	r = do(len(many), strings.NewReader(many))
	if got, err := io.ReadAll(r.Body); string(got) != strings.ReplaceAll(many, "{{TOKEN}}", token) || err != nil || r.ContentLength != -1 {
		t.Errorf("%d bytes, length %d, %v", len(got), r.ContentLength, err)
	}
	// A body of a binding without substitutions keeps its length.
	r, _ = http.NewRequest("POST", "https://git.example.com/", strings.NewReader(text))
	if _, err := w.at(r); err != nil || r.ContentLength != int64(len(text)) {
		t.Errorf("length %d, %v", r.ContentLength, err)
	}
	if got, _ := io.ReadAll(r.Body); string(got) != text {
		t.Error("a body that is only looked at has changed")
	}
	// An error of the guest's connection is not an end.
	r = do(-1, io.MultiReader(strings.NewReader("a{{TOK"), iotest.ErrReader(io.ErrUnexpectedEOF)))
	if got, err := io.ReadAll(r.Body); err != io.ErrUnexpectedEOF || string(got) != "a" {
		t.Errorf("%q, %v", got, err)
	}
	// Placeholders make a head only so long.
	for _, path := range []string{"/" + strings.Repeat("{{TOKEN}}", 5000), "/?" + strings.Repeat("{{TOKEN}}", 5000)} {
		r := parse(t, "GET "+path+" HTTP/1.1\nHost: sub.example.com\n\n")
		if d, ok := errors.AsType[*Denied](errOf(w.at(r))); !ok || d.Status != 431 || d.Code != "SANDBOX::HEADERS_TOO_LARGE" {
			t.Errorf("%.10s…: %v", path, d)
		}
	}
	r = parse(t, "GET / HTTP/1.1\nHost: sub.example.com\n"+strings.Repeat("X-A: {{TOKEN}}{{TOKEN}}\n", 3000)+"\n")
	if d, ok := errors.AsType[*Denied](errOf(w.at(r))); !ok || d.Status != 431 {
		t.Errorf("many headers: %v", d)
	}
}

// TestMaskingRequests: answers whose values are to be replaced must be whole and readable.
func TestMaskingRequests(t *testing.T) {
	for _, mask := range []bool{false, true} {
		w := newWorld(t, Options{Mask: mask})
		for _, host := range []string{"git.example.com", "www.example.net"} {
			r := parse(t, "GET / HTTP/1.1\nHost: "+host+"\nAccept-Encoding: br\nRange: bytes=0-5\nIf-Range: x\n\n")
			if _, err := w.at(r); err != nil {
				t.Fatal(err)
			}
			got := r.Header.Get("Accept-Encoding") + r.Header.Get("Range") + r.Header.Get("If-Range")
			if want := map[bool]string{false: "brbytes=0-5x", true: "identity"}[mask && host == "git.example.com"]; got != want {
				t.Errorf("%v, %s: %q", mask, host, got)
			}
		}
	}
}

func BenchmarkApply(b *testing.B) {
	w := newWorld(b, Options{Mask: true})
	for _, c := range []struct{ name, host, path string }{
		{"bearer", "api.example.com", "/v1/chat"}, {"substitutions", "sub.example.com", "/a/{{TOKEN}}"}, {"none", "www.example.net", "/x"},
	} {
		b.Run(c.name, func(b *testing.B) {
			head := http.Header{"User-Agent": {"u"}, "Accept": {"*/*"}, "Content-Type": {"application/json"}, "X-A": {"b"}, "X-B": {"c"}}
			b.ReportAllocs()
			for b.Loop() {
				r, err := http.NewRequest("POST", "https://"+c.host+c.path, strings.NewReader(`{"a":"b"}`))
				if err != nil {
					b.Fatal(err)
				}
				r.Header = head.Clone()
				if _, err := w.at(r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("body", func(b *testing.B) {
		text := bytes.Repeat([]byte("The quick brown fox jumps over the lazy dog. "), 30000)
		b.SetBytes(int64(len(text)))
		for b.Loop() {
			r, _ := http.NewRequest("POST", "https://sub.example.com/", bytes.NewReader(text))
			if _, err := w.at(r); err != nil {
				b.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, r.Body); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// TestGuessed: what a guest sees of a placeholder that is none does not depend on how much of it is
// right. It is looked up by its hash, and compared with none.
func TestGuessed(t *testing.T) {
	w := newWorld(t, Options{})
	right := w.drawn("token")
	first, events := "", []Event(nil)
	for n := len(vault.PlaceholderPrefix); n < len(right); n++ {
		wrong := byte('A')
		if right[n] == wrong {
			wrong = 'B'
		}
		guess := right[:n] + string(wrong) + right[n+1:]
		w.events = nil
		_, err := w.at(parse(t, "GET /v1/ HTTP/1.1\nHost: api.example.com\nAuthorization: Bearer "+guess+"\n\n"))
		d, ok := errors.AsType[*Denied](err)
		if !ok || d.Kind != Foreign {
			t.Fatalf("%d right characters: %v", n, err)
		}
		if first == "" {
			first, events = d.Text, w.events
		}
		if d.Text != first || !slices.Equal(w.events, events) {
			t.Errorf("%d right characters: %q, %v; want %q, %v", n, d.Text, w.events, first, events)
		}
	}
}
