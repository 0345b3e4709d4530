package names

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// served are the types that a guest may ask for. The others can only carry data.
var served = []uint16{
	dns.TypeA, dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeCNAME, dns.TypeMX, dns.TypeNS, dns.TypeSOA, dns.TypePTR, dns.TypeTXT,
	dns.TypeSRV, dns.TypeCAA, dns.TypeNAPTR, dns.TypeDS, dns.TypeDNSKEY, dns.TypeTLSA, dns.TypeSSHFP,
}

// Served reports whether guests may ask for the type.
func Served(typ uint16) bool { return slices.Contains(served, typ) }

// Text reports whether the type is one that carries any text.
func Text(typ uint16) bool { return typ == dns.TypeTXT }

// Pointed is the address whose names a question asks for: 203.0.113.7 for PTR of
// 7.113.0.203.in-addr.arpa.
func Pointed(typ uint16, name string) (a netip.Addr, ok bool) {
	name, ok = strings.CutSuffix(name, ".in-addr.arpa")
	if !ok || typ != dns.TypePTR {
		return a, false
	}
	labels := strings.Split(name, ".")
	slices.Reverse(labels)
	a, err := netip.ParseAddr(strings.Join(labels, "."))
	return a, err == nil && a.Is4()
}

// TypeName is the name of a type, as in "AAAA".
func TypeName(typ uint16) string { return dns.Type(typ).String() }

// RcodeName is the name of a code of an answer, as in "NXDOMAIN".
func RcodeName(rcode uint8) string { return dns.RcodeToString[int(rcode)] }
