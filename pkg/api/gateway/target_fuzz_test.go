package gateway

import (
	"bufio"
	"net/http"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const gateDomain = "sandboxes.test"

// FuzzGateway: a request as net/http takes it is refused, or names one sandbox in
// so many words, and what is passed on is the rest of its own path, and of its query what
// is no token of ours.
func FuzzGateway(f *testing.F) {
	const id = "tabcdefghijk"
	for _, seed := range [][3]string{
		{"/x", id + "-80." + gateDomain, ""},
		{"/" + id + "/80/a%2Fb/../c?q", "127.0.0.1", ""},
		{"/x?a=1&sandboxd_token=x&sandboxd_token&sandboxd%5ftoken=y&sandboxd_token=z", id + "-80." + gateDomain, ""},
		{"//" + id + "/80", "[::1]:1", ""},
		{"http://a@" + id + "-80." + gateDomain + "/", "x", ""},
		{"*", "localhost", id + "-80"},
		{"/" + id + "/80/zz/" + strings.Repeat("0", 32) + "/x", "localhost", ""},
		{`/` + id + `%2f80/..%2f"`, "localhost.", ""},
	} {
		f.Add(seed[0], seed[1], seed[2])
	}
	n := Names{Domain: gateDomain}
	f.Fuzz(func(t *testing.T, target, host, header string) {
		if strings.ContainsAny(host+header, "\r\n") {
			return
		}
		text := "GET " + target + " HTTP/1.1\r\nHost: " + host + "\r\n"
		if header != "" {
			text += wire.HeaderIngressTo + ": " + header + "\r\n"
		}
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text + "\r\n")))
		if err != nil {
			return
		}
		checkToken(t, r.URL.RawQuery)
		at, err := n.Find(r)
		if err != nil {
			if c := errs.CodeOf(err); c != errs.Invalid && c != errs.NotFound || len(err.Error()) > 500 {
				t.Fatalf("%s: %v", c, err)
			}
			return
		}
		if at.base+at.Rest != r.URL.EscapedPath() || at.Rest != "" && at.Rest[0] != '/' {
			t.Fatalf("%q is %q and %q", r.URL.EscapedPath(), at.base, at.Rest)
		}
		if !record.IsID(at.ID) && !spec.IsName(at.ID) {
			return // answered 404 before anything is looked at
		}
		if _, err := spec.ParsePort(at.Port); err != nil {
			return
		}
		said := []string{strings.ToLower(r.Host), r.Header.Get(wire.HeaderIngressTo)}
		if at.base == "" && !strings.Contains(strings.Join(said, " "), at.ID+"-"+at.Port) ||
			at.base != "" && !strings.HasPrefix(at.base, "/"+at.ID+"/"+at.Port) {
			t.Fatalf("%q %q %q reaches port %s of %s", target, host, header, at.Port, at.ID)
		}
	})
}

// checkToken fails unless the token of a port is found in a query, and nothing but it taken out.
func checkToken(t *testing.T, raw string) {
	t.Helper()
	want := ""
	var left []string
	for _, pair := range strings.Split(raw, "&") {
		if v, ok := strings.CutPrefix(pair+"=", tokenQuery+"="); ok {
			if v = strings.TrimSuffix(v, "="); want == "" {
				want = v
			}
			continue
		}
		left = append(left, pair)
	}
	if value, rest := cutQuery(raw, tokenQuery); value != want || rest != strings.Join(left, "&") {
		t.Fatalf("%q is %q and %q, want %q and %q", raw, value, rest, want, left)
	}
}
