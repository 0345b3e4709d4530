package command

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// TestRuleOf: what the flags take is split, and all of it is sent.
func TestRuleOf(t *testing.T) {
	for text, want := range map[string]string{
		"1.2.3.4":                `{"action":"allow","target":"1.2.3.4"}`,
		"203.0.113.0/24":         `{"action":"allow","target":"203.0.113.0/24"}`,
		"203.0.113.0/24:443":     `{"action":"allow","target":"203.0.113.0/24","ports":[443]}`,
		"203.0.113.0/24:443/tcp": `{"action":"allow","target":"203.0.113.0/24","ports":[443],"protocol":"tcp"}`,
		"1.2.3.4:8000-8100/udp":  `{"action":"allow","target":"1.2.3.4","ports":["8000-8100"],"protocol":"udp"}`,
		"1.2.3.4/icmp":           `{"action":"allow","target":"1.2.3.4","protocol":"icmp"}`,
		"1.2.3.4:":               `{"action":"allow","target":"1.2.3.4","ports":[""]}`,
		"1.2.3.4:http":           `{"action":"allow","target":"1.2.3.4","ports":["http"]}`,
		"1.2.3.4/":               `{"action":"allow","target":"1.2.3.4/"}`,
		"2001:db8::1":            `{"action":"allow","target":"2001:db8::1"}`,
		"pypi.org":               `{"action":"allow","target":"pypi.org"}`,
		"pypi.org:443":           `{"action":"allow","target":"pypi.org","ports":[443]}`,
		"*.npmjs.org":            `{"action":"allow","target":"*.npmjs.org"}`,
		"*.npmjs.org:443/tcp":    `{"action":"allow","target":"*.npmjs.org","ports":[443],"protocol":"tcp"}`,
	} {
		r := ruleOf("allow", text)
		b, err := json.Marshal(r)
		if got := string(b); err != nil || got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
		if got := ruleText(r); got != text {
			t.Errorf("%s is written as %s", text, got)
		}
	}
}

// TestRequestRule: so is a rule about requests, which is a text for the extension as well.
func TestRequestRule(t *testing.T) {
	for text, want := range map[string][2]string{
		"GET api.example.com": {
			`{"action":"deny","target":"api.example.com","http":{"methods":["GET"]}}`, "GET api.example.com",
		},
		"GET  api.example.com:443/v1/*": {
			`{"action":"deny","target":"api.example.com","ports":[443],"http":{"methods":["GET"],"paths":["/v1/*"]}}`,
			"GET api.example.com:443/v1/*",
		},
		"* *.example.com:80-443/a,b/c": {
			`{"action":"deny","target":"*.example.com","ports":["80-443"],"http":{"paths":["/a,b/c"]}}`,
			"* *.example.com:80-443/a%2Cb/c",
		},
	} {
		var rules Rules
		if err := (&ruleFlag{"deny", &rules}).Set(text); err != nil || len(rules) != 1 {
			t.Fatalf("%q: %v, %v", text, rules, err)
		}
		b, err := json.Marshal(rules[0])
		if got := string(b); err != nil || got != want[0] {
			t.Errorf("%s: %s, want %s", text, got, want[0])
		}
		if key, got := rules.Extension(); key != wire.ExtRules || got != "deny="+want[1] {
			t.Errorf("%s is written as %s %s, want %s", text, key, got, want[1])
		}
	}
	for _, text := range []string{"a.example, b.example", "get a.example/x", "pypi.org:443/tcp"} {
		if r, ok := requestRule("allow", text); ok {
			t.Errorf("%q is taken for a rule about requests, %+v", text, r)
		}
	}
}

// TestRules: --allow and --deny keep their order, and the extension for older daemons is
// used as long as it can be.
func TestRules(t *testing.T) {
	for line, want := range map[string]string{
		"--allow pypi.org:443 --allow 1.2.3.4,5.6.7.8": wire.ExtAllow + " pypi.org:443,1.2.3.4,5.6.7.8",
		"--deny a.example --allow *.example --deny 10.0.0.0/8/icmp": wire.ExtRules +
			" deny=a.example,allow=*.example,deny=10.0.0.0/8/icmp",
		"--allow b.example:80-90/tcp --rule deny=c.example --allow d.x": wire.ExtRules +
			" allow=b.example:80-90/tcp,deny=c.example,allow=d.x",
	} {
		var r Rules
		f := pflag.NewFlagSet("x", pflag.ContinueOnError)
		r.Flags(f)
		r.RuleFlag(f)
		err := f.Parse(strings.Fields(line))
		key, value := r.Extension()
		if got := key + " " + value; err != nil || got != want {
			t.Errorf("%s: %s, want %s, %v", line, got, want, err)
		}
	}
}

// TestReadPolicy: the rules of flags stand before those of the file, and what sandboxctl does
// not know is sent.
func TestReadPolicy(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policy.json")
	rules := Rules{ruleOf("deny", "a.example"), ruleOf("allow", "b.example:443")}
	for text, want := range map[string]string{
		`{"defaultAction":"deny","egress":[{"action":"allow","target":"c","note":1}],"more":{}}`: `{"defaultAction":"deny","egress":[` +
			`{"action":"deny","target":"a.example"},{"action":"allow","target":"b.example","ports":[443]},` +
			`{"action":"allow","target":"c","note":1}],"more":{}}`,
		`{}`:            `{"egress":[{"action":"deny","target":"a.example"},{"action":"allow","target":"b.example","ports":[443]}]}`,
		`{"egress":{}}`: "",
		`[]`:            "",
		`null`:          "",
		`{"egress":[1}`: "",
		"{" + strings.Repeat(" ", maxPolicyFile) + "}": "",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := ReadPolicy(file, rules)
		if string(got) != want || (err == nil) != (want != "") {
			t.Errorf("%.80s: %s, %v", text, got, err)
		}
		if alone, err := ReadPolicy(file, nil); err == nil && string(alone) != text {
			t.Errorf("%s alone: %s", text, alone)
		}
	}
	if _, err := ReadPolicy(file+"x", nil); err == nil || !strings.Contains(err.Error(), file+"x") {
		t.Errorf("no such file: %v", err)
	}
	for value, want := range map[string]bool{"-": true, "policy.json": true, "./p": true, "/etc/p": true, "web": false, "web@3": false} {
		if IsPolicyFile(value) != want {
			t.Errorf("%s is a file: %v", value, !want)
		}
	}
}
