package egress

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

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
	} {
		r, err := ParseRule(in)
		if err != nil || r.String() != want {
			t.Errorf("ParseRule(%q) = %s, %v; want %s", in, r, err, want)
		}
	}
	for in, want := range map[string]string{
		"":                  "not an IPv4 address",
		"1.2.3":             "not an IPv4 address",
		"010.0.0.1":         "not an IPv4 address",
		"0x7f.1":            "not an IPv4 address",
		"0x7f000001":        "not an IPv4 address",
		"2130706433":        "not an IPv4 address",
		"1.2.3.4/33":        "not an IPv4 address",
		"1.2.3.4/08":        "not an IPv4 address",
		" 1.2.3.4":          "not an IPv4 address",
		"1.2.3.4 :80":       "not an IPv4 address",
		"10.0.0.1/8":        "use 10.0.0.0/8 or 10.0.0.1",
		"1.2.3.4:":          "is not a number from 1 to 65535",
		"1.2.3.4:0":         "is not a number from 1 to 65535",
		"1.2.3.4:0443":      "is not a number from 1 to 65535",
		"1.2.3.4:65536":     "is not a number from 1 to 65535",
		"1.2.3.4:http":      "is not a number from 1 to 65535",
		"1.2.3.4:80-":       "is not a number from 1 to 65535",
		"1.2.3.4:80-70":     "run backwards",
		"1.2.3.4:80/icmp":   "icmp has no ports",
		"1.2.3.4:80/TCP":    "is not tcp, udp or icmp",
		"1.2.3.4/":          "is not tcp, udp or icmp",
		"1.2.3.4/sctp":      "is not tcp, udp or icmp",
		"::1":               "IPv6 is blocked",
		"[::1]:443/tcp":     "IPv6 is blocked",
		"2001:db8::/32":     "IPv6 is blocked",
		"::ffff:1.2.3.4":    "IPv6 is blocked",
		"pypi.org":          "this release does not support names in rules; use an address",
		"pypi.org:443/tcp":  "this release does not support names in rules; use an address",
		"*.example.com:443": "this release does not support names in rules; use an address",
		"localhost":         "this release does not support names in rules; use an address",
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

func TestFromPolicy(t *testing.T) {
	for in, want := range map[string]string{
		`{}`:                        "rules",
		`{"defaultAction":"allow"}`: "open",
		`{"defaultAction":"deny","egress":[{"action":"allow","target":"1.2.3.4"},{"action":"deny","target":"10.0.0.0/8"}]}`: "rules; allow 1.2.3.4/32; deny 10.0.0.0/8",
		`{"egress":[{"action":"allow","target":"1.2.3.0/24","ports":[443,"8000-8100"],"protocol":"tcp"}]}`:                  "rules; allow 1.2.3.0/24:443/tcp; allow 1.2.3.0/24:8000-8100/tcp",
	} {
		n, err := FromPolicy([]byte(in))
		got := string(n.Mode)
		for _, r := range n.Rules {
			got += "; " + r.String()
		}
		if err != nil || got != want {
			t.Errorf("FromPolicy(%s) = %s, %v; want %s", in, got, err, want)
		}
	}
	many := `{"egress":[` + strings.Repeat(`{"action":"allow","target":"1.2.3.4"},`, maxRules) + `{"action":"allow","target":"1.2.3.4"}]}`
	for _, in := range []string{
		``, `[]`, `{} {}`, `{"defaultaction":1}`, `{"unknown":1}`, `{"defaultAction":"maybe"}`, many,
		`{"egress":[{"action":"allow"}]}`, `{"egress":[{"action":"permit","target":"1.2.3.4"}]}`,
		`{"egress":[{"action":"allow","target":"pypi.org"}]}`, `{"egress":[{"action":"allow","target":"::/0"}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","ports":[0]}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","ports":[1.5]}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","ports":["9-1"]}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","ports":[]}]}`,
		`{"egress":[{"action":"allow","target":"10.0.0.5/8","ports":[443],"protocol":"tcp"}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","port":443}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","protocol":"TCP"}]}`,
		`{"egress":[{"action":"allow","target":"1.2.3.4","protocol":"icmp","ports":[80]}]}`,
	} {
		if n, err := FromPolicy([]byte(in)); err == nil {
			t.Errorf("FromPolicy(%.80s) = %v", in, n)
		}
	}
}

func rules(t testing.TB, mode record.NetworkMode, specs ...string) record.Network {
	t.Helper()
	n := record.Network{Mode: mode}
	for _, s := range specs {
		spec, deny := strings.CutPrefix(s, "!")
		r, err := ParseRule(spec)
		if err != nil {
			t.Fatal(err)
		}
		r.Allow = !deny
		n.Rules = append(n.Rules, r)
	}
	return n
}

func TestDecide(t *testing.T) {
	hosts := map[netip.Addr]bool{netip.MustParseAddr("198.51.100.1"): true, netip.MustParseAddr("198.51.100.255"): false}
	e := &Engine{cfg: Config{Instance: inst, Pool: inst.Pool()}}
	e.hosts.Store(&hosts)
	for a, want := range map[string]bool{"198.51.100.1": true, "198.51.100.255": false, "198.51.100.2": false} {
		if e.HostAddress(netip.MustParseAddr(a)) != want {
			t.Errorf("%s is an address of this host: %v, want %v", a, !want, want)
		}
	}
	everything := []string{
		"0.0.0.0/0", "10.0.0.0/8", "169.254.0.0/16", "127.0.0.0/8", "198.51.100.1", "100.64.0.0/10",
		"240.0.0.0/4", "224.0.0.0/4", "168.63.129.16",
	}
	for _, c := range []struct {
		mode  record.NetworkMode
		rules []string
		flow  string // addr:port/proto
		allow bool
		why   string
	}{
		{"rules", nil, "1.1.1.1:443/tcp", false, "default"},
		{"none", []string{"1.1.1.1"}, "1.1.1.1:443/tcp", false, "network none"},
		{"open", nil, "1.1.1.1:443/tcp", true, "default"},
		{"open", []string{"!1.1.1.1:443"}, "1.1.1.1:443/tcp", false, "deny 1.1.1.1/32:443"},
		{"open", []string{"!1.1.1.1:443"}, "1.1.1.1:80/tcp", true, "default"},
		{"rules", []string{"1.1.1.1:443/tcp"}, "1.1.1.1:443/udp", false, "default"},
		{"rules", []string{"1.1.1.1:443"}, "1.1.1.1:0/icmp", false, "default"},
		{"rules", []string{"1.1.1.1"}, "1.1.1.1:0/icmp", true, "allow 1.1.1.1/32"},
		{"rules", []string{"1.1.1.0/24:80-90"}, "1.1.1.255:90/tcp", true, "allow 1.1.1.0/24:80-90"},
		{"rules", []string{"1.1.1.0/24:80-90"}, "1.1.1.255:91/tcp", false, "default"},
		// Private ranges: by name only.
		{"open", nil, "10.1.2.3:80/tcp", false, "private range"},
		{"open", []string{"0.0.0.0/0"}, "10.1.2.3:80/tcp", false, "private range"},
		{"rules", []string{"8.0.0.0/5"}, "10.1.2.3:80/tcp", false, "private range"},
		{"rules", []string{"10.0.0.0/8"}, "10.1.2.3:80/tcp", true, "allow 10.0.0.0/8"},
		{"rules", []string{"10.1.2.3:80"}, "10.1.2.3:80/tcp", true, "allow 10.1.2.3/32:80"},
		{"rules", []string{"10.1.2.3:80"}, "10.1.2.3:81/tcp", false, "private range"},
		{"open", []string{"!0.0.0.0/0", "10.0.0.0/8"}, "10.1.2.3:80/tcp", false, "deny 0.0.0.0/0"},
		{"rules", []string{"0.0.0.0/0", "100.64.0.0/10"}, "100.100.1.1:80/tcp", true, "allow 100.64.0.0/10"},
		// Never.
		{"open", everything, "169.254.169.254:80/tcp", false, "metadata service"},
		{"open", everything, "100.100.100.200:80/tcp", false, "metadata service"},
		{"open", everything, "168.63.129.16:80/tcp", false, "metadata service"},
		{"open", everything, "169.254.1.1:80/tcp", false, "link-local"},
		{"open", everything, "127.0.0.1:80/tcp", false, "loopback"},
		{"open", everything, "0.0.0.1:80/tcp", false, "this network"},
		{"open", everything, "224.0.0.251:5353/udp", false, "multicast"},
		{"open", everything, "255.255.255.255:67/udp", false, "reserved"},
		{"open", everything, "198.51.100.1:22/tcp", false, "host address"},
		{"open", everything, "198.51.100.255:22/udp", false, "host address"},
		{"open", everything, inst.Pool().Addr().Next().String() + ":80/tcp", false, "another sandbox"},
	} {
		p, err := compile(rules(t, c.mode, c.rules...))
		if err != nil {
			t.Fatal(err)
		}
		s := &sandbox{}
		s.policy.Store(p)
		target, proto, _ := strings.Cut(c.flow, "/")
		dst := netip.MustParseAddrPort(target)
		allow, why := e.decide(s, flow{dst: dst.Addr(), port: dst.Port(), proto: protocols[proto]})
		if allow != c.allow || why.text != c.why {
			t.Errorf("%s %v: %s: %v, %q; want %v, %q", c.mode, c.rules, c.flow, allow, why.text, c.allow, c.why)
		}
	}
}

// TestVerdictMarks: a flow to the resolver is not one that a policy has allowed, and gets
// another mark.
func TestVerdictMarks(t *testing.T) {
	e := &Engine{
		cfg:    Config{Instance: inst, Pool: inst.Pool(), MaxOpenFlows: 9, MaxFlows: 9 + dnsInFlight},
		byAddr: map[netip.Addr]*sandbox{},
	}
	e.hosts.Store(&map[netip.Addr]bool{})
	e.ledger = newLedger(e.cfg, nil)
	for i, c := range []struct {
		network record.Network
		port    uint16
		want    uint32
	}{
		{rules(t, "none"), 53, markResolve},
		{rules(t, "open"), 53, markResolve},
		{rules(t, "none"), 80, markDeny},
		{rules(t, "open"), 80, markAllow},
	} {
		p, err := compile(c.network)
		if err != nil {
			t.Fatal(err)
		}
		s := &sandbox{id: strconv.Itoa(i), addr: addr(i)}
		s.policy.Store(p)
		e.byAddr[s.addr] = s
		for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			packet := make([]byte, 24)
			packet[0], packet[9] = 0x45, proto
			copy(packet[12:], s.addr.AsSlice())
			copy(packet[16:], []byte{8, 8, 8, 8})
			binary.BigEndian.PutUint16(packet[22:], c.port)
			if got := e.verdict(packet); got != c.want {
				t.Errorf("sandbox %d, %s to port %d: mark %#x, want %#x", i, protoName(proto), c.port, got, c.want)
			}
		}
	}
}

// TestFirstMatch compares decide with the sentence that defines it, on random
// policies in a small space where rules overlap.
func TestFirstMatch(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	bases := []string{"11.0.0.0", "10.0.0.0", "8.0.0.0"}
	addr := func() netip.Addr {
		a := netip.MustParseAddr(bases[rnd.IntN(len(bases))]).As4()
		a[3] = byte(rnd.IntN(16))
		return netip.AddrFrom4(a)
	}
	protos := []string{"", "tcp", "udp", "icmp"}
	for range 2000 {
		n := record.Network{Mode: []record.NetworkMode{"rules", "open"}[rnd.IntN(2)]}
		for range rnd.IntN(8) {
			r := record.Rule{Allow: rnd.IntN(2) == 0, Proto: protos[rnd.IntN(4)]}
			r.Prefix = netip.PrefixFrom(addr(), []int{0, 5, 7, 8, 24, 29, 32}[rnd.IntN(7)]).Masked()
			if r.Proto != "icmp" && rnd.IntN(2) == 0 {
				first := uint16(1 + rnd.IntN(4))
				r.Ports = [2]uint16{first, first + uint16(rnd.IntN(3))}
			}
			n.Rules = append(n.Rules, r)
		}
		p, err := compile(n)
		if err != nil {
			t.Fatal(err)
		}
		for range 50 {
			f := flow{dst: addr(), proto: protocols[protos[1+rnd.IntN(3)]]}
			if f.proto != unix.IPPROTO_ICMP {
				f.port = uint16(1 + rnd.IntN(6))
			}
			if got, why := p.decide(f); got != byTheBook(n, f) {
				t.Fatalf("%v: %v: %v (%s)", n, f, got, why.text)
			}
		}
	}
}

func byTheBook(n record.Network, f flow) bool {
	inTen := netip.MustParsePrefix("10.0.0.0/8").Contains(f.dst)
	for _, r := range n.Rules {
		if !r.Prefix.Contains(f.dst) || r.Proto != "" && protocols[r.Proto] != f.proto {
			continue
		}
		if r.Ports[0] != 0 && (f.proto == unix.IPPROTO_ICMP || f.port < r.Ports[0] || f.port > r.Ports[1]) {
			continue
		}
		if r.Allow && inTen && r.Prefix.Bits() < 8 {
			continue // does not name the private range
		}
		return r.Allow
	}
	return n.Mode == record.NetworkOpen && !inTen
}

func TestCompileRefuses(t *testing.T) {
	ok := netip.MustParsePrefix("1.2.3.4/32")
	for _, n := range []record.Network{
		{},
		{Mode: "bridge"},
		{Mode: "rules", Rules: []record.Rule{{}}},
		{Mode: "rules", Rules: []record.Rule{{Prefix: netip.MustParsePrefix("::/0")}}},
		{Mode: "rules", Rules: []record.Rule{{Prefix: ok, Proto: "sctp"}}},
		{Mode: "rules", Rules: []record.Rule{{Prefix: ok, Ports: [2]uint16{2, 1}}}},
		{Mode: "rules", Rules: []record.Rule{{Prefix: ok, Ports: [2]uint16{0, 1}}}},
		{Mode: "rules", Rules: make([]record.Rule, maxRules+1)},
	} {
		if _, err := compile(n); errs.CodeOf(err) == errs.Internal {
			t.Errorf("%.60s: %v", fmt.Sprint(n), err)
		}
	}
}
