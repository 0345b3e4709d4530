package attacks_test

import "github.com/sandboxd/sandboxd/internal/weak"

// answered is what the resolver says if it asks another: test/internet has no such name.
var answered = words{"NXDOMAIN", "ok"}

// quiet is what a guest sees of a packet that is dropped, or that its kernel does not send.
var quiet = words{"timeout", "ENETUNREACH", "EHOSTUNREACH", "EACCES"}

// networkAttacks go out from a sandbox that may not: nothing is allowed to it.
var networkAttacks = []attack{
	{
		name: "connect to the Internet", wall: "the network policy", run: []string{"connect", "OTHER:80"},
		held: words{"ECONNREFUSED"}, runc: without(weak.Policy), runsc: without(weak.Policy),
	},
	{
		name: "the metadata service", wall: "hard blocks in Go and in the chains", run: []string{"connect", "169.254.169.254:80"},
		held: words{"ECONNREFUSED"}, runc: without(weak.Policy, weak.Chains), runsc: without(weak.Policy, weak.Chains),
	},
	{
		name: "another sandbox", wall: "hard blocks in Go, chains, lock", run: []string{"connect", "NEIGHBOUR:7000"},
		held: words{"ECONNREFUSED"}, runc: without(weak.Chains), runsc: without(weak.Chains),
	},
	{
		name: "a service of the host", wall: "chains, lock", run: []string{"connect", "GATEWAY:LISTENER"},
		held: words{"ECONNREFUSED"}, runc: without(weak.Chains), runsc: without(weak.Chains),
	},
	{
		name: "the resolver's own port", wall: "chains, lock", run: []string{"connect", "GATEWAY:15353"},
		held: words{"ECONNREFUSED"}, runc: without(weak.Chains), runsc: without(weak.Chains),
	},
	{
		name: "a published port of another sandbox, by an address of the host", wall: "chains, lock",
		run: []string{"connect", "UPLINK:PUBLISHED"}, held: words{"ECONNREFUSED"},
		runc: without(weak.Chains), runsc: without(weak.Chains),
	},
	{
		name: "a broadcast to the host", wall: "the table raw, hard blocks, chains", run: []string{"shout", "255.255.255.255:DATAGRAMS"},
		held: quiet, runc: without(weak.Raw, weak.Policy, weak.Chains), runsc: without(weak.Raw, weak.Policy, weak.Chains),
	},
	{
		name: "a multicast to all hosts", wall: "the table raw, hard blocks, chains", run: []string{"shout", "224.0.0.1:DATAGRAMS"},
		held: quiet, runc: without(weak.Raw, weak.Policy, weak.Chains), runsc: without(weak.Raw, weak.Policy, weak.Chains),
	},
	{
		name: "the metadata service, by a socket of IPv6", wall: "hard blocks in Go and in the chains",
		run: []string{"mapped", "169.254.169.254:80"}, held: words{"ECONNREFUSED", "EAFNOSUPPORT"},
		runc: without(weak.Policy, weak.Chains), runsc: without(weak.Policy, weak.Chains),
	},
	attack{
		name: "a forged mark", wall: "no CAP_NET_ADMIN; marks do not cross namespaces, and the chains clear them",
		run: []string{"marked", "NEIGHBOUR:7000"}, held: words{"EPERM", "ECONNREFUSED"},
	}.both(unproven("without the chains the neighbour is open with and without a mark; pkg/egress TestGolden has the rule that clears it")),
	{
		name: "a packet in fragments", wall: "conntrack puts them together, and the policy sees the whole",
		run: []string{"datagram", "OTHER:443", "4000"}, held: words{"ECONNREFUSED"},
		runc: without(weak.Policy), runsc: without(weak.Policy),
	},
	crafted("a packet with another's address", "spoof", "NEIGHBOUR", "OTHER:443"),
	crafted("a packet without a SYN", "bare", "OTHER:80"),
	crafted("an answer of ARP with another's address", "arp", "NEIGHBOUR"),
	{
		name: "data in names", wall: "the resolver refuses where the network is not open",
		run:  []string{"dns", "GATEWAY:53", "secret.attack.invalid"},
		held: words{"denied"}, got: answered, runc: without(weak.Resolver), runsc: without(weak.Resolver),
	},
	{
		name: "data in names, by another resolver", wall: "port 53 is redirected, to whatever address",
		run: []string{"dns", "198.51.100.53:53", "secret.attack.invalid"}, held: words{"denied"}, got: answered,
		runc: without(weak.Resolver), runsc: without(weak.Resolver),
	},
	{
		name: "IPv6", wall: "disable_ipv6, two rules, the lock", run: []string{"connect", "[2001:db8::1]:80"},
		held: refused.and("ENETUNREACH", "EADDRNOTAVAIL", "EAFNOSUPPORT", "EHOSTUNREACH"),
		runc: unproven("a test host has no IPv6 to reach"), runsc: unproven("a test host has no IPv6 to reach"),
	},
	{
		name: "queries", wall: "queries of a sandbox are counted", run: []string{"queries", "GATEWAY:53", "1500"}, own: nothing,
		held: words{"dropped"}, runc: unproven("pkg/egress measures its rates"), runsc: unproven("pkg/egress measures its rates"),
	},
	{
		name: "connections to many ports", wall: "flows of a sandbox are counted, refused ones make no entry of conntrack",
		run: []string{"connects", "203.0.113.9", "10000"}, own: nothing,
		// It may try. What counts is that all others are unharmed, and that the table of the
		// host does not fill: see unharmed.
		held: words{"ok", "ECONNREFUSED", "EAGAIN"}, runc: unproven("pkg/egress measures the ledger of flows"),
		runsc: unproven("pkg/egress measures the ledger of flows"),
	},
}

// crafted sends a packet that only a raw socket can send. Without the walls it leaves the
// sandbox; what the chains do with it then, pkg/egress TestPackets and pkg/netns TestARP see.
func crafted(name string, run ...string) attack {
	return attack{
		name: name, wall: "no CAP_NET_RAW; behind it the table raw, the Engine and permanent neighbours", run: run,
		held: refused.and("EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT"), runc: without(weak.Seccomp, weak.Caps),
		runsc: unproven("the sentry refuses raw sockets whatever the packet; the sockets of raw IP and AF_PACKET show it"),
	}
}
