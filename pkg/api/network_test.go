package api

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// fakeNetwork refuses what the test says, and knows pypi.org:443 alone.
type fakeNetwork struct{ *fake }

// deny notes a denial.
func (f *fake) deny(n wire.Denial) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n.Time, n.First, n.Times = time.Now().UTC(), time.Now().UTC(), 1
	n.Rule, n.By, n.Reason = "default", "policy", "no rule allows it"
	f.denied = append(f.denied, n)
}

func (f fakeNetwork) Denials(string) wire.Denials {
	f.mu.Lock()
	defer f.mu.Unlock()
	return wire.Denials{Items: append([]wire.Denial{}, f.denied...), Total: int64(len(f.denied)), Since: time.Now().UTC()}
}

func (f fakeNetwork) Denied(id string) int64 { return f.Denials(id).Total }

func (f fakeNetwork) Explain(_ context.Context, _ *record.Record, t spec.Target) (wire.Explanation, error) {
	e := wire.Explanation{
		Target: t.String(), Verdict: wire.VerdictDeny, Rule: "default", By: "policy", Reason: "no rule allows it", Allow: t.Rule(),
	}
	if t.Name == "pypi.org" && t.Port == 443 {
		e.Verdict, e.Rule, e.Allow = wire.VerdictAllow, "allow pypi.org:443", ""
	}
	return e, nil
}

// TestDenialsAreTold: the error of a command that failed says what was refused meanwhile,
// once, in the last event, whatever runs it; a command that ended well says nothing.
func TestDenialsAreTold(t *testing.T) {
	const (
		output  = `{"type":"stdout","text":"{\"type\":\"error\"","timestamp":1}` + "\n\n"
		failed  = `{"type":"error","timestamp":2,"error":{"ename":"CommandExecError","evalue":"1","traceback":["exit status 1"]}}` + "\n\n"
		raised  = `{"type":"error","timestamp":2,"error":{"ename":"OSError","evalue":"111","traceback":["a","b"]}}` + "\n\n"
		well    = `{"type":"execution_complete","execution_time":3,"timestamp":2}` + "\n\n"
		refused = "network: denied while this ran: pypi.org:443 (no rule allows it), the last of 2; " +
			"a rule that allows pypi.org:443 opens it"
	)
	for name, c := range map[string]struct {
		path, end, want string
		denials         int
	}{
		"command":         {"/command", failed, strings.Replace(failed, `1"]`, `1","`+refused+`"]`, 1), 2},
		"session":         {"/session/s1/run", failed, strings.Replace(failed, `1"]`, `1","`+refused+`"]`, 1), 2},
		"code":            {"/code", raised, strings.Replace(raised, `b"]`, `b","`+refused+`"]`, 1), 2},
		"killed":          {"/command", killed, strings.Replace(killed, `killed"]`, `killed","`+refused+`"]`, 1), 2},
		"nothing refused": {"/command", failed, failed, 0},
		"ended well":      {"/command", well, well, 2},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.deny(wire.Denial{Protocol: "tcp"}) // of an earlier command
			w.agent = http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
				rw.Header().Set("Content-Type", "text/event-stream")
				rw.Header().Set(agent.DenialsHeader, "99")
				io.WriteString(rw, output) //nolint:errcheck // a recorder
				for range c.denials {
					w.deny(wire.Denial{Protocol: "tcp", Name: "pypi.org", Port: 443, Allow: "pypi.org:443"})
				}
				io.WriteString(rw, c.end) //nolint:errcheck // a recorder
			})
			a := w.do("POST", "/v1/sandboxes/"+w.create().ID+"/proxy/44772"+c.path, `{"command":"x","code":"x"}`)
			if got := string(a.body); got != output+c.want {
				t.Errorf("got  %.400s\nwant %.400s", got, output+c.want)
			}
			if got := a.Header.Values(agent.DenialsHeader); len(got) != 1 || got[0] != "1" {
				t.Errorf("the client is told %q denials before", got)
			}
		})
	}
}

// TestNetworkRoutes: denials in every state, and targets in every spelling.
func TestNetworkRoutes(t *testing.T) {
	w := newWorld(t)
	id := w.create().ID
	at := "/v1/sandboxes/" + id + "/network/"
	var none wire.Denials
	a := w.do("GET", at+"denials", "")
	if a.StatusCode != 200 || json.Unmarshal(a.body, &none) != nil || none.Items == nil || len(none.Items) != 0 {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	w.deny(wire.Denial{Protocol: "tcp", Name: "pypi.org", Address: "203.0.113.7", Port: 443, Allow: "pypi.org:443"})
	w.set(id, func(r *record.Record) { r.State = record.Ended })
	if a := w.do("GET", at+"denials", ""); !strings.Contains(string(a.body), `"allow":"pypi.org:443"`) || !strings.Contains(string(a.body), `"total":1`) {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	for target, want := range map[string]string{
		"pypi.org:443":           `{"target":"pypi.org:443/tcp","verdict":"allow","rule":"allow pypi.org:443"`,
		"PyPI.org.:443/tcp":      `{"target":"pypi.org:443/tcp","verdict":"allow"`,
		"pypi.org:80":            `"allow":"pypi.org:80"`,
		"203.0.113.7:123/udp":    `"allow":"203.0.113.7:123/udp"`,
		"203.0.113.7/icmp":       `"target":"203.0.113.7/icmp"`,
		"":                       "want HOST:PORT",
		"pypi.org":               "the port is missing",
		"pypi.org:0":             "not a number",
		"pypi.org:65536":         "not a number",
		"pypi.org:443/sctp":      "not tcp, udp or icmp",
		"pypi.org:443/icmp":      "no ports",
		":443":                   "neither a name nor",
		"*.pypi.org:443":         "neither a name nor",
		"010.0.0.1:80":           "neither a name nor",
		"[2001:db8::1]:443":      "IPv6 is blocked",
		"a b:443":                "neither a name nor",
		strings.Repeat("x", 999): "",
	} {
		a := w.do("GET", at+"explain?target="+strings.ReplaceAll(strings.ReplaceAll(target, " ", "%20"), "[", "%5B"), "")
		status := 200
		if !strings.Contains(want, `"`) {
			status = 400
		}
		if a.StatusCode != status || !strings.Contains(string(a.body), want) || len(a.body) > 1000 {
			t.Errorf("%s: %d %s, want %s", target, a.StatusCode, a.body, want)
		}
	}
	if a := w.do("POST", at+"test?target=pypi.org:443", ""); a.StatusCode != 409 {
		t.Errorf("test of one that has ended: %d %s", a.StatusCode, a.body)
	}
}

// TestNetworkTest: the guest says how far it came, and the daemon what it refused.
func TestNetworkTest(t *testing.T) {
	w := newWorld(t)
	at := "/v1/sandboxes/" + w.create().ID + "/network/test?target="
	reached := agent.Reached{OK: true, Step: agent.StepTLS, Address: "203.0.113.7"}
	var denied []wire.Denial
	w.agent = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method != "POST" || r.URL.Path != "/reach" || r.URL.Query().Get("host") == "" || r.URL.Query().Get("port") == "" {
			t.Errorf("the agent was asked %s %s", r.Method, r.URL)
		}
		for _, n := range denied {
			w.deny(n)
		}
		json.NewEncoder(rw).Encode(reached) //nolint:errcheck // a recorder
	})
	w.deny(wire.Denial{Protocol: "tcp", Name: "pypi.org", Address: "203.0.113.7", Port: 443}) // earlier
	for name, c := range map[string]struct {
		target  string
		denied  []wire.Denial
		reached bool
		told    string
	}{
		"reached": {"pypi.org:443", nil, true, ""},
		"by the proxy": {
			"pypi.org:443",
			[]wire.Denial{{Protocol: "tcp", Name: "pypi.org", Address: "203.0.113.7", Port: 443}},
			false,
			"pypi.org:443 (203.0.113.7)",
		},
		"by address": {"pypi.org:443", []wire.Denial{{Protocol: "tcp", Address: "203.0.113.7", Port: 443}}, false, "203.0.113.7:443"},
		"the name":   {"pypi.org:443", []wire.Denial{{Protocol: "dns", Name: "pypi.org"}}, false, "pypi.org"},
		"something else": {
			"pypi.org:443",
			[]wire.Denial{{Protocol: "dns", Name: "npmjs.org"}, {Protocol: "tcp", Address: "203.0.113.8", Port: 443}},
			true, "",
		},
		"an address": {
			"203.0.113.9:443", []wire.Denial{{Protocol: "tcp", Address: "203.0.113.9", Port: 443}}, false, "203.0.113.9:443",
		},
		"not this address": {"203.0.113.9:443", []wire.Denial{{Protocol: "tcp", Address: "203.0.113.7", Port: 443}}, true, ""},
	} {
		denied = c.denied
		a := w.do("POST", at+c.target, "")
		var got wire.NetworkTest
		if err := json.Unmarshal(a.body, &got); a.StatusCode != 200 || err != nil || got.Reached != c.reached ||
			(got.Denied == nil) != (c.told == "") || got.Denied != nil && got.Denied.Target() != c.told ||
			got.Explanation.Target != c.target+"/tcp" {
			t.Errorf("%s: %d %s", name, a.StatusCode, a.body)
		}
	}
	if a := w.do("POST", at+"pypi.org:53/udp", ""); a.StatusCode != 400 || !strings.Contains(a.error(t).Message, "explain") {
		t.Errorf("udp: %d %s", a.StatusCode, a.body)
	}
	for name, hostile := range map[string]func(http.ResponseWriter){
		"an older agent": func(rw http.ResponseWriter) { rw.WriteHeader(404) },
		"no JSON":        func(rw http.ResponseWriter) { fmt.Fprint(rw, "<") },
		"endless":        func(rw http.ResponseWriter) { fmt.Fprint(rw, `{"error":"`+strings.Repeat("x", 1<<20)) },
		"an error":       func(rw http.ResponseWriter) { rw.WriteHeader(500) },
	} {
		w.agent = http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { hostile(rw) })
		a := w.do("POST", at+"pypi.org:443", "")
		want := 502
		if name == "an older agent" {
			want = 400
		}
		if a.StatusCode != want || len(a.body) > 1000 {
			t.Errorf("%s: %d %.300s", name, a.StatusCode, a.body)
		}
	}
	w.agent = http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(rw, `{"step":%q,"error":%q}`, strings.Repeat("s", 1000), strings.Repeat("e", 1000))
	})
	if a := w.do("POST", at+"pypi.org:443", ""); a.StatusCode != 200 || len(a.body) > 1500 {
		t.Errorf("long texts: %d, %d bytes", a.StatusCode, len(a.body))
	}
}

// TestParseTarget: a target and the rule that is about it alone.
func TestParseTarget(t *testing.T) {
	o := &spec.Offer{}
	o.Complete()
	for _, c := range []struct {
		text, shown, rule string
		want              spec.Target
	}{
		{"pypi.org:443", "pypi.org:443/tcp", "pypi.org:443", spec.Target{Name: "pypi.org", Port: 443, Proto: "tcp"}},
		{
			"203.0.113.7:123/udp", "203.0.113.7:123/udp", "203.0.113.7:123/udp",
			spec.Target{Addr: netip.MustParseAddr("203.0.113.7"), Port: 123, Proto: "udp"},
		},
		{"203.0.113.7/icmp", "203.0.113.7/icmp", "203.0.113.7/icmp", spec.Target{Addr: netip.MustParseAddr("203.0.113.7"), Proto: "icmp"}},
	} {
		got, err := o.ParseTarget(c.text)
		if err != nil || got != c.want || got.String() != c.shown || got.Rule() != c.rule {
			t.Errorf("%s: %+v %v", c.text, got, err)
		}
	}
}
