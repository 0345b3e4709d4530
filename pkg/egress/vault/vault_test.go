package vault

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/errs"
)

// secretMark begins all values of these tests: it stands in no error and no state.
const secretMark = "sEcr3T-"

func credential(name, value string) string {
	return fmt.Sprintf(`{"name":%q,"source":{"type":"inline","value":%q}}`, name, value)
}

// vaultOf is JSON with the credentials token and basic, and bindings.
func vaultOf(bindings ...string) string {
	basic := base64.StdEncoding.EncodeToString([]byte("user:" + secretMark + "pass"))
	return `{"credentials":[` + credential("token", secretMark+"token") + `,` + credential("basic", basic) + `],"bindings":[` +
		strings.Join(bindings, ",") + `]}`
}

// bearer is a binding for a match in JSON.
func bearer(name, match string) string {
	return fmt.Sprintf(`{"name":%q,"match":%s,"auth":{"type":"bearer","credential":"token"}}`, name, match)
}

// withAuth is a binding of an auth in JSON.
func withAuth(auth string) string {
	return `{"name":"b","match":{"hosts":["api.example.com"]},"auth":` + auth + `}`
}

func create1(t testing.TB, data string) *Vault {
	t.Helper()
	v, err := Create([]byte(data))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestState(t *testing.T) {
	v := create1(t, vaultOf(
		`{"name":"z","match":{"schemes":["HTTP","https","http"],"ports":[80,443],"hosts":["API.Example.com.","*.Example.org"],
		"methods":["get","HEAD"],"paths":["/v1/*","/v1/*"]},"auth":{"type":"apiKey","name":"PRIVATE-token","credential":"token"}}`,
		bearer("a", `{"hosts":["b.example.com"]}`),
		`{"name":"p","match":{"hosts":["c.example.com"]},"auth":{"type":"passthrough","substitutions":[{"credential":"token",
		"placeholder":"{{TOKEN}}","in":["path","query","header","body"]}]}}`,
	))
	got, err := json.Marshal(v.State())
	if err != nil {
		t.Fatal(err)
	}
	defaults := `"schemes":["https"],"hosts":["%s.example.com"],"methods":["GET","POST","PUT","PATCH","DELETE"],"paths":["/*"]`
	want := `{"revision":1,"credentials":[{"name":"basic","sourceType":"inline","revision":1},` +
		`{"name":"token","sourceType":"inline","revision":1}],"bindings":[` +
		`{"name":"a","revision":1,"match":{` + fmt.Sprintf(defaults, "b") + `},"auth":{"type":"bearer"}},` +
		`{"name":"p","revision":1,"match":{` + fmt.Sprintf(defaults, "c") + `},"auth":{"type":"passthrough"}},` +
		`{"name":"z","revision":1,"match":{"schemes":["http","https"],"hosts":["api.example.com","*.example.org"],` +
		`"methods":["GET","HEAD"],"paths":["/v1/*"]},"auth":{"type":"apiKey","name":"Private-Token"}}]}`
	if string(got) != want {
		t.Errorf("state:\n%s\nwant\n%s", got, want)
	}
	for _, in := range []string{`{}`, `{"credentials":[],"bindings":null}`} {
		if got, _ := json.Marshal(create1(t, in).State()); string(got) != `{"revision":1,"credentials":[],"bindings":[]}` {
			t.Errorf("%s: %s", in, got)
		}
	}
	if m, err := v.CredentialMetadata("token"); err != nil || m.Name != "token" || m.SourceType != Inline || m.Revision != 1 {
		t.Error(m, err)
	}
	if m, err := v.BindingMetadata("z"); err != nil || m.Auth.Name != "Private-Token" {
		t.Error(m, err)
	}
	_, err1 := v.CredentialMetadata("none")
	_, err2 := v.BindingMetadata("none")
	if !errs.Is(err1, errs.NotFound) || !errs.Is(err2, errs.NotFound) {
		t.Error(err1, err2)
	}
}

func TestCreateRefuses(t *testing.T) {
	long := strings.Repeat("x", MaxValue+1)
	many := func(n int, f func(i int) string) string {
		all := make([]string, n)
		for i := range all {
			all[i] = f(i)
		}
		return strings.Join(all, ",")
	}
	host := `{"hosts":["a.example.com"]}`
	sub := func(s string) string { return withAuth(`{"type":"passthrough","substitutions":[` + s + `]}`) }
	for in, want := range map[string]string{
		``: "not valid JSON at byte 0", `null`: "want an object", `[]`: "want an object", `{} {}`: "data after", `{`: "not valid JSON",

		"{\"\xff\":1}":                                                                      "not UTF-8",
		`{"credential":[]}`:                                                                 `unknown field "credential"; want bindings, credentials`,
		`{"Credentials":[]}`:                                                                "unknown field",
		`{"credentials":[],"credentials":[]}`:                                               "stands there twice",
		`{"credentials":{}}`:                                                                "credentials: want an array",
		`{"credentials":[3]}`:                                                               "credentials[0]: want an object",
		`{"credentials":[{"name":"a"}]}`:                                                    "credentials[0]: it has no source",
		`{"credentials":[{"name":3}]}`:                                                      "credentials[0].name: want a string",
		`{"credentials":[` + credential("", "x") + `]}`:                                     "its name is blank",
		`{"credentials":[` + credential("  ", "x") + `]}`:                                   "its name is blank",
		`{"credentials":[` + credential(" a", "x") + `]}`:                                   "blanks around it",
		`{"credentials":[` + credential("a/b", "x") + `]}`:                                  "a slash",
		`{"credentials":[` + credential("..", "x") + `]}`:                                   "a slash",
		`{"credentials":[` + credential("a\u202eb", "x") + `]}`:                             "cannot be seen",
		`{"credentials":[` + credential(strings.Repeat("n", 129), "x") + `]}`:               "129 bytes; at most 128",
		`{"credentials":[` + credential("a", "") + `]}`:                                     "the value is empty",
		`{"credentials":[` + credential("a", long) + `]}`:                                   "longer than 65536",
		`{"credentials":[{"name":"a","source":{"type":"inline","value":"sEcr3T-\u0007"}}]}`: "control characters",
		`{"credentials":[{"name":"a","source":{"value":"sEcr3T-\ud800"}}]}`:                 `half of a \u escape`,
		`{"credentials":[{"name":"a","source":{"value":"xsbxph_y"}}]}`:                      "contains sbxph_",
		`{"credentials":[{"name":"a","source":{"sEcr3T-as-a-name":"x"}}]}`:                  "unknown field; want argv",
		`{"credentials":[{"name":"a","source":{"value":"a","value":"b"}}]}`:                 "stands there twice",
		`{"credentials":[{"name":"a","source":{"value":12345678901}}]}`:                     "value: want a string",
		`{"credentials":[{"name":"a","source":{"type":"sEcr3T-","value":"b"}}]}`:            "its type is unknown",
		`{"credentials":[{"name":"a","source":{"type":"file","path":"/etc/shadow"}}]}`:      "only the administrator",
		`{"credentials":[{"name":"a","source":{"type":"command","argv":["/bin/id"]}}]}`:     "only the administrator",
		`{"credentials":[{"name":"a","source":{"value":"b","path":"/etc/shadow"}}]}`:        "the one of its type",
		`{"credentials":[` + credential("a", "x") + `,` + credential("a", "y") + `]}`:       `credential "a" stands in the request twice`,

		`{"credentials":[` + many(257, func(i int) string { return credential(fmt.Sprint(i), "x") }) + `]}`: "more than 256",

		`{"credentials":[` + many(17, func(i int) string { return credential(fmt.Sprint(i), long[1:]) }) + `]}`: "at most 1048576",

		vaultOf(bearer("b", host), bearer("b", `{"hosts":["b.example.com"]}`)): `binding "b" stands in the request twice`,

		vaultOf(many(257, func(i int) string { return bearer(fmt.Sprint(i), `{"hosts":["a.example.com"]}`) })): "more than 256",

		vaultOf(many(17, func(i int) string {
			return bearer(fmt.Sprint(i), `{"hosts":[`+many(61, func(j int) string { return fmt.Sprintf(`"a%d.b%d.example.com"`, i, j) })+`]}`)
		})): "1037 hosts and 17 paths in all; at most 1024",
		vaultOf(`{"name":"b"}`): "it has no match",
		vaultOf(`{"name":"b","match":{"hosts":["a.example.com"]}}`):              "it has no auth",
		vaultOf(bearer("b", `{}`)):                                               "it has no hosts",
		vaultOf(bearer("b", `{"hosts":[]}`)):                                     "it has no hosts",
		vaultOf(bearer("b", `{"hosts":["localhost"]}`)):                          "no full name",
		vaultOf(bearer("b", `{"hosts":["*.com"]}`)):                              "no full name",
		vaultOf(bearer("b", `{"hosts":["*"]}`)):                                  "no full name",
		vaultOf(bearer("b", `{"hosts":["a.*.com"]}`)):                            "no full name",
		vaultOf(bearer("b", `{"hosts":["203.0.113.7"]}`)):                        "no full name",
		vaultOf(bearer("b", `{"hosts":["https://a.example.com"]}`)):              "no full name",
		vaultOf(bearer("b", `{"hosts":["a.example.com:443"]}`)):                  "no full name",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"schemes":["ftp"]}`)):    "neither https nor http",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"ports":[8443]}`)):       "port 8443",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"ports":[80,443]}`)):     "",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"ports":[443.5]}`)):      "whole number",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"methods":["*"]}`)):      "is no method",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"methods":["trace"]}`)):  "is no method",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"methods":["G T"]}`)):    "is no method",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"paths":["v1"]}`)):       "begins with /",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"paths":["/a/../b"]}`)):  "a segment . or ..",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"paths":["/a?b"]}`)):     "a query is no part",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"paths":["/a%zz"]}`)):    "hexadecimal",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"paths":["/a%0a"]}`)):    "control character",
		vaultOf(bearer("b", `{"hosts":["a.example.com"],"port":1}`)):             `unknown field "port"`,
		vaultOf(withAuth(`{"type":"digest","credential":"token"}`)):              "its type is none of",
		vaultOf(withAuth(`{"type":"bearer"}`)):                                   "type bearer wants credential",
		vaultOf(withAuth(`{"type":"bearer","credential":"token","name":"X"}`)):   "type bearer has no name",
		vaultOf(withAuth(`{"type":"bearer","credential":"none"}`)):               "uses a credential for its header 1 that the vault does not have",
		vaultOf(withAuth(`{"type":"basic","credential":"token"}`)):               "base64 of user:password",
		vaultOf(withAuth(`{"type":"apiKey","credential":"token"}`)):              "wants name",
		vaultOf(withAuth(`{"type":"apiKey","credential":"token","name":"a b"}`)): "is not the name of a header",
		vaultOf(withAuth(`{"type":"customHeaders","headers":[]}`)):               "wants headers",
		vaultOf(withAuth(`{"type":"customHeaders","headers":[{"name":"X-A"}]}`)): "has no credential",

		vaultOf(withAuth(`{"type":"customHeaders","headers":[{"name":"X-A","credential":"token"},{"name":"x_a","credential":"token"}]}`)): "twice",

		vaultOf(sub(`{"placeholder":"{{TOKEN}}","in":["path"]}`)):               "no credential",
		vaultOf(sub(`{"credential":"token","placeholder":"","in":["path"]}`)):   "from 1 to 256 bytes, not 0",
		vaultOf(sub(`{"credential":"token","placeholder":"$K","in":["path"]}`)): "",

		// A client has written the value where a name or a type stands.
		vaultOf(withAuth(`{"type":"bearer","credential":"sEcr3T-token"}`)): "that the vault does not have",

		vaultOf(withAuth(`{"type":"sEcr3T-token"}`)): "its type is none of",

		vaultOf(withAuth(`{"type":"apiKey","name":"sEcr3T-token x","credential":"token"}`)): "auth: its name is not the name",

		vaultOf(withAuth(`{"type":"customHeaders","headers":[{"name":"sEcr3T-token","credential":""}]}`)): "auth.headers[0]: the header has no",

		vaultOf(sub(`{"credential":"sEcr3T-token","placeholder":"{{TOKEN}}","in":["path"]}`)): "in its substitutions[0] that",

		vaultOf(sub(`{"credential":"token","placeholder":"{{TOKEN}}","in":["sEcr3T-token"]}`)): "want path, query, header or body",

		vaultOf(sub(`{"credential":"token","placeholder":"sEcr3T-token","in":[]}`)): "names no place",

		`{"credentials":[` + many(3, func(i int) string { return credential(fmt.Sprint(i), strings.Repeat("<", MaxValue)) }) + `]}`: "with escapes",

		vaultOf(sub(`{"credential":"token","placeholder":"{{TO KEN}}","in":["path"]}`)):  "no blanks",
		vaultOf(sub(`{"credential":"token","placeholder":"{{sbxph_}}","in":["path"]}`)):  "draws those itself",
		vaultOf(sub(`{"credential":"token","placeholder":"{{TOKEN}}","in":[]}`)):         "names no place",
		vaultOf(sub(`{"credential":"token","placeholder":"{{TOKEN}}","in":["cookie"]}`)): "want path, query, header or body, or some",

		vaultOf(sub(`{"credential":"token","placeholder":"{{TOKEN}}","in":["path"]},{"credential":"token","placeholder":"TOKEN}}xx","in":["path"]}`)): "",

		vaultOf(sub(`{"credential":"token","placeholder":"{{TOKEN}}","in":["path"]},{"credential":"token","placeholder":"x{{TOKEN}}","in":["path"]}`)): "one in the other",

		vaultOf(bearer("one", `{"hosts":["a.example.com"]}`), bearer("two", `{"hosts":["*.example.com"],"paths":["/x"]}`)):   "",
		vaultOf(bearer("one", `{"hosts":["*.a.example.com"]}`), bearer("two", `{"hosts":["*.example.com"],"paths":["/x"]}`)): `bindings "one" and "two" can match`,
	} {
		v, err := Create([]byte(in))
		if want == "" {
			if err != nil {
				t.Errorf("Create(%.200s): %v", in, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Create(%.200s) = %v, %v; want an error with %q", in, v, err, want)
		}
		if err != nil && (!errs.Is(err, errs.Invalid) || strings.Contains(err.Error(), secretMark[:4]) && !strings.Contains(in, `"Ecr3T`)) {
			t.Errorf("Create(%.200s): error %q of code %s", in, err, errs.CodeOf(err))
		}
	}
}

func TestReservedHeaders(t *testing.T) {
	for _, name := range []string{
		"Host", "content-length", "Transfer_Encoding", "CONNECTION", "Proxy-Authorization", "proxy_connection", "Upgrade", "TE", "Trailer",
		"Keep-Alive", "Expect", ":authority", ":path", "Accept-Encoding", "Content-Type", "Content-Encoding", "Range", "X-Forwarded-For",
		"Sec-WebSocket-Key", "Http2-Settings",
	} {
		_, err := Create([]byte(vaultOf(withAuth(fmt.Sprintf(`{"type":"apiKey","credential":"token","name":%q}`, name)))))
		if err == nil || !strings.Contains(err.Error(), "is reserved") {
			t.Errorf("%s: %v", name, err)
		}
	}
	create1(t, vaultOf(withAuth(`{"type":"apiKey","credential":"token","name":"Cookie"}`)))
}

// TestHeaderValues: a value that ends a line is no value of a header, whoever binds it, and when.
func TestHeaderValues(t *testing.T) {
	auths := map[string]bool{
		`{"type":"bearer","credential":"c"}`:                                                                           false,
		`{"type":"apiKey","name":"X-Key","credential":"c"}`:                                                            false,
		`{"type":"customHeaders","headers":[{"name":"X-Key","credential":"c"}]}`:                                       false,
		`{"type":"passthrough","substitutions":[{"credential":"c","placeholder":"{{TOKEN}}","in":["body","header"]}]}`: false,
		`{"type":"passthrough","substitutions":[{"credential":"c","placeholder":"{{TOKEN}}","in":["body","path"]}]}`:   true,
	}
	for _, value := range []string{"a\r\nX-Evil: 1", "a\nb", "a\rb", " a", "a\t", "a "} {
		for auth, fits := range auths {
			c, b := credential("c", value), withAuth(auth)
			_, err := Create([]byte(`{"credentials":[` + c + `],"bindings":[` + b + `]}`))
			if (err == nil) != fits {
				t.Errorf("%q with %s: %v", value, auth, err)
			}
			v := create1(t, `{"credentials":[`+c+`]}`)
			if _, err = v.Patch([]byte(`{"bindings":{"add":[` + b + `]}}`)); (err == nil) != fits {
				t.Errorf("%q with %s, bound later: %v", value, auth, err)
			}
			v = create1(t, `{"credentials":[`+credential("c", "good value")+`],"bindings":[`+b+`]}`)
			if _, err = v.Patch([]byte(`{"credentials":{"replace":[` + c + `]}}`)); (err == nil) != fits {
				t.Errorf("%q with %s, replaced later: %v", value, auth, err)
			}
		}
	}
}

func TestTrusted(t *testing.T) {
	in := `{"credentials":[{"name":"f","source":{"type":"file","path":"/etc/token","cacheSeconds":0}},
		{"name":"c","source":{"type":"command","argv":["/usr/bin/get","x y"]}}],
		"bindings":[{"name":"b","match":{"hosts":["a.example.com"]},"auth":{"type":"bearer","credential":"f"}}]}`
	v, err := CreateTrusted([]byte(in))
	if err != nil {
		t.Fatal(err)
	}
	f, c := v.Credential("f").Source, v.Credential("c").Source
	if f.Path != "/etc/token" || f.Cache != 0 || c.Cache != DefaultCache || !reflect.DeepEqual(c.Argv, []string{"/usr/bin/get", "x y"}) {
		t.Errorf("%+v %+v", f, c)
	}
	if got := v.State().Credentials; got[0].SourceType != Command || got[1].SourceType != File {
		t.Error(got)
	}
	if _, err := Create([]byte(in)); err == nil {
		t.Error("a client names a file of the host")
	}
	// A client sends the administrator's secret to its own server.
	for _, patch := range []string{
		`{"bindings":{"add":[{"name":"x","match":{"hosts":["evil.example.net"]},"auth":{"type":"bearer","credential":"f"}}]}}`,
		`{"bindings":{"replace":[{"name":"b","match":{"hosts":["evil.example.net"]},"auth":{"type":"bearer","credential":"f"}}]}}`,
		`{"bindings":{"add":[{"name":"x","match":{"hosts":["evil.example.net"]},"auth":{"type":"passthrough","substitutions":[
		{"credential":"c","placeholder":"{{TOKEN}}","in":["path"]}]}}]}}`,
	} {
		if _, err := v.Patch([]byte(patch)); !errs.Is(err, errs.Denied) {
			t.Errorf("%s: %v", patch, err)
		}
		if _, err := v.PatchTrusted([]byte(patch)); err != nil {
			t.Errorf("%s: %v", patch, err)
		}
	}
	if _, err := v.Patch([]byte(`{"credentials":{"replace":[{"name":"f","source":{"type":"file","path":"/etc/shadow"}}]}}`)); err == nil {
		t.Error("a client names a file of the host in a patch")
	}
	for source, want := range map[string]string{
		`{"type":"file","path":"etc"}`:                             "absolute path",
		`{"type":"file","path":"/a/../b"}`:                         "absolute path",
		`{"type":"file"}`:                                          "absolute path",
		`{"type":"file","path":"/a","value":"x"}`:                  "the one of its type",
		`{"type":"command","argv":[]}`:                             "absolute path of a program",
		`{"type":"command","argv":["id"]}`:                         "absolute path of a program",
		`{"type":"command","argv":["/bin/id","a\u0000"]}`:          "no NUL",
		`{"type":"file","path":"/a","cacheSeconds":86401}`:         "from 0 to 86400",
		`{"type":"file","path":"/a","cacheSeconds":-1}`:            "from 0 to 86400",
		`{"type":"inline","value":"a","cacheSeconds":1}`:           "no cacheSeconds",
		`{"type":"file","path":"/a","cacheSeconds":9999999999999}`: "from 0 to 86400",
	} {
		_, err := CreateTrusted([]byte(`{"credentials":[{"name":"a","source":` + source + `}]}`))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", source, err, want)
		}
	}
}

// TestEnv: a credential names the variable that has its placeholder, until a change says otherwise.
func TestEnv(t *testing.T) {
	with := func(envs ...string) string {
		var all []string
		for i, env := range envs {
			all = append(all, fmt.Sprintf(`{"name":"c%d","env":%q,"source":{"value":"x"}}`, i, env))
		}
		return `{"credentials":[` + strings.Join(all, ",") + `]}`
	}
	v, err := Create([]byte(with("API_TOKEN", "", "")))
	if err != nil {
		t.Fatal(err)
	}
	again, err := Decode(v.Encode())
	if err != nil || again.Credential("c0").Env != "API_TOKEN" || again.Credential("c1").Env != "" {
		t.Errorf("%v: %+v", err, again)
	}
	if m, err := v.CredentialMetadata("c0"); err != nil || m.Env != "API_TOKEN" || m.Placeholder != v.Credential("c0").Placeholder {
		t.Errorf("%+v, %v", m, err)
	}
	for _, step := range []struct{ change, source, want string }{
		{"replace", `"source":{"value":"y"}`, "API_TOKEN"}, // another value
		{"replace", `"env":null,"source":{"value":"y"}`, "API_TOKEN"},
		{"replace", `"env":"OTHER","source":{"value":"y"}`, "OTHER"},
		{"replace", `"env":"","source":{"value":"y"}`, ""},
		{"replace", `"source":{"value":"y"}`, ""},
		{"replace", `"env":"API_TOKEN","source":{"value":"y"}`, "API_TOKEN"},
	} {
		placeholder := v.Credential("c0").Placeholder
		if v, err = v.Patch([]byte(`{"credentials":{"` + step.change + `":[{"name":"c0",` + step.source + `}]}}`)); err != nil {
			t.Fatalf("%+v: %v", step, err)
		}
		if c := v.Credential("c0"); c.Env != step.want || c.Placeholder != placeholder {
			t.Errorf("%+v: %+v", step, c)
		}
	}
	if v, err = v.Patch([]byte(`{"credentials":{"delete":["c0"]}}`)); err == nil {
		v, err = v.Patch([]byte(`{"credentials":{"add":[{"name":"c0","source":{"value":"y"}}]}}`))
	}
	if err != nil || v.Credential("c0").Env != "" {
		t.Errorf("one that was deleted and added again has %+v, %v", v, err)
	}
	v = create1(t, with("API_TOKEN"))
	for bad, want := range map[string]string{
		"A=B": "no name of a variable", "A\nB": "no name of a variable", "A\n": "no name of a variable", "1A": "no digit first",
		"A-B": "no name of a variable", "Ä": "no name of a variable", " ": "no name of a variable",
		strings.Repeat("A", MaxName+1): "129 bytes", "OPENSANDBOX_LIFECYCLE": "no guest gets", "PATH": "do not work",
		"SSL_CERT_FILE": "that they trust", "npm_config_cafile": "that they trust",
	} {
		if _, err := Create([]byte(with(bad))); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
	if _, err := CreateTrusted([]byte(with("A", "B", "A"))); err == nil || !strings.Contains(err.Error(), `"c0" and "c2" have the same env`) {
		t.Error(err)
	}
	stored := func(name string) (*Vault, error) {
		return Decode([]byte(strings.Replace(string(v.Encode()), "API_TOKEN", name, 1)))
	}
	for _, bad := range []string{"A=B", "OPENSANDBOX_LIFECYCLE", strings.Repeat("A", MaxName+1)} {
		if _, err := stored(bad); err == nil {
			t.Errorf("a stored vault has %q as a variable", bad)
		}
	}
	for _, old := range []string{"my.token", "npm_config_//r/:_authToken", "1A", "PATH", "SSL_CERT_FILE"} { // as older releases took
		got, err := stored(old)
		if err == nil {
			got, err = got.Patch([]byte(`{"credentials":{"replace":[{"name":"c0","source":{"value":"y"}}]}}`))
		}
		if err != nil || got.Credential("c0").Env != old {
			t.Errorf("a stored vault with the variable %q: %v", old, err)
		}
	}
}

func TestPatch(t *testing.T) {
	v := create1(t, vaultOf(bearer("a", `{"hosts":["a.example.com"]}`)))
	before, first := string(v.Encode()), v
	for i, step := range []struct{ patch, want string }{
		{`{}`, ""},
		{`{"expectedRevision":2,"credentials":{"add":[` + credential("new", secretMark+"new") + `]}}`, ""},
		{`{"expectedRevision":3,"credentials":{"replace":[` + credential("token", secretMark+"2") + `]}}`, ""},
		{`{"bindings":{"add":[` + bearer("b", `{"hosts":["b.example.com"]}`) + `],"replace":[` + bearer("a", `{"hosts":["c.example.com"]}`) + `]}}`, ""},
		{`{"bindings":{"delete":["a"],"add":[` + bearer("c", `{"hosts":["c.example.com"]}`) + `]},"credentials":{"delete":["new","basic"]}}`, ""},
		{`{"expectedRevision":5}`, "its revision is 6, not 5"},
		{`{"expectedRevision":0}`, "its revision is 6, not 0"},
		{`{"expectedRevision":"6"}`, "whole number"},
		{`{"credentials":{"delete":["token"]}}`, `binding "b" uses a credential for its header 1 that the vault does not have`},
		{`{"credentials":{"delete":["none"]}}`, `no credential "none" to replace or delete`},
		{`{"credentials":{"replace":[` + credential("none", "x") + `]}}`, `no credential "none"`},
		{`{"credentials":{"add":[` + credential("token", "x") + `]}}`, `a credential "token" already`},
		{`{"bindings":{"delete":["none"]}}`, `no binding "none"`},
		{`{"bindings":{"add":[` + bearer("b", `{"hosts":["z.example.com"]}`) + `]}}`, `a binding "b" already`},
		{`{"bindings":{"delete":["b"],"add":[` + bearer("b", `{"hosts":["z.example.com"]}`) + `]}}`, `binding "b" stands in the request twice`},
		{`{"credentials":{"delete":["token"],"add":[` + credential("token", "x") + `]}}`, `credential "token" stands in the request twice`},
		{`{"credentials":{"delete":["token","token"]}}`, `stands in the request twice`},
		{`{"bindings":{"delete":["b"],"add":[` + bearer("d", `{"hosts":["c.example.com"]}`) + `]}}`, `bindings "c" and "d" can match`},
		{`{"bindings":{"delete":["b","c"]},"credentials":{"delete":["token"]}}`, ""},
	} {
		last := string(v.Encode())
		next, err := v.Patch([]byte(step.patch))
		if string(v.Encode()) != last {
			t.Fatalf("step %d has changed the old vault", i)
		}
		if step.want != "" {
			code := errs.Invalid
			if strings.Contains(step.want, "its revision") {
				code = errs.WrongState
			}
			if next != nil || err == nil || !strings.Contains(err.Error(), step.want) || !errs.Is(err, code) {
				t.Errorf("step %d: %v, %v; want %q", i, next, err, step.want)
			}
			continue
		}
		if err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
		if next.Revision() != v.Revision()+1 {
			t.Errorf("step %d: revision %d after %d", i, next.Revision(), v.Revision())
		}
		if next.Revision() == 5 {
			s := next.State()
			c := s.Credentials
			if c[0].Revision != 1 || c[1].Revision != 3 || c[2].Revision != 4 || s.Bindings[0].Revision != 5 {
				t.Errorf("revisions %+v", s)
			}
			a, b := first.Credential("token"), next.Credential("token")
			if a.Placeholder != b.Placeholder || b.Source.Value.Reveal() != secretMark+"2" {
				t.Error("a replaced credential has another placeholder, or its old value")
			}
		}
		v = next
	}
	if s := v.State(); s.Revision != 7 || len(s.Credentials)+len(s.Bindings) != 0 || string(first.Encode()) != before {
		t.Errorf("%+v", s)
	}
	full := create1(t, `{}`)
	var err error
	for i := range 17 {
		full2, e := full.Patch([]byte(`{"credentials":{"add":[` + credential(fmt.Sprint(i), strings.Repeat("v", MaxValue)) + `]}}`))
		if err = e; e != nil {
			break
		}
		full = full2
	}
	if err == nil || !strings.Contains(err.Error(), "at most 1048576") || len(full.Credentials()) != 15 {
		t.Errorf("a vault of %d large values: %v", len(full.Credentials()), err)
	}
}

// TestCopy: a copy differs by its placeholders alone, and shares nothing that changes.
func TestCopy(t *testing.T) {
	v := create1(t, vaultOf(bearer("a", `{"hosts":["b.example.com"]}`)))
	before := string(v.Encode())
	c := v.Copy()
	text := string(c.Encode())
	for _, was := range v.Credentials() {
		is := c.Credential(was.Name)
		if is.Placeholder == was.Placeholder || !placeholderForm.MatchString(is.Placeholder) {
			t.Errorf("%s has the placeholder %q, and had %q", was.Name, is.Placeholder, was.Placeholder)
		}
		text = strings.Replace(text, is.Placeholder, was.Placeholder, 1)
	}
	if text != before || string(v.Encode()) != before {
		t.Errorf("a copy of\n%s\nis\n%s", before, text)
	}
	if _, err := Decode(c.Encode()); err != nil {
		t.Error(err)
	}
	next, err := c.Patch([]byte(`{"credentials":{"replace":[` + credential("token", "x") + `]}}`))
	if err != nil || next.Credential("token").Placeholder != c.Credential("token").Placeholder || string(v.Encode()) != before {
		t.Errorf("a changed copy: %v", err)
	}
}

func TestUncovered(t *testing.T) {
	v := create1(t, vaultOf(bearer("b", `{"hosts":["a.example.com","*.example.org"],"schemes":["https","http"]}`),
		bearer("a", `{"hosts":["c.example.com"]}`)))
	got := v.Uncovered(func(host string, port uint16) bool { return host == "a.example.com" && port == 443 })
	want := []Uncovered{
		{"a", "c.example.com", 443, true},
		{"b", "a.example.com", 80, true},
		{"b", "*.example.org", 443, true},
		{"b", "*.example.org", 80, true},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v; want %v", got, want)
	}
	v, err := v.Patch([]byte(`{"credentials":{"replace":[` + credential("token", "x") + `]},"bindings":{"replace":[` +
		bearer("a", `{"hosts":["d.example.com"]}`) + `],"add":[` + bearer("c", `{"hosts":["e.example.com"]}`) + `]}}`))
	if err != nil {
		t.Fatal(err)
	}
	got = v.Uncovered(func(_ string, port uint16) bool { return port == 80 })
	want = []Uncovered{
		{"a", "d.example.com", 443, true},
		{"b", "a.example.com", 443, false},
		{"b", "*.example.org", 443, false},
		{"c", "e.example.com", 443, true},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("after a patch: %v; want %v", got, want)
	}
}

// TestGuess: who writes bindings learns nothing of a value from what is refused.
func TestGuess(t *testing.T) {
	const value = "sEcr3T-token"
	tried := 0
	for i := range len(value) {
		for j := i + 1; j <= len(value); j++ {
			for _, place := range []Place{InPath, InQuery, InHeader, InBody} {
				binding := `{"name":"b","match":{"hosts":["a.example.com"]},"auth":{"type":"bearer","credential":"c","substitutions":[
					{"credential":"c","placeholder":"` + value[i:j] + `","in":["` + string(place) + `"]}]}}`
				v, err := create1(t, `{"credentials":[`+credential("c", value)+`]}`).Patch([]byte(`{"bindings":{"add":[` + binding + `]}}`))
				if err == nil { // a rotation, and the store
					v, err = v.Patch([]byte(`{"credentials":{"replace":[` + credential("c", "x"+value) + `]}}`))
				}
				if err == nil {
					_, err = Decode(v.Encode())
				}
				if err != nil {
					t.Errorf("%q in %s: %v", value[i:j], place, err)
				}
				tried++
			}
		}
	}
	if tried != len(value)*(len(value)+1)/2*4 {
		t.Errorf("%d guesses", tried)
	}
}

func TestStored(t *testing.T) {
	v, err := CreateTrusted([]byte(`{"credentials":[` + credential("i", "a\tb\u00fc\u2028\"") + `,{"name":"f","source":{"type":"file","path":"/x",
		"cacheSeconds":7}},{"name":"c","source":{"type":"command","argv":["/y","z"]}}],"bindings":[` + strings.ReplaceAll(bearer("b",
		`{"hosts":["*.example.com"],"paths":["/%C3%BC/*x"]}`), `"token"`, `"f"`) + `]}`))
	if err != nil {
		t.Fatal(err)
	}
	again, err := Decode(v.Encode())
	if err != nil || !reflect.DeepEqual(v, again) || again.Credential("f").Source.Cache != 7*time.Second {
		t.Fatalf("%v\n%s", err, v.Encode())
	}
	good := string(v.Encode())
	for _, bad := range []string{
		"", "x", good[1:], good + "{}", strings.Replace(good, `"version":1`, `"version":2`, 1), strings.Replace(good, `"revision":1`, `"revision":0`, 1),
		strings.Replace(good, `"name":"i"`, `"name":"f"`, 1), strings.Replace(good, `"type":"file"`, `"type":"url"`, 1),
		strings.Replace(good, `"placeholder":"sbxph_`, `"placeholder":"sbxph-`, 1), strings.Replace(good, `"version"`, `"x":1,"version"`, 1),
		strings.Replace(good, `"credential":"f"`, `"credential":"none"`, 1), strings.Replace(good, `"type":"bearer"`, `"type":"apikey"`, 1),
		strings.Replace(good, `["*.example.com"]`, `[]`, 1),
	} {
		if v, err := Decode([]byte(bad)); err == nil || strings.Contains(err.Error(), "ü") {
			t.Errorf("Decode(%s) = %v, %v", bad, v, err)
		}
	}
}
