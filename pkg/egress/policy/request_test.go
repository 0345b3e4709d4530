package policy

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

var (
	someMethods = []string{"GET", "POST", "DELETE"}
	somePaths   = []string{"/", "/a", "/a/b", "/b/a", "/a%2Fb", "/a;x/b"}
	someGlobs   = []string{"/*", "/a", "/a/*", "/*/b", "/*a*", "/a*b"}
)

func (r space) requests() *record.Requests {
	q := &record.Requests{}
	for range r.IntN(3) {
		q.Methods = append(q.Methods, someMethods[r.IntN(len(someMethods))])
	}
	for range r.IntN(3) {
		q.Paths = append(q.Paths, someGlobs[r.IntN(len(someGlobs))])
	}
	return q
}

// globbed is what the documents say of patterns: a star is any text.
func globbed(pattern, s string) bool {
	if pattern == "" || s == "" {
		return strings.Trim(pattern, "*") == "" && s == ""
	}
	if pattern[0] == '*' {
		return globbed(pattern[1:], s) || globbed(pattern, s[1:])
	}
	return pattern[0] == s[0] && globbed(pattern[1:], s[1:])
}

// requestByTheBook reads the rules one by one, with the request known.
func requestByTheBook(n record.Network, f Flow, name string, q Request) bool {
	known := record.Network{Mode: n.Mode}
	for _, r := range n.Rules {
		if r.Requests != nil {
			about := len(r.Requests.Methods) == 0 || slices.Contains(r.Requests.Methods, q.Method)
			paths := r.Requests.Paths
			if !about || len(paths) > 0 && !slices.ContainsFunc(paths, func(g string) bool { return globbed(g, q.Path) }) {
				continue
			}
			r.Requests = nil
		}
		known.Rules = append(known.Rules, r)
	}
	return byTheBook(known, f, name)
}

// TestRequestsByTheBook: requests are decided on as the rules read, and where they are not
// inspected it does not matter what they are.
func TestRequestsByTheBook(t *testing.T) {
	r := space{rand.New(rand.NewPCG(7, 8))}
	inspected, not := 0, 0
	for range 400 {
		n := r.network(true)
		for i := range n.Rules {
			if rule := &n.Rules[i]; rule.Name != "" && (rule.Proto == "" || rule.Proto == "tcp") && r.IntN(2) == 0 {
				rule.Requests = r.requests()
			}
		}
		p, err := Compile(Host{}, n)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			f := r.flow()
			f.Proto, f.Port = unix.IPPROTO_TCP, []uint16{80, 443, 444}[r.IntN(3)]
			for _, name := range someNames {
				inspects := p.Inspects(f, name)
				unseen, _ := p.DecideName(f, name)
				verdicts := map[bool]bool{}
				for _, method := range append(someMethods, "PATCH") {
					for _, path := range somePaths {
						q := Request{method, path}
						want := requestByTheBook(n, f, name, q)
						other := strings.NewReplacer("%2F", "/", ";x", "").Replace(path)
						want = want && requestByTheBook(n, f, name, Request{method, other})
						got, why := p.DecideRequest(f, name, q)
						if got != want {
							t.Fatalf("%v: %v to %s: %v: %v (%s)", n, f, name, q, got, why.Text)
						}
						verdicts[got] = true
						if got && unseen == false && p.says(f) && !inspects {
							t.Fatalf("%v: %v to %s: %v is allowed, and nobody inspects it", n, f, name, q)
						}
					}
				}
				if some, _ := p.DecideSome(f, name); verdicts[true] && !some || p.says(f) && !inspects && some != unseen {
					t.Fatalf("%v: %v to %s: some requests may pass: %v; %v do, and unseen %v", n, f, name, some, verdicts, unseen)
				}
				switch {
				case !p.says(f):
					if inspects {
						t.Fatalf("%v: %v to %s is inspected, and nobody says names there", n, f, name)
					}
				case inspects:
					inspected++
					if unseen && verdicts[false] {
						t.Fatalf("%v: %v to %s passes unseen, and some request is denied", n, f, name)
					}
				default:
					not++
					if len(verdicts) != 1 || !verdicts[unseen] {
						t.Fatalf("%v: %v to %s is not inspected: %v unseen, and %v", n, f, name, unseen, verdicts)
					}
				}
				if first, _ := p.Decide(f, []string{name}); first != Proxy && inspects {
					t.Fatalf("%v: %v to %s is inspected, and the first packet says %v", n, f, name, first)
				}
				if ok, _ := p.Resolves(name); !ok && verdicts[true] && !Private(f.Dst) && n.Mode != record.NetworkOpen &&
					!slices.ContainsFunc(n.Rules, func(r record.Rule) bool { return r.Allow && r.Prefix.IsValid() }) {
					t.Fatalf("%v: %v to %s: requests are allowed, and DNS does not answer", n, f, name)
				}
			}
		}
	}
	if inspected < 60 || not < 2000 {
		t.Errorf("the random policies inspect %d times, and %d times not", inspected, not)
	}
}

// TestLoosensFor: if a policy is looser for a name, it allows each request to it that was
// allowed, whatever it says of other names; and it finds such cases that Loosens does not.
func TestLoosensFor(t *testing.T) {
	r := space{rand.New(rand.NewPCG(9, 10))}
	found, only := 0, 0
	for range 3000 {
		old := r.network(true)
		for i := range old.Rules {
			if rule := &old.Rules[i]; rule.Name != "" && (rule.Proto == "" || rule.Proto == "tcp") && r.IntN(2) == 0 {
				rule.Requests = r.requests()
			}
		}
		n := record.Network{Mode: old.Mode, Rules: slices.Clone(old.Rules)}
		if at := r.IntN(len(n.Rules) + 1); r.IntN(2) == 0 && at < len(n.Rules) {
			n.Rules = slices.Delete(n.Rules, at, at+1)
		} else {
			n.Rules = slices.Insert(n.Rules, at, r.rule(true))
		}
		was, err := Compile(Host{}, old)
		p, err2 := Compile(Host{}, n)
		if err != nil || err2 != nil {
			t.Fatal(err, err2)
		}
		f := r.flow()
		f.Proto, f.Port = unix.IPPROTO_TCP, []uint16{80, 443, 444}[r.IntN(3)]
		for _, name := range someNames {
			if !p.LoosensFor(was, name) {
				continue
			}
			found++
			if !p.Loosens(was) {
				only++
			}
			for _, method := range someMethods {
				for _, path := range somePaths {
					q := Request{method, path}
					before, _ := was.DecideRequest(f, name, q)
					if now, _ := p.DecideRequest(f, name, q); before && !now {
						t.Fatalf("%v is called looser for %s than %v, and it denies %v to %v", n, name, old, q, f)
					}
				}
			}
		}
	}
	if found < 3000 || only < 300 {
		t.Errorf("%d of the changes are called looser for a name, %d of them for that name only", found, only)
	}
}

func TestCompileRefusesRequests(t *testing.T) {
	name, addr := record.Rule{Name: "a.test"}, record.Rule{Prefix: netip.MustParsePrefix("1.2.3.4/32")}
	with := func(r record.Rule, q record.Requests) record.Rule { r.Requests = &q; return r }
	udp := name
	udp.Proto = "udp"
	for _, r := range []record.Rule{
		with(addr, record.Requests{}),
		with(udp, record.Requests{}),
		with(name, record.Requests{Methods: []string{"get"}}),
		with(name, record.Requests{Methods: []string{""}}),
		with(name, record.Requests{Methods: []string{"CONNECT"}}),
		with(name, record.Requests{Methods: []string{"TRACE"}}),
		with(name, record.Requests{Methods: make([]string, maxMethods+1)}),
		with(name, record.Requests{Paths: []string{"a"}}),
		with(name, record.Requests{Paths: []string{"/a;b"}}),
		with(name, record.Requests{Paths: make([]string, maxPaths+1)}),
	} {
		if _, err := Compile(Host{}, record.Network{Mode: record.NetworkRules, Rules: []record.Rule{r}}); err == nil {
			t.Errorf("%+v is compiled", r)
		}
	}
	q := with(name, record.Requests{Methods: []string{"GET", "HEAD"}, Paths: []string{"/repos/*"}})
	if _, err := Compile(Host{Deny: []record.Rule{q}}, record.Network{Mode: record.NetworkRules}); err == nil {
		t.Error("a rule of the host about requests is compiled")
	}
}

// TestPermits: what an answer to a denied request may name.
func TestPermits(t *testing.T) {
	q := record.Rule{Allow: true, Name: "a.test", Requests: &record.Requests{Methods: []string{"GET", "HEAD"}, Paths: []string{"/repos/*"}}}
	other := record.Rule{Allow: true, Name: "b.test"}
	p, err := Compile(Host{}, record.Network{Mode: record.NetworkRules, Rules: []record.Rule{q, other, q}})
	if err != nil {
		t.Fatal(err)
	}
	f := Flow{Dst: netip.MustParseAddr("1.2.3.4"), Proto: unix.IPPROTO_TCP, Port: 443}
	for most, want := range map[int]int{1: 1, 9: 2} {
		got := p.Permits(f, "a.test", most)
		if len(got) != want || got[0] != "allow a.test GET,HEAD /repos/*" {
			t.Errorf("Permits(%d) = %q", most, got)
		}
	}
}

// TestDecideRequestRefuses: what is no request that rules can be about passes no rule.
// TestCovers: a host to which some request is allowed is covered, whatever the rules.
func TestCovers(t *testing.T) {
	some := func(n record.Network, i int) record.Network {
		n.Rules[i].Requests = &record.Requests{Methods: []string{"GET"}, Paths: []string{"/v1/*"}}
		return n
	}
	for i, c := range []struct {
		n    record.Network
		host string
		want bool
	}{
		{rules(t, "rules"), "a.test", false},
		{rules(t, "none", "a.test"), "a.test", false},
		{rules(t, "open"), "a.test", true},
		{rules(t, "open"), "*.a.test", true},
		{rules(t, "open", "!a.test"), "a.test", false},
		{rules(t, "open", "!*.test"), "*.a.test", false},
		{rules(t, "open", "!b.a.test"), "*.a.test", true}, // a rule about some names is none about all
		{rules(t, "rules", "b.a.test"), "*.a.test", false},
		{rules(t, "rules", "*.a.test"), "*.a.test", true},
		{rules(t, "rules", "*.a.test"), "a.test", false},
		{rules(t, "rules", "*.test"), "*.a.test", true},
		{rules(t, "rules", "*.a.test"), "*.test", false},
		{rules(t, "rules", "!a.test", "a.test"), "a.test", false},
		{rules(t, "rules", "!a.test:80", "a.test"), "a.test", true}, // f has port 443
		{rules(t, "rules", "a.test:80"), "a.test", false},
		{rules(t, "rules", "a.test/udp"), "a.test", false},
		{rules(t, "rules", "0.0.0.0/0"), "a.test", false}, // DNS does not answer for it
		{some(rules(t, "rules", "a.test"), 0), "a.test", true},
		{some(rules(t, "rules", "!a.test", "a.test"), 0), "a.test", true},
		{some(rules(t, "rules", "!a.test", "a.test"), 1), "a.test", false},
	} {
		p, err := Compile(Host{}, c.n)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Covers(Flow{Proto: unix.IPPROTO_TCP, Port: 443}, c.host); got != c.want {
			t.Errorf("case %d: %v covers %s: %v", i, c.n, c.host, got)
		}
	}
	r, covered, not := space{rand.New(rand.NewPCG(9, 10))}, 0, 0
	for range 1000 {
		n := r.network(true)
		p, err := Compile(Host{}, n)
		if err != nil {
			t.Fatal(err)
		}
		f := Flow{Proto: unix.IPPROTO_TCP, Port: []uint16{80, 443}[r.IntN(2)]}
		for _, name := range someNames {
			allowed := false
			for _, method := range someMethods {
				for _, path := range somePaths[:4] { // of one reading each
					if allow, _ := p.DecideRequest(f, name, Request{method, path}); allow {
						allowed = true
					}
				}
			}
			got := p.Covers(f, name)
			if allowed && !got {
				t.Fatalf("%v: some request to %s is allowed, and it is not covered", n, name)
			}
			if got {
				covered++
			} else {
				not++
			}
		}
	}
	if covered < 500 || not < 500 {
		t.Errorf("%d covered, %d not", covered, not)
	}
}

func TestDecideRequestRefuses(t *testing.T) {
	p, err := Compile(Host{}, record.Network{Mode: record.NetworkOpen, Rules: []record.Rule{
		{Name: "a.test", Requests: &record.Requests{Methods: []string{"DELETE"}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	f := Flow{Dst: netip.MustParseAddr("1.2.3.4"), Proto: unix.IPPROTO_TCP, Port: 443}
	for _, c := range []struct {
		name string
		q    Request
		want bool
	}{
		{"a.test", Request{"GET", "/a"}, true},
		{"a.test", Request{"DELETE", "/a"}, false},
		{"a.test", Request{"delete", "/a"}, false},
		{"a.test", Request{"TRACE", "/a"}, false},
		{"a.test", Request{"GET", "/a/../b"}, false},
		{"a.test", Request{"GET", "*"}, false},
		{"", Request{"GET", "/a"}, false},
		{"b.test", Request{"DELETE", "/a"}, true},
	} {
		if got, why := p.DecideRequest(f, c.name, c.q); got != c.want {
			t.Errorf("%s, %v: %v (%s)", c.name, c.q, got, why.Text)
		}
	}
}
