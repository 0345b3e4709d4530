package cli

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// policies plays a daemon with one policy, and keeps what it was asked.
func policies(t *testing.T) (d *daemon, asked func() []string) {
	var mu sync.Mutex
	var all []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		all = append(all, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+string(b)))
		st := wire.PolicyStatus{Status: "ok", Mode: "enforcing", EnforcementMode: "dns+nft"}
		switch {
		case r.URL.Path != "/v1/sandboxes/lab/networkpolicy":
			w.WriteHeader(http.StatusNotFound)
			//nolint:errcheck // the test sees what is missing
			io.WriteString(w, `{"code":"DOCKER::SANDBOX_NOT_FOUND","message":"Sandbox not found"}`)
			return
		case r.Method == http.MethodGet:
			st.Policy = &wire.NetworkPolicy{DefaultAction: "deny", Egress: []wire.NetworkRule{
				{Action: "allow", Target: "203.0.113.0/24", Ports: []any{443, "8000-8100"}, Protocol: "tcp"},
				{Action: "deny", Target: "evil\x1b"},
			}}
		case r.Method == http.MethodDelete && !strings.Contains(string(b), "203.0.113.0/24"):
			st.Reason = "no matching targets found"
		}
		json.NewEncoder(w).Encode(st) //nolint:errcheck // the test sees what is missing
	}))
	t.Cleanup(s.Close)
	return &daemon{url: s.URL}, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
}

func TestEgress(t *testing.T) {
	d, asked := policies(t)
	want := strings.Join([]string{
		"ACTION   TARGET           PORTS           PROTOCOL",
		"allow    203.0.113.0/24   443,8000-8100   tcp",
		`deny     evil\x1b         all             all`,
		"deny     (all else)       all             all", "",
	}, "\n")
	if r := d.run(t, "egress", "get", "lab"); r.code != 0 || r.out != want {
		t.Errorf("get: %+v, want\n%s", r, want)
	}
	if r := d.run(t, "egress", "get", "-o", "name", "lab"); r.out != "203.0.113.0/24\n"+`evil\x1b`+"\n" {
		t.Errorf("get -o name: %+v", r)
	}
	before := len(asked())
	r := d.run(t, "egress", "patch", "--deny", "203.0.113.9", "--allow", "203.0.113.0/24:443", "--rule", "deny=10.0.0.0/8/icmp",
		"lab", "other")
	if r.code != 125 || r.out != "lab\n" || !strings.Contains(r.errout, "not found") {
		t.Errorf("patch: %+v", r)
	}
	if r := d.run(t, "egress", "rm", "lab", "203.0.113.0/24", "1.2.3.4:80"); r.code != 125 || r.out != "203.0.113.0/24\n" ||
		!strings.Contains(r.errout, "no rule for 1.2.3.4:80") {
		t.Errorf("rm: %+v", r)
	}
	const body = `[{"action":"deny","target":"203.0.113.9"},{"action":"allow","target":"203.0.113.0/24","ports":[443]},` +
		`{"action":"deny","target":"10.0.0.0/8","protocol":"icmp"}]`
	at := " /v1/sandboxes/lab/networkpolicy "
	if got := asked()[before:]; !slices.Equal(got, []string{
		"PATCH" + at + body, "PATCH /v1/sandboxes/other/networkpolicy " + body, "DELETE" + at + `["203.0.113.0/24"]`,
		"DELETE" + at + `["1.2.3.4:80"]`,
	}) {
		t.Errorf("asked\n%s", strings.Join(got, "\n"))
	}
	before = len(asked())
	for args, says := range map[string]string{
		"egress patch lab":                      "no rule is given",
		"egress patch --rule 1.2.3.4 lab":       "deny=TARGET",
		"egress patch --rule block=1.2.3.4 lab": "deny=TARGET",
		"egress patch --rule allow= lab":        "CIDR",
		"egress patch --allow 1.2.3.4":          "SANDBOX",
		"egress rm lab":                         "TARGET",
		"egress get lab -o xml":                 "json",
	} {
		if r := d.run(t, strings.Fields(args)...); r.code != 125 || !strings.Contains(r.errout, says) {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if got := asked()[before:]; len(got) != 0 {
		t.Errorf("the daemon was asked %q", got)
	}
}
