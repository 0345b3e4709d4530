package config

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// TestPolicies: what the file says of named policies and of the host is what sandboxes get.
func TestPolicies(t *testing.T) {
	c, err := load(t, `
[egress]
always_deny = ["203.0.113.9", "*.example.net", "quic.example:443/udp"]
always_allow = ["mirror.example.com:443/tcp", "dot.example:853"]

[policies.build]
rules = ["deny dot.example:853", "deny 203.0.113.8/31", "allow PyPI.org:443", "allow  198.51.100.0/24:8000-8100/udp"]

[policies.api]
rules = ["deny DELETE api.example.com", "allow  * API.example.com:443/v1/*"]

[policies.web]
default = "allow"
`)
	if err != nil {
		t.Fatal(err)
	}
	all := c.Networks()
	for what, pair := range map[string][2]string{
		"api": {
			fmt.Sprint(all["api"]), "{rules [deny api.example.com DELETE allow api.example.com:443 requests /v1/*]}",
		},
		"build": {
			fmt.Sprint(all["build"]),
			"{rules [deny dot.example:853 deny 203.0.113.8/31 allow pypi.org:443 allow 198.51.100.0/24:8000-8100/udp]}",
		},
		"web":          {fmt.Sprint(all["web"]), "{open []}"},
		"always_deny":  {targets(c.Egress.Host.Deny), "203.0.113.9/32 *.example.net quic.example"},
		"always_allow": {targets(c.Egress.Host.Allow), "mirror.example.com dot.example"},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: %s, want %s", what, pair[0], pair[1])
		}
	}
	if c, err = load(t, ""); err != nil || len(c.Networks()) > 0 || len(c.Egress.Host.Deny)+len(c.Egress.Host.Allow) > 0 {
		t.Errorf("by default there are %+v, %v", c.Egress.Host, err)
	}
}

func targets(rules []record.Rule) string {
	var all []string
	for _, r := range rules {
		all = append(all, r.Target())
	}
	return strings.Join(all, " ")
}

// TestBadPolicies: each problem has its line and says what to write.
func TestBadPolicies(t *testing.T) {
	for text, want := range map[string]string{
		"[egress]\nalways_deny = ['1.2.3']":                           "line 2: egress.always_deny",
		"[egress]\nalways_allow = ['https://x.org/']":                 "write the host that it names",
		"[egress]\nalways_denny = []":                                 "did you mean egress.always_deny?",
		"policies = 3":                                                "line 1",
		"[policies]\nbuild = 'open'":                                  "line 2: policies.build = \"open\": want a table, [policies.build]",
		"[policies.build]\ndefault = 'open'":                          "line 2: policies.build.default = \"open\": want deny or allow",
		"[policies.build]\nrule = ['allow 1.1.1']":                    "did you mean policies.build.rules?",
		"[policies.build]\nrules = 'allow 1.1.1.1'":                   "want a list of texts",
		"[policies.build]\nrules = ['1.1.1.1']":                       "want \"allow TARGET\" or \"deny TARGET\"",
		"[policies.build]\n\nrules = ['deny 1.1.1.1','allow pypi..']": "line 3: policies.build.rules: \"allow pypi..\"",
		"[policies.build]\nrules = ['allow GET 1.1.1.1/x']":           "METHOD NAME",
		"[egress]\nalways_allow = ['GET api.example.com']":            "not for a whole host",
		"[policies.'a.b']":                                            "1 to 63 characters",
	} {
		if _, err := load(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// TestManyPolicies: the configuration has no more policies than the host keeps.
func TestManyPolicies(t *testing.T) {
	var text strings.Builder
	for n := range record.MaxPolicies {
		fmt.Fprintf(&text, "[policies.p%d]\n", n)
	}
	if _, err := load(t, text.String()); err != nil {
		t.Error(err)
	}
	text.WriteString("[policies.more]")
	if _, err := load(t, text.String()); err == nil || !strings.Contains(err.Error(), "257 tables [policies.NAME]: want at most 256") {
		t.Error(err)
	}
}

// TestPools: a table [[pool]] is the template and capacity of a pool; what is wrong in one is
// refused by its name.
func TestPools(t *testing.T) {
	c, err := load(t, `[[pool]]
name = "py"
image = "python"
runtime = "runc"
limits = {memory = "128Mi"}
prestart = ["python", "bash"]
warm = "true"
ready = "curl -f localhost"
max_age = "1h"
buffer_min = 1
buffer_max = 2
pool_max = 3
`)
	if err != nil {
		t.Fatal(err)
	}
	want := record.Pool{
		Name: "py", Warm: "true", Ready: "curl -f localhost", MaxAge: time.Hour,
		Capacity: record.Capacity{BufferMin: 1, BufferMax: 2, PoolMax: 3},
		Template: []byte(`{"image":{"uri":"python"},"resourceLimits":{"memory":"128Mi"},"extensions":{"sandboxd.pool.max-age":"1h0m0s",` +
			`"sandboxd.pool.ready":"curl -f localhost","sandboxd.pool.warm":"true","sandboxd.prestart":"python,bash","sandboxd.runtime":"runc"}}`),
	}
	if got := c.FixedPools(); len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("%+v\n%s", got, got[0].Template)
	}
	for text, says := range map[string]string{
		`name = "a.b"`:                "pool: name",
		`name = "a"`:                  "image is missing",
		"name = \"a\"\nimage = \"x\"": "poolMax",
		"name = \"a\"\nimage = \"x\"\nruntime = \"lxc\"\nbuffer_max = 1\npool_max = 1":    "runtime",
		"name = \"a\"\nimage = \"x\"\nmax_age = \"1s\"\nbuffer_max = 1\npool_max = 1":     "max_age",
		"name = \"a\"\nimage = \"x\"\nready = \" \"\nbuffer_max = 1\npool_max = 1":        "pool a: ready: want a line",
		"name = \"a\"\nimage = \"x\"\nwarm = \"a\\u0000\"\nbuffer_max = 1\npool_max = 1":  "pool a: warm: want a line",
		"name = \"a\"\nimage = \"x\"\nbuffer_max = 1\npool_max = 1\n[[pool]]\nname=\"a\"": "two of that name",
	} {
		if _, err := load(t, "[[pool]]\n"+text); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", text, err, says)
		}
	}
}
