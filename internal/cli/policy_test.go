package cli

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// named plays a daemon with one named policy, and tells of each request.
func named(t *testing.T, edit wire.PolicyEdit) (d *daemon, asked chan string) {
	asked = make(chan string, 8)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		asked <- strings.TrimSpace(r.Method + " " + r.URL.Path + " " + string(b))
		var v any = edit.Policy
		switch {
		case r.Method == http.MethodPut:
			v = edit
		case r.Method == http.MethodDelete:
			w.WriteHeader(http.StatusNoContent)
			return
		case r.URL.Path == "/v1/policies":
			v = wire.PolicyList{Items: []wire.PolicySummary{{
				Name: edit.Name, Version: edit.Version, DefaultAction: edit.NetworkPolicy.DefaultAction,
				Rules: len(edit.NetworkPolicy.Egress), Source: edit.Source, UsedBy: edit.UsedBy,
				CreatedAt: edit.CreatedAt, EditedAt: edit.CreatedAt,
			}}}
		}
		json.NewEncoder(w).Encode(v) //nolint:errcheck // the test sees what is missing
	}))
	t.Cleanup(s.Close)
	return &daemon{url: s.URL}, asked
}

func TestPolicy(t *testing.T) {
	users := []wire.PolicyUser{{ID: testID, Name: "lab", Version: 3}, {ID: "ubbbbbbbbbbb", Version: 3}}
	d, asked := named(t, wire.PolicyEdit{
		Policy: wire.Policy{
			Name: "build", Version: 3, Source: wire.PolicyOfStore, UsedBy: users, CreatedAt: time.Now(),
			NetworkPolicy: wire.NetworkPolicy{DefaultAction: "deny", Egress: []wire.NetworkRule{
				{Action: "allow", Target: "pypi.org", Ports: []any{443}},
			}},
		},
		Moved: users[:1], Pending: users[1:],
		Failed: []wire.PolicyUser{{ID: "uccccccccccc", Version: 2, Message: "no space is left"}},
	})
	for _, c := range []struct {
		args, asked, out, errout string
		code                     int
	}{
		{"policy ls", "GET /v1/policies", "build   3         1       deny      2           store", "", 0},
		{"policy ls -q", "GET /v1/policies", "build\n", "", 0},
		{"policy get build@3", "GET /v1/policies/build@3", "allow    pypi.org     443     all\ndeny     (all else)   all     all\n", "", 0},
		{"policy get -o name build", "GET /v1/policies/build", "pypi.org\n", "", 0},
		{
			"policy set build --deny 203.0.113.9 --allow pypi.org:443",
			`PUT /v1/policies/build {"egress":[{"action":"deny","target":"203.0.113.9"},{"action":"allow","target":"pypi.org","ports":[443]}]}`,
			"build@3\nmoved lab\npending ubbbbbbbbbbb\n",
			"uccccccccccc could not be moved to version 3 of policy build: no space is left", 125,
		},
		{"policy set build -q --default deny", `PUT /v1/policies/build {"defaultAction":"deny","egress":[]}`, "build@3\n", "uccccccccccc", 125},
		{"egress set --policy build@2 lab", `PUT /v1/sandboxes/lab/policy {"name":"build@2"}`, "lab\n", "", 0},
		{"policy rm build", "DELETE /v1/policies/build", "build\n", "", 0},
	} {
		r := d.run(t, strings.Fields(c.args)...)
		if got := <-asked; r.code != c.code || !strings.Contains(r.out, c.out) || !strings.Contains(r.errout, c.errout) || got != c.asked {
			t.Errorf("%s: %+v, asked %s", c.args, r, got)
		}
	}
	for args, says := range map[string]string{
		"policy set build": "no policy is given", "policy set": "POLICY", "policy get": "POLICY", "policy rm": "POLICY",
		"policy set build --policy web": "want a file",
	} {
		if r := d.run(t, strings.Fields(args)...); r.code != 125 || !strings.Contains(r.errout, says) || len(asked) > 0 {
			t.Errorf("%s: %+v", args, r)
		}
	}
}

// TestCreateWithPolicy: a name is sent as an extension, and a file as rules.
func TestCreateWithPolicy(t *testing.T) {
	for _, value := range []string{"build", "build@3"} {
		d := newDaemon(t)
		if r := d.run(t, "create", "--policy", value, "base"); r.code != 0 || d.create.Extensions[wire.ExtPolicy] != value ||
			len(d.create.NetworkPolicy) > 0 {
			t.Errorf("%s: %+v, asked for %+v", value, r, d.create)
		}
	}
}

// TestCompletePolicies: names of policies are offered where they are taken. A file will do
// as well where a shell offers them.
func TestCompletePolicies(t *testing.T) {
	t.Setenv("COMPLETION_LIMIT", "30s")
	d, _ := named(t, wire.PolicyEdit{Policy: wire.Policy{Name: "build", Version: 3}})
	const files = ":0"
	for args, want := range map[string][2]string{
		"policy get |": {"build", ":4"}, "policy rm b|": {"build", ":4"}, "policy rm build |": {"", ":4"}, "policy rm x|": {"", ":4"},
		"create --policy |": {"build", files}, "run --policy ./|": {"", files}, "egress set --policy bu|": {"build", files},
		"policy set --policy |": {"json", ":8"}, // the shell looks for files with this ending
	} {
		words := strings.Fields(args)
		words[len(words)-1] = strings.TrimSuffix(words[len(words)-1], "|")
		got, directive := d.complete(t, words...)
		if strings.Join(got, " ") != want[0] || directive != want[1] {
			t.Errorf("%s: %q %s, want %q", args, got, directive, want)
		}
	}
}
