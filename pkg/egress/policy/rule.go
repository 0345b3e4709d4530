package policy

import (
	"bytes"
	"encoding/json"
	"io"
	"net/netip"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// ParseRule reads an allow rule as people write it:
//
//	TARGET[:PORT[-PORT]][/PROTO]      pypi.org:443   *.pypi.org   203.0.113.0/24:443   1.2.3.4:123/udp
//	METHOD NAME[:PORT[-PORT]][/PATH]  GET api.example.com/v1/*   * api.example.com:8443/v1/*
//
// The second form is a rule about requests (record.Requests): METHOD is one method or *, PATH one
// pattern of paths (paths.Pattern). TARGET is a name, an address or a CIDR. An address has one
// spelling only: no leading zeros, no host bits, no IPv6. A name comes back in its normal form.
// The error says what to write instead.
func ParseRule(s string) (record.Rule, error) {
	r := record.Rule{Allow: true}
	bad := func(format string, args ...any) (record.Rule, error) {
		return record.Rule{}, errs.New(errs.Invalid, "network rule %q: "+format+"; write TARGET[:port[-port]][/proto], "+
			"such as pypi.org:443 or 203.0.113.0/24:443/tcp", append([]any{short(s)}, args...)...)
	}
	if method, rest, ok := strings.Cut(s, " "); ok && (method == "*" || isMethod(method)) {
		return parseRequests(s, method, strings.TrimSpace(rest))
	}
	if strings.Contains(s, "://") {
		return bad("a URL is no target: write the host that it names")
	}
	rest := s
	// Text after the last slash is a protocol unless it starts with a digit.
	if i := strings.LastIndexByte(rest, '/'); i >= 0 && (i+1 == len(rest) || !isDigit(rest[i+1])) {
		r.Proto, rest = rest[i+1:], rest[:i]
		if _, ok := protocols[r.Proto]; !ok {
			return bad("protocol %q is not tcp, udp or icmp", r.Proto)
		}
	}
	if strings.Count(rest, ":") > 1 || strings.ContainsAny(rest, "[]") {
		return record.Rule{}, errIPv6(s)
	}
	target, ports, hasPorts := strings.Cut(rest, ":")
	if hasPorts {
		if r.Proto == "icmp" {
			return bad("icmp has no ports")
		}
		first, last, isRange := strings.Cut(ports, "-")
		if !isRange {
			last = first
		}
		for i, p := range []string{first, last} {
			n, ok := parsePort(p)
			if !ok {
				return bad("port %q is not a number from 1 to 65535", p)
			}
			r.Ports[i] = n
		}
		if r.Ports[0] > r.Ports[1] {
			return bad("ports %s run backwards", ports)
		}
	}
	var err error
	if r.Prefix, r.Name, err = parseTarget(target); err != nil {
		return record.Rule{}, err
	}
	return r, nil
}

// parseRequests reads a rule about requests, s, without its method.
func parseRequests(s, method, rest string) (record.Rule, error) {
	host, path, hasPath := strings.Cut(rest, "/")
	r, err := ParseRule(host)
	if err != nil {
		return r, err
	}
	r.Requests = &record.Requests{}
	if method != "*" {
		r.Requests.Methods = []string{method}
	}
	if hasPath {
		r.Requests.Paths = []string{"/" + path}
	}
	if _, err := compileRequests(r.Requests); err != nil {
		return record.Rule{}, errs.New(errs.Invalid, "network rule %q: %s", short(s), err)
	}
	if r.Name == "" || r.Requests.Methods == nil && r.Requests.Paths == nil {
		return record.Rule{}, errs.New(errs.Invalid, "network rule %q: a rule about requests has a name, and a method or a path; write "+
			"METHOD NAME[:port[-port]][/path], such as GET api.example.com/v1/*", short(s))
	}
	return r, nil
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func parsePort(s string) (uint16, bool) {
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil && n > 0 && s[0] != '0'
}

// parseTarget reads an IPv4 address, a CIDR, or a name. netip takes neither octal nor hex,
// nor fewer than four numbers; other programs read these as other addresses, so they are
// no names either.
func parseTarget(s string) (netip.Prefix, string, error) {
	if n := strings.Count(s, ":"); n > 1 {
		return netip.Prefix{}, "", errIPv6(s)
	} else if n == 1 {
		return netip.Prefix{}, "", errs.New(errs.Invalid, "network rule for %q: a port is no part of a target; write it beside it, as "+
			"\"ports\": [443]", short(s))
	}
	if p, err := netip.ParsePrefix(s); err == nil {
		if p != p.Masked() {
			return netip.Prefix{}, "", errs.New(errs.Invalid, "network rule for %q: %s has bits set beyond its mask: use %s or %s", s, p,
				p.Masked(), p.Addr())
		}
		return p, "", nil
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), "", nil
	}
	name, err := NormalName(s)
	return netip.Prefix{}, name, err
}

// short is s, shortened for an error: a client may send any length.
func short(s string) string { return s[:min(len(s), 80)] }

func errIPv6(s string) error {
	return errs.New(errs.Unsupported, "network rule %q: IPv6 is blocked in this release; use an IPv4 address", short(s))
}

// networkPolicy is OpenSandbox's NetworkPolicy, with our fields ports, protocol and http
// added. Unknown fields are refused.
type networkPolicy struct {
	DefaultAction string `json:"defaultAction"`
	Egress        []struct {
		Action   string            `json:"action"`
		Target   string            `json:"target"`
		Ports    []json.RawMessage `json:"ports"`    // 443 or "8000-8100"; absent: all
		Protocol string            `json:"protocol"` // absent: all
		HTTP     *struct {         // absent: all that the target is sent
			Methods []string `json:"methods"` // absent: all
			Paths   []string `json:"paths"`   // absent: all
		} `json:"http"`
	} `json:"egress"`
}

// FromJSON reads an OpenSandbox networkPolicy. An absent defaultAction is
// deny, also in {}, as in OpenSandbox's code.
func FromJSON(data []byte) (record.Network, error) {
	var p networkPolicy
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		return record.Network{}, errs.Wrap(err, errs.Invalid, "networkPolicy is not {defaultAction, egress: [{action, target, ports, "+
			"protocol, http: {methods, paths}}]}: %s", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return record.Network{}, errs.New(errs.Invalid, "networkPolicy has data after its JSON object")
	}
	var n record.Network
	switch p.DefaultAction {
	case "", "deny":
		n.Mode = record.NetworkRules
	case "allow":
		n.Mode = record.NetworkOpen
	default:
		return record.Network{}, errs.New(errs.Invalid, "networkPolicy.defaultAction %q: want allow or deny", short(p.DefaultAction))
	}
	if len(p.Egress) > MaxRules {
		return record.Network{}, errs.New(errs.Invalid, "networkPolicy.egress has %d rules; at most %d are allowed", len(p.Egress),
			MaxRules)
	}
	for i, e := range p.Egress {
		if e.Action != "allow" && e.Action != "deny" {
			return record.Network{}, errs.New(errs.Invalid, "networkPolicy.egress[%d].action %q: want allow or deny", i, short(e.Action))
		}
		prefix, name, err := parseTarget(e.Target)
		if err != nil {
			return record.Network{}, errs.New(errs.CodeOf(err), "networkPolicy.egress[%d].target: %s", i, err.Error())
		}
		if e.Ports != nil && len(e.Ports) == 0 {
			return record.Network{}, errs.New(errs.Invalid, "networkPolicy.egress[%d].ports is empty; leave it out for all ports", i)
		}
		r := record.Rule{Allow: e.Action == "allow", Name: name, Prefix: prefix, Proto: e.Protocol}
		if q := e.HTTP; q != nil {
			r.Requests = &record.Requests{Methods: q.Methods, Paths: q.Paths}
			if err := checkRequests(r.Requests); err != nil {
				return record.Network{}, errs.New(errs.Invalid, "networkPolicy.egress[%d].http: %s", i, err)
			}
		}
		if e.Ports == nil {
			n.Rules = append(n.Rules, r)
		}
		for _, raw := range e.Ports {
			if r.Ports, err = parsePorts(raw); err != nil {
				return record.Network{}, errs.Wrap(err, errs.Invalid, "networkPolicy.egress[%d].ports: %s is neither a port nor a range "+
					"such as \"8000-8100\"", i, raw)
			}
			n.Rules = append(n.Rules, r)
		}
	}
	_, err := Compile(Host{}, n)
	return n, err
}

// checkRequests checks what a client sent. It refuses empty lists: a client that means none of
// the methods would get all of them.
func checkRequests(q *record.Requests) error {
	switch {
	case q.Methods == nil && q.Paths == nil:
		return errs.New(errs.Invalid, "it has neither methods nor paths; leave http out for everything that the target is sent")
	case q.Methods != nil && len(q.Methods) == 0:
		return errs.New(errs.Invalid, "methods is empty; leave it out for all methods")
	case q.Paths != nil && len(q.Paths) == 0:
		return errs.New(errs.Invalid, "paths is empty; leave it out for all paths")
	}
	_, err := compileRequests(q)
	return err
}

func parsePorts(raw json.RawMessage) (ports [2]uint16, err error) {
	text := string(raw)
	if raw[0] == '"' {
		if err := json.Unmarshal(raw, &text); err != nil {
			return ports, err
		}
	}
	first, last, isRange := strings.Cut(text, "-")
	if !isRange {
		last = first
	}
	for i, s := range []string{first, last} {
		n, ok := parsePort(s)
		if !ok {
			return ports, strconv.ErrSyntax
		}
		ports[i] = n
	}
	return ports, nil
}
