package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// maxRules is how many rules a policy may have.
const maxRules = 4096

// rulesOf is what the record of a sandbox allows and denies.
func (w *world) rulesOf(id string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.recs[id].Spec.Network
	return fmt.Sprint(n.Mode, " ", n.Rules)
}

// TestPolicyOfHost: no change may allow an address of the host. Its range may be
// allowed, it may be denied, and a rule from before it was the host's hinders no other
// change.
func TestPolicyOfHost(t *testing.T) {
	w := newWorld(t)
	for _, place := range []string{"/proxy/18080/policy", "/networkpolicy"} {
		w.moved.Store(true) // 192.0.2.99 is another machine's
		at := "/v1/sandboxes/" + w.do("POST", "/v1/sandboxes",
			`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"extensions":{"sandboxd.allow":"192.0.2.99:22"}}`).sandbox(t).ID +
			place
		w.moved.Store(false)
		for _, c := range []struct {
			method, body string
			status       int
		}{
			{"PATCH", `[{"action":"allow","target":"192.0.2.99"}]`, 400},
			{"PATCH", `[{"action":"allow","target":"192.0.2.99/32","ports":[443]}]`, 400},
			{"PATCH", `[{"action":"allow","target":"192.0.2.0/24"},{"action":"deny","target":"192.0.2.99","ports":[443]}]`, 200},
			{"DELETE", `["192.0.2.0/24"]`, 200},
			{"PUT", `{"egress":[{"action":"allow","target":"1.1.1.1"},{"action":"allow","target":"192.0.2.99"}]}`, 400},
			{"PUT", `{"egress":[{"action":"allow","target":"1.1.1.1"}]}`, 200},
		} {
			a := w.do(c.method, at, c.body, "X-Lenient", "1")
			if a.StatusCode != c.status || c.status == 400 && !strings.Contains(string(a.body), "run the service on another machine") {
				t.Errorf("%s %s %s: %d %s, want %d", c.method, place, c.body, a.StatusCode, a.body, c.status)
			}
		}
	}
}

// TestPolicyChanges walks one policy through every kind of change, at both
// places where it can be changed.
func TestPolicyChanges(t *testing.T) {
	w := newWorld(t)
	for _, place := range []string{"/proxy/18080/policy", "/networkpolicy"} {
		t.Run(place[1:6], func(t *testing.T) {
			id := w.do("POST", "/v1/sandboxes",
				`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},`+
					`"extensions":{"sandboxd.allow":"203.0.113.7:443/tcp"}}`).sandbox(t).ID
			at := "/v1/sandboxes/" + id + place
			for i, c := range []struct{ method, body, rules, answer string }{
				{
					"PATCH", `[{"action":"deny","target":"1.2.3.4"},{"action":"allow","target":"1.2.3.4"}]`,
					"rules [deny 1.2.3.4/32 allow 203.0.113.7/32:443/tcp]", `"mode":"enforcing"`,
				},
				// A rule for some ports is no rule for all of them, and the first one wins.
				{
					"PATCH", `[{"action":"allow","target":"1.2.3.4","ports":[80]}]`,
					"rules [allow 1.2.3.4/32:80 deny 1.2.3.4/32 allow 203.0.113.7/32:443/tcp]", `"status":"ok"`,
				},
				{
					"PATCH", `[{"action":"deny","target":"1.2.3.4/32","ports":[80]}]`,
					"rules [deny 1.2.3.4/32:80 deny 1.2.3.4/32 allow 203.0.113.7/32:443/tcp]", "",
				},
				{"PATCH", `[{"action":"allow","target":"1.2.3.4"}]`, "rules [allow 1.2.3.4/32 allow 203.0.113.7/32:443/tcp]", ""},
				{"DELETE", `["203.0.113.7"]`, "rules [allow 1.2.3.4/32]", `"mode":"enforcing"`},
				{"DELETE", `["203.0.113.7","pypi.org"]`, "rules [allow 1.2.3.4/32]", `"reason":"no matching targets found"`},
				{
					"PUT", `{"defaultAction":"allow","egress":[{"action":"deny","target":"198.51.100.0/24"}]}`,
					"open [deny 198.51.100.0/24]",
					`"mode":"enforcing"`,
				},
				{"DELETE", `["198.51.100.0/24"]`, "open []", `"mode":"allow_all"`},
				{"PUT", `{}`, "rules []", `"mode":"deny_all"`},
				{"PUT", `{"defaultAction":"allow"}`, "open []", `"mode":"allow_all"`},
				{"PUT", `null`, "rules []", `"mode":"deny_all"`},
				{"PUT", ` `, "rules []", `"mode":"deny_all"`},
			} {
				a := w.do(c.method, at, c.body, "X-Lenient", "1")
				if got := w.rulesOf(id); a.StatusCode != 200 || got != c.rules || !strings.Contains(string(a.body), c.answer) ||
					strings.Contains(string(a.body), `"policy"`) {
					t.Fatalf("%d: %s %s: %d %s; it is %s, want %s", i, c.method, c.body, a.StatusCode, a.body, got, c.rules)
				}
				var now wire.PolicyStatus
				if b := w.do("GET", at, ""); json.Unmarshal(b.body, &now) != nil || now.Policy == nil || now.Policy.Egress == nil ||
					len(now.Policy.Egress) != strings.Count(c.rules, "/32")+strings.Count(c.rules, "/24") {
					t.Errorf("%d: after %s %s: %s", i, c.method, c.body, b.body)
				}
			}
			if w.do("PATCH", at,
				`[{"action":"allow","target":"203.0.113.0/24","ports":[443,"8000-8100"],"protocol":"tcp"}]`).StatusCode != 200 {
				t.Error("ports were refused")
			}
			if b := w.do("GET", at, ""); !strings.Contains(string(b.body),
				`{"action":"allow","target":"203.0.113.0/24","ports":[443,"8000-8100"],"protocol":"tcp"}`) {
				t.Errorf("shown as %s", b.body)
			}
		})
	}
	if a := w.do("POST", "/v1/sandboxes/"+w.create().ID+"/proxy/18080/policy", `{"defaultAction":"allow"}`); a.StatusCode != 200 {
		t.Errorf("POST at port 18080: %d %s", a.StatusCode, a.body)
	}
	if a := w.do("POST", "/v1/sandboxes/"+w.create().ID+"/networkpolicy", `{}`); a.StatusCode != 405 {
		t.Errorf("POST of the lifecycle route, which upstream has not: %d", a.StatusCode)
	}
}

// TestBadPolicyChanges: nothing changes, and the errors are of the form that
// each place has.
func TestBadPolicyChanges(t *testing.T) {
	w := newWorld(t)
	id := w.create().ID
	before := w.rulesOf(id)
	many := `[` + strings.TrimSuffix(strings.Repeat(`{"action":"allow","target":"1.2.3.4"},`, maxRules+1), ",") + `]`
	targets := `[` + strings.TrimSuffix(strings.Repeat(`"1.2.3.4",`, maxRules+1), ",") + `]`
	for _, place := range []string{"/proxy/18080/policy", "/networkpolicy"} {
		at := "/v1/sandboxes/" + id + place
		for _, c := range []struct {
			method, body string
			status       int
		}{
			{"PATCH", "", 400},
			{"PATCH", "[]", 400},
			{"PATCH", "null", 400},
			{"PATCH", "{}", 400},
			{"PATCH", `["1.2.3.4"]`, 400},
			{"PATCH", `[{"action":"maybe","target":"1.2.3.4"}]`, 400},
			{"PATCH", `[{"action":"allow"}]`, 400},
			{"PATCH", `[{"action":"allow","target":""}]`, 400},
			{"PATCH", `[{"action":"allow","target":"1.2.3.4","colour":"blue"}]`, 400},
			{"PATCH", `[{"action":"allow","target":"1.2.3.4","ports":[]}]`, 400},
			{"PATCH", `[{"action":"allow","target":"1.2.3.4","ports":[0]}]`, 400},
			{"PATCH", `[{"action":"allow","target":"2001:db8::/32"}]`, 400},
			{"PATCH", `[{"action":"allow","target":"1.2.3.4"}]]`, 400},
			{"PATCH", `[{"action":"allow","target":"1.2.3.4"}], "defaultAction":"allow"`, 400},
			{"DELETE", "", 400},
			{"DELETE", "[]", 400},
			{"DELETE", "{}", 400},
			{"DELETE", "[1]", 400},
			{"DELETE", targets, 413},
			{"PUT", "[]", 400},
			{"PUT", `{"defaultAction":"sometimes"}`, 400},
			{"PUT", `{"egress":[{"action":"allow","target":"1.2.3.4/8"}]}`, 400},
			{"PUT", `{"egress":` + many + `}`, 413},
			{"PUT", strings.Repeat("[", 200), 400},
		} {
			a := w.do(c.method, at, c.body)
			if a.StatusCode != c.status {
				t.Errorf("%s %s %.60s: %d %s", c.method, place, c.body, a.StatusCode, a.body)
			}
			if place == "/networkpolicy" {
				a.error(t)
			} else if !strings.HasPrefix(a.Header.Get("Content-Type"), "text/plain") || len(a.body) < 10 {
				t.Errorf("%s %.60s: %s %s", c.method, c.body, a.Header.Get("Content-Type"), a.body)
			}
		}
		if got := w.rulesOf(id); got != before {
			t.Errorf("after all that was refused it is %s", got)
		}
		w.set(id, func(r *record.Record) { r.State = record.Ended })
		if a := w.do("PATCH", at, `[{"action":"allow","target":"1.2.3.4"}]`); a.StatusCode != 409 {
			t.Errorf("of one that has ended: %d %s", a.StatusCode, a.body)
		}
		w.set(id, func(r *record.Record) { r.State = record.Running })
		w.fail = errs.New(errs.Unavailable, "not now")
		if a := w.do("PATCH", at, `[{"action":"allow","target":"1.2.3.4"}]`); a.StatusCode != 503 || a.Header.Get("Retry-After") == "" {
			t.Errorf("when it cannot be kept: %d %s", a.StatusCode, a.body)
		}
		w.fail = nil
	}
	if a := w.do("GET", "/v1/sandboxes/nope/networkpolicy", ""); a.StatusCode != 404 {
		t.Errorf("unknown: %d", a.StatusCode)
	}
	if a := w.do("PATCH", "/v1/sandboxes/"+id+"/networkpolicy", `[{"action":"allow","target":"1.2.3.4"}]`, wire.HeaderAPIKey,
		""); a.StatusCode != 401 {
		t.Errorf("without a key: %d", a.StatusCode)
	}
}

// TestTooManyRulesInAll: patches that each fit must not add up beyond the limit.
func TestTooManyRulesInAll(t *testing.T) {
	w := newWorld(t)
	at := "/v1/sandboxes/" + w.create().ID + "/networkpolicy"
	body := func(from, n int) string {
		var rules []wire.NetworkRule
		for i := from; i < from+n; i++ {
			rules = append(rules, wire.NetworkRule{Action: "allow", Target: fmt.Sprintf("203.%d.%d.1", i>>8, i&255)})
		}
		b, err := json.Marshal(rules)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if a := w.do("PATCH", at, body(0, maxRules)); a.StatusCode != 200 {
		t.Fatalf("as many as there may be: %d %s", a.StatusCode, a.body)
	}
	if a := w.do("PATCH", at, body(maxRules, 1)); a.StatusCode != 413 || !strings.Contains(a.error(t).Message, "4097") {
		t.Errorf("one more: %d %s", a.StatusCode, a.body)
	}
	if a := w.do("PATCH", at, body(0, 10)); a.StatusCode != 200 {
		t.Errorf("those there are: %d %s", a.StatusCode, a.body)
	}
}

// TestPolicyNames: two spellings of a name are one target, the first rule for it counts, and
// ranges of a name are no rule for the names below it. It is shown as it was sent, in lower
// case.
func TestPolicyNames(t *testing.T) {
	w := newWorld(t)
	for _, place := range []string{"/proxy/18080/policy", "/networkpolicy"} {
		id := w.do("POST", "/v1/sandboxes",
			`{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"extensions":{"sandboxd.allow":"pypi.org:443,*.npmjs.org"}}`).sandbox(t).ID
		at := "/v1/sandboxes/" + id + place
		for i, c := range []struct{ method, body, rules string }{
			{"GET", "", "rules [allow pypi.org:443 allow *.npmjs.org]"},
			{
				"PATCH", `[{"action":"deny","target":"PyPI.org.","ports":[443]},{"action":"allow","target":"pypi.org","ports":[443]}]`,
				"rules [deny pypi.org:443 allow *.npmjs.org]",
			},
			{"PATCH", `[{"action":"allow","target":"*.NPMJS.org","ports":[443]}]`, "rules [allow *.npmjs.org:443 deny pypi.org:443 allow *.npmjs.org]"},
			{"PATCH", `[{"action":"allow","target":"*.npmjs.org."}]`, "rules [allow *.npmjs.org deny pypi.org:443]"},
			{"PATCH", `[{"action":"allow","target":"npmjs.org"}]`, "rules [allow npmjs.org allow *.npmjs.org deny pypi.org:443]"},
			{"PATCH", `[{"action":"allow","target":"b\u00fccher.example"}]`, "rules [allow xn--bcher-kva.example allow npmjs.org allow *.npmjs.org deny pypi.org:443]"},
			{"DELETE", `["B\u00dcCHER.example.","NPMJS.ORG"]`, "rules [allow *.npmjs.org deny pypi.org:443]"},
			{"DELETE", `["*.npmjs.ORG.","pypi.ORG"]`, "rules []"},
		} {
			a := w.do(c.method, at, c.body)
			if got := w.rulesOf(id); a.StatusCode != 200 || got != c.rules {
				t.Errorf("%d: %s %s: %d %s; it is %s, want %s", i, c.method, c.body, a.StatusCode, a.body, got, c.rules)
			}
		}
		if a := w.do("PUT", at, `{"egress":[{"action":"allow","target":"*.*.org"}]}`); a.StatusCode != 400 {
			t.Errorf("two wildcards: %d %s", a.StatusCode, a.body)
		}
	}
}

// TestRulesExtension: allow and deny in the order written, in every mode but none.
func TestRulesExtension(t *testing.T) {
	w := newWorld(t)
	for extensions, want := range map[string]string{
		`"sandboxd.rules":"deny=a.example, allow=*.example:443,deny=10.0.0.0/8/icmp"`:               "rules [deny a.example allow *.example:443 deny 10.0.0.0/8/icmp]",
		`"sandboxd.rules":"deny=1.2.3.4","sandboxd.network":"open"`:                                 "open [deny 1.2.3.4/32]",
		`"sandboxd.rules":"deny=1.2.3.4","sandboxd.allow":"1.2.3.0/24"`:                             "rules [deny 1.2.3.4/32 allow 1.2.3.0/24]",
		`"sandboxd.rules":"deny=192.0.2.99"`:                                                        "rules [deny 192.0.2.99/32]",
		`"sandboxd.rules":"allow=192.0.2.99"`:                                                       "never reaches its host",
		`"sandboxd.rules":"pypi.org"`:                                                               "want allow=TARGET or deny=TARGET",
		`"sandboxd.rules":"block=pypi.org"`:                                                         "want allow=TARGET or deny=TARGET",
		`"sandboxd.rules":"allow="`:                                                                 "sandboxd.rules",
		`"sandboxd.rules":"deny=1.2.3.4","sandboxd.network":"none"`:                                 "allows nothing",
		`"sandboxd.rules":"` + strings.TrimSuffix(strings.Repeat("deny=1.2.3.4,", 1025), ",") + `"`: "more than 1024 rules",
	} {
		a := w.do("POST", "/v1/sandboxes", `{"image":{"uri":"python"},"entrypoint":["x"],"resourceLimits":{},"extensions":{`+extensions+`}}`)
		got := string(a.body)
		if a.StatusCode == 202 {
			got = w.rulesOf(a.sandbox(t).ID)
		}
		if !strings.Contains(got, want) || a.StatusCode != 202 && a.StatusCode != 400 {
			t.Errorf("%.100s: %d %s, want %s", extensions, a.StatusCode, got, want)
		}
	}
}

// TestPolicyRace: of changes at once none is lost.
func TestPolicyRace(t *testing.T) {
	w := newWorld(t)
	id := w.create().ID
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			body := fmt.Sprintf(`[{"action":"allow","target":"203.0.113.%d"}]`, i)
			if a := w.do("PATCH", "/v1/sandboxes/"+id+"/networkpolicy", body); a.StatusCode != 200 {
				t.Errorf("%s: %d %s", body, a.StatusCode, a.body)
			}
		})
	}
	wg.Wait()
	if got := strings.Count(w.rulesOf(id), "/32"); got != 16 {
		t.Errorf("%d rules of 16: %s", got, w.rulesOf(id))
	}
}

// TestPolicyKeyless: where no key is asked for, a page changes nothing.
func TestPolicyKeyless(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.APIKeys, c.Insecure = nil, true })
	id := w.create().ID
	at := "/v1/sandboxes/" + id + "/proxy/18080/policy"
	token := w.s.gateway.Token(id, wire.EgressPort)
	if a := w.do("PUT", at, `{"defaultAction":"allow"}`, "Origin", "http://page", wire.HeaderEgressToken,
		token); a.StatusCode != http.StatusForbidden || w.rulesOf(id) != "rules []" {
		t.Errorf("%d %s; it is %s", a.StatusCode, a.body, w.rulesOf(id))
	}
	if a := w.do("PUT", at, `{"defaultAction":"allow"}`); a.StatusCode != 200 {
		t.Errorf("no page: %d %s", a.StatusCode, a.body)
	}
}
