package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/egress/policy/policytest"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func TestParseRule(t *testing.T) {
	for in, want := range map[string]string{
		"1.2.3.4":                "allow 1.2.3.4/32",
		"0.0.0.0/0":              "allow 0.0.0.0/0",
		"203.0.113.0/24:443/tcp": "allow 203.0.113.0/24:443/tcp",
		"203.0.113.0/24:443":     "allow 203.0.113.0/24:443",
		"203.0.113.0/24/udp":     "allow 203.0.113.0/24/udp",
		"1.2.3.4:53/udp":         "allow 1.2.3.4/32:53/udp",
		"1.2.3.4:8000-8100":      "allow 1.2.3.4/32:8000-8100",
		"1.2.3.4:443-443/tcp":    "allow 1.2.3.4/32:443/tcp",
		"10.0.0.0/8/icmp":        "allow 10.0.0.0/8/icmp",
		"pypi.org":               "allow pypi.org",
		"pypi.org:443/tcp":       "allow pypi.org:443/tcp",
		"PyPI.Org.:443":          "allow pypi.org:443",
		"*.Example.com":          "allow *.example.com",
		"*.org":                  "allow *.org",
		"bücher.example":         "allow xn--bcher-kva.example",
		"BÜCHER.example":         "allow xn--bcher-kva.example",
		"faß.example":            "allow xn--fa-hia.example",
		"_http._tcp.deb.test":    "allow _http._tcp.deb.test",
		"registry:5000-5001/tcp": "allow registry:5000-5001/tcp",
		"1.2.3.4.example":        "allow 1.2.3.4.example",
	} {
		r, err := ParseRule(in)
		if err != nil || r.String() != want {
			t.Errorf("ParseRule(%q) = %s, %v; want %s", in, r, err, want)
		}
	}
	for in, want := range map[string]string{
		"":                                 "not a domain name",
		"1.2.3":                            "not an IPv4 address",
		"010.0.0.1":                        "not an IPv4 address",
		"0x7f.1":                           "not an IPv4 address",
		"0x7f000001":                       "not an IPv4 address",
		"2130706433":                       "not an IPv4 address",
		"1.2.3.4/33":                       "not a domain name",
		"1.2.3.4/08":                       "not a domain name",
		" 1.2.3.4":                         "not a domain name",
		"1.2.3.4 :80":                      "not a domain name",
		"10.0.0.1/8":                       "use 10.0.0.0/8 or 10.0.0.1",
		"1.2.3.4:":                         "is not a number from 1 to 65535",
		"1.2.3.4:0":                        "is not a number from 1 to 65535",
		"1.2.3.4:0443":                     "is not a number from 1 to 65535",
		"1.2.3.4:65536":                    "is not a number from 1 to 65535",
		"1.2.3.4:http":                     "is not a number from 1 to 65535",
		"1.2.3.4:80-":                      "is not a number from 1 to 65535",
		"1.2.3.4:80-70":                    "run backwards",
		"1.2.3.4:80/icmp":                  "icmp has no ports",
		"1.2.3.4:80/TCP":                   "is not tcp, udp or icmp",
		"1.2.3.4/":                         "is not tcp, udp or icmp",
		"1.2.3.4/sctp":                     "is not tcp, udp or icmp",
		"::1":                              "IPv6 is blocked",
		"[::1]:443/tcp":                    "IPv6 is blocked",
		"2001:db8::/32":                    "IPv6 is blocked",
		"::ffff:1.2.3.4":                   "IPv6 is blocked",
		"localhost":                        "is the sandbox itself",
		"a.localhost:80":                   "is the sandbox itself",
		"*":                                "a * stands only at the beginning",
		"*.":                               "not a domain name",
		"a.*.org":                          "a * stands only at the beginning",
		"*.*.org":                          "a * stands only at the beginning",
		"*pypi.org":                        "a * stands only at the beginning",
		"-a.org":                           "not a domain name",
		"a..org":                           "not a domain name",
		".org":                             "not a domain name",
		"a b.org":                          "not a domain name",
		"a@b.org":                          "not a domain name",
		"https://pypi.org":                 "a URL is no target",
		"pypi.org/simple":                  "is not tcp, udp or icmp",
		"pypi.123":                         "no name ends in a number",
		"x.0x7f":                           "no name ends in a number",
		strings.Repeat("a", 64) + ".org":   "not a domain name",
		strings.Repeat("abc.", 64) + "org": "not a domain name",
		strings.Repeat("ü", 5000) + ".org": "no name is that long",
	} {
		r, err := ParseRule(in)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseRule(%q) = %s, %v; want an error with %q", in, r, err, want)
		}
		if c := errs.CodeOf(err); err != nil && c != errs.Invalid && c != errs.Unsupported {
			t.Errorf("ParseRule(%q): code %s", in, c)
		}
	}
}

func TestFromJSON(t *testing.T) {
	for in, want := range map[string]string{
		`{}`:                        "rules",
		`{"defaultAction":"allow"}`: "open",
		`{"defaultAction":"deny","egress":[{"action":"allow","target":"1.2.3.4"},{"action":"deny","target":"10.0.0.0/8"}]}`: "rules; allow 1.2.3.4/32; deny 10.0.0.0/8",
		`{"egress":[{"action":"allow","target":"1.2.3.0/24","ports":[443,"8000-8100"],"protocol":"tcp"}]}`:                  "rules; allow 1.2.3.0/24:443/tcp; allow 1.2.3.0/24:8000-8100/tcp",
	} {
		n, err := FromJSON([]byte(in))
		got := string(n.Mode)
		for _, r := range n.Rules {
			got += "; " + r.String()
		}
		if err != nil || got != want {
			t.Errorf("FromJSON(%s) = %s, %v; want %s", in, got, err, want)
		}
	}
	n, err := FromJSON([]byte(`{"egress":[{"action":"allow","target":"PyPI.org","ports":[443]},{"action":"deny","target":"*.EVIL.test."}]}`))
	if err != nil || len(n.Rules) != 2 || n.Rules[0].String() != "allow pypi.org:443" || n.Rules[1].String() != "deny *.evil.test" {
		t.Errorf("names: %v, %v", n, err)
	}
	many := `{"egress":[` + strings.Repeat(`{"action":"allow","target":"1.2.3.4"},`, MaxRules) + `{"action":"allow","target":"1.2.3.4"}]}`
	for _, in := range []string{
		``, `[]`, `{} {}`, `{"defaultaction":1}`, `{"unknown":1}`, `{"defaultAction":"maybe"}`, many,
		`{"egress":[{"action":"allow"}]}`, `{"egress":[{"action":"permit","target":"1.2.3.4"}]}`,
		`{"egress":[{"action":"allow","target":"*"}]}`, `{"egress":[{"action":"allow","target":"::/0"}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","ports":[0]}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","ports":[1.5]}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","ports":["9-1"]}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","ports":[]}]}`,
		`{"egress":[{"action":"allow","target":"10.0.0.5/8","ports":[443],"protocol":"tcp"}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","port":443}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","protocol":"TCP"}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","protocol":"icmp","ports":[80]}]}`,
	} {
		if n, err := FromJSON([]byte(in)); err == nil {
			t.Errorf("FromJSON(%.80s) = %v", in, n)
		}
	}
}

func rules(t testing.TB, mode record.NetworkMode, specs ...string) record.Network {
	t.Helper()
	return policytest.Network(t, ParseRule, mode, specs...)
}

// space makes random policies and flows in a small space, where rules overlap.
type space struct{ *rand.Rand }

func (r space) addr() netip.Addr {
	a := netip.MustParseAddr([]string{"11.0.0.0", "10.0.0.0", "8.0.0.0"}[r.IntN(3)]).As4()
	a[3] = byte(r.IntN(16))
	return netip.AddrFrom4(a)
}

var (
	someProtos = []string{"", "tcp", "udp", "icmp"}
	// somePorts are those that names treat differently, and others.
	somePorts = []uint16{1, 2, 3, 80, 81, 443, 444, 853}
	someNames = []string{"a.test", "b.a.test", "c.b.a.test", "b.test", "test"}
)

func (r space) rule(names bool) record.Rule {
	rule := record.Rule{Allow: r.IntN(2) == 0, Proto: someProtos[r.IntN(4)]}
	if names && r.IntN(2) == 0 {
		rule.Name = someNames[r.IntN(len(someNames))]
		if r.IntN(2) == 0 {
			rule.Name = "*." + rule.Name
		}
	} else {
		rule.Prefix = netip.PrefixFrom(r.addr(), []int{0, 5, 7, 8, 24, 29, 32}[r.IntN(7)]).Masked()
	}
	if rule.Name != "" && (rule.Proto == "" || rule.Proto == "tcp") && r.IntN(3) == 0 {
		rule.Requests = r.requests()
	}
	if rule.Proto != "icmp" && r.IntN(2) == 0 {
		first := somePorts[r.IntN(len(somePorts))]
		rule.Ports = [2]uint16{first, first + uint16(r.IntN(3))}
	}
	return rule
}

func (r space) network(names bool) record.Network {
	n := record.Network{Mode: []record.NetworkMode{"rules", "open"}[r.IntN(2)]}
	for range r.IntN(8) {
		n.Rules = append(n.Rules, r.rule(names))
	}
	return n
}

func (r space) flow() Flow {
	f := Flow{Dst: r.addr(), Proto: protocols[someProtos[1+r.IntN(3)]]}
	if f.Proto != unix.IPPROTO_ICMP {
		f.Port = somePorts[r.IntN(len(somePorts))]
	}
	return f
}

// TestFirstMatch compares Decide with the sentence that defines it, on random policies
// without names.
func TestFirstMatch(t *testing.T) {
	r := space{rand.New(rand.NewPCG(1, 2))}
	for range 2000 {
		n := r.network(false)
		p, err := Compile(Host{}, n)
		if err != nil {
			t.Fatal(err)
		}
		for range 50 {
			f := r.flow()
			if got, why := p.Decide(f, someNames); (got == Allow) != byTheBook(n, f, "") || got == Proxy {
				t.Fatalf("%v: %v: %v (%s)", n, f, got, why.Text)
			}
		}
	}
}

// TestNamesByTheBook compares all answers about a flow with the sentence that defines
// them, for each name that the flow may have: the rules one by one, with the name known.
func TestNamesByTheBook(t *testing.T) {
	r := space{rand.New(rand.NewPCG(3, 4))}
	seen := map[Action]int{}
	for range 2000 {
		host, n := Host{}, r.network(true)
		all := record.Network{Mode: n.Mode}
		for range r.IntN(3) {
			deny, allow := r.rule(true), r.rule(true)
			deny.Requests, allow.Requests = nil, nil // not for a whole host
			host.Deny, host.Allow = append(host.Deny, deny), append(host.Allow, allow)
		}
		for _, rule := range host.Deny {
			rule.Allow = false
			all.Rules = append(all.Rules, rule)
		}
		for _, rule := range host.Allow {
			rule.Allow = true
			all.Rules = append(all.Rules, rule)
		}
		all.Rules = append(all.Rules, n.Rules...)
		p, err := Compile(host, n)
		if err != nil {
			t.Fatal(err)
		}
		for range 30 {
			f := r.flow()
			leased := someNames[r.IntN(len(someNames)):]
			got, why := p.Decide(f, leased)
			seen[got]++
			some := false // an address with several names is open if one of them is
			for _, name := range someNames {
				want := byTheBook(all, f, name)
				if known, why := p.DecideName(f, name); known != want {
					t.Fatalf("%v: %v to %s: %v (%s)", all, f, name, known, why.Text)
				}
				if want && !p.SomeName(f) {
					t.Fatalf("%v: %v is allowed to %s, and to no name", all, f, name)
				}
				if f.hides() && !p.says(f) {
					want = byTheBook(all, f, hidden)
				}
				if slices.Contains(leased, name) {
					some = some || want
				}
				// Where the proxy does not look at names, the name does not matter, or
				// nobody says it.
				if got != Proxy && p.says(f) && want != (got == Allow) {
					t.Fatalf("%v: %v: %v (%s), and with the name %s it should be %v", all, f, got, why.Text, name, want)
				}
			}
			if !p.says(f) && some != (got == Allow) {
				t.Fatalf("%v: %v with %v: %v (%s)", all, f, leased, got, why.Text)
			}
			if nameless, _ := p.DecideName(f, ""); nameless && got == Proxy && !byTheBook(all, f, "no.such.name") {
				t.Fatalf("%v: %v passes without a name", all, f)
			}
		}
	}
	for _, a := range []Action{Deny, Allow, Proxy} {
		if seen[a] < 500 {
			t.Errorf("the random policies gave %v only %d times", a, seen[a])
		}
	}
}

// TestLoosens: what it calls looser allows all that was allowed, for every name; and it
// finds the usual cases.
func TestLoosens(t *testing.T) {
	r := space{rand.New(rand.NewPCG(5, 6))}
	found := 0
	for range 5000 {
		old := r.network(true)
		n := old
		n.Rules = slices.Clone(old.Rules)
		for range 1 + r.IntN(2) {
			if at := r.IntN(len(n.Rules) + 1); r.IntN(2) == 0 && at < len(n.Rules) {
				n.Rules = slices.Delete(n.Rules, at, at+1)
			} else {
				n.Rules = slices.Insert(n.Rules, at, r.rule(true))
			}
		}
		was, err := Compile(Host{}, old)
		p, err2 := Compile(Host{}, n)
		if err != nil || err2 != nil {
			t.Fatal(err, err2)
		}
		if !p.Loosens(was) {
			continue
		}
		found++
		for range 20 {
			f := r.flow()
			for _, name := range someNames {
				if byTheBook(old, f, name) && !byTheBook(n, f, name) {
					t.Fatalf("%v is called looser than %v, and it denies %v to %s", n, old, f, name)
				}
			}
		}
	}
	if found < 1000 {
		t.Errorf("only %d of the changes are called looser", found)
	}
}

// hidden is a name that nobody can see: each rule that denies a name may mean it.
const hidden = "?"

// byTheBook is what the documents say of rules, read one by one.
func byTheBook(n record.Network, f Flow, name string) bool {
	inTen := netip.MustParsePrefix("10.0.0.0/8").Contains(f.Dst)
	hides := f.Port == 853 || f.Port == 443 && f.Proto == unix.IPPROTO_UDP
	for _, r := range n.Rules {
		if r.Proto != "" && protocols[r.Proto] != f.Proto {
			continue
		}
		if r.Ports[0] != 0 && (f.Proto == unix.IPPROTO_ICMP || f.Port < r.Ports[0] || f.Port > r.Ports[1]) {
			continue
		}
		switch {
		case r.Name != "":
			below, wild := strings.CutPrefix(r.Name, "*.")
			matches := wild && strings.HasSuffix(name, "."+below) || !wild && name == r.Name
			if !matches && (r.Allow || name != hidden) || r.Allow && r.Requests != nil {
				continue // of requests that nobody sees, a rule may deny some, and allows none
			}
			if r.Allow && (hides || inTen) {
				continue
			}
		case !r.Prefix.Contains(f.Dst):
			continue
		case r.Allow && inTen && r.Prefix.Bits() < 8:
			continue // does not name the private range
		}
		return r.Allow
	}
	return n.Mode == record.NetworkOpen && !inTen
}

// TestResolves: DNS answers for what a rule may open.
func TestResolves(t *testing.T) {
	for _, c := range []struct {
		mode  record.NetworkMode
		rules []string
		name  string
		want  bool
		why   string
	}{
		{"rules", []string{"pypi.org:443"}, "pypi.org", true, "allow pypi.org:443"},
		{"rules", []string{"pypi.org:443"}, "www.pypi.org", false, "default"},
		{"rules", []string{"dns.test:853"}, "dns.test", true, "allow dns.test:853"}, // its port opens by address
		{"rules", []string{"*.pypi.org"}, "www.pypi.org", true, "allow *.pypi.org"},
		{"rules", []string{"*.pypi.org"}, "a.b.pypi.org", true, "allow *.pypi.org"},
		{"rules", []string{"*.pypi.org"}, "pypi.org", false, "default"},
		{"rules", []string{"*.pypi.org"}, "notpypi.org", false, "default"},
		{"rules", []string{"!bad.pypi.org", "*.pypi.org"}, "bad.pypi.org", false, "deny bad.pypi.org"},
		{"rules", []string{"!bad.pypi.org:80", "*.pypi.org"}, "bad.pypi.org", true, "allow *.pypi.org"},
		{"rules", []string{"203.0.113.0/24"}, "pypi.org", false, "default"},
		{"open", []string{"!evil.test"}, "evil.test", false, "deny evil.test"},
		{"open", []string{"!evil.test"}, "good.test", true, "default"},
		{"none", []string{"pypi.org"}, "pypi.org", false, "network none"},
	} {
		p, err := Compile(Host{}, rules(t, c.mode, c.rules...))
		if err != nil {
			t.Fatal(err)
		}
		if got, why := p.Resolves(c.name); got != c.want || why.Text != c.why {
			t.Errorf("%s %v: %s: %v, %q; want %v, %q", c.mode, c.rules, c.name, got, why.Text, c.want, c.why)
		}
	}
}

// TestWildcard: what a name below a wildcard may not do is for names that no other rule opens.
func TestWildcard(t *testing.T) {
	for _, c := range []struct {
		mode  record.NetworkMode
		rules []string
		want  string
	}{
		{"rules", []string{"*.x.test"}, "*.x.test"},
		{"rules", []string{"*.x.test", "*.test"}, "*.x.test"},
		{"rules", []string{"*.x.test", "a.x.test"}, ""},
		{"rules", []string{"a.x.test", "*.x.test"}, ""},
		{"rules", []string{"*.x.test", "!a.x.test"}, "*.x.test"},
		{"rules", []string{"b.x.test"}, ""},
		{"open", []string{"*.x.test"}, ""},
	} {
		p, err := Compile(Host{}, rules(t, c.mode, c.rules...))
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Wildcard("a.x.test"); got != c.want {
			t.Errorf("%s %v: %q, want %q", c.mode, c.rules, got, c.want)
		}
	}
}

// TestDecideNames: which flows go to the proxy, and what it does with names.
func TestDecideNames(t *testing.T) {
	for _, c := range []struct {
		mode   record.NetworkMode
		rules  []string
		flow   string
		leased string // "": none
		want   Action
		name   string // for the proxy
		passes bool
	}{
		{"rules", []string{"pypi.org"}, "1.1.1.1:443/tcp", "", Proxy, "pypi.org", true},
		{"rules", []string{"pypi.org"}, "1.1.1.1:443/tcp", "", Proxy, "evil.org", false},
		{"rules", []string{"pypi.org"}, "1.1.1.1:443/tcp", "", Proxy, "", false},
		{"rules", []string{"pypi.org"}, "1.1.1.1:443/udp", "pypi.org", Deny, "", false},
		{"rules", []string{"pypi.org"}, "1.1.1.1:853/tcp", "pypi.org", Deny, "", false},
		{"rules", []string{"pypi.org:853"}, "1.1.1.1:853/tcp", "pypi.org", Deny, "", false},
		{"rules", []string{"pypi.org:853", "1.1.1.1:853"}, "1.1.1.1:853/tcp", "pypi.org", Allow, "", false},
		{"rules", []string{"pypi.org"}, "1.1.1.1:22/tcp", "pypi.org", Allow, "", false},
		{"rules", []string{"pypi.org"}, "1.1.1.1:22/tcp", "evil.org", Deny, "", false},
		{"rules", []string{"pypi.org"}, "1.1.1.1:22/tcp", "", Deny, "", false},
		{"rules", []string{"db.org:5432"}, "1.1.1.1:5432/tcp", "", Proxy, "db.org", true},
		{"rules", []string{"pypi.org:443"}, "1.1.1.1:80/tcp", "", Deny, "", false},
		// An address rule never pays, wherever it stands, unless a name could deny.
		{"rules", []string{"pypi.org", "1.1.1.1"}, "1.1.1.1:443/tcp", "", Allow, "", false},
		{"rules", []string{"!evil.org", "1.1.1.1"}, "1.1.1.1:443/tcp", "", Proxy, "", false},
		{"rules", []string{"!1.1.1.1", "pypi.org"}, "1.1.1.1:443/tcp", "pypi.org", Deny, "", false},
		{"open", []string{"!evil.org"}, "1.1.1.1:443/tcp", "", Proxy, "good.org", true},
		{"open", []string{"!evil.org"}, "1.1.1.1:443/tcp", "", Proxy, "evil.org", false},
		{"open", []string{"!evil.org"}, "1.1.1.1:443/tcp", "", Proxy, "", false},
		{"open", []string{"pypi.org"}, "1.1.1.1:443/tcp", "", Allow, "", false},
		{"none", []string{"pypi.org"}, "1.1.1.1:443/tcp", "pypi.org", Deny, "", false},
		// Where the name is hidden, it may be one that is denied.
		{"open", []string{"!evil.org"}, "1.1.1.1:443/udp", "good.org", Deny, "", false},
		{"open", []string{"!evil.org"}, "1.1.1.1:853/tcp", "", Deny, "", false},
		{"open", []string{"!evil.org:80"}, "1.1.1.1:443/udp", "", Allow, "", false},
		{"open", []string{"1.1.1.1/32/udp", "!evil.org"}, "1.1.1.1:443/udp", "", Allow, "", false},
		// No name opens a private address.
		{"rules", []string{"db.org"}, "10.0.0.5:22/tcp", "db.org", Deny, "", false},
		{"rules", []string{"db.org"}, "10.0.0.5:443/tcp", "db.org", Deny, "", false},
		{"rules", []string{"db.org", "10.0.0.5:1"}, "10.0.0.5:443/tcp", "db.org", Deny, "", false},
		{"rules", []string{"db.org", "10.0.0.5:443"}, "10.0.0.5:443/tcp", "db.org", Allow, "", false},
	} {
		p, err := Compile(Host{}, rules(t, c.mode, c.rules...))
		if err != nil {
			t.Fatal(err)
		}
		target, proto, _ := strings.Cut(c.flow, "/")
		dst := netip.MustParseAddrPort(target)
		f := Flow{Dst: dst.Addr(), Port: dst.Port(), Proto: protocols[proto]}
		var leased []string
		if c.leased != "" {
			leased = []string{c.leased}
		}
		got, why := p.Decide(f, leased)
		if got != c.want {
			t.Errorf("%s %v: %s %v: %v (%s); want %v", c.mode, c.rules, c.flow, leased, got, why.Text, c.want)
		}
		if passes, why := p.DecideName(f, c.name); got == Proxy && passes != c.passes {
			t.Errorf("%s %v: %s to %q: %v (%s); want %v", c.mode, c.rules, c.flow, c.name, passes, why.Text, c.passes)
		}
	}
}

func TestCompileRefuses(t *testing.T) {
	ok := netip.MustParsePrefix("1.2.3.4/32")
	for _, n := range []record.Network{
		{},
		{Mode: "bridge"},
		{Mode: "rules", Rules: []record.Rule{{}}},
		{Mode: "rules", Rules: []record.Rule{{Prefix: netip.MustParsePrefix("::/0")}}},
		{Mode: "rules", Rules: []record.Rule{{Prefix: ok, Proto: "sctp"}}},
		{Mode: "rules", Rules: []record.Rule{{Prefix: ok, Name: "pypi.org"}}},
		{Mode: "rules", Rules: []record.Rule{{Name: "PyPI.org"}}},
		{Mode: "rules", Rules: []record.Rule{{Name: "*"}}},
		{Mode: "rules", Rules: []record.Rule{{Prefix: ok, Ports: [2]uint16{2, 1}}}},
		{Mode: "rules", Rules: []record.Rule{{Prefix: ok, Ports: [2]uint16{0, 1}}}},
		{Mode: "rules", Rules: make([]record.Rule, MaxRules+1)},
	} {
		if _, err := Compile(Host{}, n); errs.CodeOf(err) == errs.Internal {
			t.Errorf("%.60s: %v", fmt.Sprint(n), err)
		}
	}
}
