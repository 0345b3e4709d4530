package api

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	openapi "github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// documented lists method and path of every route in the document that is served, and
// in OpenSandbox's for the server.
func documented(t *testing.T) (all [][2]string) {
	t.Helper()
	served, err := openapi3.NewLoader().LoadFromData(openapi.JSON)
	if err != nil {
		t.Fatal(err)
	}
	docs := []*openapi3.T{served}
	for _, name := range []string{"lifecycle", "diagnostic"} {
		doc, err := openapi3.NewLoader().LoadFromFile("../../api/opensandbox/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		docs = append(docs, doc)
	}
	for _, doc := range docs {
		for path, item := range doc.Paths.Map() {
			for method := range item.Operations() {
				if !slices.Contains(all, [2]string{method, path}) {
					all = append(all, [2]string{method, path})
				}
			}
		}
	}
	return all
}

// row is the row of the table that serves a request.
func (s *Server) row(method, path string) (route, bool) {
	p, _ := s.routes.split(path)
	if p == nil {
		return route{}, false
	}
	row, ok := p.methods[method]
	if !ok {
		row, ok = p.methods["*"]
	}
	return row, ok
}

// TestRoles walks every route there is, with a key of every role: it is open to
// those that the table names, and the table names nothing else.
func TestRoles(t *testing.T) {
	w := newWorld(t)
	secrets := map[record.Role]string{}
	for _, role := range record.Roles {
		secrets[role] = w.key(t, "k-"+string(role), string(role))
	}
	used := map[string]bool{}
	for _, rt := range documented(t) {
		method := rt[0]
		path := strings.NewReplacer("{sandboxId}", "taaaaaaaaaaa", "{snapshotId}", "snap-x", "{port}", "8000", "{ref}", "nope", "{name}",
			"nope", "{kind}", "logs", "{forkId}", "fork-x").Replace(rt[1])
		if strings.Contains(path, "/proxy/") {
			path, _, _ = strings.Cut(path, "{")
		}
		if strings.Contains(path, "{") {
			t.Fatalf("%s: say what stands for its parameter", path)
		}
		row, ok := w.s.row(method, path)
		if !ok {
			t.Errorf("%s %s is documented and not served", method, path)
			continue
		}
		used[row.method+" "+row.pattern] = true
		if row.need == tokens {
			continue // see TestRolesInTheProxy
		}
		found := w.s.routes.find(httptest.NewRequest(method, path, nil))
		if found.need != row.need || found.handle == nil {
			t.Errorf("%s %s is found with the role %q, and the table says %q", method, path, found.need, row.need)
		}
		open := row.need == anyone
		if strings.HasSuffix(path, "/events") && method == "GET" {
			continue // it does not end by itself
		}
		for _, role := range record.Roles {
			a := w.do(method, path, "", "OPEN-SANDBOX-API-KEY", secrets[role])
			byRole := a.StatusCode == http.StatusForbidden && strings.Contains(string(a.body), "has the role")
			if may := open || role.Covers(row.need); byRole == may || a.StatusCode == http.StatusUnauthorized {
				t.Errorf("%s %s as %s: %d %.200s", method, path, role, a.StatusCode, a.body)
			}
		}
		if a := w.do(method, path, "", "OPEN-SANDBOX-API-KEY", ""); (a.StatusCode == http.StatusUnauthorized) == open {
			t.Errorf("%s %s without a key: %d", method, path, a.StatusCode)
		}
	}
	for _, row := range w.s.table() {
		if key := row.method + " " + row.pattern; !used[key] {
			t.Errorf("the table has %q, which no document has", key)
		}
	}
}

// TestRolesInTheProxy: a viewer's key opens no port, nor the policy, and the
// tokens go on to do so.
// TestViewerSeesNoSecrets walks every route that a viewer may read: no answer has the
// value of a variable, or a token that opens a sandbox.
func TestViewerSeesNoSecrets(t *testing.T) {
	w := newWorld(t)
	body := strings.Replace(createBody, "{", `{"env":{"SECRET":"PLANTED"},`, 1)
	id := w.do("POST", "/v1/sandboxes", body).sandbox(t).ID
	forked := w.do("POST", "/v1/sandboxes/"+id+"/fork?wait=true", `{"count":1,"timeout":60}`).fork(t, 202).ID
	viewer := w.key(t, "v", "viewer")
	secrets := map[string]string{
		"the value of a variable": "PLANTED", "the agent's token": "agent-token", "the token of a port": w.s.gateway.Token(id, 8000),
		"the token of the egress API": w.s.gateway.Token(id, 18080),
	}
	read := 0
	for _, rt := range documented(t) {
		method := rt[0]
		path := strings.NewReplacer("{sandboxId}", id, "{forkId}", forked, "{snapshotId}", "snap-x", "{ref}", "python", "{name}",
			"nope").Replace(rt[1])
		row, _ := w.s.row(method, path)
		if method != "GET" || row.need != record.Viewer || strings.HasSuffix(path, "/events") && !strings.Contains(path, id) {
			continue
		}
		for _, kind := range []string{"logs", "events", "inspect", "summary"} {
			a := w.do(method, strings.Replace(path, "{kind}", kind, 1), "", "OPEN-SANDBOX-API-KEY", viewer)
			if a.StatusCode == http.StatusOK {
				read++
			}
			for what, secret := range secrets {
				if strings.Contains(string(a.body), secret) {
					t.Errorf("%s tells a viewer %s", path, what)
				}
			}
			if !strings.Contains(path, "{kind}") {
				break
			}
		}
	}
	open := w.do("GET", "/v1/sandboxes/"+id+"/endpoints/44772", "")
	if read < 10 || !strings.Contains(string(open.body), "agent-token") {
		t.Errorf("a viewer read %d routes, and an admin %s: this proves nothing", read, open.body)
	}
}

func TestRolesInTheProxy(t *testing.T) {
	w := newWorld(t)
	sb := w.create()
	at := "/v1/sandboxes/" + sb.ID + "/proxy/"
	viewer, operator := w.key(t, "v", "viewer"), w.key(t, "o", "operator")
	for _, c := range []struct {
		path, header, key string
		want              int
	}{
		{"44772/ping", "OPEN-SANDBOX-API-KEY", viewer, 403},
		{"44772/ping", "X-EXECD-ACCESS-TOKEN", viewer, 401},
		{"44772/ping", "OPEN-SANDBOX-API-KEY", operator, 200},
		{"44772/ping", "X-EXECD-ACCESS-TOKEN", operator, 200},
		{"18080/policy", "OPEN-SANDBOX-API-KEY", viewer, 401},
		{"18080/policy", "OPENSANDBOX-EGRESS-AUTH", viewer, 401},
		{"18080/policy", "OPENSANDBOX-EGRESS-AUTH", operator, 200},
		{"8000/", "OPEN-SANDBOX-API-KEY", viewer, 401},
		{"8000/", "OPEN-SANDBOX-API-KEY", operator, 502}, // nothing listens there
	} {
		if a := w.do("GET", at+c.path, "", "OPEN-SANDBOX-API-KEY", "", c.header, c.key); a.StatusCode != c.want {
			t.Errorf("%s by %s: %d %s, want %d", c.path, c.header, a.StatusCode, a.body, c.want)
		}
	}
	if a := w.do("GET", at+"44772/ping", "", "OPEN-SANDBOX-API-KEY", viewer, "X-EXECD-ACCESS-TOKEN", "agent-token"); a.StatusCode != 200 {
		t.Errorf("a viewer with the token: %d", a.StatusCode)
	}
}

func TestRoleOrder(t *testing.T) {
	var got []string
	for _, have := range append([]record.Role{"", "root"}, record.Roles...) {
		for _, need := range append([]record.Role{"", "root"}, record.Roles...) {
			if have.Covers(need) {
				got = append(got, fmt.Sprintf("%s>=%s", have, need))
			}
		}
	}
	if want := "viewer>=viewer operator>=viewer operator>=operator admin>=viewer admin>=operator admin>=admin"; strings.Join(got,
		" ") != want {
		t.Errorf("%s", got)
	}
	if n := len(newWorld(t).s.table()); n < 40 {
		t.Errorf("only %d routes", n)
	}
}

// TestOnTrial walks every route there is: while an upgrade is on trial those that change what the store has
// ask first, with the nonce that the request has, and those that read do not. So do the ports of a
// sandbox: requests to its agent and to its servers change nothing of the store, and those to the port
// of its policy do.
func TestOnTrial(t *testing.T) {
	asked, nonces, refuse := 0, "", error(nil)
	w := newWorld(t, func(c *Config) {
		c.Hold = func(_ context.Context, nonce string) error {
			asked++
			nonces += nonce
			return refuse
		}
	})
	sb := w.create()
	refuse = errs.New(errs.Unavailable, "on trial")
	held := func(method, path string, want bool) {
		t.Helper()
		asked, nonces = 0, ""
		a := w.do(method, path, "", "OPEN-SANDBOX-API-KEY", testKey, wire.HeaderTrial, "n")
		told := a.StatusCode == http.StatusServiceUnavailable && a.Header.Get("Retry-After") != ""
		if (asked == 1 && nonces == "n") != want || !want && asked > 0 || want && !told {
			t.Errorf("%s %s: asked %d times, %d", method, path, asked, a.StatusCode)
		}
	}
	kept := 0
	for _, row := range w.s.table() {
		path := strings.NewReplacer("{id}", "x", "{port}", "8000", "{ref}", "x", "{ref...}", "x", "{name}", "x",
			"{kind=logs|events|inspect|summary}", "logs", "{kind=credentials|bindings}", "bindings", "{...}", "").Replace(row.pattern)
		switch {
		case row.pattern == "/events" || row.need == tokens: // it does not end by itself; below
		case row.method == "*":
			held("GET", path, false)
		case slices.Contains(keeping, row.method+" "+row.pattern):
			kept++
			held(row.method, path, false)
		default:
			held(row.method, path, row.method != "GET")
		}
	}
	at := "/sandboxes/" + sb.ID + "/proxy/"
	held("POST", at+"44772/command", false)
	held("POST", at+"8000/", false)
	held("GET", at+"18080/policy", false)
	held("PATCH", at+"18080/policy", true)
	if kept != len(keeping) {
		t.Errorf("%d of the routes that change nothing are in the table, want %q", kept, keeping)
	}
}
