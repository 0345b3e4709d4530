package e2e_test

import (
	"fmt"
	"strings"
	"testing"
)

// dial tries flows from inside: "tcp ADDR PORT", "udp ADDR PORT", "name NAME".
// A refusal that is slow is tried up to five times, and the quickest counts: a busy
// host delays one or another, and what is dropped instead is late each time.
const dial = `
import errno, json, socket, sys, time
def tcp(addr, port):
    with socket.create_connection((addr, int(port)), 8) as c:
        c.sendall(b"hello")
        return "ok" if c.recv(5) == b"hello" else "no echo"
def udp(addr, port):
    c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    c.settimeout(3)
    c.connect((addr, int(port)))
    c.send(b"hello")
    return "ok" if c.recv(5) == b"hello" else "no echo"
def name(n, *_):
    return socket.gethostbyname(n)
def dial(f):
    start = time.monotonic()
    try: r = globals()[f[0]](*f[1:])
    except socket.gaierror as e: r = "gai " + str(e.errno)
    except TimeoutError: r = "timeout"
    except OSError as e: r = errno.errorcode.get(e.errno, str(e))
    return r, (time.monotonic() - start) * 1000
out = {}
for a in sys.argv[1:]:
    r, ms = dial(a.split())
    for _ in range(4):
        if r != "ECONNREFUSED" or ms <= 100: break
        time.sleep(1) # the kernel sends an address six ICMP errors at once, and one each second
        again, soon = dial(a.split())
        r, ms = again, min(ms, soon)
    out[a] = {"Result": r, "MS": ms}
print(json.dumps(out))
`

type dialed map[string]struct {
	Result string
	MS     float64
}

func (l *lab) dial(id string, flows ...string) (d dialed) {
	l.Helper()
	l.python(id, &d, dial, flows...)
	return d
}

// wantFlows checks the fate of each flow. A denial must come within a tenth of
// a second: a program that waits for its timeout is a program that hangs.
func (l *lab) wantFlows(d dialed, want map[string]string) {
	l.Helper()
	for flow, w := range want {
		got, ok := d[flow]
		switch {
		case !ok:
			l.Errorf("%s was not tried", flow)
		case got.Result != w:
			l.Errorf("%s: %s after %.0f ms, want %s", flow, got.Result, got.MS, w)
		case w == refusedFlow && got.MS > 100:
			l.Errorf("%s was refused after %.0f ms, which is not at once", flow, got.MS)
		}
	}
}

const refusedFlow = "ECONNREFUSED"

func keys(m map[string]string) (all []string) {
	for k := range m {
		all = append(all, k)
	}
	return all
}

// tellNetworkDenied: without a rule nothing opens, and the answer comes at once
// and alike under both runtimes (docs/design/network.md, "What does a guest see
// when it is refused?").
func tellNetworkDenied(t *testing.T, l *lab) {
	for _, mode := range []string{"rules", "none"} {
		id := l.make("python", "--network", mode)
		want := map[string]string{
			"tcp " + outsideAddr + " 443": refusedFlow, "udp " + outsideAddr + " 7": refusedFlow,
			"tcp " + outsidePrivate + " 80": refusedFlow, "tcp 169.254.169.254 80": refusedFlow,
			"tcp " + outsideHost + " 22": refusedFlow, "tcp 198.51.100.7 80": refusedFlow,
		}
		l.wantFlows(l.dial(id, keys(want)...), want)
	}
}

// tellNetworkRules: exactly what a rule names opens.
func tellNetworkRules(t *testing.T, l *lab) {
	id := l.make("python", "--allow", "203.0.113.0/24:443", "--allow", outsideAddr+":7/udp", "--allow", outsidePrivate+":80/tcp")
	want := map[string]string{
		"tcp " + outsideAddr + " 443": "ok", "tcp " + outsideOther + " 443": "ok",
		"tcp " + outsideAddr + " 80": refusedFlow,
		"udp " + outsideAddr + " 7":  "ok", "udp " + outsideOther + " 7": refusedFlow,
		"tcp " + outsidePrivate + " 80": "ok", "tcp " + outsidePrivate + " 443": refusedFlow, // a private range, because it is named
		"tcp " + outsideHost + " 443": refusedFlow, // the host, even inside an allowed range
	}
	l.wantFlows(l.dial(id, keys(want)...), want)
	l.wants(l.ctl("create", "base", "--allow", "example..com:443"), 125, "example..com")
	l.wants(l.ctl("create", "base", "--allow", "2001:db8::/32"), 125, "IPv6")
	l.wants(l.ctl("create", "base", "--allow", "203.0.113.0/24:0"), 125, "203.0.113.0/24:0")
	l.wants(l.ctl("create", "base", "--allow", outsideHost+":22"), 125, "never reaches its host")
	l.wants(l.ctl("egress", "patch", "--allow", outsideHost, id), 125, "never reaches its host")
}

// tellNetworkOpen: the public world, and nothing of the host and its other guests.
func tellNetworkOpen(t *testing.T, l *lab) {
	id, other := l.make("python", "--network", "open"), l.make("base", "--network", "open")
	neighbour := l.inspect(other).Host["address"]
	gateway := strings.TrimSpace(l.ok("exec", id, "--", "sed", "-n", "s/^nameserver //p", "/etc/resolv.conf"))
	want := map[string]string{
		"tcp " + outsideAddr + " 80": "ok", "udp " + outsideAddr + " 7": "ok",
		"tcp " + outsidePrivate + " 80": refusedFlow, // private ranges need a rule
		"tcp " + outsideHost + " 22":    refusedFlow, // the host
		"tcp " + gateway + " 22":        refusedFlow, // the host by the guest's gateway
		"tcp 169.254.169.254 80":        refusedFlow, // metadata service
		"tcp " + neighbour + " 44772":   refusedFlow, // another sandbox's agent
		"udp " + neighbour + " 7":       refusedFlow,
		"name world.example":            outsideAnswer, // forwarded by the gateway
		"tcp world.example 80":          "ok",
	}
	l.wantFlows(l.dial(id, keys(want)...), want)
	if out := l.ok("exec", id, "--", "python3", "-c", ipv6); out != "[]\n" {
		t.Errorf("IPv6 addresses: %s", out)
	}
	if u := l.usage(id); u.TxBytes == 0 || u.RxBytes == 0 {
		t.Errorf("no traffic was counted: %+v", u)
	}

	// A sandbox that is not open is told at once that it may not ask.
	id = l.make("python")
	d := l.dial(id, "name world.example")
	if got := d["name world.example"]; got.Result != "gai -2" || got.MS > 1000 { // EAI_NONAME: nothing tries again
		t.Errorf("DNS of a closed sandbox: %+v", got)
	}
	if out := l.ok("exec", id, "--", "python3", "-c", fmt.Sprintf(askDNS, gateway)); out != "3\n" { // NXDOMAIN
		t.Errorf("the gateway answers a closed sandbox with code %s", out)
	}
}

// ipv6 prints addresses other than loopback (docs/design/network.md, "Why is IPv6
// blocked?").
const ipv6 = `
import os
p = "/proc/net/if_inet6"
print([l for l in (open(p).read().splitlines() if os.path.exists(p) else []) if l.split()[-1] != "lo"])
`

// askDNS sends one question and prints the response code.
const askDNS = `
import socket
c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
c.settimeout(3)
c.sendto(b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x05world\x07example\x00\x00\x01\x00\x01", (%q, 53))
print(c.recv(512)[3] & 15)
`
