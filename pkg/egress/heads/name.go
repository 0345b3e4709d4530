package heads

import (
	"net/netip"
	"strings"
)

// PlainName is the domain name s in normal form: lower case, without the last dot. It is ""
// if s is none: an address, empty, or what no DNS name is. A name that is not ASCII stands
// in TLS and HTTP as DNS has it ("xn--…").
func PlainName(s string) string {
	s = strings.ToLower(strings.TrimSuffix(s, "."))
	if len(s) == 0 || len(s) > 253 {
		return ""
	}
	if _, err := netip.ParseAddr(s); err == nil {
		return ""
	}
	last := ""
	for label := range strings.SplitSeq(s, ".") {
		if len(label) == 0 || len(label) > 63 {
			return ""
		}
		for _, c := range []byte(label) {
			if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' || c == '_') {
				return ""
			}
		}
		last = label
	}
	// "127.1", "0x7f.0.0.0x1": some programs take a name whose last label is a number for
	// an address.
	if strings.Trim(last, "0123456789") == "" || strings.HasPrefix(last, "0x") {
		return ""
	}
	return s
}

// HostName is the name in the header Host, or in the authority of a URI.
func HostName(host string) string {
	if i := strings.LastIndexByte(host, ':'); i >= 0 && strings.Trim(host[i+1:], "0123456789") == "" {
		host = host[:i]
	}
	return PlainName(host)
}
