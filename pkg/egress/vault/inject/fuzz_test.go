package inject

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"io"
	"math/rand/v2"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/net/http/httpguts"

	"github.com/sandboxd/sandboxd/pkg/egress/vault"
)

// mark is in all values of these tests but basic.
const mark = "sEcr3T-"

// holds reports whether b has a value in it, as it is or decoded.
func holds(b []byte) bool {
	coded := base64.RawStdEncoding.EncodeToString([]byte(mark))[1:8]
	return bytes.Contains(b, []byte(mark)) || bytes.Contains(b, []byte(coded)) || bytes.Contains(b, []byte(basic))
}

// FuzzApply: of a request that net/http can read, and that is sent on, a second reader reads one
// request with the same method, host, headers and body, and nothing behind it. A value stands in
// it only where its binding puts it, and no placeholder is left.
func FuzzApply(f *testing.F) {
	for _, s := range []string{
		"GET /v1/a HTTP/1.1\r\nHost: api.example.com\r\nAuthorization: mine\r\nauthorization: x\r\nX_Authorization: y\r\n\r\n",
		"POST /v1/ HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\nTrailer: Authorization\r\n\r\n" +
			"3\r\nabc\r\n0\r\nAuthorization: x\r\n\r\nGET / HTTP/1.1\r\n\r\n",
		"GET /v1/%2e%2e/admin HTTP/1.1\r\nHost: api.example.com:443\r\nConnection: Authorization\r\n\r\n",
		"GET https://api.example.com/v1/ HTTP/1.1\r\nHost: www.example.net\r\n\r\n",
		"POST /{{TOKEN}}?a=<MULTI-LINE>&b=$SECOND$$ HTTP/1.1\r\nHost: sub.example.com\r\nX-A: {{TOKEN}}\r\nContent-Length: 11\r\n\r\n" +
			"<{{TOKEN}}>",
		"GET /a/{{TOKEN}}/../b HTTP/1.1\r\nHost: sub.example.com\r\nAuthorization: Basic e3tUT0tFTn19OnE=\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: git.example.com\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
		"TRACE / HTTP/1.1\r\nHost: two.example.com\r\nMax-Forwards: 0\r\n\r\n",
		"PUT /PLACEHOLDER HTTP/1.1\r\nHost: www.example.net\r\nX: PLACEHOLDER\r\nContent-Length: 11\r\n\r\nPLACEHOLDER",
	} {
		f.Add([]byte(s), "", true, uint8(3))
		f.Add([]byte(s), "api.example.com", false, uint8(200))
	}
	w := newWorld(f, Options{})
	open := newWorld(f, Options{Mask: true})
	f.Fuzz(func(t *testing.T, raw []byte, host string, https bool, cut uint8) {
		if holds(raw) || holds([]byte(host)) {
			return // the guest would know it
		}
		w := w
		if cut%2 == 1 {
			w = open
		}
		w.events = nil
		// The guest can write any placeholder of its sandbox.
		raw = []byte(strings.NewReplacer("PLACEHOLDER", w.drawn("token"), "ALIEN", alien).Replace(string(raw)))
		read := func() *http.Request {
			r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(raw)))
			if err != nil {
				return nil
			}
			r.RequestURI = ""
			return r
		}
		r, was := read(), read()
		if r == nil || !httpguts.ValidHostHeader(r.Host) {
			return // no server of net/http passes it on
		}
		if host == "" {
			host, _, _ = strings.Cut(strings.ToLower(r.Host), ":")
		}
		scheme := map[bool]string{true: "https", false: "http"}[https]
		if r.Body != http.NoBody {
			r.Body = rest{&pieces{string(mustRead(r.Body)), rand.New(rand.NewPCG(uint64(cut), 1)), 0}, r.Body}
		}
		u, err := w.Apply(r, scheme, host, vault.Port(scheme))
		if err != nil {
			return
		}
		var out bytes.Buffer
		err = r.Write(&out)
		var mine *vault.Binding
		for _, b := range w.v.Bindings() {
			if b.Name == u.Binding() {
				mine = b
			}
		}
		checkSent(t, out.Bytes(), mine, host)
		if err != nil {
			return // it ends in the middle
		}
		in := bufio.NewReader(&out)
		got, err := http.ReadRequest(in)
		if err != nil {
			t.Fatalf("%q cannot be read: %v", out.Bytes(), err)
		}
		body := mustRead(got.Body)
		if n := in.Buffered() + out.Len(); n > 0 {
			t.Fatalf("%q leaves %d bytes behind the request", raw, n)
		}
		if was.Method != got.Method || got.Host != was.Host && was.Host != "" {
			t.Fatalf("%s to %s became %s to %s", was.Method, was.Host, got.Method, got.Host)
		}
		if mine != nil && len(mine.Auth.Substitutions) > 0 {
			return
		}
		if was := mustRead(was.Body); !bytes.Equal(body, was) {
			t.Fatalf("the body %q became %q", was, body)
		}
		checkHeaders(t, was, got, mine, w.bound(host))
	})
}

func mustRead(r io.Reader) []byte {
	b, _ := io.ReadAll(r) //nolint:errcheck // of a body that ends early the part counts
	return b
}

// checkSent looks for values where they do not belong, also in a request that was broken off.
func checkSent(t *testing.T, out []byte, b *vault.Binding, host string) {
	t.Helper()
	if bytes.Contains(out, []byte(alien)) {
		t.Fatalf("a placeholder of another sandbox was sent: %q", out)
	}
	if b == nil {
		if holds(out) {
			t.Fatalf("without a binding, to %s: %q", host, out)
		}
		return
	}
	if !b.MatchesHost(host) {
		t.Fatalf("binding %s for %s", b.Name, host)
	}
	head, body, _ := bytes.Cut(out, []byte("\r\n\r\n"))
	lines := bytes.Split(head, []byte("\r\n"))
	if len(b.Auth.Substitutions) > 0 {
		if bytes.Contains(out, []byte("sEcr3T-pass")) || bytes.Contains(out, []byte("sEcr3T-unbound")) {
			t.Fatalf("a value of another binding: %q", out)
		}
		return
	}
	for _, line := range lines {
		name, _, _ := bytes.Cut(line, []byte(":"))
		if holds(line) && !hasHeader(b, string(name)) {
			t.Fatalf("binding %s: %q", b.Name, line)
		}
	}
	if holds(body) {
		t.Fatalf("binding %s: body %q", b.Name, body)
	}
}

func hasHeader(b *vault.Binding, name string) bool {
	for _, h := range b.Auth.Headers {
		if h.Name == name {
			return true
		}
	}
	return false
}

// checkHeaders: the headers of the binding have its values and nothing else; all others are the
// guest's.
func checkHeaders(t *testing.T, was, got *http.Request, b *vault.Binding, bound bool) {
	t.Helper()
	for name, values := range got.Header {
		if b != nil && hasHeader(b, name) {
			if len(values) != 1 || !holds([]byte(values[0])) {
				t.Fatalf("%s: %q", name, values)
			}
			continue
		}
		switch name {
		case "Connection", "Upgrade", "Http2-Settings", "Range", "If-Range", "Accept-Encoding", "User-Agent", "Trailer":
		default:
			if b != nil {
				for _, h := range b.Auth.Headers {
					if vault.FoldHeader(h.Name) == vault.FoldHeader(name) {
						t.Fatalf("%s was sent beside %s", name, h.Name)
					}
				}
			}
			if !reflect.DeepEqual(values, was.Header[name]) {
				t.Fatalf("%s: %q became %q", name, was.Header[name], values)
			}
		}
	}
	for name := range got.Trailer {
		if b != nil && (hasHeader(b, name) || vault.Reserved(name)) {
			t.Fatalf("a trailer %s", name)
		}
	}
	if got.URL.Path != was.URL.Path && (bound || !strings.HasPrefix(was.URL.Path, "//")) && was.URL.Path != "" {
		t.Fatalf("the path %q became %q", was.URL.Path, got.URL.Path)
	}
	if got.URL.RawQuery != was.URL.RawQuery {
		t.Fatalf("the query %q became %q", was.URL.RawQuery, got.URL.RawQuery)
	}
}

// FuzzMask: no form of a value is left in an answer, however it comes, and what is none is as it was.
func FuzzMask(f *testing.F) {
	f.Add([]byte("echo TOKEN, TOKETOKEN"), uint8(1), "text/plain")
	f.Add([]byte(`{"a":"MULTI"}SECONDSECOND`), uint8(9), "application/json")
	f.Add([]byte("sEcr3T-toke"), uint8(9), "")
	w := newWorld(f, Options{Mask: true})
	values := strings.NewReplacer("TOKEN", token, "SECOND", second, "MULTI", jsonEscape(multi, true))
	f.Fuzz(func(t *testing.T, body []byte, cut uint8, kind string) {
		w.events = nil
		in := values.Replace(string(body))
		r := text("")
		r.Header["Content-Type"] = []string{kind}
		r.Body = io.NopCloser(&pieces{in, rand.New(rand.NewPCG(uint64(cut), 2)), 0})
		req := parse(t, "GET / HTTP/1.1\nHost: sub.example.com\n\n")
		u, err := w.at(req)
		if err != nil {
			t.Fatal(err)
		}
		if err := u.Mask(r); err != nil {
			t.Fatal(err)
		}
		got := string(mustRead(r.Body))
		if len(got) != len(in) {
			t.Fatalf("%d bytes became %d", len(in), len(got))
		}
		found := false
		for _, n := range u.needles {
			if strings.Contains(got, string(n.text)) {
				t.Fatalf("%q became %q with %q", in, got, n.text)
			}
			found = found || strings.Contains(in, string(n.text))
		}
		if !found && got != in {
			t.Fatalf("%q became %q", in, got)
		}
	})
}
