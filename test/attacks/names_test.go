package attacks_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/daemontest"
	"github.com/sandboxd/sandboxd/internal/hosttest"
	"github.com/sandboxd/sandboxd/internal/weak"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/test/internet"
)

// allowedNames are what sandboxes of attacks with `named` may reach. Nothing else is.
var allowedNames = []string{
	"allowed.example",                    // at Shared
	"*.wild.example",                     // at Shared, whatever the name
	internet.Resolver,                    // at Shared: DNS over HTTPS
	"rebind.example", "metadata.example", // whose owner says that they are inside
	"uplink.example", "poison.example",
	"slow.example", "*.slow.example", "huge.example",
	"beside.example", "alias.example", "loopback.example", "moves.example",
}

// newInternet makes an Internet with the names of the attacks: allowedNames,
// denied.example at Shared, and elsewhere.example, which is denied as well, at Other.
func newInternet(t *testing.T) *internet.Internet {
	t.Helper()
	in := internet.New(t, daemontest.Instance.Pool())
	at := func(all ...netip.Addr) internet.Record { return internet.Record{A: all} }
	in.Set("allowed.example", internet.Record{A: []netip.Addr{internet.Shared}, HTTPS: true})
	in.Set("*.wild.example", internet.Record{A: []netip.Addr{internet.Shared}, TXT: []string{"data"}})
	in.Set("elsewhere.example", at(internet.Other))
	in.Set("rebind.example", at(internet.Private))
	in.Set("beside.example", at(internet.Shared, internet.Private))
	in.Set("alias.example", internet.Record{CNAME: "rebind.example"})
	in.Set("loopback.example", at(netip.MustParseAddr("127.0.0.1")))
	in.Set("moves.example", internet.Record{A: []netip.Addr{internet.Shared}, Then: []netip.Addr{internet.Private}, TTL: 1})
	in.Set("metadata.example", at(internet.Metadata))
	in.Set("uplink.example", at(internet.Uplink))
	in.Set("poison.example", internet.Record{
		A: []netip.Addr{internet.Shared}, Also: map[string]netip.Addr{"elsewhere.example": internet.Other},
	})
	in.Set("*.slow.example", internet.Record{A: []netip.Addr{internet.Shared}, Delay: 20 * time.Second})
	var many []netip.Addr // an answer of 64 KB
	for i := range 3900 {
		many = append(many, netip.AddrFrom4([4]byte{198, 51, byte(100 + i>>8), byte(i)}))
	}
	in.Set("huge.example", at(many...))
	return in
}

// byName gives a sandbox the policy of allowedNames, after another change.
func byName(change func(*wire.CreateRequest)) func(*wire.CreateRequest) {
	return func(r *wire.CreateRequest) {
		if change != nil {
			change(r)
		}
		p := wire.NetworkPolicy{DefaultAction: "deny"}
		for _, name := range allowedNames {
			p.Egress = append(p.Egress, wire.NetworkRule{Action: "allow", Target: name})
		}
		p.Egress = append(p.Egress, wire.NetworkRule{Action: "allow", Target: "allowed.example", Ports: []any{8443}})
		r.NetworkPolicy, _ = json.Marshal(p) //nolint:errchkjson // of strings
	}
}

// both is one proof on both runtimes, for a row.
func (a attack) both(p *proof) attack {
	a.runc, a.runsc = p, p
	return a
}

// one is a request of HTTP/1 for a name.
func one(name string) string { return `GET / HTTP/1.1\r\nHost: ` + name + `\r\n\r\n` }

// stopped is how the proxy ends a connection whose name it does not let pass.
var stopped = words{"alert-49", "403", "ECONNREFUSED"}

const (
	wallHeads = "the proxy checks the name that a connection bears, and the address by the name"
	wallNames = "the resolver decides by the name"
)

// nameAttacks go around a policy that names hosts. What they go for is forwarded by the
// host, in test/internet.
var nameAttacks = []attack{
	// names in DNS
	attack{
		name: "a denied name", wall: wallNames, named: true, run: []string{"lookup", "udp", "GATEWAY:53", "denied.example"},
		held: words{"denied"},
	}.both(without(weak.Resolver)),
	attack{
		name: "a denied name, by TCP", wall: wallNames, named: true, run: []string{"lookup", "tcp", "GATEWAY:53", "denied.example"},
		held: words{"denied"},
	}.both(without(weak.Resolver)),
	attack{
		name: "a denied name, by its own server", wall: "port 53 is redirected, to whatever address", named: true,
		run: []string{"lookup", "udp", "DNS:53", "denied.example"}, held: words{"denied"},
	}.both(without(weak.Resolver)),
	attack{
		name: "an allowed name with an address inside", wall: "private addresses are taken out of answers", named: true,
		run: []string{"lookup", "udp", "GATEWAY:53", "rebind.example"}, held: words{"none", "SERVFAIL"},
	}.both(without(weak.Resolver)),
	attack{
		name: "an allowed name with an address inside, beside one outside", wall: "private addresses are taken out of answers",
		named: true, run: []string{"lookup", "udp", "GATEWAY:53", "beside.example", "PRIVATE"}, held: words{"other"},
	}.both(without(weak.Resolver)),
	attack{
		name: "an allowed name with an address inside, behind an alias", wall: "private addresses are taken out of answers",
		named: true, run: []string{"lookup", "udp", "GATEWAY:53", "alias.example", "PRIVATE"}, held: words{"other", "none", "SERVFAIL"},
	}.both(without(weak.Resolver)),
	attack{
		name: "an allowed name with an address of loopback", wall: "loopback addresses are taken out of answers", named: true,
		run: []string{"lookup", "udp", "GATEWAY:53", "loopback.example", "127.0.0.1"}, held: words{"none", "SERVFAIL"},
	}.both(without(weak.Resolver)),
	attack{
		name: "an allowed name with an address that moves inside", wall: "private addresses are taken out of answers", named: true,
		all: true, run: []string{"moved", "udp", "GATEWAY:53", "moves.example", "PRIVATE"}, held: words{"other", "none", "SERVFAIL"},
	}.both(without(weak.Resolver)),
	attack{
		name: "an allowed name with the address of the metadata service", wall: "private addresses are taken out of answers",
		named: true, run: []string{"lookup", "udp", "GATEWAY:53", "metadata.example"}, held: words{"none", "SERVFAIL"},
	}.both(without(weak.Resolver)),
	attack{
		name: "an allowed name with an address of the host", wall: "addresses of the host are taken out of answers", named: true,
		run: []string{"lookup", "udp", "GATEWAY:53", "uplink.example"}, held: words{"none", "SERVFAIL"},
	}.both(without(weak.Resolver)),
	attack{
		name: "an answer about another name", wall: "an address is leased to the name that was asked for, by its chain of aliases",
		named: true, run: []string{"resolved", "udp", "GATEWAY:53", "poison.example", fmt.Sprintf("OTHER:%d", internet.Speaks)},
		held: words{"ECONNREFUSED"},
	}.both(without(weak.Policy)),
	attack{
		name: "a huge answer", wall: "an answer loses the addresses after the 255th; leases have bounds", named: true, own: nothing,
		run: []string{"lookup", "tcp", "GATEWAY:53", "huge.example"}, held: words{"ok", "none", "SERVFAIL"},
	}.both(unproven("the message in which the child hands an answer on has no room for more than 255 addresses")),
	attack{
		name: "names of a slow server", wall: "queries in flight of a sandbox have a bound, and end", named: true, own: nothing,
		run: []string{"slow", "GATEWAY:53", "slow.example", "allowed.example", "300"}, held: words{"ok"},
	}.both(unproven("what counts is that other names and all others go on; pkg/egress tests the bounds")),
	attack{
		name: "many names of a slow server at once", wall: "queries in flight of a sandbox have a bound", named: true, own: nothing,
		all: true, run: []string{"at-once", "GATEWAY:53", "slow.example", "120"}, held: words{"limited"},
	}.both(without(weak.Resolver)),
	attack{
		name: "data in reverse names", wall: wallNames, named: true,
		run: []string{"dns", "GATEWAY:53", "secret.2.0.192.in-addr.arpa", "12"}, held: words{"denied"}, got: answered,
	}.both(without(weak.Resolver)),
	attack{
		name: "text of a name below a wildcard", wall: "a wildcard opens no types of text", named: true,
		run: []string{"dns", "GATEWAY:53", "a.wild.example", "16"}, held: words{"REFUSED"},
	}.both(without(weak.Resolver)),
	attack{
		name: "data in names below a wildcard", wall: "names below a wildcard carry so much in a minute", named: true, own: nothing,
		run: []string{"tunnel", "GATEWAY:53", "wild.example", "400"}, held: words{"limited"},
	}.both(without(weak.Resolver)),

	// names of connections
	attack{
		name: "another name on an allowed address", wall: wallHeads, named: true,
		run: []string{"https", "SHARED:443", "denied.example", "this is denied.example", one("denied.example")}, held: stopped,
	}.both(without(weak.Proxy)),
	attack{
		name: "another name on an allowed address, at a port of its own", wall: wallHeads, named: true,
		run: []string{
			"https-leased", "GATEWAY:53", "allowed.example",
			"SHARED:8443", "denied.example", "this is denied.example", one("denied.example"),
		}, held: stopped,
	}.both(without(weak.Proxy)),
	attack{
		name: "another name on an allowed address, behind a warning of TLS", wall: "what a server may read as TLS is read so", named: true,
		run: []string{
			"https-leased", "GATEWAY:53", "allowed.example",
			"SHARED:8443", "denied.example", "this is denied.example", one("denied.example"),
			"1503030002015a",
		},
		held: stopped.and("alert-50"),
	}.both(unproven("it cannot be taken down: what reads the beginning is one function; pkg/egress/heads TestFirst, FuzzBeginning")),
	attack{
		name: "another name on an allowed address, in clear text", wall: wallHeads, named: true,
		run: []string{"http", "SHARED:80", "this is denied.example", one("denied.example")}, held: stopped,
	}.both(without(weak.Proxy)),
	attack{
		name: "no name in the handshake", wall: wallHeads, named: true,
		run: []string{"https", "SHARED:443", "", "this is denied.example", one("denied.example")}, held: stopped,
	}.both(without(weak.Proxy)),
	attack{
		name: "an allowed name at another address", wall: wallHeads, named: true,
		run: []string{"https", "OTHER:443", "allowed.example", "this is elsewhere.example", one("elsewhere.example")}, held: stopped,
	}.both(without(weak.Proxy)),
	attack{
		name: "an allowed name at another address, in clear text", wall: wallHeads, named: true,
		run: []string{"http", "OTHER:80", "this is allowed.example", one("allowed.example")}, held: stopped,
	}.both(without(weak.Proxy)),
	attack{
		name: "a second name on a kept connection", wall: "each request of a connection is checked", named: true,
		run:  []string{"http", "SHARED:80", "this is denied.example", one("allowed.example") + "|" + one("denied.example")},
		held: stopped.and("421"),
	}.both(without(weak.Proxy)),
	attack{
		name: "two requests at once", wall: "each request of a connection is checked", named: true,
		run:  []string{"http", "SHARED:80", "this is denied.example", one("allowed.example") + one("denied.example")},
		held: stopped.and("421"),
	}.both(without(weak.Proxy)),
	attack{
		name: "a name in the target of a request", wall: "the target's name counts, and the Host says the same", named: true,
		run:  []string{"http", "SHARED:80", "this is denied.example", `GET http://denied.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n`},
		held: stopped.and("400", "421"),
	}.both(without(weak.Proxy)),
	attack{
		name: "a request without a name", wall: wallHeads, named: true,
		run: []string{"http", "SHARED:80", "this is", `GET / HTTP/1.0\r\n\r\n`}, held: stopped,
	}.both(without(weak.Proxy)),
	attack{
		name: "a request within a request", wall: "requests are parsed by net/http and written anew", named: true,
		run: []string{
			"http", "SHARED:80", "this is denied.example", `POST / HTTP/1.1\r\nHost: allowed.example\r\n` +
				`Content-Length: 61\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n` + one("denied.example"),
		}, held: stopped.and("400", "421"),
	}.both(without(weak.Proxy)),
	attack{
		name: "a WebSocket to another name", wall: wallHeads, named: true,
		run: []string{
			"http", "SHARED:80", "HTTP/1.1 101", `GET / HTTP/1.1\r\nHost: denied.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n` +
				`Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n`,
		}, held: stopped,
	}.both(without(weak.Proxy)),
	attack{
		name: "HTTP/2 in clear text", wall: "on port 80 passes what is HTTP/1", named: true,
		run: []string{"http2", "SHARED:80", "", "denied.example"}, held: words{"GOAWAY", "ended"},
	}.both(unproven("the proxy has no way to pass it on, also without its check")),
	attack{
		name: "HTTP/2 to another name", wall: wallHeads, named: true,
		run: []string{"http2", "SHARED:443", "denied.example", "denied.example"}, held: stopped,
	}.both(without(weak.Proxy)),
	attack{
		name: "what DNS over HTTPS answers", wall: "an address that the name does not have here is not dialled", named: true,
		run: []string{"doh", "SHARED:443", internet.Resolver, "elsewhere.example"}, held: stopped,
	}.both(without(weak.Proxy)),
	attack{
		name: "a name behind an allowed name", wall: "none: TLS hides it from all but the server (a limit that is documented)", named: true,
		run: []string{"https", "SHARED:443", "allowed.example", "this is denied.example", one("denied.example")}, held: words{"ok"},
	}.both(unproven("there is no wall")),
	attack{
		name: "a name behind an allowed name, by HTTP/2", wall: "none: TLS hides it from all but the server (a limit that is documented)",
		named: true, run: []string{"http2", "SHARED:443", "allowed.example", "denied.example"}, held: words{"ok"},
	}.both(unproven("there is no wall")),

	// beside names
	attack{
		name: "QUIC to an allowed address", wall: "a rule by name opens no UDP port 443", named: true,
		run: []string{"quic", "SHARED:443", "denied.example"}, held: words{"ECONNREFUSED"},
	}.both(without(weak.Policy)),
	attack{
		name: "DNS over TLS at an allowed address", wall: "a rule by name opens no port 853", named: true,
		run:  []string{"https", "SHARED:853", "allowed.example", "this is allowed.example", one("allowed.example")},
		held: words{"ECONNREFUSED"},
	}.both(without(weak.Policy)),
	attack{
		name: "an address that no allowed name has", wall: "the network policy", named: true,
		run: []string{"connect", fmt.Sprintf("OTHER:%d", internet.Speaks)}, held: words{"ECONNREFUSED"},
	}.both(without(weak.Policy)),
	attack{
		name: "a private address by an allowed name", wall: "a private range needs a rule that names it", named: true,
		run: []string{"http", "PRIVATE:80", "this is rebind.example", one("rebind.example")}, held: stopped,
	}.both(without(weak.Policy)),
	attack{
		name: "a service of the host by an allowed name", wall: "chains, lock", named: true,
		run: []string{"resolved", "udp", "GATEWAY:53", "uplink.example", "UPLINK:LISTENER"}, held: words{"ECONNREFUSED"},
	}.both(without(weak.Chains)),
	attack{
		name: "the proxy's own port", wall: "chains, lock", named: true, run: []string{"connect", "GATEWAY:15080"},
		held: words{"ECONNREFUSED"},
	}.both(without(weak.Chains)),
	attack{
		name: "the metadata service by a redirect", wall: "hard blocks in Go and in the chains", named: true,
		run:  []string{"follow", "SHARED:80", "http://allowed.example/to/169.254.169.254/", "this is 169.254.169.254"},
		held: words{"ECONNREFUSED"},
	}.both(without(weak.Policy, weak.Chains)),
	attack{
		name: "the metadata service by another spelling", wall: "hard blocks in Go and in the chains",
		run:  []string{"sh", "-c", "curl -s --max-time 5 http://0xa9fea9fe/ | grep -q this.is && echo ok || echo refused"},
		held: words{"refused"},
	}.both(without(weak.Policy, weak.Chains)),
	{
		name: "an echo of ICMP", wall: "the network policy; no CAP_NET_RAW", named: true, run: []string{"ping", "OTHER"},
		held: refused.and("ECONNREFUSED", "EHOSTUNREACH", "EAGAIN", "timeout"),
		runc: without(weak.Policy), runsc: without(weak.Policy),
	},

	// what it costs others
	floodOfDenials("a flood of denials", func(_ *testing.T, w *target) wire.Sandbox { return w.b }),
	floodOfDenials("a flood of denials, on gVisor", func(t *testing.T, w *target) wire.Sandbox { return w.create(t, "runsc", nil) }),
}

// floodOfDenials is refused more than the daemon remembers.
func floodOfDenials(name string, of func(*testing.T, *target) wire.Sandbox) attack {
	return attack{
		name: name, wall: "of the denials of a sandbox the last are kept", held: words{"bounded"}, got: words{"unbounded"},
		daemon: without(weak.Log), ask: func(t *testing.T, w *target) string {
			const kept = 64
			id := of(t, w).ID
			w.exec(t, id, 0, []string{"/attack", "connects", internet.Other.String(), "2000"})
			limit := time.Now().Add(hosttest.Patient(10 * time.Second))
			for {
				var all wire.Denials
				a := w.ask(t, "GET", "/v1/sandboxes/"+id+"/network/denials", daemontest.Key, nil)
				if a.status != 200 {
					return a.word()
				}
				fromJSON(t, []byte(a.body), &all)
				switch {
				case len(all.Items) > kept:
					return "unbounded"
				case all.Total > kept:
					return "bounded"
				case time.Now().After(limit):
					return fmt.Sprintf("%d-denials", all.Total)
				}
				time.Sleep(10 * time.Millisecond) // nobody tells
			}
		},
	}
}
