package api

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/auth"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/egress/vault"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// fakeVaults keeps real vaults (pkg/egress/vault) in memory: neither sealed nor put to use.
type fakeVaults struct {
	mu  sync.Mutex
	all map[string]*vault.Vault
}

func (f *fakeVaults) create(id string, body []byte, parse func([]byte) (*vault.Vault, error)) (vault.State, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all[id] != nil {
		return vault.State{}, errs.New(errs.Exists, "there is a vault")
	}
	v, err := parse(body)
	if err != nil {
		return vault.State{}, err
	}
	f.all[id] = v
	return v.State(), nil
}

func (f *fakeVaults) Create(_ context.Context, r *record.Record, body []byte) (vault.State, error) {
	return f.create(r.ID, body, vault.Create)
}

func (f *fakeVaults) CreateTrusted(_ context.Context, r *record.Record, body []byte) (vault.State, error) {
	return f.create(r.ID, body, vault.CreateTrusted)
}

func (f *fakeVaults) patch(id string, change func(*vault.Vault) (*vault.Vault, error)) (vault.State, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.all[id]
	if v == nil {
		return vault.State{}, errNoVault
	}
	next, err := change(v)
	if err != nil {
		return vault.State{}, err
	}
	f.all[id] = next
	return next.State(), nil
}

var errNoVault = errs.New(errs.NotFound, "there is no vault")

func (f *fakeVaults) Patch(_ context.Context, r *record.Record, body []byte) (vault.State, error) {
	return f.patch(r.ID, func(v *vault.Vault) (*vault.Vault, error) { return v.Patch(body) })
}

func (f *fakeVaults) PatchTrusted(_ context.Context, r *record.Record, body []byte) (vault.State, error) {
	return f.patch(r.ID, func(v *vault.Vault) (*vault.Vault, error) { return v.PatchTrusted(body) })
}

func (f *fakeVaults) Get(_ context.Context, r *record.Record) (vault.State, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all[r.ID] == nil {
		return vault.State{}, errNoVault
	}
	return f.all[r.ID].State(), nil
}

func (f *fakeVaults) Delete(_ context.Context, r *record.Record) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all[r.ID] == nil {
		return errNoVault
	}
	delete(f.all, r.ID)
	return nil
}

// planted is a value that must be nowhere but in the vault.
const planted = "PLANTED-s3cr3t-value"

const vaultBody = `{"credentials":[{"name":"token","source":{"type":"inline","value":"` + planted + `"}}],` +
	`"bindings":[{"name":"api","match":{"hosts":["api.example.com"]},"auth":{"type":"apiKey","name":"X-Key","credential":"token"}}]}`

// createInspected makes a sandbox that may have a vault.
func (w *world) createInspected() string {
	w.t.Helper()
	return w.do("POST", "/v1/sandboxes", strings.Replace(createBody, "{", `{"credentialProxy":{"enabled":true},`, 1)).sandbox(w.t).ID
}

// TestVault walks a vault through its life, at both places where it is.
func TestVault(t *testing.T) {
	for _, place := range []string{"/credential-vault", "/proxy/18080/credential-vault"} {
		w := newWorld(t)
		at := "/v1/sandboxes/" + w.createInspected() + place
		native := !strings.Contains(place, "18080")
		step := func(method, path, body string, status int, says ...string) {
			t.Helper()
			a := w.do(method, at+path, body, "X-Lenient", "1") // some bodies are none of the document
			if a.StatusCode != status {
				t.Fatalf("%s %s %s: %d %s, want %d", method, place+path, body, a.StatusCode, a.body, status)
			}
			for _, s := range says {
				if !strings.Contains(string(a.body), s) {
					t.Errorf("%s %s: %s has no %q", method, place+path, a.body, s)
				}
			}
			if kind := a.Header.Get("Content-Type"); status >= 400 && strings.HasPrefix(kind, "text/plain") == native {
				t.Errorf("%s %s: an error is %q", method, place+path, kind)
			}
			if strings.Contains(string(a.body), planted) || strings.Contains(fmt.Sprint(a.Header), planted) {
				t.Errorf("%s %s tells the value: %s", method, place+path, a.body)
			}
			if strings.Contains(string(a.body), `"placeholder":"sbxph_`) != (native && status < 300 && strings.Contains(string(a.body), "sourceType")) {
				t.Errorf("%s %s: %s: a placeholder, or none", method, place+path, a.body)
			}
		}
		step("GET", "", "", 404, "no vault")
		step("GET", "/credentials", "", 404)
		step("PATCH", "", `{}`, 404)
		step("DELETE", "", "", 404)
		for bad, says := range map[string]string{
			``: "not valid JSON", `null`: "want an object", `[]`: "want an object", `{"x":1}`: "unknown field",
			`{"credentials":[{"name":"` + strings.Repeat("n", 129) + `","source":{"value":"x"}}]}`:                                          "128",
			`{"credentials":[{"name":"a","source":{"type":"inline","value":"x","` + planted + `":1}}]}`:                                     "unknown field",
			`{"credentials":[{"name":"a","source":{"type":"file","path":"/etc/shadow"}}]}`:                                                  "administrator",
			`{"credentials":[{"name":"a","source":{"type":"command","argv":["/bin/true"]}}]}`:                                               "administrator",
			`{"credentials":[{"name":"a","source":"` + planted + `"}]}`:                                                                     "want an object",
			`{"credentials":[{"name":"a","source":{"value":"` + planted + strings.Repeat("x", vault.MaxValue) + `"}}]}`:                     "65536",
			`{"credentials":[{"name":"a","source":{"value":"` + strings.Repeat("x", 1<<20) + `"}}]}`:                                        "1048576",
			`{"bindings":[{"name":"b","match":{"hosts":["api.example.com"]},"auth":{"type":"bearer","credential":"` + planted + `"}}]}`:     "does not have",
			`{"bindings":[{"name":"b","match":{"hosts":["api.example.com"]},"auth":{"type":"apiKey","name":"Host","credential":"token"}}]}`: "reserved",
		} {
			step("POST", "", bad, 400, says)
		}
		step("POST", "", vaultBody, 201, `"revision":1,"credentials":[{"name":"token","sourceType":"inline","revision":1`,
			`"match":{"schemes":["https"],"hosts":["api.example.com"],"methods":["GET","POST","PUT","PATCH","DELETE"],"paths":["/*"]}`,
			`"auth":{"type":"apiKey","name":"X-Key"}`)
		step("POST", "", vaultBody, 409)
		step("GET", "", "", 200, `"revision":1`)
		step("GET", "/credentials", "", 200, `{"revision":1,"credentials":[{"name":"token"`)
		step("GET", "/bindings", "", 200, `{"revision":1,"bindings":[{"name":"api"`)
		step("GET", "/credentials/token", "", 200, `{"name":"token"`)
		step("GET", "/bindings/api", "", 200, `{"name":"api"`)
		step("GET", "/bindings/token", "", 404, "no binding named")
		step("GET", "/credentials/"+strings.Repeat("n", 5000), "", 404)
		step("GET", "/credentials/a%2Fb", "", 404)
		step("GET", "/other", "", 404)
		step("GET", "/credentials/token/value", "", 404)
		step("PUT", "", vaultBody, 405)
		step("POST", "/credentials", "{}", 405)
		step("PATCH", "", `{"expectedRevision":7,"bindings":{"delete":["api"]}}`, 409, "revision is 1")
		step("PATCH", "", `{"bindings":{"delete":["other"]}}`, 400, "no binding")
		step("PATCH", "", `{"credentials":{"delete":["token"]}}`, 400, "change the binding first")
		step("PATCH", "", `{"expectedRevision":1,"credentials":{"replace":[{"name":"token","source":{"value":"`+planted+`"}}]}}`, 200,
			`"revision":2,"credentials":[{"name":"token","sourceType":"inline","revision":2`)
		const withEnv = `{"credentials":{"replace":[{"name":"token","env":"%s","source":{"value":"` + planted + `"}}]}}`
		step("PATCH", "", fmt.Sprintf(withEnv, "MY TOKEN"), 400, "no name of a variable")
		step("PATCH", "", fmt.Sprintf(withEnv, "API_TOKEN"), 200, `"revision":3`)
		if a := w.do("GET", at+"/credentials/token", ""); strings.Contains(string(a.body), `"env":"API_TOKEN"`) != native {
			t.Errorf("%s: %s: a variable, or none", place, a.body)
		}
		step("DELETE", "", "", 204)
		step("GET", "", "", 404)
		if log := w.log.String(); strings.Contains(log, planted) || !strings.Contains(log, "credential vault") {
			t.Errorf("the log tells the value, or nothing of the vault: %s", log)
		}
	}
}

// TestVaultNeedsProxy: a sandbox that was created without it never gets a vault.
func TestVaultNeedsProxy(t *testing.T) {
	w := newWorld(t)
	id := w.create().ID
	for _, place := range []string{"/credential-vault", "/proxy/18080/credential-vault"} {
		for _, method := range []string{"POST", "PATCH"} {
			a := w.do(method, "/v1/sandboxes/"+id+place, vaultBody, "X-Lenient", "1")
			if a.StatusCode != http.StatusPreconditionFailed || !strings.Contains(string(a.body), "--credential-proxy") {
				t.Errorf("%s %s: %d %s", method, place, a.StatusCode, a.body)
			}
		}
		if a := w.do("GET", "/v1/sandboxes/"+id+place, ""); a.StatusCode != 404 {
			t.Errorf("GET %s: %d %s", place, a.StatusCode, a.body)
		}
	}
	if len(w.vaults.all) != 0 {
		t.Errorf("vaults %v", w.vaults.all)
	}
	w.do("GET", "/v1/sandboxes/nope/credential-vault", "").wants(t, 404, "DOCKER::SANDBOX_NOT_FOUND")
	w.do("GET", "/v1/sandboxes/"+id+"/credential-vault", "").wants(t, 404, "CREDENTIAL_VAULT::NOT_FOUND")
	w.do("POST", "/v1/sandboxes/"+id+"/credential-vault", vaultBody).wants(t, 412, record.CodeNotInspected)
}

// TestNoVaults: a daemon that cannot inspect requests says so wherever that is asked for.
func TestNoVaults(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Vaults = nil })
	id := w.create().ID
	const rule = `{"egress":[{"action":"allow","target":"api.example.com","http":{"methods":["GET"]}}]}`
	with := func(s string) string { return strings.Replace(createBody, "{", "{"+s+",", 1) }
	for _, c := range []struct{ method, path, body string }{
		{"POST", "/v1/sandboxes", with(`"credentialProxy":{"enabled":true}`)},
		{"POST", "/v1/sandboxes", with(`"networkPolicy":` + rule)},
		{"POST", "/v1/sandboxes", strings.Replace(createBody, `"extensions":{`, `"extensions":{"sandboxd.allow":"GET api.example.com"`, 1)},
		{"PUT", "/v1/sandboxes/" + id + "/networkpolicy", rule},
		{"PUT", "/v1/policies/api", rule},
	} {
		a := w.do(c.method, c.path, c.body)
		if a.StatusCode != 400 || !strings.Contains(string(a.body), "without a way to inspect requests") {
			t.Errorf("%s %s %s: %d %s", c.method, c.path, c.body, a.StatusCode, a.body)
		}
	}
	if a := w.do("GET", "/v1/sandboxes/"+id+"/proxy/18080/credential-vault", ""); a.StatusCode != 404 ||
		!strings.Contains(string(a.body), "without credential vaults") {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if a := w.do("GET", "/v1/sandboxes/"+id+"/credential-vault", ""); a.StatusCode != 404 {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	if a := w.do("POST", "/v1/sandboxes", with(`"credentialProxy":{"enabled":false}`)); a.StatusCode != 202 {
		t.Errorf("enabled false: %d %s", a.StatusCode, a.body)
	}
}

// TestVaultOfHost: files and commands of the host, which are used as root, are named by who is
// root: by the Unix socket, and not with a key of whatever role, nor at port 18080.
func TestVaultOfHost(t *testing.T) {
	w := newWorld(t)
	id := w.createInspected()
	sock := filepath.Join(t.TempDir(), "s")
	w.serve("unix", sock, auth.Listener{})
	unix := overUnix(t, sock)
	onHost := func(method, at, body string) (int, string) {
		req, err := http.NewRequest(method, "http://sandboxd/v1/sandboxes/"+id+at, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := unix.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	const body = `{"credentials":[{"name":"token","source":{"type":"file","path":"/etc/token"}}]}`
	const bind = `{"bindings":{"add":[{"name":"mine","match":{"hosts":["a.example.com"]},"auth":{"type":"bearer","credential":"token"}}]}}`
	w.do("POST", "/v1/sandboxes/"+id+"/credential-vault", body).wants(t, 400, "SANDBOX::INVALID_PARAMETER")
	if status, text := onHost("POST", "/proxy/18080/credential-vault", body); status != 400 {
		t.Errorf("at port 18080: %d %s", status, text)
	}
	if status, text := onHost("POST", "/credential-vault", body); status != 201 || !strings.Contains(text, `"sourceType":"file"`) ||
		strings.Contains(text, "/etc/token") {
		t.Errorf("by the Unix socket: %d %s", status, text)
	}
	w.do("PATCH", "/v1/sandboxes/"+id+"/credential-vault", bind).wants(t, 403, "SANDBOX::FORBIDDEN")
	if status, text := onHost("PATCH", "/credential-vault", bind); status != 200 {
		t.Errorf("bound by the Unix socket: %d %s", status, text)
	}
}

// TestRulesAboutRequests: they are enforced and shown as they came in, two of one target are two
// rules, and only a sandbox that was created for it can have one.
func TestRulesAboutRequests(t *testing.T) {
	w := newWorld(t)
	const (
		get  = `{"action":"allow","target":"api.example.com","ports":[443],"http":{"methods":["GET"],"paths":["/v1/*"]}}`
		post = `{"action":"allow","target":"api.example.com","ports":[443],"http":{"methods":["POST"],"paths":["/v1/things"]}}`
		all  = `{"action":"allow","target":"api.example.com","ports":[443]}`
	)
	with := func(s string) string { return strings.Replace(createBody, "{", "{"+s+",", 1) }
	sb := w.do("POST", "/v1/sandboxes", with(`"networkPolicy":{"egress":[`+get+`]}`), "X-Lenient", "1").sandbox(t)
	if sb.Sandboxd == nil || !sb.Sandboxd.CredentialProxy || !w.recs[sb.ID].Spec.Inspect {
		t.Errorf("created with a rule about requests: %+v", sb.Sandboxd)
	}
	if plain := w.create(); plain.Sandboxd.CredentialProxy || w.recs[plain.ID].Spec.Inspect {
		t.Errorf("created without: %+v", plain.Sandboxd)
	}
	at := "/v1/sandboxes/" + sb.ID + "/networkpolicy"
	for i, c := range []struct{ method, body, shown string }{
		{"PATCH", "[" + post + "]", post + "," + get},
		{ // the same requests, otherwise written: the newer rule is before the older one
			"PATCH", `[{"action":"deny","target":"API.example.com.","ports":[443],"http":{"paths":["/v1/*"],"methods":["GET","GET"]}}]`,
			`{"action":"deny","target":"api.example.com.","ports":[443],"http":{"methods":["GET","GET"],"paths":["/v1/*"]}},` + post,
		},
		{"PATCH", "[" + all + "]", all}, // it covers those about some requests, and not the other way round
		{"PATCH", "[" + get + "]", get + "," + all},
		{"DELETE", `["api.example.com"]`, ""},
		{"PUT", `{"egress":[` + get + "," + post + `]}`, get + "," + post},
	} {
		if a := w.do(c.method, at, c.body); a.StatusCode != 200 {
			t.Fatalf("%d: %s %s: %d %s", i, c.method, c.body, a.StatusCode, a.body)
		}
		if a := w.do("GET", at, ""); !strings.Contains(string(a.body), `"egress":[`+c.shown+`]`) {
			t.Errorf("%d: after %s %s: %s, want %s", i, c.method, c.body, a.body, c.shown)
		}
	}
	if got, want := w.rulesOf(sb.ID), "rules [allow api.example.com:443 GET /v1/* allow api.example.com:443 POST /v1/things]"; got != want {
		t.Errorf("it is %s, want %s", got, want)
	}
	w.set(sb.ID, func(r *record.Record) { r.Spec.NetworkPolicy = nil }) // as of a policy of the configuration
	if a := w.do("GET", at, ""); !strings.Contains(string(a.body), `"egress":[`+get+","+post+`]`) {
		t.Errorf("the rules as they are enforced: %s", a.body)
	}

	for name, c := range map[string]struct{ rule, says string }{
		"nothing":       {`"http":{}`, "neither methods nor paths"},
		"unknown field": {`"http":{"method":["GET"]}`, "method"},
		"no methods":    {`"http":{"methods":[]}`, "methods is empty"},
		"no paths":      {`"http":{"methods":["GET"],"paths":[]}`, "paths is empty"},
		"small letters": {`"http":{"methods":["get"]}`, "want capitals"},
		"CONNECT":       {`"http":{"methods":["CONNECT"]}`, "want capitals"},
		"no slash":      {`"http":{"paths":["v1"]}`, "begins with /"},
		"query":         {`"http":{"paths":["/v1?a=b"]}`, "query"},
		"long path":     {`"http":{"paths":["/` + strings.Repeat("a", 512) + `"]}`, "512"},
		"many methods":  {`"http":{"methods":[` + strings.TrimSuffix(strings.Repeat(`"GET",`, 33), ",") + `]}`, "at most 32"},
		"many paths":    {`"http":{"paths":[` + strings.TrimSuffix(strings.Repeat(`"/",`, 129), ",") + `]}`, "128"},
		"udp":           {`"protocol":"udp","http":{"methods":["GET"]}`, "tcp"},
		"a string":      {`"http":"GET"`, "http"},
	} {
		body := `{"egress":[{"action":"allow","target":"api.example.com",` + c.rule + `}]}`
		if a := w.do("PUT", at, body, "X-Lenient", "1"); a.StatusCode != 400 || !strings.Contains(string(a.body), c.says) {
			t.Errorf("%s: %d %s, want %q", name, a.StatusCode, a.body, c.says)
		}
	}
	var ports []string
	for n := 1; n <= 600; n++ {
		ports = append(ports, fmt.Sprint(n))
	}
	path := strings.Repeat("a", 500)
	for body, says := range map[string]string{
		`{"egress":[{"action":"allow","target":"203.0.113.7","http":{"methods":["GET"]}}]}`:         "needs a name",
		`{"egress":[{"action":"allow","target":"api.example.com:443","http":{"methods":["GET"]}}]}`: `write it beside it`,
		// a rule is one for each port
		`{"egress":[{"action":"allow","target":"a.example.com","ports":[` + strings.Join(ports, ",") + `],"http":{"paths":["/` + path + `"]}}]}`: "at most 256 KiB",
	} {
		if a := w.do("PUT", at, body); a.StatusCode != 400 || !strings.Contains(string(a.body), says) {
			t.Errorf("%.80s: %d %s, want %q", body, a.StatusCode, a.body, says)
		}
	}

	// A sandbox that was created without.
	plain := w.create().ID
	for _, c := range []struct{ method, at, body string }{
		{"PUT", "/networkpolicy", `{"egress":[` + get + `]}`},
		{"PATCH", "/networkpolicy", "[" + get + "]"},
		{"POST", "/proxy/18080/policy", `{"egress":[` + get + `]}`},
		{"PATCH", "/proxy/18080/policy", "[" + get + "]"},
	} {
		a := w.do(c.method, "/v1/sandboxes/"+plain+c.at, c.body, "X-Lenient", "1")
		if a.StatusCode != 412 || !strings.Contains(string(a.body), "--credential-proxy") {
			t.Errorf("%s %s: %d %s", c.method, c.at, a.StatusCode, a.body)
		}
	}
	if got := w.rulesOf(plain); got != "rules []" {
		t.Errorf("what was refused changed it to %s", got)
	}
}

// TestRuleAboutRequestsInText: METHOD NAME[:PORT][/PATH] in the extensions of a creation.
func TestRuleAboutRequestsInText(t *testing.T) {
	w := newWorld(t)
	for text, want := range map[string]string{
		"GET api.example.com:443/v1/*":                   "rules [allow api.example.com:443 GET /v1/*]",
		"* api.example.com/v1/*,pypi.org":                "rules [allow api.example.com requests /v1/* allow pypi.org]",
		"pypi.org:443/tcp, DELETE  *.example.com:80-443": "rules [allow pypi.org:443/tcp allow *.example.com:80-443 DELETE]",
	} {
		body, err := json.Marshal(wire.CreateRequest{
			Image: &wire.Image{URI: "python"}, Entrypoint: []string{"x"}, ResourceLimits: map[string]string{},
			Extensions: map[string]string{wire.ExtAllow: text},
		})
		if err != nil {
			t.Fatal(err)
		}
		id := w.do("POST", "/v1/sandboxes", string(body)).sandbox(t).ID
		if got := w.rulesOf(id); got != want || !w.recs[id].Spec.Inspect {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
	var bad []string
	for _, text := range []string{
		"GET 203.0.113.7/v1", "* api.example.com", "get api.example.com/", "CONNECT api.example.com", "GET /v1", "GET api.example.com/a?b",
		"GET api.example.com:0/", "GET api.example.com:443/../x",
	} {
		a := w.do("POST", "/v1/sandboxes", strings.Replace(createBody, `"extensions":{`, `"extensions":{"sandboxd.allow":"`+text+`"`, 1))
		if a.StatusCode != 400 {
			bad = append(bad, fmt.Sprintf("%q: %d %s", text, a.StatusCode, a.body))
		}
	}
	if slices.Sort(bad); bad != nil {
		t.Error(strings.Join(bad, "\n"))
	}
}
