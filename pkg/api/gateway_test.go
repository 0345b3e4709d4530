package api

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/gateway"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A gate is a gateway before two sandboxes, each port of which says who it is and
// what it was asked.
type gate struct {
	*world
	addr     string // of the gateway
	one, two string // ids

	mu   sync.Mutex
	apps map[string]*httptest.Server
	seen []string // what the guests were asked, as "id:port" and the request
}

const gateDomain = "sandboxes.test"

// latestExpiry is the last second that a signed address may name.
const latestExpiry = 253402300799

func newGate(t *testing.T, l auth.Listener, change ...func(*Config)) *gate {
	t.Helper()
	g := &gate{apps: map[string]*httptest.Server{}}
	g.world = newWorld(t, append([]func(*Config){func(c *Config) {
		c.Gateway = gateway.Names{Domain: gateDomain, Address: "gate.test:8081", Port: ":8081"}
	}}, change...)...)
	g.fake.apps = g.app
	g.agent = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { g.answer(rw, r, "agent") })
	l.Gateway = true
	g.addr = strings.TrimPrefix(g.serve("tcp", "127.0.0.1:0", l), "http://")
	g.one, g.two = g.create().ID, g.create().ID
	t.Cleanup(func() {
		for _, a := range g.apps {
			a.Close()
		}
	})
	return g
}

func (g *gate) app(id string, port uint16) net.Listener {
	g.mu.Lock()
	defer g.mu.Unlock()
	key := fmt.Sprintf("%s:%d", id, port)
	if g.apps[key] == nil {
		g.apps[key] = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { g.answer(rw, r, key) }))
	}
	return g.apps[key].Listener
}

func (g *gate) answer(rw http.ResponseWriter, r *http.Request, who string) {
	body, _ := io.ReadAll(r.Body)
	b, _ := httputil.DumpRequest(r, false)
	b = append(b, body...)
	g.mu.Lock()
	g.seen = append(g.seen, who+"\n"+string(b))
	g.mu.Unlock()
	rw.Header().Set("X-Who", who)
	fmt.Fprintf(rw, "%s %s", who, r.RequestURI)
}

// saw returns what the guests were asked since the last call.
func (g *gate) saw() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.seen
	g.seen = nil
	return s
}

// raw sends bytes and returns the answers' heads and bodies, until there are no more.
func (g *gate) raw(text string) (answers []answer) {
	g.t.Helper()
	c, err := net.Dial("tcp", g.addr)
	if err != nil {
		g.t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second)) //nolint:errcheck // then it reads for ever
	if _, err := io.WriteString(c, text); err != nil {
		g.t.Fatal(err)
	}
	br := bufio.NewReader(c)
	for {
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			return answers
		}
		b, _ := io.ReadAll(resp.Body)
		answers = append(answers, answer{resp, b})
	}
}

// get sends one request by its head.
func (g *gate) get(target, host string, headers ...string) answer {
	g.t.Helper()
	text := "GET " + target + " HTTP/1.1\r\nConnection: close\r\n"
	if host != "-" {
		text += "Host: " + host + "\r\n"
	}
	for _, h := range headers {
		text += h + "\r\n"
	}
	all := g.raw(text + "\r\n")
	if len(all) != 1 {
		g.t.Fatalf("%s %s: %d answers", target, host, len(all))
	}
	return all[0]
}

// TestGatewayRoutes: the three ways reach the port that they name, and what a
// guest is asked is what was sent.
func TestGatewayRoutes(t *testing.T) {
	g := newGate(t, auth.Listener{PublicPorts: true})
	named := g.do("POST", "/v1/sandboxes",
		`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"extensions":{"sandboxd.name":"my-lab"}}`).sandbox(t).ID
	for _, c := range []struct{ target, host, header, want string }{
		{"/a/b?q=1", "{one}-8000." + gateDomain, "", "{one}:8000 /a/b?q=1"},
		{"/", "{two}-9000." + gateDomain + ":8081", "", "{two}:9000 /"},
		{"/", strings.ToUpper("{one}-8000." + gateDomain), "", "{one}:8000 /"},
		{"/", "{one}-8000." + gateDomain + ".", "", "{one}:8000 /"},
		{"/", "{one}-8000." + gateDomain + ".:8081", "", "{one}:8000 /"},
		{"/", "my-lab-8000." + gateDomain, "", "{named}:8000 /"},
		{"/{two}/9000/x", "{one}-8000." + gateDomain, "", "{one}:8000 /{two}/9000/x"}, // the host comes first
		{"//{two}/9000", "{one}-8000." + gateDomain, "", "{one}:8000 //{two}/9000"},
		{"/a%2Fb/../c", "{one}-8000." + gateDomain, "", "{one}:8000 /a%2Fb/../c"},
		{"/x", "{one}-8000." + gateDomain, "{one}-8000", "{one}:8000 /x"},
		{"http://{two}-9000." + gateDomain + "/x", "{one}-8000." + gateDomain, "", "{two}:9000 /x"}, // RFC 9112 §3.2.2
		{"http://{two}-9000." + gateDomain, "{one}-8000." + gateDomain, "", "{two}:9000 /"},

		{"/x", "127.0.0.1:8081", "{one}-8000", "{one}:8000 /x"},
		{"/{two}/9000/x", "localhost", "{one}-8000", "{one}:8000 /{two}/9000/x"}, // then the header
		{"/x", "gate.test", "my-lab-8000", "{named}:8000 /x"},

		{"/{one}/8000/a/b?q=1", "127.0.0.1", "", "{one}:8000 /a/b?q=1"},
		{"/{one}/8000", "[::1]:8081", "", "{one}:8000 /"},
		{"/{one}/8000?x", gateDomain, "", "{one}:8000 /?x"},
		{"/{one}/8000/a%2F..%2F../%2e%2e/{two}/9000", "a.localhost", "", "{one}:8000 /a%2F..%2F../%2e%2e/{two}/9000"},
		{"/{one}/8000//{two}/9000", "localhost", "", "{one}:8000 //{two}/9000"},
		{"/my-lab/8000/", "127.0.0.1", "", "{named}:8000 /"},
		{"/{one}/8000/8000/aabbccdde/x", "127.0.0.1", "", "{one}:8000 /8000/aabbccdde/x"},
		// looks signed
		{"/{one}/8000/x2qxvk/" + strings.Repeat("a", 32) + "/x", "127.0.0.1", "", "{one}:8000 /x2qxvk/" + strings.Repeat("a", 32) + "/x"},
	} {
		fill := strings.NewReplacer("{one}", g.one, "{ONE}", strings.ToUpper(g.one), "{two}", g.two, "{named}", named).Replace
		var headers []string
		if c.header != "" {
			headers = append(headers, "OpenSandbox-Ingress-To: "+fill(c.header))
		}
		a := g.get(fill(c.target), fill(c.host), headers...)
		if a.StatusCode != 200 || string(a.body) != fill(c.want) {
			t.Errorf("%s at %s, to %q: %s %q, want %q", c.target, c.host, c.header, a.Status, a.body, fill(c.want))
		}
	}
}

// TestGatewayRefuses: no trick of host, header, path, port or method reaches a
// sandbox that is not plainly named, or anything else at all.
func TestGatewayRefuses(t *testing.T) {
	g := newGate(t, auth.Listener{PublicPorts: true})
	const none = "OpenSandbox-Ingress-To: "
	for _, c := range []struct {
		what, target, host string
		want               int
		headers            []string
	}{
		{"no host", "/", "-", 400, nil},
		{"an empty host", "/{one}/8000/", "", 404, nil},
		{"a host with a user", "/", "x@{one}-8000." + gateDomain, 400, nil},
		{"a host with a path", "/", "{one}-8000." + gateDomain + "/x", 400, nil},
		{"a host with a percent sign", "/", "{one}%2d8000." + gateDomain, 400, nil},
		{"a host with a port that is none", "/", "{one}-8000." + gateDomain + ":80x", 400, nil},
		{"a host with two ports", "/", "{one}-8000." + gateDomain + ":80:81", 400, nil},
		{"a host in unicode", "/", "{one}-8000." + gateDomain + "\u3002", 400, nil},
		{"a host with a full-width digit", "/", "{one}-８000." + gateDomain, 400, nil},
		{"two hosts", "/", "{one}-8000." + gateDomain, 400, []string{"Host: {two}-8000." + gateDomain}},
		{"two dots behind the host", "/", "{one}-8000." + gateDomain + "..", 404, nil},
		{"a label below the label", "/", "{two}-8000.{one}-8000." + gateDomain, 400, nil},
		{"an empty label", "/", "." + gateDomain, 400, nil},
		{"another domain", "/", "{one}-8000.evil.test", 404, nil},
		{"a domain that ends alike", "/", "{one}-8000.evil" + gateDomain, 404, nil},
		{"a domain that begins alike", "/", "{one}-8000." + gateDomain + ".evil.test", 404, nil},
		{"another name, by path", "/{one}/8000/", "evil.test", 404, nil},
		{"another name, by header", "/", "evil.test", 404, []string{none + "{one}-8000"}},
		{"no port", "/", "{one}." + gateDomain, 400, nil},
		{"port 0", "/", "{one}-0." + gateDomain, 400, nil},
		{"port 65536", "/", "{one}-65536." + gateDomain, 400, nil},
		{"port 4294975296, which is 8000 in 32 bits", "/", "{one}-4294975296." + gateDomain, 400, nil},
		{"port 080", "/", "{one}-080." + gateDomain, 400, nil},
		{"port 0x50", "/", "{one}-0x50." + gateDomain, 400, nil},
		{"port http", "/", "{one}-http." + gateDomain, 400, nil},
		{"an id of nobody", "/", "taaaaaaaaaaa-8000." + gateDomain, 404, nil},
		{"an address for an id", "/", "127.0.0.1-22." + gateDomain, 400, nil},
		{"the host itself", "/", "localhost-22." + gateDomain, 404, nil},

		{"port +80 in the path", "/{one}/+80/", "127.0.0.1", 400, nil},
		{"port 080 in the path", "/{one}/080/", "127.0.0.1", 400, nil},
		{"port 65536 in the path", "/{one}/65536/", "127.0.0.1", 400, nil},
		{"port -1 in the path", "/{one}/-1/", "127.0.0.1", 400, nil},
		{"an encoded port", "/{one}/%38000/", "127.0.0.1", 400, nil},
		{"a port and an address", "/{one}/127.0.0.1:22/", "127.0.0.1", 400, nil},
		{"an encoded slash", "/{one}%2F8000/x", "127.0.0.1", 404, nil},
		{"an encoded id", "/%74aaaaaaaaaaa/8000/", "127.0.0.1", 404, nil},
		{"a parent", "/../{one}/8000/", "127.0.0.1", 400, nil},
		{"a parent of the id", "/{one}/../{two}/8000", "127.0.0.1", 400, nil},
		{"an encoded parent", "/%2e%2e/{one}/", "127.0.0.1", 404, nil},
		{"an empty segment", "//{one}/8000/", "127.0.0.1", 404, nil},
		{"a backslash", `/{one}\8000/`, "127.0.0.1", 404, nil},
		{"nothing", "/", "127.0.0.1", 404, nil},
		{"the id alone", "/{one}/", "127.0.0.1", 404, nil},
		{"the API", "/v1/sandboxes", "127.0.0.1", 400, []string{wire.HeaderAPIKey + ": " + testKey}},
		{"the API's proxy", "/sandboxes/{one}/proxy/8000/", "127.0.0.1", 400, []string{wire.HeaderAPIKey + ": " + testKey}},
		{"the API by absolute form", "http://127.0.0.1/v1/sandboxes", "{one}-8000." +
			gateDomain, 400, []string{wire.HeaderAPIKey + ": " + testKey}},
		{"a user in absolute form", "http://x@{one}-8000." + gateDomain + "/", "x", 400, nil},
		{"elsewhere in absolute form", "http://10.0.0.1:22/", "{one}-8000." + gateDomain, 404, nil},

		{"a header that contradicts the host", "/", "{one}-8000." + gateDomain, 400, []string{none + "{two}-8000"}},
		{"a header of another port", "/", "{one}-8000." + gateDomain, 400, []string{none + "{one}-44772"}},
		{"two headers", "/", "127.0.0.1", 400, []string{none + "{one}-8000", none + "{two}-8000"}},
		{"two in one header", "/", "127.0.0.1", 404, []string{none + "{one}-8000, {two}-8000"}},
		{"an empty header", "/{one}/8000/", "127.0.0.1", 400, []string{none}},
		{"a URL in the header", "/", "127.0.0.1", 400, []string{none + "http://{one}-8000"}},
		{"a domain in the header", "/", "127.0.0.1", 400, []string{none + "{one}-8000." + gateDomain}},
		{"a header with an encoded hyphen", "/", "127.0.0.1", 400, []string{none + "{one}%2d8000"}},

		{"the agent", "/ping", "{one}-44772." + gateDomain, 401, nil},
		{"the agent with an endpoint's token", "/ping", "{one}-44772." +
			gateDomain, 401, []string{wire.HeaderEndpointToken + ": {token44772}"}},
		{"the agent with another sandbox's token", "/ping", "{one}-44772." +
			gateDomain, 401, []string{wire.HeaderAgentToken + ": another"}},
		{"the egress API", "/policy", "{one}-18080." + gateDomain, 401, nil},
		{"a change of the policy", "/{one}/18080/policy", "127.0.0.1", 401, []string{wire.HeaderEgressToken + ": x"}},
	} {
		fill := strings.NewReplacer("{one}", g.one, "{two}", g.two, "{token44772}", g.s.gateway.Token(g.one, 44772)).Replace
		for i, h := range c.headers {
			c.headers[i] = fill(h)
		}
		a := g.get(fill(c.target), fill(c.host), c.headers...)
		if saw := g.saw(); a.StatusCode != c.want || len(saw) > 0 {
			t.Errorf("%s: %s %q, and the guests saw %q", c.what, a.Status, a.body, saw)
		}
		if strings.Contains(string(a.body), g.one) && !strings.Contains(fill(c.target+c.host+strings.Join(c.headers, "")), g.one) {
			t.Errorf("%s: the answer names a sandbox that was not asked for: %s", c.what, a.body)
		}
	}
}

// TestGatewayFrames: where one request ends and the next begins is not in doubt.
func TestGatewayFrames(t *testing.T) {
	g := newGate(t, auth.Listener{PublicPorts: true})
	host := "Host: " + g.one + "-8000." + gateDomain + "\r\n"
	inner := "GET /smuggled HTTP/1.1\r\nHost: " + g.two + "-9000." + gateDomain + "\r\n\r\n"
	for _, c := range []struct {
		what, text string
		status     []int
		paths      []string // that guests were asked for
	}{
		{"both lengths", "POST /a HTTP/1.1\r\n" + host + fmt.Sprintf("Content-Length: %d\r\n", 5+len(inner)) +
			"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n" + inner, []int{400}, nil},
		{"two lengths", "POST /a HTTP/1.1\r\n" + host + "Content-Length: 0\r\nContent-Length: " + fmt.Sprint(len(inner)) + "\r\n\r\n" +
			inner, []int{400}, nil},
		{"a length with a sign", "POST /a HTTP/1.1\r\n" + host + "Content-Length: +0\r\n\r\n" + inner, []int{400}, nil},
		{"another coding", "POST /a HTTP/1.1\r\n" + host + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + inner, []int{501}, nil},
		{"a hidden coding", "POST /a HTTP/1.1\r\n" + host + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + inner, []int{400}, nil},
		{
			"a folded header", "GET /a HTTP/1.1\r\n" + host + "X-A: b\r\n Content-Length: 9\r\nConnection: close\r\n\r\n",
			[]int{200},
			[]string{"/a"},
		},
		{"a bare line feed in a value", "GET /a HTTP/1.1\r\n" + host + "X-A: b\rContent-Length: 9\r\n\r\n", []int{400}, nil},
		{
			"a size that is too small", "POST /a HTTP/1.1\r\n" + host + "Connection: close\r\nContent-Length: 0\r\n\r\n" + inner,
			[]int{200},
			[]string{"/a"},
		},
		{"CONNECT to a host", "CONNECT " + g.two + "-9000." + gateDomain + ":80 HTTP/1.1\r\nConnection: close\r\n" + host +
			"\r\n", []int{405}, nil},
		{"CONNECT to loopback", "CONNECT 127.0.0.1:22 HTTP/1.1\r\nConnection: close\r\nHost: 127.0.0.1:22\r\n\r\n", []int{405}, nil},
		{"CONNECT to a path", "CONNECT /" + g.one + "/8000/x HTTP/1.1\r\nConnection: close\r\nHost: 127.0.0.1\r\n\r\n", []int{405}, nil},
		{"OPTIONS of everything", "OPTIONS * HTTP/1.1\r\n" + host + "Connection: close\r\n\r\n", []int{200}, nil}, // net/http's own answer
		{"HTTP/2 unasked", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", []int{400}, nil},
	} {
		var status []int
		for _, a := range g.raw(c.text) {
			status = append(status, a.StatusCode)
		}
		var paths []string
		for _, s := range g.saw() {
			if _, line, _ := strings.Cut(s, "\n"); strings.HasPrefix(s, g.one+":8000") {
				paths = append(paths, strings.Fields(line)[1])
			} else {
				paths = append(paths, s)
			}
		}
		if fmt.Sprint(status) != fmt.Sprint(c.status) || fmt.Sprint(paths) != fmt.Sprint(c.paths) {
			t.Errorf("%s: answers %v, guests were asked for %q", c.what, status, paths)
		}
		if strings.Contains(fmt.Sprint(paths), "smuggled") {
			t.Errorf("%s: smuggled", c.what)
		}
	}
	// An upgrade to HTTP/2 would have requests in it that nobody here reads.
	a := g.get("/a", g.one+"-8000."+gateDomain, "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
	if saw := fmt.Sprint(g.saw()); a.StatusCode != 200 || strings.Contains(saw, "h2c") || strings.Contains(saw, "Settings") {
		t.Errorf("h2c: %s, the guest saw %s", a.Status, saw)
	}
}

// signature is the end of a signed label.
type signature struct{ expires, mac string }

// sign makes the signature of a port that expires at a second since 1970.
func (g *gate) sign(id string, port uint16, until int64) signature {
	at := g.s.gateway.SignedEndpoint(&record.Record{ID: id}, port, until, "").Endpoint
	label, _, _ := strings.Cut(at, ".")
	seg := strings.Split(label, "-")
	return signature{seg[2], seg[3]}
}

func (s signature) label(id, port string) string {
	return id + "-" + port + "-" + s.expires + "-" + s.mac
}

// TestGatewayTokens: what opens a port, in what order, and that the guest sees
// nothing of it.
func TestGatewayTokens(t *testing.T) {
	g := newGate(t, auth.Listener{})
	token, other := g.s.gateway.Token(g.one, 8000), g.s.gateway.Token(g.two, 8000)
	later := time.Now().Add(time.Hour).Unix()
	sig := g.sign(g.one, 8000, later)
	old := g.sign(g.one, 8000, time.Now().Add(-time.Second).Unix())
	name := func(id string) string { return id + "-8000." + gateDomain }
	signed := sig.label(g.one, "8000")
	const h, c, k = wire.HeaderEndpointToken + ": ", "Cookie: sandboxd_token_8000=", wire.HeaderAPIKey + ": "
	for _, x := range []struct {
		what, target, host string
		headers            []string
		want               int
	}{
		{"nothing", "/", name(g.one), nil, 401},
		{"its token", "/", name(g.one), []string{h + token}, 200},
		{"its token under OpenSandbox's name", "/", name(g.one), []string{wire.HeaderSecureAccess + ": " + token}, 200},
		{"another sandbox's", "/", name(g.one), []string{h + other}, 401},
		{"another port's", "/", g.one + "-8001." + gateDomain, []string{h + token}, 401},
		{"a wrong one and the cookie", "/", name(g.one), []string{h + "x", c + token}, 401},
		{"the token twice, once wrong", "/", name(g.one), []string{h + token, h + "x"}, 401},
		{"an empty one and the cookie", "/", name(g.one), []string{h, c + token}, 401},
		{"the cookie", "/", name(g.one), []string{c + token}, 200},
		{"a neighbour's cookie before it", "/", name(g.one), []string{c + other + "; sandboxd_token_8000=" + token}, 200},
		{
			"the cookie, by the page's own script", "/", name(g.one),
			[]string{c + token, "Origin: http://" + name(g.one), "Sec-Fetch-Site: same-origin"},
			200,
		},
		{
			"the cookie, by a neighbour's script", "/", name(g.one),
			[]string{c + token, "Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: cors"},
			401,
		},
		{
			"the cookie, by a neighbour's WebSocket", "/", name(g.one),
			[]string{c + token, "Origin: http://" + name(g.two), "Connection: Upgrade", "Upgrade: websocket"},
			401,
		},
		{"the cookie, by nobody's page", "/", name(g.one), []string{c + token, "Origin: null"}, 401},
		{
			"the cookie, by a neighbour's link", "/", name(g.one),
			[]string{c + token, "Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: navigate"},
			200,
		},
		{"the token, by a neighbour's script that has it", "/", name(g.one), []string{h + token, "Origin: http://" + name(g.two)}, 200},
		{"an old cookie and the query", "/?a=1&sandboxd_token=" + token, name(g.one), []string{c + "old"}, 200},
		{"the query", "/?sandboxd_token=" + token + "&b=2", name(g.one), nil, 200},
		{"the API key", "/", name(g.one), []string{k + testKey}, 200},
		{"a bearer's key", "/", name(g.one), []string{"Authorization: Bearer " + testKey}, 200},
		{"the key twice under another name", "/", name(g.one), []string{"X-API-Key: " + testKey, "X-API-Key: " + testKey}, 200},
		{"the app's own key", "/", name(g.one), []string{h + token, "X-API-Key: the-apps"}, 200},
		{"a wrong key", "/", name(g.one), []string{k + "x"}, 401},

		{"a signed host", "/", signed + "." + gateDomain, []string{"Referer: http://" + signed + "." + gateDomain + "/a?sandboxd_token=" +
			token, "Origin: http://" + signed + "." + gateDomain}, 200},
		{"a signed host in capitals", "/", strings.ToUpper(signed + "." + gateDomain), nil, 200},
		{"a signed header", "/", "127.0.0.1", []string{wire.HeaderIngressTo + ": " + signed}, 200},
		{
			"a signed path", "/" + g.one + "/8000/" + sig.expires + "/" + sig.mac + "/x", "127.0.0.1",
			[]string{"Referer: http://127.0.0.1/" + g.one + "/8000/" + sig.expires + "/" + sig.mac + "/x"},
			200,
		},
		{
			"a signed path and a wrong header", "/" + g.one + "/8000/" + sig.expires + "/" + sig.mac + "/x", "127.0.0.1",
			[]string{h + "x"},
			200,
		},
		{"a signature of another port", "/", sig.label(g.one, "8001") + "." + gateDomain, nil, 401},
		{"a signature of another sandbox", "/", sig.label(g.two, "8000") + "." + gateDomain, nil, 401},
		{"a later end", "/", signature{"zzzzzzz", sig.mac}.label(g.one, "8000") + "." + gateDomain, nil, 401},
		{"a leading zero", "/", signature{"0" + sig.expires, sig.mac}.label(g.one, "8000") + "." + gateDomain, nil, 401},
		{"an expired one", "/", old.label(g.one, "8000") + "." + gateDomain, nil, 401},
		{"an expired path", "/" + g.one + "/8000/" + old.expires + "/" + old.mac + "/x", "127.0.0.1", nil, 401},
		{"a wrong one in the path", "/" + g.one + "/8000/" + sig.expires + "/" + strings.Repeat("0", 32) + "/x", "127.0.0.1", nil, 401},
		{"a short one", "/", g.one + "-8000-" + sig.expires + "-" + sig.mac[:8] + "a." + gateDomain, nil, 400},
		{"a signature of the agent's port", "/ping", g.sign(g.one, 44772, later).label(g.one, "44772") + "." + gateDomain, nil, 401},
		{"a signature of the egress API", "/policy", g.sign(g.one, 18080, later).label(g.one, "18080") + "." + gateDomain, nil, 401},
		{"the agent's token", "/ping", g.one + "-44772." + gateDomain, []string{wire.HeaderAgentToken + ": agent-token"}, 200},
	} {
		a := g.get(x.target, x.host, x.headers...)
		saw := strings.Join(g.saw(), "\n")
		if a.StatusCode != x.want || (saw == "") != (x.want != 200) {
			t.Errorf("%s: %s %q, the guest saw %q", x.what, a.Status, a.body, saw)
		}
		for what, secret := range map[string]string{"the token": token, "the signature": sig.mac, "the key": testKey} {
			if strings.Contains(strings.ToLower(saw), secret) {
				t.Errorf("%s: the guest saw %s: %s", x.what, what, saw)
			}
		}
		for _, header := range []string{wire.HeaderIngressTo, wire.HeaderSecureAccess, wire.HeaderEndpointToken, "sandboxd_token"} {
			if strings.Contains(strings.ToLower(saw), strings.ToLower(header)) {
				t.Errorf("%s: the guest saw %s: %s", x.what, header, saw)
			}
		}
		if x.what == "the app's own key" && !strings.Contains(saw, "the-apps") {
			t.Errorf("the app did not get its key: %s", saw)
		}
		if x.what == "the query" && (len(a.Cookies()) != 1 || a.Cookies()[0].Path != "/" || a.Cookies()[0].Domain != "") {
			t.Errorf("cookies %v", a.Cookies())
		}
	}
}

// TestGatewayNeighbours: where ports share a host, a page of one guest gets nothing from the port of another by what
// its visitor's browser has of it. To the browser they are one origin: it sends the cookies of the host with every
// request below their path, whatever page asks, and lets that page read the answer, also in a frame or a window.
func TestGatewayNeighbours(t *testing.T) {
	g := newGate(t, auth.Listener{})
	token := g.s.gateway.Token(g.one, 8000)
	sig := g.sign(g.one, 8000, time.Now().Add(time.Hour).Unix())
	byPath, header := "/"+g.one+"/8000/", wire.HeaderIngressTo+": "+g.one+"-8000"
	for what, c := range map[string]struct {
		target string
		header []string
	}{
		"a token by path":      {byPath + "?sandboxd_token=" + token, nil},
		"a token by header":    {"/?sandboxd_token=" + token, []string{header}},
		"a signed path":        {byPath + sig.expires + "/" + sig.mac + "/", nil},
		"a path and its token": {byPath, []string{wire.HeaderEndpointToken + ": " + token}},
	} {
		a := g.get(c.target, "gate.test:8081", c.header...) // the visit
		if a.StatusCode != 200 || len(a.Cookies()) != 0 {
			t.Errorf("%s: %s, the browser keeps %v", what, a.Status, a.Cookies())
		}
		// document.referrer of the page of another guest that the visitor goes to next.
		if policy := a.Header.Get("Referrer-Policy"); strings.Contains(c.target, byPath) && policy != "strict-origin" {
			t.Errorf("%s: Referrer-Policy %q", what, policy)
		}
	}
	g.saw()
	cookie := "Cookie: sandboxd_token_8000=" + token // one of an earlier release, say
	for what, headers := range map[string][]string{
		"a fetch":                  {"Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors", "Referer: http://gate.test:8081/" + g.two},
		"a fetch without referrer": {"Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors"},
		"a frame":                  {"Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe"},
		"a window":                 {"Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"},
		"a typed address":          {"Sec-Fetch-Site: none", "Sec-Fetch-Mode: navigate"},
		"a script of the page":     {"Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: script"},
		"a WebSocket":              {"Origin: http://gate.test:8081", "Connection: Upgrade", "Upgrade: websocket"},
		"a service worker":         {"Sec-Fetch-Site: same-origin", "Service-Worker: script"},
		"an old browser":           {"Origin: http://gate.test:8081"},
	} {
		for _, way := range [][]string{{byPath}, {"/", header}, {byPath + sig.expires + "/" + strings.Repeat("0", 32) + "/"}} {
			a := g.get(way[0], "gate.test:8081", append(append(headers, cookie), way[1:]...)...)
			if saw := g.saw(); a.StatusCode != 401 || len(saw) != 0 {
				t.Errorf("%s at %v: %s, the guest saw %q", what, way, a.Status, saw)
			}
		}
	}
	if a := g.get("/", g.one+"-8000."+gateDomain, cookie, "Sec-Fetch-Site: same-origin"); a.StatusCode != 200 {
		t.Errorf("its own page, by a name of its own: %s", a.Status)
	}
}

// TestGatewaySecureAccess: what was made so asks for its token where others do not.
func TestGatewaySecureAccess(t *testing.T) {
	g := newGate(t, auth.Listener{PublicPorts: true})
	made := g.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"secureAccess":true}`)
	id := made.sandbox(t).ID
	host := id + "-8000." + gateDomain
	token := g.s.gateway.Token(id, 8000)
	for what, c := range map[string]struct {
		header string
		want   int
	}{
		"nothing": {"X: y", 401}, "the token": {wire.HeaderSecureAccess + ": " + token, 200},
		"a wrong one": {wire.HeaderSecureAccess + ": x", 401},
	} {
		if a := g.get("/", host, c.header); a.StatusCode != c.want {
			t.Errorf("%s: %s %s", what, a.Status, a.body)
		}
	}
	sig := g.sign(id, 8000, time.Now().Unix()+60)
	if a := g.get("/", sig.label(id, "8000")+"."+gateDomain); a.StatusCode != 200 {
		t.Errorf("signed: %s %s", a.Status, a.body)
	}
}

// TestGatewayWithoutKeys: that anybody may use the API is said of the API's own
// listener, and opens no agent to who reaches the gateway.
func TestGatewayWithoutKeys(t *testing.T) {
	g := newGate(t, auth.Listener{}, func(c *Config) { c.APIKeys, c.Insecure = nil, true })
	for target, want := range map[string]int{"-44772": 401, "-18080": 401, "-8000": 401} {
		if a := g.get("/policy", g.one+target+"."+gateDomain); a.StatusCode != want || len(g.saw()) > 0 {
			t.Errorf("%s: %s %s", target, a.Status, a.body)
		}
	}
	if a := g.get("/ping", g.one+"-44772."+gateDomain, wire.HeaderAgentToken+": agent-token"); a.StatusCode != 200 {
		t.Errorf("with its token: %s %s", a.Status, a.body)
	}
	if a := g.get("/health", "127.0.0.1"); a.StatusCode != 200 || !strings.Contains(string(a.body), "healthy") {
		t.Errorf("health: %s %s", a.Status, a.body)
	}
}

// TestEndpoints: where clients are sent, and that what they are told works.
func TestEndpoints(t *testing.T) {
	ask := func(g *gate, id, port, query string) (e wire.Endpoint) {
		t.Helper()
		a := g.do("GET", "/v1/sandboxes/"+id+"/endpoints/"+port+query, "")
		if err := json.Unmarshal(a.body, &e); err != nil || a.StatusCode != 200 {
			t.Fatalf("%s %s: %s %s", port, query, a.Status, a.body)
		}
		return e
	}
	for name, c := range map[string]struct {
		gw            gateway.Names
		plain, signed string // beginnings; {id}
	}{
		"no gateway":   {gateway.Names{}, "{api}/v1/sandboxes/{id}/proxy/8000", "{api}/v1/sandboxes/{id}-8000-"},
		"by path":      {gateway.Names{Address: "gate.test:8081/x/"}, "gate.test:8081/x/{id}/8000", "gate.test:8081/x/{id}/8000/"},
		"by its names": {gateway.Names{Domain: gateDomain, Port: ":8081"}, "{id}-8000." + gateDomain + ":8081", "{id}-8000-"},
	} {
		g := newGate(t, auth.Listener{}, func(cfg *Config) { cfg.Gateway = c.gw })
		secured := g.do("POST", "/v1/sandboxes",
			`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"timeout":600,"secureAccess":true}`).sandbox(t)
		api := strings.TrimPrefix(g.url, "http://")
		for _, id := range []string{g.one, secured.ID} {
			header := wire.HeaderEndpointToken
			if id == secured.ID {
				header = wire.HeaderSecureAccess
			}
			e := ask(g, id, "8000", "?use_server_proxy=false")
			if e.Endpoint != strings.NewReplacer("{id}", id, "{api}", api).Replace(c.plain) ||
				e.Headers[header] != g.s.gateway.Token(id, 8000) || len(e.Headers) != 1 {
				t.Errorf("%s: %+v", name, e)
			}
			if e := ask(g, id, "8000", "?use_server_proxy=True"); e.Endpoint != api+"/v1/sandboxes/"+id+"/proxy/8000" {
				t.Errorf("%s, by the server: %+v", name, e)
			}
			soon := time.Now().Unix() + 60
			e = ask(g, id, "8000", fmt.Sprintf("?expires=%d", soon))
			if !strings.HasPrefix(e.Endpoint, strings.NewReplacer("{id}", id, "{api}", api).Replace(c.signed)) || len(e.Headers) != 0 ||
				!strings.Contains(e.Endpoint, strconv.FormatInt(soon, 36)) {
				t.Errorf("%s, signed: %+v", name, e)
			}
			if name == "no gateway" {
				for path, want := range map[string]int{"/a": 200, "-": 400} {
					if a := g.do("GET", strings.TrimPrefix(e.Endpoint, api)+path, "", wire.HeaderAPIKey, ""); a.StatusCode != want ||
						want == 200 && string(a.body) != id+":8000 /a" {
						t.Errorf("%s: %s %s", e.Endpoint, a.Status, a.body)
					}
				}
				if saw := strings.Join(g.saw(), ""); strings.Contains(saw, e.Endpoint[len(e.Endpoint)-40:len(e.Endpoint)-20]) {
					t.Errorf("the guest saw the signature: %s", saw)
				}
			}
		}
		// Nothing that is signed lives longer than its sandbox, nor opens what has a token of its own.
		if e := ask(g, secured.ID, "8000", "?expires="+fmt.Sprint(latestExpiry)); !strings.Contains(e.Endpoint,
			strconv.FormatInt(secured.ExpiresAt.Unix(), 36)) {
			t.Errorf("%s: outlives its sandbox: %+v", name, e)
		}
		if e := ask(g, g.one, "44772", fmt.Sprintf("?expires=%d", time.Now().Unix()+60)); e.Headers[wire.HeaderAgentToken] == "" {
			t.Errorf("%s, the agent: %+v", name, e)
		}
	}
	g := newGate(t, auth.Listener{})
	for _, query := range []string{
		"0", "1", "-1", "+99999999999", "0x7fffffff", "9e9", "099999999999", "99999999999999999999",
		"253402300800", "now", "", "%31%32", fmt.Sprint(time.Now().Unix()),
	} {
		g.do("GET", "/v1/sandboxes/"+g.one+"/endpoints/8000?expires="+query, "", "X-Lenient", "1").wants(t, 400,
			"SANDBOX::INVALID_PARAMETER")
	}
	g.do("GET", "/v1/sandboxes/"+g.one+"/endpoints/8000?use_server_proxy=true&expires=9999999999", "").wants(t, 400,
		"SANDBOX::INVALID_PARAMETER")
	g.do("GET", "/v1/sandboxes/taaaaaaaaaaa/endpoints/8000?expires=9999999999", "").wants(t, 404, "DOCKER::SANDBOX_NOT_FOUND")
	g.do("GET", "/v1/sandboxes/"+g.one+"/endpoints/080?expires=9999999999", "", "X-Lenient", "1").wants(t, 400, "DOCKER::INVALID_PORT")
}
