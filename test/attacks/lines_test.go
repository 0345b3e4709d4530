package attacks_test

import (
	"slices"
	"strings"
	"testing"
)

// A line is one way around the network's rules, with the attacks that try it. An attack that
// ends with * stands for all whose names begin so.
type line struct {
	way     string
	attacks []string
	// deeper are tests that try it with rights which no guest has, or say why it is not tried
	// here.
	deeper string
}

// lines are the ways that the design of the network had in mind. A guest without
// CAP_NET_RAW cannot send the packets of some of them: those are sent by tests of packages,
// with what the guest lacks.
var lines = []line{
	{"a foreign source address", []string{"a packet with another's address", "socket of raw IP"}, "pkg/egress TestPackets, TestSpoof"},
	{"raw sockets, packets without a SYN", []string{"a packet without a SYN", "socket of raw IP"}, "pkg/egress TestPackets"},
	{"the metadata service, by IPv4 in IPv6, a redirect, another spelling", []string{"the metadata service*"}, ""},
	{"another sandbox", []string{"another sandbox"}, "pkg/egress TestReach"},
	{"services of the host, by any of its addresses", []string{
		"a service of the host*", "the resolver's own port", "the proxy's own port",
	}, "pkg/egress TestReach"},
	{"hairpin", []string{"a published port of another sandbox, by an address of the host"}, ""},
	{"the API's own proxy to ports", []string{"another host by *", "a port that is none"}, ""},
	{"DNS: names", []string{"a denied name*", "data in names*", "data in reverse names", "text of a name below a wildcard"}, ""},
	{"DNS: addresses (rebinding)", []string{"an allowed name with *"}, "pkg/egress TestDNS"},
	{"DNS: servers that lie, are slow, say much", []string{
		"an answer about another name", "a huge answer", "names of a slow server", "many names of a slow server at once",
	}, "pkg/egress TestUpstreamBudget"},
	{"DNS over HTTPS and over TLS", []string{"what DNS over HTTPS answers", "DNS over TLS at an allowed address"}, ""},
	{"QUIC", []string{"QUIC to an allowed address"}, ""},
	{"names of TLS", []string{
		"another name on an allowed address", "another name on an allowed address, at a port of its own",
		"another name on an allowed address, behind a warning of TLS", "no name in the handshake",
		"an allowed name at another address", "HTTP/2 to another name",
		"an address that no allowed name has", "a private address by an allowed name",
	}, "pkg/egress/heads TestTLSDenied, TestSecondHello"},
	{"names of HTTP, requests in requests", []string{
		"another name on an allowed address, in clear text", "an allowed name at another address, in clear text",
		"a second name on a kept connection", "two requests at once", "a name in the target of a request", "a request without a name",
		"a request within a request", "a WebSocket to another name", "HTTP/2 in clear text",
	}, "pkg/egress/heads TestHTTP"},
	{"domain fronting, streams of HTTP/2", []string{"a name behind an allowed name*"}, "there is no wall"},
	{"IPv6", []string{"IPv6"}, "pkg/egress TestReach, TestOperator6"},
	{"fragments", []string{"a packet in fragments"}, "pkg/egress TestPackets"},
	{"ICMP", []string{"an echo of ICMP"}, ""},
	{"ARP", []string{"an answer of ARP with another's address", "socket of AF_PACKET"}, "pkg/netns TestARP"},
	{"multicast, broadcast", []string{"a broadcast to the host", "a multicast to all hosts"}, "pkg/egress TestPackets"},
	{"floods: flows, queries, denials", []string{
		"connections to many ports", "queries", "a flood of denials*", "the log",
	}, "pkg/egress TestFlowLimits, TestFlood, TestRates"},
	{"modules of the kernel that read FTP, SIP, IRC", nil, "pkg/egress TestHelpers: it takes a rule of the host that guests cannot add"},
	{"credentials: another host or server", []string{
		"a credential for *", "a credential that follows a redirect*",
	}, "pkg/egress TestOwnChildLies"},
	{"credentials: another place in a request", []string{
		"a placeholder *", "a credential by another path", "a credential by another method", "a credential in clear text",
	}, "pkg/egress/vault/inject TestDrawn"},
	{"credentials: requests within requests, two readings", []string{
		"a request that a rule denies*", "a request within *", "a request behind *", "a request in a WebSocket", "a path *",
		"another method or path by a header", "TRACE", "CONNECT in a decrypted connection", "a change to HTTP/2 in clear text",
	}, "pkg/egress/terminate TestSmuggling, TestFrames"},
	{"credentials: answers", []string{"an echo of a credential*"}, ""},
	{"credentials: authorities", []string{"the authority of another sandbox", "a guest that does not trust the authority"}, ""},
	{"credentials: in the sandbox, the daemon, its files and its API", []string{
		"a credential in the *", "a credential by the API*",
	}, "pkg/cgroups TestConformance: swap"},
	{"forged marks", []string{"a forged mark"}, ""},
	{"no rule", []string{"connect to the Internet"}, ""},
}

// TestLines: each way has an attack or says where it is tried, and each attack of the network
// belongs to a way.
func TestLines(t *testing.T) {
	tried := map[string]bool{}
	for _, l := range lines {
		if len(l.attacks) == 0 && l.deeper == "" {
			t.Errorf("%s: nothing tries it", l.way)
		}
		for _, name := range l.attacks {
			prefix, many := strings.CutSuffix(name, "*")
			found := false
			for _, a := range all() {
				if a.name == name || many && strings.HasPrefix(a.name, prefix) {
					tried[a.name], found = true, true
				}
			}
			if !found {
				t.Errorf("%s: there is no attack %q", l.way, name)
			}
		}
	}
	for _, a := range slices.Concat(networkAttacks, nameAttacks, vaultAttacks, vaultDoors) {
		if !tried[a.name] {
			t.Errorf("attack %q belongs to no way of lines", a.name)
		}
	}
}
