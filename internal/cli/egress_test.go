package cli

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

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

// TestEgressAboutRequests: rules about requests are sent as such, and listed in a column of
// their own.
func TestEgressAboutRequests(t *testing.T) {
	var got []wire.NetworkRule
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		st := wire.PolicyStatus{Status: "ok", Mode: "enforcing", EnforcementMode: "dns+nft"}
		if r.Method == http.MethodGet {
			st.Policy = &wire.NetworkPolicy{DefaultAction: "deny", Egress: []wire.NetworkRule{
				{Action: "allow", Target: "api.example.com", Ports: []any{443}, HTTP: &wire.HTTPRequests{
					Methods: []string{"GET", "HEAD"}, Paths: []string{"/v1/*"},
				}},
			}}
		} else if err := json.NewDecoder(r.Body).Decode(&got); err != nil {
			t.Error(err)
		}
		json.NewEncoder(w).Encode(st) //nolint:errcheck // the test sees what is missing
	}))
	defer s.Close()
	d := &daemon{url: s.URL}
	want := strings.Join([]string{
		"ACTION   TARGET            PORTS   PROTOCOL   REQUESTS",
		"allow    api.example.com   443     all        GET,HEAD /v1/*",
		"deny     (all else)        all     all        all", "",
	}, "\n")
	if r := d.run(t, "egress", "get", "lab"); r.code != 0 || r.out != want {
		t.Errorf("get: %+v, want\n%s", r, want)
	}
	r := d.run(t, "egress", "patch", "--allow", "GET api.example.com:443/v1/*", "--rule", "deny=* a.example.com/x",
		"--allow", "b.example.com", "lab")
	if b, err := json.Marshal(got); r.code != 0 || err != nil || string(b) != `[{"action":"allow","target":"api.example.com","ports":[443],`+
		`"http":{"methods":["GET"],"paths":["/v1/*"]}},{"action":"deny","target":"a.example.com","http":{"paths":["/x"]}},`+
		`{"action":"allow","target":"b.example.com"}]` {
		t.Errorf("patch: %+v, %s, %v", r, b, err)
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
		"egress patch lab":                           "no rule is given",
		"egress patch --rule 1.2.3.4 lab":            "deny=TARGET",
		"egress patch --rule block=1.2.3.4 lab":      "deny=TARGET",
		"egress patch --rule allow= lab":             "TARGET[:port",
		"egress set lab":                             "no policy is given",
		"egress set --default maybe lab":             "allow or deny",
		"egress set --policy web --deny 1.1.1.1 lab": "want a file",
		"egress set --policy ./none lab":             "./none",
		"egress explain lab":                         "HOST:PORT",
		"create --policy ./none base":                "./none",
		"create --policy web --allow 1.2.3.4 b":      "exclude each other",
		"create --policy - --network open base":      "exclude each other",
		"egress patch --allow 1.2.3.4":               "SANDBOX",
		"egress rm lab":                              "TARGET",
		"egress get lab -o xml":                      "json",
	} {
		if r := d.run(t, strings.Fields(args)...); r.code != 125 || !strings.Contains(r.errout, says) {
			t.Errorf("%s: %+v", args, r)
		}
	}
	if got := asked()[before:]; len(got) != 0 {
		t.Errorf("the daemon was asked %q", got)
	}
	file := filepath.Join(t.TempDir(), "policy.json")
	if err := os.WriteFile(file, []byte(`{"defaultAction":"allow","egress":[{"action":"deny","target":"c.example"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"--default", "allow", "--deny", "203.0.113.9", "--allow", "*.npmjs.org:443"},
		{"--policy", file, "--allow", "pypi.org:443"},
		{"--default", "deny"},
	} {
		if r := d.run(t, append([]string{"egress", "set", "lab"}, args...)...); r.code != 0 || r.out != "lab\n" {
			t.Errorf("set: %+v", r)
		}
	}
	if got := asked()[before:]; !slices.Equal(got, []string{
		"PUT" + at + `{"defaultAction":"allow","egress":[{"action":"deny","target":"203.0.113.9"},` +
			`{"action":"allow","target":"*.npmjs.org","ports":[443]}]}`,
		"PUT" + at + `{"defaultAction":"allow","egress":[{"action":"allow","target":"pypi.org","ports":[443]},` +
			`{"action":"deny","target":"c.example"}]}`,
		"PUT" + at + `{"defaultAction":"deny","egress":[]}`,
	}) {
		t.Errorf("asked\n%s", strings.Join(got, "\n"))
	}
}

// TestEgressExplained: what explain, test and denials print, and how test ends.
func TestEgressExplained(t *testing.T) {
	refused := wire.Denial{
		Time: time.Now(), Times: 3, Protocol: "tcp", Name: "evil\x1b.example", Address: "203.0.113.7", Port: 443,
		Reason: "no rule allows it", Allow: "evil.example:443",
	}
	no := wire.Explanation{Target: "pypi.org:443/tcp", Verdict: wire.VerdictDeny, Reason: "no rule allows it", Allow: "pypi.org:443"}
	yes := wire.Explanation{Target: "pypi.org:443/tcp", Verdict: wire.VerdictAllow, Reason: "by the rule allow pypi.org:443"}
	never := wire.Explanation{Target: "10.0.0.1:22/tcp", Verdict: wire.VerdictDeny, Reason: "host address", Names: []string{"a", "b"}}
	resolver := wire.Explanation{Target: "8.8.8.8:53/tcp", Verdict: wire.VerdictAllow, By: "dns", Reason: "port 53 is the resolver's"}
	limited := &wire.Denial{Reason: "over a limit"}
	var mu sync.Mutex
	var explained wire.Explanation
	var tested wire.NetworkTest
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if target := r.URL.Query().Get("target"); !strings.HasSuffix(r.URL.Path, "/denials") && target != "pypi.org:443" {
			t.Errorf("asked for %q", target)
		}
		var v any = wire.Denials{Items: []wire.Denial{refused}, Total: 3}
		switch r.Method + " " + r.URL.Path {
		case "GET /v1/sandboxes/lab/network/explain":
			v = explained
		case "POST /v1/sandboxes/lab/network/test":
			v = tested
		}
		json.NewEncoder(w).Encode(v) //nolint:errcheck // the test sees what is missing
	}))
	t.Cleanup(s.Close)
	d := &daemon{url: s.URL}
	for _, c := range []struct {
		e    wire.Explanation
		want string
	}{
		{no, "denied: pypi.org:443/tcp: no rule allows it\nto allow it:\n  sandboxctl egress patch --allow pypi.org:443 lab\n"},
		{yes, "allowed: pypi.org:443/tcp: by the rule allow pypi.org:443\n"},
		{
			wire.Explanation{Target: "1.1.1.1:22/tcp", Verdict: wire.VerdictDeny, Reason: "no", Allow: "1.1.1.1:22", Note: "it is Failed"},
			"denied: 1.1.1.1:22/tcp: no\nnote: it is Failed\nto allow it:\n  sandboxctl egress patch --allow 1.1.1.1:22 lab\n",
		},
		{never, "denied: 10.0.0.1:22/tcp: host address\nthe address is one of a, b\nno rule of the sandbox for this target can allow it\n"},
	} {
		mu.Lock()
		explained = c.e
		mu.Unlock()
		if r := d.run(t, "egress", "explain", "lab", "pypi.org:443"); r.code != 0 || r.out != c.want {
			t.Errorf("explain: %+v, want\n%s", r, c.want)
		}
	}
	for _, c := range []struct {
		t    wire.NetworkTest
		code int
		want string
	}{
		{
			wire.NetworkTest{Target: "pypi.org:443/tcp", Reached: true, Step: "tls", Address: "203.0.113.7", Took: 1.25, Explanation: yes},
			0,
			"reached: pypi.org:443/tcp (203.0.113.7) in 1.2 ms\nallowed: by the rule allow pypi.org:443\n",
		},
		{
			wire.NetworkTest{Target: "pypi.org:443/tcp", Step: "resolve", Error: "no such host\x1b", Denied: &refused, Explanation: no},
			1,
			"not reached: pypi.org:443/tcp in 0.0 ms\nresolve: no such host\\x1b\ndenied: pypi.org:443/tcp: no rule allows it\n" +
				"to allow it:\n  sandboxctl egress patch --allow pypi.org:443 lab\n",
		},
		{
			wire.NetworkTest{Target: "pypi.org:443/tcp", Step: "connect", Error: "timeout", Explanation: yes},
			1,
			"not reached: pypi.org:443/tcp in 0.0 ms\nconnect: timeout\n" +
				"the policy allows it (by the rule allow pypi.org:443): the cause is elsewhere\n",
		},
		{
			wire.NetworkTest{Target: "pypi.org:443/tcp", Step: "connect", Error: "refused", Denied: limited, Explanation: yes},
			1,
			"not reached: pypi.org:443/tcp in 0.0 ms\nconnect: refused\ndenied: over a limit\n",
		},
		{
			wire.NetworkTest{Target: "8.8.8.8:53/tcp", Reached: true, Step: "connect", Address: "8.8.8.8", Explanation: resolver},
			0,
			"answered by sandboxd's resolver: 8.8.8.8:53/tcp (8.8.8.8) in 0.0 ms\nnote: port 53 is the resolver's\n",
		},
		{
			wire.NetworkTest{Target: "evil.example:53/tcp", Step: "resolve", Error: "refused", Denied: limited, Explanation: resolver},
			1,
			"not reached: evil.example:53/tcp in 0.0 ms\nresolve: refused\ndenied: over a limit\n",
		},
	} {
		mu.Lock()
		tested = c.t
		mu.Unlock()
		if r := d.run(t, "egress", "test", "lab", "pypi.org:443"); r.code != c.code || r.out != c.want {
			t.Errorf("test: %+v, want\n%s", r, c.want)
		}
	}
	if r := d.run(t, "egress", "denials", "lab"); !strings.Contains(r.out, `evil\x1b.example:443 (203.0.113.7)`) || !strings.Contains(r.out, "--allow evil.example:443") {
		t.Errorf("denials: %+v", r)
	}
}
