package api

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

// FuzzGateway: a request as net/http takes it is refused, or names one sandbox in
// so many words, and what is passed on is the rest of its own path.
func FuzzGateway(f *testing.F) {
	const id = "tabcdefghijk"
	for _, seed := range [][3]string{
		{"/x", id + "-80." + gateDomain, ""},
		{"/" + id + "/80/a%2Fb/../c?q", "127.0.0.1", ""},
		{"//" + id + "/80", "[::1]:1", ""},
		{"http://a@" + id + "-80." + gateDomain + "/", "x", ""},
		{"*", "localhost", id + "-80"},
		{"/" + id + "/80/zz/" + strings.Repeat("0", 32) + "/x", "localhost", ""},
		{`/` + id + `%2f80/..%2f"`, "localhost.", ""},
	} {
		f.Add(seed[0], seed[1], seed[2])
	}
	s, err := New(Config{Gateway: Gateway{Domain: gateDomain}}, nil, nil, nil, nil, nil, nil)
	if err != nil {
		f.Fatal(err)
	}
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
		rt, err := s.gateway(r)
		if err != nil {
			if c := errs.CodeOf(err); c != errs.Invalid && c != errs.NotFound || len(err.Error()) > 500 {
				t.Fatalf("%s: %v", c, err)
			}
			return
		}
		if rt.base+rt.rest != r.URL.EscapedPath() || rt.rest != "" && rt.rest[0] != '/' {
			t.Fatalf("%q is %q and %q", r.URL.EscapedPath(), rt.base, rt.rest)
		}
		if !record.IsID(rt.id) && !spec.IsName(rt.id) {
			return // answered 404 before anything is looked at
		}
		if _, err := spec.ParsePort(rt.port); err != nil {
			return
		}
		said := []string{strings.ToLower(r.Host), r.Header.Get(wire.HeaderIngressTo)}
		if rt.base == "" && !strings.Contains(strings.Join(said, " "), rt.id+"-"+rt.port) || rt.base != "" && !strings.HasPrefix(rt.base, "/"+rt.id+"/"+rt.port) {
			t.Fatalf("%q %q %q reaches port %s of %s", target, host, header, rt.port, rt.id)
		}
	})
}
