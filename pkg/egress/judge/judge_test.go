package judge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/egress/policy"
	"github.com/sandboxd/sandboxd/pkg/egress/terminate"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// host is the name that most requests go to.
const host = "api.example.com"

// A listener is a Daemon without a line: what it is told, and what it knows.
type listener struct {
	values map[string]string
	events []terminate.Event
}

func (l *listener) Value(_ context.Context, credential string) ([]byte, error) {
	if v, ok := l.values[credential]; ok {
		return []byte(v), nil
	}
	return nil, errors.New("the file is gone")
}

func (l *listener) Event(e terminate.Event) { l.events = append(l.events, e) }

func (l *listener) Replaced() bool { return false }

// told are the events since the last call.
func (l *listener) told() []terminate.Event {
	e := l.events
	l.events = nil
	return e
}

func (l *listener) judge(t testing.TB, c Config) terminate.Judge {
	t.Helper()
	j, err := Make(c.Encode(), l, nil)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// target is where a request to a URL goes.
func target(r *http.Request) terminate.Destination {
	to := terminate.Destination{Scheme: r.URL.Scheme, Name: r.URL.Host, Port: 443, Addr: server}
	if to.Scheme == "http" {
		to.Port = 80
	}
	return to
}

// rule reads "allow NAME [METHODS [PATHS]]", or with deny, or with a CIDR in place of the name.
func rule(s string) record.Rule {
	f := strings.Fields(s)
	r := record.Rule{Allow: f[0] == "allow", Name: f[1]}
	if p, err := netip.ParsePrefix(f[1]); err == nil {
		r.Name, r.Prefix = "", p
	}
	if len(f) > 2 {
		r.Requests = &record.Requests{}
		if f[2] != "-" {
			r.Requests.Methods = strings.Split(f[2], ",")
		}
		if len(f) > 3 {
			r.Requests.Paths = strings.Split(f[3], ",")
		}
	}
	return r
}

func network(mode record.NetworkMode, all ...string) record.Network {
	n := record.Network{Mode: mode}
	for _, s := range all {
		n.Rules = append(n.Rules, rule(s))
	}
	return n
}

const (
	readings = "servers read the path of this request in different ways: "
	noMethod = "no rule can be about the method of this request"
)

// TestRules: a request passes if the first rule that matches it allows it in each reading of its
// path, and the daemon hears why another one does not.
func TestRules(t *testing.T) {
	api := network("rules", "deny "+host+" DELETE", "deny "+host+" - /v1/admin/*", "allow "+host+" GET,POST /v1/*", "allow "+host+" PUT")
	denies := network("open", "deny "+host+" POST,DELETE", "deny "+host+" - /admin/*,/x")
	for _, c := range []struct {
		network record.Network
		request string
		why     string // "": it passes
	}{
		{api, "GET https://" + host + "/v1/a?b=/v1/admin/", ""},
		{api, "POST http://" + host + "/v1/a/b", ""},
		{api, "PUT https://" + host + "/anything", ""},
		{api, "GET https://" + host + "/v1/", ""},
		{api, "GET https://" + host + "/v1", "default"},
		{api, "GET https://" + host, "default"},
		{api, "GET https://" + host + "/V1/a", "default"},
		{api, "PATCH https://" + host + "/v1/a", "default"},
		{api, "DELETE https://" + host + "/v1/a", "deny " + host + " DELETE"},
		{api, "GET https://" + host + "/v1/admin/a", "deny " + host + " requests /v1/admin/*"},
		{api, "GET https://" + host + "/v1/%61dmin/a", "deny " + host + " requests /v1/admin/*"},
		{api, "GET https://" + host + "/v1/admin%2Fa", "deny " + host + " requests /v1/admin/*"},
		{api, "GET https://" + host + "/v1/admin;x/a", "deny " + host + " requests /v1/admin/*"},
		{api, "GET https://" + host + "/v1;/a", "default"},  // it is /v1/a only for some
		{api, "GET https://" + host + "/v1%2Fa", "default"}, // likewise
		{api, "GET https://" + host + "/v1/a%2Fb;c", ""},
		{api, "GET https://" + host + "/v1/../v2", readings + "it has a segment . or .."},
		{api, "GET https://" + host + "/v1/%2e%2e/v2", readings + "it has a segment . or .."},
		{api, "GET https://" + host + "/v1//admin/a", readings + "it has an empty segment (//)"},
		{api, "GET https://" + host + "/v1/%2561", readings + "it is encoded twice"},
		{api, "GET https://" + host + "/v1/a%00", readings + "it has an encoded control character"},
		{api, "get https://" + host + "/v1/a", noMethod},
		{api, "M_SEARCH https://" + host + "/v1/a", noMethod},
		{api, "GET https://other.example.com/v1/a", "default"},
		{denies, "GET https://" + host + "/", ""},
		{denies, "GET https://" + host, ""},
		{denies, "POST https://" + host + "/", "deny " + host + " POST,DELETE"},
		{denies, "GET https://" + host + "/admin/", "deny " + host + " requests /admin/*,/x"},
		{denies, "GET https://" + host + "/a/%2e./admin/", readings + "it has a segment . or .."},
		{denies, "GET https://" + host + "/admin%2fx", "deny " + host + " requests /admin/*,/x"},
		{denies, "GET https://" + host + "/x;y", "deny " + host + " requests /admin/*,/x"},
		{denies, "POST https://other.example.com/admin/", ""},
		{network("rules", "allow *.example.com GET"), "GET https://" + host + "/", ""},
		{network("rules", "allow *.example.com GET"), "POST https://" + host + "/", "default"},
		{network("rules", "allow "+host+" GET", "allow "+host), "POST https://" + host + "/", ""},
		{network("rules", "allow "+host+" GET", "deny "+host, "allow 203.0.113.0/24"), "POST https://" + host + "/", "deny " + host},
		{network("rules", "allow "+host+" GET", "allow 203.0.113.0/24"), "POST https://" + host + "/", ""},
		{network("none", "allow "+host+" GET"), "GET https://" + host + "/", "network none"},
	} {
		l := &listener{}
		j := l.judge(t, Config{Source: source, Network: c.network})
		method, url, _ := strings.Cut(c.request, " ")
		r := request(t, method, url, "")
		a, err := j.Request(r, target(r))
		events := l.told()
		if c.why == "" {
			if err != nil || a != nil || len(events) > 0 {
				t.Errorf("%s: %v, %v, %v", c.request, a, err, events)
			}
			continue
		}
		refused, ok := errors.AsType[*terminate.Refusal](err)
		if !ok || refused.Status != http.StatusForbidden || refused.Code != "SANDBOX::FORBIDDEN" || a != nil {
			t.Errorf("%s: %v", c.request, err)
			continue
		}
		want := terminate.Event{Kind: terminate.RuleDenied, Host: r.URL.Host, Method: method, Text: c.why}
		if len(events) != 1 || events[0] != want {
			t.Errorf("%s: events %+v, want %q", c.request, events, c.why)
		}
	}
}

// TestHostRules: the rules of the host stand before those of the sandbox, and the address to which
// the guest has connected counts.
func TestHostRules(t *testing.T) {
	for _, c := range []struct {
		host    policy.Host
		network record.Network
		addr    string
		why     string
	}{
		{policy.Host{Deny: []record.Rule{rule("deny " + host)}}, open, "203.0.113.1", "host: deny " + host},
		{policy.Host{Allow: []record.Rule{rule("allow " + host)}}, network("rules", "deny "+host+" GET"), "203.0.113.1", ""},
		{policy.Host{Deny: []record.Rule{rule("deny 203.0.113.0/24")}}, open, "203.0.113.1", "host: deny 203.0.113.0/24"},
		{policy.Host{Deny: []record.Rule{rule("deny 203.0.113.0/24")}}, open, "198.51.100.1", ""},
		{policy.Host{}, open, "10.1.2.3", "private range"},
		{policy.Host{}, network("rules", "allow 10.0.0.0/8"), "10.1.2.3", ""},
		{policy.Host{}, network("rules", "allow "+host+" GET"), "10.1.2.3", "private range"},
	} {
		l := &listener{}
		j := l.judge(t, Config{Source: source, Host: c.host, Network: c.network})
		to := terminate.Destination{Scheme: "https", Name: host, Port: 443, Addr: netip.MustParseAddr(c.addr)}
		_, err := j.Request(request(t, "GET", "https://"+host+"/", ""), to)
		events := l.told()
		if (err == nil) != (c.why == "") || err != nil && (len(events) != 1 || events[0].Text != c.why) {
			t.Errorf("%+v: %v, %+v", c, err, events)
		}
	}
}

// TestRefusalTexts: who reads a refusal knows which rule it was, and what to do instead.
func TestRefusalTexts(t *testing.T) {
	long := strings.Repeat("/long", 100)
	var many []string
	for i := range 6 {
		many = append(many, fmt.Sprintf("allow %s GET /v%d/*", host, i))
	}
	for _, c := range []struct {
		network      record.Network
		addr, method string
		path, want   string
	}{
		{
			network("rules", "deny "+host+" DELETE", "allow "+host+" GET,POST /v1/*"), "203.0.113.1", "DELETE", "/v1/a?token=x",
			`sandboxd does not send this request, DELETE /v1/a to api.example.com: the rule "deny api.example.com DELETE" of its network ` +
				"policy denies it. These rules allow requests to this host, the first that matches decides:\n" +
				"allow api.example.com GET,POST /v1/*",
		},
		{
			network("rules", many...), "203.0.113.1", "GET", "/v9",
			"sandboxd does not send this request, GET /v9 to api.example.com: no rule of its network policy allows it. These rules allow " +
				"requests to this host, the first that matches decides:\n" + strings.Join(many[:4], "\n") + "\nand others",
		},
		{
			network("open", "deny "+host+" POST"), "203.0.113.1", "POST", "",
			`sandboxd does not send this request, POST / to api.example.com: the rule "deny api.example.com POST" of its network policy ` +
				"denies it. Requests to this host that no rule denies are allowed.",
		},
		{
			network("rules", "allow other.example.com"), "203.0.113.1", "GET", "/a//b",
			"sandboxd does not send this request, GET /a//b to api.example.com: servers read the path of this request in different ways: " +
				"it has an empty segment (//). No rule allows requests to this host; whoever made the sandbox can change its " +
				"network policy.",
		},
		{
			open, "10.0.0.1", "GET", "/",
			"sandboxd does not send this request, GET / to api.example.com: the address is in a private range, which no rule of its " +
				"network policy names. Requests to this host that no rule denies are allowed.",
		},
		{
			network("rules", "allow "+host+" - "+long), "203.0.113.1", strings.Repeat("M", 40), long + "ü",
			"sandboxd does not send this request, " + strings.Repeat("M", 32) + "… " + long[:240] + "… to api.example.com: " + noMethod +
				". These rules allow requests to this host, the first that matches decides:\n" +
				("allow " + host + " requests " + long)[:240] + "…",
		},
	} {
		j := (&listener{}).judge(t, Config{Source: source, Network: c.network})
		to := terminate.Destination{Scheme: "https", Name: host, Port: 443, Addr: netip.MustParseAddr(c.addr)}
		_, err := j.Request(request(t, c.method, "https://"+host+c.path, ""), to)
		if err == nil || err.Error() != c.want {
			t.Errorf("%v\nwant\n%s", err, c.want)
		}
	}
}

// Values of these tests.
const (
	token  = "sEcr3T-token"
	second = "sEcr3T-second"
)

// some is a vault with a credential of each kind of source.
func some(t testing.TB) *vault.Vault {
	return vaultOf(t, inline("token", token)+`,{"name":"file","source":{"type":"file","path":"/x"}},
		{"name":"line","source":{"type":"command","argv":["/x"]}},{"name":"gone","source":{"type":"file","path":"/y"}}`, `
		{"name":"a","match":{"hosts":["api.example.com"],"paths":["/v1/*"]},"auth":{"type":"bearer","credential":"token"}},
		{"name":"f","match":{"hosts":["file.example.com"]},"auth":{"type":"apiKey","name":"X-Key","credential":"file"}},
		{"name":"l","match":{"hosts":["line.example.com"]},"auth":{"type":"bearer","credential":"line"}},
		{"name":"g","match":{"hosts":["gone.example.com"]},"auth":{"type":"bearer","credential":"gone"}}`)
}

// TestVaultDenies: what the vault refuses is told the guest in its words, and the daemon as an
// event of each kind. Neither has a value or a placeholder.
func TestVaultDenies(t *testing.T) {
	l := &listener{values: map[string]string{"file": second, "line": second + "\nX-Y: z"}}
	v := some(t)
	j := l.judge(t, Config{Source: source, Network: network("open", "deny "+host+" DELETE"), Vault: v.Encode(), Mask: true})
	mine := v.Credential("token").Placeholder
	seen := map[terminate.EventKind]bool{}
	for _, c := range []struct {
		request, body string
		status        int
		event         terminate.Event
	}{
		{
			"POST https://" + host + "/v2", "sbxph_" + strings.Repeat("A", 26), 403,
			terminate.Event{Kind: terminate.Foreign, Host: host, Place: "body"},
		},
		{
			"POST http://other.example.com/", mine, 403,
			terminate.Event{Kind: terminate.WrongHost, Host: "other.example.com", Credential: "token", Place: "body"},
		},
		{
			"POST https://" + host + "/v1/a", mine, 403,
			terminate.Event{Kind: terminate.WrongPlace, Host: host, Binding: "a", Credential: "token", Place: "body"},
		},
		{"GET https://" + host + "/v1/%61", "", 400, terminate.Event{Kind: terminate.Malformed, Host: host, Place: "path"}},
		{
			"GET https://gone.example.com/", "", 502, terminate.Event{
				Kind: terminate.Unavailable, Host: "gone.example.com", Binding: "g", Credential: "gone", Text: "the file is gone",
			},
		},
		{
			"GET https://line.example.com/", "", 502, terminate.Event{
				Kind: terminate.Unavailable, Host: "line.example.com", Binding: "l", Credential: "line",
				Text: errOf(vault.CheckHeader("bearer", vault.NewSecret("a\nb"))),
			},
		},
		// The rules come first: no credential is asked for.
		{
			"DELETE https://" + host + "/v1/" + mine, mine, 403,
			terminate.Event{Kind: terminate.RuleDenied, Host: host, Method: "DELETE", Text: "deny " + host + " DELETE"},
		},
	} {
		method, url, _ := strings.Cut(c.request, " ")
		r := request(t, method, url, c.body)
		a, err := j.Request(r, target(r))
		refused, ok := errors.AsType[*terminate.Refusal](err)
		if !ok || refused.Status != c.status || a != nil || strings.Contains(refused.Text, "sEcr3T") {
			t.Errorf("%s: %v, %v", c.request, a, err)
		}
		events := l.told()
		if len(events) != 1 || events[0] != c.event {
			t.Errorf("%s: %+v, want %+v", c.request, events, c.event)
		}
		seen[c.event.Kind] = true
	}
	r := request(t, "GET", "https://file.example.com/", "")
	a, err := j.Request(r, target(r))
	if err != nil || r.Header.Get("X-Key") != second {
		t.Fatal(err, r.Header)
	}
	resp := &http.Response{StatusCode: 200, Header: http.Header{"X": {second}}, Body: io.NopCloser(strings.NewReader("<" + second + ">"))}
	if err := a.Response(resp); err != nil {
		t.Error(err)
	}
	b, err := io.ReadAll(resp.Body)
	if stars := strings.Repeat("*", len(second)); err != nil || string(b) != "<"+stars+">" || resp.Header.Get("X") != stars {
		t.Errorf("%q, %v, %v", b, err, resp.Header)
	}
	echo := terminate.Event{Kind: terminate.Echo, Host: "file.example.com", Binding: "f", Credential: "file", Place: "header"}
	body := echo
	body.Place = "body"
	if got := l.told(); !slices.Equal(got, []terminate.Event{echo, body}) {
		t.Errorf("%+v", got)
	}
	seen[terminate.Echo] = true
	for kind, k := range kinds {
		if !seen[k] {
			t.Errorf("no event %s", kind)
		}
	}
}

func errOf(err error) string { return err.Error() }

// TestGone: a request whose guest has gone is no event.
func TestGone(t *testing.T) {
	l := &listener{}
	j := l.judge(t, Config{Source: source, Network: open, Vault: some(t).Encode()})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r := request(t, "GET", "https://gone.example.com/", "").WithContext(ctx)
	if _, err := j.Request(r, target(r)); !errors.Is(err, context.Canceled) || len(l.told()) > 0 {
		t.Error(err)
	}
	broken := errors.New("the guest sends no more")
	r = httptest.NewRequest("POST", "https://"+host+"/v1/a", io.MultiReader(strings.NewReader("x"), failing{broken}))
	r.ContentLength = 2
	if _, err := j.Request(r, target(r)); !errors.Is(err, broken) || len(l.told()) > 0 {
		t.Error(err)
	}
}

type failing struct{ error }

func (f failing) Read([]byte) (int, error) { return 0, f.error }

// TestLimits: the messages have room for what a vault may have.
func TestLimits(t *testing.T) {
	if terminate.MaxValue != vault.MaxValue {
		t.Errorf("a message has %d bytes for a value, and a value %d", terminate.MaxValue, vault.MaxValue)
	}
	name := strings.Repeat("n", vault.MaxName-3) + "\ufffd"
	if got, err := terminate.ParseValueRequest([]byte(name)); got != name {
		t.Error(err)
	}
}

// TestConfigForm: a Config comes back as it was written.
func TestConfigForm(t *testing.T) {
	allow := rule("allow *.example.com GET /v1/*")
	allow.Ports, allow.Proto = [2]uint16{443, 8443}, "tcp"
	for _, c := range []Config{
		{Source: source, Network: open},
		{
			source,
			policy.Host{Deny: []record.Rule{rule("deny 203.0.113.0/24")}, Allow: []record.Rule{rule("allow example.com")}},
			record.Network{Mode: record.NetworkRules, Rules: []record.Rule{allow, rule("deny 198.51.100.1/32")}},
			some(t).Encode(), true,
		},
	} {
		got, err := decode(c.Encode())
		if len(got.Vault) == 0 {
			got.Vault = nil
		}
		if err != nil || !reflect.DeepEqual(got, c) {
			t.Errorf("%v\n%+v\nwant\n%+v", err, got, c)
		}
	}
}

// nonsense are configurations that are none, with a part of the error.
func nonsense(t testing.TB) map[string][]byte {
	whole := func(j, vault string) []byte {
		return append(append([]byte{byte(len(j)), byte(len(j) >> 8), 0, 0}, j...), vault...)
	}
	good := Config{Source: source, Network: open, Vault: some(t).Encode()}
	bad := good
	bad.Source = netip.MustParseAddr("2001:db8::1")
	mode := good
	mode.Network.Mode = "any"
	twoStars := good
	twoStars.Network = network("rules", "allow "+host+" GET v1")
	secret := good
	secret.Vault = bytes.Replace(good.Vault, []byte(`"version":1`), []byte(`"version":2`), 1)
	cut := good
	cut.Vault = good.Vault[:len(good.Vault)-1]
	return map[string][]byte{
		"is not whole":                  {1, 2, 3},
		"is not whole ":                 {255, 255, 255, 255, '{'},
		"something behind its rules":    whole(`{"source":"192.0.2.7","network":{"mode":"open"}} {}`, ""),
		`unknown field "more"`:          whole(`{"more":1}`, ""),
		"read the rules":                whole(``, token),
		`the address of the sandbox is`: whole(`{"network":{"mode":"open"}}`, ""),
		`is "2001:db8::1"`:              bad.Encode(),
		"want none, rules or open":      mode.Encode(),
		"begins with /":                 twoStars.Encode(),
		"version 2":                     secret.Encode(),
		"it is not JSON":                cut.Encode(),
		"cannot unmarshal":              whole(`{"source":"192.0.2.7","network":[]}`, ""),
	}
}

// TestConfigRefused: the error says what is wrong with a configuration, and no value.
func TestConfigRefused(t *testing.T) {
	for want, b := range nonsense(t) {
		j, err := Make(b, &listener{}, nil)
		if err == nil || j != nil || !strings.Contains(err.Error(), strings.TrimSpace(want)) || strings.Contains(err.Error(), "sEcr3T") {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// FuzzConfig: a configuration is refused, or the Judge of it answers.
func FuzzConfig(f *testing.F) {
	for _, b := range nonsense(f) {
		f.Add(b)
	}
	f.Add(Config{Source: source, Network: network("open", "deny "+host+" GET /a*"), Vault: some(f).Encode(), Mask: true}.Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		l := &listener{}
		j, err := Make(b, l, nil)
		if err != nil {
			return
		}
		if _, err := Make(b, l, j); err != nil {
			t.Fatal(err)
		}
		r := request(t, "GET", "https://"+host+"/v1/a", "")
		if _, err := j.Request(r, target(r)); err != nil {
			if _, ok := errors.AsType[*terminate.Refusal](err); !ok {
				t.Fatal(err)
			}
		}
	})
}
