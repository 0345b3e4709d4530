package policy

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/net/idna"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// FuzzDecide: a policy or a rule of a client decides on every flow as its rules read one by
// one, with the name of the flow known, and a rule is read back as it is shown.
func FuzzDecide(f *testing.F) {
	f.Add([]byte(`{"defaultAction":"allow","egress":[{"action":"deny","target":"203.0.113.0/24","ports":["1-1023"],"protocol":"tcp"}]}`),
		"a.test", uint32(0xcb007105), uint8(6), uint16(443))
	f.Add([]byte(`{"egress":[{"action":"allow","target":"0.0.0.0/0"},{"action":"allow","target":"10.1.0.0/16","ports":[53]}]}`),
		"", uint32(0x0a010203), uint8(17), uint16(53))
	f.Add([]byte(`{"egress":[{"action":"deny","target":"b.a.test"},{"action":"allow","target":"*.A.test"}]}`),
		"b.a.test", uint32(0x08080808), uint8(6), uint16(80))
	f.Add([]byte("pypi.org:443"), "pypi.org", uint32(0x08080808), uint8(6), uint16(443))
	f.Add([]byte("203.0.113.0/24:443/tcp"), "x", uint32(0xcb007105), uint8(6), uint16(443))
	f.Add([]byte("GET API.example.com:443/v1/*"), "api.example.com", uint32(0x08080808), uint8(6), uint16(443))
	f.Add([]byte("* *.example.com:80-443/a%2Fb"), "api.example.com", uint32(0x08080808), uint8(6), uint16(80))
	f.Add([]byte(`{"egress":[{"action":"allow","target":"a.test","ports":[80,443],"http":{"methods":["GET"],"paths":["/v1/*"]}},`+
		`{"action":"deny","target":"*.test","http":{"paths":["/"]}}]}`), "a.test", uint32(0x08080808), uint8(6), uint16(443))
	f.Fuzz(func(t *testing.T, b []byte, name string, to uint32, proto uint8, port uint16) {
		n, err := FromJSON(b)
		if r, rerr := ParseRule(string(b)); rerr == nil {
			n, err = record.Network{Mode: record.NetworkRules, Rules: []record.Rule{r}}, nil
			if again, err := ParseRule(asWritten(r)); err != nil || !reflect.DeepEqual(again, r) {
				t.Fatalf("%q: %v comes back as %v, %v", b, r, again, err)
			}
		}
		if err != nil {
			return
		}
		p, err := Compile(Host{}, n)
		if err != nil {
			t.Fatalf("%q is a policy, but %v", b, err)
		}
		if name, err = NormalName(name); err != nil || strings.HasPrefix(name, "*") {
			name = "no.such.name"
		}
		fl := Flow{Dst: netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, to))), Proto: proto, Port: port}
		if !HasPorts(proto) {
			fl.Port = 0
		}
		got, _ := p.DecideName(fl, name)
		if want := readOneByOne(n, fl, name); got != want {
			t.Fatalf("%q on %+v to %s: %v, want %v", b, fl, name, got, want)
		}
		first, _ := p.Decide(fl, []string{name})
		if fl.hides() {
			return // nobody sees the name
		}
		if first == Allow && !got || first == Deny && got {
			t.Fatalf("%q on %+v to %s: the first packet says %v, the name %v", b, fl, name, first, got)
		}
	})
}

// asWritten is a rule that ParseRule has read, as it is written.
func asWritten(r record.Rule) string {
	q := r.Requests
	if r.Requests = nil; q == nil {
		return strings.TrimPrefix(r.String(), "allow ")
	}
	return cmp.Or(strings.Join(q.Methods, ""), "*") + " " + strings.TrimPrefix(r.String(), "allow ") + strings.Join(q.Paths, "")
}

// readOneByOne is what the documents say of rules.
func readOneByOne(n record.Network, f Flow, name string) bool {
	inside := f.Dst.IsPrivate()
	for _, p := range []string{"100.64.0.0/10", "198.18.0.0/15", "192.0.0.0/24"} {
		inside = inside || netip.MustParsePrefix(p).Contains(f.Dst)
	}
	for _, r := range n.Rules {
		ports := r.Ports[1] == 0 || HasPorts(f.Proto) && r.Ports[0] <= f.Port && f.Port <= r.Ports[1]
		if !ports || r.Proto != "" && protocols[r.Proto] != f.Proto {
			continue
		}
		if r.Allow && r.Requests != nil {
			continue // nobody has seen a request
		}
		if r.Name != "" {
			below, wild := strings.CutPrefix(r.Name, "*")
			if wild && (len(name) <= len(below) || !strings.HasSuffix(name, below)) || !wild && name != r.Name {
				continue
			}
			if r.Allow && (inside || f.Port == 853 || f.Port == 443 && protocols["udp"] == f.Proto) {
				continue // a name does not open this
			}
			return r.Allow
		}
		if !r.Prefix.Contains(f.Dst) || r.Allow && inside && !within(private, r.Prefix) {
			continue // it means the Internet
		}
		return r.Allow
	}
	return !inside && n.Mode == record.NetworkOpen
}

// FuzzNormalName: a normal form is its own, has only the letters of DNS, and another reader
// of names finds the same ASCII.
func FuzzNormalName(f *testing.F) {
	for _, s := range []string{
		"pypi.org", "*.PyPI.org.", "bücher.example", "xn--bcher-kva.example", "a_b.c", "1.2.3.4", "a..b", "\xff.org", "faß.de",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := NormalName(s)
		if err != nil {
			return
		}
		if again, err := NormalName(n); err != nil || again != n {
			t.Fatalf("%q: %q comes back as %q, %v", s, n, again, err)
		}
		if len(n) > 253 || strings.Trim(n, "abcdefghijklmnopqrstuvwxyz0123456789-_.*") != "" || strings.LastIndex(n, "*") > 0 {
			t.Fatalf("%q: %q", s, n)
		}
		if _, err := netip.ParseAddr(n); err == nil {
			t.Fatalf("%q is taken for a name", n)
		}
		bare := strings.TrimSuffix(strings.TrimPrefix(s, "*."), ".")
		if !strings.Contains(bare, "_") {
			if other, err := idna.Lookup.ToASCII(bare); err != nil || other != strings.TrimPrefix(n, "*.") {
				t.Fatalf("%q: %q; another reader: %q, %v", s, n, other, err)
			}
		}
	})
}
