package gateway

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

const fuzzID = "tabcdefghijk"

// FuzzSignature: an address that was made for a port is read back as made, and opens
// that port and no other. No other text is a signature.
func FuzzSignature(f *testing.F) {
	f.Add("", uint16(80), int64(1800000000), "/x")
	f.Add(fuzzID+"-80-zz-"+strings.Repeat("0", 32), uint16(80), int64(latestExpiry), "")
	f.Add("lab-80", uint16(8000), int64(1), "/../%2e")
	g := New(Config{Secret: []byte("secret")})
	rec := &record.Record{ID: fuzzID}
	f.Fuzz(func(t *testing.T, label string, port uint16, until int64, rest string) {
		if id, p, sig, ok := parseSigned(label); ok {
			at := Target{ID: id, Port: p, sig: sig}
			if got := sig.label(id, p); got != label || len(label) > 63 || !record.IsID(id) {
				t.Fatalf("%q is read as %q", label, got)
			}
			n, _ := strconv.ParseUint(p, 10, 16)
			err := g.CheckSignature(&at, rec, uint16(n))
			if want := g.signText(fuzzID, uint16(n), sig.expires).mac; err == nil && (id != fuzzID || sig.mac != want) {
				t.Fatalf("%q opens port %d", label, n)
			}
		}
		if port == 0 || until < 1 || until > latestExpiry || rest != "" && rest[0] != '/' {
			return
		}
		text, sig := strconv.Itoa(int(port)), g.sign(fuzzID, port, until)
		var byHost Target
		err := byHost.parseLabel(sig.label(fuzzID, text))
		if err != nil || byHost.sig != sig || byHost.ID != fuzzID || byHost.Port != text {
			t.Fatalf("%q is read as %+v, %v", sig.label(fuzzID, text), byHost, err)
		}
		byPath := Target{Rest: sig.path(fuzzID, text) + rest}
		if err := byPath.parsePath(); err != nil || byPath.sig != sig || byPath.Rest != rest || byPath.base != sig.path(fuzzID, text) {
			t.Fatalf("%q is read as %+v, %v", sig.path(fuzzID, text)+rest, byPath, err)
		}
		if err := g.CheckSignature(&byHost, rec, port^1); err == nil {
			t.Fatalf("the signature of port %d opens port %d", port, port^1)
		}
		err = g.CheckSignature(&byPath, rec, port^1)
		if err != nil || byPath.signed || byPath.base+byPath.Rest != sig.path(fuzzID, text)+rest {
			t.Fatalf("a wrong signature is no part of the path: %+v, %v", byPath, err)
		}
		h := http.Header{"Referer": {"http://x" + sig.path(fuzzID, text) + rest, strings.ToUpper(sig.label(fuzzID, text)) + rest}}
		byHost.hideFromGuest(h)
		for _, v := range h["Referer"] {
			if strings.Contains(strings.ToLower(v), sig.mac) {
				t.Fatalf("the guest sees %q", v)
			}
		}
	})
}

// FuzzAnswer: whatever an app or a replaced agent answers, its cookies are its own, and
// its redirects stay below its address.
func FuzzAnswer(f *testing.F) {
	f.Add("a=1; Domain=sandboxes.test; Path=/", "/v1/keys", "0; url=/next", "/x")
	f.Add("sandboxd_token_8000=x", "http://localhost:8000?q", "3;URL='/a/../b'", "")
	f.Add("=sandboxd_token_80=x", "/../../v1/keys", "0;/b/80/../../x", "/proxy/80/")
	f.Add("a;domain", "/b/80?again#x", "1 //x", "/x")
	const host, base = "localhost:8000", "/b/80"
	f.Fuzz(func(t *testing.T, cookie, location, refresh, rest string) {
		for _, v := range []string{cookie, location, refresh} {
			if strings.IndexFunc(v, func(c rune) bool { return c < ' ' && c != '\t' || c == 0x7f }) >= 0 || v != strings.Trim(v, " \t") {
				return // net/http refuses it as a header, or trims it
			}
		}
		for _, port := range []uint16{80, wire.AgentPort} {
			h := http.Header{"Set-Cookie": {cookie, cookie}, "Location": {location, location}, "Refresh": {refresh}}
			cleanAnswer(h, port, rest, host, base)
			free := port != wire.AgentPort || strings.HasPrefix(rest, "/proxy/") // an app may lead elsewhere
			for _, line := range h["Set-Cookie"] {
				if sent := cookieOf(line); strings.HasPrefix(sent, tokenCookie) || hasDomain(line) {
					t.Fatalf("the cookie %q remains of %q: a browser sends %q", line, cookie, sent)
				}
			}
			for _, to := range h["Location"] {
				if strings.HasPrefix(to, "/") && !below(to, base) && (!free || !strings.HasPrefix(to, "//")) {
					t.Fatalf("port %d: %q becomes %q, which leads elsewhere", port, location, to)
				}
				if !free && !strings.HasPrefix(to, "/") {
					t.Fatalf("the agent leads from %q to %q", location, to)
				}
				if again := relocated(to, host, base); again != to {
					t.Fatalf("%q becomes %q, and that %q", location, to, again)
				}
			}
			if got := h.Get("Refresh"); refreshed(got, host, base) != got {
				t.Fatalf("%q becomes %q, and that %q", refresh, got, refreshed(got, host, base))
			}
		}
	})
}

// cookieOf is what browsers send back for a Set-Cookie (RFC 6265bis, 5.6 and 5.8.3).
func cookieOf(line string) string {
	pair, _, _ := strings.Cut(line, ";")
	name, value, ok := strings.Cut(pair, "=")
	if !ok {
		name, value = "", pair
	}
	if name, value = strings.Trim(name, " \t"), strings.Trim(value, " \t"); name == "" {
		return value
	}
	return name + "=" + value
}

func hasDomain(line string) bool {
	for _, part := range strings.Split(line, ";")[1:] {
		if name, _, _ := strings.Cut(part, "="); strings.EqualFold(strings.Trim(name, " \t"), "domain") {
			return true
		}
	}
	return false
}

// below reports whether browsers, and clients that follow RFC 3986, read an address as
// one of the same host below base.
func below(to, base string) bool {
	browser := strings.NewReplacer("\t", "", `\`, "/", "%2e", ".", "%2E", ".").Replace
	for _, read := range []func(string) string{func(s string) string { return s }, browser} {
		at, _, _ := strings.Cut(to, "#")
		at, _, _ = strings.Cut(at, "?")
		if at = read(at); strings.HasPrefix(at, "//") {
			return false
		}
		u := (&url.URL{Scheme: "http", Host: "x", Path: "/"}).ResolveReference(&url.URL{Path: at})
		if u.Path != base && !strings.HasPrefix(u.Path, base+"/") {
			return false
		}
	}
	return true
}

// FuzzTold: what the host knows is added to the events about errors, and everything else
// passes as it is, through buffers of any size.
func FuzzTold(f *testing.F) {
	f.Add([]byte(killed), uint16(512), true)
	f.Add([]byte("{\"type\":\"stdout\",\"text\":\"x\"}\n\n"+killed), uint16(7), false)
	f.Add([]byte(`{"type":"error","error":{"ename":"ContextDied","evalue":"x","traceback":["signal: killed"]}}`+"\n\n"), uint16(4096), true)
	f.Add([]byte(`{"type":"error","error":{"ename":"OSError","evalue":"x","traceback":["a\u0085b","c"]}}`+"\n\n"), uint16(4096), true)
	f.Fuzz(func(t *testing.T, in []byte, size uint16, one bool) {
		read := func(killed, denied string) string {
			var r io.Reader = bytes.NewReader(in)
			if one {
				r = iotest.DataErrReader(r)
			}
			k := &told{
				ReadCloser: io.NopCloser(r), killed: func() string { return killed }, denied: func() string { return denied },
			}
			var out bytes.Buffer
			if _, err := io.CopyBuffer(struct{ io.Writer }{&out}, struct{ io.Reader }{k}, make([]byte, int(size)+1)); err != nil {
				t.Fatal(err)
			}
			return out.String()
		}
		if got := read("", ""); got != string(in) {
			t.Fatalf("%q becomes %q without a reason", in, got)
		}
		const why, refused = "it went over its limit", "it was refused a name"
		for _, more := range [][]string{{why, ""}, {"", refused}, {why, refused}} {
			was, is := strings.SplitAfter(string(in), "\n"), strings.SplitAfter(read(more[0], more[1]), "\n")
			if len(was) != len(is) {
				t.Fatalf("%q has %d lines, then %d", in, len(was), len(is))
			}
			for i := range is {
				if is[i] == was[i] {
					continue
				}
				var before, after agent.Event
				const begin = `{"type":"error"`
				if strings.Contains(is[i], "\u0085") && !strings.Contains(was[i], "\u0085") ||
					json.Unmarshal([]byte(is[i][strings.Index(is[i], begin):]), &after) != nil ||
					json.Unmarshal([]byte(was[i][strings.Index(was[i], begin):]), &before) != nil {
					t.Fatalf("%q becomes %q", was[i], is[i])
				}
				had, has := before.Error.Traceback, after.Error.Traceback
				if len(has) <= len(had) || !slices.Equal(has[:len(had)], had) ||
					slices.ContainsFunc(has[len(had):], func(line string) bool { return line == "" || !slices.Contains(more, line) }) {
					t.Fatalf("%q becomes %q", was[i], is[i])
				}
			}
		}
	})
}
